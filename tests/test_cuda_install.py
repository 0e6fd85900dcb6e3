"""Tests of ``hf.install`` that need a GPU: torch's samples, the flag, unchanged models, compiled code."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import holdfast as hf
from install_models import HARMLESS, PROBLEMS, prepared, step
from opinfo_samples import compare, op_infos, results, samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these need a CUDA device")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it with the flag

DTYPES = (torch.float32, torch.float16)
CASES = [
    pytest.param(info, dtype, id=f"{info.formatted_name}-{str(dtype).removeprefix('torch.')}")
    for info in (op_infos() if torch.cuda.is_available() else ())
    for dtype in DTYPES
    if dtype in info.supported_dtypes("cuda") and info.variant_test_name != "prod"  # refused with the flag on
]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples use what torch warns of
        yield
    hf.uninstall()
    torch.use_deterministic_algorithms(False)
    hf.check_errors()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_model_is_trained_twice_with_equal_bits(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    model, inputs = prepared(name, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = partial(step, model, optimizer)
    with hf.installed():
        hf.testing.assert_reproducible(train, *inputs, model=[model, optimizer], repeats=3, threads=())
        for operator in PROBLEMS[name].operators:
            row = hf.status()[operator]
            assert row.served and row.passed_on.keys() <= HARMLESS, row


def test_the_list_of_torch_raises_no_more() -> None:
    """Calls that raise or leave for slow code with the flag on, and are served now."""
    x = torch.randn(2, 4, 9, 9, device="cuda", requires_grad=True)
    volume = torch.randn(1, 2, 5, 5, 5, device="cuda", requires_grad=True)
    grid = torch.rand(2, 6, 6, 2, device="cuda") * 2 - 1
    cases = {
        "upsample_bilinear2d_backward": lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "upsample_bicubic2d_backward": lambda: F.interpolate(x, scale_factor=2, mode="bicubic"),
        "upsample_trilinear3d_backward": lambda: F.interpolate(volume, scale_factor=2, mode="trilinear"),
        "_adaptive_avg_pool2d_backward": lambda: F.adaptive_avg_pool2d(x, 4),
        "_adaptive_avg_pool3d_backward": lambda: F.adaptive_avg_pool3d(volume, 3),
        "grid_sampler_2d_backward": lambda: F.grid_sample(x, grid, align_corners=False),
        "cudnn_grid_sampler_backward": lambda: F.grid_sample(x, grid, align_corners=True),
    }
    torch.use_deterministic_algorithms(True)
    with hf.installed():
        for operator, call in cases.items():
            call().square().sum().backward()
            assert hf.status()[operator].served == 1, operator


def test_installing_initialises_no_device() -> None:
    program = """
import torch, holdfast as hf
hf.install()
hf.uninstall()
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("flag", [False, True])
def test_compiled_code_uses_the_kernels(flag: bool) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear").square().sum()

    x = torch.randn(2, 4, 9, 9, device="cuda", requires_grad=True)
    torch.use_deterministic_algorithms(flag)
    with hf.installed():
        (expected,) = torch.autograd.grad(loss(x), x)
        torch._dynamo.reset()
        compiled = torch.compile(loss)
        torch.autograd.grad(compiled(x), x)
        with torch.profiler.profile() as profile:
            (found,) = torch.autograd.grad(compiled(x), x)
        assert "holdfast::interpolate_backward" in {event.name for event in profile.events()}
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


def test_a_graph_of_cuda_captures_the_kernels() -> None:
    x = torch.randn(2, 4, 16, 16, device="cuda", requires_grad=True)

    def gradient() -> torch.Tensor:
        out = F.interpolate(x, scale_factor=2, mode="bilinear")
        return torch.autograd.grad(out.square().sum(), x)[0]

    with hf.installed():
        expected = gradient()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                gradient()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradient()
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("info", "dtype"), CASES)
def test_samples_of_torch(info: Any, dtype: torch.dtype) -> None:
    wide = torch.float32 if dtype.itemsize == 2 else None
    given = samples(info, dtype, "cuda", most=3)  # each may need a kernel that is yet to be compiled
    if info.name == "put":  # without ``accumulate`` torch refuses it with the flag on
        given = [sample for sample in given if sample.args[-1] is True]
    expected = [results(info.op, sample, wide) for sample in given]
    torch.use_deterministic_algorithms(True)
    with hf.installed():
        found = [[results(info.op, sample) for sample in given] for _ in range(2)]
        assert any(row.served for row in hf.status())
    for sample, one, again, other in zip(given, *found, expected, strict=True):
        compare(one, other, sample)
        for first, second in zip(one, again, strict=True):
            assert first is None or torch.equal(first.nan_to_num(7), second.nan_to_num(7))
