"""The discriminator table: one factor after another is changed in the op alone, and the row's bits are sorted into classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from detlab.divergence.explain_attention import Attention, Form
from detlab.divergence.replay_op import Operation, Row, bits_at, threads
from detlab.trace.live import tensors_in

#: What a variant gives: the bits of each row that is looked at.
Bits = tuple[bytes, ...]
Variant = tuple[str, Callable[[], Bits | None]]


@dataclass(frozen=True)
class Factor:
    """One line of the discriminator table.

    Attributes:
        name: what was changed, all else kept as in a.
        classes: the values tried, grouped by the bits that they gave.
        like_a, like_b: values that gave a's bits, and b's.
        ours, theirs: a's value and b's; "" where the factor has none.
    """

    name: str
    classes: tuple[tuple[str, ...], ...]
    like_a: tuple[str, ...] = ()
    like_b: tuple[str, ...] = ()
    ours: str = ""
    theirs: str = ""

    @property
    def moves(self) -> bool:
        """Whether changing it changes the bits."""
        return len(self.classes) > 1

    @property
    def tried(self) -> int:
        """Number of values."""
        return sum(map(len, self.classes))

    @property
    def leads_to_b(self) -> bool:
        """Whether this factor alone, set to b's value, turns a's bits into b's."""
        return self.theirs in self.like_b and self.theirs not in self.like_a

    @property
    def parts_sides(self) -> bool:
        """Whether a's value and b's give different bits."""
        named = bool(self.ours and self.theirs)
        return named and any((self.ours in group) != (self.theirs in group) for group in self.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"moves": self.moves, "leads_to_b": self.leads_to_b}


@dataclass
class Subject:
    """The rows that are looked at, on both sides.

    Attributes:
        a, b: the op's two calls.
        rows: per row, its place in a's output and in b's.
        bits_a, bits_b: what the runs computed there.
    """

    a: Operation
    b: Operation
    rows: list[tuple[Row, Row]]
    bits_a: Bits
    bits_b: Bits

    def bits(self, op: Operation, side: int) -> Bits:
        """Bits of the rows in an output of a's shape (side 0) or b's (1)."""
        output = op.run()
        return tuple(bits_at(output, pair[side].at) for pair in self.rows)

    def factor(self, name: str, variants: Iterable[Variant], ours: str = "", theirs: str = "") -> Factor | None:
        """Tries values one after another; those that cannot be are left out. None where fewer than two could."""
        classes: dict[Bits, list[str]] = {}
        for label, make in variants:
            try:
                found = make()
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            if found is not None:
                classes.setdefault(found, []).append(label)
        if sum(map(len, classes.values())) < 2:
            return None
        groups = tuple(map(tuple, classes.values()))
        like_a, like_b = (tuple(classes.get(bits, ())) for bits in (self.bits_a, self.bits_b))
        return Factor(name, groups, like_a, like_b, ours, theirs)


def factors_of(subject: Subject, counts: tuple[int, int], repetitions: int = 30) -> list[Factor]:
    """Every factor that can be tried in this process.

    Args:
        subject: the rows.
        counts: intra-op threads of a and of b.
        repetitions: how often the same call is repeated.
    """
    found: list[Factor | None] = []
    with subject.a.settings():  # once: changing the number of threads for every call is slow
        inside = replace(subject, a=replace(subject.a, settings=nullcontext))
        for axis in _axes(inside):
            found += [_num_rows(inside, axis), _place(inside, axis), _neighbours(inside, axis)]
        found += [*_attention(inside), _group(inside)]
    found += [_arguments(subject), _threads(subject, counts)]
    with subject.a.settings():
        found += [_alignment(inside), _layout(inside), _accumulator(inside), _repetition(inside, repetitions)]
    return [factor for factor in found if factor is not None]


def _axes(subject: Subject) -> list[int]:
    """Axes along which rows stand side by side: those in which the sides differ, or else the first."""
    a, b = subject.a, subject.b
    usable = [x for x in subject.rows[0][0].where if a.links(x) and all(x in ours.where for ours, _ in subject.rows)]
    if len(a.shape) != len(b.shape):
        return usable[:1]
    unlike = [x for x in usable if a.shape[x] != b.shape[x]]
    return unlike[:2] or usable[:1]


def _beside(size: int, own: int, count: int, place: int) -> list[int]:
    """Rows of a call of ``count``, the row ``own`` at ``place``, and the others, over and over, around it."""
    others = [i for i in range(size) if i != own] or [own]
    picked = [others[i % len(others)] for i in range(count)]
    picked[place] = own
    return picked


