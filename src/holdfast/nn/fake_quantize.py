"""A module that fake-quantizes, and holds the scale that it does it with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self

import torch

from holdfast.core.checks import require_bool, require_tensor
from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import ONE_SCALE, Granularity, PerChannel, PerTensor, validate_granularity
from holdfast.nn.checked import (
    check_loaded,
    checked_device,
    checked_group,
    checked_name,
    checked_scale,
    checked_shape,
    checked_switches,
    checked_tensor,
    checked_weight,
    checked_zero_point,
)
from holdfast.nn.compiled_state import new_handle, settle, start_learning
from holdfast.nn.joined_range import Group, first_of, joined_range, processes
from holdfast.nn.moving_average import blend_scale, blend_scale_affine
from holdfast.nn.recomputation import Used, current_pass, in_backward
from holdfast.nn.sharded import is_sharded, whole, write_shard
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


class Observed(NamedTuple):
    """What a batch says."""

    scale: torch.Tensor
    #: The lower end of the range that the scale is for, where it is known.
    low: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    #: Whether any process had a batch; None in one process.
    told: torch.Tensor | None = None


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
    belong to tokens or groups of one batch stay apart. A learned scale begins as on the first process that
    has a batch. Processes wait for each other there: all of them must run the module in training mode, the
    same number of times, or the one that does waits until the process group times out.

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
        self.mode, self.momentum = checked_name("mode", mode, ScaleMode), checked_weight(momentum)
        self.grad_factor = grad_factor if grad_factor == "lsq" else checked_factor(grad_factor)
        self.process_group = checked_group(process_group)
        self.frozen, self.observes, self.quantizes = False, True, True
        self._code_range = codes.code_range
        self._ends = self._validated_ends()
        self._identify()
        with _lasting():
            shape = checked_shape(scale_shape, granularity)
            self._make_state(scale, zero_point, shape, checked_device(device))

    def _identify(self) -> None:
        """Be known to graphs and checkpoints, as no other module is; nothing is sharded yet."""
        self._handle = new_handle(self)
        self._key = int(self._handle)
        self._shards: dict[str, Any] = {}
        self._changed: list[Any] = []

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
        #: Whether there is a scale; None where only the device knows.
        self._is_set: bool | None = given or mode is ScaleMode.PER_BATCH
        if mode is ScaleMode.PER_BATCH:
            return
        if given:
            start = self._spread(checked_scale(checked_tensor("scale", scale, device)), shape)
        else:
            start = torch.full(self._known_shape(shape), float("nan"), dtype=torch.float32, device=device)
        if mode is ScaleMode.LEARNED:
            self.register_parameter("scale", torch.nn.Parameter(start))
            learned = None
            if not self.symmetric:
                zeros = checked_tensor("zero_point", 0.0 if zero_point is None else zero_point, device)
                zeros = checked_zero_point(zeros.to(start.dtype))
                learned = torch.nn.Parameter(self._spread(zeros, start.shape))
            self.register_parameter("zero_point", learned)
        else:
            kept = None
            if zero_point is not None:
                kept = self._spread(
                    checked_tensor("zero_point", zero_point, device, torch.int32), start.shape
                )
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
        return given.expand(shape).clone(memory_format=torch.contiguous_format)

    def _known_shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        if shape is not None:
            return shape
        if isinstance(self.granularity, PerTensor):
            return ()
        if self.mode is ScaleMode.LEARNED:
            raise InvalidArgs(
                f"the shape of the scales of {self.granularity} is not known before the first batch, and an "
                "optimizer must see them before; pass scale_shape=, for example (64,), or scale=."
            )
        return _UNKNOWN

    def __setattr__(self, name: str, value: Any) -> None:
        """FSDP puts the whole parameter in the place of its shard, and back: the shard stays in sight."""
        if isinstance(value, torch.nn.Parameter):
            before = dict(self.named_parameters(recurse=False, remove_duplicate=False)).get(name)
            if is_sharded(before) and not is_sharded(value):
                self._shards[name] = before
            else:
                self._shards.pop(name, None)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as it is after quantizing and dequantizing; ``x`` itself where that is switched off."""
        require_tensor("x", x)
        if self.mode is ScaleMode.PER_BATCH and not self.quantizes:
            return x
        scale, zero_point = self._found_once(x)
        if not self.quantizes or (not x.numel() and not self._is_set):
            return x
        return fake_quantize(
            x, scale, zero_point, dtype=self.dtype, q_min=self.q_min, q_max=self.q_max,
            granularity=self.granularity, ste=self.ste,
            grad_factor=self.grad_factor if self.mode is ScaleMode.LEARNED else 1.0,
        )  # fmt: skip

    def _found_once(self, x: torch.Tensor) -> Used:
        """The scale and zero point for ``x``; in a pass that a checkpoint runs again, those of the first."""
        if self.mode is ScaleMode.FIXED or (self.mode is ScaleMode.LEARNED and self._is_set):
            return self.scale, self.zero_point
        if torch.compiler.is_compiling() or (self.mode is ScaleMode.PER_BATCH and not self._joins()):
            return self._found(x)  # a graph asks when it runs
        here = current_pass()
        if here.again is not None or in_backward():
            used = here.recall(self._key)
            if used is not None:
                return used
            if self.mode is not ScaleMode.PER_BATCH:
                return self._kept(x)
        scale, zero_point = self._found(x)
        if here.first and self.mode is not ScaleMode.LEARNED:
            if scale is self._buffers.get("scale"):
                scale, zero_point = scale.clone(), None if zero_point is None else zero_point.clone()
            here.keep(self._key, (scale, zero_point))
        return scale, zero_point

    def _found(self, x: torch.Tensor) -> Used:
        """The scale and zero point for ``x``; the state changes where it is to."""
        # A batch of nothing says nothing; but other processes may wait for this one.
        tells = x.numel() > 0 or processes(self.process_group) > 1
        learns = self.training and self.observes and not self.frozen and tells
        if self.mode is ScaleMode.PER_BATCH:
            observed = self._observe(x)
            return observed.scale, observed.zero_point
        if self.mode is ScaleMode.EMA and learns:
            return self._blend(x)
        if self.mode is ScaleMode.LEARNED and learns and not self._is_set:
            self._begin(x)
        elif self.quantizes and x.numel() and not self._has_scale():
            raise InvalidArgs(
                "this FakeQuantize has seen no training batch that it could use, so it has no scale; train "
                "it or load its state first, or call disable_fake_quant()."
            )
        return self._kept(x)

    def _has_scale(self) -> bool:
        """Whether there is a scale. This waits for the device, once, where only that knows."""
        if self._is_set is None and _may_wait(self.scale):
            self._is_set = bool(self.scale.numel()) and not bool(self.scale.isnan().any())
        return self._is_set is not False

    def _kept(self, x: torch.Tensor) -> Used:
        """The state, for a backward that may come after the next update."""
        if self.mode is not ScaleMode.EMA or not (torch.is_grad_enabled() and x.requires_grad):
            return self.scale, self.zero_point
        return self.scale.clone(), None if self.zero_point is None else self.zero_point.clone()

    def _rule(self) -> dict[str, Any]:
        """What choose_scale and scale_of_range are told of the codes; a bare range is carried by a float."""
        codes = self.dtype or torch.float32
        return {"dtype": codes, "q_min": self.q_min, "q_max": self.q_max, "narrow": self.narrow}

    def _joins(self) -> bool:
        """Whether the range of a batch is that of all processes."""
        shared = self.mode is ScaleMode.EMA or isinstance(self.granularity, (PerTensor, PerChannel))
        return self.training and shared and processes(self.process_group) > 1

    def _observe(self, x: torch.Tensor) -> Observed:
        """The scale of this batch; while training, of all of it."""
        rule, joins, told = self._rule(), self._joins(), None
        if not joins and self.symmetric:
            return Observed(choose_scale(x, granularity=self.granularity, **rule))
        if not joins and self.mode is ScaleMode.PER_BATCH:
            scale, zero_point = choose_scale(x, granularity=self.granularity, symmetric=False, **rule)
            return Observed(scale, zero_point=zero_point)
        low, high = observe_range(x, granularity=self.granularity)
        if joins:
            low, high, told = joined_range(low, high, x.numel() > 0, self.process_group)
        if self.symmetric:
            return Observed(scale_of_range(low, high, **rule), low, told=told)
        scale, zero_point = scale_of_range(low, high, symmetric=False, **rule)
        return Observed(scale, low, zero_point, told)

    def _blend(self, x: torch.Tensor) -> Used:
        """Let the state move towards this batch; the new state, apart from where it is kept."""
        observed = self._observe(x)
        self._fit(observed.scale.shape)
        shape = self.scale.shape
        seen, told = observed.scale.reshape(shape), observed.told
        if self.symmetric:
            state = [self.scale, self.rejected_batches]
            blended = [*blend_scale(self.scale, self.rejected_batches, seen, told, self.momentum)]
        else:
            assert observed.low is not None and self.zero_point is not None
            state = [self.scale, self.low, self.zero_point, self.rejected_batches]
            blended = [
                *blend_scale_affine(
                    self.scale, self.low, self.rejected_batches, seen, observed.low.reshape(shape), told,
                    self.momentum, self._ends,
                )
            ]  # fmt: skip
        if torch.compiler.is_compiling():
            # A change that torch sees. It keeps torch from making one graph of a checkpoint around this call,
            # where the second run would begin with the state that the first one left.
            self._changed.clear()
            blended, used = settle(self._handle, state, blended)
        else:
            used = [blended[0], *blended[2:3]] if not self.symmetric else blended[:1]
            self.note_blended(blended[0])
            if blended[-1].device.type == "cpu":
                self._warn_of(int(blended[-1]) - int(self.rejected_batches))
        for kept, new in zip(state, blended, strict=True):
            kept.copy_(new)
        return used[0], None if self.symmetric else used[1]

    def note_blended(self, scale: torch.Tensor) -> None:
        """``scale`` is the state from now on: where that costs nothing, see whether there is one."""
        if not self._is_set:
            self._is_set = None if scale.device.type != "cpu" else not bool(scale.isnan().any())

    def _fit(self, shape: torch.Size) -> None:
        """Give the state the shape of the first batch's scales; refuse another one later."""
        if self.scale.shape == shape or isinstance(self.granularity, PerTensor):
            if self.mode is ScaleMode.EMA:
                self._outlive_inference()
            return
        if tuple(self.scale.shape) != _UNKNOWN:
            raise InvalidArgs(
                f"this batch has scales of shape {tuple(shape)}, and the state has "
                f"{tuple(self.scale.shape)}; scales that are kept must not depend on the size of the batch. "
                "Use another granularity, or mode per_batch."
            )
        self._resize(tuple(shape))

    def _resize(self, shape: tuple[int, ...]) -> None:
        with _lasting():
            self.scale = self.scale.new_full(shape, float("nan"))
            if self.zero_point is not None:
                self.zero_point = self.zero_point.new_zeros(shape)
                self.low = self.low.new_full(shape, float("nan"))

    def _outlive_inference(self) -> None:
        """Buffers that were made in torch.inference_mode, as by ``to``, cannot be written to after it."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_inference():
                self._buffers[name] = buffer.clone()

    @torch.no_grad()
    def _begin(self, x: torch.Tensor) -> None:
        """Set the parameters to what the first batch suggests.

        It is read whether that is finite, once, where nothing forbids to wait for the device; a batch that
        suggests nothing is rejected, and the next one may.
        """
        if not self.scale.is_leaf:
            raise InvalidArgs(
                "the first batch cannot set the scale: it is not a parameter here, but a part or a function "
                "of one, as under FullyShardedDataParallel. Use fully_shard, pass scale=, or run one batch "
                "before."
            )
        start = self._suggested(x)
        self._fit(start[0].shape)
        told = None
        if processes(self.process_group) > 1:
            start, told = first_of(start, x.numel() > 0, self.process_group)
        parameters = [self.scale] if self.zero_point is None else [self.scale, self.zero_point]
        start = [value.to(own.dtype).reshape(own.shape) for own, value in zip(parameters, start, strict=True)]
        if torch.compiler.is_compiling():
            state = [*parameters, self.rejected_batches]
            for kept, new in zip(state, start_learning(self._handle, state, start, told), strict=True):
                kept.copy_(new)
            return
        accepted = self.accepts(start, told)
        if accepted:
            for kept, new in zip(parameters, start, strict=True):
                kept.copy_(new)
            self.note_started(start)
        elif accepted is False:
            self.rejected_batches.add_(1)
            self._warn_of(1)

    def _suggested(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.symmetric:
            codes = {"dtype": self.dtype, "q_min": self.q_min, "q_max": self.q_max}
            return [lsq_init(x, granularity=self.granularity, **codes)]  # type: ignore[arg-type]
        return [*choose_scale(x, granularity=self.granularity, symmetric=False, **self._rule())]

    def accepts(self, start: list[torch.Tensor], told: torch.Tensor | None) -> bool | None:
        """Whether learning may begin with ``start``; None if no process had a batch."""
        if not _may_wait(start[0]):
            return True
        if told is not None and not bool(told):
            return None
        return bool(start[0].isfinite().all())

    def note_started(self, start: list[torch.Tensor]) -> None:
        """Learning begins with ``start``: see that it stays."""
        with torch.no_grad():
            for name, value in zip(("scale", "zero_point"), start, strict=False):
                if name in self._shards:
                    write_shard(self._shards[name], value)
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
        require_bool("enabled", enabled)
        self.observes = enabled

    def disable_observer(self) -> None:
        """Let no batch change the state."""
        self.enable_observer(False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Quantize, or pass the input on."""
        require_bool("enabled", enabled)
        self.quantizes = enabled

    def disable_fake_quant(self) -> None:
        """Pass the input on; the state may change all the same."""
        self.enable_fake_quant(False)

    def report(self) -> dict[str, Any]:
        """How the state is, read from the device: this waits for it.

        A sharded scale is gathered, for which every process must call this.
        """
        found: dict[str, Any] = {"mode": str(self.mode), "is_set": self._has_scale(), "frozen": self.frozen}
        if self.mode is not ScaleMode.PER_BATCH and self.scale.numel():
            scale = whole(self.scale.detach())
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
        frozen, self.observes, self.quantizes = checked_switches(state)
        if frozen != self.frozen:
            self.freeze() if frozen else self.unfreeze()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key, learned = f"{prefix}scale", self.mode is ScaleMode.LEARNED
        check_loaded(state_dict, prefix, learned, may_be_unset=self.mode is not ScaleMode.FIXED)
        kept = state_dict.get(key)
        if self.mode is ScaleMode.EMA and isinstance(kept, torch.Tensor):
            shape, own = tuple(kept.shape), tuple(self.scale.shape)
            if shape != own and _UNKNOWN in (shape, own):
                self._resize(shape)
        if isinstance(self.granularity, PerTensor) and self.mode is not ScaleMode.PER_BATCH:
            state_dict = self._as_one_scale(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if isinstance(kept, torch.Tensor) and self.mode in (ScaleMode.EMA, ScaleMode.LEARNED):
            known = whole(self.scale.detach())
            self._is_set = known.is_meta or (known.numel() > 0 and not bool(known.isnan().all()))

    def _as_one_scale(self, state_dict: Any, prefix: str) -> Any:
        """One scale is the same whether its shape is () or (1,)."""
        found = dict(state_dict)
        for name in ("scale", "low", "zero_point"):
            kept, own = found.get(f"{prefix}{name}"), getattr(self, name, None)
            if isinstance(kept, torch.Tensor) and own is not None and tuple(kept.shape) in ((), (1,)):
                found[f"{prefix}{name}"] = kept.reshape(own.shape)
        return found

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move and cast; but state stays as wide as float32, since small scales would vanish."""
        kept = (self.named_parameters, self.named_buffers)
        state = [named for own in kept for named in own(recurse=False, remove_duplicate=False)]
        before = {name: tensor.detach() for name, tensor in state}
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
        own = ("_handle", "_key", "_shards", "_changed")
        kept = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**kept, "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._identify()


def _lasting() -> AbstractContextManager[Any]:
    """Tensors made here can be written to after torch.inference_mode too."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def _may_wait(x: torch.Tensor) -> bool:
    """Whether the host may read what the device has computed."""
    if torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
