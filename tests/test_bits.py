"""Bits: integer views, distances and digests, each held against a slow reference in plain Python integers."""

import hashlib
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from detlab import bits
from tests.bit_classes import draw

ROOT = Path(__file__).resolve().parent.parent
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT_OF = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
          torch.complex128)  # fmt: skip
ODD = (1 << 64) - 1


def from_bits(*patterns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Floats with these bit patterns (unsigned)."""
    kind = INT_OF[dtype]
    width = 8 * torch.empty(0, dtype=kind).element_size()
    signed = [p - (1 << width) if p >> (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=kind).view(dtype)


# ------------------------------------------------------------------------------------------------ the slow reference
def mix(counter: int) -> int:
    """SplitMix64's finaliser over Python integers."""
    z = (counter + 1) * 0x9E3779B97F4A7C15 & ODD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ODD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & ODD
    return z ^ z >> 31


def coefficient(place: int, projection: int) -> int:
    value = mix(place * 8 + projection) % 127 - 63
    return -64 if value == 0 else value


def signed(value: int) -> int:
    value &= ODD
    return value - (1 << 64) if value >> 63 else value


def slow_digest(data: bytes) -> int:
    """The row digest of `bits`' docstring: pieces of 65,536 signed bytes, eight sums each, folded modulo 2**64."""
    total = 0
    for piece, start in enumerate(range(0, len(data), 65536)):
        chunk = data[start : start + 65536]
        for projection in range(8):
            value = sum((b - 256 if b > 127 else b) * coefficient(i, projection) for i, b in enumerate(chunk))
            total += value * (mix((1 << 40) + piece * 8 + projection) | 1)
    return signed(total)


def row_bytes(row: torch.Tensor) -> bytes:
    plain = row.contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def sample(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bit patterns of a dtype, NaNs and infinities among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    return octets.view(dtype) if dtype != torch.bool else octets > 127


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 17, 64])
def test_row_digests_are_those_of_the_reference(dtype, width):
    rows = sample(dtype, 3, width, seed=width)
    assert bits.row_digests(rows).tolist() == [slow_digest(row_bytes(row)) for row in rows]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16384 + 5), (torch.bfloat16, 65536 + 33), (torch.bool, 65537)])
def test_long_rows_are_digested_in_pieces(dtype, width):
    rows = sample(dtype, 2, width, seed=3)
    assert width * rows.element_size() > bits.PIECE_BYTES
    assert bits.row_digests(rows).tolist() == [slow_digest(row_bytes(row)) for row in rows]


@pytest.mark.parametrize("num_rows", [255, 256, 300])
@pytest.mark.parametrize("width", [64, 100, 256, 257])
def test_many_rows_are_digested_like_few(num_rows, width):
    """Many rows are multiplied as columns, unless they lie a multiple of 1 KiB apart."""
    rows = torch.cat([sample(torch.float32, num_rows - 1, width, seed=21), torch.full((1, width), -1.7e38)])
    digests = bits.row_digests(rows)
    assert digests.tolist() == [d for row in rows.split(50) for d in bits.row_digests(row).tolist()]
    assert digests[-2:].tolist() == [slow_digest(row_bytes(row)) for row in rows[-2:]]
    apart = torch.cat([rows, rows], 1)[:, :width]  # not contiguous
    assert np.array_equal(bits.row_digests(apart), digests)


def test_rows_in_many_slices(monkeypatch):
    rows = sample(torch.float32, 50, 40)
    whole = bits.row_digests(rows)
    monkeypatch.setattr(bits, "CHUNK_BYTES", 3 * 160)
    assert np.array_equal(bits.row_digests(rows), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype):
    rows = sample(dtype, 6, 10)
    expected = bits.row_digests(rows)
    spread = torch.stack([rows, rows], -1)[..., 1]
    assert not spread.is_contiguous()
    for view in (rows.t().contiguous().t(), spread, rows.flip(0).flip(0)):
        assert np.array_equal(bits.row_digests(view), expected)
    assert np.array_equal(bits.row_digests(rows[:, ::2]), bits.row_digests(rows[:, ::2].contiguous()))
    assert np.array_equal(bits.row_digests(rows[:1].expand(4, -1)), np.repeat(expected[:1], 4))


