"""The errors detlab raises. Each message says what was asked, what was found and what to do.

```
DetlabError
 +- UsageError (also a ValueError)   an argument that cannot be right
 |   +- ConditionError               a condition that no run can have
 |   +- CoverageError                an op that a tier does not cover
 |   +- PromptError                  a prompt, or a file of prompts, that cannot be used
 +- ModelError                       a model that is missing, damaged or lacks a tokenizer
 +- TraceError                       a trace that cannot be read or compared
 |   +- TraceCorrupt                 its files are damaged or incomplete
 |   +- TraceSchema                  its files have a layout this version does not know
 |   +- TraceMismatch                the traces compared belong to different prompts
 +- CaptureError                     a model call that could not be observed faithfully
 +- ControlError                     an experiment whose control failed, so it shows nothing
 +- MachineError                     something this machine cannot do
 +- AccumulationError                an op that is no sum of its terms, or whose order cannot be seen
```

`except DetlabError` catches them all; `except ValueError` still catches bad arguments.
"""

from __future__ import annotations

__all__ = [
    "AccumulationError",
    "CaptureError",
    "ConditionError",
    "ControlError",
    "CoverageError",
    "DetlabError",
    "MachineError",
    "ModelError",
    "PromptError",
    "TraceCorrupt",
    "TraceError",
    "TraceMismatch",
    "TraceSchema",
    "UsageError",
]


class DetlabError(Exception):
    """Base of every error detlab raises on purpose."""


class UsageError(DetlabError, ValueError):
    """An argument cannot be right."""


class ConditionError(UsageError):
    """A condition contradicts itself, or no run can have it."""


class CoverageError(UsageError):
    """A model has an op whose bits a tier cannot vouch for."""


class PromptError(UsageError):
    """A prompt, or a file of prompts, cannot be used."""


class ModelError(DetlabError):
    """A model is missing, damaged or lacks a tokenizer."""


class TraceError(DetlabError):
    """A trace cannot be read or compared."""


class TraceCorrupt(TraceError):
    """A trace's files are damaged or incomplete."""


class TraceSchema(TraceError):
    """A trace's files have a layout this version does not know."""


class TraceMismatch(TraceError):
    """Traces of different prompts were compared."""


class CaptureError(DetlabError):
    """A model call could not be observed faithfully."""


class ControlError(DetlabError):
    """A control failed, so the experiment it guards shows nothing."""


class MachineError(DetlabError):
    """This machine cannot do what was asked."""


class AccumulationError(DetlabError):
    """An op is no sum of its terms, or the order in which it adds them cannot be seen."""
