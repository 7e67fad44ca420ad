"""Conditions: what they refuse, and that they survive text, JSON and grids."""

import dataclasses
import itertools
import random

import pytest

from detlab import Condition
from detlab.errors import ConditionError

VALUES = {
    "batch_size": [1, 2, 8],
    "row": [0, 1, 7],
    "mates": ["prompts", "repeat", "random"],
    "padding_side": [None, "left", "right"],
    "padding": [0, 3],
    "cache": ["dynamic", "static", "none"],
    "attention": [None, "sdpa", "eager"],
    "dtype": [None, "float32", "bfloat16", "float16", "float64"],
    "prefill_chunk": [None, 1, 16],
    "seed": [0, 7],
    "temperature": [0.0, 0.7],
    "top_k": [0, 5],
    "threads": [None, 1, 3],
    "autocast": [None, "bfloat16", "float16"],
    "deterministic_algorithms": [False, True],
    "alignment": [0, 4, 62],
    "compile": [None, "mlp"],
    "tier": ["stock", "invariant", "exact"],
    "device": [None, "cpu"],
    "aten_isa": [None, "default", "avx2"],
    "mkl_isa": [None, "COMPATIBLE"],
    "onednn_isa": [None, "AVX2"],
}


def is_possible(v: dict) -> bool:
    """The rules of the docstring, once more."""
    return (
        v["row"] < v["batch_size"]
        and not (v["padding"] and v["padding_side"] is None)
        and not (v["top_k"] and not v["temperature"])
        and (v["tier"] == "stock" or (v["attention"], v["autocast"], v["compile"]) == (None, None, None))
        and not (v["prefill_chunk"] is not None and (v["cache"] == "none" or v["padding_side"] == "right"))
    )


def test_the_settings_are_those_listed_here():
    assert [f.name for f in dataclasses.fields(Condition)] == list(VALUES)
    default = Condition()
    assert all(getattr(default, name) == values[0] for name, values in VALUES.items())


def test_every_combination_is_accepted_or_refused_and_survives_text_and_json():
    draw = random.Random(0)
    accepted = 0
    for _ in range(8000):
        values = {name: draw.choice(choices) for name, choices in VALUES.items()}
        if not is_possible(values):
            with pytest.raises(ConditionError):
                Condition(**values)
            continue
        accepted += 1
        condition = Condition(**values)
        assert Condition.parse(str(condition)) == condition
        assert Condition.from_json(condition.to_json()) == condition
        spelled = " , ".join(f"{name} = {value}" for name, value in values.items())
        assert Condition.parse(spelled) == condition
        assert hash(condition) == hash(Condition(**values))
    assert accepted > 300


def test_text_shows_what_differs_from_the_default():
    assert str(Condition()) == "default"
    assert Condition.parse("") == Condition.parse("default") == Condition.parse(" , ") == Condition()
    assert str(Condition(batch_size=8, padding_side="left")) == "batch_size=8,padding_side=left"
    assert Condition.parse("prefill_chunk=None,dtype=None") == Condition()


def test_variables_are_what_a_fresh_process_needs():
    assert Condition(threads=2, batch_size=4).variables == {}
    assert Condition(aten_isa="avx2", onednn_isa="AVX2").variables == {
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    }  # fmt: skip
    assert Condition(mkl_isa="COMPATIBLE").variables == {"MKL_CBWR": "COMPATIBLE"}


