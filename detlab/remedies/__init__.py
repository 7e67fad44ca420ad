"""What fixes it: every remedy as a switch, measured; the smallest fix; how often answers part."""

from detlab.remedies.attempt import try_remedies
from detlab.remedies.minimal import MinimalFix, Part, minimal_fix
from detlab.remedies.rates import Rate, rate
from detlab.remedies.registry import REMEDIES, Remedies, applied, remedies
from detlab.remedies.remedy import Remedy
from detlab.remedies.table import Attempt, Attempts, Difference

__all__ = [
    "REMEDIES", "Attempt", "Attempts", "Difference", "MinimalFix", "Part", "Rate", "Remedies", "Remedy", "applied",
    "minimal_fix", "rate", "remedies", "try_remedies",
]  # fmt: skip
