"""Conditions: everything that may change the bits of an answer but not the question."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from dataclasses import dataclass
from typing import Any

from detlab.errors import ConditionError

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "padding_side": (None, "left", "right"),
    "mates": ("prompts", "repeat", "random"),
    "cache": ("dynamic", "static", "none"),
    "attention": (None, "sdpa", "eager"),
    "dtype": (None, "float32", "bfloat16", "float16", "float64"),
    "tier": ("stock", "invariant", "exact"),
    "autocast": (None, "bfloat16", "float16"),
    "aten_isa": (None, "default", "avx2", "avx512"),
    "mkl_isa": (None, "COMPATIBLE", "SSE2", "SSE4_2", "AVX", "AVX2", "AVX512", "AUTO"),
    "onednn_isa": (None, "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "DEFAULT"),
}
_LEAST = {"batch_size": 1, "row": 0, "padding": 0, "seed": 0, "prefill_chunk": 1, "threads": 1, "alignment": 0, "top_k": 0}
_OPTIONAL = {"prefill_chunk", "threads"}
_FLAGS = ("deterministic_algorithms",)
# Read by ATen, MKL and oneDNN when they start: they cannot be changed in a process that runs.
_VARIABLES = {"aten_isa": "ATEN_CPU_CAPABILITY", "mkl_isa": "MKL_CBWR", "onednn_isa": "ONEDNN_MAX_CPU_ISA"}


@dataclass(frozen=True)
class Condition:
    """One way of serving the same question.

    Attributes:
        batch_size: rows in a call. Alone, it surrounds each prompt with mates of the prompt's own length.
        row: the batch row in which the prompt sits; in padded batches the prompts are rotated by as much.
        mates: where neighbours' tokens come from: the other "prompts" cut or repeated to length, the prompt itself
            ("repeat"), or "random" tokens drawn from ``seed``.
        padding_side: "left" or "right" puts prompts of different lengths in one batch, padded on that side.
        padding: pad tokens added to the longest prompt of each batch (needs ``padding_side``).
        cache: "dynamic" keeps keys and values between steps, "static" keeps them in buffers of the final length; "none"
            computes the whole text anew at each step.
        attention: transformers' attention implementation; None keeps the model's own.
        dtype: runs a copy of the model cast to this; None keeps the model's own.
        prefill_chunk: tokens per prefill call; None prefills each prompt in one call.
        seed: seeds torch, sampling and the random mates.
        temperature, top_k: 0 decodes greedily; above 0, tokens are drawn after division by the temperature, from the
            ``top_k`` likeliest (0: from all), with one stream of random numbers for the whole batch, as ``generate`` draws.
        threads: intra-op threads; None keeps the process's.
        autocast: runs under ``torch.autocast`` with this dtype.
        deterministic_algorithms: sets ``torch.use_deterministic_algorithms``.
        alignment: parameters are moved to addresses this many bytes past a multiple of 64; 0 leaves them where they are.
        compile: name of a module whose forward is compiled; every module whose name ends in it.
        tier: "stock" computes as the model is; "invariant" runs it under `detlab.deterministic`, where drawn tokens belong to
            the request: (seed, prompt, position).
        device: "cuda", "cuda:1", ...; runs a copy of the model there. None keeps the model's own.
        aten_isa, mkl_isa, onednn_isa: caps the instruction set of ATen's, MKL's and oneDNN's kernels. They are read when
            these libraries start, so such a condition runs in a fresh process.
    """

    batch_size: int = 1
    row: int = 0
    mates: str = "prompts"
    padding_side: str | None = None
    padding: int = 0
    cache: str = "dynamic"
    attention: str | None = None
    dtype: str | None = None
    prefill_chunk: int | None = None
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    threads: int | None = None
    autocast: str | None = None
    deterministic_algorithms: bool = False
    alignment: int = 0
    compile: str | None = None
    tier: str = "stock"
    device: str | None = None
    aten_isa: str | None = None
    mkl_isa: str | None = None
    onednn_isa: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConditionError(f"{name}={value!r} is not a choice; choose from {_listed(choices)}.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name in _OPTIONAL and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least or value >= 1 << 63:
                raise ConditionError(f"{name}={value!r} is not possible; give a whole number of at least {least}.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConditionError(f"{name}={getattr(self, name)!r} is not possible; give True or False.")
        number = not isinstance(self.temperature, bool) and isinstance(self.temperature, (int, float))
        if not number or not (self.temperature == 0 or 1e-3 <= self.temperature < 1e6):
            raise ConditionError(f"temperature={self.temperature!r} is not possible; give 0 (greedy) or a number above it.")
        if self.threads is not None and self.threads > 1024:
            raise ConditionError(f"threads={self.threads!r} is not possible; give at most 1024.")
        for name in ("compile", "device"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConditionError(f"{name}={value!r} is not possible; give a name, or leave it out.")
        if self.top_k and not self.temperature:
            raise ConditionError(f"top_k={self.top_k} needs a temperature above 0: greedy decoding does not draw.")
        for name in ("attention", "autocast", "compile") if self.tier != "stock" else ():
            if getattr(self, name) is not None:
                raise ConditionError(
                    f"{name}={getattr(self, name)!r} contradicts tier={self.tier!r}, which computes its own way; drop one."
                )
        if self.alignment % 2 or self.alignment >= 64:
            raise ConditionError(f"alignment={self.alignment} is not possible; give an even number of bytes below 64.")
        if self.row >= self.batch_size:
            raise ConditionError(
                f"row={self.row} lies outside a batch of batch_size={self.batch_size}; rows count from 0, "
                f"so give row <= {self.batch_size - 1} or a larger batch."
            )
        if self.padding and self.padding_side is None:
            raise ConditionError(f'padding={self.padding} needs a side: add padding_side="left" or padding_side="right".')
        if self.prefill_chunk is not None and self.cache == "none":
            raise ConditionError('prefill_chunk needs a cache to build on: drop it, or set cache="dynamic".')
        if self.prefill_chunk is not None and self.padding_side == "right":
            raise ConditionError(
                "prefill_chunk with right padding would end some prompts in the middle of a chunk; "
                'use padding_side="left", or drop prefill_chunk.'
            )

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Reads a condition from text, such as ``"batch_size=8,padding_side=left"``; "" or "default" is the default condition.

        Raises:
            ConditionError: a key is unknown or given twice, or a value is not possible.
        """
        if text.strip() == "default":  # what str() says of it
            return cls()
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, raw = (s.strip() for s in item.partition("="))
            if not equals:
                raise ConditionError(f"{item!r} is not key=value; write a condition as batch_size=8,padding_side=left.")
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ConditionError(f"unknown condition key {name!r}.{hint} Known keys: {', '.join(fields)}.")
            if name in values:
                raise ConditionError(f"{name} is given twice in {text!r}; give it once.")
            values[name] = _read(name, raw)
        return cls(**values)

    def __str__(self) -> str:
        """What differs from the default condition, in the form that `parse` reads; "default" where nothing does."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "default"

    def to_json(self) -> dict[str, Any]:
        """All settings as plain values."""
        return dataclasses.asdict(self)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that must be set before torch starts; where there are any, the run needs a fresh process."""
        chosen = {variable: getattr(self, name) for name, variable in _VARIABLES.items()}
        return {variable: value for variable, value in chosen.items() if value is not None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Condition:
        """Rebuilds a condition; unknown keys are refused, since they would have changed the run."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConditionError(f"condition settings {unknown} are not known to this version of detlab.")
        return cls(**data)

    @classmethod
    def grid(cls, **axes: Any) -> list[Condition]:
        """All combinations of the given settings: ``Condition.grid(batch_size=[1, 4], attention=["sdpa", "eager"])``."""
        names = list(axes)
        values = [v if isinstance(v, (list, tuple, range)) else [v] for v in axes.values()]
        unknown = sorted(set(names) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ConditionError(f"unknown condition keys {unknown}; known: {[f.name for f in dataclasses.fields(cls)]}.")
        return [cls(**dict(zip(names, combination, strict=True))) for combination in itertools.product(*values)]


def _listed(choices: tuple[str | None, ...]) -> str:
    return ", ".join("None" if c is None else c for c in choices)


def _read(name: str, raw: str) -> Any:
    if name in _FLAGS:
        if raw not in ("True", "False"):
            raise ConditionError(f"{name}={raw!r} is neither True nor False.")
        return raw == "True"
    if name == "temperature":
        try:
            return float(raw)
        except ValueError:
            raise ConditionError(f"temperature={raw!r} is not a number.") from None
    if name in _LEAST:
        if name in _OPTIONAL and raw == "None":
            return None
        try:
            return int(raw)
        except ValueError:
            raise ConditionError(f"{name}={raw!r} is not a whole number.") from None
    return None if raw == "None" else raw
