"""Prompts: what is read, what is refused, and that each refusal says where, what and what instead."""

import json
import re
from pathlib import Path

import pytest
import torch

from detlab.errors import PromptError
from detlab.models import tiny_tokenizer
from detlab.prompts import Prompt, as_prompts, encode, load_prompts

DATA = Path(__file__).parent.parent / "data" / "prompts"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def written(folder, content, name="some.jsonl"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- files ---


def test_reads_every_form_in_order(tmp_path):
    lines = [
        '{"id": "a", "text": "one"}',
        "",
        '{"prompt": "two"}',
        json.dumps({"id": "c", "messages": CHAT}),
        '{"tokens": [5, 6]}',
    ]
    assert load_prompts(written(tmp_path, "\n".join(lines))) == [
        Prompt("a", text="one"),
        Prompt("some:3", text="two"),
        Prompt("c", messages=tuple(CHAT)),
        Prompt("some:5", tokens=(5, 6)),
    ]


def test_text_file_holds_a_prompt_a_line(tmp_path):
    path = written(tmp_path, "one\r\n\r\n  two  \r\n", "plain.txt")
    assert load_prompts(str(path)) == [Prompt("plain:1", text="one"), Prompt("plain:3", text="two")]


def test_byte_order_mark_and_unicode_line_ends_are_no_trouble(tmp_path):
    path = written(tmp_path, '\ufeff{"text": "a\u2028b"}\n{"text": "c"}')
    assert [prompt.text for prompt in load_prompts(path)] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"not JSON \(Expecting ',' delimiter at column 13\); expected"),
        ('"x"', r"expected an object such as .*; got str 'x'"),
        ("[1, 2]", r"expected an object such as .*; got list \[1, 2\]"),
        ("[" * 100_000, "JSON nested too deeply"),
        ("{}", "expected exactly one of text, prompt, messages, tokens; got none of them"),
        ('{"text": "x", "tokens": [1]}', "expected exactly one of .*; got text and tokens"),
        ('{"text": "x", "txt": 1}', "unknown key 'txt'; expected id and one of text, prompt"),
        ('{"text": "x", "text": "y"}', "key 'text' occurs twice"),
        ('{"text": 5}', "text must be a string; got int 5"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"text": " \\n"}', "text is blank; whitespace alone can be given as tokens"),
        ('{"text": "a\\u0000b"}', "text holds a NUL character at offset 1"),
        ('{"text": "a\\ud800"}', "text holds a lone surrogate at offset 1"),
        ('{"id": 7, "text": "x"}', "id must be a string; got int 7"),
        ('{"id": " ", "text": "x"}', "id is empty; leave it out"),
        ('{"messages": "x"}', "messages must be a list; got str 'x'"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": ["x"]}', r'message 0 must be \{"role": "...", "content": "..."\}; got str'),
        ('{"messages": [{"role": "user"}]}', "message 0 must be .*; got the keys 'role'"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "content of message 0 must be a string"),
        ('{"messages": [{"role": "user", "content": ""}]}', "content of message 0 is empty"),
        ('{"tokens": []}', "tokens is empty"),
        ('{"tokens": "1 2"}', "tokens must be a list of integers; got str '1 2'"),
        ('{"tokens": [1, -2]}', "token 1 must be an integer of 0 or more; got int -2"),
        ('{"tokens": [1, 2.0]}', "token 1 must be an integer of 0 or more; got float 2.0"),
        ('{"tokens": [true]}', "token 0 must be an integer of 0 or more; got bool True"),
        ('{"text": "y", "id": "first"}', r"id 'first' is already used on line 1; ids must be distinct"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = written(tmp_path, '{"id": "first", "text": "x"}\n\n' + line)
    with pytest.raises(PromptError, match=re.escape(f"{path}, line 3: ") + message):
        load_prompts(path)


def test_long_values_are_shortened(tmp_path):
    with pytest.raises(PromptError) as caught:
        load_prompts(written(tmp_path, json.dumps({"tokens": "x" * 10_000})))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["some.jsonl", "some.txt"])
def test_bad_utf8_is_named(tmp_path, name):
    path = written(tmp_path, b'{"text": "x"}\n{"text": "\xff"}', name)
    with pytest.raises(PromptError, match=r"line 2: not UTF-8 \(byte 0xff at offset 10\); save the"):
        load_prompts(path)


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_empty_file(tmp_path, content):
    with pytest.raises(PromptError, match=rf"holds no prompt \({len(content)} bytes\); expected one a line"):
        load_prompts(written(tmp_path, content))


def test_nul_in_a_text_file(tmp_path):
    with pytest.raises(PromptError, match="line 1: text holds a NUL character at offset 1"):
        load_prompts(written(tmp_path, "a\0b", "some.txt"))


def test_missing_file_lists_its_neighbours(tmp_path):
    written(tmp_path, "", "near.jsonl")
    written(tmp_path, "", "other.md")
    with pytest.raises(PromptError, match=r"wrong\.jsonl does not exist\. Prompt files in .*: near\.jsonl\."):
        load_prompts(tmp_path / "wrong.jsonl")


def test_missing_folder(tmp_path):
    with pytest.raises(PromptError, match="does not exist, and its folder .* cannot be listed"):
        load_prompts(tmp_path / "nowhere" / "wrong.jsonl")


def test_folder_and_foreign_file(tmp_path):
    with pytest.raises(PromptError, match=r"is a folder; load_prompts reads one file\. Prompt .*: none\."):
        load_prompts(tmp_path)
    with pytest.raises(PromptError, match=r"reads \.jsonl and \.txt files; got 'prompts\.csv'"):
        load_prompts("prompts.csv")


def test_unreadable_file(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path, "x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PromptError, match="some.jsonl cannot be read: Permission denied"):
        load_prompts(path)


# --- Prompt ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": ""}, "id must be a non-empty string"),
        ({"id": "a"}, "prompt 'a': give exactly one of text, messages, tokens; got none of them"),
        ({"id": "a", "text": "x", "tokens": (1,)}, "give exactly one of .*; got text and tokens"),
        ({"id": "a", "text": ""}, "prompt 'a': text is empty"),
        ({"id": "a", "tokens": ()}, "prompt 'a': tokens is empty"),
        ({"id": "a", "messages": ({"role": "user"},)}, "prompt 'a': message 0 must be"),
    ],
)
def test_prompt_refuses_what_is_none(fields, message):
    with pytest.raises(PromptError, match=message):
        Prompt(**fields)


