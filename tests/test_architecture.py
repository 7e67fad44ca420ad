"""The house rules a machine can read: imports point one way, modules stay short, notebooks use public names.

They are the rules of the README's architecture section. A room is a module or a folder of `detlab/`. What is
read is the source, at every level of it: an import inside a function or under TYPE_CHECKING counts too.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "detlab"
MAX_LINES = 450

# From the bottom up. A room imports rooms of the floors below it, never one beside or above it.
FLOORS = (
    {"errors"},
    {"bits", "files"},
    {"environment"},
    {"models", "prompts", "condition"},
    {"trace"},
    {"serving", "process", "telemetry"},
    {"runner", "clocks"},
    {"worker"},
    {"divergence"},
)
OBSERVING = set().union(*FLOORS)
# The engine stands on the first floors alone: it never sees what observes it, nor is it seen.
ENGINE_SEES = set().union(*FLOORS[:4])
# The rooms that see both sides; among themselves they may import without a cycle.
JOINT = {
    "remedies", "coverage", "deterministic", "bench", "verify", "investigate", "inquiry", "sweep",
    "testing", "scoring", "two_stages",
}  # fmt: skip
ROOMS = OBSERVING | {"engine", "viz"} | JOINT
MAY_IMPORT = {
    **{room: set().union(*FLOORS[:floor]) for floor, rooms in enumerate(FLOORS) for room in rooms},
    "engine": ENGINE_SEES,
    **{room: OBSERVING | {"engine"} | JOINT - {room} for room in JOINT},
    "viz": (OBSERVING | {"engine"} | JOINT) - {"models", "runner"},  # sees results, never models
    "cli": ROOMS | {"detlab"},
    "__main__": {"cli"},
    "__init__": ROOMS,
}
PLOTTING = {"plotly", "ipywidgets", "anywidget"}
LAZY_VIZ = {"cli", "__init__"}  # may import viz, inside a function: the rest of detlab works without it


class Import(NamedTuple):
    """One imported module, `detlab.bits` for `from detlab import bits`; `is_lazy` inside a function."""

    line: int
    module: str
    is_lazy: bool


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    """Yields every import of a module, relative ones resolved, `import_module("literal")` among them."""
    here = ("detlab", *path.relative_to(package).parent.parts)
    rooms = {entry.stem for entry in package.iterdir() if entry.is_dir() or entry.suffix == ".py"}

    def visit(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            lazy = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            match child:
                case ast.Import(names=names):
                    for alias in names:
                        yield Import(child.lineno, alias.name, lazy)
                case ast.ImportFrom(module=module, names=names, level=level):
                    parts = here[: len(here) - level + 1] if level else ()
                    base = ".".join((*parts, *([module] if module else [])))
                    for alias in names:
                        is_room = base == "detlab" and alias.name in rooms
                        yield Import(child.lineno, f"{base}.{alias.name}" if is_room else base, lazy)
                case ast.Call(
                    func=ast.Attribute(attr="import_module" | "__import__")
                    | ast.Name(id="import_module" | "__import__"),
                    args=[ast.Constant(value=str(text)), *_],
                ):
                    yield Import(child.lineno, text, lazy)
            yield from visit(child, lazy)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False)


def modules_of(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).with_suffix("").parts[0]


def import_violations(package: Path) -> list[str]:
    """Names every import that points the wrong way: `detlab/bits.py:3: ...`."""
    found = []
    for path in modules_of(package):
        room = room_of(path, package)
        where = f"detlab/{path.relative_to(package)}"
        if room not in MAY_IMPORT:
            found.append(
                f"{where}: the room {room!r} is not in the architecture; give it a floor in "
                "tests/test_architecture.py and a place in the README's architecture section"
            )
            continue
        for line, module, is_lazy in imports_of(path, package):
            top, *rest = module.split(".")
            if top in PLOTTING and room != "viz":
                found.append(f"{where}:{line}: imports {top}; only detlab/viz may. Move the drawing there")
            if top != "detlab":
                continue
            target = rest[0] if rest else "detlab"
            if target in (room, "errors"):
                continue
            if target == "viz" and room in LAZY_VIZ:
                if not is_lazy:
                    found.append(f"{where}:{line}: imports detlab.viz at once; do it inside the function")
            elif target not in MAY_IMPORT[room]:
                allowed = ", ".join(sorted(MAY_IMPORT[room])) or "nothing of detlab"
                advice = "import the module that defines the name" if target == "detlab" else "move it down"
                found.append(f"{where}:{line}: {room} imports {module}; it may import {allowed}. Or {advice}")
    return found


def import_cycles(package: Path) -> list[str]:
    """Names the rooms that import one another in a circle."""
    edges: dict[str, set[str]] = {}
    for path in modules_of(package):
        room = room_of(path, package)
        modules = (found.module.split(".") for found in imports_of(path, package))
        targets = {module[1] for module in modules if module[0] == "detlab" and len(module) > 1}
        edges.setdefault(room, set()).update(targets - {room})

    def reachable(room: str, seen: frozenset[str] = frozenset()) -> set[str]:
        direct = edges.get(room, set()) - seen
        return direct.union(*(reachable(target, seen | direct) for target in direct))

    return sorted(room for room in edges if room in reachable(room))


def long_modules(package: Path) -> list[str]:
    counts = ((path, len(path.read_text(encoding="utf-8").splitlines())) for path in modules_of(package))
    return [
        f"detlab/{path.relative_to(package)}: {count} lines, {MAX_LINES} at most; it is two modules"
        for path, count in counts
        if count > MAX_LINES
    ]


def notebook_violations(notebook: Path, public: dict[str, set[str]]) -> list[str]:
    """Names every use of detlab that is not public; `public` holds the names of detlab and of detlab.viz."""
    found = []
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or source.startswith("%%"):
            continue
        where = f"{notebook.name}, cell {number}"
        magic = re.compile(r"^(\s*)[%!].*", re.MULTILINE)
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        for node in ast.walk(compile(magic.sub(r"\1pass", source), where, "exec", flags)):
            names: list[str] = []
            match node:
                case ast.Import(names=aliases):
                    names = [alias.name for alias in aliases if alias.name not in public or alias.asname]
                case ast.ImportFrom(module=str(base), names=aliases):
                    names = [f"{base}.{alias.name}" for alias in aliases]
                case ast.Attribute(value=ast.Name(id="detlab"), attr=name):
                    names = [f"detlab.{name}"]
                case ast.Attribute(ast.Attribute(ast.Name(id="detlab"), attr="viz"), attr=name):
                    names = [f"detlab.viz.{name}"]
            for name in names:
                base, _, last = name.rpartition(".")
                is_module = name in public and not isinstance(node, ast.Import)
                is_public = is_module or last in public.get(base, ())
                if name.split(".")[0] == "detlab" and not is_public:
                    found.append(
                        f"{where}: {name} is not public here; `import detlab` under its own name and use "
                        "a name of detlab.__all__ or detlab.viz.__all__"
                    )
    return found


def public_names() -> dict[str, set[str]]:
    import detlab
    import detlab.viz

    return {module.__name__: set(module.__all__) for module in (detlab, detlab.viz)}


# The rules, applied to this tree.


def test_imports_point_one_way() -> None:
    violations = import_violations(PACKAGE)
    assert not violations, "\n".join(violations)


def model_uses(folder: Path) -> list[str]:
    """Where modules name a model, or could run one: `workbench.py: Inquiry(model)` for a model that is handed on."""
    found = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        libraries = {module.split(".")[0] for _, module, _ in imports_of(path, folder.parent)} & {"torch", "transformers"}
        found += [f"{path.name}: imports {name}" for name in sorted(libraries)]
        handed = {
            id(argument): f"{path.name}: {node.func.id}(model)"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            for argument in node.args
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "model" and isinstance(node.ctx, ast.Load):
                found.append(handed.get(id(node), f"{path.name}: uses model"))
            elif isinstance(node, ast.Attribute) and node.attr == "model":
                found.append(f"{path.name}: uses .model")
    return found


def test_viz_hands_a_model_on_and_does_nothing_else_with_it() -> None:
    assert model_uses(PACKAGE / "viz") == ["workbench.py: Inquiry(model)"]


def test_a_use_of_a_model_is_found(tmp_path: Path) -> None:
    source = "import torch\ndef f(model):\n    g(model)\n    model(1)\n    return f.model"
    plant(tmp_path, viz__page=source)
    found = ["page.py: imports torch", "page.py: g(model)", "page.py: uses model", "page.py: uses .model"]
    assert sorted(model_uses(tmp_path / "viz")) == sorted(found)


def test_no_rooms_import_in_a_circle() -> None:
    cycle = import_cycles(PACKAGE)
    assert not cycle, f"these rooms import in a circle: {', '.join(cycle)}; move what they share down"


def test_modules_stay_short() -> None:
    violations = long_modules(PACKAGE)
    assert not violations, "\n".join(violations)


def test_notebooks_use_public_names_only() -> None:
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    public = public_names() if notebooks else {}
    violations = [violation for notebook in notebooks for violation in notebook_violations(notebook, public)]
    assert not violations, "\n".join(violations)


IMPORT_AND_COMPARE = """
import os, sys, threading, warnings
import numpy, torch

