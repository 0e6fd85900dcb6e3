"""How Triton's kernels are prepared, seen without a GPU."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from holdfast.backends import gpu


class Handle:
    """A compiled kernel whose launcher takes a while to load, and counts who loads one at the same time."""

    loading = most = 0
    counting = threading.Lock()

    @property
    def run(self) -> Any:
        with Handle.counting:
            Handle.loading += 1
            Handle.most = max(Handle.most, Handle.loading)
        time.sleep(0.01)
        with Handle.counting:
            Handle.loading -= 1
        return self


class Kernel:
    """A kernel that compiles as long as all others do."""

    def __init__(self, together: threading.Barrier) -> None:
        self.together = together

    def warmup(self, *given: Any, **options: Any) -> Handle:
        self.together.wait(timeout=30)
        return Handle()


def test_threads_compile_side_by_side_but_load_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    monkeypatch.setattr(gpu, "_handles", {})
    monkeypatch.setattr(gpu, "_entry", lambda handle, early: (handle, ()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    together = threading.Barrier(4)

    def prepare(kernel: Kernel) -> Any:
        return gpu.prepare(
            kernel, grid=(1, 1), device=torch.device("cuda", 0), tensors=(), scalars=(), settled=(),
            constants={}, num_warps=1,
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(prepare, [Kernel(together) for _ in range(4)]))) == 4
    assert Handle.most == 1
