"""The clock experiment: timing really moves and comes back, statistics are right, and each race is a race with a fix."""

import importlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import detlab
from detlab.clocks import loads
from detlab.clocks.experiment import TimedRun, permutation_p
from detlab.clocks.loads import TIMINGS, Timing
from detlab.errors import MachineError, UsageError
from tests.bit_classes import bitwise_equal

races = importlib.import_module("detlab.clocks.races")
HAS_AFFINITY = hasattr(os, "sched_setaffinity")


def cores():
    return {int(t): os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")} if HAS_AFFINITY else {}


# ------------------------------------------------------------------------------------------------------- the experiment
@pytest.fixture(scope="module")
def null():
    """A model's bits, held against a timing that is moved in every way."""
    model, _ = detlab.load_model("tiny-llama", attention="sdpa")
    prompt = [[(7 * i) % 250 + 3 for i in range(24)]]
    before = cores()
    made = detlab.clock_experiment(
        lambda: detlab.run(model, prompt, detlab.Condition(), new_tokens=2, trace=False).logits, 12, model=model
    )
    assert not model._forward_pre_hooks
    assert {t: c for t, c in cores().items() if t in before} == before
    return made


def test_a_model_has_one_answer_whatever_the_clock(null):
    assert null.divergent == 0 and null.distinct == 1 and null.bound == 3 / 12 and null.p_value == null.p_clock == 1.0
    assert null.verdict in ("bits did not move", "timing did not move")
    assert {of["runs"] for of in null.by_timing().values()} == {12 // len(null.by_timing())}
    assert set(null.by_timing()) <= set(TIMINGS) and len(null.runs) == 12
    assert all(run.seconds > 0 and run.speed > 0 for run in null.runs)


def test_the_result_in_every_form(null):
    data = json.loads(json.dumps(null.to_json()))
    assert data["divergent"] == 0 and len(data["runs"]) == len(null.to_pandas()) == 12 and data["environment"]["schema"] == 1
    assert "0 of 12 runs differ (1 different answer; at most 25 % at 95 %)" in str(null)
    assert {"timing", "seconds", "speed", "differs"} <= set(null.to_pandas())
    assert "<script>" not in replace(null, notes=["<script>"])._repr_html_()


def test_what_hangs_on_time_is_found():
    """Work whose answer is its own duration's: pauses are longer, and so the bits follow the time."""
    naps = {"quiet": 0.0, "pauses": 0.1}
    asked = []

    def work():
        name = asked.pop(0)
        time.sleep(naps[name])
        return torch.tensor([naps[name]])

    order = ["quiet", "pauses"] * 8
    random.Random(3).shuffle(order)  # as the experiment draws it
    asked = ["quiet", *order]
    made = detlab.clock_experiment(work, 16, timings=["quiet", "pauses"], seed=3)
    assert made.divergent == 8 and made.distinct == 2 and made.verdict == "bits moved" and made.bound is None
    assert made.by_timing()["quiet"]["divergent"] == 0 and made.by_timing()["pauses"]["divergent"] == 8
    assert made.p_value < 0.05 and "chance would tie the bits to time so closely with p = " in str(made)


def test_a_null_needs_a_timing_that_moved(null):
    runs = [TimedRun(i, "quiet" if i % 2 else "pauses", "x", 1 + 0.1 * (i % 2), 100.0, {}) for i in range(10)]
    made = replace(null, runs=runs, reference="x")
    assert made.verdict == "timing did not move" and "this shows nothing of timing" in str(made)
    slow = [replace(run, seconds=1 + 0.3 * (run.run % 2)) for run in runs]
    assert replace(made, runs=slow).verdict == "bits did not move" and abs(replace(made, runs=slow).moved - 0.3) < 1e-9


def test_the_permutation_test():
    assert permutation_p([False] * 20, range(20)) == permutation_p([True] * 3, range(3)) == 1.0
    assert permutation_p([False] * 20 + [True] * 20, range(40)) == 1e-4
    assert permutation_p([True, False] * 20, [1.0] * 40) == 1.0  # a clock that stands still explains nothing
    draw = random.Random(0)
    found = [permutation_p([draw.random() < 0.5 for _ in range(20)], [draw.random() for _ in range(20)], s) for s in range(24)]
    assert 0.25 < sum(found) / 24 < 0.75 and sum(p < 0.05 for p in found) <= 4  # where there is nothing, p is uniform


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"timings": ["loud"]}, "timings=\\['loud'\\] is not possible; give a list of some of quiet, load"),
        ({"timings": []}, "timings=\\[\\] is not possible"),
        ({"timings": "load"}, "timings='load' is not possible; give a list"),
        ({"runs": 1, "timings": ["quiet", "pauses"]}, "runs=1 is not possible; give at least 2, one for each timing"),
        ({"work": "text", "timings": ["quiet"]}, "work must be a function that takes nothing"),
        ({"model": "tiny-llama"}, "model must be a module, between whose calls pauses go; got str"),
        ({"work": lambda: 3.0, "timings": ["quiet"]}, "work must return tensors, texts, or a list of these"),
        ({"work": lambda: [], "timings": ["quiet"]}, "work must return tensors"),
    ],
)
def test_what_cannot_be_asked(arguments, why):
    with pytest.raises(UsageError, match=why):
        detlab.clock_experiment(**{"work": lambda: "text"} | arguments)