def test_prompt_does_not_follow_the_callers_lists():
    tokens, messages = [1, 2], [{"role": "user", "content": "hi"}]
    by_tokens, by_messages = Prompt("a", tokens=tokens), Prompt("b", messages=messages)
    tokens.append(3)
    messages[0]["content"] = "changed"
    assert by_tokens.tokens == (1, 2)
    assert by_messages.messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    "prompt", [Prompt("a", text="x"), Prompt("b", messages=CHAT), Prompt("c", tokens=(1, 2))]
)
def test_prompt_survives_json_and_can_be_hashed(prompt):
    copy = Prompt.from_json(json.loads(json.dumps(prompt.to_json())))
    assert copy == prompt and hash(copy) == hash(prompt)


# --- as_prompts ---


def test_takes_every_kind_of_item():
    mixed = ["hello", [1, 2], torch.tensor([3, 4]), Prompt("mine", text="x"), CHAT, (5,)]
    assert as_prompts(mixed) == [
        Prompt("prompt-0", text="hello"),
        Prompt("prompt-1", tokens=(1, 2)),
        Prompt("prompt-2", tokens=(3, 4)),
        Prompt("mine", text="x"),
        Prompt("prompt-4", messages=tuple(CHAT)),
        Prompt("prompt-5", tokens=(5,)),
    ]


@pytest.mark.parametrize("single", ["hello", [1, 2], torch.tensor([1, 2]), CHAT])
def test_takes_a_single_one(single):
    assert as_prompts(single) == as_prompts([single])


