"""Shared setup of the tests. Without a GPU, Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

# Workers and their processes have more threads than there are processors. A thread that waits must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # the library of threads reads the setting when it is loaded


def _require_boolean_masks() -> None:
    """Refuse masks that are not boolean, as the interpreter of Triton 3.9 does and that of 3.7 does not."""
    from triton.runtime import interpreter

    def checked(method: Any, position: int) -> Any:
        def call(builder: Any, *arguments: Any) -> Any:
            mask = arguments[position].data
            assert mask.dtype == bool, f"a mask is {mask.dtype}; compare blocks, not scalars"
            return method(builder, *arguments)

        return call

    builder = interpreter.InterpreterBuilder
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, checked(getattr(builder, name), position))


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    if importlib.util.find_spec("triton") is not None:
        import fast_interpreter

        fast_interpreter.install()
        _require_boolean_masks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Search for garbage less often, and never among the imported modules and the tests, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def shared_finely() -> Iterator[None]:
    """Let threads share small problems, too, so that thread tests can be small."""
    from holdfast.backends import threads

    with threads.shared_finely():
        yield


@pytest.fixture(scope="session")
def browser() -> str:
    """A Chromium that tests open pages with. CI must have one; .ci/run installs it on Debian."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    known = next(filter(None, map(shutil.which, names)), None)
    if known is None and os.environ.get("CI"):
        pytest.fail("CI has no browser to open pages with; .ci/run installs one on Debian.")
    if known is None:
        pytest.skip("opening a page needs Chromium; install chromium-headless-shell")
    return known
