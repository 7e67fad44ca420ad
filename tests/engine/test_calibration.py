"""What is known of the machine is measured again where the file that holds it cannot be believed."""

import json
from dataclasses import dataclass

import pytest
import torch

from detlab.engine.ledger import Ledger
from detlab.engine.probes import draw

MACHINE = {"cpu": "one", "torch": "2"}


@dataclass(frozen=True)
class Rule:
    granule: int
    tails: tuple[int, ...]


class Counter:
    """Measures, and counts how often it was asked."""

    def __init__(self, result=Rule(4, (16, 32))):
        self.result, self.times = result, 0

    def __call__(self):
        self.times += 1
        return self.result


def test_a_measurement_is_made_once_and_kept(tmp_path):
    measure = Counter()
    for _ in range(2):
        known = Ledger(tmp_path, MACHINE)
        assert known.look_up("linear", Rule, measure) == Rule(4, (16, 32))
        assert known.look_up("linear", Rule, measure) == Rule(4, (16, 32))
    assert measure.times == 1


def test_that_nothing_is_stable_is_kept_too(tmp_path):
    measure = Counter(None)
    assert [Ledger(tmp_path, MACHINE).look_up("x", Rule, measure) for _ in range(2)] == [None, None]
    assert measure.times == 1


def damage_cut(text):
    return text[: len(text) // 2]


def damage_rule(text):
    data = json.loads(text)
    data["measured"]["linear"]["granule"] = 1  # believed, it would break invariance without a word
    return json.dumps(data)


def damage_key(text):
    return json.dumps(json.loads(text) | {"key": "0" * 16})


def damage_layout(text):
    return "[]"


@pytest.mark.parametrize("damage", [damage_cut, damage_rule, damage_key, damage_layout])
def test_a_damaged_file_is_not_believed(tmp_path, damage):
    first = Ledger(tmp_path, MACHINE)
    first.look_up("linear", Rule, Counter())
    first.path.write_text(damage(first.path.read_text()))
    measure = Counter()
    assert Ledger(tmp_path, MACHINE).look_up("linear", Rule, measure) == Rule(4, (16, 32))
    assert measure.times == 1
    assert Ledger(tmp_path, MACHINE).look_up("linear", Rule, measure) == Rule(4, (16, 32))  # and the file is whole again
    assert measure.times == 1


def test_another_machine_measures_for_itself(tmp_path):
    Ledger(tmp_path, MACHINE).look_up("linear", Rule, Counter())
    measure = Counter(Rule(8, ()))
    other = Ledger(tmp_path, MACHINE | {"cpu": "two"})
    assert other.look_up("linear", Rule, measure) == Rule(8, ())
    assert measure.times == 1 and len(list(tmp_path.iterdir())) == 2
    copied = Ledger(tmp_path, MACHINE | {"cpu": "three"})
    copied.path.write_text(other.path.read_text())  # a cache folder carried from one machine to another
    again = Ledger(tmp_path, MACHINE | {"cpu": "three"})
    again.look_up("linear", Rule, measure)
    assert measure.times == 2


def test_a_rule_of_another_layout_is_measured_again(tmp_path):
    known = Ledger(tmp_path, MACHINE)
    known.look_up("linear", Rule, Counter())

    @dataclass(frozen=True)
    class Newer:
        granule: int
        pieces: int

    measure = Counter(Newer(4, 2))
    assert Ledger(tmp_path, MACHINE).look_up("linear", Newer, measure) == Newer(4, 2)
    assert measure.times == 1


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path):
    folder = tmp_path / "taken"
    folder.write_text("a file")
    assert Ledger(folder, MACHINE).look_up("linear", Rule, Counter()) == Rule(4, (16, 32))


def test_two_processes_keep_what_the_other_measured(tmp_path):
    a, b = Ledger(tmp_path, MACHINE), Ledger(tmp_path, MACHINE)
    a.look_up("first", Rule, Counter())
    b.look_up("second", Rule, Counter())
    assert set(Ledger(tmp_path, MACHINE).measured) == {"first", "second"}


def test_drawn_numbers_are_the_same_everywhere():
    assert draw(4, dtype=torch.float32, seed=0).tolist() == draw(4, dtype=torch.float32, seed=0).tolist()
    assert draw(1000, dtype=torch.float32).abs().max() < 1
