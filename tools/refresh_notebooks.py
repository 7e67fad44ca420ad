"""Runs notebooks and stores them as the tests want them: outputs of verdict cells only, with every count kept.

A cell without an execution count is never compared by nbval, so the counts stay; everything else that a run leaves behind
(outputs, widget state, timestamps) goes. Usage:

    .venv/bin/python tools/refresh_notebooks.py [NOTEBOOK ...]      all of notebooks/ by default
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
MARK = "# NBVAL_CHECK_OUTPUT"
KEPT = {"scrolled", "tags"}  # of a cell's metadata; "scrolled" folds a long output
TIMEOUT = 300  # seconds per cell


def stripped(notebook: Any) -> Any:
    """Removes from an executed notebook what is not compared; the notebook itself is changed and returned."""
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name in KEPT}
        if cell.cell_type == "code" and MARK not in cell.source:
            cell.outputs = []
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def refresh(path: Path) -> None:
    """Runs one notebook in its own folder and replaces it."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    # One stream a cell, however slowly a machine delivers it: nbval compares what was stored.
    NotebookClient(notebook, timeout=TIMEOUT, resources=where, coalesce_streams=True).execute()
    fresh = path.with_suffix(".tmp")
    nbformat.write(stripped(notebook), fresh)
    fresh.replace(path)
    print(f"{path.name}: {sum(c.cell_type == 'code' for c in notebook.cells)} cells run, {path.stat().st_size} bytes")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted((ROOT / "notebooks").glob("*.ipynb")):
        refresh(Path(name).resolve())
