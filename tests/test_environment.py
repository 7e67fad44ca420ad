"""The environment record: complete, portable, private, and taken without touching anything."""

import dataclasses
import getpass
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from detlab.environment import Environment, cache_dir, environment
from detlab.errors import UsageError

module = sys.modules["detlab.environment"]  # `detlab.environment` itself is the public function


@pytest.fixture(scope="module")
def record():
    return environment()


def in_fresh_process(script, **variables):
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


# --- content ---


def test_names_the_versions(record):
    assert record.versions["torch"] == torch.__version__
    assert record.versions["python"].endswith(platform.python_version())
    assert set(record.versions) >= {
        "detlab",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "mkl",
        "onednn",
    }
    for name, switch in (("mkl", torch.backends.mkl), ("onednn", torch.backends.mkldnn)):
        assert (record.versions[name] != "absent") == switch.is_available()
        assert record.versions[name] in torch.__config__.show() or record.versions[name] == "absent"


def test_names_the_machine(record):
    assert record.cpu["capability"] == torch.backends.cpu.get_cpu_capability()
    assert record.cpu["cores_logical"] == os.cpu_count()
    assert record.threads["intra_op"] == torch.get_num_threads()
    assert set(record.clocks) == {"governor", "current_mhz", "boost"}
    if record.cpu["capability"].startswith("AVX"):
        assert "avx2" in record.cpu["isa"]


def test_reads_the_variables_that_matter(monkeypatch):
    for name, value in {
        "ATEN_CPU_CAPABILITY": "avx2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_LAUNCH_BLOCKING": "1",
        "KMP_AFFINITY": "granularity=fine,compact,1,0",
        "MKL_CBWR": "COMPATIBLE",
        "NCCL_ALGO": "Ring",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "TORCH_DETERMINISTIC": "1",
        "UNRELATED": "1",
    }.items():
        monkeypatch.setenv(name, value)
    variables = environment().variables
    assert "UNRELATED" not in variables
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert variables["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    expected = (
        "ATEN_CPU_CAPABILITY CUDA_LAUNCH_BLOCKING MKL_CBWR NCCL_ALGO ONEDNN_MAX_CPU_ISA TORCH_DETERMINISTIC"
    )
    assert set(variables) >= set(expected.split())


def test_every_flag_can_be_read(record):
    assert [name for name, value in record.flags.items() if value == "absent"] == []


@pytest.mark.parametrize(
    ("flag", "switch"),
    [
        ("deterministic_algorithms", lambda on: torch.use_deterministic_algorithms(on)),
        ("mkldnn_enabled", lambda on: torch._C._set_mkldnn_enabled(on)),
        ("cudnn_benchmark", lambda on: torch._C._set_cudnn_benchmark(on)),
        ("cuda_matmul_tf32", lambda on: torch._C._set_cublas_allow_tf32(on)),
        ("flush_denormal", lambda on: torch.set_flush_denormal(on)),
        ("sdp_flash", lambda on: torch.backends.cuda.enable_flash_sdp(on)),
        ("grad_enabled", lambda on: torch.set_grad_enabled(on)),
    ],
)
def test_flags_follow_their_switches(record, flag, switch):
    before = record.flags[flag]
    try:
        for on in (True, False):
            switch(on)
            assert environment().flags[flag] is on
    finally:
        switch(before)
    assert environment().flags == record.flags


# --- privacy ---


def test_paths_are_hidden(monkeypatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/somebody/topology.xml")
    monkeypatch.setenv("LD_PRELOAD", "/home/somebody/lib/libiomp5.so:/opt/libjemalloc.so.2")
    monkeypatch.setenv("NCCL_COMM_ID", "node-7.example:4000")
    variables = environment().variables
    assert variables["NCCL_TOPO_FILE"] == "<path>"
    assert variables["LD_PRELOAD"] == "<path>/libiomp5.so:<path>/libjemalloc.so.2"
    assert "NCCL_COMM_ID" not in variables


@pytest.mark.parametrize(
    "value", ["~", "~/x", "C:\\Users\\somebody", "file:/home/somebody", "a=/home/somebody,b"]
)
def test_no_form_of_a_path_gets_through(value):
    assert "somebody" not in module._without_paths(value) and "~" not in module._without_paths(value)


def test_names_no_host_no_user_and_no_folder(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "host-of-mine")
    text = json.dumps(environment().to_json())
    for private in ("host-of-mine", str(Path.home()) + "/", str(Path.cwd()), sys.prefix, sys.executable):
        assert private not in text
    user = getpass.getuser()
    assert user == "root" or user not in text.split('"')


# --- it changes nothing ---


def test_nothing_is_touched():
    def state():
        return (
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            {name: read() for name, read in module._FLAGS.items()},
            dict(os.environ),
            torch.cuda.is_initialized(),
        )

    before = state()
    environment()
    assert state() == before


def test_thread_pools_can_still_be_set_afterwards_and_nothing_heavy_is_imported():
    # set_num_interop_threads raises once the pool has started.
    script = (
        "import sys, torch\nfrom detlab.environment import environment\nenvironment()\n"
        "torch.set_num_interop_threads(1); torch.set_num_threads(1)\n"
        "print(environment().threads['inter_op'], 'transformers' in sys.modules, 'pynvml' in sys.modules)"
    )
    assert in_fresh_process(script) == "1 False False"


def test_is_not_seen_by_a_dispatch_mode():
    # Recorded inside a capture, the record must not add ops to the trace.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was called")

    with Refuse():
        environment()


# --- JSON ---


def test_survives_json(record):
    assert Environment.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": 99},
            "an environment record of schema 1 is expected; got schema 99. Read it with the version",
        ),
        ({"cpu": "fast"}, "an environment record's cpu must be a dict; got str"),
        ({"gpus": None}, "an environment record's gpus must be a list; got NoneType"),
        ({"extra": 1}, "an environment record has no extra; expected time, versions"),
    ],
)
def test_refuses_another_layout(record, change, message):
    with pytest.raises(UsageError, match=message):
        Environment.from_json(record.to_json() | change)


