"""Bits, not values: integer views, ULP distance, and digests of rows.

Floating-point equality is the wrong question for a reproducibility tool: ``0.0 == -0.0`` although their bits differ,
and ``nan != nan`` although they agree. Everything here looks at the integer view of a tensor.

A *row digest* is a 64-bit fingerprint of one row of 32-bit words ``w[0], w[1], ...``:

    low  = sum_i  w[i]        * odd[i]      (mod 2**32)
    high = sum_i (w[i] >> 16) * salt[i]     (mod 2**32, arithmetic shift)

Sums modulo 2**32 are associative, so a digest depends neither on the reduction order nor on threads or device.
``low`` alone sees every single-bit change (``odd`` is odd), but a change in bit *k* reaches only its bits from *k* up,
so that an exchange of ``x`` and ``-x`` would pass unseen half of the time or more; ``high`` brings sign, exponent and
leading mantissa bits down by 16 places, where they meet at least 16 bits of the salt's differences.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Rows are digested in slices of about this many bytes, so that digesting big outputs needs little memory.
CHUNK_BYTES = 8 << 20


def int_view(tensor: Tensor) -> Tensor:
    """Views a tensor's bits as signed integers of the same width.

    Args:
        tensor: any dense tensor; complex numbers become pairs, bool becomes int8.

    Returns:
        Integer tensor of the same shape (complex: one more axis of 2). A copy only where the input is complex or bool
        or cannot be viewed.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int8)
    return tensor.view(_INT_OF_SIZE[tensor.element_size()])


def equal(actual: Tensor, expected: Tensor) -> bool:
    """Tells whether two tensors are bitwise equal: same dtype, same shape, same integer view.

    ``+0.0`` and ``-0.0`` differ; NaNs are equal when their payloads are.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(int_view(actual), int_view(expected))


def _ordered(tensor: Tensor) -> Tensor:
    """Maps floats to int64 so that neighbours in value are neighbours in number; both zeros map to 0."""
    bits = int_view(tensor).to(torch.int64)
    width = 8 * tensor.element_size()
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Counts representable steps between two float tensors, elementwise.

    Args:
        actual, expected: one shape and one dtype (float16, bfloat16, float32 or float64).

    Returns:
        int64, same shape; unit: ULPs of that dtype. +0.0 and -0.0 are 0 apart (`equal` tells them apart). A NaN on one
        side only is 2**62 away; two NaNs are 0 apart. float64 distances saturate at 2**62.

    Raises:
        ValueError: dtypes or shapes differ; ULPs of two formats are not comparable.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise ValueError(
            f"ulp_distance needs one dtype and one shape; got {_describe(actual)} and {_describe(expected)}. "
            "Cast neither silently: decide in which format the distance is meant."
        )
    if actual.dtype not in _ULP_DTYPES:
        raise ValueError(f"ulp_distance counts steps of float formats; got {_describe(actual)}.")
    limit = 1 << 62
    a, b = _ordered(actual), _ordered(expected)
    distance = (a - b).abs()
    if actual.dtype == torch.float64:
        # a - b can leave int64 where the signs differ: |a| + |b| is the distance then, saturated.
        crossing = (a < 0) != (b < 0)
        wide = a.abs().to(torch.float64) + b.abs().to(torch.float64)
        distance = torch.where(crossing & (wide >= float(limit)), limit, distance).clamp_max(limit)
    nan_a, nan_b = actual.isnan(), expected.isnan()
    distance = torch.where(nan_a ^ nan_b, limit, distance)
    return torch.where(nan_a & nan_b, 0, distance)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _mix(counter: np.ndarray) -> np.ndarray:
    """Scrambles 64-bit counters (the SplitMix64 finaliser; Steele, Lea and Flood, OOPSLA 2014)."""
    z = counter.astype(np.uint64)
    with np.errstate(over="ignore"):
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: np.ndarray = z ^ (z >> np.uint64(31))
    return out


@lru_cache(maxsize=64)
def _coefficients_pow2(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    mixed = _mix(np.arange(length, dtype=np.uint64))
    odd = (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32) | np.uint32(1)
    salt = (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return torch.from_numpy(odd.view(np.int32)).to(device), torch.from_numpy(salt.view(np.int32)).to(device)


def coefficients(length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Returns the fixed multipliers ``odd`` and ``salt`` of the row digest: two int32 tensors of ``length`` words."""
    size = 1 << max(10, (length - 1).bit_length())
    odd, salt = _coefficients_pow2(size, torch.device(device))
    return odd[:length], salt[:length]


