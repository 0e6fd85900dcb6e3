"""The disk cache of compiled CPU kernels.

A file holds one kernel for one signature. Its name contains a digest of everything that the machine code
depends on: the signature, the processor, the versions of Numba and Python, and every source file that the
kernel's module imports, because their functions and constants are compiled into the kernel. So a file that
exists is valid, and processes need no common index. A damaged file is ignored.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba

from holdfast.backends.private import numba as private

PACKAGE = Path(__file__).parents[1]

#: ``from holdfast.a import b, c``, at any indentation; the names are on one line or in parentheses.
_IMPORT = re.compile(r"^[ \t]*from[ \t]+(holdfast[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


@cache
def _read(path: Path) -> bytes:
    return path.read_bytes()


@cache
def imports_of(path: Path) -> frozenset[Path]:
    """The files of this package that a source file imports."""
    found = set()
    for module, names in _IMPORT.findall(_read(path).decode()):
        place = PACKAGE.joinpath(*module.split(".")[1:])
        found |= {place.with_suffix(".py"), place / "__init__.py"}
        found |= {place / f"{name}.py" for name in re.findall(r"\w+", names)}
        found |= {place / name / "__init__.py" for name in re.findall(r"\w+", names)}
    return frozenset(path for path in found if path.is_file())


@cache
def sources_of(path: Path) -> tuple[Path, ...]:
    """A source file and all files of this package that it imports, directly or indirectly."""
    found, new = {path}, {path}
    while new:
        new = {below for one in new for below in imports_of(one)} - found
        found |= new
    return tuple(sorted(found))


@cache
def digest_of_sources(path: Path) -> str:
    """A digest of the names and contents of ``sources_of(path)``."""
    digest = hashlib.sha256()
    for source in sources_of(path):
        name = source.relative_to(PACKAGE) if source.is_relative_to(PACKAGE) else source
        digest.update(f"{name.as_posix()}\0{hashlib.sha256(_read(source)).hexdigest()}\0".encode())
    return digest.hexdigest()


class Files:
    """The files of one kernel. ``base`` is the prefix of their names, ``sources`` a digest of its sources."""

    def __init__(self, folder: Path, base: str, sources: str) -> None:
        self.folder, self.base, self.sources = folder, base, sources[:16]

    def _path(self, key: Any) -> Path:
        named = hashlib.sha256(repr((key, numba.__version__, sys.version)).encode()).hexdigest()
        return self.folder / f"{self.base}.{self.sources}.{named[:32]}.nbc"

    def load(self, key: Any) -> Any:
        """The saved kernel; None if there is none or the file is damaged."""
        try:
            digest, data = _split(self._path(key).read_bytes())
        except OSError:
            return None
        return pickle.loads(data) if hashlib.sha256(data).digest() == digest else None

    def save(self, key: Any, compiled: Any) -> None:
        """Write a file atomically, and remove the files of other versions of the sources."""
        data = private.serialized(compiled)
        unfinished = self.folder / f"{self.base}.{uuid.uuid4().hex}.tmp"
        try:
            unfinished.write_bytes(hashlib.sha256(data).digest() + data)
            unfinished.replace(self._path(key))
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        for other in self.folder.glob(f"{self.base}.*.nbc"):
            if not other.name.startswith(f"{self.base}.{self.sources}."):
                with suppress(OSError):
                    other.unlink()

    def flush(self) -> None:
        """Part of Numba's interface; there is nothing to flush."""


def _split(content: bytes) -> tuple[bytes, bytes]:
    size = hashlib.sha256().digest_size
    return content[:size], content[size:]


def keep(compiled: Any, function: Any) -> None:
    """Cache a compiled kernel on disk, if there is a writable folder."""
    sources = digest_of_sources(Path(function.__code__.co_filename))
    private.keep_on_disk(compiled, function, lambda folder, base: Files(folder, base, sources))
