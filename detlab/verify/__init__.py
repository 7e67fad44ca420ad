"""The invariance matrix: one text served in many ways, compared bit by bit, under a tier and with it off.

`axes` says what is varied, `serve` serves a text in one way, `parts` with its sums cut in parts, `apart` in a fresh process,
whose main is `worker`; `matrix` runs the experiment, `entry` checks what is asked, `certificate` holds the result and `page`
shows it; `recheck` runs it again elsewhere.
"""

from detlab.verify.certificate import AxisResult, Certificate, Mismatch
from detlab.verify.entry import verify
from detlab.verify.recheck import Recheck, recheck

__all__ = ["AxisResult", "Certificate", "Mismatch", "Recheck", "recheck", "verify"]
