"""Recovers the order in which an op adds its terms, by asking the op.

**Method** (FPRev). Put a huge number +M at term i, -M at term j, and units elsewhere. A unit that meets M before M and -M have
cancelled is swallowed; a unit added outside the smallest subtree that holds both i and j survives. So ``n - output`` is the
size of that subtree, and all of these sizes together are the tree. Only as many of them are asked for as are needed: the sizes
seen from one term order all others along its path to the root and split them into subtrees, which are then asked for alone,
with zeros elsewhere.

**Terms that are never negative** (squares, exponentials) cannot cancel. There, 1 stands at i, almost half a unit in the last
place of 1 at j, and a sliver on a set of other terms. Each of these alone is rounded away when it meets the 1; j and enough
slivers together are not. The weight of j sets how many slivers it takes, so that bisection finds how many terms j has met
when it reaches i.

**Assumptions**, each of which is checked, and refused where it does not hold:

* M swallows what is added to it: M = 2**100 in float32, bfloat16 and float64 (units up to 2**46 in a float64 accumulator);
  in float16, M = 2**15 and units of 2**-24, which a float32 accumulator still swallows (2**15 * 2**-24 = 2**-9).
* Survivors can be counted exactly: up to 2**24 in a float32 output, 2048 in float16, 256 in bfloat16, and a quarter of that
  where the op scales its sum. Units stand on no more terms than that at once; larger sets are counted in parts.
* The order depends on shapes, never on the numbers, and each call repeats the last one's order.
* Every term counts once and with one weight. Fused multiply-adds are invisible, since a product with 1 is exact; so is an
  accumulator that starts from 0. The replay on random numbers tells them apart.
* A node that adds more than two terms at once drops what is far below its largest term. One that adds exactly, however far
  apart its terms are, gives contradicting sizes and is refused.

Source: P. Xie, Y. Gao, J. Xue, "FPRev: Revealing Floating-Point Accumulation Orders in Software/Hardware Implementations",
USENIX ATC 2025, arXiv 2411.00442. The way with slivers, and asking only on subsets with a pivot at random, are our own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from detlab import bits
from detlab.divergence.accumulation_replay import BLOCKS, FUSED, NONE, ROUNDED, Arithmetic, Trials
from detlab.divergence.summands import Shape, Summands, summands_of
from detlab.divergence.trees import AccumulationTree, is_count
from detlab.errors import AccumulationError, UsageError

#: (M, unit, most units at once) by dtype of the terms; the first that the op's output can show is taken.
_HUGE = ((2.0**100, 1.0, 1 << 40),)
_MASKS: dict[torch.dtype, tuple[tuple[float, float, int], ...]] = {
    torch.float32: _HUGE,
    torch.bfloat16: _HUGE,
    torch.float64: _HUGE,
    # A mean of float16 would lose 2**-24 / n: larger units then, few enough at once for M to swallow them all.
    torch.float16: tuple((2.0**15, 2.0**-log, min(1 << 14, 1 << log - 10)) for log in (24, 14, 13, 12)),
}
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
MAX_POSITIVE = 8192  # beyond it the slivers come too near to the error of exp and log
Sizes = Callable[[int, Sequence[int], int | None], list[int]]


def accumulation_tree(
    fn: Any, n: int, *, dtype: torch.dtype = torch.float32, rows: int | None = None, row: int | None = None,
    columns: int | None = None, column: int | None = None, trials: int = 30, seed: int = 0,
) -> AccumulationTree:  # fmt: skip
    """Recovers the order in which an op adds its n terms, and replays it on random numbers.

    >>> tree = accumulation_tree(lambda x: x[2] + (x[0] + x[1]), 3)
    >>> tree.nodes, tree.is_confirmed
    (((0, 1), (3, 2)), True)

    Args:
        fn: a function that takes a tensor [n] and returns the sum of its terms (or a fixed multiple of it); or the name of an
            op: "sum(-1)", "sum(0)", "mean", "cumsum", "index_add", "mm", "linear", "attention" (the weighted sum of V),
            "softmax" (its denominator), "rms_norm" (its mean of squares); or torch's function of that name; or an
            ``nn.Linear``, whose shape and dtype are used (its bias is left out). Named ops run on the CPU; a function may
            move its terms to another device.
        n: number of terms: the length of the axis that is summed.
        dtype: of the terms: float32, bfloat16, float16 or float64.
        rows, row: for named ops: the call has this many rows (queries, for attention), and this one's sum is meant; 1 and 0
            where not given. The order often depends on ``rows``.
        columns, column: likewise for the other axis of the output; 64 and 0.
        trials: random inputs on which the tree is replayed; 0 leaves it unconfirmed.
        seed: of these inputs.

    Returns:
        The tree. `is_confirmed` tells whether the replay gave the op's bits every time; a tree that did not says so wherever it
        is shown.

    Raises:
        UsageError: arguments that cannot be right.
        AccumulationError: what was asked is not the sum of its n terms, is not run-to-run deterministic, or adds in an
            order that is no tree.

    The module's docstring states the method and what it assumes. Nothing is cached, and every call has the true shape.
    """
    _check_arguments(n, dtype, trials, seed)
    asked = {"rows": rows, "row": row, "columns": columns, "column": column}
    given: dict[str, int] = {name: value for name, value in asked.items() if value is not None}
    if wrong := [name for name, value in given.items() if not is_count(value)]:
        raise UsageError(f"{', '.join(wrong)} must be whole numbers of at least 0; got {given}.")
    source = summands_of(fn, Shape(n=n, dtype=dtype, **given), set(given))
    with torch.no_grad():
        probe = Probe(source)
        nodes = recover(n, probe.sizes) if n > 1 else []
        made = source.trials(trials, seed) if trials else None
        if made is not None and not bits.equal(made.actual, made.again):
            raise AccumulationError(
                f"{source.words} gives other bits for the same input: it is not run-to-run deterministic and has no one order. "
                "Ask under conditions in which it repeats its bits, such as one thread."
            )
    tree = AccumulationTree.from_nodes(n, nodes)
    if made is None:
        return replace(tree, op=source.words, queries=probe.queries)
    return replayed(replace(tree, op=source.words, queries=probe.queries), made)


def _check_arguments(n: int, dtype: torch.dtype, trials: int, seed: int) -> None:
    for name, value in (("n", n), ("trials", trials), ("seed", seed)):
        if not is_count(value):
            raise UsageError(f"accumulation_tree needs {name} to be a whole number of at least 0; got {name}={value!r}.")
    if dtype not in _MASKS:
        raise UsageError(f"accumulation_tree reads sums of {', '.join(map(str, _MASKS))}; got dtype={dtype!r}.")


def recover(n: int, sizes: Sizes, seed: int = 0) -> list[list[int]]:
    """Builds a tree from sizes of subtrees.

    Args:
        n: number of terms, at least 1.
        sizes: called as ``sizes(pivot, others, anchor)``. Counts, among the pivot, the others and the anchor (if it is not
            None), the terms in the smallest subtree that holds the pivot and each of the others.
        seed: of the choice of pivots.

    Returns:
        Children of each inner node, children before parents, the root last.

    Raises:
        AccumulationError: the sizes are not those of a tree.

    From one pivot, the sizes name the nodes on its path to the root, and which terms hang where. Each set of terms that hangs
    at one node is then taken apart alike: as one subtree, or as several if the node adds more than two. Which of these it is,
    an anchor shows: a term that hangs at the node elsewhere. The first term is the first pivot, as most chains begin there;
    where that leaves most terms together, a pivot at random makes n log n queries likely.
    """
    choose = random.Random(seed)
    children: list[list[int]] = []  # of node n + k; parents may come before children here
    top: list[int] = []
    tasks: list[tuple[list[int], int | None, list[int], bool]] = [(list(range(n)), None, top, False)]
    while tasks:
        members, anchor, parent, is_hard = tasks.pop()
        if len(members) == 1:
            parent.append(members[0])
            continue
        pivot = choose.choice(members) if is_hard else members[0]
        others = [term for term in members if term != pivot]
        total = len(members) + (anchor is not None)
        groups: dict[int, list[int]] = {}
        for term, size in zip(others, sizes(pivot, others, anchor), strict=True):
            groups.setdefault(size, []).append(term)
        beside = groups.pop(total, []) if anchor is not None else []
        node, joined = pivot, 1
        for size in sorted(groups):
            joined += len(groups[size])
            if joined != size:
                raise AccumulationError(
                    f"these are not the sizes of a tree: {joined} terms are added where terms {groups[size][0]} and {pivot} "
                    f"meet, and {size} were swallowed there. Either this is no sum, or its order depends on the "
                    "numbers, or some node adds several terms exactly."
                )
            children.append([node])
            tasks.append((groups[size], pivot, children[-1], 2 * len(groups[size]) > len(members)))
            node = n + len(children) - 1
        parent.append(node)
        if beside:
            tasks.append((beside, anchor, parent, False))
    return _parents_last(n, top[0], children)


def _parents_last(n: int, root: int, children: list[list[int]]) -> list[list[int]]:
    order = []
    stack = [root]
    while stack:
        node = stack.pop()
        if node >= n:
            order.append(node)
            stack.extend(children[node - n])
    new = {node: n + at for at, node in enumerate(reversed(order))}
    return [[new.get(child, child) for child in children[node - n]] for node in reversed(order)]


class Probe:
    """Asks an op for sizes of subtrees: by masks where its terms may be negative, and by slivers where they may not.

    Attributes:
        sizes: what `recover` needs; absent where there are fewer than two terms.
        queries: calls made so far.
    """

    def __init__(self, source: Summands) -> None:
        self.source = source
        self.queries = 0
        if source.n < 2:
            return
        if source.ask is not None:
            self.sizes: Sizes = self._signed
            self._prepare()
        else:
            if source.n > MAX_POSITIVE:
                raise UsageError(
                    f"{source.words}: terms that are never negative are told apart up to n={MAX_POSITIVE}; got n={source.n}."
                )
            self.sizes = self._positive

    def _ask(self, terms: Tensor) -> Tensor:
        assert self.source.ask is not None
        self.queries += 1
        return self.source.ask(terms)

    # -------------------------------------------------------------------------------------------------- +M, -M and units
    def _prepare(self) -> None:
        """Chooses M and the unit, measures the scale, and refuses what is not a sum."""
        source = self.source
        for huge, unit, most in _MASKS[source.dtype]:
            self.huge, self.unit, self.limit = huge, unit, most
            one = self._ask(self._units([0]))
            scale = float(one) / self.unit if source.scale is None else source.scale
            # The output's least steps in one unit: where they are few and no whole number, counts cannot be told apart.
            steps = self.unit * abs(scale) / (torch.finfo(one.dtype).smallest_normal * torch.finfo(one.dtype).eps)
            is_seen = math.isfinite(scale) and scale != 0 and abs(float(one) / self.unit / scale - 1) < 0.2
            if is_seen and (steps > 4 or steps.is_integer()):
                break
        else:
            why = "this is no sum of its terms"
            if is_seen:
                why = f"{one.dtype} is too coarse to count such steps. Ask for the sum instead of the mean, or for fewer terms"
            raise AccumulationError(f"{source.words}: one term of {self.unit} among zeros gives {float(one)}: {why}.")
        self.scale = scale
        digits = _DIGITS[one.dtype]
        self.limit = min(self.limit, 2**digits if scale == 1 else 2 ** (digits - 2))
        if source.is_foreign:
            self._refuse_what_is_no_sum()

    def _units(self, where: Sequence[int], value: float | None = None) -> Tensor:
        terms = torch.zeros(self.source.n, dtype=self.source.dtype)
        terms[torch.as_tensor(where, dtype=torch.long)] = self.unit if value is None else value
        return terms

    def _refuse_what_is_no_sum(self) -> None:
        """Zeros give 0; each unit gives the same, its double twice and its negative the opposite; k units give k."""
        name, n = self.source.words, self.source.n
        if (found := float(self._ask(self._units([])))) != 0:
            raise AccumulationError(f"{name} gives {found} for terms that are all 0: this is no sum of its terms.")
        weights = [float(self._ask(self._units([at]))) / self.unit for at in range(n)]
        if other := [at for at, weight in enumerate(weights) if weight != weights[0]]:
            raise AccumulationError(
                f"{name} gives {weights[0]} for a unit at term 0 and {weights[other[0]]} for one at term {other[0]}: its terms "
                "do not weigh the same. Ask about the sum itself, with the weights left out or all 1."
            )
        for at in sorted({0, n // 2, n - 1}):
            for factor in (-1.0, 2.0):
                found = float(self._ask(self._units([at], factor * self.unit))) / self.unit
                if found != factor * weights[at]:
                    raise AccumulationError(
                        f"{name} gives {weights[at]} for a unit at term {at} and {found} for {factor:g} units: "
                        "it is not linear, so it is no sum of its terms."
                    )
        few = list(range(min(n, self.limit)))
        if (count := self._count(self._units(few))) != len(few):
            raise AccumulationError(f"{name} gives {count} times a unit for {len(few)} units: this is no sum of its terms.")

    def _count(self, terms: Tensor) -> int | float:
        """How many units the output holds; not a whole number where it is no count."""
        found = float(self._ask(terms)) / self.unit / self.scale
        near = round(found) if math.isfinite(found) else 0
        return near if abs(found - near) <= (0 if self.scale == 1 else 0.2) else found

    def _signed(self, pivot: int, others: Sequence[int], anchor: int | None) -> list[int]:
        members = [pivot, *others, *([] if anchor is None else [anchor])]
        if len(members) > 2 * self.limit:
            return self._ordered(pivot, others, anchor)
        survivors = [0] * len(others)
        for start in range(0, len(members), self.limit):
            piece = members[start : start + self.limit]
            counts = self._survivors(pivot, others, piece)
            survivors = [total + count for total, count in zip(survivors, counts, strict=True)]
        return [len(members) - count for count in survivors]

    def _survivors(self, pivot: int, others: Sequence[int], piece: Sequence[int]) -> list[int]:
        """For each of the others, how many units on the piece's terms +M at the pivot and -M at that term leave."""
        units = self._units(piece)
        here = set(piece)
        units[pivot] = self.huge
        most = len(piece) - (pivot in here)
        counts = []
        for term in others:
            units[term] = -self.huge
            count = self._count(units)
            units[term] = self.unit if term in here else 0.0
            if not isinstance(count, int) or not 0 <= count <= most - (term in here):
                raise AccumulationError(
                    f"{self.source.words}: with +M at term {pivot}, -M at term {term} and {most - (term in here)} units "
                    f"elsewhere, the output holds {count} units: this is no sum that swallows what is added to M."
                )
            counts.append(count)
        return counts

    def _ordered(self, pivot: int, others: Sequence[int], anchor: int | None) -> list[int]:
        """Sizes where few units can be counted at once: terms are put in the order in which the pivot meets them.

        Units stand on one term of each of some places along the pivot's path; those that survive lie further up than the term
        that is asked for. Sizes follow from the places. Each is then held against one count of units at random, which no
        order but the true one gives every time.
        """
        terms = [*others, *([] if anchor is None else [anchor])]
        groups: list[list[int]] = []  # terms that hang at one node of the path, from the pivot up
        for term in terms:
            low, high = 0, len(groups)  # it is at group low - 1, or between that and group low; or further up, below high
            while low < high:
                step = -(-(high - low) // self.limit)
                picked = list(range(low, high, step))
                (above,) = self._survivors(pivot, [term], [groups[at][0] for at in picked])
                below = len(picked) - above  # picked groups that the term's subtree holds
                high = picked[below] if above else high
                low = picked[below - 1] + 1 if below else low
            is_there = low > 0 and self._survivors(pivot, [groups[low - 1][0]], [term]) == [0]
            if is_there:
                groups[low - 1].append(term)
            else:
                groups.insert(low, [term])
        sizes: dict[int, int] = {}
        place: dict[int, int] = {}
        total = 1
        for at, group in enumerate(groups):
            total += len(group)
            sizes |= dict.fromkeys(group, total)
            place |= dict.fromkeys(group, at)
        choose = random.Random(pivot)
        for term in others:
            piece = choose.sample(terms, min(self.limit, len(terms)))
            expected = sum(place[other] > place[term] for other in piece)
            (found,) = self._survivors(pivot, [term], piece)
            if found != expected:
                raise AccumulationError(
                    f"{self.source.words}: from term {pivot}, the terms do not line up: {found} of {len(piece)} units are left "
                    f"beside term {term}, and {expected} should be. Its order depends on the numbers, or this is no tree."
                )
        return [sizes[term] for term in others]

    # --------------------------------------------------------------------------------------------- 1, half a ULP, slivers
    def _positive(self, pivot: int, others: Sequence[int], anchor: int | None) -> list[int]:
        """Bisects, for each other term, how many terms the pivot has met when it reaches that one; sizes follow."""
        source = self.source
        assert source.exceeds is not None
        ulp = 2.0**-23
        sliver = ulp * 2.0 ** -(2 + max(1, len(others) - 1).bit_length())  # all slivers together: a quarter of a ULP
        terms = torch.zeros(source.n)
        terms[torch.as_tensor(others, dtype=torch.long)] = sliver

        def has_met(count: int, term: int) -> bool:
            terms[pivot] = ulp / 2 - (count - 0.5) * sliver
            terms[term] = 1.0
            self.queries += 1
            found = bool(source.exceeds(terms, term))  # type: ignore[misc]
            terms[term] = sliver
            return found

        met = []
        for term in others:
            low, high = 0, len(others)  # has met at least `low` others, fewer than `high`
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if has_met(middle, term) else (low, middle)
            met.append(low)
        if len(others) > 1 and has_met(len(others), others[0]):
            raise AccumulationError(f"{source.words}: what is added to 1 is not rounded away, so the order cannot be seen.")
        sizes = {count: 1 + sum(other <= count for other in met) for count in set(met)}
        for count in sizes:
            if sum(other < count for other in met) != count:
                raise AccumulationError(
                    f"{source.words}: from term {pivot}, the terms do not line up in an order of additions: this is no tree "
                    "of additions of two."
                )
        return [sizes[count] for count in met]


# ------------------------------------------------------------------------------------------------------------------- replay
def replayed(tree: AccumulationTree, made: Trials) -> AccumulationTree:
    """The tree with what replaying it on trials, and replaying its controls, showed."""
    how, reproduced = arithmetic_of(tree, made)
    control = min((_agreeing(made, how.finish, _total(wrong, made, how)) for wrong in tree.controls()), default=None)
    return replace(tree, arithmetic=how, reproduced=reproduced, trials=len(made.actual), control=control)


def arithmetic_of(tree: AccumulationTree, made: Trials) -> tuple[Arithmetic, int]:
    """The first arithmetic that gives the op's bits every time; where none does, the one that does most often."""
    kind = str(made.terms.dtype).removeprefix("torch.")
    accumulators = [kind] if kind == "float64" else list(dict.fromkeys(["float32", "float64", kind]))
    ways = [(ROUNDED, False), (FUSED, False), (FUSED, True), (BLOCKS, False), (BLOCKS, True)]
    best: tuple[Arithmetic, int] | None = None
    for accumulator in accumulators:
        for products, starts_last in ways if made.others is not None else [(NONE, False)]:
            how = Arithmetic(accumulator, products, starts_last)
            total = _total(tree, made, how)
            for name in made.finishes:
                count = _agreeing(made, name, total)
                if best is None or count > best[1]:
                    best = replace(how, finish=name), count
                if count == len(made.actual):
                    return best
    assert best is not None
    return best


def _agreeing(made: Trials, finish: str, total: Tensor) -> int:
    found = made.finishes[finish](total).to(made.actual.dtype)
    return int((bits.int_view(found) == bits.int_view(made.actual)).sum())


def _total(tree: AccumulationTree, made: Trials, how: Arithmetic) -> Tensor:
    return tree.replay(made.terms, made.others, how)