def words(rows: Tensor) -> Tensor:
    """Views a 2-D tensor's rows as int32 words, zero-padded to a whole number of words.

    Args:
        rows: [num_rows, width], any dtype.

    Returns:
        int32 [num_rows, ceil(width * itemsize / 4)].
    """
    bits = int_view(rows)
    if bits.ndim == 3:  # complex
        bits = bits.flatten(1)
    spare = -(bits.shape[1] * bits.element_size()) % 4
    if spare:
        bits = torch.nn.functional.pad(bits, (0, spare // bits.element_size()))
    # A view from a narrower dtype needs unit stride and an aligned start: a copy gives both.
    if not bits.is_contiguous() or (bits.storage_offset() * bits.element_size()) % 4:
        bits = bits.clone(memory_format=torch.contiguous_format)
    return bits if bits.dtype == torch.int32 else bits.view(torch.int32)


def _dot(matrix: Tensor, vector: Tensor) -> Tensor:
    """Integer matrix-vector product modulo 2**32."""
    if matrix.device.type == "cpu":
        return torch.mv(matrix, vector)  # one pass, no temporary; exact, so its order does not matter
    return (matrix * vector).sum(-1, dtype=torch.int32)  # CUDA has no integer mv


def row_digests(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Fingerprints each row of a 2-D tensor.

    Args:
        rows: [num_rows, width], any dtype and strides.

    Returns:
        (low, high), both int32 [num_rows]; `pack` joins them. The sign of zero and NaN payloads count. Zero-width rows
        give 0. Rows of different widths or dtypes must not be compared: keep those beside the digest.
    """
    num_rows, width = rows.shape
    row_bytes = max(1, width * rows.element_size())
    step = max(1, CHUNK_BYTES // row_bytes)
    if num_rows <= step:
        return _row_digests(rows)
    parts = [_row_digests(rows[start : start + step]) for start in range(0, num_rows, step)]
    return torch.cat([low for low, _ in parts]), torch.cat([high for _, high in parts])


def _row_digests(rows: Tensor) -> tuple[Tensor, Tensor]:
    w = words(rows)
    odd, salt = coefficients(w.shape[1], w.device)
    return _dot(w, odd), _dot(w >> 16, salt)


def masked_row_digests(grid: Tensor, column_ids: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Fingerprints rows whose columns have names, such as attention scores whose columns are token positions.

    A column counts where ``visible`` and its multiplier follows its name, not its place: the same scores with padding
    columns in front, or with future columns behind, have the same digest.

    Args:
        grid: [num_rows, width, num_columns], any dtype.
        column_ids: int64 [num_rows, num_columns]; the column's name (a token position), >= 0 where visible.
        visible: bool [num_rows, num_columns].

    Returns:
        (low, high), both int32 [num_rows].
    """
    num_rows, width, num_columns = grid.shape
    if num_rows * width * num_columns == 0:
        zero = torch.zeros(num_rows, dtype=torch.int32, device=grid.device)
        return zero, zero.clone()
    bits = int_view(grid)
    if bits.element_size() == 8:
        halves = bits.contiguous().view(torch.int32).unflatten(-1, (num_columns, 2))
        low, high = masked_row_digests(halves[..., 0], column_ids, visible)
        low2, high2 = masked_row_digests(halves[..., 1], column_ids, visible)
        return low * 3 + low2 * 5, high * 3 + high2 * 5
    bits = bits.to(torch.int32)
    odd_row, salt_row = coefficients(width, grid.device)
    top = int(column_ids.max()) + 1 if column_ids.numel() else 1
    odd_col, salt_col = coefficients(max(1, top) + 1, grid.device)
    ids = torch.where(visible, column_ids, 0)
    # + 1: columns and rows must not share multipliers, or a transposition would go unseen.
    odd = torch.where(visible, odd_col[ids + 1], 0)
    salt = torch.where(visible, salt_col[ids + 1], 0)
    low = ((bits * odd[:, None, :]).sum(-1, dtype=torch.int32) * odd_row).sum(-1, dtype=torch.int32)
    high = (((bits >> 8) * salt[:, None, :]).sum(-1, dtype=torch.int32) * salt_row).sum(-1, dtype=torch.int32)
    return low, high


def pack(low: Tensor, high: Tensor) -> np.ndarray:
    """Joins the two halves of digests into int64 numbers on the host: ``high << 32 | low``."""
    low64 = low.cpu().numpy().view(np.uint32).astype(np.uint64)
    high64 = high.cpu().numpy().view(np.uint32).astype(np.uint64)
    joined: np.ndarray = (high64 << np.uint64(32) | low64).view(np.int64)
    return joined


def digest(tensor: Tensor) -> int:
    """Fingerprints a whole tensor by the digests of its last-axis rows and of their order."""
    flat = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(-1, tensor.shape[-1])
    low, high = row_digests(flat)
    if flat.shape[0] > 1:
        pairs = torch.stack([low, high], 1).reshape(1, -1)
        low, high = row_digests(pairs)
    return int(pack(low, high)[0]) if low.numel() else 0


def md5(tensor: Tensor) -> str:
    """MD5 of a tensor's dtype, shape and bytes: what another party compares (row A8 of the requirements)."""
    plain = tensor.detach().cpu().contiguous()
    hasher = hashlib.md5(_describe(plain).encode(), usedforsecurity=False)
    flat = int_view(plain).reshape(-1)
    step = CHUNK_BYTES // max(1, flat.element_size())
    for start in range(0, flat.numel(), step):
        hasher.update(flat[start : start + step].numpy().tobytes())
    return hasher.hexdigest()
