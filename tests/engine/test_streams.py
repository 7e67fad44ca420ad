"""Random numbers that belong to a request: their bits, their distribution, and the portable log."""

import hashlib
from decimal import Decimal, localcontext

import numpy as np
import pytest

from detlab.engine.streams import gumbels, gumbels_of_rows, log, philox, uniforms
from detlab.errors import UsageError


def slow_philox(counter: list[int], key: list[int], width: int) -> list[int]:
    """Philox4x32-10 and Philox4x64-10 in whole numbers, after Salmon et al. 2011."""
    m, w = {
        32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
        64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
    }[width]
    mask = (1 << width) - 1
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = m[0] * c[0], m[1] * c[2]
        c = [(b >> width) ^ c[1] ^ k[0], b & mask, (a >> width) ^ c[3] ^ k[1], a & mask]
        k = [(k[i] + w[i]) & mask for i in range(2)]
    return c


def fast_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = ([np.array([word], np.uint64) for word in words] for words in (counter, key))
    return [int(word[0]) for word in philox((c[0], c[1], c[2], c[3]), (k[0], k[1]))]


# The vectors published with Random123 (its kat_vectors, philox4x32 10).
PUBLISHED = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_philox_gives_the_published_vectors(counter, key, expected):
    assert fast_philox(counter, key) == expected
    assert slow_philox(counter, key, 32) == expected


def test_the_slow_reference_is_numpys_philox_at_64_bits_and_the_fast_twins_at_32():
    draw = np.random.default_rng(0)
    for _ in range(50):
        wide = [int(v) for v in draw.integers(0, 2**64, 6, dtype=np.uint64)]
        wide[0] = min(wide[0], 2**64 - 2)  # NumPy counts up before the first block
        generator = np.random.Philox(counter=np.array(wide[:4], np.uint64), key=np.array(wide[4:], np.uint64))
        first = [int(v) for v in generator.random_raw(4)]
        assert first == slow_philox([wide[0] + 1, *wide[1:4]], wide[4:], 64)
        narrow = [v >> 32 for v in wide]
        assert fast_philox(narrow[:4], narrow[4:]) == slow_philox(narrow[:4], narrow[4:], 32)


