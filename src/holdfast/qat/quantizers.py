"""The modules that ``prepare`` puts into a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch

from holdfast.core.dtypes import ZERO_POINT_LIMIT
from holdfast.core.errors import HoldfastError
from holdfast.core.formats import Format
from holdfast.core.granularity import Granularity, PerTensor
from holdfast.nn.fake_quantize import FakeQuantize
from holdfast.qat.config import Quantizer

#: The name of the submodule of a layer that quantizes its inputs.
INPUT_QUANTIZER = "input_quantizer"


class QuantizerModule(torch.nn.Module):
    """A ``FakeQuantize`` and the count of training calls before quantization starts."""

    steps: torch.Tensor

    def __init__(self, quantizer: Quantizer, fake_quantize: FakeQuantize, device: torch.device) -> None:
        super().__init__()
        self.quantizer, self.fake_quantize = quantizer, fake_quantize
        self.start_step = quantizer.start_step
        if self.start_step:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return self.quantizer.format

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale, in the axes of the tensor."""
        return self.fake_quantize.granularity

    @property
    def mode(self) -> str:
        """The source of the scale: "learned", "batch", "ema" or "fixed"."""
        return self.quantizer.mode

    def is_set(self) -> bool:
        """Whether there is a scale. Mode "batch" needs none. Synchronizes with the device."""
        return self.fake_quantize._holds_scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized = self.fake_quantize(x)
        if not (self.start_step and self.training):
            return quantized  # type: ignore[no-any-return]
        return torch.where(self.fake_quantize.count_call(self.steps) >= self.start_step, quantized, x)

    def reset_parameters(self) -> None:
        """Count training calls from 0. ``fake_quantize`` has a reset of its own."""
        if self.start_step:
            self.steps.zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the state. A count from the meta device is reset: ``to_empty`` leaves it uninitialized."""
        from_meta = self.start_step > 0 and self.steps.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if from_meta and not self.steps.is_meta:
            self.reset_parameters()
        return self


class WeightFakeQuantize(FakeQuantize):
    """A FakeQuantize of data that is the same on all processes, so that no range is reduced over them."""

    def _reduces_range(self) -> bool:
        return False


class WeightQuantizer(QuantizerModule):
    """The parametrization of a quantized weight. ``quantizer`` has the granularity in the weight's axes."""

    def __init__(self, quantizer: Quantizer, weight: torch.Tensor) -> None:
        shape = quantizer.granularity.view(tuple(weight.shape)).scale_shape or (1,)
        given: dict[str, Any] = {}
        if quantizer.mode == "fixed" and quantizer.scale is None:
            given = _scale_of(replace(quantizer, mode="batch").module(), weight, shape)
        made = quantizer.module(WeightFakeQuantize, scale_shape=shape, device=weight.device, **given)
        if quantizer.mode == "learned" and quantizer.scale is None and not weight.is_meta:
            made.initialize(weight)
        super().__init__(quantizer, made, weight.device)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """Assigning to the weight of a prepared layer sets the float weight."""
        return weight


class ActivationQuantizer(QuantizerModule):
    """Quantizes the inputs of a layer: its arguments named ``inputs``, by position or by name."""

    def __init__(
        self,
        quantizer: Quantizer,
        inputs: tuple[str, ...],
        device: torch.device,
        expected_shape: tuple[int, ...] | None = None,
        layer: str = "",
    ) -> None:
        # fully_shard requires a vector.
        shape = (1,) if isinstance(quantizer.granularity, PerTensor) else None
        made = quantizer.module(scale_shape=shape, device=device)
        if expected_shape is not None:
            made.expect_shape(expected_shape)
        super().__init__(quantizer, made, device)
        self.inputs = inputs
        #: The name that the layer had at ``prepare``, for errors.
        self.layer = layer
        self.converted = False

    def finish(self) -> None:
        """Keep the scale as it is from now on."""
        self.fake_quantize.freeze()
        self._buffers.pop("steps", None)
        self.start_step, self.converted = 0, True

    def scale(self) -> torch.Tensor | None:
        """The scale in use, in the dtype in which it is stored; None in mode "batch"."""
        if self.mode == "batch":
            return None
        scale, _ = self.fake_quantize.evaluation_scale()
        return self._shaped(scale.detach().to(self.quantizer.scale_dtype or scale.dtype))

    def zero_point(self) -> torch.Tensor | None:
        """The zero point, int32; None if it is 0, and in mode "batch"."""
        if self.mode == "batch":
            return None
        _, zero_point = self.fake_quantize.evaluation_scale()
        return None if zero_point is None else self._shaped(whole_zero_point(zero_point.detach()))

    def _shaped(self, state: torch.Tensor) -> torch.Tensor:
        """One scale as a scalar."""
        return state.reshape(()) if isinstance(self.granularity, PerTensor) else state

    def quantized_arguments(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of the layer with quantized inputs. A tensor given twice is quantized once."""
        done: list[tuple[Any, torch.Tensor]] = []

        def once(x: Any) -> Any:
            if x is None:
                return None
            for given, quantized in done:
                if given is x:
                    return quantized
            try:
                quantized = self(x)
            except HoldfastError as error:
                error.add_note(f"This is the quantizer of the input of {self.layer or 'the model'}.")
                raise
            done.append((x, quantized))
            return quantized

        count = len(self.inputs)
        named = {name: once(kwargs[name]) for name in self.inputs if name in kwargs}
        return (*map(once, args[:count]), *args[count:]), {**kwargs, **named}


def _scale_of(batch: FakeQuantize, weight: torch.Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
    """The arguments ``scale`` and ``zero_point`` with which the codes just cover the weight."""
    scale, zero_point = batch.evaluation_scale(weight)
    found = {"scale": scale.reshape(shape)}
    return found if zero_point is None else {**found, "zero_point": zero_point.reshape(shape)}


def whole_zero_point(zero_point: torch.Tensor) -> torch.Tensor:
    """The zero point as kernels round it, int32. A learned one is floating."""
    if not zero_point.is_floating_point():
        return zero_point
    rounded = zero_point.round().nan_to_num(0.0).clamp(-ZERO_POINT_LIMIT, ZERO_POINT_LIMIT)
    return rounded.to(torch.int32)
