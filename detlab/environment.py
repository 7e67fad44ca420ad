"""One record of the machine, the versions and the switches under which a result was made.

Reading it changes nothing. Host names, user names and paths are left out, since records are shared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from detlab.errors import UsageError

__all__ = ["Environment", "cache_dir", "environment"]

SCHEMA = 1
ABSENT = "absent"  # a part or a sensor that this machine lacks, or that may not be read

# Instruction sets by which ATen, MKL and oneDNN choose kernels, as Linux names them (x86, then Arm).
_ISA = (
    "sse4_1 avx f16c fma avx2 avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 "
    "avx512_fp16 amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimdhp asimddp bf16 i8mm sve sve2 sme"
).split()
_VARIABLES = re.compile(
    r"ATEN_CPU_CAPABILITY|(MKL|ONEDNN|DNNL|KMP|GOMP|OMP|NCCL|CUBLAS|NVIDIA_TF32)_\w+|LD_PRELOAD|PYTHONHASHSEED"
    r"|CUDA_LAUNCH_BLOCKING|CUDA_VISIBLE_DEVICES|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|\w*(TORCH|CUDNN)\w*(DETERMINIS|TF32|AUTOTUNE)\w*"
)
_PRIVATE = re.compile(
    r"NCCL_(COMM_ID|HOSTID|SOCKET_IFNAME)|OMP_DISPLAY\w*"
)  # addresses and names of machines
# Recorded, but not part of the fingerprint: they decide no bit.
_NO_BITS = re.compile(r"GOMP_SPINCOUNT|OMP_WAIT_POLICY|PYTHONHASHSEED|\w*(VERBOSE|DEBUG)\w*")


@dataclass(frozen=True)
class Environment:
    """What a result depends on besides the model and the prompts. Made by `environment()`.

    A value that this machine does not have, or does not let be read, is the string "absent".

    Attributes:
        time: UTC, ISO 8601.
        versions: Python, detlab, torch, the packages that tokenize and store, MKL and oneDNN as torch reports
            them, CUDA, cuDNN and NCCL.
        platform: operating system, kernel, machine.
        cpu: model, caches, instruction sets that choose kernels, ATen's choice, cores, memory (GiB), load.
        threads: torch's intra-op and inter-op threads, and MKL's.
        variables: the environment variables that matter and are set; paths in them are shown as `<path>`.
        flags: torch's switches, as they are now.
        clocks: governor, current MHz and boost of the CPU.
        gpus: one record each; empty where torch sees none.
    """

    time: str
    versions: dict[str, str]
    platform: dict[str, str]
    cpu: dict[str, Any]
    threads: dict[str, Any]
    variables: dict[str, str]
    flags: dict[str, Any]
    clocks: dict[str, Any]
    gpus: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON values."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Environment:
        """Reads back what `to_json` wrote.

        Raises:
            UsageError: the record has another layout.
        """
        if record.get("schema") != SCHEMA:
            raise UsageError(
                f"an environment record of schema {SCHEMA} is expected; got schema {record.get('schema')!r}. "
                "Read it with the version of detlab that wrote it."
            )
        fields: dict[str, type] = {field.name: dict for field in dataclasses.fields(cls)}
        fields |= {"time": str, "gpus": list}
        for name, kind in fields.items():
            if not isinstance(record.get(name), kind):
                found = type(record[name]).__name__ if name in record else "nothing"
                raise UsageError(f"an environment record's {name} must be a {kind.__name__}; got {found}.")
        unknown = ", ".join(sorted(set(record) - set(fields) - {"schema"}))
        if unknown:
            raise UsageError(f"an environment record has no {unknown}; expected {', '.join(fields)}.")
        return cls(**{name: record[name] for name in fields})

    def fingerprint(self) -> str:
        """Hashes what can change bits: CPU, libraries, switches, threads, GPUs. 16 hex digits.

        Time, load, clocks, memory and the versions of packages that do not compute are left out, so that two
        processes of one set-up agree.
        """
        what = {
            "machine": self.platform.get("machine"),
            "cpu": [self.cpu.get(key) for key in ("model", "stepping", "caches", "isa", "capability")],
            "versions": [
                self.versions.get(key) for key in ("torch", "mkl", "onednn", "cuda", "cudnn", "nccl")
            ],
            "threads": [self.threads.get(key) for key in ("intra_op", "mkl")],
            "variables": {key: value for key, value in self.variables.items() if not _NO_BITS.fullmatch(key)},
            "flags": {key: value for key, value in self.flags.items() if key != "grad_enabled"},
            "gpus": [[gpu.get(key) for key in ("name", "capability", "driver")] for gpu in self.gpus],
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """Draws a table, one line a fact."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        rows = "".join(
            f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table><tbody>{rows}</tbody></table>"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "fingerprint", self.fingerprint()
        yield "time", self.time
        for group in ("versions", "platform", "cpu", "threads", "variables", "flags", "clocks"):
            for name, value in getattr(self, group).items():
                yield f"{group}.{name}", _shown(value)
        for index, gpu in enumerate(self.gpus):
            for name, value in gpu.items():
                yield f"gpus.{index}.{name}", _shown(value)
        if not self.gpus:
            yield "gpus", "none"