def test_a_condition_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Condition().batch_size = 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is not possible; give a whole number of at least 1."),
        ({"batch_size": True}, "batch_size=True is not possible; give a whole number of at least 1."),
        ({"batch_size": 2.0}, "batch_size=2.0 is not possible; give a whole number of at least 1."),
        ({"batch_size": None}, "batch_size=None is not possible; give a whole number of at least 1."),
        ({"padding": -1, "padding_side": "left"}, "padding=-1 is not possible; give a whole number of at least 0."),
        ({"seed": -1}, "seed=-1 is not possible; give a whole number of at least 0."),
        ({"prefill_chunk": 0}, "prefill_chunk=0 is not possible; give a whole number of at least 1."),
        ({"row": -1}, "row=-1 is not possible; give a whole number of at least 0."),
        (
            {"row": 4, "batch_size": 4},
            "row=4 lies outside a batch of batch_size=4; rows count from 0, so give row <= 3 or a larger batch.",
        ),
        ({"mates": "other"}, "mates='other' is not a choice; choose from prompts, repeat, random."),
        ({"mates": None}, "mates=None is not a choice; choose from prompts, repeat, random."),
        ({"padding_side": "Left"}, "padding_side='Left' is not a choice; choose from None, left, right."),
        ({"padding_side": ["left"]}, "padding_side=['left'] is not a choice; choose from None, left, right."),
        ({"cache": "paged"}, "cache='paged' is not a choice; choose from dynamic, static, none."),
        ({"attention": "flash"}, "attention='flash' is not a choice; choose from None, sdpa, eager."),
        (
            {"dtype": "bf16"},
            "dtype='bf16' is not a choice; choose from None, float32, bfloat16, float16, float64.",
        ),
        ({"padding": 3}, 'padding=3 needs a side: add padding_side="left" or padding_side="right".'),
        ({"threads": 0}, "threads=0 is not possible; give a whole number of at least 1."),
        ({"temperature": -0.5}, "temperature=-0.5 is not possible; give 0 (greedy) or a number above it."),
        ({"temperature": float("nan")}, "temperature=nan is not possible; give 0 (greedy) or a number above it."),
        ({"temperature": True}, "temperature=True is not possible; give 0 (greedy) or a number above it."),
        ({"top_k": 5}, "top_k=5 needs a temperature above 0: greedy decoding does not draw."),
        ({"deterministic_algorithms": 1}, "deterministic_algorithms=1 is not possible; give True or False."),
        ({"alignment": 3}, "alignment=3 is not possible; give an even number of bytes below 64."),
        ({"alignment": 64}, "alignment=64 is not possible; give an even number of bytes below 64."),
        ({"compile": ""}, "compile='' is not possible; give a name, or leave it out."),
        ({"device": 0}, "device=0 is not possible; give a name, or leave it out."),
        ({"autocast": "float32"}, "autocast='float32' is not a choice; choose from None, bfloat16, float16."),
        ({"aten_isa": "avx"}, "aten_isa='avx' is not a choice; choose from None, default, avx2, avx512."),
        (
            {"prefill_chunk": 4, "cache": "none"},
            'prefill_chunk needs a cache to build on: drop it, or set cache="dynamic".',
        ),
        (
            {"prefill_chunk": 4, "padding_side": "right"},
            "prefill_chunk with right padding would end some prompts in the middle of a chunk; "
            'use padding_side="left", or drop prefill_chunk.',
        ),
    ],
)
def test_settings_that_no_run_can_have(settings, message):
    with pytest.raises(ConditionError) as caught:
        Condition(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size", "'batch_size' is not key=value; write a condition as batch_size=8,padding_side=left."),
        ("4", "'4' is not key=value; write a condition as batch_size=8,padding_side=left."),
        ("batchsize=4", "unknown condition key 'batchsize'. Did you mean batch_size? Known keys: batch_size, row, mates,"),
        ("qqq=4", "unknown condition key 'qqq'. Known keys: batch_size, row, mates, padding_side, padding, cache,"),
        ("=4", "unknown condition key ''. Known keys: "),
        ("row=0,row=0", "row is given twice in 'row=0,row=0'; give it once."),
        ("batch_size=two", "batch_size='two' is not a whole number."),
        ("batch_size=2.5", "batch_size='2.5' is not a whole number."),
        ("batch_size=", "batch_size='' is not a whole number."),
        ("temperature=hot", "temperature='hot' is not a number."),
        ("deterministic_algorithms=yes", "deterministic_algorithms='yes' is neither True nor False."),
        ("batch_size=None", "batch_size='None' is not a whole number."),
        ("padding_side=up", "padding_side='up' is not a choice; choose from None, left, right."),
        ("mates=None", "mates=None is not a choice; choose from prompts, repeat, random."),
        ("batch_size=8 padding_side=left", "batch_size='8 padding_side=left' is not a whole number."),
        ("batch_size=8;padding=2", "batch_size='8;padding=2' is not a whole number."),
    ],
)
def test_text_that_is_no_condition(text, message):
    with pytest.raises(ConditionError) as caught:
        Condition.parse(text)
    assert str(caught.value).startswith(message)


def test_settings_of_another_version_are_refused():
    with pytest.raises(ConditionError, match=r"condition settings \['stream'\] are not known to this version of detlab\."):
        Condition.from_json({"batch_size": 2, "stream": 1})
    with pytest.raises(ConditionError, match="batch_size=0 is not possible"):
        Condition.from_json({"batch_size": 0})


def test_grid():
    assert Condition.grid() == [Condition()]
    grid = Condition.grid(batch_size=[1, 4], attention=("sdpa", "eager"), seed=range(2), padding_side="left")
    expected = itertools.product([1, 4], ["sdpa", "eager"], [0, 1])
    assert grid == [
        Condition(batch_size=b, attention=a, seed=s, padding_side="left") for b, a, s in expected
    ]
    assert Condition.grid(batch_size=[]) == []
    with pytest.raises(ConditionError, match=r"unknown condition keys \['batch'\]; known: \['batch_size', 'row'"):
        Condition.grid(batch=[1])
    with pytest.raises(ConditionError, match="row=3 lies outside"):
        Condition.grid(batch_size=[4, 2], row=[3])
