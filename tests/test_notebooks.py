"""Every notebook: small, stripped, in the house's form, and guarded by verdict cells that can fail.

The notebooks themselves are run by nbval (`make test`); what is tested here is that such a run means something.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import symtable
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.test_architecture import notebook_violations, public_names

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MARK = "# NBVAL_CHECK_OUTPUT"
MAX_BYTES = 300_000
# What differs from machine to machine must not be in a stored output.
UNSTABLE = re.compile(r"\d\.\d|\be-?\d\d|\bULP\b|\bms\b|\bseconds\b|\btoken\b", re.IGNORECASE)

# One for each exercise of each notebook, in order: answers that are near and must be refused.
WRONG_ANSWERS = {
    "00-start-here": ['"batch_size=4"', "[1.0, 2.0, 3.0]", "2.0"],
    "01-addition-is-not-associative": ["1024", "chain", "0"],
    "02-batch-size": ["(24, 3)", "-1", "lambda waiting: waiting - 1"],
    "03-padding-cache-and-chunks": [
        "lambda mask: torch.arange(5).expand(3, 5)",
        "16",
        "lambda numbers, count: numbers.sum(1) + count",
    ],
    "04-threads-and-hardware": [
        '"ATEN_CPU_CAPABILITY"',
        "lambda num, workers: [num * k // workers for k in range(1, workers)]",
        '"tier=invariant,threads=2,batch_size=3,aten_isa=default,mkl_isa=COMPATIBLE"',
    ],
    "05-boost-clocks": [
        '{"b", "d", "e"}',
        "lambda parts: sum(parts.values())",
        "lambda seconds, differs: 0.02",
    ],
    "06-sampling-and-seeds": ["1.0", "lambda seed, request, position: 0.5", "lambda logits, u: logits.argmax(-1)"],
    "07-mixed-precision": [
        "0.125",
        "lambda x: sum(x.unbind(), torch.zeros((), dtype=x.dtype))",
        'lambda a, b, judge: "a" if (a - judge.bfloat16()).abs().max() < (b - judge.bfloat16()).abs().max() else "b"',
    ],
    "08-deterministic-engine": ["1000", '"tier=invariant,batch_size=2,padding_side=left"', '["anna", "anna"]'],
    "09-folk-remedies": [
        '{"seeds"}',
        'lambda before, after: "restores" if after == 0 else "no effect"',
        "lambda seed: (torch.manual_seed(seed), torch.rand(3))[1]",
    ],
    "10-your-own-model": [
        '"model.layers.0.mlp"',
        '("batch_size=1", "batch_size=4,mates=random")',
        '("model.layers.0.mlp", "add")',
    ],
}

# And answers that are right, by another way than the folded solution.
OTHER_ANSWERS = {
    "00-start-here": [
        '"batch_size=4,mates=random,seed=3"',
        "[1.0, 1e30, -1e30]",
        "len(result.comparison.origins) / max(1, len(found))",
    ],
    "01-addition-is-not-associative": [
        "2048.0",
        "lambda x: sum(x[: len(x) // 2].unbind()) + sum(x[len(x) // 2 :].unbind())",
        'len({detlab.accumulation_tree("mm", 512, rows=r, trials=0).signature for r in range(8, 0, -1)})',
    ],
    "02-batch-size": [
        "[72, 3]",
        "min(range(12), key=lambda at: float(runs[1].logits[0][at].float().sort().values[-2:].diff()))",
        "lambda waiting: max(waiting, 8)",
    ],
    "03-padding-cache-and-chunks": [
        "lambda mask: torch.stack([row.cumsum(0) - (row.cumsum(0) > 0).long() for row in mask])",
        "100_000",
        '(lambda x, count: __import__("functools").reduce(torch.add, [*x.unbind(1), *torch.zeros(count, len(x))]))',
    ],
    "04-threads-and-hardware": [
        '"mkl_isa"',
        "lambda num, workers: [num // 9 * k for k in range(1, 9)]",
        '"tier=exact,threads=4,batch_size=2,mkl_isa=SSE4_2,onednn_isa=SSE41"',
    ],
    "05-boost-clocks": [
        '"db"',
        "lambda parts: math.fsum(parts.values())",
        """lambda seconds, differs: sum(
            abs(sum(s * (m - sum(differs) / 30) for s, m in zip(seconds, random.sample(differs, 30))))
            >= abs(sum(s * (m - sum(differs) / 30) for s, m in zip(seconds, differs)))
            for _ in range(2000)
        ) / 2000""",
    ],
    "06-sampling-and-seeds": [
        "0.05",
        "lambda seed, request, position: __import__('random').Random(f'{seed}|{request}|{position}').random()",
        "lambda logits, u: (logits.exp() / -u.log()).argmax(-1)",
    ],
    "07-mixed-precision": [
        "0.25",
        "lambda x: torch.tensor(sum(x.tolist())).bfloat16()",
        "lambda a, b, judge: {-1: 'b', 0: 'neither', 1: 'a'}[int((b - judge).abs().max().sub((a - judge).abs().max()).sign())]",
    ],
    "08-deterministic-engine": [
        "1500.0",
        '"tier=invariant,batch_size=2,padding_side=right,padding=3,cache=none"',
        '["1", "2"]',
    ],
    "09-folk-remedies": [
        '["greedy", "seeds"]',
        """lambda b, a: ["nothing shown", "restores", "no effect", "reduces", "makes it worse"][
            4 if a > b else 0 if not b else 1 if not a else 2 if a == b else 3
        ]""",
        "lambda seed: torch.randn(3, generator=torch.Generator().manual_seed(seed + 100))",
    ],
    "10-your-own-model": [
        "next(name for name, part in patient(1).named_modules() if part._forward_hooks)",
        '("batch_size=3,mates=random,seed=1", "batch_size=3,mates=random,seed=2")',
        '["model.layers.0.mlp", "mean"]',
    ],
}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def tool(name: str) -> ModuleType:
    """A script of tools/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def load(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def verdicts(notebook: Any) -> list[Any]:
    return [cell for cell in code_cells(notebook) if MARK in cell.source]


def printed(cell: Any) -> str:
    """All that a cell printed; a slow machine delivers it in pieces, and libraries warn beside it."""
    return "".join(output.text for output in cell.outputs if output.name == "stdout")


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(WRONG_ANSWERS) == list(OTHER_ANSWERS), "a notebook is not tested"
    assert NOTEBOOKS
    names = [path.name for path in NOTEBOOKS]
    assert all(re.fullmatch(r"\d\d-[a-z0-9-]+\.ipynb", name) for name in names), names
    assert len({name[:2] for name in names}) == len(names)


@each_notebook
def test_it_is_valid_and_small(path: Path) -> None:
    nbformat.validate(load(path))
    assert path.stat().st_size < MAX_BYTES
    assert "widgets" not in load(path).metadata
    assert "widget-view" not in path.read_text(encoding="utf-8")


@each_notebook
def test_outputs_are_kept_in_verdict_cells_only_and_counts_everywhere(path: Path) -> None:
    cells = code_cells(load(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run tools/refresh_notebooks.py"
    for cell in cells:
        if MARK in cell.source:
            assert cell.outputs, f"a verdict without a stored output is never compared:\n{cell.source}"
        else:
            assert not cell.outputs, f"run tools/refresh_notebooks.py; this cell has outputs:\n{cell.source}"


@each_notebook
def test_verdicts_hold_on_every_machine(path: Path) -> None:
    found = verdicts(load(path))
    assert found, "a notebook without a verdict cell proves nothing when it runs"
    for cell in found:
        assert all((output.output_type, output.name) == ("stream", "stdout") for output in cell.outputs)
        text = printed(cell)
        assert not UNSTABLE.search(text), text
        assert all(re.fullmatch(r"[^:]+: (True|0)", line) for line in text.strip().splitlines()), text


@each_notebook
def test_it_opens_and_closes_as_the_house_does(path: Path) -> None:
    notebook = load(path)
    first, second = notebook.cells[:2]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    for words in ("The question", "Afterwards you can", "You need", "minutes"):
        assert words in first.source, words
    assert second.cell_type == "code"
    for words in ("import detlab", "seed", "detlab.environment()"):
        assert words in second.source, words
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for words in (
        "Predict",
        "Things to notice",
        "Why",
        "Where nothing diverges",
        "## Summary",
        "## Exercises",
        "## References",
    ):
        assert words in text, words
    assert text.count("<summary>Hint</summary>") == text.count("<summary>Solution</summary>") >= 2
    assert all(cell.source.strip() for cell in notebook.cells)


@each_notebook
def test_displays_are_explicit(path: Path) -> None:
    """A bare value at a cell's end would be an output that strict runs compare; a trailing `;` fails under nbval."""
    for cell in code_cells(load(path)):
        assert not cell.source.rstrip().endswith(";"), cell.source
        last = ast.parse(cell.source).body[-1]
        assert not isinstance(last, ast.Expr) or isinstance(last.value, ast.Call), cell.source


@each_notebook
def test_it_uses_public_names_and_needs_no_network(path: Path) -> None:
    assert notebook_violations(path, public_names()) == []
    for cell in code_cells(load(path)):
        assert "http" not in cell.source
        assert not re.search(r"^\s*[%!]", cell.source, re.MULTILINE)


def first_part(path: Path, folder: Path, change: Any = None) -> Path:
    """A copy of a notebook up to its first verdict cell, whose stored output may be changed, beside the prompts."""
    notebook = load(path)
    at = notebook.cells.index(verdicts(notebook)[0])
    notebook.cells = notebook.cells[: at + 1]
    for output in notebook.cells[-1].outputs if change is not None else ():
        output.text = change(output.text)
    (folder / "data").symlink_to(ROOT / "data")
    copy = folder / "notebooks" / path.name
    copy.parent.mkdir()
    nbformat.write(notebook, copy)
    return copy


def python_path() -> str:
    """Where a kernel finds this detlab, installed or not."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run_nbval(notebook: Path, home: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    command += ["--nbval-cell-timeout=120", "--rootdir", str(notebook.parent), "-c", os.devnull, notebook.name]
    environment = os.environ | {"PYTHONPATH": python_path(), "IPYTHONDIR": str(home)}
    return subprocess.run(
        command, cwd=notebook.parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
@each_notebook
def test_a_tampered_verdict_makes_the_run_fail(path: Path, tmp_path: Path) -> None:
    tampered = first_part(path, tmp_path, lambda text: text.replace("True", "False", 1))
    result = run_nbval(tampered, tmp_path / "ipython")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed" in result.stdout
    assert "mismatch" in result.stdout


@pytest.mark.slow
def test_the_same_notebook_passes_as_it_is_stored(tmp_path: Path) -> None:
    """The control of the test above: without tampering, nothing fails."""
    result = run_nbval(first_part(NOTEBOOKS[0], tmp_path), tmp_path / "ipython")
    assert result.returncode == 0, result.stdout + result.stderr


def globals_in(source: str, *, is_set: bool) -> set[str]:
    """Global names that a piece of code reads, or those that it sets."""

    def walk(table: symtable.SymbolTable, is_top: bool) -> set[str]:
        found = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if (is_top and is_set and symbol.is_assigned())
            or (not is_set and symbol.is_referenced() and (is_top or symbol.is_global()))
        }
        return found.union(*(walk(child, False) for child in table.get_children()))

    return walk(symtable.symtable(source, "cell", "exec"), True)


def changed_in(node: ast.AST) -> set[str]:
    """Names whose objects a statement changes: `name[...] = x`, `name.x = y`, or a call of their method that stands alone."""
    found = set()
    for part in ast.walk(node):
        is_change = isinstance(part, ast.Subscript | ast.Attribute) and isinstance(part.ctx, ast.Store)
        if is_change or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Call)):
            inner: Any = part.value.func if isinstance(part, ast.Expr) else part
            if isinstance(inner, ast.Attribute | ast.Subscript):
                while isinstance(inner, ast.Attribute | ast.Subscript | ast.Call):
                    inner = inner.func if isinstance(inner, ast.Call) else inner.value
                found |= {inner.id} if isinstance(inner, ast.Name) else set()
    return found


def what_exercises_need(cells: list[Any], exercises: list[Any]) -> str:
    """The statements of a notebook's earlier cells that its exercises depend on; all of it is nbval's to run."""
    needed = set().union(*(globals_in(cell.source, is_set=False) for cell in exercises))
    kept: list[str] = []
    for cell in reversed(cells):
        for node in reversed(ast.parse(cell.source).body):
            source = ast.unparse(node)
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            if is_import or (globals_in(source, is_set=True) | changed_in(node)) & needed:
                needed |= globals_in(source, is_set=False)
                kept.append(source)
    return "\n".join(reversed(kept))


def test_what_exercises_need_is_found() -> None:
    source = """
numbers = zeros(3)
shown = [name for name in numbers]
numbers[0] = 2
numbers.model.hook(3)
print(shown)
table = {}
for number in (1, 2):
    table[number] = numbers
for number in (1, 2):
    print(number, table)
def unused(): return shown
def used(): return table
"""
    v4 = nbformat.v4
    found = what_exercises_need([v4.new_code_cell(source)], [v4.new_code_cell("check(lambda name: name, used())")])
    assert found.splitlines() == [
        "numbers = zeros(3)",
        "numbers[0] = 2",
        "numbers.model.hook(3)",
        "table = {}",
        "for number in (1, 2):",
        "    table[number] = numbers",
        "def used():",
        "    return table",
    ]


@pytest.mark.slow
@each_notebook
def test_the_exercises_tell_right_from_wrong(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts each folded solution, another right answer, and a wrong one in its stub's place."""
    notebook, workshop = load(path), tool("make_workshop")
    solutions, stubs = workshop.solutions_of(notebook), workshop.stubs_of(notebook)
    wrong, other = WRONG_ANSWERS[path.stem], OTHER_ANSWERS[path.stem]
    assert len(stubs) == len(solutions) == len(wrong) == len(other) >= 2
    solved, right, planted = [], [], []
    for cell, *answers in zip(stubs, solutions, other, wrong, strict=True):
        name, rest = cell.source.split(" = ...\n", 1)
        sources = [answers[0], *(f"{name} = {answer}" for answer in answers[1:])]
        for source, found in zip(sources, (solved, right, planted), strict=True):
            found.append(nbformat.v4.new_code_cell(f"{source}\n{rest}"))
    cells = code_cells(notebook)
    start = next(i for i, cell in enumerate(cells) if cell.source.startswith("def check("))
    exercises = [cells[start], *(cell for group in zip(solved, right, planted, strict=True) for cell in group)]
    notebook.cells = [nbformat.v4.new_code_cell(what_exercises_need(cells[:start], exercises)), *exercises]
    (tmp_path / "data").symlink_to(ROOT / "data")
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", python_path())
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    assert [printed(cell) for cell in solved] == ["right\n"] * len(solved)
    assert [printed(cell) for cell in right] == ["right\n"] * len(right)
    refused = [printed(cell) for cell in planted]
    assert all(re.match(r"not yet: (?!replace the dots)", said) for said in refused), refused


def test_refreshing_strips_everything_but_verdicts_and_counts() -> None:
    v4 = nbformat.v4
    out = v4.new_output("stream", name="stdout", text="yes: True\n")
    cells = [
        v4.new_code_cell("1 + 1", execution_count=1, outputs=[out], metadata={"execution": {"start": "now"}}),
        v4.new_code_cell(f"{MARK}\nprint('yes:', True)", execution_count=2, outputs=[out]),
    ]
    notebook = v4.new_notebook(
        cells=cells, metadata={"widgets": {"state": {}}, "language_info": {"name": "python", "version": "3.11.1"}}
    )
    stripped = tool("refresh_notebooks").stripped(notebook)
    assert [len(cell.outputs) for cell in stripped.cells] == [0, 1]
    assert [cell.execution_count for cell in stripped.cells] == [1, 2]
    assert "now" not in json.dumps(stripped)
    assert "widgets" not in stripped.metadata
    assert "3.11.1" not in json.dumps(stripped.metadata)


def sources(notebook: Any) -> str:
    return "\n".join(cell.source for cell in notebook.cells)


def test_a_workshop_does_not_replace_a_folder_of_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="student was not made by this tool; nothing was written"):
        tool("make_workshop").build(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["student", "notes.txt"]


def test_the_workshop_has_a_set_without_solutions_and_one_with_them(tmp_path: Path) -> None:
    """Both sets come from the notebooks themselves; what else the two folders need is there, too."""
    archives = tool("make_workshop").build(tmp_path)
    assert [archive.name for archive in archives] == ["student.zip", "solutions.zip"]
    assert all(archive.stat().st_size > 10_000 for archive in archives)
    for path in NOTEBOOKS:
        original = load(path)
        student, solved = (load(tmp_path / name / "notebooks" / path.name) for name in ("student", "solutions"))
        workshop = tool("make_workshop")
        assert [cell.cell_type for cell in student.cells] == [cell.cell_type for cell in original.cells]
        assert len(workshop.stubs_of(student)) == len(workshop.stubs_of(original)) >= 2
        assert sources(student).count("<summary>Hint</summary>") == len(workshop.stubs_of(original))
        assert workshop.stubs_of(solved) == []
        assert not any(cell.outputs or cell.execution_count for cell in (*code_cells(student), *code_cells(solved)))
        for code in workshop.solutions_of(original):
            assert code in sources(solved)
            assert code not in sources(student)
        assert "Solution" not in sources(student)
        for cell in code_cells(solved):
            ast.parse(cell.source)
    for name in ("student", "solutions"):
        assert (tmp_path / name / "data/prompts/arithmetic.jsonl").is_file()


@pytest.mark.parametrize(
    ("folded", "complaint"),
    [
        ("No solution here.", r"1 exercises \(answer\) have 0 solutions"),
        (
            "<details><summary>Solution</summary><code>reply = 3</code></details>",
            "the solution of the exercise 'answer' does not",
        ),
    ],
)
def test_an_exercise_in_another_form_is_refused(folded: str, complaint: str) -> None:
    """Its solution would stay in the students' set."""
    v4 = nbformat.v4
    cells = [v4.new_code_cell("answer = ...\n\ncheck(answer)"), v4.new_markdown_cell(folded)]
    with pytest.raises(ValueError, match=complaint):
        tool("make_workshop").student(v4.new_notebook(cells=cells))
