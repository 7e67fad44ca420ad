"""How to put chosen terms into the sum inside an op, and how to read that sum off the op's output.

Every op is called in the one shape that was asked for, with the same number of rows and columns each time: which kernel runs,
and so in which order it adds, may depend on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detlab.divergence.accumulation_replay import Finish, Trials
from detlab.errors import AccumulationError, UsageError

#: The smallest negative exponent that softmax turns into exactly 0 in float32.
_NOTHING = -1.0e4
#: What the CPU's 16-bit attention takes for exp(0): a polynomial that is off by its constant term, cut to a whole number of
#: steps (`fexp_u20` in ATen's vec_base.h and vec512_float.h). It divides by a sum of these, not by n.
_EXP_OF_0 = 1.0 - 898 * 2.0**-24
#: Small changes of a float32 sum near 2, the likeliest first: from just above it, since below it steps are half as long.
_NUDGES = [step * 2.0**-25 for step in (2, 1, 3, 4, 0, 5, 6, 7, 8, -1, -2)]


@dataclass
class Shape:
    """The call that is probed: dtype, and the output element whose sum is meant."""

    n: int
    dtype: torch.dtype = torch.float32
    rows: int = 1
    row: int = 0
    columns: int = 64
    column: int = 0

    @property
    def kind(self) -> str:
        """The dtype's short name."""
        return str(self.dtype).removeprefix("torch.")


@dataclass
class Summands:
    """One sum inside one op.

    Attributes:
        n: number of terms.
        words: the call, for people.
        dtype: of the terms that are put in.
        trials: makes ``count`` random inputs from a seed, and runs the op on each of them twice.
        ask: puts terms [n] in and returns the output element, 0-dim; None where terms cannot be negative.
        exceeds: for terms that are never negative: whether terms [n] (float32) sum to more than their largest one, which
            stands at the given index and is 1.
        scale: output over sum, exactly known (1, or 1/n of a mean); None where it must be measured.
        is_foreign: a user's own function, about which nothing is known yet.
    """

    n: int
    words: str
    dtype: torch.dtype
    trials: Callable[[int, int], Trials]
    ask: Callable[[Tensor], Tensor] | None = None
    exceeds: Callable[[Tensor, int], bool] | None = None
    scale: float | None = 1.0
    is_foreign: bool = False


def draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, reach: int = 4) -> Tensor:
    """Signed numbers of mixed sizes, up to 2**reach, whose bits do not depend on the instruction set; none is 0."""
    integers = torch.randint(-(2**22), 2**22, shape, generator=generator, dtype=torch.int32)
    exponents = torch.randint(-reach, reach + 1, shape, generator=generator, dtype=torch.int32) - 23
    return torch.ldexp((2 * integers + 1).double(), exponents).to(dtype)


