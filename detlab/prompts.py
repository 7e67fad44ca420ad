"""Prompts: what is asked of a model, read from a file, a list or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from detlab.errors import PromptError

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "as_prompts", "encode", "load_prompts"]

_LINE = '{"id": "...", "text": "..."}, {"messages": [...]} or {"tokens": [...]}'
_CONTENTS = ("text", "prompt", "messages", "tokens")  # "prompt" is accepted as another word for "text"


@dataclass(frozen=True)
class Prompt:
    """One question to a model: plain text, a chat, or token ids; exactly one of the three.

    Attributes:
        id: the name it keeps in every trace and report.
        text: plain text, tokenized as it stands; no chat template is applied.
        messages: a chat, rendered by the tokenizer's chat template; each message is
            {"role": str, "content": str}.
        tokens: token ids, used untouched.

    Raises:
        PromptError: none or several of the three are given, or the one given is empty or of another type.
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks the contents and freezes the sequences."""
        where = f"prompt {self.id!r}"
        if not self.id:
            raise PromptError(f"a prompt's id must be a non-empty string; got {self.id!r}.")
        _check_text(self.id, where, "id")
        given = [name for name in ("text", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise PromptError(f"{where}: give exactly one of text, messages, tokens; got {found}.")
        if self.text is not None:
            _check_text(self.text, where, "text")
        if self.messages is not None:
            object.__setattr__(self, "messages", _checked_messages(self.messages, where))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", _checked_tokens(self.tokens, where))

    def __hash__(self) -> int:
        """Hashes what can be hashed; equal prompts hash equal."""
        return hash((self.id, self.text, self.tokens))

    def to_json(self) -> dict[str, Any]:
        """Returns the prompt as one line of a prompt file would hold it."""
        if self.text is not None:
            return {"id": self.id, "text": self.text}
        if self.messages is not None:
            return {"id": self.id, "messages": [dict(message) for message in self.messages]}
        return {"id": self.id, "tokens": list(self.tokens or ())}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Prompt:
        """Reads back what `to_json` wrote.

        Raises:
            PromptError: the record has another layout.
        """
        return _from_record(record, "prompt record", "prompt-0")


def load_prompts(path: str | PathLike[str]) -> list[Prompt]:
    """Reads the prompts of a file, in the file's order.

    Args:
        path: a `.jsonl` file, one JSON object a line: {"id"?, "text" | "prompt" | "messages" | "tokens"};
            or a `.txt` file, one plain prompt a line. UTF-8; blank lines are skipped; a missing id becomes
            `stem:line`.

    Returns:
        at least one prompt; the ids are distinct.

    Raises:
        PromptError: the file is missing, is no such file, or holds a line that is no prompt; the message
            names the file and the line, what was found and what was expected.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() not in (".jsonl", ".txt") and not file.is_dir():
        raise PromptError(f"load_prompts reads .jsonl and .txt files; got {str(path)!r}.")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PromptError(_unreadable(file, error)) from error

    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    # Only b"\n" ends a line: str.splitlines would also split at U+2028, which JSON strings may hold.
    for number, raw in enumerate(data.split(b"\n"), start=1):
        where = f"{file}, line {number}"
        line = _decode(raw, where)
        line = line.removeprefix("\ufeff") if number == 1 else line
        if not line.strip():
            continue
        default_id = f"{file.stem}:{number}"
        if file.suffix.lower() == ".txt":
            _check_text(line, where, "text")
            prompt = Prompt(default_id, text=line.strip())
        else:
            prompt = _from_record(_parse(line, where), where, default_id)
        if prompt.id in lines:
            raise PromptError(
                f"{where}: id {prompt.id!r} is already used on line {lines[prompt.id]}; ids must be distinct."
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"{file} holds no prompt ({len(data)} bytes); expected one a line: {_LINE}.")
    return prompts


