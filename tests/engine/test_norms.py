"""Norms in numbers of rows that were probed; planted norms whose rows depend on their number, or on their place."""

import pytest
import torch
from torch import nn

import detlab
from detlab.engine.ledger import Ledger
from detlab.engine.norms import CanonicalNorm, is_norm
from detlab.engine.probes import draw, norm_rows
from detlab.models import FAMILIES
from tests.bit_classes import bitwise_equal


class PlainRMSNorm(nn.Module):
    def __init__(self, size=48):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, hidden_states):
        scale = (self.mean(hidden_states.float().pow(2)) + self.eps).rsqrt()
        return self.weight * hidden_states * scale.to(hidden_states.dtype)

    def mean(self, squares):
        return squares.mean(-1, keepdim=True)


class OtherOrderRMSNorm(PlainRMSNorm):
    """Sums down a column, one term after the other, where there are 8 rows, and in the last row of 100."""

    def mean(self, squares):
        usual = squares.mean(-1, keepdim=True)
        other = squares[:, :1].clone()
        for k in range(1, squares.shape[-1]):
            other = other + squares[:, k : k + 1]
        other = other / squares.shape[-1]
        if len(squares) == 8:
            return other
        if len(squares) == 100:
            usual[-1] = other[-1]
        return usual


@pytest.fixture
def own_ledger(tmp_path, monkeypatch):
    book = Ledger(tmp_path, {"cpu": "one"})
    monkeypatch.setattr("detlab.engine.classes.ledger", lambda: book)
    return book


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_another_order_at_some_numbers_of_rows_is_not_called_with_them(own_ledger, dtype):
    module = OtherOrderRMSNorm().to(dtype)
    part = CanonicalNorm(module, "norm")
    counts = []
    forward, part.original = part.original, lambda rows: counts.append(len(rows)) or forward(rows)
    x = norm_rows(100, 48, dtype)
    alone = torch.cat([part(x[i : i + 1]) for i in range(100)])
    assert bitwise_equal(part(x[:8]), alone[:8]) and bitwise_equal(part(x[None])[0], alone)
    assert 8 not in counts and 100 not in counts
    (classes,) = part.known.values()
    assert {8, 100} <= set(classes.map.others) and classes.recheck() and all(found.holds for found in classes.recheck())
    few, many = module(x[:8].float()), module(x.float())[:8]  # in 16 bits the difference is found, and seldom seen
    assert not bitwise_equal(few.detach(), many.detach())


def test_a_plain_norm_is_called_with_the_rows_that_come(own_ledger):
    part = CanonicalNorm(PlainRMSNorm(), "norm")
    counts = []
    forward, part.original = part.original, lambda rows: counts.append(rows.numel() // 48) or forward(rows)
    for shape in ((1, 1), (2, 50), (3, 77), (1, 1000)):
        x = draw(*shape, 48, dtype=torch.float32)
        assert bitwise_equal(part(x), PlainRMSNorm()(x))
    assert counts == [1, 100, 231, 1000]
    assert part(torch.zeros(0, 48)).shape == (0, 48)


def test_a_norm_of_a_transposed_tensor_has_the_bits_of_its_rows(own_ledger):
    part, x = CanonicalNorm(PlainRMSNorm(), "norm"), draw(48, 60, dtype=torch.float32).t()
    expected = PlainRMSNorm()(x.contiguous())
    assert bitwise_equal(part(x), expected)
    assert not bitwise_equal(PlainRMSNorm()(x).contiguous(), expected)  # the plain module adds along the other dimension


def test_a_weight_of_zeros_hides_nothing_from_the_probe(own_ledger):
    module = OtherOrderRMSNorm()
    module.weight.data.zero_()
    part = CanonicalNorm(module, "norm")
    part(torch.ones(8, 48))
    (classes,) = part.known.values()
    assert 8 in classes.map.others and bool((module.weight == 0).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_of_the_families_is_a_part(family):
    model, _ = detlab.load_model(family)
    norms = [name for name, module in model.named_modules() if "Norm" in type(module).__name__]
    assert norms and all(is_norm(model.get_submodule(name)) for name in norms)
    with detlab.deterministic(model, strict=False) as session:
        assert {name for name, kind in session.parts.items() if kind == "norm"} == set(norms)