def draw_many(
    count: int, sizes: Sequence[tuple[int, ...]], axes: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> list[list[Tensor]]:
    """Random inputs of an op of one or two operands, which add up along an axis of each.

    In every second of them the later half of the terms takes away what the earlier half brought, in another order, and sizes
    range wider. What is left is what rounding did: the bits then depend on the order even where the accumulator is wide.
    """
    made = []
    half = sizes[0][axes[0]] // 2
    reach = 24 if dtype != torch.float16 else 12 // len(sizes)
    for number in range(count):
        if number % 2 == 0:
            made.append([draw(size, dtype, generator) for size in sizes])
            continue
        operands = [draw(size, dtype, generator, reach) for size in sizes]
        order = torch.randperm(half, generator=generator)
        for at, (operand, axis) in enumerate(zip(operands, axes, strict=True)):
            later = operand.narrow(axis, 0, half).index_select(axis, order)
            operand.narrow(axis, operand.shape[axis] - half, half).copy_(-later if at == 0 else later)
            if operand.shape[axis] % 2 and at == 0:
                operand.select(axis, half).mul_(2.0**-reach)  # has no partner, and must not hide the rest
        made.append(operands)
    return made


def plain(total: Tensor) -> Tensor:
    """The sum is the output."""
    return total


def mean_of(n: int) -> dict[str, Finish]:
    """What makes a mean of a sum, in the ways libraries do it."""
    return {"divided by n": lambda total: total / n, "times 1/n": lambda total: total * (1.0 / n)}


def _multiple(ask: Callable[[Tensor], Tensor], shape: Shape) -> dict[str, Finish]:
    """The fixed multiple of the sum that a function returns, read off one term of 1; none where that is 1."""
    if not shape.n:
        return {}
    one = torch.zeros(shape.n, dtype=shape.dtype)
    one[0] = 1.0
    factor = float(ask(one))
    return {} if factor in (0.0, 1.0) or not math.isfinite(factor) else {f"times {factor:.8g}": lambda total: total * factor}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------------------ a user's function
def from_function(fn: Callable[[Tensor], Any], shape: Shape) -> Summands:
    """A function of a tensor of n terms that returns their sum, or a fixed multiple of it."""
    name = getattr(fn, "__name__", type(fn).__name__)

    def ask(terms: Tensor) -> Tensor:
        try:
            found = fn(terms.clone())  # a clone: the function may write to what it is given
        except TypeError as error:
            raise UsageError(
                f"accumulation_tree calls a function with one tensor of n terms, which {name} did not take ({error}). Wrap it, "
                "as in lambda x: fn(x, other)."
            ) from error
        try:
            value = found.detach().cpu() if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"accumulation_tree needs a function that returns one number; {name} returned {found!r}."
            ) from error
        if value.numel() != 1:
            raise UsageError(
                f"accumulation_tree needs a function that returns one number; {name} returned {list(value.shape)}. "
                "Choose one, as in lambda x: fn(x)[0]."
            )
        if not value.is_floating_point():
            raise AccumulationError(f"{name} returned {value.dtype}, and sums of integers have no order that could be seen.")
        return value.reshape(())

    def trials(count: int, seed: int) -> Trials:
        inputs = [x for (x,) in draw_many(count, [(shape.n,)], [0], shape.dtype, _generator(seed))]
        finishes: dict[str, Finish] = {"": plain} | mean_of(max(1, shape.n)) | _multiple(ask, shape)
        actual, again = (torch.stack([ask(x) for x in inputs]) for _ in range(2))
        return Trials(torch.stack(inputs), None, actual, again, finishes)

    return Summands(shape.n, f"{name}, {shape.kind} [{shape.n}]", shape.dtype, trials, ask, scale=None, is_foreign=True)


# --------------------------------------------------------------------------------------------------------- sums of a tensor
def _one_operand(
    shape: Shape, name: str, size: tuple[int, ...], line: tuple[Any, ...], run: Callable[[Tensor], Tensor],
    finishes: dict[str, Finish] | None = None, scale: float = 1.0,
) -> Summands:  # fmt: skip
    """A sum over one line of a tensor: ``line`` indexes the n terms, ``run`` returns the output element."""
    axis = line.index(slice(None)) if slice(None) in line else len(line)
    space = torch.zeros(size, dtype=shape.dtype)

    def ask(terms: Tensor) -> Tensor:
        space[line] = terms
        return run(space)

    def trials(count: int, seed: int) -> Trials:
        inputs = [x for (x,) in draw_many(count, [size], [axis], shape.dtype, _generator(seed))]
        actual, again = (torch.stack([run(x) for x in inputs]) for _ in range(2))
        return Trials(torch.stack([x[line] for x in inputs]), None, actual, again, finishes or {"": plain})

    return Summands(shape.n, f"{name}, {shape.kind} {list(size)}", shape.dtype, trials, ask, scale=scale)


def _sum_last(shape: Shape) -> Summands:
    row = shape.row
    return _one_operand(shape, f"sum(-1) row {row}", (shape.rows, shape.n), (row,), lambda x: x.sum(-1)[row])


def _sum_first(shape: Shape) -> Summands:
    at = shape.column
    size, line = (shape.n, shape.columns), (slice(None), at)
    return _one_operand(shape, f"sum(0) column {at}", size, line, lambda x: x.sum(0)[at])


def _mean(shape: Shape) -> Summands:
    row = shape.row
    return _one_operand(
        shape, f"mean(-1) row {row}", (shape.rows, shape.n), (row,), lambda x: x.mean(-1)[row], mean_of(shape.n), 1 / shape.n
    )


