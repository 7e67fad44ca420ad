"""The invariance matrix: one text served in many ways, compared bit by bit, under a tier and with it off.

`axes` says what is varied, `serve` serves a text in one way, `matrix` runs the experiment, `worker` is its fresh process,
`entry` checks what is asked, `certificate` holds the result and `page` shows it.
"""

from detlab.verify.certificate import AxisResult, Certificate, Mismatch
from detlab.verify.entry import verify

__all__ = ["AxisResult", "Certificate", "Mismatch", "verify"]
