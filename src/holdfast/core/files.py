"""Files that a command is asked to read or write."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.errors import HoldfastError


class UnusableFile(HoldfastError, ValueError):
    """A file cannot be read or written, or its content is not valid."""


def require_writable(*paths: str | Path | None) -> None:
    """Raise if one of the files cannot be written. None means no file, and ``-`` stdout."""
    for path in paths:
        if path is None or path == "-":
            continue
        folder = Path(path).parent
        if not folder.is_dir():
            raise UnusableFile(f"{path} cannot be written: there is no folder {folder}.")
        if Path(path).is_dir():
            raise UnusableFile(f"{path} cannot be written: it is a folder. Name a file in it.")
        if not os.access(path if Path(path).exists() else folder, os.W_OK):
            raise UnusableFile(f"{path} cannot be written: permission denied.")
