"""A module that fake-quantizes with a scale that it finds, keeps or learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from holdfast.core.checks import require_bool, require_tensor
from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import ONE_SCALE, Granularity, validate_granularity
from holdfast.nn.argument_checks import (
    checked_device,
    checked_group,
    checked_momentum,
    checked_name,
    checked_shape,
    checked_switches,
)
from holdfast.nn.collectives import Group
from holdfast.nn.scale_mode import ScaleMode
from holdfast.nn.scale_state import outside_inference_mode
from holdfast.nn.scale_updates import ScaleUpdates
from holdfast.nn.sharded import full_tensor
from holdfast.ops.fake_quantize.plan import FakeQuantizeDescriptor, SteKind, estimator, refused_learning
from holdfast.ops.fake_quantize.torch_op import checked_factor, fake_quantize


class FakeQuantize(ScaleUpdates):
    """``fake_quantize`` with a scale that it finds, keeps or learns.

    ``dtype`` names the format of the codes, or ``q_min`` and ``q_max`` give their range. If none of the three
    is given, the codes are int8. ``ste`` is the estimator of the gradient. ``mode`` says where the
    scale comes from:

    - "ema": the scale of each training batch is blended into ``scale`` with the weight ``momentum``; the
      first batch sets it. A batch with NaN or infinity in it changes nothing, and is counted in
      ``rejected_batches``. With ``symmetric=False`` the lower end of the range is blended as well, and
      ``zero_point`` follows from it.
    - "per_batch": every batch has the scale that ``choose_scale`` finds in it, in evaluation too. There is no
      state, so nothing to freeze.
    - "fixed": ``scale`` and ``zero_point`` as given.
    - "learned": ``scale`` is a parameter, and with ``symmetric=False`` so is ``zero_point``. Learning begins
      with what the first training batch suggests (``lsq_init``, or its range), unless ``scale`` is given.
      Gradients of both are multiplied by ``grad_factor``. The default here is "lsq", the factor of the LSQ
      paper, 1 / sqrt(n * q_max), where n elements share a scale. The default of the function
      ``hf.fake_quantize`` is 1, the plain derivative. The other modes do not use it.

    State changes in training mode only, and not while it is frozen. Observing and quantizing are switched on
    and off on their own, for example to calibrate. Where ``torch.distributed`` is initialised, the ranges of
    all processes are joined while training, so that each has the scale of the whole batch; only scales that
    belong to tokens or groups of one batch stay apart. A learned scale begins as on the first process that
    has a batch. Processes wait for each other there: all of them must run the module in training mode, the
    same number of times. A process that is alone raises ``CollectiveFailed`` when its group times out.

    The shape of the state follows from the first batch, or from ``scale_shape``. A parameter needs it from
    the start, for the optimizer to see. ``scale_shape=(1,)`` keeps the one scale of a tensor in a vector, as
    ``fully_shard`` of FSDP needs it. State stays in float32 when the module is cast to a narrower type.

    What activation checkpointing runs again uses the scales of the first run, and changes no state.

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
        process_group: Group = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        validate_granularity(granularity)
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
        """Quantize and dequantize ``x``. If quantizing is switched off, ``x`` is returned."""
        require_tensor("x", x)
        if self.mode is ScaleMode.PER_BATCH and not self.quantizes:
            return x
        scale, zero_point = self._scale_for(x)
        if not self.quantizes or (not x.numel() and not self._is_set):
            return x
        return fake_quantize(
            x, scale, zero_point, dtype=self.dtype, q_min=self.q_min, q_max=self.q_max,
            granularity=self.granularity, ste=self.ste,
            grad_factor=self.grad_factor if self.mode is ScaleMode.LEARNED else 1.0,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Set the state as the constructor does: no scale, or the scale that was given.

        ``to_empty()`` leaves memory without values: call this after it, or load a state_dict. State that
        comes from the meta device is reset without a call. The switches, such as ``frozen``, stay.
        """
        self._reset()

    def freeze(self) -> None:
        """Keep the scale, in training too. A learned scale no longer requires a gradient."""
        self.frozen = True
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)

    def unfreeze(self) -> None:
        """Let the scale change again."""
        self.frozen = False
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(True)

    def enable_observer(self, enabled: bool = True) -> None:
        """Let training batches change the state; not if ``enabled`` is False."""
        require_bool("enabled", enabled)
        self.observes = enabled

    def disable_observer(self) -> None:
        """Let no batch change the state."""
        self.enable_observer(False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Quantize; if ``enabled`` is False, pass the input on."""
        require_bool("enabled", enabled)
        self.quantizes = enabled

    def disable_fake_quant(self) -> None:
        """Pass the input on. Training batches still change the state."""
        self.enable_fake_quant(False)

    def get_extra_state(self) -> torch.Tensor:
        """The switches, for the state_dict."""
        switches = [self.frozen, self.observes, self.quantizes]
        return torch.tensor(switches, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        frozen, self.observes, self.quantizes = checked_switches(state)
        if frozen != self.frozen:
            self.freeze() if frozen else self.unfreeze()

    def report(self) -> dict[str, Any]:
        """A summary of the state. This waits for the device.

        A sharded scale is gathered: every process must call this.
        """
        found: dict[str, Any] = {"mode": str(self.mode), "is_set": self._has_scale(), "frozen": self.frozen}
        if self.mode is not ScaleMode.PER_BATCH and self.scale.numel():
            scale = full_tensor(self.scale.detach())
            found |= {"least_scale": float(scale.min()), "largest_scale": float(scale.max())}
        if "rejected_batches" in self._buffers:
            found["rejected_batches"] = int(self.rejected_batches)
        return found

    def extra_repr(self) -> str:
        codes = str(self.dtype) if self.dtype else f"{self.q_min} to {self.q_max}"
        parts = [codes, str(self.mode), str(self.granularity), f"ste={self.ste}"]
        parts += [] if self.symmetric else ["symmetric=False"]
        parts += [f"momentum={self.momentum}"] if self.mode is ScaleMode.EMA else []
        parts += ["frozen"] if self.frozen else []
        rejected = self._buffers.get("rejected_batches")
        if rejected is not None and rejected.device.type == "cpu" and int(rejected):
            parts.append(f"rejected_batches={int(rejected)}")
        return ", ".join(parts)
