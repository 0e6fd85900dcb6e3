"""A kernel mutant: one piece of a kernel's source, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.proof.mutants import MutantError

PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class KernelMutant:
    """``new`` for ``old`` in ``file``, a path in the package, and the plans that must show it.

    Cases with ``likely`` in their names are tried first, which saves time and nothing else.
    """

    name: str
    file: str
    old: str
    new: str
    plans: tuple[str, ...]
    likely: str = ""

    @property
    def backend(self) -> str:
        """The backend of the file: how its name begins."""
        return Path(self.file).stem.partition("_")[0]

    @property
    def module(self) -> str:
        return ".".join(("holdfast", *Path(self.file).with_suffix("").parts))

    def source(self) -> str:
        """The source of the file with the mistake in it."""
        path = PACKAGE / self.file
        right = path.read_text() if path.exists() else ""
        found = right.count(self.old)
        if found != 1:
            raise MutantError(
                f"kernel mutant {self.name!r} changes {self.old!r}, which {self.file} has {found} times. "
                f"It must be there once; name what stands there now."
            )
        return right.replace(self.old, self.new)
