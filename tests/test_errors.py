"""The exception tree: what is caught by what, and that its picture is true."""

import re

import pytest

import detlab
from detlab import errors


def test_picture_in_the_docstring_is_the_tree():
    lines = re.findall(r"^([ |+-]*)(\w+(?:Error|Corrupt|Schema|Mismatch))\b", errors.__doc__, re.MULTILINE)
    drawn = {}
    ancestors = []
    for indent, name in lines:
        depth = len(indent) // 4
        ancestors[depth:] = [name]
        drawn[name] = ancestors[depth - 1] if depth else "Exception"
    actual = {name: getattr(errors, name).__bases__[0].__name__ for name in errors.__all__}
    assert drawn == actual


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_is_a_detlab_error_with_one_line_of_explanation(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.DetlabError)
    assert error.__doc__ and "\n" not in error.__doc__.strip()
    with pytest.raises(errors.DetlabError, match="what was found"):
        raise error("what was found")


def test_bad_arguments_are_value_errors_and_nothing_else_is():
    value_errors = {name for name in errors.__all__ if issubclass(getattr(errors, name), ValueError)}
    assert value_errors == {"UsageError", "ConditionError", "CoverageError", "PromptError"}


@pytest.mark.parametrize("nothing", ["tiny-llama", (None, None), None], ids=["name", "pair", "none"])
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda model: detlab.run(model, ["text"]), "a model is needed"),
        (lambda model: detlab.investigate(model, ["text"]), "a model is needed"),
        (lambda model: detlab.try_remedies(model, ["text"]), "a model is needed"),
        (lambda model: detlab.score(model, ["text"], {"yes": 1, "no": 0}, ["default"]), "a model is needed"),
        (lambda model: detlab.two_stages(model, ["text"]), "a model is needed"),
        (lambda model: detlab.bench(model), "a model is needed"),
        (lambda model: detlab.coverage(model), "a tier needs a transformers model"),
        (lambda model: detlab.deterministic(model).__enter__(), "a tier needs a transformers model"),
    ],
    ids=["run", "investigate", "try_remedies", "score", "two_stages", "bench", "coverage", "deterministic"],
)
def test_what_is_no_model_is_named(call, why, nothing):
    with pytest.raises(detlab.errors.UsageError, match=f"{why}.*; got {type(nothing).__name__}"):
        call(nothing)
