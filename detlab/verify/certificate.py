"""What was tried, what was found, and how much it shows: the result of `verify`, as text, JSON and a page."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from detlab.coverage import Coverage
from detlab.engine.kernels import KernelCheck
from detlab.environment import Environment
from detlab.errors import UsageError
from detlab.files import write_text
from detlab.verify.axes import AXES

__all__ = ["AxisResult", "Certificate", "Mismatch"]

SCHEMA = 3


@dataclass(frozen=True)
class Mismatch:
    """Where a text's bits first parted on an axis.

    Attributes:
        prompt_id: the prompt.
        position: token position of the first row of logits that differs; -1 where only sampled tokens were compared.
        way, against: the two ways of serving.
        elements: logits of that row that differ, of how many.
        max_ulp: largest distance in the row, in ULPs of the logits' dtype.
        token: tokens that the row chooses, as served and for comparison.
    """

    prompt_id: str
    position: int
    way: str
    against: str
    elements: tuple[int, int]
    max_ulp: int
    token: tuple[int, int]

    def __str__(self) -> str:
        place = f"prompt {self.prompt_id}, position {self.position}" if self.position >= 0 else f"prompt {self.prompt_id}"
        a, b = self.token
        token = f"token {a} became {b}" if a != b else f"token {a} stayed"
        if not self.elements[1]:
            return f"{place}: {token} ({self.way} against {self.against})"
        return (
            f"{place}: {self.elements[0]:,} of {self.elements[1]:,} logits differ, by up to {self.max_ulp:,} ULP; {token} "
            f"({self.way} against {self.against})"
        )


@dataclass
class AxisResult:
    """One axis of the matrix.

    Attributes:
        axis: its name.
        comparisons: texts served in some way and compared with the same text served otherwise; each is all its kept rows.
        mismatches: those in which a bit of the logits or a token differed.
        token_mismatches: those in which a token differed.
        rows: rows of logits that were compared, the whole vocabulary each.
        control_comparisons, control_mismatches, control_token_mismatches: the same trials with the tier off.
        is_twin: an axis on which the stock model is expected to be equal, too (mixtures of experts may part: how many
            rows an expert sees depends on what the neighbours say).
        evidence: what the model was called with under the tier: rows in a call, padding, cache hits.
        ways: the ways that were tried.
        first, control_first: the first mismatch, under the tier and with it off.
        note: why the axis, or its control, shows less than it should; "" where it does not.
        seconds: duration, controls included.
    """

    axis: str
    comparisons: int = 0
    mismatches: int = 0
    token_mismatches: int = 0
    rows: int = 0
    control_comparisons: int = 0
    control_mismatches: int = 0
    control_token_mismatches: int = 0
    is_twin: bool = False
    evidence: dict[str, int] = field(default_factory=dict)
    ways: list[str] = field(default_factory=list)
    first: Mismatch | None = None
    control_first: Mismatch | None = None
    note: str = ""
    seconds: float = 0.0

    @property
    def bound95(self) -> float | None:
        """Upper bound of the rate of mismatches, at 95 %, for trials like these: 3/n after none; None after no trial."""
        return upper_bound(self.mismatches, self.comparisons)

    @property
    def is_shown(self) -> bool:
        """Whether the axis can tell: its control parted. A twin axis needs none to part: there, equality was expected."""
        return self.control_mismatches > 0 or (self.is_twin and self.control_comparisons > 0)

    @property
    def verdict(self) -> str:
        """One of "holds", "does not hold", "control shows nothing here", "not tested"."""
        if self.mismatches:
            return "does not hold"
        if not self.comparisons:
            return "not tested"
        return "holds" if self.is_shown else "control shows nothing here"

    def to_json(self) -> dict[str, Any]:
        """The counts, the bound and the evidence as JSON values."""
        return asdict(self) | {"bound95": self.bound95, "verdict": self.verdict}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AxisResult:
        """Reads back what `to_json` gave."""
        values: dict[str, Any] = {name: value for name, value in data.items() if name not in ("bound95", "verdict")}
        for name in ("first", "control_first"):
            found = values[name]
            if found is not None:
                values[name] = Mismatch(**found | {key: tuple(found[key]) for key in ("elements", "token")})
        return cls(**values)


def upper_bound(failures: int, trials: int) -> float | None:
    """Upper 95 % bound of a rate: 3/n after no failure (the rule of three), else Clopper and Pearson's.

    >>> upper_bound(0, 300), upper_bound(0, 0), round(upper_bound(1, 100), 4)
    (0.01, None, 0.0466)
    """
    if not trials:
        return None
    if not failures:
        return min(1.0, 3 / trials)
    if failures >= trials:
        return 1.0
    low, high = failures / trials, 1.0
    for _ in range(60):  # the rate at which so few failures would be seen once in twenty times
        middle = (low + high) / 2
        terms = (
            math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
            + k * math.log(middle) + (trials - k) * math.log1p(-middle)
            for k in range(failures + 1)
        )  # fmt: skip
        low, high = (middle, high) if sum(map(math.exp, terms)) > 0.05 else (low, middle)
    return high


@dataclass
class Certificate:
    """What `verify` found.

    Attributes:
        tier: the tier that was tried.
        spec: the name of the function that the tier computes, where it is one that other machines compute, too: "tri4".
        model: class, name, dtype, device, attention and number of parameters of the model; digests of its parameters and
            of its buffers.
        prompts: prompt id -> its tokens: what another party serves.
        axes: one result for each axis, by name.
        md5: prompt id -> MD5 of its logits, served alone in one call under the tier; what another party compares.
        coverage: every op of the model, covered, safe or not.
        kernels: the kernels that ran under the tier, each probed again in every shape that it ran in.
        class_map: the measured rules by which products and attention are called on this machine.
        environment: the machine's record.
        settings: trials, seed, new_tokens and the lengths of the prompts.
        limits: what was not tested, in words.
        version: detlab's.
        date: UTC, ISO 8601.
    """

    tier: str
    spec: str
    model: dict[str, Any]
    prompts: dict[str, list[int]]
    axes: dict[str, AxisResult]
    md5: dict[str, str]
    coverage: Coverage
    kernels: list[KernelCheck]
    class_map: dict[str, Any]
    environment: Environment
    settings: dict[str, Any]
    limits: list[str]
    version: str
    date: str

    @property
    def holds(self) -> bool:
        """Whether each axis was tested without a mismatch, each op is covered or safe, and each kernel's shape held."""
        is_tried = all(a.comparisons and not a.mismatches for a in self.axes.values())
        return self.coverage.holds and is_tried and not self.wrong_kernels

    @property
    def is_refuted(self) -> bool:
        """Whether a bit differed under the tier, an op is not covered, or a kernel's shape did not hold."""
        return not self.coverage.holds or any(a.mismatches for a in self.axes.values()) or bool(self.wrong_kernels)

    @property
    def wrong_kernels(self) -> list[KernelCheck]:
        """Kernels that ran in a shape in which a row has other bits than the class map says."""
        return [check for check in self.kernels if not check.holds]

    @property
    def kernel_counts(self) -> dict[str, int]:
        """Kernels that were probed again, the shapes that they ran in, and those of the shapes that failed."""
        return {
            "kernels": len(self.kernels),
            "shapes": sum(len(check.shapes) for check in self.kernels),
            "failed": sum(len(check.failed) for check in self.kernels),
        }

    @property
    def kernel_words(self) -> str:
        """What probing the kernels again showed, in one sentence."""
        count = self.kernel_counts
        if not self.kernels:
            return f"no kernel was probed again: tier {self.tier!r} measured none"
        found = f"{count['failed']:,} do not hold" if count["failed"] else "all hold"
        return f"{count['kernels']:,} kernels were probed again, in the {count['shapes']:,} shapes that ran: {found}"

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        total, wrong = (sum(getattr(a, name) for a in self.axes.values()) for name in ("comparisons", "mismatches"))
        silent = [a.axis for a in self.axes.values() if a.verdict == "control shows nothing here"]
        said = f"{wrong:,} of {total:,} comparisons differ in a bit"
        if not self.coverage.holds:
            said += f", and {len(self.coverage.uncovered)} ops are not covered"
        if self.wrong_kernels:
            count = self.kernel_counts
            said += f", and {count['failed']:,} of {count['shapes']:,} shapes of kernels do not hold"
        if silent:
            said += f"; the stock model is equal, too, on {', '.join(silent)}: nothing is shown there"
        untested = [a.axis for a in self.axes.values() if a.verdict == "not tested"]
        if untested:
            said += f"; not tested: {', '.join(untested)}"
        verdict = "holds" if self.holds else "does not hold" if self.is_refuted else "is not proved"
        return f"tier {self.tier!r}{f' (spec {self.spec})' if self.spec else ''} {verdict}: {said}"

    def to_json(self) -> dict[str, Any]:
        """The certificate as JSON values; "sha256" is over all the others."""
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "tier": self.tier,
            "spec": self.spec,
            "prompts": self.prompts,
            "holds": self.holds,
            "axes": {name: axis.to_json() for name, axis in self.axes.items()},
            "md5": self.md5,
            "coverage": self.coverage.to_json(),
            "kernels": self.kernel_counts | {"checks": [asdict(check) for check in self.kernels]},
            "model": self.model,
            "class_map": self.class_map,
            "environment": self.environment.to_json(),
            "settings": self.settings,
            "limits": self.limits,
            "version": self.version,
            "date": self.date,
        }
        content = json.loads(json.dumps(content))  # tuples become lists, as they are read back
        return content | {"sha256": _checksum(content)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the certificate, whole or not at all: a page where the name ends in .html, else JSON.

        Raises:
            UsageError: the folder is missing, the path is a folder, or the file cannot be written.
        """
        if Path(path).suffix.lower() in (".html", ".htm"):
            from detlab.verify.page import page

            text = page(self)
        else:
            text = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        return write_text(path, text, "save", "certificate.json")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Reads a certificate that `save` wrote as JSON.

        Raises:
            UsageError: there is none, it was changed since it was written, or another version of detlab wrote it.
        """
        source = Path(path).expanduser()
        try:
            data = json.loads(source.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"the certificate {source} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise UsageError(f"{source} is not JSON, so it is no certificate that can be loaded (a page cannot).") from error
        if not isinstance(data, dict) or "axes" not in data or "sha256" not in data:
            raise UsageError(f"{source} holds no certificate.")
        if data.get("schema") != SCHEMA:
            raise UsageError(f"{source} is a certificate of schema {data.get('schema')!r}; this version reads {SCHEMA}.")
        said = data.pop("sha256")
        if said != _checksum(data):
            raise UsageError(f"{source} was changed since it was written: its checksum does not fit. Run detlab.verify again.")
        try:
            return cls._read(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{source} is damaged ({type(error).__name__}: {error}). Run detlab.verify again.") from error

    @classmethod
    def _read(cls, data: dict[str, Any]) -> Certificate:
        coverage = Coverage.from_json(data["coverage"])
        kernels = [KernelCheck.from_json(check) for check in data["kernels"]["checks"]]
        axes = {name: AxisResult.from_json(axis) for name, axis in data["axes"].items()}
        if not set(axes) <= set(AXES):
            raise ValueError(f"unknown axes {', '.join(sorted(set(axes) - set(AXES)))}")
        if not data["md5"] or set(data["md5"]) != set(data["prompts"]):  # a prompt without a digest would agree with anything
            raise ValueError("its digests are not those of its prompts")
        names = ("tier", "spec", "model", "prompts", "md5", "class_map", "settings", "limits", "version", "date")
        return cls(
            axes=axes, coverage=coverage, kernels=kernels, environment=Environment.from_json(data["environment"]),
            **{name: data[name] for name in names},
        )  # fmt: skip

    def rows(self) -> list[tuple[str, ...]]:
        """The table: axis, verdict, comparisons, mismatches, bound, and the control's result, as text."""
        made: list[tuple[str, ...]] = []
        for axis in self.axes.values():
            bound = "" if axis.bound95 is None else f"{axis.bound95:.2g}"
            control = f"{axis.control_mismatches:,} of {axis.control_comparisons:,} differ"
            if axis.is_twin:
                control += " (0 expected)"
            made.append(
                (axis.axis, axis.verdict, f"{axis.comparisons:,}", f"{axis.mismatches:,}", bound, control, axis.note)
            )
        return made

    def evidence(self) -> list[str]:
        """What the calls of each axis looked like, so that an empty test is seen to be one."""
        made = []
        for axis in self.axes.values():
            seen = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in axis.evidence.items() if count)
            made.append(f"{axis.axis} ({AXES[axis.axis].asks}): {axis.rows:,} rows of logits; {seen or 'no calls'}")
        return made

    def __str__(self) -> str:
        head = ("axis", "verdict", "comparisons", "mismatches", "bound 95 %", "tier off", "")
        table = [head, *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        about = f"{self.model['class']} {self.model['name']} in {self.model['dtype']}"
        firsts = [f"first on {a.axis}: {a.first}" for a in self.axes.values() if a.first is not None]
        counts = ", ".join(f"{count} {status}" for status, count in self.coverage.counts().items())
        uncovered = [f"  not covered: {op.module or 'the model'} · {op.op}: {op.reason}" for op in self.coverage.uncovered[:5]]
        kernels = [f"kernels: {self.kernel_words}", *(f"  wrong: {check}" for check in self.wrong_kernels)]
        tail = [f"ops: {counts}", *uncovered, *kernels, *(f"not tested: {limit}" for limit in self.limits)]
        return "\n".join([f"{about}: {self.headline}", *lines, *firsts, *tail])

    def _repr_html_(self) -> str:
        from detlab.verify.page import fragment

        return fragment(self)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
