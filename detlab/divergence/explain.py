"""Why an op gave other bits: it is executed alone on the inputs of the runs, and one factor after another is changed.

The explanation is about the op and the inputs that were captured, and it is proved on them: executed alone, the op must give
a's bits on a's call and b's bits on b's call. Where it does not, the explanation says so and claims nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from detlab import bits
from detlab.divergence.explain_attention import Attention
from detlab.divergence.explain_factors import Factor, Subject, body_and_tail, factors_of, judged
from detlab.divergence.explain_region import explain_region
from detlab.divergence.explain_result import (
    ARRIVAL,
    BODY_AND_TAIL,
    INSTRUCTION_SET,
    KERNEL,
    NO_ORIGIN,
    NOT_REPRODUCED,
    NOTHING,
    PARTITION,
    ROUNDING,
    Explanation,
    Mechanism,
)
from detlab.divergence.explain_trees import products_of, step_of, tree_of
from detlab.divergence.kernels import CAPS, VERBOSE, Kernel, in_fresh_process
from detlab.divergence.replay import Again, Met, Side, comparison_of, int_view, meet, sides_of
from detlab.divergence.replay_op import Operation, Row, bits_at, row_of
from detlab.divergence.result import IDENTICAL_VERDICT, Comparison, Divergence
from detlab.divergence.rows import ORIGIN, OpComparison
from detlab.errors import DetlabError
from detlab.trace.layout import rows_of
from detlab.trace.records import REGION, Array, split_keys

INSTRUCTION_SET_FACTOR = "instruction set"
#: Ops that are one product of matrices: the libraries do all of it.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn._linear_pointwise", "_grouped_mm")
#: Factors that a sentence calls otherwise than the table does.
_IN_WORDS = {
    "threads": "number of threads",
    "tokens after the row (queries and hidden keys)": "number of tokens after the row",
    "queries before the row": "number of queries before the row",
    "queries after the row": "number of queries after the row",
    "masked keys before those the row sees": "number of masked keys (padding) before those the row sees",
    "masked keys after those the row sees": "number of masked keys after those the row sees",
    "rows that share the row's expert": "number of rows that share the row's expert",
}
#: Rows of an origin that are looked at.
MOST_ROWS = 4


def explain(what: Divergence | Comparison, *, again: Sequence[Again] | None = None, model: nn.Module | None = None,
            processes: bool = True, repetitions: int = 30) -> Explanation:  # fmt: skip
    """Says why an op gave other bits, by executing it alone with one factor changed at a time.

    Args:
        what: an origin, or a comparison, whose first divergence is taken.
        again, model: for bare traces: two functions that repeat the calls of a and of b, and the model.
        processes: also execute the op in fresh processes: to read what MKL and oneDNN log, and under other instruction sets
            (about 2 s each).
        repetitions: how often the same call is repeated, to see differences from run to run.

    Returns:
        An `Explanation`: discriminator table, kernels and accumulation trees of both sides, and the mechanism in a sentence.

    Raises:
        UsageError: the argument is no divergence of a comparison, or its runs cannot be executed again.
        TraceError: the repetition did not come by the op.
    """
    started = time.perf_counter()
    comparison, divergence = comparison_of(what)
    if divergence is None and comparison.verdict == IDENTICAL_VERDICT:
        return Explanation(None, Mechanism(NO_ORIGIN, "The runs are identical: there is nothing to explain."))
    if divergence is None:
        why = "; ".join(comparison.notes) or "see the comparison"
        return Explanation(None, Mechanism(NO_ORIGIN, f"The runs differ, and no op can be named where they part: {why}."))
    if divergence.kind != "origin":
        return Explanation(divergence, Mechanism(NO_ORIGIN, _carried(divergence)))
    found = next(f for f in comparison.detail.ops.differing() if f.a == divergence.op_index)
    a, b = sides_of(comparison, again, model)
    if REGION in [side.trace.ops[op].op for side, op in ((a, found.a), (b, found.b)) if 0 <= op < len(side.trace.ops)]:
        return explain_region(a, b, found, divergence)
    made = _Explainer(a, b, found, divergence, processes, repetitions).explain()
    made.seconds = time.perf_counter() - started
    return made


def _carried(divergence: Divergence) -> str:
    broken = ", ".join(name for name, state in divergence.inputs.items() if state == "differs") or "an input"
    source = f" (from {divergence.source})" if divergence.source else ""
    return f"This op was given other inputs: {broken} differed already{source}. It made no difference of its own that shows."


class _Explainer:
    """Collects the evidence for one origin."""

    def __init__(self, a: Side, b: Side, found: OpComparison, divergence: Divergence, processes: bool,
                 repetitions: int) -> None:  # fmt: skip
        self.sides, self.found, self.divergence = (a, b), found, divergence
        self.processes, self.repetitions = processes, repetitions
        self.met = (meet(a, found.a), meet(b, found.b))
        self.ops = (_operation(self.met[0], a), _operation(self.met[1], b))
        self.counts = (_threads(a), _threads(b))

    def explain(self) -> Explanation:
        """Looks at everything in turn."""
        result = Explanation(self.divergence, Mechanism(NOTHING, ""))
        rows = self._rows(result)
        outputs = [met.output for met in self.met]
        result.is_faithful = tuple(_repeats(met, side) for met, side in zip(self.met, self.sides, strict=True))
        alone = [self._alone(side, result) for side in (0, 1)]
        for number, found in enumerate(alone):
            if self.sides[number].variables and found is not None:  # what ran in this process is not what the run did
                outputs[number] = found
        bits = tuple(tuple(bits_at(outputs[side], pair[side].at) for pair in rows) for side in (0, 1))
        self._bits = (bits[0], bits[1])
        result.reproduced = (
            self._is_same(0, alone[0], rows, bits[0], result), self._is_same(1, alone[1], rows, bits[1], result)
        )  # fmt: skip
        subject = Subject(self.ops[0], self.ops[1], rows, bits[0], bits[1])
        result.num_rows = len(rows)
        result.differs_alone = bits[0] != bits[1]
        result.factors = factors_of(subject, self.counts, self.repetitions)
        result.errors = judged(subject, outputs)
        element = _element(outputs, rows[0])
        result.tail = self._tail(rows, outputs)
        pairs = [(Attention.of(self.ops[0], x), Attention.of(self.ops[1], y)) for x, y in rows]
        stages = [x.stages(y) for x, y in pairs if x is not None and y is not None]
        result.stages = tuple(part for part in ("scores", "softmax", "values") if any(part in found for found in stages))
        result.kernels = tuple([Kernel("ATen", op.name)] for op in self.ops)
        if any(side.variables for side in self.sides):
            result.factors.append(self._own_instruction_sets(rows))
        for side, op in enumerate(self.ops):
            tree, why = tree_of(op, rows[0][side], element)
            result.trees[side] = tree
            if why and why not in result.notes:
                result.notes.append(f"no accumulation tree: {why}")
        result.notes = list(dict.fromkeys(result.notes))
        if self.processes:
            self._fresh(result, rows)
        result.mechanism = mechanism_of(result, self.ops)
        return result

    def _rows(self, result: Explanation) -> list[tuple[Row, Row]]:
        """Some of the origin's rows: those at the ends and between them, of the rows whose first output differs."""
        keys = self.found.keys[self.found.state == ORIGIN]
        prompts, _ = split_keys(keys)
        mine = keys[prompts == self.divergence.prompt]
        cut = [self._cut(side, mine) for side in (0, 1)]
        places = list(range(len(mine)))
        if not any(side.variables for side in self.sides):
            flat = [met.output.reshape(-1) for met in self.met]
            unlike = [at for at in places if bits_at(flat[0], cut[0][at]) != bits_at(flat[1], cut[1][at])]
            if not unlike:
                result.notes.append("the op's first outputs agree: only a further output, such as a log-sum-exp, differs")
            places = unlike or places
        spread = np.linspace(0, len(places) - 1, min(MOST_ROWS, len(places))).round().astype(int)
        picked = [places[i] for i in np.unique(spread)]
        made = [[row_of(int(mine[at]), cut[side][at], self.ops[side].shape) for at in picked] for side in (0, 1)]
        return list(zip(*made, strict=True))

    def _cut(self, side: int, keys: Array) -> list[Tensor]:
        """Elements of rows of a side's output, row by row."""
        elements = self.met[side].elements().of(keys)
        starts = torch.cumsum(elements.lengths, 0) - elements.lengths
        return [elements.at[s : s + n] for s, n in zip(starts.tolist(), elements.lengths.tolist(), strict=True)]

    def _alone(self, side: int, result: Explanation) -> Tensor | None:
        """The op of one side executed alone, in a fresh process where the side's condition asks for one."""
        variables = self.sides[side].variables
        if not variables:
            return self.ops[side].run()
        try:
            made, _ = in_fresh_process([self.ops[side]], [self.counts[side]], variables)
        except (TypeError, DetlabError) as error:
            result.notes.append(f"{'ab'[side]} could not be executed alone in a fresh process: {error}")
            return None
        return made[0]

    def _is_same(self, side: int, alone: Tensor | None, rows: Sequence[tuple[Row, Row]], bits: Sequence[bytes],
                 result: Explanation) -> bool:  # fmt: skip
        if alone is None or not result.is_faithful[side]:
            return False
        if self.sides[side].variables:
            return self._as_recorded(side, alone)
        return tuple(bits_at(alone, pair[side].at) for pair in rows) == tuple(bits)

    def _as_recorded(self, side: int, alone: Tensor) -> bool:
        """Whether an output has the digests that the run's trace recorded."""
        met, trace = self.met[side], self.sides[side].trace
        recorded = trace.tensors[trace.ops[self.found.b if side else self.found.a].outputs[0]]
        return bool(digests_like(met, alone) == recorded.digests.tolist())

    def _tail(self, rows: Sequence[tuple[Row, Row]], outputs: Sequence[Tensor]) -> bool:
        """Whether one side's bits are the vector body's and the other's the scalar tail's, wherever they differ."""
        places = []
        for ours, theirs in rows:
            unlike = int_view(outputs[0].reshape(-1)[ours.at]) != int_view(outputs[1].reshape(-1)[theirs.at])
            places.append((ours.at[unlike], theirs.at[unlike]))
        at_a, at_b = (torch.cat([pair[side] for pair in places])[:32] for side in (0, 1))
        found = body_and_tail(self.ops[0], at_a) if len(at_a) else None
        if found is None:
            return False
        left, right = (int_view(outputs[side].reshape(-1)[at]) for side, at in enumerate((at_a, at_b)))
        body, tail = map(int_view, found)
        mixed = ((left == body) & (right == tail)) | ((left == tail) & (right == body))
        return bool((body != tail).all()) and bool(mixed.all())

    def _fresh(self, result: Explanation, rows: Sequence[tuple[Row, Row]]) -> None:
        """Libraries' logs, and the op under other instruction sets."""
        kernels: list[list[Kernel]] = []
        try:
            for side in (0, 1):
                if side and self.sides[0].variables == self.sides[1].variables:
                    continue
                both = self.sides[0].variables == self.sides[1].variables
                ops, counts = (self.ops, self.counts) if both else ([self.ops[side]], [self.counts[side]])
                _, found = in_fresh_process(ops, counts, VERBOSE | self.sides[side].variables, profile=True)
                kernels += found
            result.kernels = tuple(kernels)
            if result.factor(INSTRUCTION_SET_FACTOR) is None:
                factor = self._instruction_sets(result, rows)
                result.factors += [] if factor is None else [factor]
        except (TypeError, DetlabError) as error:
            result.notes.append(f"fresh processes could not be asked: {error}")

    def _instruction_sets(self, result: Explanation, rows: Sequence[tuple[Row, Row]]) -> Factor | None:
        """All caps at once first: only where that moves the bits, one process for each library that took part."""
        bits = self._bits

        def under(variables: dict[str, str]) -> tuple[bytes, ...]:
            made, _ = in_fresh_process([self.ops[0]], [self.counts[0]], variables)
            return tuple(bits_at(made[0], pair[0].at) for pair in rows)

        ran = {kernel.library for kernel in result.kernels[0]}
        took_part = {"MKL_CBWR": "MKL" in ran, "ONEDNN_MAX_CPU_ISA": "oneDNN" in ran}
        is_product = not ran.isdisjoint({"MKL", "oneDNN"}) and self.ops[0].name in PRODUCTS
        caps = {name: cap for name, cap in CAPS.items() if took_part.get(name, not is_product)}
        values = {"as this process": tuple(bits_at(self.ops[0].run(), pair[0].at) for pair in rows), _words(caps): under(caps)}
        if len(set(values.values())) > 1 and len(caps) > 1:
            values |= {f"{name}={value}": under({name: value}) for name, value in caps.items()}
        subject = Subject(self.ops[0], self.ops[1], list(rows), *bits)
        return subject.factor(INSTRUCTION_SET_FACTOR, [(name, _constant(found)) for name, found in values.items()])

    def _own_instruction_sets(self, rows: Sequence[tuple[Row, Row]]) -> Factor:
        """The instruction sets of the sides: proved where b's call, executed in this process, gives a's bits.

        Its bits then moved with the process alone, not with its shape or inputs.
        """
        here = tuple(bits_at(self.ops[1].run(), pair[1].at) for pair in rows)
        ours, theirs = (_words(side.variables) if side.variables else "as this process" for side in self.sides)
        values = {ours: self._bits[0], theirs: self._bits[1], "b's call, as this process": here}
        if self.sides[1].variables and here != self._bits[0]:  # its shape matters, too: a's bits show nothing then
            values.pop(ours)
        subject = Subject(self.ops[0], self.ops[1], list(rows), *self._bits)
        found = subject.factor(INSTRUCTION_SET_FACTOR, [(k, _constant(v)) for k, v in values.items()], ours, theirs)
        assert found is not None
        return found


