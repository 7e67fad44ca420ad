"""What the machine did while something ran: clocks, temperature, power, load; and when each step began and ended.

Sensors are read in a thread of their own, and a step costs two looks at a clock (on a GPU two events, which wait for nothing):
recording stays off the measured path. What this machine does not have, or does not let be read, is said to be absent.
"""

from __future__ import annotations

import html
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detlab.errors import UsageError

__all__ = ["Sensors", "Telemetry", "telemetry", "timed_calls"]

READ = "read"
Sample = dict[str, float]

_PROC, _SYS = Path("/proc"), Path("/sys")
# NVML's bits for why a GPU's clock is below what was asked for.
THROTTLES = {
    0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip


class Sensors:
    """The sensors of this machine. Rates (``cpu_busy``, ``process_cores``) are over the time since the last look.

    Attributes:
        found: name -> "read", with a remark where there is one, or "absent: why".
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._read: dict[str, Callable[[], float]] = {}
        self._nvml: Any = None
        self._ticks = self._process = (0.0, 0.0)
        self._lock = threading.Lock()
        self._find_cpu()
        self._find_gpus()

    def read(self) -> Sample:
        """Looks at every sensor once; one that fails this time is left out."""
        with self._lock:  # rates are over the time since the last look, whoever looked
            return {name: value for name, look in self._read.items() if (value := _looked(look)) is not None}

    def close(self) -> None:
        """Lets the driver go."""
        if self._nvml is not None:
            _looked(self._nvml.nvmlShutdown)
            self._nvml = None
        for name in [name for name in self._read if name.startswith("gpu")]:
            del self._read[name]

    def _try(self, name: str, look: Callable[[], float], absent: str, remark: str = "") -> bool:
        """Takes a sensor in if it answers."""
        if _looked(look) is None:
            self.found[name] = f"absent: {absent}"
            return False
        self.found[name] = READ + (f": {remark}" if remark else "")
        self._read[name] = look
        return True

    # ------------------------------------------------------------------------------------------------------------- CPU
    def _find_cpu(self) -> None:
        governed = sorted(_SYS.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        if not governed or not self._try("cpu_mhz", lambda: statistics.fmean(map(_number, governed)) / 1000, ""):
            virtual = "hypervisor" in (_looked((_PROC / "cpuinfo").read_text) or "")
            remark = "the nominal clock, all that a virtual machine shows" if virtual else ""
            self._try("cpu_mhz", _cpuinfo_mhz, "the system shows no clock of the CPU", remark)
        self._try("cpu_busy", self._cpu_busy, "the system has no /proc/stat")
        self._try("process_cores", self._process_cores, "")
        self._try("cpu_load", lambda: os.getloadavg()[0], "the system counts no load")
        page = getattr(os, "sysconf", lambda _: 0)("SC_PAGE_SIZE") / 2**20
        self._try("memory_mib", lambda: int((_PROC / "self/statm").read_text().split()[1]) * page, "no /proc/self/statm")
        heat = sorted((*_SYS.glob("class/hwmon/hwmon*/temp*_input"), *_SYS.glob("class/thermal/thermal_zone*/temp")))
        why = "the system shows no thermometer" + (", as in most virtual machines" if not heat else " that can be read")
        self._try("cpu_temperature_c", lambda: max(map(_number, heat)) / 1000, why)

    def _cpu_busy(self) -> float:
        """Share of all cores that computed, for whomever, or that a virtual machine's host took away."""
        ticks = [float(t) for t in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, total = ticks[3] + ticks[4], sum(ticks)
        before, self._ticks = self._ticks, (idle, total)
        # Between two ticks of the system's clock this fails, and is left out.
        return 1 - (idle - before[0]) / (total - before[1])

    def _process_cores(self) -> float:
        """Cores that this process kept busy."""
        now = time.process_time(), time.perf_counter()
        before, self._process = self._process, now
        if now[1] - before[1] < 1e-3:
            raise ValueError("too soon after the last look")
        return (now[0] - before[0]) / (now[1] - before[1])

    # ------------------------------------------------------------------------------------------------------------- GPU
    def _find_gpus(self) -> None:
        count = _looked(torch.cuda.device_count) or 0  # leaves CUDA uninitialised
        if not count:
            self.found["gpu"] = "absent: torch sees no GPU"
            return
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]  # not a dependency
        except ImportError:
            self.found["gpu"] = "absent: the package nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
        except Exception as error:  # no driver, or none that answers
            self.found["gpu"] = f"absent: NVML does not start ({error})"
            return
        self._nvml = pynvml
        for index in range(count):
            # NVML counts every device, torch the visible ones.
            number = _looked(partial(torch.cuda._get_nvml_device_index, index))
            handle = _looked(partial(pynvml.nvmlDeviceGetHandleByIndex, index if number is None else number))
            for name, look in _GPU.items():
                self._try(f"gpu{index}_{name}", partial(look, pynvml, handle), "NVML does not give it")


_GPU: dict[str, Callable[[Any, Any], float]] = {
    "sm_mhz": lambda nvml, gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
    "memory_mhz": lambda nvml, gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
    "temperature_c": lambda nvml, gpu: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "busy": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "memory_busy": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory / 100,
    "memory_mib": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**20,
    "throttle": lambda nvml, gpu: float(_throttle(nvml, gpu)),
}


def _throttle(nvml: Any, gpu: Any) -> int:
    look = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # older packages know it by its older name
    return int((look or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(gpu))


def _looked(look: Callable[[], Any]) -> Any:
    """What a sensor says; None where it fails, as sensors and drivers do in many ways."""
    try:
        return look()
    except Exception:
        return None


def _number(path: Path) -> float:
    return float(path.read_text())


def _cpuinfo_mhz() -> float:
    return statistics.fmean(map(float, re.findall(r"^cpu MHz\s*: ([\d.]+)", (_PROC / "cpuinfo").read_text(), re.MULTILINE)))


@dataclass
class Telemetry:
    """What was recorded in a block of `telemetry`; complete when the block is left.

    Attributes:
        time: when it began; UTC, ISO 8601.
        interval: seconds between two looks at the sensors.
        sensors: name -> "read" (with a remark where there is one) or "absent: why".
        samples: a record for each look: "at" (seconds since the beginning), and the sensors that answered. Units are in their
            names; "busy" is a share of 1, "process_cores" the cores that this process kept busy, "throttle" NVML's bits.
        steps: (begin, end) of each call of the model, in seconds since the beginning.
        seconds: how long the block took.
        sampling_seconds: CPU time that the sensors' thread took.
        origin: its beginning by ``time.perf_counter``, which one machine's processes share on Linux.
    """

    time: str
    interval: float
    sensors: dict[str, str]
    samples: list[Sample] = field(default_factory=list, repr=False)
    steps: list[tuple[float, float]] = field(default_factory=list, repr=False)
    seconds: float = 0.0
    sampling_seconds: float = 0.0
    origin: float = field(default=0.0, repr=False)

    def summary(self) -> dict[str, dict[str, float]]:
        """Per sensor that was read: min, mean, max and standard deviation over the samples."""
        found = {}
        for name in self.sensors:
            values = [sample[name] for sample in self.samples if name in sample]
            if values:
                found[name] = {"min": min(values), "mean": statistics.fmean(values), "max": max(values),
                               "std": statistics.pstdev(values)}  # fmt: skip
        return found

    def between(self, begin: float, end: float) -> Sample:
        """Means of the sensors over a stretch of the block: of the samples in it, or where there are none of the next one.

        Args:
            begin, end: seconds since the beginning.
        """
        inside = [sample for sample in self.samples if begin <= sample["at"] <= end]
        inside = inside or [sample for sample in self.samples if sample["at"] > end][:1] or self.samples[-1:]
        found = {}
        for name in self.sensors:
            values = [sample[name] for sample in inside if name in sample]
            if values:
                found[name] = statistics.fmean(values)
        return found

    @property
    def throttles(self) -> list[str]:
        """Why a GPU's clock was held back, over all samples, in words."""
        seen = 0
        for sample in self.samples:
            for name, value in sample.items():
                seen |= int(value) if name.endswith("throttle") else 0
        return [word for bit, word in THROTTLES.items() if seen & bit]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "time": self.time, "interval": self.interval, "seconds": self.seconds, "sampling_seconds": self.sampling_seconds,
            "sensors": self.sensors, "summary": self.summary(), "throttles": self.throttles,
            "steps": [list(step) for step in self.steps], "samples": self.samples,
        }  # fmt: skip

    def to_pandas(self) -> Any:
        """One row a sample."""
        import pandas as pd

        return pd.DataFrame(self.samples, columns=["at", *(name for name, how in self.sensors.items() if how.startswith(READ))])

    def _rows(self) -> Iterator[tuple[str, str]]:
        summary = self.summary()
        for name, how in self.sensors.items():
            if name in summary:
                of = summary[name]
                remark = how.removeprefix(READ).removeprefix(": ")
                words = f"{of['mean']:.5g} ({of['min']:.5g} to {of['max']:.5g}, standard deviation {of['std']:.3g})"
                yield name, words + (f": {remark}" if remark else "")
            else:
                yield name, how if not how.startswith(READ) else "no sample"
        if any(name.endswith("throttle") for name in summary):
            yield "held back by", ", ".join(self.throttles) or "nothing"
        if self.steps:
            lengths = [end - begin for begin, end in self.steps]
            yield "steps", f"{len(lengths)}, {1e3 * statistics.median(lengths):.3g} ms (median)"
        yield "recorded", f"{self.seconds:.3g} s, {len(self.samples)} samples, {1e3 * self.sampling_seconds:.3g} ms of CPU time"

    def __str__(self) -> str:
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {words}" for name, words in rows)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(words)}</td></tr>" for name, words in self._rows())
        return f"<table>{rows}</table>"