# ---------------------------------------------------------------------------------------------------------- the timings
def test_loads_run_while_asked_for_and_end():
    with Timing(list(TIMINGS), None, 0) as timing:
        processes = [*timing._all, *timing._one]
        assert processes and all(p.poll() is None for p in processes)
        if sys.platform == "linux":
            at_rest(processes)
            with timing.put_in("load"):
                assert all(state(p) != "T" for p in timing._all)
                at_rest(timing._one)
            at_rest(processes)
    assert all(p.poll() is not None for p in processes)


def test_loads_end_where_their_start_is_interrupted(monkeypatch):
    started = []

    def busy(*cores):
        if started:
            raise KeyboardInterrupt
        started.append(real(*cores))
        return started[0]

    real = loads._busy
    monkeypatch.setattr(loads, "_busy", busy)
    monkeypatch.setattr(loads, "_usable_cores", lambda: 2)
    with pytest.raises(KeyboardInterrupt), Timing(["load"], None, 0):
        pass
    assert started[0].poll() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_loads_end_with_a_process_that_is_killed():
    code = ("import time; from detlab.clocks.loads import Timing; t = Timing(['load', 'one-core'], None, 0).__enter__()\n"
            "print(*[p.pid for p in (*t._all, *t._one)], flush=True); time.sleep(300)")  # fmt: skip
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent, parent.stdout as said:
        loads = [Path(f"/proc/{number}/stat") for number in said.readline().split()]
        parent.kill()
    end = time.monotonic() + 30
    while (alive := [p for p in loads if p.exists() and p.read_text().rpartition(")")[2].split()[0] != "Z"]):
        assert time.monotonic() < end, f"{alive} outlive their parent"
        time.sleep(0.05)
    assert len(loads) >= 1 + HAS_AFFINITY


def at_rest(processes):
    end = time.monotonic() + 30  # a signal takes effect when its process is next looked at
    while any(state(p) != "T" for p in processes) and time.monotonic() < end:
        time.sleep(0.01)
    assert [state(p) for p in processes] == ["T"] * len(processes)


def state(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not HAS_AFFINITY, reason="this system does not let a process choose its cores")
def test_one_core_is_given_back_also_to_threads_started_meanwhile():
    before, own, leave = cores(), os.sched_getaffinity(0), threading.Event()
    with Timing(["one-core"], None, 0) as timing:
        with pytest.raises(ZeroDivisionError):
            with timing.put_in("one-core"):
                assert os.sched_getaffinity(0) == {min(own)}
                thread = threading.Thread(target=leave.wait)
                thread.start()
                raise ZeroDivisionError
        assert {t: c for t, c in cores().items() if t in before} == before
        assert os.sched_getaffinity(thread.native_id) == own
        leave.set()
        thread.join()


def test_what_a_system_lacks_is_left_out_and_said(monkeypatch):
    monkeypatch.delattr("os.sched_setaffinity", raising=False)
    made = detlab.clock_experiment(lambda: "x", 4, timings=["quiet", "one-core"])
    assert set(made.by_timing()) == {"quiet"}
    assert made.notes == ["one-core was left out: this system does not let a process choose its cores."]
    with pytest.raises(UsageError, match="none of timings=\\['one-core'\\] can be had here: one-core was left out"):
        detlab.clock_experiment(lambda: "x", 4, timings=["one-core"])