def test_refuses_a_record_without_a_part(record):
    incomplete = record.to_json()
    del incomplete["flags"]
    with pytest.raises(UsageError, match="flags must be a dict; got nothing"):
        Environment.from_json(incomplete)


# --- display ---


def test_table_shows_every_fact(record):
    lines = str(record).splitlines()
    assert lines[0].split() == ["fingerprint", record.fingerprint()]
    assert any(line.split() == ["versions.torch", torch.__version__] for line in lines)
    assert lines[-1].split() == ["gpus", "none"] or lines[-1].startswith("gpus.")


def test_html_is_escaped(record):
    bad = dataclasses.replace(record, variables={"MKL_<b>": "<script>alert(1)</script>"})
    html = bad._repr_html_()
    assert "<script>" not in html and "<b>" not in html
    assert "MKL_&lt;b&gt;" in html and "&lt;script&gt;" in html
    assert record.cpu["model"].replace("&", "&amp;") in html


# --- fingerprint ---


@pytest.mark.slow
def test_fingerprint_is_the_same_in_every_process_of_one_setup(record):
    script = "from detlab.environment import environment; print(environment().fingerprint())"
    threads = str(record.threads["intra_op"])
    fingerprints = {in_fresh_process(script, OMP_NUM_THREADS=threads, PYTHONHASHSEED=seed) for seed in "12"}
    assert len(fingerprints) == 1
    assert in_fresh_process(script, OMP_NUM_THREADS=threads, MKL_CBWR="COMPATIBLE") not in fingerprints
    assert (
        in_fresh_process(script, OMP_NUM_THREADS=threads, ATEN_CPU_CAPABILITY="default") not in fingerprints
    )


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": {"model": "another"}},
        {"cpu": {"capability": "DEFAULT"}},
        {"cpu": {"caches": ["1 Data 32K"]}},
        {"versions": {"torch": "2.13.1"}},
        {"versions": {"onednn": "3.13"}},
        {"threads": {"intra_op": 77}},
        {"variables": {"MKL_CBWR": "AVX2"}},
        {"flags": {"mkldnn_enabled": False}},
    ],
)
def test_fingerprint_changes_with_what_can_change_bits(record, change):
    ((group, fields),) = change.items()
    changed = dataclasses.replace(record, **{group: getattr(record, group) | fields})
    assert changed.fingerprint() != record.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": {"load": [9.0, 9.0, 9.0]}},
        {"cpu": {"memory_gib": 1.0}},
        {"clocks": {"current_mhz": 1}},
        {"versions": {"tokenizers": "0"}},
        {"variables": {"GOMP_SPINCOUNT": "1", "PYTHONHASHSEED": "3", "MKL_VERBOSE": "1"}},
        {"flags": {"grad_enabled": "either"}},
        {"platform": {"release": "0"}},
    ],
)
def test_fingerprint_ignores_what_cannot(record, change):
    record = dataclasses.replace(record, variables={})
    ((group, fields),) = change.items()
    changed = dataclasses.replace(record, **{group: getattr(record, group) | fields}, time="another")
    assert changed.fingerprint() == record.fingerprint()


# --- GPUs, with a stand-in for the driver ---


class FakeNvml(types.ModuleType):
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        super().__init__("pynvml")
        self.is_open = False

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index):
        assert self.is_open
        return index

    def nvmlDeviceGetName(self, gpu):
        return b"Some GPU"

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return (9, 0)

    def nvmlSystemGetDriverVersion(self):
        return "550.54"

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return 1980 if kind == self.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetPowerUsage(self, gpu):
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link > 3:
            raise RuntimeError("no such link")
        return 1


def test_gpu_is_read_through_nvml_and_missing_sensors_are_absent(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    (gpu,) = module._gpus()
    assert not nvml.is_open
    assert (gpu["name"], gpu["capability"], gpu["driver"], gpu["sm_mhz"]) == (
        "Some GPU",
        "9.0",
        "550.54",
        1980,
    )
    assert gpu["nvlinks"] == 4
    assert gpu["power_w"] == gpu["temperature_c"] == gpu["memory_gib"] == "absent"


def test_gpu_without_nvml_is_listed_with_absent_sensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    gpus = module._gpus()
    assert len(gpus) == 2
    assert set(gpus[0].values()) == {"absent"}


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert module._gpus() == []


# --- the cache folder ---


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DETLAB_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("DETLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "detlab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert cache_dir() == Path.home() / ".cache" / "detlab"
    assert not (tmp_path / "mine").exists()