@contextmanager
def telemetry(model: nn.Module | None = None, *, interval: float = 0.05) -> Iterator[Telemetry]:
    """Records clocks, temperature, power, load and memory while a block runs; with a model, when each of its calls began.

    ```python
    with detlab.telemetry(model) as record:
        model.generate(**inputs)
    print(record)
    ```

    GPUs are read through the package nvidia-ml-py where it is installed. The bits of what runs are what they are without it.

    Args:
        model: calls of this module are the steps. Under a tier, put this block around that of `detlab.deterministic`, or in it.
        interval: seconds between two looks at the sensors, at least 0.001. One look is taken at the beginning, one at the end.

    Yields:
        A `Telemetry`, complete when the block is left.

    Raises:
        UsageError: the interval is not possible, or the model is no module.
    """
    if not 0.001 <= interval < 1e6:
        raise UsageError(f"interval={interval!r} is not possible; give seconds, at least 0.001.")
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"telemetry needs a module, whose calls are the steps; got {type(model).__name__}.")
    sensors = Sensors()
    record = Telemetry(datetime.now(UTC).isoformat(timespec="milliseconds"), interval, sensors.found)
    leaving = threading.Event()

    def look() -> None:
        sample = sensors.read()
        record.samples.append({"at": time.perf_counter() - record.origin} | sample)

    def watch() -> None:
        started = time.thread_time()
        while not leaving.wait(interval):
            look()
        record.sampling_seconds = time.thread_time() - started

    thread = threading.Thread(target=watch, name="detlab-telemetry", daemon=True)
    record.origin = time.perf_counter()
    look()
    with ExitStack() as stack:
        stack.callback(sensors.close)
        thread.start()
        calls: list[tuple[float, float]] = []
        try:
            if model is not None:
                calls = stack.enter_context(timed_calls(model))
            yield record
        finally:
            leaving.set()
            thread.join()
            record.seconds = time.perf_counter() - record.origin
            look()
            stack.close()
            record.steps = [(begin - record.origin, end - record.origin) for begin, end in calls]


