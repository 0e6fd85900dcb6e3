"""A module that fake-quantizes, and holds the scale that it does it with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Literal, Self

import torch

from holdfast.core.descriptor import whole_numbers
from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import ONE_SCALE, Granularity, PerChannel, PerTensor, validate_granularity
from holdfast.nn.joined_range import Group, first_of, joined_range, processes
from holdfast.nn.moving_average import blend_scale, blend_scale_affine
from holdfast.ops.affine.torch_op import require_tensor
from holdfast.ops.choose_scale.plan import ScaleOfData
from holdfast.ops.choose_scale.torch_op import choose_scale, observe_range, scale_of_range
from holdfast.ops.fake_quantize.plan import FakeQuantizeDescriptor, SteKind, estimator
from holdfast.ops.fake_quantize.torch_op import checked_factor, fake_quantize
from holdfast.ops.lsq_init.torch_op import lsq_init


class ScaleMode(StrEnum):
    """Where the scale comes from."""

    #: From each batch alone, in training and in evaluation.
    PER_BATCH = "per_batch"
    #: From a moving average of the scales of training batches.
    EMA = "ema"
    #: From the caller.
    FIXED = "fixed"
    #: From an optimizer: the scale is a parameter that begins with what the first batch suggests.
    LEARNED = "learned"


#: A scale, the lower end of the range that it is for, and a zero point; those that there are.
Observed = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

#: The shape of state that waits for the first batch.
_UNKNOWN = (0,)


class FakeQuantize(torch.nn.Module):
    """``fake_quantize`` with a scale that it finds, keeps or learns.

    ``dtype`` names the codes (int8 if nothing is said), or ``q_min`` and ``q_max`` give their range; ``ste``
    is the estimator of the gradient. ``mode`` says where the scale comes from:

    - "ema": the scale of each training batch is blended into ``scale`` with the weight ``momentum``; the
      first batch sets it. A batch with NaN or infinity in it changes nothing, and is counted in
      ``rejected_batches``. With ``symmetric=False`` the lower end of the range is blended as well, and
      ``zero_point`` follows from it.
    - "per_batch": every batch has the scale that ``choose_scale`` finds in it, in evaluation too. There is no
      state, so nothing to freeze.
    - "fixed": ``scale`` and ``zero_point`` as given.
    - "learned": ``scale`` is a parameter, and with ``symmetric=False`` so is ``zero_point``. Learning begins
      with what the first training batch suggests (``lsq_init``, or its range), unless ``scale`` is given.

    State changes in training mode only, and not while it is frozen. Observing and quantizing are switched on
    and off on their own, for example to calibrate. Where ``torch.distributed`` is initialised, the ranges of
    all processes are joined while training, so that each has the scale of the whole batch; only scales that
    belong to tokens or groups of one batch stay apart. A learned scale begins as on the first process.

    The shape of the state follows from the first batch, or from ``scale_shape``. A parameter needs it from
    the start, for the optimizer to see. State stays in float32 when the module is cast to a narrower type.

    >>> import torch, holdfast as hf
    >>> quantizer = hf.nn.FakeQuantize(dtype=torch.int4, momentum=0.5)
    >>> for batch in (torch.tensor([7.0, -3.0]), torch.tensor([21.0, 0.0])):
    ...     _ = quantizer(batch)
    >>> quantizer.scale
    tensor(2.)
    >>> quantizer.eval()(torch.tensor([3.1, 99.0]))
    tensor([ 4., 14.])
    """

    scale: torch.Tensor
    low: torch.Tensor
    zero_point: torch.Tensor | None
    rejected_batches: torch.Tensor

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
        if dtype is None and q_min is None and q_max is None:
            dtype = torch.int8
        codes = FakeQuantizeDescriptor(shape=(), dtype=dtype, q_min=q_min, q_max=q_max)
        codes.validate()
        self.dtype, self.q_min, self.q_max = dtype, q_min, q_max
        self.granularity, self.ste = granularity, estimator(ste)
        self.symmetric, self.narrow = symmetric, narrow
        self.mode, self.momentum = _mode(mode), _weight(momentum)
        self.grad_factor = grad_factor if grad_factor == "lsq" else checked_factor(grad_factor)
        self.process_group = process_group
        self.frozen, self.observes, self.quantizes = False, True, True
        self._code_range = codes.code_range
        self._ends = self._validated_ends()
        self._make_state(scale, zero_point, scale_shape, device)

    def _validated_ends(self) -> tuple[int, int]:
        """The codes that a scale from the data may use; refused where there is to be one and cannot be."""
        rule = ScaleOfData(symmetric=self.symmetric, narrow=self.narrow)
        if self.mode in (ScaleMode.PER_BATCH, ScaleMode.EMA) or not self.symmetric:
            rule.validate_ends(*self._code_range)
        return rule.ends(*self._code_range)

    def _make_state(self, scale: Any, zero_point: Any, shape: Any, device: Any) -> None:
        mode, given = self.mode, scale is not None
        if given and mode in (ScaleMode.PER_BATCH, ScaleMode.EMA):
            raise InvalidArgs(f"scale is given, but mode {mode} finds it in the data; leave it out.")
        if not given and mode is ScaleMode.FIXED:
            raise InvalidArgs("mode fixed has no scale; pass scale=, a number or a tensor.")
        if zero_point is not None and (not given or (self.symmetric and mode is ScaleMode.LEARNED)):
            raise InvalidArgs(
                "zero_point is given and cannot be used; it goes with scale= in mode fixed, and in mode "
                "learned with symmetric=False."
            )
        self._is_set = given or mode is ScaleMode.PER_BATCH
        if mode is ScaleMode.PER_BATCH:
            return
        if given:
            start = self._spread(_positive(_tensor("scale", scale, device)), shape)
        else:
            start = torch.full(self._known_shape(shape), float("nan"), dtype=torch.float32, device=device)
        if mode is ScaleMode.LEARNED:
            self.register_parameter("scale", torch.nn.Parameter(start))
            learned = None
            if not self.symmetric:
                zeros = _tensor("zero_point", 0.0 if zero_point is None else zero_point, device)
                learned = torch.nn.Parameter(self._spread(zeros.to(start.dtype), start.shape))
            self.register_parameter("zero_point", learned)
        else:
            kept = None
            if zero_point is not None:
                kept = self._spread(_tensor("zero_point", zero_point, device, torch.int32), start.shape)
            if mode is ScaleMode.EMA and not self.symmetric:
                kept = torch.zeros_like(start, dtype=torch.int32)
                self.register_buffer("low", start.clone())
            self.register_buffer("scale", start)
            self.register_buffer("zero_point", kept)
        if mode is not ScaleMode.FIXED:
            self.register_buffer("rejected_batches", torch.zeros((), dtype=torch.int64, device=device))

    def _spread(self, given: torch.Tensor, shape: Any) -> torch.Tensor:
        """What was given, one for each scale."""
        if shape is None and not given.dim() and not isinstance(self.granularity, PerTensor):
            raise InvalidArgs(
                f"scale is one number, and {self.granularity} takes one for each of its scales; pass a "
                "tensor of them, or scale_shape=."
            )
        shape = tuple(given.shape if shape is None else shape)
        if given.dim() and tuple(given.shape) != shape:
            raise InvalidArgs(f"a value of shape {tuple(given.shape)} is given for scales of shape {shape}.")
        return given.expand(shape).clone()

    def _known_shape(self, shape: Any) -> tuple[int, ...]:
        if shape is not None:
            return whole_numbers("scale_shape", shape, (64,))
        if isinstance(self.granularity, PerTensor):
            return ()
        if self.mode is ScaleMode.LEARNED:
            raise InvalidArgs(
                f"the shape of the scales of {self.granularity} is not known before the first batch, and an "
                "optimizer must see them before; pass scale_shape=, for example (64,), or scale=."
            )
        return _UNKNOWN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as it is after quantizing and dequantizing; ``x`` itself where that is switched off."""
        require_tensor("x", x)
        # A batch of nothing says nothing; but other processes may wait for this one.
        tells = x.numel() > 0 or processes(self.process_group) > 1
        learns = self.training and self.observes and not self.frozen and tells
        zero_point: torch.Tensor | None
        if self.mode is ScaleMode.PER_BATCH:
            if not self.quantizes:
                return x
            scale, _, zero_point = self._observe(x)
        elif self.mode is ScaleMode.EMA and learns:
            scale, zero_point = self._blend(x)
        else:
            if self.mode is ScaleMode.LEARNED and learns and not self._is_set:
                self._begin(x)
            elif self.quantizes and not self._is_set and x.numel():
                raise InvalidArgs(
                    "this FakeQuantize has seen no training batch, so it has no scale; train it or load its "
                    "state first, or call disable_fake_quant()."
                )
            scale, zero_point = self._kept(x)
        if not self.quantizes or (not self._is_set and not x.numel()):
            return x
        return fake_quantize(
            x, scale, zero_point, dtype=self.dtype, q_min=self.q_min, q_max=self.q_max,
            granularity=self.granularity, ste=self.ste,
            grad_factor=self.grad_factor if self.mode is ScaleMode.LEARNED else 1.0,
        )  # fmt: skip

    def _kept(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The state, for a backward that may come after the next update."""
        if self.mode is not ScaleMode.EMA or not (torch.is_grad_enabled() and x.requires_grad):
            return self.scale, self.zero_point
        return self.scale.clone(), None if self.zero_point is None else self.zero_point.clone()

    def _rule(self) -> dict[str, Any]:
        """What choose_scale and scale_of_range are told of the codes; a bare range is carried by a float."""
        codes = self.dtype or torch.float32
        return {"dtype": codes, "q_min": self.q_min, "q_max": self.q_max, "narrow": self.narrow}

    def _observe(self, x: torch.Tensor) -> Observed:
        """The scale of this batch; while training, of all of it."""
        rule = self._rule()
        joins = self.mode is ScaleMode.EMA or isinstance(self.granularity, (PerTensor, PerChannel))
        together = self.training and joins and processes(self.process_group) > 1
        if not together and self.symmetric:
            return choose_scale(x, granularity=self.granularity, **rule), None, None
        if not together and self.mode is ScaleMode.PER_BATCH:
            scale, zero_point = choose_scale(x, granularity=self.granularity, symmetric=False, **rule)
            return scale, None, zero_point
        low, high = observe_range(x, granularity=self.granularity)
        if together:
            low, high = joined_range(low, high, self.process_group)
        if self.symmetric:
            return scale_of_range(low, high, **rule), low, None
        scale, zero_point = scale_of_range(low, high, symmetric=False, **rule)
        return scale, low, zero_point

    def _blend(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Let the state move towards this batch; the new state, apart from where it is kept."""
        observed, observed_low, zero_point = self._observe(x)
        self._fit(observed.shape)
        if self.symmetric:
            scale, rejected = blend_scale(self.scale, self.rejected_batches, observed, self.momentum)
        else:
            assert observed_low is not None and self.zero_point is not None
            scale, low, zero_point, rejected = blend_scale_affine(
                self.scale, self.low, self.rejected_batches, observed, observed_low, self.momentum, self._ends
            )
            self.low.copy_(low)
            self.zero_point.copy_(zero_point)
        if not torch.compiler.is_compiling() and rejected.device.type == "cpu":
            self._warn_of(int(rejected) - int(self.rejected_batches))
        self.scale.copy_(scale)
        self.rejected_batches.copy_(rejected)
        self._is_set = True
        return scale, zero_point

    def _fit(self, shape: torch.Size) -> None:
        """Give the state the shape of the first batch's scales; refuse another one later."""
        if self.scale.shape == shape:
            return
        if tuple(self.scale.shape) != _UNKNOWN:
            raise InvalidArgs(
                f"this batch has scales of shape {tuple(shape)}, and the state has "
                f"{tuple(self.scale.shape)}; scales that are kept must not depend on the size of the batch. "
                "Use another granularity, or mode per_batch."
            )
        self._resize(tuple(shape))

    def _resize(self, shape: tuple[int, ...]) -> None:
        self.scale = self.scale.new_full(shape, float("nan"))
        if self.zero_point is not None:
            self.zero_point = self.zero_point.new_zeros(shape)
            self.low = self.low.new_full(shape, float("nan"))

    @torch.no_grad()
    def _begin(self, x: torch.Tensor) -> None:
        """Set the parameters to what the first batch suggests.

        It is read whether that is finite, once, where nothing forbids to wait for the device; a batch that
        suggests nothing is rejected, and the next one may.
        """
        zero_point = None
        if self.symmetric:
            scale = lsq_init(
                x, dtype=self.dtype, q_min=self.q_min, q_max=self.q_max, granularity=self.granularity
            )
        else:
            scale, zero_point = choose_scale(x, granularity=self.granularity, symmetric=False, **self._rule())
        self._fit(scale.shape)
        if processes(self.process_group) > 1:
            scale = first_of(scale, self.process_group)
            zero_point = None if zero_point is None else first_of(zero_point, self.process_group)
        if _may_wait(x) and not bool(scale.isfinite().all()):
            self.rejected_batches.add_(1)
            self._warn_of(1)
            return
        self.scale.copy_(scale)
        if zero_point is not None and self.zero_point is not None:
            self.zero_point.copy_(zero_point)
        self._is_set = True

    def _warn_of(self, rejected: int) -> None:
        if rejected:
            warnings.warn(
                "a batch with NaN or infinity in it was rejected: the scale stays as it was. "
                "rejected_batches counts them.",
                RuntimeWarning,
                stacklevel=4,
            )

    def freeze(self) -> None:
        """Keep the scale as it is, in training too; a learned one no longer requires a gradient."""
        self.frozen = True
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)

    def unfreeze(self) -> None:
        """Let the scale change again."""
        self.frozen = False
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(True)

    def enable_observer(self, enabled: bool = True) -> None:
        """Let training batches change the state, or not."""
        self.observes = bool(enabled)

    def disable_observer(self) -> None:
        """Let no batch change the state."""
        self.enable_observer(False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Quantize, or pass the input on."""
        self.quantizes = bool(enabled)

    def disable_fake_quant(self) -> None:
        """Pass the input on; the state may change all the same."""
        self.enable_fake_quant(False)

    def report(self) -> dict[str, Any]:
        """How the state is, read from the device: this waits for it."""
        found: dict[str, Any] = {"mode": str(self.mode), "is_set": self._is_set, "frozen": self.frozen}
        if self.mode is not ScaleMode.PER_BATCH and self.scale.numel():
            scale = self.scale.detach()
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

    def get_extra_state(self) -> torch.Tensor:
        """The switches, so that a training that is resumed goes on as it was."""
        switches = [self.frozen, self.observes, self.quantizes]
        return torch.tensor(switches, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        frozen, self.observes, self.quantizes = (bool(switch) for switch in state.tolist())
        if frozen != self.frozen:
            self.freeze() if frozen else self.unfreeze()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        kept = state_dict.get(f"{prefix}scale")
        if self.mode is ScaleMode.EMA and isinstance(kept, torch.Tensor):
            shape, own = tuple(kept.shape), tuple(self.scale.shape)
            if shape != own and _UNKNOWN in (shape, own):
                self._resize(shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if isinstance(kept, torch.Tensor) and self.mode in (ScaleMode.EMA, ScaleMode.LEARNED):
            known = self.scale.detach()
            self._is_set = known.is_meta or (known.numel() > 0 and not bool(known.isnan().all()))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move and cast; but state stays as wide as float32, since small scales would vanish."""
        state = {**self._parameters, **self._buffers}
        before = {name: tensor.detach() for name, tensor in state.items() if tensor is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            now = getattr(self, name)
            if now.is_floating_point() and now.element_size() < 4 <= old.element_size():
                wide = old.to(now.device)
                if isinstance(now, torch.nn.Parameter):
                    now.data = wide
                    if now.grad is not None:
                        now.grad = now.grad.to(wide.dtype)
                else:
                    setattr(self, name, wide)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, is of the default group: a group of processes cannot be copied."""
        return {**self.__dict__, "process_group": None}


def _mode(mode: Any) -> ScaleMode:
    try:
        return ScaleMode(mode)
    except ValueError:
        accepted = ", ".join(repr(str(known)) for known in ScaleMode)
        raise InvalidArgs(f"mode is {mode!r}; accepted are {accepted}.") from None


def _weight(momentum: Any) -> float:
    if not isinstance(momentum, (int, float)) or not 0 < momentum <= 1:
        raise InvalidArgs(
            f"momentum is {momentum!r}; it is the weight of a new batch, above 0 and at most 1, such as 0.1."
        )
    return float(momentum)


def _tensor(name: str, value: Any, device: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of one's own from what the caller gave; a scale is float32 unless it is float64."""
    if not isinstance(value, (torch.Tensor, int, float)) or isinstance(value, bool):
        raise InvalidArgs(f"{name} is a {type(value).__name__}; it must be a number or a tensor.")
    made = torch.as_tensor(value)
    if dtype is None:
        wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
    if not dtype.is_floating_point and made.is_floating_point():
        raise InvalidArgs(f"{name} is {made.dtype}; in mode fixed it is an integer.")
    return made.detach().to(device=device, dtype=dtype, copy=True)


def _positive(scale: torch.Tensor) -> torch.Tensor:
    """A scale that was given; one that is on the host is looked at."""
    if scale.device.type == "cpu" and not bool(((scale > 0) & scale.isfinite()).all()):
        raise InvalidArgs(f"scale is {scale.tolist()}; a scale must be positive and finite.")
    return scale


def _may_wait(x: torch.Tensor) -> bool:
    """Whether the host may read what the device has computed."""
    if torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
