"""Takes one query row out of a call of attention and puts it into calls of other sizes that ask the same question.

What a row computes depends on its query and on the keys and values it may see. All else is the shape of the call: queries
before and after it, masked keys before and after those it sees, and whether the mask is given or implied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from detlab import bits
from detlab.divergence.replay_op import FLASH, Operation, Row, ravel


@dataclass(frozen=True)
class Form:
    """The shape of a call around one row.

    Attributes:
        queries_before, queries_after: other query rows.
        keys_before, keys_after: masked keys around those that the row sees.
        masked: whether a mask is given; without one, attention is causal or sees every key.
    """

    queries_before: int
    queries_after: int
    keys_before: int
    keys_after: int
    masked: bool

    def __str__(self) -> str:
        queries = self.queries_before + 1 + self.queries_after
        mask = "mask given" if self.masked else "no mask given"
        return f"{queries} queries, the row at {self.queries_before}; {self.keys_before}+{self.keys_after} masked keys; {mask}"


def visible_to(op: Operation, row: Row) -> Tensor | None:
    """Slots of the keys that a query row sees; None where the op is no attention."""
    if op.name != FLASH or not {0, 2} <= row.where.keys():
        return None
    query, num_keys = op.args[0], op.args[1].shape[2]
    mask = op.named("attn_mask")
    if isinstance(mask, Tensor):
        own = mask.expand(query.shape[0], -1, query.shape[2], num_keys)[row.where[0], 0, row.where[2]]
        seen = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    elif op.named("is_causal"):
        seen = torch.arange(num_keys) <= row.where[2]
    else:
        seen = torch.ones(num_keys, dtype=torch.bool)
    return seen.nonzero()[:, 0]


@dataclass
class Attention:
    """One query row of a call of attention.

    Attributes:
        op: the call.
        batch, slot: where the row stands.
        visible: slots of the keys that it sees.
        form: the shape of the call around it.
    """

    op: Operation
    batch: int
    slot: int
    visible: Tensor
    form: Form

    @classmethod
    def of(cls, op: Operation, row: Row) -> Attention | None:
        """Reads a call; None where it is no attention, or the keys that the row sees have gaps."""
        visible = visible_to(op, row)
        if visible is None:
            return None
        query, num_keys, mask = op.args[0], op.args[1].shape[2], op.named("attn_mask")
        batch, slot = row.where[0], row.where[2]
        if not len(visible) or int(visible[-1]) - int(visible[0]) + 1 != len(visible):
            return None
        form = Form(
            slot, query.shape[2] - 1 - slot, int(visible[0]), num_keys - 1 - int(visible[-1]), isinstance(mask, Tensor)
        )  # fmt: skip
        return cls(op, batch, slot, visible, form)

    def in_form(self, form: Form, fill: int = 0) -> tuple[Operation, Tensor] | None:
        """The same row in a call of another shape: the call, and the row's elements in its output.

        Args:
            form: the shape; without a mask, the row must see all keys up to its own slot (causal), or all.
            fill: 0 puts copies of the row's own tokens around it, another number random ones.

        Returns:
            None where no such call asks the same question.
        """
        query, key, value = (t[self.batch : self.batch + 1] for t in self.op.args[:3])
        own = query[:, :, self.slot : self.slot + 1]
        num_queries = form.queries_before + 1 + form.queries_after
        num_keys = form.keys_before + len(self.visible) + form.keys_after
        kwargs: dict[str, Any] = {k: v for k, v in self.op.kwargs.items() if k not in ("attn_mask", "is_causal")}
        is_causal = False
        if form.masked:
            seen = torch.zeros(num_keys, dtype=torch.bool)
            seen[form.keys_before : form.keys_before + len(self.visible)] = True
            mask = torch.where(seen, 0.0, float("-inf")).to(query.dtype).expand(1, 1, num_queries, num_keys).contiguous()
            kwargs["attn_mask"] = mask
        elif form.keys_before or form.keys_after:
            if form.keys_before or form.queries_before + 1 != len(self.visible) or num_queries != num_keys:
                return None
            is_causal = True
        elif num_queries > 1 and num_queries == num_keys and form.queries_before + 1 == num_keys:
            is_causal = True  # the last row of a causal call sees every key
        queries = _around(own, query, form.queries_before, form.queries_after, fill)
        seen_keys, seen_values = key[:, :, self.visible], value[:, :, self.visible]
        keys = _around(seen_keys, key, form.keys_before, form.keys_after, fill)
        values = _around(seen_values, value, form.keys_before, form.keys_after, fill + bool(fill))
        args = (*(_token_major(t) for t in (queries, keys, values)), self.op.named("dropout_p", 0.0), is_causal)
        shape = tuple(queries.shape)
        made = replace(self.op, args=args, kwargs=kwargs, shape=shape)
        heads, dim = shape[1], shape[3]
        head = torch.arange(heads).repeat_interleave(dim)
        place = torch.full_like(head, form.queries_before)
        at = ravel([torch.zeros_like(head), head, place, torch.arange(dim).repeat(heads)], shape)
        return made, at

    def stages(self, other: Attention) -> tuple[str, ...]:
        """Which parts of the row's computation give other bits in another call: "scores", "softmax", "values".

        Each part is looked at with the others made exact: one key alone gives its score as the log-sum-exp; equal scores leave
        the weighted sum of values alone; and where scores agree and their log-sum-exp does not, softmax adds them otherwise.
        Empty where the forms cannot be built, or no part differs by itself.
        """
        pair = [side.in_form(replace(side.form, masked=True)) for side in (self, other)]
        if pair[0] is None or pair[1] is None or len(self.visible) != len(other.visible):
            return ()
        found = []
        forms = (self.form, other.form)
        ops = [made[0] for made in pair if made is not None]
        slots = [form.queries_before for form in forms]
        count = len(self.visible)
        picked = range(count) if count <= 32 else range(0, count, count // 32)
        alone = [[_only(op, form, key).outputs() for key in picked] for op, form in zip(ops, forms, strict=True)]
        scores = [torch.stack([out[1][:, :, slot] for out in side]) for side, slot in zip(alone, slots, strict=True)]
        same_scores = bits.equal(*scores)
        if not same_scores:
            found.append("scores")
        sums = [op.outputs()[1][:, :, slot].contiguous() for op, slot in zip(ops, slots, strict=True)]
        if same_scores and not bits.equal(*sums):
            found.append("softmax")
        level = [replace(op, args=(torch.zeros_like(op.args[0]), *op.args[1:])) for op in ops]
        values = [op.run()[:, :, slot].contiguous() for op, slot in zip(level, slots, strict=True)]
        if not bits.equal(*values):
            found.append("values")
        return tuple(found)


def _only(op: Operation, form: Form, key: int) -> Operation:
    """The call with one key visible."""
    mask = torch.full_like(op.kwargs["attn_mask"], float("-inf"))
    mask[..., form.keys_before + key] = 0.0
    return replace(op, kwargs=op.kwargs | {"attn_mask": mask})


def _around(own: Tensor, source: Tensor, before: int, after: int, fill: int) -> Tensor:
    """Rows with others before and after them: the source's own, over and over, or random ones."""
    count = before + after
    if not count:
        return own
    if fill:
        generator = torch.Generator().manual_seed(fill)
        shape = (*own.shape[:2], count, own.shape[3])
        other = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator).to(own.dtype)
    else:
        other = source[:, :, torch.arange(count) % source.shape[2]]
    return torch.cat([other[:, :, :before], own, other[:, :, before:]], 2)


def _token_major(tensor: Tensor) -> Tensor:
    """[batch, heads, tokens, head_dim] as models make it: tokens first in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