def _cumsum(shape: Shape) -> Summands:
    row = shape.row
    return _one_operand(
        shape, f"cumsum(-1) row {row}, last element", (shape.rows, shape.n), (row,), lambda x: x.cumsum(-1)[row, -1]
    )


def _index_add(shape: Shape) -> Summands:
    row, column = shape.row, shape.column
    index = torch.full((shape.n,), row)
    start = torch.zeros(shape.rows, shape.columns, dtype=shape.dtype)
    words = f"index_add into row {row}, column {column}"
    size, line = (shape.n, shape.columns), (slice(None), column)
    return _one_operand(shape, words, size, line, lambda x: start.index_add(0, index, x)[row, column])


# ----------------------------------------------------------------------------------------------------------------- products
def _products(shape: Shape, name: str, run: Callable[[Tensor, Tensor], Tensor], is_transposed: bool) -> Summands:
    n, row, column = shape.n, shape.row, shape.column
    size = (shape.columns, n) if is_transposed else (n, shape.columns)
    left, right = torch.zeros(shape.rows, n, dtype=shape.dtype), torch.ones(size, dtype=shape.dtype)

    def ask(terms: Tensor) -> Tensor:
        left[row] = terms
        return run(left, right)[row, column]

    def trials(count: int, seed: int) -> Trials:
        terms, others, actual, again = [], [], [], []
        axes = [1, 1 if is_transposed else 0]
        for a, b in draw_many(count, [(shape.rows, n), size], axes, shape.dtype, _generator(seed)):
            terms.append(a[row])
            others.append(b[column] if is_transposed else b[:, column])
            actual.append(run(a, b)[row, column])
            again.append(run(a, b)[row, column])
        return Trials(torch.stack(terms), torch.stack(others), torch.stack(actual), torch.stack(again), {"": plain})

    words = f"{name} row {row}, column {column}, {shape.kind} [{shape.rows}, {n}] x {list(size)}"
    return Summands(n, words, shape.dtype, trials, ask)


def _mm(shape: Shape) -> Summands:
    return _products(shape, "mm", torch.mm, False)


def _linear(shape: Shape) -> Summands:
    return _products(shape, "linear", F.linear, True)


def _attention(shape: Shape) -> Summands:
    """Equal scores: every weight is exp(0) = 1 before the division by their sum, n, so that P.V is a sum of the V's."""
    n, row, column = shape.n, shape.row, shape.column
    query, key = torch.zeros(1, 1, shape.rows, shape.columns, dtype=shape.dtype), torch.zeros(1, 1, n, shape.columns)
    key = key.to(shape.dtype)
    words = f"scaled_dot_product_attention P.V, query {row} of {shape.rows}, column {column}"

    def run(value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)[0, 0, row, column]

    size, line = (1, 1, n, shape.columns), (0, 0, slice(None), column)
    finishes = mean_of(n)
    if shape.dtype in (torch.float16, torch.bfloat16):
        finishes["divided by n times the kernel's exp(0)"] = lambda total: total / (n * _EXP_OF_0)
        finishes["times 1/(n times the kernel's exp(0))"] = lambda total: total * (1.0 / (n * _EXP_OF_0))
    return _one_operand(shape, words, size, line, run, finishes, 1 / n)


