"""Optional packages. Each is imported when a function needs it."""

from __future__ import annotations

import importlib.util

from holdfast.core.errors import HoldfastError


class MissingPackage(HoldfastError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


def require_packages(extra: str, *packages: str) -> None:
    """Raise MissingPackage unless all ``packages`` of ``extra`` are installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackage(
            f"packages that this needs are not installed: {', '.join(missing)}. "
            f"Install what is missing with: pip install 'holdfast[{extra}]'"
        )