def _taken(subject: Subject, axis: int, count: int, place: int) -> Bits:
    bits = []
    for ours, _ in subject.rows:
        size = subject.a.shape[axis]
        made = subject.a.taking(axis, _beside(size, ours.where[axis], count, place))
        bits.append(bits_at(made.run(), ours.moved(subject.a.shape, axis, place, made.shape)))
    return tuple(bits)


def _num_rows(subject: Subject, axis: int) -> Factor | None:
    ours = subject.a.shape[axis]
    theirs = subject.b.shape[axis] if axis < len(subject.b.shape) else ours
    sizes = sorted({1, 2, 3, 4, 5, 8, 16, 32, ours, theirs})
    variants = [(str(n), _late(_taken, subject, axis, n, 0)) for n in sizes]
    return subject.factor("number of rows", variants, str(ours), str(theirs))


def _place(subject: Subject, axis: int) -> Factor | None:
    ours, theirs = ({pair[side].where.get(axis, 0) for pair in subject.rows} for side in (0, 1))
    num = max(subject.a.shape[axis], subject.b.shape[axis] if axis < len(subject.b.shape) else 1, 8)
    places = sorted({0, 1, 2, 3, num // 2, num - 1, *(p for p in (*ours, *theirs) if p < num)})[:12]
    variants = [(str(p), _late(_taken, subject, axis, num, p)) for p in places]
    return subject.factor(f"place of the row among {num}", variants)


def _neighbours(subject: Subject, axis: int) -> Factor | None:
    num = max(subject.a.shape[axis], subject.b.shape[axis] if axis < len(subject.b.shape) else 1, 4)

    def changed(seed: int) -> Bits:
        bits = []
        for ours, _ in subject.rows:
            made = subject.a.taking(axis, _beside(subject.a.shape[axis], ours.where[axis], num, 0))
            made = made.with_other_contents(axis, 0, seed) if seed >= 0 else made
            bits.append(bits_at(made.run(), ours.moved(subject.a.shape, axis, 0, made.shape)))
        return tuple(bits)

    contents = [("a's own rows", -1), ("zeros", 0), ("random 1", 1), ("random 2", 2)]
    return subject.factor(f"contents of the other {num - 1} rows", [(label, _late(changed, seed)) for label, seed in contents])


def _attention(subject: Subject) -> list[Factor | None]:
    """Factors of attention: what stands around a query row, whether a mask is given."""
    pairs = [(Attention.of(subject.a, ours), Attention.of(subject.b, theirs)) for ours, theirs in subject.rows]
    if any(x is None or y is None or len(x.visible) != len(y.visible) for x, y in pairs):
        return []
    calls = [(x, y) for x, y in pairs if x is not None and y is not None]

    def with_form(change: Callable[[Form, Form], Form], fill: int = 0) -> Callable[[], Bits | None]:
        def make() -> Bits | None:
            bits = []
            for x, y in calls:
                made = x.in_form(change(x.form, y.form), fill)
                if made is None:
                    return None
                bits.append(bits_at(made[0].run(), made[1]))
            return tuple(bits)

        return make

    found: list[Factor | None] = []
    first_a, first_b = calls[0][0].form, calls[0][1].form
    forms = [
        ("as in a", with_form(lambda a, b: a)),
        ("a, with a mask given", with_form(lambda a, b: replace(a, masked=True))),
    ]
    found.append(subject.factor("mask given or implied", forms))
    if first_a.masked == first_b.masked is False:  # causal on both sides: tokens after the row come with their keys
        def after(count: int) -> Callable[[], Bits | None]:
            return with_form(lambda a, b: replace(a, queries_after=count, keys_after=count))

        counts = sorted({0, 1, 2, 4, 8, 16, first_a.queries_after, first_b.queries_after})
        ours, theirs = str(first_a.queries_after), str(first_b.queries_after)
        own = [(x.form.queries_after, y.form.queries_after) for x, y in calls]
        variants: list[Variant] = [(str(n), after(n)) for n in counts] if len(set(own)) == 1 else [
            ("as in a", with_form(lambda a, b: a)),
            ("as in b", with_form(lambda a, b: replace(a, queries_after=b.queries_after, keys_after=b.keys_after))),
            ("none", after(0)),
        ]  # fmt: skip
        if len(set(own)) > 1:
            ours, theirs = "as in a", "as in b"
        found.append(subject.factor("tokens after the row (queries and hidden keys)", variants, ours, theirs))
    for field, words in (
        ("queries_before", "queries before the row"), ("queries_after", "queries after the row"),
        ("keys_before", "masked keys before those the row sees"), ("keys_after", "masked keys after those the row sees"),
    ):  # fmt: skip
        own = [(getattr(x.form, field), getattr(y.form, field)) for x, y in calls]
        found.append(_of_field(subject, field, words, with_form, own))
    joint = [
        ("as in a", with_form(lambda a, b: a)),
        ("as in b", with_form(lambda a, b: b)),
        ("as in b, other contents", with_form(lambda a, b: b, 7)),
    ]
    found.append(subject.factor("shape of the call around the row", joint, "as in a", "as in b"))
    return found


def _of_field(subject: Subject, field: str, words: str, with_form: Callable[..., Callable[[], Bits | None]],
              own: Sequence[tuple[int, int]]) -> Factor | None:  # fmt: skip
    """One size of a masked call: a's value, b's, and a few more; by number where all rows that are looked at have one."""

    def setting(value: int | None) -> Callable[[], Bits | None]:
        return with_form(lambda a, b: replace(a, masked=True, **{field: getattr(b, field) if value is None else value}))

    if len(set(own)) == 1:
        ours, theirs = own[0]
        sizes = sorted({0, 1, 3, 8, 11, 16, 32, ours, theirs})
        return subject.factor(words, [(str(n), setting(n)) for n in sizes], str(ours), str(theirs))
    variants: list[Variant] = [("as in a", with_form(lambda a, b: replace(a, masked=True))), ("as in b", setting(None))]
    variants += [(str(n), setting(n)) for n in (0, 1, 3, 8, 11, 16, 32)]
    return subject.factor(words, variants, "as in a", "as in b")


def _group(subject: Subject) -> Factor | None:
    """Rows that share a row's matrix, in a product of rows sorted by expert."""
    if subject.a.name != "_grouped_mm" or subject.b.name != "_grouped_mm":
        return None
    groups = [[group_of(op, pair[side]) for pair in subject.rows] for side, op in enumerate((subject.a, subject.b))]
    if None in groups[0] or None in groups[1]:
        return None
    (_, ours, _), (_, theirs, _) = (side[0] for side in groups if side[0] is not None)

    def among(count: int) -> Bits:
        bits = []
        for found, (row, _) in zip(groups[0], subject.rows, strict=True):
            assert found is not None
            x, w = subject.a.args[0][row.where[0]], subject.a.args[1][found[0] : found[0] + 1]
            ends = torch.tensor([count], dtype=torch.int32)
            made = replace(
                subject.a, args=(x.expand(count, -1).contiguous(), w), kwargs={"offs": ends}, shape=(count, subject.a.shape[1])
            )  # fmt: skip
            bits.append(bits_at(made.run(), torch.arange(subject.a.shape[1])))
        return tuple(bits)

    variants = [(str(n), _late(among, n)) for n in sorted({1, 2, 3, 4, 5, 8, 16, ours, theirs})]
    return subject.factor("rows that share the row's expert", variants, str(ours), str(theirs))


def group_of(op: Operation, row: Row) -> tuple[int, int, int] | None:
    """(matrix, number of rows that share it, this one's place among them); None where the call has another form."""
    ends = op.named("offs")
    if not isinstance(ends, Tensor) or op.args[0].ndim != 2 or op.args[1].ndim != 3 or 0 not in row.where:
        return None
    limits = [0, *ends.tolist()]
    at = next((i for i in range(len(limits) - 1) if limits[i] <= row.where[0] < limits[i + 1]), None)
    return None if at is None else (at, limits[at + 1] - limits[at], row.where[0] - limits[at])


def _accumulator(subject: Subject) -> Factor | None:
    """The same call with everything in float64, rounded at the end: where the sides agree then, they differ by rounding."""
    dtypes = {t.dtype for op in (subject.a, subject.b) for _, t in op.tensors() if t.is_floating_point()}
    if len(dtypes) != 1 or torch.float64 in dtypes:
        return None
    (dtype,) = dtypes

    def wide(op: Operation, side: int) -> Bits | None:
        output = op.in_float64()
        return None if output is None else tuple(bits_at(output.to(dtype), pair[side].at) for pair in subject.rows)

    variants: list[Variant] = [
        ("as it is", lambda: subject.bits(subject.a, 0)), ("float64, then rounded", lambda: wide(subject.a, 0)),
        ("b's call in float64, then rounded", lambda: wide(subject.b, 1)),
    ]  # fmt: skip
    return subject.factor("dtype of accumulation", variants)


def _arguments(subject: Subject) -> Factor | None:
    """Arguments that are no tensors, where the sides gave others: flags, sizes, orders."""
    a, b = subject.a, subject.b
    if a.func is not b.func or len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
        return None

    def mixed(ours: Any, theirs: Any) -> Any:
        return ours if tensors_in(ours) or isinstance(ours, Tensor) else theirs

    args = tuple(mixed(x, y) for x, y in zip(a.args, b.args, strict=True))
    kwargs = {name: mixed(value, b.kwargs[name]) for name, value in a.kwargs.items()}
    pairs = [*zip(a.args, args, strict=True), *((value, kwargs[name]) for name, value in a.kwargs.items())]
    plain = [(x, y) for x, y in pairs if not tensors_in(x) and x != y]
    if not plain:
        return None
    ours, theirs = (", ".join(str(pair[side]) for pair in plain) for side in (0, 1))
    other = replace(a, args=args, kwargs=kwargs)
    variants = [(ours, lambda: subject.bits(a, 0)), (theirs, lambda: subject.bits(other, 0))]
    return subject.factor("arguments that are no tensors", variants, ours, theirs)


def _threads(subject: Subject, counts: tuple[int, int]) -> Factor | None:
    def with_threads(count: int) -> Bits:
        op = replace(subject.a, settings=lambda: threads(count))
        return subject.bits(op, 0)

    variants = [(str(n), _late(with_threads, n)) for n in sorted({1, 2, 3, *counts})]
    return subject.factor("threads", variants, str(counts[0]), str(counts[1]))


def _alignment(subject: Subject) -> Factor | None:
    offsets = (0, 4, 8, 16, 32)
    variants = [(f"{n} bytes past 64", _late(lambda n: subject.bits(subject.a.at_address(n), 0), n)) for n in offsets]
    ours, theirs = subject.a.addresses(), subject.b.addresses()
    if ours == theirs or len(ours) != len(theirs):
        return subject.factor("memory address", variants)
    named = [(_bytes_past(own), own) for own in (ours, theirs)]
    moved = [(words, _late(lambda own: subject.bits(subject.a.at_addresses(own), 0), own)) for words, own in named]
    return subject.factor("memory address", [*moved, *variants], named[0][0], named[1][0])


def _bytes_past(offsets: Sequence[int]) -> str:
    return "tensors " + ", ".join(map(str, offsets)) + " bytes past 64"


def _layout(subject: Subject) -> Factor | None:
    variants: list[Variant] = [("as in a", lambda: subject.bits(subject.a, 0))]
    variants += [(how, _late(lambda how: subject.bits(subject.a.laid_out(how), 0), how)) for how in ("contiguous", "strided")]
    return subject.factor("memory layout", variants)


def _repetition(subject: Subject, count: int) -> Factor | None:
    return subject.factor("repetition", [(f"time {n + 1}", lambda: subject.bits(subject.a, 0)) for n in range(count)])


def _late(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)


# ----------------------------------------------------------------------------------------- vector body and scalar tail
def body_and_tail(op: Operation, at: Tensor) -> tuple[Tensor, Tensor] | None:
    """What an elementwise op gives for the inputs of some output elements, in the vector body and in the scalar tail.

    Args:
        op: the call.
        at: flat indices into its output, [count].

    Returns:
        (in the middle of a long row, as a row of one element), [count] each; None where the op is not elementwise.
    """
    if not op.is_pointwise:
        return None
    at = at[:32]

    def inputs(place: Any, tensor: Tensor) -> Tensor:
        return tensor.expand(op.shape).reshape(-1)[at] if tensor.ndim else tensor

    try:
        picked = op.with_tensors(inputs)
        long = picked.with_tensors(lambda place, t: t[:, None].expand(-1, 4096).contiguous() if t.ndim else t)
        single = [picked.with_tensors(_one(i)) for i in range(len(at))]
        return long.run()[:, 2048].clone(), torch.cat([one.run() for one in single])
    except RuntimeError:
        return None


def _one(at: int) -> Callable[[Any, Tensor], Tensor]:
    return lambda place, tensor: tensor[at : at + 1].clone() if tensor.ndim else tensor


def judged(subject: Subject, outputs: Sequence[Tensor]) -> tuple[float, float] | None:
    """Largest errors of a's rows and of b's against the same op in float64, on a's inputs; None where it takes no float64."""
    wide = subject.a.in_float64()
    if wide is None or not outputs[0].is_floating_point():
        return None
    errors = [0.0, 0.0]
    for ours, theirs in subject.rows:
        truth = wide.reshape(-1)[ours.at]
        for side, row in enumerate((ours, theirs)):
            found = outputs[side].reshape(-1)[row.at].double()
            errors[side] = max(errors[side], float((found - truth).abs().max()))
    return errors[0], errors[1]
