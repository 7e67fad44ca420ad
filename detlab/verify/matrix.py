"""Runs the invariance matrix: under the tier, then with it off, then in fresh processes."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from detlab import bits
from detlab.engine.kernels import KernelCheck
from detlab.engine.sampling import owned_sampling
from detlab.process import child
from detlab.prompts import Prompt
from detlab.verify.apart import Elsewhere, kernels_digest
from detlab.verify.axes import AXES, Axis, Trial
from detlab.verify.certificate import AxisResult, Mismatch
from detlab.verify.parts import Tally, in_parts
from detlab.verify.serve import Way, generated, kept_positions, logits_of, watched

__all__ = ["Matrix", "first_mismatch"]

Progress = Callable[[int, int, str], None]
_IN_MEMORY = 32  # references that are kept at a time
#: What the evidence must count, and how much of it.
_NEEDS = {
    "rows": ("rows_sharing_a_pass", 2), "padding": ("passes_with_padding", 1), "cache": ("passes_that_hit_a_cache", 1),
    "parts": ("most_parts_of_a_sum", 2), "settings": ("settings_that_move_stock_kernels", 1), "offset": ("tensors_moved", 1),
}  # fmt: skip


class Matrix:
    """The axes' results, and what both phases share."""

    def __init__(self, model: nn.Module, prompts: list[Prompt], inputs: list[list[int]], trials: int, seed: int,
                 new_tokens: int, chosen: list[str], progress: Progress | None) -> None:  # fmt: skip
        self.model, self.prompts, self.inputs = model, prompts, inputs
        self.trials, self.seed, self.new_tokens = trials, seed, new_tokens
        self.probe_seed = 1_000 + 100 * (abs(seed) % 10_000)  # far from the small ones that measurements use
        self.results = {name: AxisResult(name, is_twin=AXES[name].is_twin) for name in chosen}
        self.progress, self.done, self.total = progress, 0, 2 * trials * len(chosen)
        self.texts: dict[tuple[bool, int], list[int]] = {}
        self._jobs: dict[tuple[str, bool], list[tuple[int, Way, dict[str, Any], Tensor]]] = {}
        self._shared_pool = inputs[:8]
        self.known: OrderedDict[Any, Any] = OrderedDict()
        self.is_tier = True
        self.tally = Tally()
        self.logits_dtype: torch.dtype | None = None

    def phase(self, is_tier: bool, shares: dict[str, int]) -> None:
        """All axes under the tier or with it off, but for those of fresh processes: their jobs, for comparison.

        Args:
            is_tier: which of the two.
            shares: by axis of fresh processes, jobs for each process.
        """
        self.is_tier = is_tier
        self.known.clear()
        for name, result in self.results.items():
            if AXES[name].is_apart:
                continue
            started = time.perf_counter()
            self.tally = Tally()
            with watched(self.model) as watch:
                for prompt, trial in itertools.islice(self._trials(AXES[name]), 4 * self.trials):
                    self._try(result, prompt, trial)
                    if (result.comparisons if is_tier else result.control_comparisons) >= self.trials:
                        break
            result.seconds += time.perf_counter() - started
            if is_tier:
                result.evidence = watch.to_json()
                if self.tally.products:
                    result.evidence |= {
                        "sums_in_parts": self.tally.products, "most_parts_of_a_sum": self.tally.most_parts,
                    }  # fmt: skip
                self._require(result)
        for name, share in shares.items():
            self._prepare_apart(name, share)

    def _require(self, result: AxisResult) -> None:
        """Takes the comparisons back where the evidence says that nothing was varied."""
        needs = AXES[result.axis].needs
        if not needs:
            return
        name, least = _NEEDS[needs]
        found = result.evidence.get(name, 0)
        if found < least:
            result.note = f"nothing was tested: {name.replace('_', ' ')} {found}"
            result.comparisons = result.mismatches = result.token_mismatches = 0

    def _trials(self, axis: Axis) -> Iterator[tuple[int, Trial]]:
        """Trials of an axis, prompt after prompt; the same in both phases."""
        ways = [
            axis.trials(len(tokens) + self.new_tokens, len(tokens), random.Random(f"{self.seed} {axis.name} {index}"))
            for index, tokens in enumerate(self.inputs)
        ]
        # Prompts take turns, and each begins at another of the axis's ways, so that few trials see many ways.
        for index, way in enumerate(ways):
            for _ in range(index):
                next(way)
        while True:
            for index, way in enumerate(ways):
                yield index, next(way)

    # ------------------------------------------------------------------------------------------------------- serving
    def text(self, prompt: int) -> list[int]:
        """The prompt and the tokens that generate chose after it, in this phase."""
        key = (self.is_tier, prompt)
        if key not in self.texts:
            tokens, _ = self._served(prompt, Way(generates=True))
            self.texts[key] = [*self.inputs[prompt], *tokens[0].tolist()]
        return self.texts[key]

    def _pool(self, prompt: int) -> list[list[int]]:
        return [tokens for index, tokens in enumerate(self.inputs) if index != prompt]

    def _served(self, prompt: int, way: Way) -> tuple[Tensor, Tensor]:
        """Tokens and logits of a way: each kept row of a given text, or each step of generate."""
        if way.generates:
            ask = self.inputs[prompt], way, self._pool(prompt), self.new_tokens, self.seed
            model: Any = self.model
            with owned_sampling(model, self.seed) if way.temperature and self.is_tier else nullcontext():
                tokens, logits = generated(model, *ask)
            return tokens, self._as_computed(logits)
        text = self.text(prompt)
        with in_parts(self.model, way, self.tally):
            logits = logits_of(self.model, text, way, self._pool(prompt), kept_positions(len(text)))
        return logits.argmax(-1), logits

    def _as_computed(self, logits: Tensor) -> Tensor:
        """Generate hands logits out in float32, whatever they were computed in: they are taken back, exactly."""
        if self.logits_dtype is None:
            self.logits_dtype = logits_of(self.model, self.inputs[0][:1], Way()).dtype
        back = logits.to(self.logits_dtype)
        return back if bits.equal(back.to(logits.dtype), logits) else logits

    def _reference(self, prompt: int, way: Way) -> tuple[Tensor, Tensor]:
        """As `_served`; the last few are kept."""
        key = (prompt, way)
        if key not in self.known:
            self.known[key] = self._served(prompt, way)
            if len(self.known) > _IN_MEMORY:
                self.known.popitem(last=False)
        found: tuple[Tensor, Tensor] = self.known[key]
        return found

    def reference_md5(self) -> dict[str, str]:
        """MD5 of each prompt's reference logits under the tier."""
        made = {}
        for index, prompt in enumerate(self.prompts):
            made[prompt.id] = bits.md5(self._reference(index, Way())[1][0])
        return made

    # ----------------------------------------------------------------------------------------------------- comparing
    def _try(self, result: AxisResult, prompt: int, trial: Trial) -> None:
        way = trial.way
        against = trial.against or Way(generates=way.generates)
        expected = self._reference(prompt, against)
        actual = self._served(prompt, way)  # anew, also where it is the reference's own way
        positions = self._positions(prompt, way)
        theirs = self._positions(prompt, against)
        shared = [p for p in positions if p in theirs]
        mine, other = [positions.index(p) for p in shared], [theirs.index(p) for p in shared]
        for row in range(len(way.rows)):
            a = actual[0][row, mine], actual[1][row, mine]
            b = expected[0][0, other], expected[1][0, other]
            self._compare(result, prompt, way, against, shared, a, b)

    def _positions(self, prompt: int, way: Way) -> list[int]:
        length = len(self.inputs[prompt])
        if way.generates:
            return list(range(length - 1, length - 1 + self.new_tokens))
        return kept_positions(length + self.new_tokens)

    def _compare(self, result: AxisResult, prompt: int, way: Way, against: Way, positions: list[int],
                 actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:  # fmt: skip
        """Counts one comparison: tokens int64 [positions] and logits [positions, vocab] of each side."""
        self.done += 1
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, result.axis)
        is_tier = self.is_tier
        same_tokens = torch.equal(actual[0], expected[0])
        is_same = same_tokens and bits.equal(actual[1].contiguous(), expected[1].contiguous())
        if is_tier:
            result.comparisons += 1
            result.rows += len(positions)
            result.mismatches += not is_same
            result.token_mismatches += not same_tokens
            if str(way) not in result.ways:
                result.ways.append(str(way))
        else:
            result.control_comparisons += 1
            result.control_mismatches += not is_same
            result.control_token_mismatches += not same_tokens
        if is_same or (result.first if is_tier else result.control_first) is not None:
            return
        found = first_mismatch(self.prompts[prompt].id, way, against, positions, actual, expected)
        if is_tier:
            result.first = found
        else:
            result.control_first = found

    # ------------------------------------------------------------------------------------------------- fresh processes
    def _prepare_apart(self, axis: str, share: int) -> None:
        """Serves the jobs of an axis of fresh processes in this one, for comparison; ``share``: jobs for each process."""
        for prompt, trial in itertools.islice(self._trials(AXES[axis]), share):
            text = self.text(prompt)
            keep = kept_positions(len(text))
            logits = logits_of(self.model, text, trial.way, self._shared_pool, keep)[0]
            job = {"text": text, "way": trial.way.to_json(), "keep": keep}
            self._jobs.setdefault((axis, self.is_tier), []).append((prompt, trial.way, job, logits))

    def apart(self, axis: str, folder: Path, tier: str, settings: Sequence[Elsewhere]) -> list[KernelCheck]:
        """An axis of fresh processes: the same jobs in each of them.

        Args:
            axis: its name.
            folder: where the model was sent to.
            tier: the tier.
            settings: the processes.

        Returns:
            The kernels that ran there, probed again by each process.
        """
        result, started = self.results[axis], time.perf_counter()
        jobs = {is_tier: self._jobs.get((axis, is_tier), []) for is_tier in (True, False)}
        asked = {name: [job for _, _, job, _ in jobs[is_tier]] for name, is_tier in (("jobs", True), ("control", False))}
        evidence: dict[str, int] = {"fresh_processes": len(settings)}
        kernels, apart = kernels_digest(), 0
        checks: list[KernelCheck] = []
        for setting in settings:
            request = {
                "model": str(folder), "tier": tier, "threads": setting.threads, "offset": setting.offset,
                "pool": self._shared_pool, "probe_seed": self.probe_seed, **asked,
            }  # fmt: skip
            with child(request, setting.variables, None, module="detlab.verify.worker") as made:
                logits = load_file(made / "logits.safetensors")
                seen = json.loads((made / "evidence.json").read_text(encoding="utf-8"))
            evidence |= {name: max(value, evidence.get(name, 0)) for name, value in seen["counts"].items()}
            apart += seen["kernels"] != kernels
            where = ", ".join(f"{name}={value}" for name, value in setting.way.items())
            checks += [KernelCheck.from_json(check | {"where": where}) for check in seen["checks"]]
            for is_tier, name in ((True, "tier"), (False, "stock")):
                self.is_tier = is_tier
                for number, (prompt, way, _, expected) in enumerate(jobs[is_tier]):
                    actual = logits[f"{name}.{number}"][0]
                    sides = [(side.argmax(-1), side) for side in (actual, expected)]
                    self._compare(result, prompt, replace(way, **setting.way), way, self._positions(prompt, way), *sides)
        if axis == "isa":
            evidence["settings_that_move_stock_kernels"] = apart
        result.evidence, result.seconds = evidence, time.perf_counter() - started
        self._require(result)
        return checks


def first_mismatch(prompt_id: str, way: Way, against: Way, positions: Sequence[int], actual: tuple[Tensor, Tensor],
                   expected: tuple[Tensor, Tensor]) -> Mismatch:  # fmt: skip
    """Describes the first position at which two servings of a text differ.

    Args:
        prompt_id, way, against: what was served, and how.
        positions: token positions of the rows.
        actual, expected: tokens int64 [positions] and logits [positions, vocab].
    """
    for row, position in enumerate(positions):
        a, b = actual[1][row].contiguous(), expected[1][row].contiguous()
        tokens = (int(actual[0][row]), int(expected[0][row]))
        if not bits.equal(a, b):
            count = int((bits.int_view(a) != bits.int_view(b)).sum())
            ulp = int(bits.ulp_distance(a, b).max())
            return Mismatch(prompt_id, position, str(way), str(against), (count, a.numel()), ulp, tokens)
        if tokens[0] != tokens[1]:
            return Mismatch(prompt_id, position, str(way), str(against), (0, a.numel()), 0, tokens)
    raise AssertionError("the two servings are equal")
