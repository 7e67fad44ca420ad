"""Bits, not values: integer views, ULP distance, and digests of rows.

Floating-point equality is the wrong question for a reproducibility tool: ``0.0 == -0.0`` although their bits differ,
and ``nan != nan`` although they agree. Everything here looks at the integer view of a tensor.

A *row digest* is a 64-bit fingerprint of the bytes ``b[0], b[1], ...`` of one row (signed, -128..127):

    p[k]   = sum_i  b[i] * c[i, k]     exact in int32, for k = 0..7, with fixed c[i, k] in -64..63, none of them 0
    digest = sum_k  p[k] * P[k]        modulo 2**64, with fixed odd P[k]

The sums are integers, so a digest depends neither on the reduction order nor on threads, instruction set or device. A
change of one bit is always seen (a test checks every position); other changes, exchanges of elements among them, go
unseen with a probability of about 2**-56. An XOR of bit patterns, by contrast, misses every exchange.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Big tensors are digested in slices of about this many bytes, so that digesting them needs little memory.
CHUNK_BYTES = 8 << 20
#: A longer row is digested in pieces: 65,536 products of at most 128 * 64 stay below 2**31.
PIECE_BYTES = 64 << 10
NUM_PROJECTIONS = 8


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


def placed(tensor: Tensor, offset: int) -> Tensor:
    """Copies a tensor to an address ``offset`` bytes past a multiple of 64; some kernels' bits depend on it.

    Args:
        tensor: any shape.
        offset: a multiple of the element size, 0 to 63.
    """
    size = tensor.element_size()
    room = torch.empty(tensor.numel() + 128 // size, dtype=tensor.dtype, device=tensor.device)
    start = (offset - room.data_ptr()) % 64 // size
    moved = room[start : start + tensor.numel()].view(tensor.shape)
    moved.copy_(tensor)
    return moved


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


@lru_cache(maxsize=32)
def _byte_table(length: int) -> Tensor:
    mixed = _mix(np.arange(length * NUM_PROJECTIONS, dtype=np.uint64))
    values = (mixed % np.uint64(127)).astype(np.int64) - 63
    values[values == 0] = -64
    return torch.from_numpy(values.astype(np.int8).reshape(length, NUM_PROJECTIONS))


@lru_cache(maxsize=1024)
def byte_coefficients(length: int, device: torch.device | str = "cpu") -> Tensor:
    """The fixed ``c`` of the row digest: int8 [length, 8], values -64..63 without 0."""
    size = 1 << max(12, (length - 1).bit_length())  # every length is a piece of the same table
    return _byte_table(size).to(device)[:length]


@lru_cache(maxsize=64)
def _turned_coefficients(length: int) -> Tensor:
    return byte_coefficients(length).t().contiguous()


@lru_cache(maxsize=8)
def _fold_multipliers(pieces: int) -> np.ndarray:
    counters = np.arange(pieces * NUM_PROJECTIONS, dtype=np.uint64) + np.uint64(1 << 40)
    odd: np.ndarray = (_mix(counters) | np.uint64(1)).view(np.int64)
    return odd


@lru_cache(maxsize=1)
def _int_mm_is_exact() -> bool:
    """Whether this machine's int8 product is exact at the worst case (some saturate at 16 bits inside)."""
    for rows, length in ((1, 64), (3, 2304), (64, 4096), (256, 2304)):
        for value in (-128, 127):
            for other in (-64, 63):
                a = torch.full((rows, length), value, dtype=torch.int8)
                b = torch.full((length, NUM_PROJECTIONS), other, dtype=torch.int8)
                try:
                    products = torch._int_mm(a, b), torch._int_mm(b.t().contiguous(), a.t())
                except (RuntimeError, AttributeError):
                    return False
                if not all(bool((product == value * other * length).all()) for product in products):
                    return False
    return True


def _project(rows: Tensor, table: Tensor) -> Tensor:
    """Exact integer product of int8 matrices, [num_rows, length] x [length, 8] -> int32."""
    if rows.is_cuda:  # its int8 product wants more than 16 rows and lengths that are multiples of 8
        spare_rows, spare = max(0, 17 - rows.shape[0]), -rows.shape[1] % 8
        padded = torch.nn.functional.pad(rows, (0, spare, 0, spare_rows))
        return torch._int_mm(padded, torch.nn.functional.pad(table, (0, 0, 0, spare)))[: rows.shape[0]]
    if _int_mm_is_exact():
        num_rows, length = rows.shape
        # Measured with AVX-512: many rows are projected a quarter faster the other way round, as columns; but not where they
        # lie a multiple of 1 KiB apart, since caches keep few such lines.
        if num_rows >= 256 and length >= 256 and length % 1024:
            return torch._int_mm(_turned_coefficients(length), rows.t()).t()
        return torch._int_mm(rows, table)
    return (rows.double() @ table.double()).to(torch.int32)  # below 2**53, so exact as well


