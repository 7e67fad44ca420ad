"""What no aligned op shows: outputs changed behind the last op, runs of other lengths, output that meets a closed pipe."""

import os

import pytest
import torch

import detlab
from detlab.cli import _print
from detlab.errors import ConditionError, TraceMismatch
from detlab.models import load_model

IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def model():
    return load_model("tiny-llama")[0]


def captured(model, module=None, change=None):
    """A forward pass with a hook that changes what one module returns."""
    handle = model.get_submodule(module).register_forward_hook(change) if change else None
    try:
        with torch.no_grad(), detlab.capture(model) as trace:
            output = model(IDS).logits
    finally:
        if handle is not None:
            handle.remove()
    return trace, output


def one_bit(module, args, output):
    changed = output.clone()
    changed.view(torch.int32)[0, 3, 5] ^= 1
    return changed


CHANGES = {
    "scaled": lambda module, args, output: output * 1.5,
    "squashed": lambda module, args, output: torch.tanh(output),
    "one bit": one_bit,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_behind_the_last_op_is_found(model, change):
    (plain, before), (changed, after) = captured(model), captured(model, "lm_head", CHANGES[change])
    assert not torch.equal(before.view(torch.int32), after.view(torch.int32))
    result = detlab.compare(plain, changed)
    position = 3 if change == "one bit" else 0
    assert (result.verdict, result.first.module, result.first.op) == ("control_flow", "lm_head", "(output)")
    assert result.first.position == position and not result.first.inputs_matched
    twin = detlab.compare(plain, captured(model)[0])
    assert twin.verdict == "identical" and twin.rows_compared == result.rows_compared


def test_a_hook_that_changes_nothing_is_no_difference(model):
    same = captured(model, "lm_head", lambda module, args, output: output.clone())[0]
    assert detlab.compare(captured(model)[0], same).verdict == "identical"


def test_runs_of_other_lengths_say_so(model):
    prompts = [IDS[0].tolist()]
    short, long = (detlab.run(model, prompts, new_tokens=n) for n in (1, 3))
    result = detlab.compare(short, long, controls=False)
    assert "a has 1 steps and b has 3: only what both computed is compared" in result.notes
    assert not any("steps" in note for note in detlab.compare(short, short, controls=False).notes)


def test_runs_of_models_with_other_vocabularies_are_refused(model):
    run = detlab.run(model, [[5, 6, 7]], new_tokens=1)
    other = detlab.run(model, [[5, 6, 7]], new_tokens=1)
    other.logits = [logits[:, :97] for logits in other.logits]
    with pytest.raises(TraceMismatch, match=r"different vocabularies: 1024 against 97 logits"):
        detlab.compare(run, other)


@pytest.mark.parametrize("padding", [2, 4, 5, 16])
def test_a_chunk_that_holds_only_padding(model, padding):
    condition = detlab.Condition(padding_side="left", padding=padding, prefill_chunk=2)
    run = detlab.run(model, [IDS[0].tolist()], condition, new_tokens=2)
    assert run.tokens == detlab.run(model, [IDS[0].tolist()], new_tokens=2).tokens and not run.nans


@pytest.mark.parametrize("settings", [{"seed": 1 << 63}, {"temperature": 1e-300}, {"threads": 9999}])
def test_settings_beyond_what_torch_takes_are_refused(settings):
    with pytest.raises(ConditionError, match="is not possible"):
        detlab.Condition(**settings)


def test_control_characters_do_not_reach_the_terminal(capsys):
    _print("prompt \x1b[31mred\u202e\nnext", False)
    assert capsys.readouterr().out == "prompt \\u001b[31mred\\u202e\nnext\n"


def test_a_reader_that_went_away_is_no_error(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            return spare

    spare = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr("sys.stdout", Closed())
    try:
        _print("text", False)
    finally:
        monkeypatch.undo()
        os.close(spare)
