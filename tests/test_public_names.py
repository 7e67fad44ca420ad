"""The public names, pinned: adding one is a decision, losing one breaks notebooks and users."""

import inspect
import subprocess
import sys

import pytest

import detlab

NAMES = [
    "Bench", "Certificate", "ClockExperiment", "Comparison", "Condition", "Coverage", "DetlabError", "Divergence",
    "Explanation", "Investigation", "Prompt", "Run", "Scores", "Telemetry", "Trace", "Triage", "accumulation_tree", "apply",
    "bench", "capture", "clock_experiment", "compare", "coverage", "deterministic", "environment", "explain",
    "first_divergence", "graft", "investigate", "load_model", "load_prompts", "load_trace", "mechanisms", "minimal_fix",
    "rate", "remedies", "restore", "run", "score", "sweep", "telemetry", "triage", "try_remedies", "two_stages", "verify",
    "viz",
]  # fmt: skip


def test_names_are_pinned():
    assert sorted(detlab.__all__) == NAMES
    assert dir(detlab) == sorted([*NAMES, "__version__"])


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_says_what_it_is(name):
    value = getattr(detlab, name)
    assert value.__doc__ and value.__doc__.strip()
    assert getattr(detlab, name) is value


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(AttributeError) as caught:
        detlab.investigte  # noqa: B018
    assert str(caught.value) == f"module 'detlab' has no attribute 'investigte'; its names are {', '.join(NAMES)}."


def test_names_are_not_hidden_by_modules_of_the_same_name():
    import detlab.environment
    import detlab.investigate
    import detlab.sweep

    assert callable(detlab.environment) and callable(detlab.investigate) and callable(detlab.sweep)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("run", "model, prompts, condition, *, new_tokens, tokenizer, save, trace, force, progress"),
        ("compare", "a, b, *, controls, measure, progress"),
        ("first_divergence", "a, b"),
        ("load_trace", "path"),
        ("load_prompts", "path"),
        ("verify", "model, prompts, tier, axes, *, trials, seed, new_tokens, threads, tokenizer, progress"),
        ("investigate", "model, prompts, a, b, *, new_tokens, tokenizer, controls, measure, why, progress"),
    ],
)
def test_parameters_are_pinned(name, parameters):
    found, starred = [], False
    for parameter in inspect.signature(getattr(detlab, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            found.append("*")
            starred = True
        found.append(parameter.name)
    assert ", ".join(found) == parameters


def test_capture_takes_a_model_and_what_to_save():
    parameters = inspect.signature(detlab.capture).parameters
    assert list(parameters)[:2] == ["model", "save"] and parameters["save"].default == "digest" and "path" in parameters


def test_results_keep_their_attributes():
    fields = {
        detlab.Comparison: {"verdict", "first", "origins", "carriers", "token_flips", "rows_compared", "controls", "notes"},
        detlab.Divergence: {"module", "op", "call", "prompt", "position", "max_ulp", "max_abs", "kind", "inputs"},
        detlab.Run: {"condition", "tokens", "texts", "logits", "trace", "inputs", "environment"},
        detlab.Trace: {"calls", "ops", "modules", "tensors", "saved", "notes"},
        detlab.Investigation: {"a", "b", "comparison", "environment", "call"},
    }
    for kind, names in fields.items():
        assert names <= set(kind.__dataclass_fields__)
    for method in ("to_pandas", "to_json", "_repr_html_", "summary", "grid"):
        assert callable(getattr(detlab.Comparison, method))
    assert callable(detlab.Run.save) and callable(detlab.Run.replay) and callable(detlab.Trace.save)


def test_importing_detlab_loads_neither_torch_nor_plotting():
    code = "import sys, detlab; print(sorted(m for m in ('torch', 'transformers', 'plotly', 'pandas') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