def test_lazy_conjugates_and_negatives_are_read_as_what_they_are():
    z = sample(torch.complex64, 3, 7, seed=5)
    z = torch.where(z.real.isfinite() & z.imag.isfinite(), z, 1 + 2j)
    assert z.conj().is_conj() and z.conj().imag.is_neg()
    assert np.array_equal(bits.row_digests(z.conj()), bits.row_digests(z.conj().resolve_conj()))
    assert np.array_equal(bits.row_digests(z.conj().imag), bits.row_digests(z.conj().imag.resolve_neg()))
    assert not np.array_equal(bits.row_digests(z.conj()), bits.row_digests(z))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_empty_rows(shape):
    assert bits.row_digests(torch.zeros(shape)).tolist() == [0] * shape[0]


def test_rows_of_zeros_are_0_and_negative_zero_is_not():
    rows = torch.zeros(2, 9)
    rows[1, 4] = -0.0
    first, second = bits.row_digests(rows).tolist()
    assert first == 0 and second != 0


# ------------------------------------------------------------------------------------------------- what it must see
def projections_of_one_byte(length: int) -> torch.Tensor:
    """int64 [length, 8]: how much each projection grows with the byte at each place."""
    return bits.byte_coefficients(length).to(torch.int64)


def test_every_single_bit_flip_in_a_whole_piece_is_seen():
    # A flip of bit j changes the signed byte by +-2**j (bit 7: by 128), so the digest by that times sum(c * P): it is
    # unseen only where that is 0 modulo 2**64. All 65,536 places x 8 bits, and each piece's multipliers.
    coefficients = projections_of_one_byte(bits.PIECE_BYTES).numpy()
    assert coefficients.min() >= -64 and coefficients.max() <= 63 and (coefficients != 0).all()
    for pieces in (1, 2):
        multipliers = bits._fold_multipliers(pieces).reshape(pieces, 8)
        with np.errstate(over="ignore"):
            for piece in range(pieces):
                change = (coefficients * multipliers[piece]).sum(-1, dtype=np.int64)
                for bit in range(8):
                    assert (change * np.int64(1 << bit) != 0).all()


def test_single_bit_flips_really_change_the_digest():
    # The same by experiment: a row is repeated, and the bit at another place is flipped in each copy.
    row = sample(torch.uint8, 1, 4096, seed=8)
    before = bits.row_digests(row)[0]
    for bit in (0, 3, 7):
        flipped = row.repeat(4096, 1)
        flipped[torch.arange(4096), torch.arange(4096)] ^= 1 << bit
        assert (bits.row_digests(flipped) != before).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exchanges_of_elements_are_seen(dtype):
    # An XOR of bit patterns misses every one of these; so does a sum of values.
    row = draw(1, 257, seed=9, dtype=dtype)
    before = bits.row_digests(row)[0]
    swapped = row.repeat(256, 1)
    for i in range(256):
        swapped[i, [i, i + 1]] = swapped[i, [i + 1, i]]
    changed = (swapped.view(INT_OF[dtype]) != row.view(INT_OF[dtype])).any(1).numpy()
    assert changed.sum() > 250
    assert np.array_equal(bits.row_digests(swapped) != before, changed)
    assert bits.row_digests(row.flip(1))[0] != before
    assert bits.row_digests(row.roll(1, 1))[0] != before
    assert bits.row_digests(row[:, torch.randperm(257, generator=torch.Generator().manual_seed(1))])[0] != before


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_signs_are_seen(dtype):
    row = draw(1, 64, seed=10, dtype=dtype)
    before = bits.row_digests(row)[0]
    assert bits.row_digests(-row)[0] != before
    for i in range(0, 63):
        pair = row.clone()
        pair[0, [i, i + 1]] *= -1  # two top bits flip: their XOR stays
        assert bits.row_digests(pair)[0] != before
        exchanged = row.clone()
        exchanged[0, i], exchanged[0, i + 1] = row[0, i], -row[0, i]
        other = exchanged.clone()
        other[0, i], other[0, i + 1] = -row[0, i], row[0, i]
        assert bits.row_digests(exchanged)[0] != bits.row_digests(other)[0]


def test_zeros_of_both_signs_and_nan_payloads_are_told_apart():
    patterns = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0x7F800000, 0x00000001]
    rows = from_bits(*patterns)[:, None]
    assert len(set(bits.row_digests(rows).tolist())) == len(patterns)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            assert bits.equal(a, b) == (i == j)


def test_random_rows_do_not_collide():
    rows = sample(torch.uint8, 50_000, 24, seed=11)
    assert len(np.unique(bits.row_digests(rows))) == len(torch.unique(rows, dim=0)) == 50_000


