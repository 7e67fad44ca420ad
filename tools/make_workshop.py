"""Makes the two sets of a workshop from the notebooks: one for students, without solutions, and one with all of them in place.

    .venv/bin/python tools/make_workshop.py [FOLDER]      build/workshop by default; its two sets are made anew

Both come from `notebooks/`, in which each exercise is a stub (`name = ...`), a check, and a folded hint and solution. So they
cannot drift apart, and what the tests run is what the solutions hold.
"""

from __future__ import annotations

import argparse
import copy
import html
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
STUB = re.compile(r"(\w+) = \.\.\.\n")
SOLUTION = re.compile(r"\s*<details><summary>Solution</summary><(code|pre)>(.*?)</\1>.*?</details>", re.DOTALL)
WORDS = {
    "student": (
        "Work through the notebooks in the order of their numbers. Each closes with exercises: replace the dots, run the cell, "
        "and it says whether your answer holds. Hints are folded below. The solutions are with your teacher."
    ),
    "solutions": "For the teacher: the same notebooks with every exercise solved in place. They run from top to bottom.",
}


def stubs_of(notebook: Any) -> list[Any]:
    """The cells that wait for an answer."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and STUB.match(cell.source)]


def solutions_of(notebook: Any) -> list[str]:
    """The code of the folded solutions, one for each stub.

    Raises:
        ValueError: there are not as many as stubs, or one does not set what its stub asks for.
    """
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    solutions = [html.unescape(code) for _, code in SOLUTION.findall(text)]
    names = [STUB.match(cell.source)[1] for cell in stubs_of(notebook)]
    if len(names) != len(solutions):
        raise ValueError(f"{len(names)} exercises ({', '.join(names)}) have {len(solutions)} solutions; give each one.")
    for name, code in zip(names, solutions, strict=True):
        if not re.search(rf"^{name} = ", code, re.MULTILINE):
            raise ValueError(f"the solution of the exercise {name!r} does not set it: {code!r}.")
    return solutions


def _blank(notebook: Any) -> Any:
    """A copy that has not been run: students are to predict what will come out."""
    made = copy.deepcopy(notebook)
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return made


def student(notebook: Any) -> Any:
    """A copy without solutions; hints stay."""
    solutions_of(notebook)  # an exercise in another form would keep its solution
    made = _blank(notebook)
    for cell in made.cells:
        if cell.cell_type == "markdown":
            cell.source = SOLUTION.sub("", cell.source)
    return made


def solved(notebook: Any) -> Any:
    """A copy in which every stub is answered by its folded solution."""
    made = _blank(notebook)
    for cell, code in zip(stubs_of(made), solutions_of(made), strict=True):
        cell.source = f"{code}\n{STUB.sub('', cell.source, count=1)}"
    return made


def _title(name: str) -> str:
    return f"# detlab workshop: {name}"


def build(folder: Path) -> list[Path]:
    """Writes both sets, with the data they need, as folders and as archives.

    Returns:
        The two archives.

    Raises:
        FileExistsError: a folder of a set's name is there that is none: it would be lost.
    """
    archives = []
    for name in WORDS:
        readme = folder / name / "README.md"
        if (folder / name).exists() and not (readme.is_file() and readme.read_text("utf-8").startswith(_title(name))):
            raise FileExistsError(f"{folder / name} was not made by this tool; nothing was written. Give another folder.")
    for name, form in (("student", student), ("solutions", solved)):
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        (place / "notebooks").mkdir(parents=True)
        shutil.copytree(ROOT / "data", place / "data")
        (place / "README.md").write_text(f"{_title(name)}\n\n{WORDS[name]}\n", encoding="utf-8")
        for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
            nbformat.write(form(nbformat.read(path, as_version=4)), place / "notebooks" / path.name)
        archives.append(Path(shutil.make_archive(str(place), "zip", folder, name)))
    return archives


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the students' and the solutions' set of a workshop.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "workshop", help="default: build/workshop")
    try:
        for archive in build(parser.parse_args().folder):
            print(archive)
    except OSError as error:
        sys.exit(f"make_workshop: {error}")
