"""The ``FakeQuantize`` module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from holdfast.core.checks import require_bool, require_tensor
from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import ONE_SCALE, Granularity, validate_granularity
from holdfast.nn.argument_checks import (
    COUNTS,
    checked_device,
    checked_group,
    checked_momentum,
    checked_name,
    checked_shape,
    checked_switches,
)
from holdfast.nn.collectives import Group
from holdfast.nn.recomputation import Used, in_backward
from holdfast.nn.scale_in_use import checked_scale_dtype, scale_in_use
from holdfast.nn.scale_mode import ScaleMode
from holdfast.nn.scale_state import outside_inference_mode
from holdfast.nn.scale_updates import ScaleUpdates
from holdfast.nn.sharded import full_tensor
from holdfast.nn.state_operators import count_events
from holdfast.ops.choose_scale.torch_op import choose_scale
from holdfast.ops.dynamic_fake_quantize.torch_op import dynamic_fake_quantize
from holdfast.ops.fake_quantize.plan import FakeQuantizeDescriptor, SteKind, estimator, refused_learning
from holdfast.ops.fake_quantize.torch_op import checked_factor, fake_quantize


class FakeQuantize(ScaleUpdates):
    """Fake quantization with a scale that is observed, fixed or learned.

    ``dtype`` is the format of the codes, or ``q_min`` and ``q_max`` are their range. The default is int8.
    ``ste`` is the straight-through estimator of the gradient. ``mode`` selects the source of the scale:

    - "ema": ``scale`` is a moving average of the scales of the training batches, where a new batch has the
      weight ``momentum``. The first batch sets it. A batch with NaN or infinity is rejected: only the count
      ``rejected_batches`` changes. With ``symmetric=False`` the lower end of the range is averaged, too, and
      determines ``zero_point``.
    - "per_batch": ``choose_scale`` computes the scale of every batch, also in evaluation. There is no state.
      Without a reduction over processes, this is one pass of ``dynamic_fake_quantize``.
    - "fixed": ``scale`` and ``zero_point`` are arguments.
    - "learned": ``scale`` is a parameter, and with ``symmetric=False`` so is ``zero_point``. Without an
      argument ``scale``, the first training batch initializes them (``lsq_init``, or its range). Gradients of
      both are multiplied by ``grad_factor``. The default "lsq" is the factor of the LSQ paper,
      1 / sqrt(n * q_max), where n elements share a scale. The function ``hf.fake_quantize`` has the default
      1, the plain derivative. The other modes do not use ``grad_factor``.

    A learned scale stays positive: quantization uses ``max(scale, scale_floor)``. The floor is 1/64 of the
    scale that the first batch sets, and 1e-12 if the scale is an argument. Below the floor the gradient is
    made negative, so that the scale rises again. ``floor_events`` counts how often the floor was used, over
    all training batches. ``positive=False`` uses the parameter as it is.

    With ``scale_dtype`` (torch.float32, bfloat16 or float16) the scale is rounded to the dtype in which it
    will be stored, before it is used. The gradient passes the rounding unchanged. The state is not rounded.

    State changes in training mode only, and not while the module is frozen. The observer and the quantization
    can be switched off separately, for example to calibrate. If ``torch.distributed`` is initialized, the
    ranges of all processes are reduced during training, so that every process has the scale of the whole
    batch. In mode "per_batch", scales per token or group are not reduced. A learned scale starts with that of
    the first process that has data. These collectives require that all processes call the module in training
    mode equally often. If a process waits until its group times out, it raises ``CollectiveFailed``.

    The first batch determines the shape of the state, unless ``scale_shape`` is given. Learned scales per
    channel, token or group need ``scale_shape`` or ``scale``, since the optimizer must see their shape before
    the first batch. ``scale_shape=(1,)`` makes the scale of a whole tensor a vector, which ``fully_shard`` of
    FSDP requires. State stays in float32 if the module is cast to a narrower dtype.

    Recomputation by activation checkpointing uses the scales of the first run and does not change the state.

    >>> import torch, holdfast as hf
    >>> quantizer = hf.nn.FakeQuantize(dtype=torch.int4, momentum=0.5)
    >>> for batch in (torch.tensor([7.0, -3.0]), torch.tensor([21.0, 0.0])):
    ...     _ = quantizer(batch)
    >>> quantizer.scale
    tensor(2.)
    >>> quantizer.eval()(torch.tensor([3.1, 99.0]))
    tensor([ 4., 14.])
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        q_min: int | None = None,
        q_max: int | None = None,
        granularity: Granularity = ONE_SCALE,
        ste: SteKind | str = SteKind.IN_RANGE,
        symmetric: bool = True,
        narrow: bool | None = None,
        mode: ScaleMode | str = ScaleMode.EMA,
        momentum: float = 0.1,
        scale: torch.Tensor | float | None = None,
        zero_point: torch.Tensor | float | None = None,
        scale_shape: Sequence[int] | None = None,
        grad_factor: float | Literal["lsq"] = "lsq",
        positive: bool = True,
        scale_dtype: torch.dtype | None = None,
        process_group: Group = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        validate_granularity(granularity)
        granularity.require_numbers()
        require_bool("symmetric", symmetric)
        if narrow is not None:
            require_bool("narrow", narrow)
        if dtype is None and q_min is None and q_max is None:
            dtype = torch.int8
        codes = FakeQuantizeDescriptor(shape=(), dtype=dtype, q_min=q_min, q_max=q_max)
        codes.validate()
        self.dtype, self.q_min, self.q_max = dtype, q_min, q_max
        self.granularity, self.ste = granularity, estimator(ste)
        self.symmetric, self.narrow = symmetric, narrow
        self.mode, self.momentum = checked_name("mode", mode, ScaleMode), checked_momentum(momentum)
        self.grad_factor = grad_factor if grad_factor == "lsq" else checked_factor(grad_factor)
        require_bool("positive", positive)
        self.positive, self.scale_dtype = positive, checked_scale_dtype(scale_dtype)
        self.process_group = checked_group(process_group)
        self.frozen, self.observes, self.quantizes = False, True, True
        if codes.codes.is_float and self.mode is ScaleMode.LEARNED:
            raise InvalidArgs(refused_learning(codes.codes))
        self._code_range = codes.code_range
        self._ends = self._validated_ends(codes.codes)
        self._new_identity()
        with outside_inference_mode():
            shape = checked_shape(scale_shape, granularity)
            self._make_state(scale, zero_point, shape, checked_device(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize ``x``. Returns ``x`` if quantization is switched off."""
        require_tensor("x", x)
        if self.mode is ScaleMode.PER_BATCH and not self.quantizes:
            return x
        if (
            self.mode is ScaleMode.PER_BATCH
            and self.scale_dtype is None
            and x.numel()
            and not self._reduces_range()
        ):
            return dynamic_fake_quantize(
                x, dtype=self.dtype, q_min=self.q_min, q_max=self.q_max, granularity=self.granularity,
                ste=self.ste, symmetric=self.symmetric, narrow=self.narrow,
            )  # fmt: skip
        scale, zero_point = self._scale_for(x)
        if not self.quantizes or (not x.numel() and not self._is_set):
            return x
        return fake_quantize(
            x, self._in_use(scale), zero_point, dtype=self.dtype, q_min=self.q_min, q_max=self.q_max,
            granularity=self.granularity, ste=self.ste,
            grad_factor=self.grad_factor if self.mode is ScaleMode.LEARNED else 1.0,
        )  # fmt: skip

    def _in_use(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale to quantize with. In training, counts the scales that the floor holds."""
        floor = self._floor()
        if floor is not None and self.training and not self.frozen:
            if torch.compiler.is_compiling():
                held = (scale.detach() < floor).sum()
                self.floor_events.copy_(count_events(self._handle, "floor", self.floor_events, held)[0])
            elif not in_backward():
                self.floor_events.add_((scale.detach() < floor).sum())
        return scale_in_use(scale, floor, self.scale_dtype)

    def _floor(self) -> torch.Tensor | None:
        """The floor of a learned scale; None in other modes."""
        if not self.positive or self.mode is not ScaleMode.LEARNED:
            return None
        return self.scale_floor.clone() if self._starts_later() else self.scale_floor

    @torch.no_grad()
    def evaluation_scale(self, x: torch.Tensor | None = None) -> Used:
        """The scale and zero point with which evaluation quantizes ``x``. Changes no state.

        Only mode "per_batch" reads ``x``. Sharded state is gathered, so every process must call this.
        """
        zero_point: torch.Tensor | None = None
        if self.mode is not ScaleMode.PER_BATCH:
            self._require_scale()
            scale = full_tensor(self.scale)
            zero_point = None if self.zero_point is None else full_tensor(self.zero_point)
        else:
            require_tensor("x", x)
            assert x is not None
            rule = {"granularity": self.granularity, **self._scale_arguments()}
            if self.symmetric:
                scale = choose_scale(x, **rule)
            else:
                scale, zero_point = choose_scale(x, symmetric=False, **rule)
        return scale_in_use(scale, self._floor(), self.scale_dtype), zero_point

    def reset_parameters(self) -> None:
        """Reset the state to that of a new module: no scale, or the scale given to the constructor.

        Call it after ``to_empty()``, which leaves memory uninitialized, or load a state_dict. State that is
        moved from the meta device is reset automatically. Switches such as ``frozen`` do not change.
        """
        self._reset()

    def freeze(self) -> None:
        """Keep the scale constant in training. A learned scale no longer requires a gradient."""
        self.frozen = True
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)

    def unfreeze(self) -> None:
        """Let training change the scale again."""
        self.frozen = False
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(True)

    def enable_observer(self, enabled: bool = True) -> None:
        """Let training batches change the state, or not if ``enabled`` is False."""
        require_bool("enabled", enabled)
        self.observes = enabled

    def disable_observer(self) -> None:
        """Stop batches from changing the state."""
        self.enable_observer(False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Quantize, or return the input unchanged if ``enabled`` is False."""
        require_bool("enabled", enabled)
        self.quantizes = enabled

    def disable_fake_quant(self) -> None:
        """Return the input unchanged. Training batches still change the state."""
        self.enable_fake_quant(False)

    def get_extra_state(self) -> torch.Tensor:
        """The switches frozen, observes and quantizes, for the state_dict."""
        switches = [self.frozen, self.observes, self.quantizes]
        return torch.tensor(switches, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        frozen, self.observes, self.quantizes = checked_switches(state)
        if frozen != self.frozen:
            self.freeze() if frozen else self.unfreeze()

    def report(self) -> dict[str, Any]:
        """A summary of the state. Synchronizes with the device.

        A sharded scale is gathered, so every process must call it.
        """
        found: dict[str, Any] = {"mode": str(self.mode), "is_set": self._has_scale(), "frozen": self.frozen}
        if self.mode is not ScaleMode.PER_BATCH and self.scale.numel():
            scale = scale_in_use(full_tensor(self.scale.detach()), self._floor(), self.scale_dtype)
            found |= {"least_scale": float(scale.min()), "largest_scale": float(scale.max())}
        for name in COUNTS:
            if name in self._buffers:
                found[name] = int(self._buffers[name])  # type: ignore[arg-type]
        return found

    def extra_repr(self) -> str:
        codes = str(self.dtype) if self.dtype else f"{self.q_min} to {self.q_max}"
        parts = [codes, str(self.mode), str(self.granularity), f"ste={self.ste}"]
        parts += [] if self.symmetric else ["symmetric=False"]
        parts += [f"momentum={self.momentum}"] if self.mode is ScaleMode.EMA else []
        parts += [] if self.positive else ["positive=False"]
        parts += [] if self.scale_dtype is None else [f"scale_dtype={self.scale_dtype}"]
        parts += ["frozen"] if self.frozen else []
        rejected = self._buffers.get("rejected_batches")
        if rejected is not None and rejected.device.type == "cpu" and int(rejected):
            parts.append(f"rejected_batches={int(rejected)}")
        return ", ".join(parts)