def test_small_changes_do_not_collide():
    # Rows that differ in two elements by one ULP each way: the likeliest kind of near miss.
    base = draw(1, 48, seed=12).view(torch.int32)
    rows = base.repeat(48 * 48, 1)
    at = torch.arange(48 * 48)
    rows[at, at // 48] += 1
    rows[at, at % 48] -= 1
    digests = bits.row_digests(rows.view(torch.float32))
    is_same = (at // 48 == at % 48).numpy()
    assert (digests[is_same] == bits.row_digests(base.view(torch.float32))[0]).all()
    assert len(np.unique(digests[~is_same])) == 48 * 47


# ------------------------------------------------------------------------------------ independence of the machine
def test_threads_and_order_do_not_matter():
    rows = sample(torch.float32, 300, 2304, seed=13)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(bits.row_digests(rows))
        shuffled = bits.row_digests(rows[order])
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(f, found[0]) for f in found)
    assert np.array_equal(shuffled, found[0][order.numpy()])
    assert np.array_equal(bits.row_digests(rows[7:8]), found[0][7:8])  # alone as among others


@pytest.mark.parametrize("width", [1, 31, 1000, 70_001])
def test_the_float64_fallback_gives_the_same_digests(width, monkeypatch):
    # Bytes of -128 all along are the worst case of the sums.
    rows = torch.cat([sample(torch.uint8, 4, width, seed=14), torch.full((1, width), 128, dtype=torch.uint8)])
    expected = [slow_digest(row_bytes(row)) for row in rows[-1:]]
    fast = bits.row_digests(rows)
    monkeypatch.setattr(bits, "_int_mm_is_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)  # not called
    slow = bits.row_digests(rows)
    assert np.array_equal(fast, slow) and slow[-1:].tolist() == expected


@pytest.fixture
def fresh_self_test():
    bits._int_mm_is_exact.cache_clear()
    yield
    bits._int_mm_is_exact.cache_clear()


def test_the_self_test_refuses_a_product_that_saturates(fresh_self_test, monkeypatch):
    exact = torch._int_mm
    rows = sample(torch.float32, 2, 100, seed=15)
    expected = [slow_digest(row_bytes(row)) for row in rows]
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: exact(a, b).clamp(-(2**15), 2**15 - 1))
    assert not bits._int_mm_is_exact()
    assert bits.row_digests(rows).tolist() == expected


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), AttributeError("_int_mm")])
def test_the_self_test_refuses_a_product_that_is_missing(fresh_self_test, monkeypatch, error):
    def missing(a, b):
        raise error

    rows = sample(torch.float32, 2, 10, seed=16)
    monkeypatch.setattr(torch, "_int_mm", missing)
    assert not bits._int_mm_is_exact()
    assert bits.row_digests(rows).tolist() == [slow_digest(row_bytes(row)) for row in rows]


def test_another_instruction_set_gives_the_same_digests():
    # Switches of oneDNN and ATen are read once per process. Below VNNI `_int_mm` saturates inside (NUMERICS.md).
    code = (
        "import torch; from detlab import bits; from tests.test_bits import sample;"
        "print(bits.row_digests(sample(torch.float32, 5, 700, seed=17)).tolist())"
    )
    here = str(bits.row_digests(sample(torch.float32, 5, 700, seed=17)).tolist())
    switches = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    there = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **switches, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout.strip() == here


# ------------------------------------------------------------------------------------------------- named columns
def named(grid: torch.Tensor, ids: list[int], visible: list[bool] | None = None) -> list[int]:
    """Digests of scores [num_rows, width, num_columns] whose columns have these names in every row."""
    num_rows = grid.shape[0]
    columns = torch.tensor(ids).expand(num_rows, -1)
    seen = torch.tensor([i >= 0 for i in ids] if visible is None else visible).expand(num_rows, -1)
    return bits.fold(bits.project_named_columns(grid, columns, seen)).tolist()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int64], ids=str)