# -------------------------------------------------------------------------------------------- terms that are never negative
def _softmax(shape: Shape) -> Summands:
    """The denominator: exp(x - max), so terms between 0 and 1, the largest exactly 1."""
    _only_float32(shape, "softmax")
    n, row = shape.n, shape.row
    size = (shape.rows, n)
    space = torch.zeros(size)

    def exceeds(terms: Tensor, largest: int) -> bool:
        torch.log(terms, out=space[row]).clamp_(min=_NOTHING)
        return float(torch.softmax(space, -1)[row, largest]) < 1.0

    def trials(count: int, seed: int) -> Trials:
        generator = _generator(seed)
        inputs = [-draw(size, shape.dtype, generator).abs() / 4 for _ in range(count)]
        if n == 2:  # too few terms to read an exponential off: only exp(0) and exp(-inf) are known then
            inputs = [torch.where(x < -0.5, _NOTHING, 0.0) for x in inputs]
        places = torch.randint(0, max(1, n), (count,), generator=generator).tolist()
        for x, place in zip(inputs, places, strict=True):
            x[row, place] = 0.0  # the largest, so that x - max is x
        actual, again = (  # exp(0) / denominator: the output in which the denominator stands alone
            torch.stack([torch.softmax(x, -1)[row, place] for x, place in zip(inputs, places, strict=True)]) for _ in range(2)
        )
        terms = torch.stack([exponentials(x[row], place) for x, place in zip(inputs, places, strict=True)])
        return Trials(terms, None, actual, again, {"1 / sum": lambda total: 1.0 / total})

    def exponentials(x: Tensor, place: int) -> Tensor:
        """What softmax itself makes of exp(x), bit by bit: libraries have several exponentials.

        Where a third term makes the denominator exactly 2, the output is half the exponential.
        """
        guess = torch.exp(x)
        if n < 3:
            return guess
        space[row] = _NOTHING
        space[row, place] = 0.0
        for at, (value, near) in enumerate(zip(x.tolist(), guess.tolist(), strict=True)):
            if at == place:
                continue
            third = next(other for other in (0, 1, 2) if other not in (at, place))
            space[row, at] = value
            for nudge in _NUDGES:
                rest = 1.0 - near + nudge
                space[row, third] = math.log(rest) if rest > 0 else _NOTHING
                found = torch.softmax(space, -1)[row]
                if float(found[place]) == 0.5:
                    guess[at] = 2.0 * found[at]
                    break
            space[row, at] = space[row, third] = _NOTHING
        return guess

    return Summands(n, f"softmax(-1) denominator, row {row}, float32 {list(size)}", torch.float32, trials, exceeds=exceeds)


def _rms_norm(shape: Shape) -> Summands:
    """The mean of squares. With an eps of minus the largest term's share, what is left shows one unit in the last place."""
    _only_float32(shape, "rms_norm")
    n, row = shape.n, shape.row
    size = (shape.rows, n)
    space = torch.zeros(size)
    share = float(torch.tensor(1.0) / n)

    def exceeds(terms: Tensor, largest: int) -> bool:
        torch.sqrt(terms, out=space[row])
        found = float(F.rms_norm(space, (n,), eps=-share)[row, largest])
        if not found > 0:  # the mean came out below the largest term's share, or NaN
            raise AccumulationError(f"rms_norm of {n} terms gives {found} where one term is left: its mean cannot be read.")
        return found != math.inf  # 1 / sqrt(0): nothing was added to the largest term

    def trials(count: int, seed: int) -> Trials:
        generator = _generator(seed)
        inputs = [draw(size, shape.dtype, generator) for _ in range(count)]
        rows = torch.stack([x[row] for x in inputs])
        actual, again = (torch.stack([F.rms_norm(x, (n,), eps=1e-6)[row, 0] for x in inputs]) for _ in range(2))
        finishes: dict[str, Finish] = {
            f"{name}, x * rsqrt(mean + eps)": partial(_normed, rows[:, 0], mean) for name, mean in mean_of(n).items()
        }
        return Trials(rows * rows, None, actual, again, finishes)

    return Summands(n, f"rms_norm mean of squares, row {row}, float32 {list(size)}", torch.float32, trials, exceeds=exceeds)


def _normed(x: Tensor, mean: Finish, total: Tensor) -> Tensor:
    return x * torch.rsqrt(mean(total) + 1e-6)


def _only_float32(shape: Shape, name: str) -> None:
    if shape.dtype != torch.float32:
        raise UsageError(
            f"accumulation_tree reads {name} in float32 only; got {shape.kind}, whose outputs are too coarse to show one unit "
            "in the last place of the float32 sum inside."
        )


