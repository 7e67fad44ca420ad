"""Pairs what two traces have in common: rows by (prompt, position), ops by module and order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from detlab.trace.records import Array, Trace, row_keys, split_keys


@dataclass(frozen=True)
class CallPair:
    """Two calls, and the token rows (sorted keys) that are compared between them."""

    a: int
    b: int
    keys: Array

    @property
    def prompts(self) -> Array:
        """Prompts with at least one row in the pair."""
        return np.unique(split_keys(self.keys)[0])


def pair_calls(a: Trace, b: Trace, limits: dict[int, int] | None = None) -> list[CallPair]:
    """Decides between which calls each token row is compared.

    A row is compared step by step where both traces computed it in the same step, and otherwise where each computed it
    first: so a chunked prefill meets a whole one, and a decode step meets a prefill of the same text.

    Args:
        a, b: the traces.
        limits: per prompt, the first position that is left out (texts that part there are not the same question).

    Returns:
        Pairs in the order of ``a``'s calls.
    """
    of_a, of_b = _row_table(a, limits), _row_table(b, limits)
    chosen: dict[tuple[int, int], list[int]] = defaultdict(list)
    for key, steps_a in of_a.items():
        steps_b = of_b.get(key)
        if steps_b is None:
            continue
        common = steps_a.keys() & steps_b.keys()
        if common:
            for step in common:
                chosen[steps_a[step], steps_b[step]].append(key)
        else:
            chosen[steps_a[min(steps_a)], steps_b[min(steps_b)]].append(key)
    return [CallPair(ca, cb, np.array(sorted(keys), np.int64)) for (ca, cb), keys in sorted(chosen.items())]


def _row_table(trace: Trace, limits: dict[int, int] | None) -> dict[int, dict[int, int]]:
    """Row key -> step -> call that computed it."""
    table: dict[int, dict[int, int]] = {}
    for call in trace.calls:
        prompt, position = call.row_names(range(len(call.prompts)), call.query)
        named = prompt >= 0
        if limits is not None:
            bound = np.array([limits.get(int(p), 1 << 30) for p in prompt], dtype=np.int64)
            named &= position < bound
        for key in row_keys(prompt[named], position[named]).tolist():
            table.setdefault(key, {}).setdefault(call.step, call.index)
    return table


#: The ops of a call that compute, as (module, op).
Program = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class OpAlignment:
    """Which ops of two calls correspond: pairs of indices into the calls' op lists, and what only one side has."""

    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]


class Aligner:
    """Aligns the ops of calls; calls that run the same program are aligned once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Program, Program], OpAlignment] = {}

    def __call__(self, a: Program, b: Program) -> OpAlignment:
        """Aligns two programs."""
        found = self._known.get((a, b))
        if found is None:
            found = self._known[a, b] = align(a, b)
        return found


def align(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> OpAlignment:
    """Aligns two programs, each a list of (module, op), module by module.

    Within a module the longest matching runs of op names correspond, so that an extra mask op on one side does not shift
    its neighbours. ``align(b, a)`` gives the same pairs, turned round.
    """
    if list(a) == list(b):
        return OpAlignment(tuple((i, i) for i in range(len(a))), (), ())
    of_a: dict[str, list[int]] = defaultdict(list)
    of_b: dict[str, list[int]] = defaultdict(list)
    for i, (module, _) in enumerate(a):
        of_a[module].append(i)
    for i, (module, _) in enumerate(b):
        of_b[module].append(i)
    pairs: list[tuple[int, int]] = []
    for module, at_a in of_a.items():
        at_b = of_b.get(module, [])
        names_a, names_b = [a[i][1] for i in at_a], [b[i][1] for i in at_b]
        pairs += [(at_a[i], at_b[j]) for i, j in _matches(names_a, names_b)]
    pairs.sort()
    in_a, in_b = {i for i, _ in pairs}, {j for _, j in pairs}
    return OpAlignment(
        tuple(pairs), tuple(i for i in range(len(a)) if i not in in_a), tuple(j for j in range(len(b)) if j not in in_b)
    )


def _matches(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """Pairs of equal names, in order on both sides."""
    if (len(a), a) > (len(b), b):  # among runs of one length the matcher prefers those early in its first argument
        return [(i, j) for j, i in _matches(b, a)]
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return [(block.a + k, block.b + k) for block in blocks for k in range(block.size)]