def environment() -> Environment:
    """Records the environment of this process as it is now.

    No setting, thread pool, random state or device is touched.
    """
    gpus = _gpus()
    return Environment(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(has_gpu=bool(gpus)),
        platform=_platform(),
        cpu=_cpu(),
        threads=_threads(),
        variables=_variables(),
        flags={name: _read(switch) for name, switch in _FLAGS.items()},
        clocks=_clocks(),
        gpus=gpus,
    )


def cache_dir() -> Path:
    """Returns the folder of detlab's caches: DETLAB_CACHE, or `detlab` in the user's cache folder.

    The folder is not created.
    """
    chosen = os.environ.get("DETLAB_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "detlab"


def _read(fact: Callable[[], Any]) -> Any:
    """Reads one fact. Sensors, drivers and private switches fail in many ways: what fails is absent."""
    try:
        value = fact()
    except Exception:
        return ABSENT
    return ABSENT if value is None or value == "" else value


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _versions(has_gpu: bool) -> dict[str, str]:
    versions = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    for package in ("detlab", "torch", "transformers", "tokenizers", "safetensors", "numpy"):
        # Metadata, not an import: importing transformers takes a second.
        versions[package] = _read(partial(importlib.metadata.version, package))
    versions["torch"] = str(torch.__version__)  # names the build too, such as +cpu
    shown = torch.__config__.show()
    for name, pattern in (("mkl", r"Math Kernel Library Version (\S+)"), ("onednn", r"MKL-DNN v(\S+)")):
        found = re.search(pattern, shown)
        versions[name] = found[1] if found else ABSENT
    versions["cuda"] = torch.version.cuda or ABSENT
    # Asking cuDNN and NCCL loads them; without a GPU that would be for nothing.
    versions["cudnn"] = str(_read(lambda: torch._C._cudnn.getVersionInt())) if has_gpu else ABSENT
    versions["nccl"] = _read(_nccl) if has_gpu else ABSENT
    return versions


def _nccl() -> str:
    return _dotted(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _platform() -> dict[str, str]:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "distribution": _read(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or ABSENT,
    }


def _cpu() -> dict[str, Any]:
    info = str(_read(lambda: Path("/proc/cpuinfo").read_text()))
    fields = dict(
        re.findall(r"^([\w ]+?)\s*: (.*)$", info, re.MULTILINE)
    )  # all cores alike: the last one stays
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    cores = re.findall(r"^physical id\s*: (\d+)$.*?^core id\s*: (\d+)$", info, re.MULTILINE | re.DOTALL)
    return {
        "model": fields.get("model name") or platform.processor() or ABSENT,
        # Virtual machines often hide the model behind a common name; these three numbers still tell it.
        "stepping": "/".join(fields.get(key, "?") for key in ("cpu family", "model", "stepping")),
        "caches": _caches(),
        "isa": [flag for flag in _ISA if flag in flags],
        "capability": _read(torch.backends.cpu.get_cpu_capability),
        "cores_logical": _read(os.cpu_count),
        "cores_usable": _read(lambda: len(os.sched_getaffinity(0))),
        "cores_physical": len(set(cores)) or ABSENT,
        "memory_gib": _read(
            lambda: round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
        ),
        "load": _read(lambda: [round(load, 2) for load in os.getloadavg()]),
    }


def _caches() -> Any:
    """Reads the cache sizes: MKL and oneDNN cut their blocks, and so their sums, by them."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    names = ("level", "type", "size")
    return _read(
        lambda: [" ".join((folder / name).read_text().strip() for name in names) for folder in folders]
    )


def _threads() -> dict[str, Any]:
    mkl = re.search(r"mkl_get_max_threads\(\) : (\d+)", str(_read(torch.__config__.parallel_info)))
    return {
        "intra_op": torch.get_num_threads(),
        "inter_op": torch.get_num_interop_threads(),
        "mkl": int(mkl[1]) if mkl else ABSENT,
    }


def _variables() -> dict[str, str]:
    names = [name for name in os.environ if _VARIABLES.fullmatch(name) and not _PRIVATE.fullmatch(name)]
    return {name: _without_paths(os.environ[name]) for name in sorted(names)}


def _without_paths(value: str) -> str:
    """Hides paths, which name users and machines; of a library, as in LD_PRELOAD, the file name stays."""
    return re.sub(
        r"(?<![^\s,:;=])(?:~|/|\w:\\)[^\s,:;=]*",
        lambda path: (
            "<path>" + (library[0] if (library := re.search(r"/[\w.+-]+\.so[\d.]*$", path[0])) else "")
        ),
        value,
    )


def _is_flushing_denormals() -> bool:
    tiny = sys.float_info.min  # torch has a setter and no getter; the processor's own answer needs no tensor
    return tiny / 2 == 0.0


def _switch(getter: str) -> Callable[[], Any]:
    return lambda: getattr(torch._C, getter)()


_FLAGS: dict[str, Callable[[], Any]] = {
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": _switch("_get_deterministic_fill_uninitialized_memory"),
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "mkldnn_enabled": _switch("_get_mkldnn_enabled"),
    "mkldnn_deterministic": _switch("_get_mkldnn_deterministic"),
    "mkldnn_matmul_precision": lambda: torch._C._get_fp32_precision_getter("mkldnn", "matmul"),
    "cpu_fp16_reduced_precision": _switch("_get_cpu_allow_fp16_reduced_precision_reduction"),
    "cudnn_deterministic": _switch("_get_cudnn_deterministic"),
    "cudnn_benchmark": _switch("_get_cudnn_benchmark"),
    "cudnn_tf32": _switch("_get_cudnn_allow_tf32"),
    "cuda_matmul_tf32": _switch("_get_cublas_allow_tf32"),
    "cuda_fp16_reduced_precision": lambda: torch._C._get_cublas_allow_fp16_reduced_precision_reduction()[0],
    "cuda_bf16_reduced_precision": lambda: torch._C._get_cublas_allow_bf16_reduced_precision_reduction()[0],
    "cuda_fp16_accumulation": _switch("_get_cublas_allow_fp16_accumulation"),
    "sdp_flash": torch.backends.cuda.flash_sdp_enabled,
    "sdp_mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "sdp_math": torch.backends.cuda.math_sdp_enabled,
    "flush_denormal": _is_flushing_denormals,
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "autocast_cpu": lambda: torch.is_autocast_enabled("cpu"),
    "autocast_cuda": lambda: torch.is_autocast_enabled("cuda"),
    "grad_enabled": torch.is_grad_enabled,
}


def _clocks() -> dict[str, Any]:
    cpu = Path("/sys/devices/system/cpu")
    mhz: Any = _read(lambda: round(int((cpu / "cpu0/cpufreq/scaling_cur_freq").read_text()) / 1000))
    if mhz == ABSENT:  # virtual machines have no cpufreq, but often this
        found = re.search(r"^cpu MHz\s*: ([\d.]+)", str(_read(Path("/proc/cpuinfo").read_text)), re.MULTILINE)
        mhz = round(float(found[1])) if found else ABSENT
    return {
        "governor": _read(lambda: (cpu / "cpu0/cpufreq/scaling_governor").read_text().strip()),
        "current_mhz": mhz,
        "boost": _read(lambda: bool(int((cpu / "cpufreq/boost").read_text()))),
    }


def _gpus() -> list[dict[str, Any]]:
    # device_count leaves CUDA uninitialised, so that this process can still fork workers that use it.
    count = _read(torch.cuda.device_count)
    return [_gpu(index) for index in range(count if isinstance(count, int) else 0)]


def _gpu(index: int) -> dict[str, Any]:
    """Reads one GPU through NVML, which does not initialise CUDA; through torch only where it already did."""
    record = dict.fromkeys(("name", "capability", "memory_gib", *_SENSORS), ABSENT)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        record["name"] = _read(lambda: torch.cuda.get_device_name(index))
        record["capability"] = _read(lambda: _dotted(torch.cuda.get_device_capability(index)))
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]  # not a dependency

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver
        return record
    try:
        # NVML counts every device, torch the visible ones.
        number = _read(lambda: torch.cuda._get_nvml_device_index(index))
        handle = pynvml.nvmlDeviceGetHandleByIndex(index if number == ABSENT else number)
        record |= {name: _read(partial(sensor, pynvml, handle)) for name, sensor in _SENSORS.items()}
    except Exception:
        return record
    finally:
        _read(pynvml.nvmlShutdown)
    return record


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older pynvml returns bytes


_SENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, gpu: _as_text(nvml.nvmlDeviceGetName(gpu)),
    "capability": lambda nvml, gpu: _dotted(nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
    "memory_gib": lambda nvml, gpu: round(nvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**30, 1),
    "driver": lambda nvml, gpu: _as_text(nvml.nvmlSystemGetDriverVersion()),
    "sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "sm_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
    "persistence": lambda nvml, gpu: bool(nvml.nvmlDeviceGetPersistenceMode(gpu)),
    "pcie": lambda nvml, gpu: (
        f"gen {nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)} x{nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)}"
    ),
    "nvlinks": lambda nvml, gpu: sum(_is_link_up(nvml, gpu, link) for link in range(18)),
}


def _is_link_up(nvml: Any, gpu: Any, link: int) -> bool:
    return bool(_read(lambda: nvml.nvmlDeviceGetNvLinkState(gpu, link)) == 1)
