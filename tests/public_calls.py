"""Every public function with good arguments, for tests that try something on each function and argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import holdfast as hf


@dataclass(frozen=True)
class Call:
    """A function, good arguments for it, and which of them it has a gradient with respect to."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    by: tuple[str, ...] = ()
    #: Arguments that no gradient flows through, as the documentation says.
    constant: tuple[str, ...] = ()
    #: Arguments whose codes are integers, which have no derivative in any mode.
    discrete: tuple[str, ...] = field(default=())

    def __call__(self, **changed: Any) -> Any:
        return self.function(**{**self.arguments, **changed})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, torch.Tensor)}

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)


X = (torch.arange(24.0).reshape(4, 6) - 11.3) / 7
ROWS = torch.tensor([0.25, 0.5, 0.125, 0.3])
ZEROS = torch.tensor([0, 1, -1, 2], dtype=torch.int32)
CODES = (torch.arange(24).reshape(4, 6) % 15 - 7).to(torch.int8)
BYTES = (torch.arange(12).reshape(4, 3) * 37 % 256).to(torch.uint8)
TABLE = torch.linspace(-2, 3, 21).reshape(7, 3)
INDICES = torch.tensor([[1, 2, 3], [4, 1, 1]])
WEIGHTS = torch.tensor([[0.5, 2.0, -1.0], [3.0, 0.25, 1.0]])
IMAGE = torch.linspace(-1, 1, 75).reshape(1, 3, 5, 5)
GRID = torch.linspace(-0.9, 0.8, 24).reshape(1, 3, 4, 2)
CHANNELS: dict[str, Any] = {"granularity": hf.PerChannel(0)}
INT8: dict[str, Any] = {"dtype": torch.int8, "q_min": -8, "q_max": 7}

CALLS: dict[str, Call] = {
    "quantize": Call(
        hf.quantize,
        {"x": X, "scale": ROWS, "zero_point": ZEROS, "packed": False, **INT8, **CHANNELS},
        discrete=("x", "scale"),
    ),
    "quantize to floats": Call(
        hf.quantize,
        {"x": X, "scale": ROWS, "zero_point": ZEROS, **INT8, **CHANNELS, "dtype": torch.float32},
        by=("x",),
    ),
    "dequantize": Call(
        hf.dequantize, {"q": CODES, "scale": ROWS, "zero_point": ZEROS, "dtype": torch.float32, **CHANNELS}
    ),
    "dequantize packed": Call(
        hf.dequantize,
        {"q": BYTES, "scale": 0.5, "zero_point": 1, "packed": True, "code_dtype": torch.int4, "length": 5},
    ),
    "dequantize from floats": Call(
        hf.dequantize, {"q": X, "scale": ROWS, "zero_point": ZEROS, **CHANNELS}, by=("q",)
    ),
    "fake_quantize": Call(
        hf.fake_quantize,
        {"x": X, "scale": ROWS, "zero_point": ZEROS.float(), "ste": "in_range", "grad_factor": 0.5}
        | INT8
        | CHANNELS,
        by=("x", "scale", "zero_point"),
    ),
    "fake_quantize of one scale": Call(
        hf.fake_quantize, {"x": X, "scale": 0.25, "zero_point": 1, "dtype": torch.int4}, by=("x",)
    ),
    "observe_range": Call(hf.observe_range, {"x": X, **CHANNELS}, constant=("x",)),
    "choose_scale": Call(
        hf.choose_scale, {"x": X, "symmetric": True, "narrow": True, **INT8, **CHANNELS}, constant=("x",)
    ),
    "choose_scale affine": Call(hf.choose_scale, {"x": X, "symmetric": False}, constant=("x",)),
    "scale_of_range": Call(
        hf.scale_of_range, {"low": -ROWS, "high": ROWS * 3, "symmetric": True, "narrow": False, **INT8}
    ),
    "scale_of_range affine": Call(hf.scale_of_range, {"low": -ROWS, "high": ROWS, "symmetric": False}),
    "quantize_dynamic": Call(
        hf.quantize_dynamic,
        {"x": X, "symmetric": True, "narrow": None, "packed": False, **INT8, **CHANNELS},
        constant=("x",),
    ),
    "quantize_dynamic affine": Call(
        hf.quantize_dynamic,
        {"x": X, "symmetric": False, "dtype": torch.uint4, "packed": True},
        constant=("x",),
    ),
    "lsq_init": Call(hf.lsq_init, {"x": X, **INT8, **CHANNELS}, constant=("x",)),
    "embedding": Call(
        hf.embedding,
        {"input": INDICES, "weight": TABLE, "padding_idx": 1, "max_norm": None, "norm_type": 2.0}
        | {"scale_grad_by_freq": False, "sparse": False, "bad_index": "raise"},
        by=("weight",),
    ),
    "embedding_bag": Call(
        hf.embedding_bag,
        {"input": INDICES.reshape(-1), "weight": TABLE, "offsets": torch.tensor([0, 2, 6])}
        | {"per_sample_weights": WEIGHTS.reshape(-1), "mode": "sum", "include_last_offset": True}
        | {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
        | {"padding_idx": 1, "bad_index": "raise"},
        by=("weight", "per_sample_weights"),
    ),
    "grid_sample": Call(
        hf.grid_sample,
        {"input": IMAGE, "grid": GRID, "mode": "bilinear", "padding_mode": "zeros", "align_corners": True},
        by=("input", "grid"),
    ),
    "grid_sample with a narrow grid": Call(
        hf.grid_sample, {"input": IMAGE, "grid": GRID.half()}, by=("input", "grid")
    ),
    "affine_grid": Call(
        hf.affine_grid,
        {"theta": torch.tensor([[[1.0, 0.2, 0.1], [0.3, 0.9, 0.0]]]), "size": (1, 3, 4, 5)}
        | {"align_corners": False},
        by=("theta",),
    ),
    "pack": Call(hf.pack, {"codes": CODES, "dtype": torch.int4}),
    "unpack": Call(hf.unpack, {"packed": BYTES, "dtype": torch.int4, "length": 5}),
}

#: Every tensor argument of every call.
TENSORS = [(name, argument) for name, call in CALLS.items() for argument in call.tensors]


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]