def _operation(met: Met, side: Side) -> Operation:
    return Operation.of(met, side.settings if side.run is not None else nullcontext)


def _constant(found: tuple[bytes, ...]) -> Callable[[], tuple[bytes, ...]]:
    return lambda: found


def _words(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def _threads(side: Side) -> int:
    count = side.run.condition.threads if side.run is not None else None
    return torch.get_num_threads() if count is None else count


def digests_like(met: Met, output: Tensor) -> list[int]:
    """Row digests of an output that has the layout of the one that was met, in the order in which records keep them."""
    assert met.layout is not None
    grid = rows_of(output.reshape(met.output.shape), met.layout).grid
    digests: list[int] = bits.row_digests(grid.reshape(grid.shape[0], -1)).tolist()
    return digests


def _repeats(met: Met, side: Side) -> bool:
    """Whether the repetition gave the digests that the run had."""
    assert met.record is not None
    if side.variables:  # it was repeated in this process for its inputs; the op is executed in its own process
        return True
    recorded: Array = side.trace.tensors[met.record.number].digests
    return bool(np.array_equal(met.record.digests, recorded))


def _element(outputs: Sequence[Tensor], row: tuple[Row, Row]) -> int:
    """The first element of a row that differs."""
    ours, theirs = (int_view(outputs[side].reshape(-1)[row[side].at]) for side in (0, 1))
    unlike = (ours != theirs).nonzero()
    return int(unlike[0]) if len(unlike) else 0


# -------------------------------------------------------------------------------------------------------- the mechanism
def mechanism_of(found: Explanation, ops: Sequence[Operation]) -> Mechanism:
    """The mechanism that the evidence supports, in one sentence; the strongest evidence comes first."""
    assert found.divergence is not None
    op = found.divergence.op
    by_name = {factor.name: factor for factor in found.factors}
    if by_name.get("repetition") is not None and by_name["repetition"].moves:
        times = len(by_name["repetition"].classes)
        return Mechanism(
            ARRIVAL,
            f"Arrival order: the same call, repeated, gave {times} different results; what it adds first depends on which of "
            "its parts is ready first.",
        )
    if not all(found.reproduced):
        which = " and ".join(side for side, held in zip("ab", found.reproduced, strict=True) if not held)
        return Mechanism(
            NOT_REPRODUCED,
            f"Not explained: {op}, executed alone on the captured inputs, does not give the bits of {which}. Something that is "
            "not among its inputs acts on it.",
        )
    cause = _cause(found.factors)
    words = _cause_words(cause)
    if found.tail:
        return Mechanism(
            BODY_AND_TAIL,
            f"Vector body against scalar tail: {words} decides which elements {op} computes in vectors and which one by one, "
            "and the two round differently; each element that differs is the vector's result on one side and the scalar's on "
            "the other.",
        )
    if cause is not None and cause.name == INSTRUCTION_SET_FACTOR:
        return Mechanism(INSTRUCTION_SET, f"Another kernel, of another instruction set: {words} selects it.")
    names = [sorted({(k.library, k.name) for k in side}) for side in found.kernels]
    tree_a, tree_b = found.trees
    if names[0] != names[1]:
        return Mechanism(
            KERNEL, f"Another kernel: {words} selects {_listed(names[1], names[0])} where a runs {_listed(names[0], names[1])}."
        )
    logged = dict.fromkeys(f"{k.library} {k.name}" for k in found.kernels[0] if k.library != "ATen")
    library = (", ".join(logged) if op in PRODUCTS else "") or op
    if tree_a is not None and tree_b is not None and tree_a != tree_b:
        steps, products = (step_of(tree_a), step_of(tree_b)), (products_of(tree_a), products_of(tree_b))
        if steps[0] == steps[1] and products[0] != products[1] and all(products):
            return Mechanism(
                KERNEL,
                f"Another kernel behind the one name {library}: {words} makes it add the same products otherwise (a "
                f"{products[0]}; b {products[1]}; the accumulation trees differ, too).",
            )
        if steps[0] != steps[1] and op in PRODUCTS:
            return Mechanism(
                KERNEL,
                f"Another kernel behind the one name {library}: {words} makes it add the same products in another order (terms "
                f"{steps[0]} apart in a, {steps[1]} apart in b; the accumulation trees differ).",
            )
        return Mechanism(
            PARTITION,
            f"Same kernel, another partition: {words} makes {library} cut the same sum into other parts (the accumulation "
            "trees differ).",
        )
    if cause is not None and cause.name == "memory address":
        return Mechanism(
            PARTITION, f"Same kernel, another partition: {words} shifts where its vector loops begin and end."
        )  # fmt: skip
    if cause is not None and cause.name == "threads":
        return Mechanism(
            PARTITION, f"Same kernel, another partition: {words} makes {library} split its work at other places."
        )
    if op.startswith("_scaled_dot_product") and cause is not None:
        return Mechanism(
            PARTITION,
            f"Same kernel, another partition: {words} puts the row's queries and keys at other places of the kernel's tiles"
            f"{_stage_words(found)}.",
        )
    if cause is not None:
        same = " although the accumulation trees are the same" if tree_a is not None and tree_a == tree_b else ""
        start = f"{words[:1].upper()}{words[1:]}"
        return Mechanism(ROUNDING, f"{start} moves the bits{same}: products or intermediate results round otherwise.")
    shapes = [[list(tensor.shape) for _, tensor in op.tensors()] for op in ops]
    if shapes[0] != shapes[1] and found.differs_alone:
        return Mechanism(
            PARTITION,
            f"Same kernel, another partition: the shapes of {op}'s inputs differ ({shapes[0]} in a, {shapes[1]} in b), and no "
            "factor that was tried beside them moves the bits: the same elements stand in other lanes or blocks.",
        )
    return Mechanism(NOTHING, "Nothing that was tried moves the bits: the cause is none of the factors in the table.")


def _stage_words(found: Explanation) -> str:
    words = {
        "scores": "the products of query and key are added in other blocks",
        "softmax": "the softmax denominator is added in other lanes",
        "values": "the weighted sum of values is added in other blocks",
    }
    return "".join(f"; {words[stage]}" for stage in found.stages)


def _cause(factors: Sequence[Factor]) -> Factor | None:
    """The factor that alone turns a's bits into b's; else one whose values of a and of b give different bits."""
    tests: tuple[Callable[[Factor], bool], ...] = (
        lambda f: f.leads_to_b,
        lambda f: f.parts_sides,
    )
    for test in tests:
        for factor in factors:
            if test(factor):
                return factor
    return None


def _cause_words(cause: Factor | None) -> str:
    if cause is None:
        return "the call's shape"
    values = f" ({cause.ours} in a, {cause.theirs} in b)" if cause.ours not in ("", "as in a") else ""
    proof = ", which alone gives b's bits," if cause.leads_to_b else ""
    return f"the {_IN_WORDS.get(cause.name, cause.name)}{values}{proof}"


def _listed(names: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> str:
    own: list[Any] = [f"{library} {name}" for library, name in names if (library, name) not in other]
    return ", ".join(own) or "fewer of them"
