"""Resolves requirements.lock anew and writes its versions into environment.yml (`make lock`).

Pins that still fit are kept, so a second run changes nothing. Further arguments go to `uv pip compile`:
`make lock LOCK_ARGS=--upgrade` moves every pin, `make lock LOCK_ARGS="--upgrade-package plotly"` one of them.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
ENVIRONMENT = ROOT / "environment.yml"


def resolve(extra_arguments: list[str]) -> None:
    """Runs uv's resolver for all platforms and every Python from 3.11 on."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "tools/lock.in"]
    command += ["--extra", "dev", "--output-file", LOCK.name, "--config-file", "tools/lock.toml"]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-emit-package", "torch"]
    command += ["--no-emit-index-url", "--custom-compile-command", "make lock", "--quiet", *extra_arguments]
    subprocess.run(command, cwd=ROOT, check=True)


def copy_pins_to_environment() -> None:
    """Rewrites `- name==version` in environment.yml wherever the lock pins the same name once."""
    pins: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", LOCK.read_text(), re.MULTILINE):
        pins.setdefault(name, []).append(version)

    def replace(match: re.Match[str]) -> str:
        versions = pins.get(match["name"], [])
        return f"{match['head']}{match['name']}=={versions[0] if len(versions) == 1 else match['version']}"

    pin = re.compile(r"^(?P<head>\s*- )(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)
    ENVIRONMENT.write_text(pin.sub(replace, ENVIRONMENT.read_text()))


if __name__ == "__main__":
    resolve(sys.argv[1:])
    copy_pins_to_environment()