def slow_uniform(seed: int, request: str, position: int, index: int) -> float:
    """The definition, in whole numbers: what another party would write."""
    name = hashlib.sha256(b"detlab stream 1" + seed.to_bytes(8, "little") + request.encode()).digest()
    k0, k1, c2, c3 = (int.from_bytes(name[i : i + 4], "little") for i in range(0, 16, 4))
    words = slow_philox([index // 2, position, c2, c3], [k0, k1], 32)
    high, low = words[2:] if index % 2 else words[:2]
    return (2 * (((high << 32) | low) >> 12) + 1) * 2.0**-53


@pytest.mark.parametrize("n", [1, 2, 7, 1024])
def test_uniforms_are_as_defined(n):
    for seed, request, position in [(0, "a", 0), (2**64 - 1, "another request, ä", 2**32 - 1), (7, "a", 3)]:
        expected = [slow_uniform(seed, request, position, i) for i in range(n)]
        assert uniforms(seed, request, position, n).tolist() == expected


def test_some_of_the_numbers_have_the_bits_they_have_among_all():
    at = np.array([0, 1, 5, 900, 901, 1000])
    for numbers in (uniforms, gumbels):
        some, all_of_them = numbers(3, "r", 4, 1001, at), numbers(3, "r", 4, 1001)
        assert (some.view(np.int64) == all_of_them[at].view(np.int64)).all()
        assert (numbers(3, "r", 4, 50).view(np.int64) == all_of_them[:50].view(np.int64)).all()


def test_several_requests_at_once_have_the_bits_each_has_alone():
    rows, at = np.array([0, 0, 1, 1, 2]), np.array([0, 5, 5, 6, 99_999])
    found = gumbels_of_rows(3, ["a", "b", "a"], [4, 4, 9], rows, at)
    alone = [gumbels(3, "a", 4, 6)[[0, 5]], gumbels(3, "b", 4, 7)[[5, 6]], gumbels(3, "a", 9, 100_000)[[99_999]]]
    assert (found.view(np.int64) == np.concatenate(alone).view(np.int64)).all()
    assert gumbels_of_rows(3, [], [], rows[:0], at[:0]).shape == (0,)


def test_seed_request_and_position_each_give_other_numbers():
    streams = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (1 << 32, "a", 0), (0, "a", 1 << 31)]
    drawn = np.concatenate([uniforms(*stream, 500) for stream in streams])
    assert len(set(drawn.tolist())) == 500 * len(streams)


def test_uniforms_are_uniform_and_neighbours_independent():
    n = 200_000
    drawn = uniforms(11, "r", 0, n)
    assert drawn.min() >= 2.0**-53 and drawn.max() <= 1 - 2.0**-53
    counts = np.bincount((drawn * 100).astype(int), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 149  # chi-square, 99 degrees of freedom: 0.1 %
    for other in (drawn[1:], uniforms(11, "r", 1, n)[1:], uniforms(12, "r", 0, n)[1:], uniforms(11, "s", 0, n)[1:]):
        assert abs(np.corrcoef(drawn[:-1], other)[0, 1]) < 4 / np.sqrt(n)


def test_the_pinned_bits():
    """Any machine must give these: a text drawn today has to be drawn again."""
    assert [x.hex() for x in uniforms(7, "order-17", 3, 3).tolist()] == PINNED_UNIFORMS
    assert hashlib.md5(gumbels(7, "order-17", 3, 50_000).tobytes()).hexdigest() == PINNED_GUMBELS


PINNED_UNIFORMS = ["0x1.ffb7c2ef59502p-2", "0x1.251ec75e4a00ap-2", "0x1.dfb3d9089bdbbp-1"]
PINNED_GUMBELS = "51d7bb1b56fcf16a00c86761fda51303"


def log_cases() -> np.ndarray:
    draw = np.random.default_rng(1)
    near_one, exponents = np.arange(1.0, 53.0), np.arange(-1022.0, 1024.0)
    return np.concatenate(
        [
            draw.random(1500),
            np.ldexp(1 + draw.random(2046), exponents.astype(int)),
            1 + draw.uniform(-1e-3, 1e-3, 1500),
            1 - 2.0 ** -(near_one + 1),
            1 + 2.0**-near_one,
            np.sqrt([2.0, 0.5])[:, None].repeat(50, 1).reshape(-1) * (1 + draw.integers(-3, 4, 100) * 2.0**-52),
            [2.0**-1022, 0.5, 2.0, np.finfo(np.float64).max],
            uniforms(1, "a", 0, 500),
        ]
    )


def test_log_is_within_4_ulps_of_the_exact_one():
    x = log_cases()
    worst = Decimal(0)
    with localcontext() as context:
        context.prec = 50
        for value, found in zip(x.tolist(), log(x).tolist(), strict=True):
            exact = Decimal(value).ln()
            worst = max(worst, abs(Decimal(found) - exact) / Decimal(float(np.spacing(abs(float(exact))))))
    assert worst < Decimal("2.5"), worst  # the docstring promises 4 and says what was measured


def test_log_of_one_is_zero_and_of_powers_of_two_is_a_multiple_of_ln_2():
    assert log(np.array([1.0])).view(np.int64)[0] == 0
    assert log(np.array([2.0**-700]))[0] == -700 * np.log(2.0)


def test_log_calls_no_logarithm_of_the_machines(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("libm was asked")

    for name in ("log", "log1p", "log2", "exp", "power", "frexp", "ldexp"):
        monkeypatch.setattr(np, name, refuse)
    assert np.isfinite(gumbels(0, "a", 0, 10)).all()


def test_gumbels_are_within_their_bound():
    drawn = np.concatenate([uniforms(5, "g", 0, 2000), [2.0**-53, 0.5, 1 - 2.0**-53]])
    found = -log(-log(drawn))
    with localcontext() as context:
        context.prec = 50
        for value, gumbel in zip(drawn.tolist(), found.tolist(), strict=True):
            exact = -((-Decimal(value).ln()).ln())
            bound = Decimal(1e-15) + 8 * Decimal(float(np.spacing(abs(float(exact)))))
            assert abs(Decimal(gumbel) - exact) < bound
    assert found.min() > -3.7 and found.max() < 36.8
    assert (found[:2000].view(np.int64) == gumbels(5, "g", 0, 2000).view(np.int64)).all()


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.0, "7", None, True])
def test_a_seed_that_cannot_be_is_refused(seed):
    with pytest.raises(UsageError, match=r"seed=.* is not possible; give a whole number from 0 to 2\*\*64 - 1"):
        uniforms(seed, "a", 0, 1)


@pytest.mark.parametrize("request_", ["", 7, None, b"a", ["a"]])
def test_a_request_that_cannot_be_is_refused(request_):
    with pytest.raises(UsageError, match="request id .* is not possible; give a text of your own"):
        uniforms(0, request_, 0, 1)


@pytest.mark.parametrize("position", [-1, 1 << 32, 0.5, True])
def test_a_position_that_cannot_be_is_refused(position):
    with pytest.raises(UsageError, match="position=.* is not possible; give the number of tokens generated so far"):
        uniforms(0, "a", position, 1)


def test_counts_and_indices_that_cannot_be_are_refused():
    for n in (-1, 1.5, 1 << 33):
        with pytest.raises(UsageError, match="n=.* is not possible; give how many numbers"):
            uniforms(0, "a", 0, n)
    with pytest.raises(UsageError, match=r"at holds 3\.\.7; the indices of n=7 numbers are 0\.\.6"):
        uniforms(0, "a", 0, 7, np.array([3, 7]))
    assert uniforms(0, "a", 0, 0).shape == gumbels(0, "a", 0, 5, np.array([], np.int64)).shape == (0,)
