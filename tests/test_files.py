"""Files are there whole or not at all; report and certificate are written this way."""

import os
from pathlib import Path

import pytest

from detlab.errors import UsageError
from detlab.files import write_text


def test_text_is_written_and_replaced(tmp_path: Path) -> None:
    path = write_text(str(tmp_path / "a.txt"), "erste Zeile: ä\n", "save", "a.txt")
    assert path.read_bytes() == "erste Zeile: ä\n".encode()
    write_text(path, "second", "save", "a.txt")
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text(tmp_path / "a.txt", "old", "save", "a.txt")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match=r"save cannot write .*a.txt: No space left on device. Nothing was written."):
        write_text(path, "new", "save", "a.txt")
    assert os.listdir(tmp_path) == ["a.txt"]
    assert path.read_text() == "old"


def test_what_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"save needs a file; .* is a folder. Give a name, such as .*/a.txt."):
        write_text(tmp_path, "", "save", "a.txt")
    with pytest.raises(UsageError, match=r"the folder .*missing does not exist. Make it first."):
        write_text(tmp_path / "missing" / "a.txt", "", "save", "a.txt")