@contextmanager
def timed_calls(model: nn.Module, is_under_tier: bool = False) -> Iterator[list[tuple[float, float]]]:
    """When each call of a model began and ended, by ``time.perf_counter``; on a GPU by events. Filled in on leaving the block.

    Under a tier the hooks are those of all modules: a tier takes a model with other hooks of its own for another model, whose
    ops it would have to look at again. A stock model has its own hooks: others might get into what is compiled.

    Args:
        model: whose calls; others are left alone.
        is_under_tier: it will be, though it may not be yet.
    """
    found: list[tuple[float, float]] = []
    open_calls: list[Any] = []
    closed: list[tuple[Any, Any]] = []
    is_cuda = any(parameter.is_cuda for parameter in model.parameters())

    def now() -> Any:
        if not is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin(module: nn.Module, *_: Any) -> None:
        if module is model:
            open_calls.append(now())

    def end(module: nn.Module, *_: Any) -> None:
        if module is model:
            closed.append((open_calls.pop(), now()))

    if not is_under_tier and "_detlab_session" not in vars(model):
        handles = [model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end)]
    else:
        every = nn.modules.module
        handles = [every.register_module_forward_pre_hook(begin), every.register_module_forward_hook(end)]
    if is_cuda:
        torch.cuda.synchronize()
        origin, first = time.perf_counter(), now()
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        if is_cuda:
            torch.cuda.synchronize()
            found += [tuple(origin + first.elapsed_time(event) / 1e3 for event in pair) for pair in closed]
        else:
            found += closed
