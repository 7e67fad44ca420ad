"""Another order of additions, planted anywhere in an emulated attention, is found: avoided, or the kernel is refused."""

import json
from dataclasses import asdict

import pytest
import torch

from detlab.engine import attention, attention_classes
from detlab.engine.attention_classes import AttentionClasses, AttentionMap, Shape
from detlab.engine.attention_probes import KINDS, attention_data, largest_weight
from detlab.engine.cache import BLOCK
from detlab.engine.ledger import Ledger
from detlab.engine.probes import draw
from detlab.engine.step import Step
from detlab.errors import MachineError
from tests.bit_classes import bitwise_equal
from tests.planted_attention import Emulated, Plant

SIZE = 32


SUMS = pytest.mark.parametrize("where", ["scores", "values", "denominator"])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def few_wanted(monkeypatch):
    """An emulation is slow: of the shapes that a class should hold, those that it must."""
    wanted = attention_classes._wanted
    monkeypatch.setattr(attention_classes, "_wanted", lambda granule: wanted(granule)[:2])


@pytest.fixture
def classes(tmp_path, dtype):
    """Makes the classes of an emulated kernel with a plant, in a ledger of its own."""

    def make(plant=None):
        return AttentionClasses(dtype, SIZE, Emulated(plant), book=Ledger(tmp_path, {}))

    return make


def test_without_a_plant_every_shape_is_of_the_class(classes):
    found = classes()
    for rows, keys in ((4, 16), (12, 48), (32, 176), (48, 528)):
        for mask, heads in (("one", "many"), ("rows", "shared"), ("rows", "single")):
            assert found.keys(keys, rows, mask, heads) == keys
    assert [found.keys(rows, rows, "causal", "shared") for rows in (16, 48, 96)] == [16, 48, 96]
    assert not found._others and found.granule == 4
    assert all(finding.holds for finding in found.recheck())


@SUMS
def test_an_order_of_one_number_of_rows(classes, where):
    found = classes(Plant(where, lambda call: call.rows == 12))
    assert found.keys(90, 12, "one", "many") is None
    assert [found.keys(90, rows, "one", "many") for rows in (8, 16)] == [96, 96]


@SUMS
def test_an_order_of_one_number_of_keys(classes, where):
    found = classes(Plant(where, lambda call: call.keys == 96))
    assert [found.keys(count, 4, "one", "many") for count in (80, 90, 100)] == [80, 112, 112]


@SUMS
def test_an_order_of_the_last_block_alone(classes, where):
    found = classes(Plant(where, lambda call: call.keys % BLOCK, is_last_block=True))
    assert [found.keys(count, 4, "one", "many") for count in (490, 1000)] == [512, 1024]


@SUMS
def test_an_order_beyond_row_32(classes, where):
    found = classes(Plant(where, rows=slice(32, None)))
    assert found.keys(90, 64, "one", "many") is None and found.keys(90, 32, "one", "many") == 96


@pytest.mark.parametrize(("where", "head"), [("scores", 0), ("values", 3), ("denominator", 1)])
def test_an_order_of_one_head(classes, where, head):
    with pytest.raises(LookupError, match="no shape gives attention"):
        classes(Plant(where, heads=slice(head, head + 1)))


@SUMS
def test_an_order_of_the_causal_path(classes, where):
    found = classes(Plant(where, lambda call: call.is_causal))
    assert [found.keys(rows, rows, "causal", "many") for rows in (48, 96)] == [None, None]
    assert found.keys(48, 48, "rows", "many") == 48


@SUMS
def test_an_order_of_masks_by_row(classes, where):
    found = classes(Plant(where, lambda call: call.is_masked_by_row))
    assert found.keys(90, 16, "rows", "many") is None and found.keys(90, 16, "one", "many") == 96


def test_another_way_to_scale_one_block_to_the_next(classes):
    found = classes(Plant("rescaling", lambda call: call.rows == 16))
    assert found.keys(1000, 16, "one", "many") is None


@pytest.mark.parametrize("where", ["scores", "values"])
def test_two_steps_exchanged_at_one_number_of_rows(classes, where):
    def order(steps):
        return [*range(steps - 2), steps - 1, steps - 2]

    assert classes(Plant(where, lambda call: call.rows == 12, order)).keys(170, 12, "rows", "many") is None


# ------------------------------------------------------------------------------------------------------ sharpness
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("where", "kind", "most"), [("scores", 0, 0.05), ("values", 1, 0.05), ("values", 2, 0.08),
                                                     ("denominator", 3, 0.5)])  # fmt: skip
def test_another_order_rarely_agrees_on_a_row(dtype, where, kind, most):
    same, rows = 0, 0
    for seed in range(3):
        data = attention_data((192,), 192, SIZE, dtype, seed=seed)
        a, b = (Emulated(plant)(*(t[None] for t in data), torch.zeros(1, 1, 1, 192), 1.0)[0, kind]
                for plant in (None, Plant(where)))  # fmt: skip
        assert bool(a.isfinite().all())
        same, rows = same + int((a == b).all(1).sum()), rows + len(a)
    assert same <= most * rows


def test_random_data_would_not_do():
    """Of uniform data in bfloat16, most rows have the same bits in another order."""
    q, k, v = (draw(1, len(KINDS), n, SIZE, dtype=torch.bfloat16, seed=n) for n in (13, 192, 191))
    v = torch.cat([v, v[:, :, :1]], 2)
    a, b = (Emulated(plant)(q, k, v, torch.zeros(1, 1, 1, 192), None) for plant in (None, Plant("denominator")))
    assert (a == b).all(-1).float().mean() > 0.9