# ------------------------------------------------------------------------------------------------------------- by their name
#: name -> (adapter, the arguments of `Shape` that it reads beside n and dtype)
OPS: dict[str, tuple[Callable[[Shape], Summands], tuple[str, ...]]] = {
    "sum": (_sum_last, ("rows", "row")),
    "sum(-1)": (_sum_last, ("rows", "row")),
    "sum(0)": (_sum_first, ("columns", "column")),
    "mean": (_mean, ("rows", "row")),
    "cumsum": (_cumsum, ("rows", "row")),
    "index_add": (_index_add, ("rows", "row", "columns", "column")),
    "mm": (_mm, ("rows", "row", "columns", "column")),
    "linear": (_linear, ("rows", "row", "columns", "column")),
    "attention": (_attention, ("rows", "row", "columns", "column")),
    "softmax": (_softmax, ("rows", "row")),
    "rms_norm": (_rms_norm, ("rows", "row")),
}  # fmt: skip
#: Ops whose output is no number where they add nothing.
_NEED_TERMS = ("mean", "cumsum", "attention", "softmax", "rms_norm")
_FUNCTIONS: dict[Any, str] = {
    torch.mm: "mm", torch.matmul: "mm", F.linear: "linear", torch.softmax: "softmax", F.softmax: "softmax",
    torch.rms_norm: "rms_norm", F.rms_norm: "rms_norm", F.scaled_dot_product_attention: "attention",
    torch.cumsum: "cumsum", torch.index_add: "index_add",
}  # fmt: skip
#: What is known to be no sum of its inputs, and why; said at once instead of after a failed experiment.
_REFUSED: dict[Any, str] = {
    torch.layer_norm: "its mean and variance are computed together (in one pass that no tree of additions describes)",
    F.layer_norm: "its mean and variance are computed together (in one pass that no tree of additions describes)",
    torch.max: "a maximum adds nothing",
    torch.amax: "a maximum adds nothing",
    torch.prod: "a product adds nothing",
}


def summands_of(fn: Any, shape: Shape, given: set[str]) -> Summands:
    """Finds the adapter for what `accumulation_tree` was given.

    Args:
        fn: a name, a function of torch that has one, an ``nn.Linear``, or a function of n terms.
        shape: the call.
        given: which of rows, row, columns, column the caller named.

    Raises:
        UsageError: no such op, or an argument that it does not read.
        AccumulationError: an op that is known to be no sum.
    """
    try:
        reason, name = _REFUSED.get(fn), _FUNCTIONS.get(fn)
    except TypeError:  # a callable that cannot be hashed
        reason = name = None
    if reason or fn == "layer_norm":
        raise AccumulationError(
            f"{getattr(fn, '__name__', fn)} is no sum of its inputs: {reason or _REFUSED[F.layer_norm]}. Ask for one of "
            f"{', '.join(OPS)}, or for a function that returns a sum of n terms."
        )
    if isinstance(fn, nn.Linear):
        if fn.in_features != shape.n:
            raise UsageError(f"this linear layer adds in_features={fn.in_features} terms; got n={shape.n}.")
        name, given = "linear", given - {"columns"}
        shape.columns, shape.dtype = fn.out_features, fn.weight.dtype
    elif isinstance(fn, str):
        name = fn
    if name is not None:
        if name not in OPS:
            raise UsageError(f"accumulation_tree knows no op {name!r}. Choose from {', '.join(OPS)}, or pass a function.")
        adapter, reads = OPS[name]
    elif callable(fn):
        reads = ()
    else:
        raise UsageError(f"accumulation_tree needs a function or the name of an op; got {fn!r}. Names: {', '.join(OPS)}.")
    if extra := sorted(given - set(reads)):
        raise UsageError(
            f"{name or 'a function of n terms'} does not read {', '.join(extra)}"
            + (f"; it reads {', '.join(reads)}." if reads else ": it fixes its own shape. Choose that inside the function.")
        )
    if not shape.n and name in _NEED_TERMS:
        raise UsageError(f"{name} has no output where there is nothing to add; n must be at least 1, got n=0.")
    for size, at in (("rows", "row"), ("columns", "column")):
        if not 0 <= getattr(shape, at) < getattr(shape, size):
            found = f"{at}={getattr(shape, at)}, {size}={getattr(shape, size)}"
            raise UsageError(f"{at} must be from 0 to {size} - 1; got {found}.")
    return adapter(shape) if name is not None else from_function(fn, shape)
