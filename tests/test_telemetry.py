"""Telemetry: what is read, what is said to be absent, and that recording moves no bit."""

import importlib
import json
import sys
import time
import types

import pytest
import torch

import detlab
from detlab.errors import UsageError
from tests.bit_classes import bitwise_equal

module = importlib.import_module("detlab.telemetry")
TOKENS = torch.tensor([[(7 * i) % 250 + 3 for i in range(24)]])


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama", attention="sdpa")[0]


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_steps_and_samples_are_on_one_clock(model):
    with detlab.telemetry(model, interval=0.005) as record, torch.no_grad():
        for _ in range(3):
            model(TOKENS)
        spin(0.05)
        model.model(TOKENS)  # a part of the model is not the model
    assert len(record.steps) == 3 and all(0 <= begin < end <= record.seconds for begin, end in record.steps)
    assert [begin for begin, _ in record.steps] == sorted(begin for begin, _ in record.steps)
    at = [sample["at"] for sample in record.samples]
    assert at == sorted(at) and len(at) >= 2 and at[0] < record.steps[0][0] and at[-1] >= record.seconds
    assert record.sampling_seconds < record.seconds
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_recording_moves_no_bit(model):
    prompts = [TOKENS[0].tolist()]
    plain = detlab.run(model, prompts, detlab.Condition(batch_size=2), new_tokens=3, trace=False).logits[0]
    with detlab.telemetry(model, interval=0.001) as record:
        recorded = detlab.run(model, prompts, detlab.Condition(batch_size=2), new_tokens=3, trace=False).logits[0]
    assert bitwise_equal(plain, recorded) and len(record.steps) == 3
    with detlab.deterministic(model), torch.no_grad():
        tier = model(TOKENS).logits
        with detlab.telemetry(model) as record:
            assert bitwise_equal(model(TOKENS).logits, tier)
        assert len(record.steps) == 1


def test_every_sensor_is_read_or_absent_with_a_reason():
    with detlab.telemetry(interval=0.01) as record:
        spin(0.1)
    summary = record.summary()
    for name, how in record.sensors.items():
        assert how.startswith(("read", "absent: ")) and how != "absent: ", name
        assert how.startswith("read") or name not in summary
    if sys.platform == "linux":
        assert summary["process_cores"]["max"] > 0 and summary["memory_mib"]["min"] > 1
        assert all(-1e-9 <= summary["cpu_busy"][name] <= 1 for name in ("min", "mean", "max"))
    if not torch.cuda.is_available():
        assert record.sensors["gpu"] == "absent: torch sees no GPU"
    assert "absent: " in str(record) and "gpu" in record._repr_html_()
    data = json.loads(json.dumps(record.to_json()))
    assert data["steps"] == [] and len(data["samples"]) == len(record.to_pandas()) == len(record.samples)


def test_a_machine_without_sensors_says_so_of_each(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_PROC", tmp_path)
    monkeypatch.setattr(module, "_SYS", tmp_path)
    with detlab.telemetry() as record:
        pass
    for name in ("cpu_mhz", "cpu_busy", "memory_mib", "cpu_temperature_c"):
        assert record.sensors[name].startswith("absent: ") and name not in record.summary()
    assert set(record.to_pandas()) == {"at", "process_cores", "cpu_load"}


def test_clocks_and_thermometers_are_read_where_there_are_some(monkeypatch, tmp_path):
    for path, value in {
        "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 3_000_000,
        "devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": 2_000_000,
        "class/hwmon/hwmon0/temp1_input": 41_000, "class/thermal/thermal_zone0/temp": 47_500,
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"{value}\n")
    monkeypatch.setattr(module, "_SYS", tmp_path)
    with detlab.telemetry() as record:
        pass
    assert record.sensors["cpu_mhz"] == "read" and record.summary()["cpu_mhz"]["mean"] == 2500
    assert record.summary()["cpu_temperature_c"]["max"] == 47.5


class _Nvml(types.ModuleType):
    """One GPU of two, whose thermometer fails."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        super().__init__("pynvml")
        self.is_open = False

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        assert self.is_open
        return {1: 1755, 2: 2619}[kind]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 312_500

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return types.SimpleNamespace(gpu=75, memory=40)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return types.SimpleNamespace(used=3 << 30)

    def nvmlDeviceGetTemperature(self, gpu, kind):
        raise RuntimeError("no such sensor")

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return 0x4 | 0x20


def test_a_gpu_is_read_through_nvml(monkeypatch):
    nvml = _Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda index: 1)
    with detlab.telemetry() as record:
        pass
    means = {name: of["mean"] for name, of in record.summary().items() if name.startswith("gpu")}
    assert means == {"gpu0_sm_mhz": 1755, "gpu0_memory_mhz": 2619, "gpu0_power_w": 312.5, "gpu0_busy": 0.75,
                     "gpu0_memory_busy": 0.4, "gpu0_memory_mib": 3072, "gpu0_throttle": 0x24}  # fmt: skip
    assert record.sensors["gpu0_temperature_c"] == "absent: NVML does not give it"
    assert record.throttles == ["power cap", "thermal (software)"] and "held back by" in str(record)
    assert not nvml.is_open


def test_a_gpu_without_its_package_or_driver_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    with detlab.telemetry() as record:
        pass
    assert record.sensors["gpu"] == "absent: the package nvidia-ml-py is not installed"
    nvml = _Nvml()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with detlab.telemetry() as record:
        pass
    assert record.sensors["gpu"] == "absent: NVML does not start (division by zero)"


def test_the_record_is_complete_whatever_happens(model):
    with pytest.raises(ZeroDivisionError):
        with detlab.telemetry(model) as record, torch.no_grad():
            model(TOKENS)
            raise ZeroDivisionError
    assert len(record.steps) == 1 and record.seconds > 0 and not model._forward_hooks
    with pytest.raises(UsageError, match="^interval=0 is not possible; give seconds, at least 0.001.$"):
        with detlab.telemetry(interval=0):
            pass
    with pytest.raises(UsageError, match="^telemetry needs a module, whose calls are the steps; got str.$"):
        with detlab.telemetry("tiny-llama"):
            pass


def test_means_of_a_stretch():
    samples = [{"at": 0.0, "a": 1.0}, {"at": 1.0, "a": 3.0}, {"at": 2.0, "a": 5.0}]
    record = module.Telemetry("", 1, {"a": "read", "b": "absent: no"}, samples)
    assert record.between(0.5, 2.5) == {"a": 4.0}
    assert record.between(0.2, 0.3) == {"a": 3.0}  # the next one
    assert record.between(7, 8) == {"a": 5.0}