def as_prompts(value: object) -> list[Prompt]:
    """Turns what a caller may hand over into prompts.

    Args:
        value: a list whose items are `Prompt`, str, token ids (a list of int or a 1-D integer tensor) or a
            chat (a list of messages); or a single one of these. An item without an id becomes `prompt-0`,
            `prompt-1`, ...

    Returns:
        at least one prompt; the ids are distinct.

    Raises:
        PromptError: nothing, an empty item, or something that is no prompt.
    """
    if isinstance(value, Path):
        raise PromptError(
            f"prompts must be str, Prompt or token ids; got the path {str(value)!r}: use load_prompts."
        )
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, value))
        raise PromptError(
            f"prompts must be a list; got one {type(value).__name__} with the keys {keys}. "
            "Pass a list of str, Prompt or token ids, without padding."
        )
    if isinstance(value, torch.Tensor) and value.ndim != 1:
        raise PromptError(
            f"prompts were given as a tensor of shape {tuple(value.shape)}, whose rows may hold padding; "
            "pass a list of 1-D tensors, one a prompt."
        )
    if isinstance(value, (str, Prompt, torch.Tensor)) or _is_one_prompt(value):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, bytearray)):
        raise PromptError(f"prompts must be a list of str, Prompt or token ids; got {type(value).__name__}.")
    prompts = [_as_prompt(item, index) for index, item in enumerate(value)]
    if not prompts:
        raise PromptError("at least one prompt is needed; got an empty list.")
    seen: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        if prompt.id in seen:
            raise PromptError(
                f"prompts {seen[prompt.id]} and {index} have the same id {prompt.id!r}; ids must be distinct."
            )
        seen[prompt.id] = index
    return prompts


def encode(
    prompts: object, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int | None = None
) -> list[list[int]]:
    """Turns prompts into token ids, one list a prompt, without padding.

    A chat goes through the tokenizer's chat template with the generation prompt added. Plain text is
    tokenized as it stands, also where the tokenizer has a chat template. Token ids pass through untouched.

    Args:
        prompts: what `as_prompts` accepts.
        tokenizer: may be None where every prompt is token ids.
        vocab_size: number of embedding rows of the model that will read them; ids beyond it are refused here,
            since the model itself would fail with an index error that names no prompt.

    Raises:
        PromptError: text without a tokenizer, a chat without a chat template, an encoding that is empty or
            holds an id the model does not have.
    """
    encoded: list[list[int]] = []
    for prompt in as_prompts(prompts):
        ids = _encode_one(prompt, tokenizer)
        if not ids:
            raise PromptError(f"prompt {prompt.id!r} encodes to no token; a model needs at least one.")
        if vocab_size is not None and max(ids) >= vocab_size:
            raise PromptError(
                f"prompt {prompt.id!r} holds token id {max(ids)}; the model knows 0 to {vocab_size - 1}. "
                "Was it encoded by another model's tokenizer?"
            )
        encoded.append(ids)
    return encoded


def _encode_one(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if prompt.tokens is not None:
        return list(prompt.tokens)
    kind = "text" if prompt.text is not None else "a chat"
    if tokenizer is None:
        raise PromptError(
            f"prompt {prompt.id!r} is {kind}, which needs a tokenizer; got None. Pass one, or token ids."
        )
    if prompt.text is not None:
        return [int(token) for token in tokenizer(prompt.text)["input_ids"]]
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"prompt {prompt.id!r} is a chat, and the tokenizer has no chat template; pass text or token ids."
        )
    messages = [dict(message) for message in prompt.messages or ()]
    try:
        chat: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise PromptError(
            f"prompt {prompt.id!r}: the tokenizer's chat template refused it: {error}"
        ) from error
    return [int(token) for token in chat["input_ids"]]


def _as_prompt(item: object, index: int) -> Prompt:
    where, name = f"prompt {index}", f"prompt-{index}"
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        _check_text(item, where, "text")
        return Prompt(name, text=item)
    if isinstance(item, torch.Tensor):
        if item.ndim != 1 or item.is_floating_point() or item.is_complex() or item.dtype == torch.bool:
            shape = tuple(item.shape)
            raise PromptError(
                f"{where}: token ids must be a 1-D integer tensor; got shape {shape}, dtype {item.dtype}."
            )
        return Prompt(name, tokens=_checked_tokens(item.tolist(), where))
    if isinstance(item, (list, tuple)):
        if item and isinstance(item[0], Mapping):
            return Prompt(name, messages=_checked_messages(item, where))
        return Prompt(name, tokens=_checked_tokens(item, where))
    raise PromptError(f"{where}: expected str, Prompt, token ids or messages; got {type(item).__name__}.")