def test_the_weight_of_the_largest_score():
    def kernel(q, k, v, mask, scale):
        scores = q.float() @ k.float().transpose(2, 3) + mask.float()
        weights = torch.exp(scores) * 0.9999
        return (weights.bfloat16().float() @ v.float() / weights.sum(-1, keepdim=True)).bfloat16()

    assert abs(largest_weight(kernel, 64, torch.bfloat16) - 0.9999) < 1e-6


# ------------------------------------------------------------------------------------------------------ the ledger
def test_what_was_found_is_kept_and_not_probed_again(classes):
    first = classes(Plant("values", lambda call: call.keys == 96))
    assert [first.keys(count, 8, "one", "many") for count in (90, 20)] == [112, 32]
    first.flush()  # what was found since the file was last written
    again = classes()
    assert again.keys(90, 8, "one", "many") == 112 and again.seconds == 0.0
    assert again.ran == {Shape(8, 112, "one", "many")}
    again.fresh()
    assert not again.ran and again.keys(20, 8, "one", "many") == 32 and again.ran == {Shape(8, 32, "one", "many")}


def planted_ledger(folder, dtype, **changes):
    """A ledger whose attention map says other than was measured."""
    book = Ledger(folder, {})
    made = AttentionClasses(dtype, SIZE, Emulated(), book=book)
    book.measured[made.name] = asdict(made.map) | changes
    book._write()
    return Ledger(folder, {})


@pytest.mark.parametrize(
    ("line", "asked", "plant"),
    [
        ("4 one many: 1-32", (90, 4, "one", "many"), Plant("values", lambda call: call.keys == 96)),
        ("64 causal many: 4", (64, 64, "causal", "many"), Plant("scores", lambda call: call.is_causal)),
        ("16 rows shared: 64", (1024, 16, "rows", "shared"), Plant("denominator", lambda call: call.rows == 16)),
    ],
)
def test_a_wrong_line_of_the_ledger_is_found_by_a_second_look(tmp_path, dtype, line, asked, plant):
    book = planted_ledger(tmp_path, dtype, members=(line, "4 rows many: 32 64"))
    found = AttentionClasses(dtype, SIZE, Emulated(plant), book=book)
    assert found.keys(*asked) is not None  # believed
    assert [finding.holds for finding in found.recheck(seed=1000)] == [False]
    honest = AttentionClasses(dtype, SIZE, Emulated(), book=Ledger(tmp_path, {}))
    assert honest.keys(*asked) is not None and [f.holds for f in honest.recheck(seed=1000)] == [True]


def test_a_map_of_another_kernel_is_made_again(tmp_path, classes):
    first = classes()
    text = json.loads(first._book.path.read_text())
    assert text["measured"][first.name]["digest"] == first.map.digest
    other = AttentionClasses(first._dtype, SIZE, Emulated(Plant("values")), book=Ledger(tmp_path, {}))
    assert other.map.digest != first.map.digest and other.seconds > 0


def test_a_map_that_cannot_be_read_is_refused():
    for line in ("4 one many", "x one many: 3", "4 one: 3", "4 one many: 3-x"):
        with pytest.raises(ValueError, match="not shapes of attention|not enough values|invalid literal"):
            AttentionMap(4, (line,), (), "")
    with pytest.raises(ValueError, match="not an attention map"):
        AttentionMap(3, (), (), "")


# ------------------------------------------------------------------------------------------------------ what a model calls
@pytest.fixture
def served(monkeypatch, classes, dtype):
    """Attention through an emulated kernel with a plant: [tokens, heads, size] of one batch row."""

    def serve(plant, tokens, heads=4, groups=2):
        kernel = Emulated(plant)
        found = classes(plant)
        monkeypatch.setattr(attention, "_flash", kernel)
        monkeypatch.setattr(attention, "attention_rule", lambda *_: found)
        q, k, v = (draw(1, h, tokens, SIZE, dtype=dtype, seed=s) for s, h in ((1, heads), (2, groups), (3, groups)))
        step = Step(1, tokens, 0, None, None, dtype, torch.device("cpu"))
        got = attention.canonical_attention(torch.nn.Identity(), q, k, v, step)[0][0]
        for at in {0, tokens // 2, tokens - 1}:
            expected = attention.reference_attention(q[0, :, at], k[0, :, : at + 1], v[0, :, : at + 1], found)
            assert bitwise_equal(got[at], expected), at
        return found

    return serve


@pytest.mark.parametrize(
    ("plant", "tokens"),
    [
        (None, 20), (None, 70), (Plant("values", lambda call: call.is_causal), 70),
        (Plant("scores", lambda call: call.is_causal or call.rows > 16), 70),
        (Plant("values", lambda call: call.is_causal or call.rows == 40), 20),
        (Plant("values", lambda call: call.keys % BLOCK, is_last_block=True), 20),
    ],
)  # fmt: skip
def test_another_admissible_shape_is_taken(served, plant, tokens):
    assert served(plant, tokens).ran


def test_where_there_is_none_the_call_is_refused(served):
    with pytest.raises(MachineError, match=r"attention of 1 x 4 heads in .*, token \d+ after \d+ keys: no call has the bits"):
        served(Plant("values", lambda call: call.is_causal or call.is_masked_by_row or call.heads == 8), 70)
