"""The state of a FakeQuantize: create, reset, move, save and load it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import Granularity, PerTensor
from holdfast.nn.argument_checks import (
    COUNTS,
    check_scale_arguments,
    check_state_dict,
    checked_scale,
    checked_tensor,
    checked_zero_point,
)
from holdfast.nn.recomputation import Used
from holdfast.nn.scale_in_use import floor_of
from holdfast.nn.scale_mode import ScaleMode
from holdfast.nn.sharded import fill, full_tensor, is_sharded
from holdfast.ops.choose_scale.plan import SCALE_FLOOR

#: The shape of the state before the first batch determines it.
_UNKNOWN_SHAPE = (0,)
#: Names of the state in the shape of the scales. A zero point is floating if it is learned.
_SCALES = ("scale", "scale_floor", "low", "zero_point")


class ScaleState(torch.nn.Module):
    """The buffers or parameters of a FakeQuantize.

    In mode "learned" ``scale`` and ``zero_point`` are parameters, otherwise buffers. An unset scale is NaN.
    Mode "per_batch" has no state.
    """

    scale: torch.Tensor
    low: torch.Tensor
    zero_point: torch.Tensor | None
    rejected_batches: torch.Tensor
    #: Only in mode "learned".
    scale_floor: torch.Tensor
    floor_events: torch.Tensor

    mode: ScaleMode
    granularity: Granularity
    symmetric: bool
    #: Whether the scale is set; None if the host does not know.
    _is_set: bool | None
    #: Whether the shape of an unset moving average is only expected: the first batch may have another.
    _is_expected_shape: bool = False
    #: Whether ``expect_shape`` has set the shape of a new state.
    _starts_with_expected_shape: bool = False
    #: Whether a collective has run since the last switch between training and evaluation.
    _has_reduced: bool
    #: The shards of parameters that FSDP has replaced by full tensors.
    _shards: dict[str, Any]

    def _make_state(self, scale: Any, zero_point: Any, shape: Any, device: Any) -> None:
        """Register the parameters or buffers of this mode with their initial values."""
        mode, given = self.mode, scale is not None
        check_scale_arguments(mode, self.symmetric, scale, zero_point)
        self._is_set = given or mode is ScaleMode.PER_BATCH
        #: Constructor arguments, for ``reset_parameters``.
        self._given = {"scale": _copied(scale), "zero_point": _copied(zero_point)}
        if mode is ScaleMode.PER_BATCH:
            return
        if given:
            start = self._expanded(checked_scale(checked_tensor("scale", scale, device)), shape)
        else:
            start = torch.full(self._known_shape(shape), float("nan"), dtype=torch.float32, device=device)
        if mode is ScaleMode.LEARNED:
            self.register_parameter("scale", torch.nn.Parameter(start))
            learned = None
            if not self.symmetric:
                zeros = checked_tensor("zero_point", 0.0 if zero_point is None else zero_point, device)
                zeros = checked_zero_point(zeros.to(start.dtype))
                learned = torch.nn.Parameter(self._expanded(zeros, start.shape))
            self.register_parameter("zero_point", learned)
        else:
            kept = None
            if zero_point is not None:
                kept = self._expanded(
                    checked_tensor("zero_point", zero_point, device, torch.int32), start.shape
                )
            if mode is ScaleMode.EMA and not self.symmetric:
                kept = torch.zeros_like(start, dtype=torch.int32)
                self.register_buffer("low", start.clone())
            self.register_buffer("scale", start)
            self.register_buffer("zero_point", kept)
        if mode is not ScaleMode.FIXED:
            self.register_buffer("rejected_batches", torch.zeros((), dtype=torch.int64, device=device))
        if mode is ScaleMode.LEARNED:
            floor = SCALE_FLOOR if given else float("nan")
            self.register_buffer("scale_floor", torch.full_like(start, floor))
            self.register_buffer("floor_events", torch.zeros((), dtype=torch.int64, device=device))
        self._start_shape = tuple(start.shape)

    @torch.no_grad()
    def _reset(self) -> None:
        """Reset the state to that of a new module."""
        if self.mode is ScaleMode.PER_BATCH:
            return
        for name, given in self._given.items():
            if isinstance(given, torch.Tensor) and given.is_meta:
                raise InvalidArgs(
                    f"{name} was given on the meta device and has no values to reset to; load a state_dict, "
                    f"or make the module with values for {name}."
                )
        with outside_inference_mode():
            if self.mode is ScaleMode.EMA and tuple(self.scale.shape) != self._start_shape:
                self._resize(self._start_shape)
            self._is_expected_shape = self._starts_with_expected_shape
            self._replace_inference_buffers()
            for name, unset in (("scale", float("nan")), ("low", float("nan")), ("zero_point", 0)):
                state = self._parameters.get(name, self._buffers.get(name))
                given = self._given.get(name)
                if state is not None:
                    fill(state, unset if given is None else given)
            if self.mode is ScaleMode.LEARNED:
                self.scale_floor.fill_(float("nan") if self._given["scale"] is None else SCALE_FLOOR)
            for name in COUNTS:
                if name in self._buffers:
                    self._buffers[name].zero_()  # type: ignore[union-attr]
        self._is_set = self._given["scale"] is not None

    def _expanded(self, given: torch.Tensor, shape: Any) -> torch.Tensor:
        """``given``, expanded to the shape of the scales."""
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
        """The shape of the state before the first batch."""
        if shape is not None:
            return shape
        if isinstance(self.granularity, PerTensor):
            return ()
        if self.mode is ScaleMode.LEARNED:
            raise InvalidArgs(
                f"the shape of the scales of {self.granularity} is not known before the first batch, and an "
                "optimizer must see them before; pass scale_shape=, for example (64,), or scale=."
            )
        return _UNKNOWN_SHAPE

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, or to evaluation mode.

        Evaluation mode synchronizes with the device once, to learn whether the scale is set.
        """
        self._has_reduced = self._has_reduced and mode == self.training
        super().train(mode)
        if not mode:
            self._has_scale()
        return self

    def _has_scale(self) -> bool:
        """Whether the scale is set. Synchronizes with the device unless the host knows that it is.

        An unset scale may have been written since, as in an average of models. A sharded one is not read:
        that would be a collective.
        """
        if not self._is_set and not is_sharded(self.scale) and can_synchronize(self.scale):
            found = self._state_is_set()
            if not self._has_own_state():
                return found
            self._is_set = found
        return self._is_set is not False

    def _has_own_state(self) -> bool:
        """Whether a learned scale is the parameter, and no tensor of ``torch.func.functional_call``."""
        return isinstance(self.scale, torch.nn.Parameter) or self.mode is not ScaleMode.LEARNED

    def _holds_scale(self) -> bool:
        """As ``_has_scale``, but reads the tensors: ``functional_call`` may have set the scale of a copy."""
        known = self._is_set and self.mode in (ScaleMode.EMA, ScaleMode.LEARNED) and self.scale.numel() > 0
        if known and not is_sharded(self.scale) and can_synchronize(self.scale):
            self._is_set = self._state_is_set()
        return self._has_scale()

    def _state_is_set(self) -> bool:
        """Whether the tensors of the state hold a scale."""
        unset = full_tensor(self.scale.detach()).isnan()
        if self.mode is ScaleMode.LEARNED:  # after a bad step a scale may be NaN, its floor is not
            unset = (unset & full_tensor(self.scale_floor).isnan()).all()
        return unset.is_meta or (unset.numel() > 0 and not bool(unset.any()))

    def _current_scale(self, x: torch.Tensor) -> Used:
        """The scale and zero point of the state; copies if a backward pass may run after the next update."""
        changes = self.mode is ScaleMode.EMA and torch.is_grad_enabled() and x.requires_grad
        if not (changes or self._starts_later()):
            return self.scale, self.zero_point
        return self.scale.clone(), None if self.zero_point is None else self.zero_point.clone()

    def _starts_later(self) -> bool:
        """Whether learning has not started: a later call, or one in this compiled graph, writes the state."""
        return self.mode is ScaleMode.LEARNED and not self._is_set

    def _fit_shape(self, shape: torch.Size) -> None:
        """Set the shape of the state from the first batch. Raises if a later batch has another shape."""
        if self.scale.shape == shape or isinstance(self.granularity, PerTensor):
            if self.mode is ScaleMode.EMA:
                self._replace_inference_buffers()
            if self._is_expected_shape:
                self._is_expected_shape = False
            return
        if not self._may_resize():
            raise InvalidArgs(
                f"this batch has scales of shape {tuple(shape)}, and the state has "
                f"{tuple(self.scale.shape)}; scales that are kept must not depend on the size of the batch. "
                "Use another granularity, or mode per_batch."
            )
        self._is_expected_shape = False
        self._resize(tuple(shape))

    def _may_resize(self) -> bool:
        """Whether no batch and no argument has determined the shape of the state."""
        if tuple(self.scale.shape) == _UNKNOWN_SHAPE:
            return True
        return self._is_expected_shape and not self._has_scale()

    def expect_shape(self, shape: tuple[int, ...]) -> None:
        """Give the state of a moving average the shape that the first batch is expected to have.

        So copies of the module can be written before the first batch, as an average of models is. A first
        batch of another shape is accepted.
        """
        if self.mode is ScaleMode.EMA and tuple(self.scale.shape) == _UNKNOWN_SHAPE:
            self._resize(shape)
            self._start_shape = shape
            self._is_expected_shape = self._starts_with_expected_shape = True

    def _resize(self, shape: tuple[int, ...]) -> None:
        """Replace the buffers of a moving average with unset buffers of another shape."""
        with outside_inference_mode():
            self.scale = self.scale.new_full(shape, float("nan"))
            if self.zero_point is not None:
                self.zero_point = self.zero_point.new_zeros(shape)
                self.low = self.low.new_full(shape, float("nan"))

    def _replace_inference_buffers(self) -> None:
        """Replace buffers made in torch.inference_mode, as by ``to``, which are read-only outside of it."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_inference():
                self._buffers[name] = buffer.clone()

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep the shard of a parameter while FSDP replaces it with the full parameter."""
        if isinstance(value, torch.nn.Parameter):
            before = self._parameters.get(name)
            if is_sharded(before) and not is_sharded(value):
                self._shards[name] = before
            else:
                self._shards.pop(name, None)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key, learned = f"{prefix}scale", self.mode is ScaleMode.LEARNED
        check_state_dict(state_dict, prefix, learned, may_be_unset=self.mode is not ScaleMode.FIXED)
        state_dict = self._widened(state_dict, prefix)
        kept = state_dict.get(key)
        if self.mode is ScaleMode.EMA and isinstance(kept, torch.Tensor):
            shape, own = tuple(kept.shape), tuple(self.scale.shape)
            if shape != own and (shape == _UNKNOWN_SHAPE or self._may_resize()):
                self._resize(shape)
        if isinstance(self.granularity, PerTensor) and self.mode is not ScaleMode.PER_BATCH:
            state_dict = self._as_one_scale(state_dict, prefix)
        if learned and isinstance(kept, torch.Tensor) and f"{prefix}scale_floor" not in state_dict:
            # Saved by a version without a floor.
            floor, events = floor_of(full_tensor(kept)), torch.zeros_like(self.floor_events)
            state_dict = {**state_dict, f"{prefix}scale_floor": floor, f"{prefix}floor_events": events}
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if isinstance(kept, torch.Tensor) and self.mode in (ScaleMode.EMA, ScaleMode.LEARNED):
            self._is_set = self._state_is_set()

    def _widened(self, state_dict: Any, prefix: str) -> Any:
        """A state_dict with float32 for narrower floats, which ``assign=True`` would keep."""
        narrow = {}
        for name in _SCALES:
            kept = state_dict.get(f"{prefix}{name}")
            if isinstance(kept, torch.Tensor) and kept.is_floating_point() and kept.element_size() < 4:
                narrow[f"{prefix}{name}"] = kept.detach().float()
        return {**state_dict, **narrow} if narrow else state_dict

    def _as_one_scale(self, state_dict: Any, prefix: str) -> Any:
        """A state_dict with the single scale in the shape of this module, () or (1,)."""
        found = dict(state_dict)
        for name in _SCALES:
            kept, own = found.get(f"{prefix}{name}"), getattr(self, name, None)
            if isinstance(kept, torch.Tensor) and own is not None and tuple(kept.shape) in ((), (1,)):
                found[f"{prefix}{name}"] = kept.reshape(own.shape)
        return found

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move and cast the state, but never below float32, where small scales underflow."""
        state = {**self._parameters, **self._buffers}
        before = {name: tensor.detach() for name, tensor in state.items() if tensor is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            now = getattr(self, name)
            if now.is_floating_point() and now.element_size() < 4 <= old.element_size():
                wide = old.to(now.device, torch.float32)
                if isinstance(now, torch.nn.Parameter):
                    now.data = wide
                    if now.grad is not None:
                        now.grad = now.grad.to(wide.dtype)
                else:
                    setattr(self, name, wide)
        from_meta = any(old.is_meta and not getattr(self, name).is_meta for name, old in before.items())
        if from_meta and not any(isinstance(v, torch.Tensor) and v.is_meta for v in self._given.values()):
            self._reset()
        return self


def _copied(given: Any) -> Any:
    """A copy of a tensor; other values unchanged."""
    return given.detach().clone() if isinstance(given, torch.Tensor) else given


def outside_inference_mode() -> AbstractContextManager[Any]:
    """A context in which new tensors are not inference tensors."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def can_synchronize(x: torch.Tensor) -> bool:
    """Whether the host may synchronize with the device to read ``x``."""
    if torch.compiler.is_compiling():
        return False
    return not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