def test_prompts_come_back_as_they_are():
    prompts = load_prompts(DATA / "assistant.jsonl")
    assert as_prompts(prompts) == prompts
    assert as_prompts(iter(prompts)) == prompts


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "at least one prompt is needed; got an empty list"),
        ("", "prompt 0: text is empty"),
        (["x", ""], "prompt 1: text is empty"),
        ([[]], "prompt 0: tokens is empty"),
        (torch.tensor([], dtype=torch.int64), "prompt 0: tokens is empty"),
        ([[1, "x"]], "prompt 0: token 1 must be an integer of 0 or more; got str 'x'"),
        ([None], "prompt 0: expected str, Prompt, token ids or messages; got NoneType"),
        (None, "must be a list of str, Prompt or token ids; got NoneType"),
        (b"x", "must be a list of str, Prompt or token ids; got bytes"),
        (7, "got int"),
        (Path("a.jsonl"), r"got the path 'a\.jsonl': use load_prompts"),
        ({"input_ids": [1]}, "got one dict with the keys 'input_ids'. Pass a list"),
        (torch.ones(2, 3, dtype=torch.int64), r"a tensor of shape \(2, 3\), whose rows may hold padding"),
        ([torch.ones(2)], r"must be a 1-D integer tensor; got shape \(2,\), dtype torch.float32"),
        ([torch.ones(1, 2, dtype=torch.int64)], r"must be a 1-D integer tensor; got shape \(1, 2\)"),
        ([Prompt("a", text="x"), Prompt("a", text="y")], "prompts 0 and 1 have the same id 'a'"),
    ],
)
def test_refuses_what_is_no_prompt(value, message):
    with pytest.raises(PromptError, match=message):
        as_prompts(value)


# --- encode ---


def test_plain_text_stays_plain_where_there_is_a_chat_template(tokenizer):
    assert tokenizer.chat_template
    assert encode(["Hi!"], tokenizer) == [[72, 105, 33]]


def test_chat_goes_through_the_template_with_the_generation_prompt(tokenizer):
    (ids,) = encode([Prompt("a", messages=CHAT)], tokenizer)
    assert tokenizer.decode(ids) == "<bos>user: hi<eos>assistant: "


def test_tokens_pass_untouched_without_a_tokenizer():
    assert encode([[3, 1, 2], torch.tensor([7])], None) == [[3, 1, 2], [7]]


def test_encode_refuses(tokenizer):
    with pytest.raises(PromptError, match="prompt 'prompt-0' is text, which needs a tokenizer; got None"):
        encode(["hi"], None)
    with pytest.raises(PromptError, match="prompt 'a' is a chat, which needs a tokenizer"):
        encode([Prompt("a", messages=CHAT)], None)
    with pytest.raises(PromptError, match="holds token id 1024; the model knows 0 to 1023. Was it"):
        encode([[1, 1024]], None, vocab_size=1024)
    assert encode([[1, 1023]], None, vocab_size=1024) == [[1, 1023]]


def test_encode_refuses_an_empty_encoding():
    with pytest.raises(PromptError, match="prompt 'prompt-0' encodes to no token"):
        encode(["hi"], lambda text: {"input_ids": []})


def test_encode_refuses_a_chat_without_template_and_a_template_that_fails():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="prompt 'a': .*chat template refused it: roles must alternate"):
        encode([Prompt("a", messages=CHAT)], tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="prompt 'a' is a chat, and the tokenizer has no chat template"):
        encode([Prompt("a", messages=CHAT)], tokenizer)


# --- our own prompts ---


def readme_table():
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+)–(\d+) \|", (DATA / "README.md").read_text(), re.M)
    return {name: tuple(map(int, numbers)) for name, *numbers in rows}


def test_readme_lists_the_files_and_counts():
    counts = {path.name: len(load_prompts(path)) for path in DATA.glob("*.jsonl")}
    assert counts == {name: count for name, (count, _, _) in readme_table().items()}


def test_every_prompt_names_itself_and_no_name_is_used_twice():
    prompts = [prompt for path in DATA.glob("*.jsonl") for prompt in load_prompts(path)]
    assert not [prompt.id for prompt in prompts if ":" in prompt.id]
    assert len({prompt.id for prompt in prompts}) == len(prompts)


@pytest.mark.slow
def test_readme_lists_the_lengths():
    from detlab.models import load_model

    _, tokenizer = load_model("smollm2-135m", progress=False)
    for name, (_, shortest, longest) in readme_table().items():
        lengths = [len(ids) for ids in encode(load_prompts(DATA / name), tokenizer)]
        assert (min(lengths), max(lengths)) == (shortest, longest), name
    lengths = [len(ids) for ids in encode(load_prompts(DATA / "assistant.jsonl")[:6], tokenizer)]
    assert all(later - earlier >= 7 for earlier, later in zip(lengths, lengths[1:], strict=False))
