"""Tells origins from carriers: whether the inputs that a differing row saw had matched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from detlab.divergence.sides import Join, Sides
from detlab.trace.records import Array, OpRecord, split_keys, without_copy

IDENTICAL, CARRIER, ORIGIN = 1, 2, 3
#: What is known of an input, in the words of `OpComparison.inputs`.
ANSWERS = ("unknown", "matched", "differs")
_UNKNOWN, _MATCHED, _DIFFERS = range(3)


class InputAnswers(NamedTuple):
    """What is known of the inputs of some ops that take the same kinds of inputs."""

    ops: Array  # [ops], sorted
    names: tuple[str, ...]
    answers: Array  # [ops, names], numbers of `ANSWERS`


class InputJudge:
    """Judges ops that have the same output rows together, as far as they take the same kinds of inputs."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._places: dict[tuple[int, int], tuple[Array, Array, Array | None]] = {}

    def judge(
        self, ops: Sequence[tuple[OpRecord, OpRecord]], keys: Array, equal: Array
    ) -> tuple[Array, list[InputAnswers]]:
        """Gives every row of some ops its state.

        Args:
            ops: each op in both traces; all have the same output rows.
            keys: sorted keys of the output rows.
            equal: bool [ops, rows].

        Returns:
            (state, inputs): uint8 [ops, rows], `IDENTICAL`, `CARRIER` or `ORIGIN`; and for the ops that differ, numbered as in
            ``ops``, what their inputs looked like in the row that matters most: the first origin where there is one.
        """
        state = np.where(equal, IDENTICAL, CARRIER).astype(np.uint8)
        inputs: list[InputAnswers] = []
        alike: dict[tuple[tuple[str, ...], ...], list[int]] = defaultdict(list)
        for i in np.flatnonzero(~equal.all(1)).tolist():
            of_a, of_b = ops[i][0].inputs, ops[i][1].inputs
            alike[tuple([n for n, _, _ in of_a]), tuple([r for _, _, r in of_a]), tuple([n for n, _, _ in of_b])].append(i)
        for (names_a, relations, names_b), members in alike.items():
            bad = ~equal[members]
            matched = np.ones(bad.shape, bool)
            place_b = {name: k for k, name in enumerate(names_b)}
            tensors_a = np.array([[t for _, t, _ in ops[i][0].inputs] for i in members], np.int64)
            tensors_b = np.array([[t for _, t, _ in ops[i][1].inputs] for i in members], np.int64)
            answers: dict[str, Array | None] = {}
            for k, (name, relation) in enumerate(zip(names_a, relations, strict=True)):
                if name not in place_b or relation == "place":
                    answers[name] = None
                    continue
                answers[name] = found = self._input(tensors_a[:, k], tensors_b[:, place_b[name]], relation, keys)
                matched &= found == _MATCHED
            for name in names_b:
                answers.setdefault(name, None)
            origin = bad & matched
            state[members] += origin  # CARRIER + 1 is ORIGIN
            row = np.where(origin.any(1), origin.argmax(1), bad.argmax(1))
            each = np.arange(len(members))
            told = np.full((len(members), len(answers)), _UNKNOWN, np.uint8)
            for k, found_answers in enumerate(answers.values()):
                if found_answers is not None:
                    told[:, k] = found_answers[each, row]
            inputs.append(InputAnswers(np.array(members), tuple(answers), told))
        return state, inputs

    def _input(self, a: Array, b: Array, relation: str, keys: Array) -> Array:
        """Answers for one input of several ops, uint8 [ops, rows]."""
        sides = self._sides
        answer = np.full((len(a), len(keys)), _UNKNOWN, np.uint8)
        codes = sides.codes(a, b)
        for code in np.unique(codes).tolist():
            which = np.flatnonzero(codes == code)
            if code < 0:
                known = [sides.whole_equal(*numbers) for numbers in zip(a[which].tolist(), b[which].tolist(), strict=True)]
                told = [_UNKNOWN if equal is None else _MATCHED if equal else _DIFFERS for equal in known]
                answer[which] = np.array(told, np.uint8)[:, None]
                continue
            join = sides.join(code)
            if not len(join.keys):
                continue
            equal = sides.equal(join, a[which], b[which])
            seen = self._same_rows(join, equal, keys) if relation == "row" else _rows_before(join.keys, equal, keys)
            answer[which] = np.where(seen, _MATCHED, _DIFFERS)
        return answer

    def _same_rows(self, join: Join, equal: Array, keys: Array) -> Array:
        """Whether each output row's own input row matched."""
        at = (id(join.keys), id(keys))
        if at not in self._places:  # with the arrays, which must live as long as their ids are known
            self._places[at] = (join.keys, keys, _places(join.keys, keys))
        places = self._places[at][2]
        if places is not None:
            return equal[:, places]
        return np.array([_same_row(join.keys, one, keys) for one in equal])


def _places(in_keys: Array, keys: Array) -> Array | None:
    """Where each output row's input row stands; None where rows do not correspond one to one, as `_same_row` tells."""
    if not np.array_equal(without_copy(in_keys), in_keys):
        return None
    keys = without_copy(keys)  # a token is sent to several places: each copy saw the token's row
    at = np.searchsorted(in_keys, keys)
    if not len(in_keys) or not (in_keys[np.minimum(at, len(in_keys) - 1)] == keys).all():
        return None
    return at


def _same_row(in_keys: Array, equal: Array, keys: Array) -> Array:
    """Whether each output row's own input row matched; a row that the input does not have counts as matched."""
    tokens_in = without_copy(in_keys)
    if not np.array_equal(tokens_in, in_keys):
        # Copies are numbered in the order in which a tensor holds them, which sorting by expert changes: all must match.
        in_keys, first = np.unique(tokens_in, return_inverse=True)
        gathered = np.ones(len(in_keys), bool)
        np.logical_and.at(gathered, first, equal)
        equal = gathered
    keys = without_copy(keys)
    at = np.searchsorted(in_keys, keys)
    inside = (at < len(in_keys)) & (in_keys[np.minimum(at, len(in_keys) - 1)] == keys)
    answer = np.ones(len(keys), bool)
    answer[inside] = equal[at[inside]]
    if not inside.all():  # a row of the whole prompt sees all its tokens' rows, and each of those sees it
        prompt, position = split_keys(keys)
        in_prompt, in_position = split_keys(in_keys)
        broken, broken_whole = in_prompt[~equal], in_prompt[~equal & (in_position == -2)]
        answer[~inside & (position == -2)] = ~np.isin(prompt[~inside & (position == -2)], broken)
        answer[~inside & (position >= 0)] = ~np.isin(prompt[~inside & (position >= 0)], broken_whole)
    return answer


def _rows_before(in_keys: Array, equal: Array, keys: Array) -> Array:
    """Whether for each output row all input rows of its prompt up to its own position matched, bool [ops, rows]."""
    prompt, position = split_keys(keys)
    in_prompt, in_position = split_keys(in_keys)
    never = np.iinfo(np.int64).max
    starts = np.flatnonzero(np.r_[True, in_prompt[1:] != in_prompt[:-1]])
    first_broken = np.minimum.reduceat(np.where(equal, never, in_position), starts, axis=1)  # [ops, prompts]
    at = np.searchsorted(in_prompt[starts], prompt)
    is_there = (at < len(starts)) & (in_prompt[starts][np.minimum(at, len(starts) - 1)] == prompt)
    broken = np.where(is_there, first_broken[:, np.minimum(at, len(starts) - 1)], never)
    seen: Array = (broken == never) | ((position >= 0) & (position < broken))
    return seen
