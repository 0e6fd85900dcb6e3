"""Shared setup of the tests. Without a GPU, Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch


def _patch_once_a_launch() -> None:
    """Make the interpreter patch Triton's language once per launch, not on every call between functions.

    The repeated patches have no effect, but take half of the run time of the interpreter.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # a Triton version that patches differently
    patch, patched = interpreter._patch_lang, set()

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        seen = function.__globals__.values()
        return frozenset(lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in seen))

    def patch_once(function: Any) -> Any:
        if patched >= seen_by(function):
            return interpreter._LangPatchScope()
        patched.update(seen_by(function))
        scope = patch(function)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch_once


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
        _patch_once_a_launch()
        _require_boolean_masks()


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
