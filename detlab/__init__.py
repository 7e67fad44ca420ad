"""detlab finds where two runs of a language model stop being bit-identical.

>>> import detlab
>>> sorted(detlab.__all__)[:3]
['Bench', 'Certificate', 'ClockExperiment']

Importing it changes nothing; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from detlab.bench import Bench as Bench
    from detlab.bench import bench as bench
    from detlab.clocks import ClockExperiment as ClockExperiment
    from detlab.clocks import clock_experiment as clock_experiment
    from detlab.clocks import mechanisms as mechanisms
    from detlab.condition import Condition as Condition
    from detlab.coverage import Coverage as Coverage
    from detlab.coverage import coverage as coverage
    from detlab.deterministic import apply as apply
    from detlab.deterministic import deterministic as deterministic
    from detlab.deterministic import restore as restore
    from detlab.divergence.accumulation import accumulation_tree as accumulation_tree
    from detlab.divergence.compare import compare as compare
    from detlab.divergence.compare import first_divergence as first_divergence
    from detlab.divergence.explain import explain as explain
    from detlab.divergence.explain_result import Explanation as Explanation
    from detlab.divergence.graft import graft as graft
    from detlab.divergence.result import Comparison as Comparison
    from detlab.divergence.result import Divergence as Divergence
    from detlab.divergence.triage import triage as triage
    from detlab.divergence.triage_result import Triage as Triage
    from detlab.environment import environment as environment
    from detlab.errors import DetlabError as DetlabError
    from detlab.investigate import Investigation as Investigation
    from detlab.investigate import investigate as investigate
    from detlab.models import load_model as load_model
    from detlab.prompts import Prompt as Prompt
    from detlab.prompts import load_prompts as load_prompts
    from detlab.remedies import minimal_fix as minimal_fix
    from detlab.remedies import rate as rate
    from detlab.remedies import remedies as remedies
    from detlab.remedies import try_remedies as try_remedies
    from detlab.runner import Run as Run
    from detlab.runner import load_trace as load_trace
    from detlab.runner import run as run
    from detlab.scoring import Scores as Scores
    from detlab.scoring import score as score
    from detlab.sweep import sweep as sweep
    from detlab.telemetry import Telemetry as Telemetry
    from detlab.telemetry import telemetry as telemetry
    from detlab.trace.capture import capture as capture
    from detlab.trace.records import Trace as Trace
    from detlab.two_stages import two_stages as two_stages
    from detlab.verify import Certificate as Certificate
    from detlab.verify import verify as verify

_HOMES = {
    "Bench": "detlab.bench",
    "Certificate": "detlab.verify",
    "ClockExperiment": "detlab.clocks",
    "Comparison": "detlab.divergence.result",
    "Condition": "detlab.condition",
    "Coverage": "detlab.coverage",
    "DetlabError": "detlab.errors",
    "Divergence": "detlab.divergence.result",
    "Explanation": "detlab.divergence.explain_result",
    "Investigation": "detlab.investigate",
    "Prompt": "detlab.prompts",
    "Run": "detlab.runner",
    "Scores": "detlab.scoring",
    "Telemetry": "detlab.telemetry",
    "Trace": "detlab.trace.records",
    "Triage": "detlab.divergence.triage_result",
    "accumulation_tree": "detlab.divergence.accumulation",
    "apply": "detlab.deterministic",
    "bench": "detlab.bench",
    "capture": "detlab.trace.capture",
    "clock_experiment": "detlab.clocks",
    "compare": "detlab.divergence.compare",
    "coverage": "detlab.coverage",
    "deterministic": "detlab.deterministic",
    "environment": "detlab.environment",
    "explain": "detlab.divergence.explain",
    "first_divergence": "detlab.divergence.compare",
    "graft": "detlab.divergence.graft",
    "investigate": "detlab.investigate",
    "load_model": "detlab.models",
    "load_prompts": "detlab.prompts",
    "load_trace": "detlab.runner",
    "mechanisms": "detlab.clocks",
    "minimal_fix": "detlab.remedies",
    "rate": "detlab.remedies",
    "remedies": "detlab.remedies",
    "restore": "detlab.deterministic",
    "run": "detlab.runner",
    "score": "detlab.scoring",
    "sweep": "detlab.sweep",
    "telemetry": "detlab.telemetry",
    "triage": "detlab.divergence.triage",
    "try_remedies": "detlab.remedies",
    "two_stages": "detlab.two_stages",
    "verify": "detlab.verify",
}

#: The public names, pinned: a test holds them.
__all__ = [*_HOMES, "viz"]


def __getattr__(name: str) -> Any:
    if name == "viz":
        return importlib.import_module("detlab.viz")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'detlab' has no attribute {name!r}; its names are {', '.join(sorted(__all__))}.")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _Names(ModuleType):
    """Keeps a public function from being hidden by the module of its name (``environment``, ``coverage``, ``sweep``, ...)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):  # what the import system sets after a first import
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Names
