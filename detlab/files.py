"""Writes files whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from detlab.errors import UsageError

__all__ = ["write_text"]


def write_text(path: str | os.PathLike[str], text: str, what: str, example: str) -> Path:
    """Writes UTF-8 text under a temporary name and renames it; an existing file is replaced once the new one is complete.

    Args:
        path: the file; its folder must exist.
        text: its content.
        what: what writes it, for messages, such as "write_report".
        example: a file name to suggest where a folder was given, such as "report.html".

    Returns:
        The path written.

    Raises:
        UsageError: the folder is missing, the path is a folder, or the file cannot be written; nothing is left behind then.
    """
    target = Path(path).expanduser()
    if target.is_dir():
        raise UsageError(f"{what} needs a file; {target} is a folder. Give a name, such as {target / example}.")
    if not target.parent.is_dir():
        raise UsageError(f"{what} cannot write {target}: the folder {target.parent} does not exist. Make it first.")
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, target)
    except OSError as error:
        raise UsageError(f"{what} cannot write {target}: {error.strerror}. Nothing was written.") from error
    finally:
        fresh.unlink(missing_ok=True)
    return target
