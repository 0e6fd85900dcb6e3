"""What all tests share: without a GPU, Triton's kernels run in its interpreter, so that each is tested."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch


def _patch_once_a_launch() -> None:
    """Keep the interpreter from patching Triton's language anew on every call of one function by another.

    Nothing changes after the first time in a launch, but going through all of the language is half of the
    time that the interpreter takes.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton, which patches in another way
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
    """Refuse every mask that is not boolean, as the interpreter of Triton 3.9 does; that of 3.7 takes any."""
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
    """Threads share out work of any size, so that a test of them need not be large."""
    from holdfast.backends import threads

    with threads.shared_finely():
        yield
