"""What all tests share: without a GPU, Triton's kernels run in its interpreter, so that each is tested."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch


def _patch_once_a_launch() -> None:
    """Keep the interpreter from patching Triton's language anew on every call of one function by another.

    Nothing changes after the first time in a launch, but going through all of the language is half of the
    time that the interpreter takes.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in function.__globals__.values() if value in (tl, tl.core))

    def patch_once(function: Any) -> Any:
        if patched >= seen_by(function):
            return None
        patched.update(seen_by(function))
        scope = patch(function)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch_once


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    _patch_once_a_launch()
