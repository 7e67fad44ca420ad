"""The "why" of an investigation is shown: in the report, in the panel, as text and as a figure; and it is escaped."""

import json
from dataclasses import replace

import numpy as np
import pytest

from detlab.divergence.amplification import LayerGain
from detlab.divergence.explain_factors import Factor
from detlab.divergence.explain_result import Explanation, Mechanism, factor_words, kernel_words
from detlab.divergence.graft import IsolatedOp
from detlab.divergence.kernels import Kernel, logged
from detlab.divergence.triage_result import Evidence, Triage
from detlab.viz import noise_budget, report_html
from detlab.viz.why import why_html, why_lines
from tests.viz_cases import diverged, identical

EVIL = "<script>alert('x')</script>"
OPS = [
    IsolatedOp("model.layers.0.self_attn.q_proj", "mm", 0, 1, 1, 1, 1e-6, 1e-6, False),
    IsolatedOp("model.layers.0.mlp.down_proj", "mm", 0, 1, 1, 1, 2e-6, 4e-6, True),
    IsolatedOp("model.layers.1.mlp.down_proj", "mm", 0, 1, 1, 1, 1e-6, 9e-6, True),
    IsolatedOp("lm_head", "mm", 0, 1, 1, 1, 0.0, None, True),
]


def test_the_report_says_why() -> None:
    text = report_html(diverged())
    assert "<h2>Why</h2>" in text and "Why: " in text and "Size: logits differ by up to" in text
    assert "There is no difference to explain" in report_html(identical())
    assert "It was not asked why" in why_html(replace(diverged(), triage=None, explanation=None))


def test_the_planted_fault_is_no_rounding() -> None:
    """The planted op multiplies by another number where the batch is larger: another function, which float64 shows too."""
    found = diverged()
    assert found.triage is not None and found.triage.verdict == "semantics", str(found.triage)
    assert found.explanation is not None and found.explanation.reproduced == (True, True)
    assert found.explanation.factor("arguments that are no tensors").leads_to_b
    assert "why: semantics" in str(found) and "mechanism: " in str(found)
    data = found.to_json()["why"]
    assert data["triage"]["verdict"] == "semantics" and data["explanation"]["factors"]
    json.dumps(data)
    assert why_lines(identical()) == [] and "<strong>semantics" in found._repr_html_()


def test_what_comes_from_outside_is_escaped() -> None:
    triage = Triage("rounding", EVIL, EVIL, [Evidence(EVIL, EVIL)], notes=[EVIL])
    factor = Factor(EVIL, ((EVIL,), ("b",)), (EVIL,), ("b",), EVIL, "b")
    explanation = Explanation(
        diverged().comparison.first, Mechanism("another kernel", EVIL), [factor], ([Kernel(EVIL, EVIL)], []), notes=[EVIL]
    )  # fmt: skip
    page = why_html(replace(diverged(), triage=triage, explanation=explanation))
    assert "<script" not in page and page.count("&lt;script&gt;") >= 6
    for shown in (triage._repr_html_(), explanation._repr_html_()):
        assert "<script" not in shown and "&lt;script&gt;" in shown


def test_the_noise_budget_shows_each_layer_once() -> None:
    figure = noise_budget(OPS)
    bar, line = figure.data
    assert list(bar.x) == list(line.x) == ["0", "1", "lm_head"]
    assert list(bar.y) == [2e-6, 1e-6, None]  # the largest of a layer; a size of 0 has no logarithm
    assert list(line.y) == [4e-6, 9e-6, None]
    assert bar.customdata[0] == "2 ops, 1 of them hidden behind earlier differences"
    assert figure.layout.yaxis.type == "log" and figure.layout.xaxis.type == "category"
    json.loads(figure.to_json())


def test_the_noise_budget_shows_what_a_layer_does_to_what_comes_in() -> None:
    gains = [LayerGain(0, 0.0, 0.0, 1e-7), LayerGain(1, 1e-7, 3e-7, 1e-7)]
    line = next(trace for trace in noise_budget(OPS, gains).data if "growth" in trace.name)
    assert (list(line.x), [round(y, 6) for y in line.y], line.yaxis) == (["1"], [3.0], "y2")
    assert all("growth" not in trace.name for trace in noise_budget(OPS).data)


def test_a_noise_budget_of_nothing_says_so() -> None:
    figure = noise_budget([])
    assert figure.layout.annotations[0].text == "no op makes a difference of its own" and len(figure.data) == 2


def test_names_of_layers_cannot_be_markup() -> None:
    figure = noise_budget([replace(OPS[3], module="<b>%{x}</b>", own=1.0)], title=EVIL)
    assert "<script" not in str(figure.layout.title.text) and "<b>" not in str(figure.data[0].x)


@pytest.mark.parametrize(
    ("classes", "ours", "theirs", "words"),
    [
        ((("1", "2", "4"),), "1", "4", "no (3 values, one result)"),
        ((("1",), ("4", "8")), "1", "4", "MOVES the bits: {1} {4, 8}; b's value gives b's bits"),
        ((("1",), ("2",)), "", "", "MOVES the bits: {1} {2}"),
    ],
)
def test_a_factor_in_words(classes, ours, theirs, words) -> None:
    like_b = classes[-1] if theirs else ()
    factor = Factor("rows", classes, classes[0], like_b, ours, theirs)
    assert factor_words(factor) == words and factor.moves == (len(classes) > 1)
    assert factor.leads_to_b == (len(classes) > 1 and bool(theirs))


def test_logs_of_libraries_are_read() -> None:
    log = "\n".join(
        [
            "MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605",
            "detlab call 0",
            "MKL_VERBOSE SGEMM(T,N,576,1,576,0x7ff,0x7f4,576,0x55,576,0x7f,0x55,576) 185.10us CNR:OFF Dyn:0",
            "MKL_VERBOSE SGEMM(T,N,576,1,576,0x7ff,0x7f4,576,0x55,576,0x7f,0x55,576) 12.10us CNR:OFF Dyn:0",
            "detlab call -1",
            "MKL_VERBOSE SGEMM(T,N,1,1,1,0x7ff,0x7f4,576,0x55,576,0x7f,0x55,576) 12.10us CNR:OFF Dyn:0",
            "detlab call 1",
            "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16::blocked:ab::f0 "
            "wei:bf16::blocked:ba::f0 dst:bf16::blocked:ab::f0,attr-scratchpad:user,,1x576:576x576,0.11499",
            "something else",
        ]
    )
    first, second = logged(log, 2)
    assert kernel_words(first) == "MKL SGEMM 576x1x576 x2"
    assert kernel_words(second) == "oneDNN matmul brg_matmul:avx512_core_bf16 1x576:576x576"
    assert kernel_words([]) == "not known" and logged("", 1) == [[]]


def test_sizes_that_are_no_numbers_do_not_break_the_figure() -> None:
    figure = noise_budget([replace(OPS[0], own=float(np.inf), total=float(np.inf))])
    json.loads(figure.to_json())