def state():
    return {
        "environment variables": dict(os.environ),
        "working folder": os.getcwd(),
        "import path": list(sys.path),
        "warning filters": list(warnings.filters),
        "Python threads": threading.active_count(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch default dtype": torch.get_default_dtype(),
        "torch deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch seed": (torch.initial_seed(), torch.get_rng_state().tolist()),
        "torch gradients": torch.is_grad_enabled(),
        "torch matmul precision": torch.get_float32_matmul_precision(),
    }

before = state()
modules = set(sys.modules)
import detlab
after = state()
for name in before:
    if before[name] != after[name]:
        print(f"importing detlab changes: {name}")
for name in ("plotly", "ipywidgets", "anywidget"):
    if name in sys.modules:
        print(f"importing detlab imports {name}; import detlab.viz lazily")
"""


def test_importing_detlab_has_no_side_effect(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    environment = {**kept, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", IMPORT_AND_COMPARE]
    result = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert written == ["home", "work"]


# The rules, applied to planted violations: a checker that finds nothing must be seen to find something.


def plant(folder: Path, **sources: str) -> Path:
    """Writes a package: `plant(tmp_path, bits="import os", trace__capture="...")`."""
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/') if not name.startswith('__') else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
    return folder


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("bits", "from detlab.environment import x", "detlab/bits.py:1: bits imports detlab.environment"),
        ("bits", "from detlab import environment", "detlab/bits.py:1: bits imports detlab.environment"),
        ("bits", "from .environment import x", "detlab/bits.py:1: bits imports detlab.environment"),
        ("bits", "from . import environment", "detlab/bits.py:1: bits imports detlab.environment"),
        ("bits", "def f():\n    import detlab.environment", "bits.py:2: bits imports detlab.environment"),
        ("bits", "if TYPE_CHECKING:\n    import detlab.runner", "bits.py:2: bits imports detlab.runner"),
        ("bits", "importlib.import_module('detlab.runner')", "detlab/bits.py:1: bits imports detlab.runner"),
        ("condition", "from detlab.models import x", "condition imports detlab.models"),
        ("runner", "from detlab.engine import linear", "runner imports detlab.engine"),
        ("runner", "from detlab.divergence.compare import x", "runner imports detlab.divergence.compare"),
        ("runner", "from detlab import run", "Or import the module that defines the name"),
        ("trace__capture", "from ..engine import linear", "trace/capture.py:1: trace imports detlab.engine"),
        ("divergence__compare", "from detlab.engine.linear import x", "divergence imports detlab.engine"),
        ("engine__linear", "from detlab.trace import capture", "engine imports detlab.trace"),
        ("engine__exact__linear", "from ...divergence import compare", "engine imports detlab.divergence"),
        ("engine__linear", "from detlab.runner import run", "engine imports detlab.runner"),
        ("verify", "from detlab.viz import figures", "verify imports detlab.viz"),
        ("viz__widgets", "from detlab.models import load_model", "viz imports detlab.models"),
        ("viz__widgets", "from detlab.runner import run", "viz imports detlab.runner"),
        ("verify", "def f():\n    import plotly.graph_objects as go", "detlab/verify.py:2: imports plotly"),
        ("cli", "from ipywidgets import HTML", "detlab/cli.py:1: imports ipywidgets"),
        ("cli", "from detlab import viz", "detlab/cli.py:1: imports detlab.viz at once"),
        ("__init__", "import detlab.viz", "detlab/__init__.py:1: imports detlab.viz at once"),
        ("helpers", "import os", "the room 'helpers' is not in the architecture"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, room: str, source: str, expected: str) -> None:
    package = plant(tmp_path, **{"environment": "", "engine__linear": "", "viz__figures": "", room: source})
    (violation,) = import_violations(package)
    assert expected in violation


def test_right_imports_pass(tmp_path: Path) -> None:
    package = plant(
        tmp_path,
        errors="",
        bits="import torch\nfrom detlab.errors import UsageError",
        runner="from detlab import bits\nfrom detlab.trace.capture import capture",
        trace__capture="from detlab.trace.layout import Layout\nfrom . import store",
        engine__linear="from detlab import bits",
        verify="from detlab.engine import linear\nfrom detlab.divergence import compare",
        viz__figures="import plotly\nfrom detlab.divergence.compare import Comparison",
        cli="import detlab\ndef main():\n    from detlab import viz",
        __init__="from detlab.runner import run\ndef __getattr__(name):\n    import detlab.viz",
    )
    assert import_violations(package) == []
    assert import_cycles(package) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = plant(
        tmp_path,
        verify="def f():\n    import detlab.coverage",
        coverage="from detlab import remedies",
        remedies="from detlab.verify import f",
    )
    assert import_violations(package) == []
    assert import_cycles(package) == ["coverage", "remedies", "verify"]


def test_a_long_module_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, bits="x = 1\n" * MAX_LINES, trace__capture="x = 1\n" * (MAX_LINES + 1))
    assert long_modules(package) == ["detlab/trace/capture.py: 451 lines, 450 at most; it is two modules"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import detlab\ndetlab.run\n%matplotlib inline\n!ls", []),
        ("import detlab.viz\ndetlab.viz.heatmap\nif detlab:\n    %time", []),
        ("from detlab import run, viz\nfrom detlab.viz import heatmap\nawait run()", []),
        ("import detlab as dl", ["detlab"]),
        ("%%bash\nimport detlab.engine", []),
        ("from detlab.runner import run", ["detlab.runner.run"]),
        ("import detlab.engine", ["detlab.engine"]),
        ("from detlab import engine", ["detlab.engine"]),
        ("detlab.engine.linear", ["detlab.engine"]),
        ("detlab._private", ["detlab._private"]),
        ("detlab.viz.figures", ["detlab.viz.figures"]),
        ("from detlab.viz.figures import heatmap", ["detlab.viz.figures.heatmap"]),
    ],
)
def test_a_private_name_in_a_notebook_is_found(tmp_path: Path, source: str, expected: list[str]) -> None:
    notebook = tmp_path / "01-one-question.ipynb"
    text = {"cell_type": "markdown", "source": "detlab.x"}
    code = {"cell_type": "code", "source": source.splitlines(keepends=True)}
    notebook.write_text(json.dumps({"cells": [text, code]}))
    violations = notebook_violations(notebook, {"detlab": {"run"}, "detlab.viz": {"heatmap"}})
    assert [violation.split(" is not public")[0] for violation in violations] == [
        f"01-one-question.ipynb, cell 1: {name}" for name in expected
    ]