def project_rows(rows: Tensor) -> Tensor:
    """The projections behind `row_digests`; they stay on the device.

    Args:
        rows: [num_rows, width], any dtype and strides.

    Returns:
        int32 [num_rows, 8 * pieces]; one piece for each 65,536 bytes of a row.
    """
    num_rows, width = rows.shape
    length = width * rows.element_size()
    if num_rows * length == 0:
        return torch.zeros((num_rows, NUM_PROJECTIONS), dtype=torch.int32, device=rows.device)
    if num_rows * length <= CHUNK_BYTES:
        return _project_slice(rows, length)
    step = max(1, CHUNK_BYTES // length)
    return torch.cat([_project_slice(rows[start : start + step], length) for start in range(0, num_rows, step)])


def _project_slice(rows: Tensor, length: int) -> Tensor:
    """Projects rows of ``length`` bytes each."""
    if rows.is_complex() or rows.is_neg():
        rows = int_view(rows).flatten(1)
    octets = rows.contiguous().view(torch.int8)
    if length <= PIECE_BYTES:
        return _project(octets, byte_coefficients(length, rows.device))
    table = byte_coefficients(PIECE_BYTES, rows.device)
    pieces = [octets[:, start : start + PIECE_BYTES] for start in range(0, length, PIECE_BYTES)]
    return torch.cat([_project(piece.contiguous(), table[: piece.shape[1]]) for piece in pieces], 1)


def fold(projections: Tensor) -> np.ndarray:
    """Folds projections [num_rows, 8 * pieces] into digests, int64 [num_rows], on the host."""
    values = projections.cpu().numpy().astype(np.int64)
    folded: np.ndarray = values @ _fold_multipliers(values.shape[1] // NUM_PROJECTIONS)  # integers wrap around
    return folded


def row_digests(rows: Tensor) -> np.ndarray:
    """Fingerprints each row of a 2-D tensor.

    Args:
        rows: [num_rows, width], any dtype and strides.

    Returns:
        int64 [num_rows]. The sign of zero and NaN payloads count. Rows of zeros, and rows of no elements, give 0: rows of
        different widths or dtypes must not be compared by digest alone.
    """
    return fold(project_rows(rows))


@lru_cache(maxsize=64)
def _word_table(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    mixed = _mix(np.arange(length, dtype=np.uint64))
    odd = (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32) | np.uint32(1)
    salt = (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return torch.from_numpy(odd.view(np.int32)).to(device), torch.from_numpy(salt.view(np.int32)).to(device)


def _word_coefficients(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int32 tensors of ``length`` odd multipliers."""
    odd, salt = _word_table(1 << max(10, (length - 1).bit_length()), device)
    return odd[:length], salt[:length]


def project_named_columns(grid: Tensor, column_ids: Tensor, visible: Tensor) -> Tensor:
    """Projects rows whose columns have names, such as attention scores whose columns are token positions.

    A column counts where ``visible``, and its multiplier follows its name, not its place: the same scores with padding
    columns in front, or with future columns behind, have the same digest. Sums are modulo 2**32.

    Args:
        grid: [num_rows, width, num_columns], any dtype.
        column_ids: int64 [num_rows, num_columns]; the column's name (a token position), >= 0 where visible.
        visible: bool [num_rows, num_columns].

    Returns:
        int32 [num_rows, 8] for `fold`; only the first two of the eight are used.
    """
    num_rows, width, num_columns = grid.shape
    out = torch.zeros((num_rows, NUM_PROJECTIONS), dtype=torch.int32, device=grid.device)
    if num_rows * width * num_columns == 0:
        return out
    bits = int_view(grid)
    if bits.element_size() == 8:
        # Flat: a dimension of size 1 may keep an odd stride through contiguous(), which view refuses.
        halves = bits.reshape(-1).contiguous().view(torch.int32).reshape(num_rows, width, num_columns, 2)
        low = project_named_columns(halves[..., 0], column_ids, visible)
        return low * 3 + project_named_columns(halves[..., 1], column_ids, visible) * 5
    bits = bits.to(torch.int32)
    odd_row, salt_row = _word_coefficients(width, grid.device)
    odd_column, salt_column = _word_coefficients(max(0, int(column_ids.max())) + 2, grid.device)
    ids = torch.where(visible, column_ids, 0) + 1  # + 1: rows and columns must not share multipliers
    odd = torch.where(visible, odd_column[ids], 0)
    salt = torch.where(visible, salt_column[ids], 0)
    out[:, 0] = ((bits * odd[:, None, :]).sum(-1, dtype=torch.int32) * odd_row).sum(-1, dtype=torch.int32)
    # A change of the top bits reaches only the top bits of a product: bring them down before multiplying again.
    out[:, 1] = (((bits >> 16) * salt[:, None, :]).sum(-1, dtype=torch.int32) * salt_row).sum(-1, dtype=torch.int32)
    return out


def digest(tensor: Tensor) -> int:
    """Fingerprints a whole tensor: the digest of its last-axis rows' digests, in order."""
    flat = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(-1, tensor.shape[-1])
    digests = row_digests(flat)
    if len(digests) > 1:
        digests = row_digests(torch.from_numpy(digests)[None])
    return int(digests[0]) if len(digests) else 0


def md5(tensor: Tensor) -> str:
    """MD5 of a tensor's dtype, shape and bytes: what another party compares (row A8 of the requirements)."""
    plain = tensor.detach().cpu().contiguous()
    hasher = hashlib.md5(_describe(plain).encode(), usedforsecurity=False)
    flat = int_view(plain).reshape(-1)
    step = CHUNK_BYTES // max(1, flat.element_size())
    for start in range(0, flat.numel(), step):
        hasher.update(flat[start : start + step].numpy().tobytes())
    return hasher.hexdigest()