def test_padding_in_front_and_the_future_behind_do_not_matter(dtype):
    scores = sample(dtype, 2, 3, 6, seed=18)
    alone = named(scores, [0, 1, 2, 3, 4, 5])
    padding, future = sample(dtype, 2, 3, 4, seed=19), sample(dtype, 2, 3, 5, seed=20)
    wide = torch.cat([padding, scores, future], -1)
    assert named(wide, [-1] * 4 + [0, 1, 2, 3, 4, 5] + [6] * 5, [False] * 4 + [True] * 6 + [False] * 5) == alone
    assert named(wide, [-1] * 4 + [0, 1, 2, 3, 4, 5] + [-1] * 5) == alone
    # Controls: seen under another name, or with a column of the padding in view, they are other rows.
    assert named(scores, [1, 2, 3, 4, 5, 6]) != alone
    assert named(wide, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] + [-1] * 5) != alone
    assert named(scores.flip(-1), [5, 4, 3, 2, 1, 0]) == alone  # the name counts, not the place


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_every_visible_bit_counts_in_named_columns(dtype):
    scores = sample(dtype, 1, 3, 6, seed=21)
    kind = bits.int_view(scores).dtype
    before = named(scores, list(range(6)))
    for bit in range(8 * scores.element_size()):
        for head in range(3):
            for column in range(6):
                flip = 1 << bit if bit < 8 * scores.element_size() - 1 else -(1 << bit)
                changed = scores.view(kind).clone()
                changed[0, head, column] ^= flip
                assert named(changed.view(dtype), list(range(6))) != before, (bit, head, column)


def test_exchanges_in_named_columns_are_seen():
    scores = draw(1, 4, 8, seed=22)
    before = named(scores, list(range(8)))
    for i in range(7):
        columns, heads = scores.clone(), scores.clone()
        columns[..., [i, i + 1]] = columns[..., [i + 1, i]]
        assert named(columns, list(range(8))) != before
        if i < 3:
            heads[:, [i, i + 1]] = heads[:, [i + 1, i]]
            assert named(heads, list(range(8))) != before
        if i < 6:  # two top bits flip: modulo 2**32 their products cancel, unless they are brought down first
            signs = scores.clone()
            signs[:, 1, [i, i + 1]] *= -1
            assert named(signs, list(range(8))) != before
    mirrored = scores[:, :4, :4].clone()
    assert named(mirrored, [0, 1, 2, 3]) != named(mirrored.mT.contiguous(), [0, 1, 2, 3])  # heads are not columns


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_empty_named_columns(shape):
    assert named(torch.zeros(shape), [0] * shape[2]) == [0] * shape[0]


# ------------------------------------------------------------------------------------------------- whole tensors
def test_digest_of_a_whole_tensor_sees_rows_change_places():
    tensor = draw(4, 5, 6, seed=23)
    assert bits.digest(tensor) == bits.digest(tensor.clone()) == bits.digest(tensor.mT.contiguous().mT)
    assert bits.digest(tensor.flip(0)) != bits.digest(tensor)
    assert bits.digest(tensor.flip(1)) != bits.digest(tensor)
    assert bits.digest(tensor.mT) != bits.digest(tensor)
    for scalar in (torch.tensor(1.5), torch.tensor(True), torch.tensor([2.5]), torch.zeros(0), torch.zeros(0, 3)):
        assert isinstance(bits.digest(scalar), int)
    assert bits.digest(torch.tensor(1.5)) != bits.digest(torch.tensor(-1.5))


def test_md5_is_of_the_dtype_the_shape_and_the_bytes():
    tensor = draw(3, 4, seed=24)
    header = b"float32[3, 4]"
    assert bits.md5(tensor) == hashlib.md5(header + tensor.numpy().tobytes(), usedforsecurity=False).hexdigest()
    assert bits.md5(tensor.t().contiguous().t()) == bits.md5(tensor)
    assert bits.md5(tensor.requires_grad_()) == bits.md5(tensor.detach())
    others = [tensor.reshape(4, 3), tensor.view(torch.int32), tensor.to(torch.float64), tensor.reshape(-1), -tensor]
    assert len({bits.md5(t) for t in (tensor, *others)}) == 6
    assert bits.md5(torch.tensor([0.0])) != bits.md5(torch.tensor([-0.0]))
    for odd in (torch.tensor([True, False]), torch.zeros(0), torch.tensor(3), torch.tensor([1j])):
        assert len(bits.md5(odd)) == 32


def test_md5_in_steps(monkeypatch):
    tensor = sample(torch.bfloat16, 7, 9)
    whole = bits.md5(tensor)
    monkeypatch.setattr(bits, "CHUNK_BYTES", 10)
    assert bits.md5(tensor) == whole