# ----------------------------------------------------------------------------------------------------------- the races
def test_the_table():
    table = detlab.mechanisms()
    names = ["arrival-order", "timed-kernel", "atomic-index-add", "atomic-scatter-add", "cudnn-benchmark"]
    assert [m.name for m in table] == names
    assert table[0] is table["arrival-order"] and all(m.claim and m.fix and m.reason() == "" for m in table if m.where == "cpu")
    if not torch.cuda.is_available():
        assert {m.reason() for m in table if m.where == "cuda"} == {"needs CUDA: this machine has none"}
    assert "timed-kernel" in str(table) and "<table>" in table._repr_html_()
    with pytest.raises(KeyError, match="no mechanism 'race'; there are arrival-order,"):
        table["race"]


class Arranged:
    """Lets the parts of the sum arrive in an order that is chosen."""

    def __init__(self, order):
        self.order = list(order)
        self.turn = threading.Condition()

    def deliver(self, original):
        def arranged(deliver):
            def one(number, part):
                with self.turn:
                    self.turn.wait_for(lambda: self.order[0] == number)
                    deliver(number, part)
                    self.order.pop(0)
                    self.turn.notify_all()

            original(one)

        return arranged


def test_the_order_of_arrival_is_the_order_of_addition(monkeypatch):
    original = races._deliver
    made = {}
    for name, order in {"up": range(8), "down": range(7, -1, -1), "odd": (1, 3, 5, 7, 0, 2, 4, 6)}.items():
        for what in ("arrival_order", "slot_order"):
            monkeypatch.setattr(races, "_deliver", Arranged(order).deliver(original))
            made[name, what] = getattr(races, what)()
        parts = [torch.nn.functional.linear(x, w) for x, w in races._parts(8)]
        total = torch.zeros(races.ROWS, races.COLUMNS)
        for number in order:
            total.add_(parts[number])
        assert bitwise_equal(made[name, "arrival_order"], total)
    assert not bitwise_equal(made["up", "arrival_order"], made["down", "arrival_order"])
    assert not bitwise_equal(made["up", "arrival_order"], made["odd", "arrival_order"])
    assert all(bitwise_equal(made[name, "slot_order"], made["up", "arrival_order"]) for name in ("up", "down", "odd"))


def test_the_clock_chooses_the_kernel_and_the_kernels_differ(monkeypatch):
    class Clock:
        """Says that one of the kernels was the fastest."""

        def __init__(self, fastest):
            self.ticks = iter([t for count in races.KERNELS for t in (0.0, 0.5 if count == fastest else 1.0)])

        def perf_counter(self):
            return next(self.ticks)

    answers = {}
    for fastest in races.KERNELS:
        monkeypatch.setattr(races, "time", Clock(fastest))
        answers[fastest] = races.timed_kernel()
        assert bitwise_equal(answers[fastest][0], races.split(fastest))
        monkeypatch.setattr(races, "time", Clock(fastest))
        assert bitwise_equal(races.named_kernel(), races._answer(races.KERNELS[0]))
    assert not bitwise_equal(answers[1], answers[8])


def test_the_fixes_hold_under_load():
    for name in ("arrival-order", "timed-kernel"):
        made = detlab.clock_experiment(detlab.mechanisms()[name].fixed, 16)
        assert made.divergent == 0, str(made)


@pytest.mark.parametrize("what", [races.indexed_sum, races.scattered_sum])
def test_the_sums_of_the_gpu_are_sums(what):
    flag = torch.are_deterministic_algorithms_enabled()
    for is_fixed in (False, True):
        made = what("cpu", is_fixed)
        sums, index, numbers = races._scattered("cpu")
        exact = sums.double().index_add_(0, index, numbers.double())
        assert made.shape == (64,) and float((made - exact).abs().max()) < 1e-3 * float(exact.abs().max())
    assert torch.are_deterministic_algorithms_enabled() == flag


def test_a_convolution_that_fails_is_an_error():
    if torch.cuda.is_available():
        assert len(races.convolution("fixed")) == 32
    else:
        with pytest.raises(MachineError, match="the convolution failed in its own process: "):
            races.convolution("benchmark")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["atomic-index-add", "atomic-scatter-add"])
def test_forbidding_atomics_fixes_them(name):
    assert detlab.clock_experiment(detlab.mechanisms()[name].fixed, 20).divergent == 0


@pytest.mark.skipif(not HAS_AFFINITY, reason="this system does not let a process choose its cores")
def test_a_thread_that_ends_while_it_is_listed_is_left_alone(monkeypatch):
    listed = loads._threads
    monkeypatch.setattr(loads, "_threads", lambda: [*listed(), 2**22 + 1])  # beyond what Linux numbers
    before = cores()
    with loads._confined(min(os.sched_getaffinity(0))):
        assert os.sched_getaffinity(0) == {min(before[os.getpid()])}
    assert cores() == before