def _is_one_prompt(value: object) -> bool:
    """Says whether a list is one prompt (token ids, a chat) and not a list of prompts."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(_is_int(item) for item in value) or all(isinstance(item, Mapping) for item in value)


def _from_record(record: object, where: str, default_id: str) -> Prompt:
    if not isinstance(record, Mapping):
        raise PromptError(f"{where}: expected an object such as {_LINE}; got {_shown(record)}.")
    unknown = [key for key in record if key != "id" and key not in _CONTENTS]
    if unknown:
        keys = ", ".join(map(repr, unknown))
        raise PromptError(f"{where}: unknown key {keys}; expected id and one of {', '.join(_CONTENTS)}.")
    given = [key for key in _CONTENTS if key in record]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise PromptError(f"{where}: expected exactly one of {', '.join(_CONTENTS)}; got {found}.")
    name = record.get("id", default_id)
    if not isinstance(name, str):
        raise PromptError(f"{where}: id must be a string; got {_shown(name)}.")
    if not name.strip():
        raise PromptError(f"{where}: id is empty; leave it out to have one made.")
    _check_text(name, where, "id")
    key, content = given[0], record[given[0]]
    if key == "messages":
        return Prompt(name, messages=_checked_messages(content, where))
    if key == "tokens":
        return Prompt(name, tokens=_checked_tokens(content, where))
    _check_text(content, where, key)
    return Prompt(name, text=content)


def _check_text(text: object, where: str, key: str) -> None:
    if not isinstance(text, str):
        raise PromptError(f"{where}: {key} must be a string; got {_shown(text)}.")
    if not text.strip():
        raise PromptError(
            f"{where}: {key} is {'blank' if text else 'empty'}; whitespace alone can be given as tokens."
        )
    if "\0" in text:
        raise PromptError(f"{where}: {key} holds a NUL character at offset {text.index(chr(0))}; remove it.")
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ) as error:  # "\ud800" is valid JSON and no text; tokenizers fail on it without a name
        raise PromptError(
            f"{where}: {key} holds a lone surrogate at offset {error.start}; it is not text."
        ) from None


def _checked_messages(messages: object, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, (list, tuple)):
        raise PromptError(f"{where}: messages must be a list; got {_shown(messages)}.")
    if not messages:
        raise PromptError(f"{where}: messages is empty; expected at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            found = (
                f"the keys {', '.join(map(repr, message))}"
                if isinstance(message, Mapping)
                else _shown(message)
            )
            raise PromptError(
                f'{where}: message {index} must be {{"role": "...", "content": "..."}}; got {found}.'
            )
        _check_text(message["role"], where, f"role of message {index}")
        _check_text(message["content"], where, f"content of message {index}")
    return tuple(dict(message) for message in messages)


def _checked_tokens(tokens: object, where: str) -> tuple[int, ...]:
    if not isinstance(tokens, (list, tuple)):
        raise PromptError(f"{where}: tokens must be a list of integers; got {_shown(tokens)}.")
    if not tokens:
        raise PromptError(f"{where}: tokens is empty; expected at least one token id.")
    for index, token in enumerate(tokens):
        if not _is_int(token) or token < 0:
            raise PromptError(f"{where}: token {index} must be an integer of 0 or more; got {_shown(token)}.")
    return tuple(int(token) for token in tokens)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # True would pass as token 1


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise PromptError(f"{where}: not UTF-8 ({found}); save the file as UTF-8.") from error


def _parse(line: str, where: str) -> object:
    try:
        return json.loads(line, object_pairs_hook=_distinct_keys)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); expected {_LINE}."
        ) from error
    except RecursionError:
        raise PromptError(f"{where}: JSON nested too deeply; expected {_LINE}.") from None
    except KeyError as error:
        raise PromptError(f"{where}: key {error.args[0]!r} occurs twice.") from None


def _distinct_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:  # json.loads keeps the last one and says nothing
            raise KeyError(key)
        record[key] = value
    return record


def _unreadable(file: Path, error: OSError) -> str:
    if file.is_dir():
        folder, problem = file, f"{file} is a folder; load_prompts reads one file"
    elif not file.exists():
        folder, problem = file.parent, f"{file} does not exist"
    else:
        return f"{file} cannot be read: {error.strerror}."
    try:
        found = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".jsonl", ".txt"))
    except OSError:
        return f"{problem}, and its folder {folder} cannot be listed."
    there = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return f"{problem}. Prompt files in {folder}: {there or 'none'}."