# --------------------------------------------------------------------------------------------------- equality, ULPs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_and_int_view(dtype):
    a = sample(dtype, 4, 5, seed=25)
    assert bits.equal(a, a.clone()) and bits.equal(a, a.t().contiguous().t())
    view = bits.int_view(a)
    assert not view.is_floating_point() and not view.is_complex()
    assert view.shape[:2] == a.shape
    b = a.clone()
    flat = bits.int_view(b) if dtype != torch.bool else b
    flat.reshape(-1)[7] = ~flat.reshape(-1)[7]
    assert not bits.equal(a, b)


def test_equal_wants_the_same_dtype_and_shape():
    a = torch.zeros(2, 3)
    assert not bits.equal(a, torch.zeros(3, 2))
    assert not bits.equal(a, torch.zeros(2, 3, dtype=torch.int32))  # the same integer view
    assert not bits.equal(a, torch.zeros(2, 3, 1))
    assert torch.equal(a, -a) and not bits.equal(a, -a)
    nan = torch.full((2,), math.nan)
    assert not torch.equal(nan, nan) and bits.equal(nan, nan.clone())


def ordinal(pattern: int, width: int) -> int:
    """Place of a bit pattern among the floats, 0 for both zeros."""
    magnitude = pattern & ((1 << (width - 1)) - 1)
    return -magnitude if pattern >> (width - 1) else magnitude


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ulp_distance_is_that_of_the_reference(dtype):
    width = 8 * torch.empty(0, dtype=dtype).element_size()
    mantissa = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}[dtype]
    top = ((1 << (width - 1)) - 1) >> mantissa << mantissa  # infinity
    patterns = [0, 1, 2, 3, (1 << mantissa) - 1, 1 << mantissa, (1 << mantissa) + 1, top // 2, top - 1, top, top + 1, top + 5]
    patterns += [p | 1 << (width - 1) for p in patterns]
    generator = torch.Generator().manual_seed(26)
    drawn = torch.randint(0, 1 << 16, (24, 4), generator=generator).tolist()
    patterns += [sum(part << 16 * i for i, part in enumerate(parts)) & ((1 << width) - 1) for parts in drawn]
    values = from_bits(*patterns, dtype=dtype)
    a, b = values[:, None].expand(-1, len(patterns)), values[None].expand(len(patterns), -1)
    found = bits.ulp_distance(a, b).tolist()
    for i, x in enumerate(patterns):
        for j, y in enumerate(patterns):
            nan_x, nan_y = (p & ~(1 << (width - 1)) > top for p in (x, y))
            if nan_x or nan_y:
                expected = 0 if nan_x and nan_y else 1 << 62
            else:
                expected = min(abs(ordinal(x, width) - ordinal(y, width)), 1 << 62)
            # Only where a float64 distance saturates may its last bits be rounded.
            slack = 1 << 10 if expected > (1 << 62) - (1 << 10) else 0
            assert abs(found[i][j] - expected) <= slack, (hex(x), hex(y))


def test_ulp_distance_by_steps():
    x = torch.tensor([1.0, -1.0, 0.0, 2.0**-149, -(2.0**-149), 3.4e38, 2.0**-126])
    for steps in (1, 2, 7):
        y = x.clone()
        for _ in range(steps):
            y = torch.nextafter(y, torch.tensor(math.inf))
        assert bits.ulp_distance(x, y).tolist() == [steps] * len(x)
        assert bits.ulp_distance(y, x).dtype == torch.int64
    assert bits.ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0])).item() == 0
    tiny = struct.unpack("f", struct.pack("I", 1))[0]
    assert bits.ulp_distance(torch.tensor([-tiny]), torch.tensor([tiny])).item() == 2  # across zero
    inf, most = torch.tensor([math.inf]), torch.tensor([torch.finfo(torch.float32).max])
    assert bits.ulp_distance(inf, most).item() == 1
    assert bits.ulp_distance(inf, -inf).item() == 2 * 0x7F800000
    wide = torch.tensor([math.inf], dtype=torch.float64)
    assert bits.ulp_distance(wide, -wide).item() == 1 << 62


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2), torch.zeros(3), r"needs one dtype and one shape; got float32\[2\] and float32\[3\]\. Cast neither"),
        (torch.zeros(2), torch.zeros(2).half(), r"got float32\[2\] and float16\[2\]"),
        (torch.zeros(2).int(), torch.zeros(2).int(), r"counts steps of float formats; got int32\[2\]\."),
        (torch.zeros(1).cfloat(), torch.zeros(1).cfloat(), r"got complex64\[1\]"),
    ],
)
def test_ulp_distance_refuses_what_it_cannot_count(a, b, message):
    with pytest.raises(ValueError, match=message):
        bits.ulp_distance(a, b)
