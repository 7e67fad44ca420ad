"""What this machine's kernels do, probed at run time; and what two runs really computed, read off by hand.

Which shapes share their bits is a property of the machine (shared/NUMERICS.md holds the reference's map), so a
test that needs a divergence asks here whether this machine has one. Nothing here uses detlab: it is the ground
truth that detlab is held against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bitwise_equal(actual: Tensor, expected: Tensor) -> bool:
    """One dtype, one shape, one integer view; written here again, so that `bits.equal` is not its own judge."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if actual.dtype == torch.bool:
        return torch.equal(actual, expected)
    kind = _INT[actual.element_size()]
    return torch.equal(actual.contiguous().view(kind), expected.contiguous().view(kind))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in (-1, 1) whose bits do not depend on the instruction set: odd integers, scaled once."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    return ((2 * integers + 1).float() / 2**16).to(dtype)


# ------------------------------------------------------------------------------------------ probes of this machine
@lru_cache(maxsize=256)
def row_class_equal(dtype: torch.dtype, k: int, n: int, m_small: int, m_large: int, draws: int = 3) -> bool:
    """Whether the rows of ``F.linear`` for ``m_small`` rows equal the same rows among ``m_large``, bitwise.

    Every row of several draws is looked at: in bfloat16 two elements in ten thousand differ, so that one row may
    show nothing. Rows stand at every place of the larger product.
    """
    weight = draw(n, k, seed=k * 31 + n, dtype=dtype) / math.sqrt(k)
    num_rows = -(-96 // m_large) * m_large
    for seed in range(draws):
        x = draw(num_rows, k, seed=1000 + seed, dtype=dtype)
        for start in range(0, num_rows, m_large):
            block = x[start : start + m_large]
            large = F.linear(block.clone(), weight)
            for at in range(0, m_large - m_small + 1, m_small):
                small = F.linear(block[at : at + m_small].clone(), weight)
                if not bitwise_equal(small, large[at : at + m_small]):
                    return False
    return True


@lru_cache(maxsize=256)
def placed_rows_equal(dtype: torch.dtype, k: int, n: int, count: int, a: tuple[int, int], b: tuple[int, int],
                      draws: int = 3) -> bool:  # fmt: skip
    """Whether ``count`` rows give the same bits in two products: ``a`` and ``b`` are (rows in all, place of the first).

    On some machines it matters where in a product a row stands, as padding in front of it decides.
    """
    weight = draw(n, k, seed=k * 31 + n, dtype=dtype) / math.sqrt(k)
    for seed in range(draws):
        x = draw(count, k, seed=2000 + seed, dtype=dtype)
        found = []
        for rows, first in (a, b):
            block = draw(rows, k, seed=3000 + seed, dtype=dtype)
            block[first : first + count] = x
            found.append(F.linear(block, weight)[first : first + count])
        if not bitwise_equal(*found):
            return False
    return True


@lru_cache(maxsize=64)
def row_classes(dtype: torch.dtype, k: int, n: int, up_to: int = 24) -> tuple[tuple[int, ...], ...]:
    """Row counts grouped by the bits they give: ``((1,), (2, 3), (4, 5, ...))`` on the reference machine."""
    groups: list[list[int]] = []
    for m in range(1, up_to + 1):
        for group in groups:
            if row_class_equal(dtype, k, n, group[0], m, draws=1):
                group.append(m)
                break
        else:
            groups.append([m])
    return tuple(map(tuple, groups))


@lru_cache(maxsize=64)
def padded_attention_rows(dtype: torch.dtype, length: int, pad: int, heads: int = 9, head_dim: int = 64,
                          draws: int = 3) -> tuple[int, ...]:  # fmt: skip
    """Query rows at which attention with ``pad`` masked slots in front differs from the causal one without them."""
    differing: set[int] = set()
    for seed in range(draws):
        q, k, v = (draw(1, heads, length, head_dim, seed=10 * seed + i, dtype=dtype) for i in range(3))
        alone = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        filler = draw(1, heads, pad, head_dim, seed=77, dtype=dtype)
        qp, kp, vp = (torch.cat([filler, t], 2) for t in (q, k, v))
        mask = torch.ones(pad + length, pad + length, dtype=torch.bool).tril()
        mask[:, :pad] = False
        mask[:pad, 0] = True  # a row that sees nothing would be NaN
        padded = F.scaled_dot_product_attention(qp, kp, vp, attn_mask=mask[None, None])[:, :, pad:]
        differing.update(at for at in range(length) if not bitwise_equal(alone[:, :, at], padded[:, :, at]))
    return tuple(sorted(differing))


# ------------------------------------------------------------------------------- what really happened, read by hand
Seen = dict[str, Tensor]


@contextmanager
def module_tensors(model: nn.Module):
    """Records the inputs and outputs of every module by plain hooks, a dict a call of the model.

    Keys are "in NAME" and "out NAME", in the order in which they came; values are copies of the first tensor.
    """
    calls: list[Seen] = []
    handles = []

    def before(name: str) -> Callable:
        def hook(module, args, kwargs):
            if name == "":
                calls.append({})
            tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            if tensor is not None:
                calls[-1][f"in {name}"] = tensor.detach().clone()

        return hook

    def after(name: str) -> Callable:
        def hook(module, args, output):
            values = list(output.values()) if isinstance(output, dict) else output
            tensor = next((o for o in ([values] if isinstance(values, Tensor) else values) if isinstance(o, Tensor)), None)
            if tensor is not None:
                calls[-1][f"out {name}"] = tensor.detach().clone()

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


Rows = dict[int, Tensor]


def rows_by_position(calls: Sequence[Seen], name: str, row: int = 0, pad: int = 0) -> Rows:
    """One prompt's rows of a module's tensor [batch, token, ...] by token position, over the calls that served it.

    Args:
        calls: what `module_tensors` saw, of one prompt, each token computed once.
        name: "in NAME" or "out NAME".
        row: the prompt's batch row.
        pad: padded slots in front of it.
    """
    rows: Rows = {}
    start = 0
    for seen in calls:
        tensor = seen[name]
        rows.update({start + slot - pad: tensor[row, slot] for slot in range(tensor.shape[1]) if start + slot >= pad})
        start += tensor.shape[1]
    return rows


def differing(a: Rows, b: Rows) -> list[int]:
    """Positions at which both have a row and the rows differ."""
    return sorted(position for position in a.keys() & b.keys() if not bitwise_equal(a[position], b[position]))


def laid_out(calls: Sequence[Seen], tokens: str = "out model.embed_tokens") -> list[str]:
    """Names of the float tensors that are [batch, token, ...] in every call, in the order of execution."""
    return [
        name
        for name in calls[0]
        if all(name in c and c[name].ndim > 2 and c[name].shape[:2] == c[tokens].shape[:2] for c in calls)
        and calls[0][name].is_floating_point()
    ]


def first_raw_difference(a: Sequence[Seen], b: Sequence[Seen], *, rows: tuple[int, int] = (0, 0),
                         pads: tuple[int, int] = (0, 0)) -> tuple[str, int, int] | None:  # fmt: skip
    """Where one prompt's bits first part: (name of the tensor, call of a, first position), in the order of execution.

    "out NAME" was made in module NAME; "in NAME" in the module around it.
    """
    names = [name for name in laid_out(a) if name in laid_out(b)]
    assert len(names) > 40
    found = {n: differing(rows_by_position(a, n, rows[0], pads[0]), rows_by_position(b, n, rows[1], pads[1])) for n in names}
    start = 0
    for index, seen in enumerate(a):
        length = seen[names[0]].shape[1]
        for name in names:
            here = [position for position in found[name] if start <= position + pads[0] < start + length]
            if here:
                return name, index, here[0]
        start += length
    return None


def maker(name: str) -> str:
    """The module in which the tensor "in NAME" or "out NAME" was made."""
    kind, _, module = name.partition(" ")
    return module if kind == "out" else module.rpartition(".")[0]
