"""Updates of the state of a FakeQuantize by a batch, and the scale to quantize the batch with."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import Format
from holdfast.core.granularity import PerChannel, PerTensor
from holdfast.nn.collectives import Collective, Group, all_reduce_range, broadcast_from_first, world_size
from holdfast.nn.moving_average import blend_scale, blend_scale_affine
from holdfast.nn.recomputation import Used, current_pass, in_backward
from holdfast.nn.scale_in_use import floor_of
from holdfast.nn.scale_mode import ScaleMode
from holdfast.nn.scale_state import ScaleState, can_synchronize
from holdfast.nn.sharded import refuse_sharded, write_shard
from holdfast.nn.state_operators import count_events, new_handle, settle_scale, start_learning
from holdfast.ops.choose_scale.plan import ScaleOfData
from holdfast.ops.choose_scale.torch_op import choose_scale, observe_range, scale_of_range
from holdfast.ops.lsq_init.torch_op import lsq_init


class Observed(NamedTuple):
    """The scale and range of a batch."""

    scale: torch.Tensor
    #: The lower end of the range, if known.
    low: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    #: Whether any process had data; None without other processes.
    any_data: torch.Tensor | None = None


class ScaleUpdates(ScaleState):
    """The scale of a batch in each mode, and the state updates in training."""

    dtype: torch.dtype | None
    q_min: int | None
    q_max: int | None
    narrow: bool | None
    momentum: float
    process_group: Group
    frozen: bool
    observes: bool
    quantizes: bool
    _code_range: tuple[int, int]
    _ends: tuple[int, int]

    def _new_identity(self) -> None:
        """Give this module (or copy) its own identity for compiled graphs and checkpoints."""
        self._handle = new_handle(self)
        self._key = int(self._handle)
        self._has_reduced = False
        self._shards = {}
        self._changed: list[Any] = []

    def _validated_ends(self, codes: Format) -> tuple[int, int]:
        """The smallest and largest code for scales from the data. Raises if the codes allow no such scale."""
        rule = ScaleOfData(symmetric=self.symmetric, narrow=self.narrow)
        if self.mode in (ScaleMode.PER_BATCH, ScaleMode.EMA) or not self.symmetric:
            rule.validate_ends(*self._code_range, codes)
        return rule.ends(*self._code_range)

    def _scale_for(self, x: torch.Tensor) -> Used:
        """The scale and zero point for ``x``. In the second run of a checkpoint: those of the first."""
        if self.mode is ScaleMode.FIXED or (self.mode is ScaleMode.LEARNED and self._is_set):
            return self.scale, self.zero_point
        if torch.compiler.is_compiling() or (self.mode is ScaleMode.PER_BATCH and not self._reduces_range()):
            return self._updated_scale(x)  # a compiled graph detects second runs itself, see state_operators
        here = current_pass()
        if here.rerun is not None or in_backward():
            used = here.recall(self._key)
            if used is not None:
                return used
            if self.mode is not ScaleMode.PER_BATCH:
                return self._current_scale(x)
        scale, zero_point = self._updated_scale(x)
        if here.first and self.mode is not ScaleMode.LEARNED:
            if scale is self._buffers.get("scale"):
                scale, zero_point = scale.clone(), None if zero_point is None else zero_point.clone()
            here.keep(self._key, (scale, zero_point))
        return scale, zero_point

    def _updated_scale(self, x: torch.Tensor) -> Used:
        """Update the state from this batch if the module is training; return the scale and zero point."""
        # An empty batch has no range, but must take part in collectives.
        takes_part = x.numel() > 0 or world_size(self.process_group) > 1
        learns = self.training and self.observes and not self.frozen and takes_part
        if self.mode is ScaleMode.PER_BATCH:
            observed = self._observe(x)
            return observed.scale, observed.zero_point
        if self.mode is ScaleMode.EMA and learns:
            return self._blend(x)
        if self.mode is ScaleMode.LEARNED and learns and not self._has_scale():
            self._initialize(x)
        elif self.quantizes and x.numel():
            self._require_scale()
        return self._current_scale(x)

    def _require_scale(self) -> None:
        if not self._has_scale():
            raise InvalidArgs(
                "this FakeQuantize has seen no training batch that it could use, so it has no scale; train "
                "it or load its state first, or call disable_fake_quant()."
            )

    def _scale_arguments(self) -> dict[str, Any]:
        """Arguments of choose_scale and scale_of_range. Without ``dtype``, codes are float32."""
        codes = self.dtype or torch.float32
        return {"dtype": codes, "q_min": self.q_min, "q_max": self.q_max, "narrow": self.narrow}

    def _reduces_range(self) -> bool:
        """Whether the range of a batch is reduced over all processes."""
        shared = self.mode is ScaleMode.EMA or isinstance(self.granularity, (PerTensor, PerChannel))
        return self.training and shared and world_size(self.process_group) > 1

    def _collective(self) -> Collective:
        """The collective of this call, with ``first`` set if it is the first one since ``train()``."""
        if torch.compiler.is_compiling():
            return Collective(self.process_group, self, first=False)
        first, self._has_reduced = not self._has_reduced, True
        return Collective(self.process_group, self, first)

    def _observe(self, x: torch.Tensor) -> Observed:
        """The scale of this batch; in training, over all processes."""
        rule, joins, any_data = self._scale_arguments(), self._reduces_range(), None
        if not joins and self.symmetric:
            return Observed(choose_scale(x, granularity=self.granularity, **rule))
        if not joins and self.mode is ScaleMode.PER_BATCH:
            scale, zero_point = choose_scale(x, granularity=self.granularity, symmetric=False, **rule)
            return Observed(scale, zero_point=zero_point)
        low, high = observe_range(x, granularity=self.granularity)
        if joins:
            refuse_sharded(x)
            low, high, any_data = all_reduce_range(low, high, x.numel() > 0, self._collective())
        if self.symmetric:
            return Observed(scale_of_range(low, high, **rule), low, any_data=any_data)
        scale, zero_point = scale_of_range(low, high, symmetric=False, **rule)
        return Observed(scale, low, zero_point, any_data)

    def _blend(self, x: torch.Tensor) -> Used:
        """Blend the scale of this batch into the state. Returns a copy of the new scale and zero point."""
        refuse_sharded(x)
        observed = self._observe(x)
        self._fit_shape(observed.scale.shape)
        shape = self.scale.shape
        seen, any_data = observed.scale.reshape(shape), observed.any_data
        if self.symmetric:
            state = [self.scale, self.rejected_batches]
            blended = [*blend_scale(self.scale, self.rejected_batches, seen, any_data, self.momentum)]
        else:
            assert observed.low is not None and self.zero_point is not None
            state = [self.scale, self.low, self.zero_point, self.rejected_batches]
            blended = [
                *blend_scale_affine(
                    self.scale, self.low, self.rejected_batches, seen, observed.low.reshape(shape), any_data,
                    self.momentum, self._ends,
                )
            ]  # fmt: skip
        if torch.compiler.is_compiling():
            self._split_checkpoints()
            blended, used = settle_scale(self._handle, state, blended)
        else:
            used = [blended[0], *blended[2:3]] if not self.symmetric else blended[:1]
            if blended[-1].device.type == "cpu":
                self._warn_rejected(int(blended[-1]) - int(self.rejected_batches))
        for kept, new in zip(state, blended, strict=True):
            kept.copy_(new)  # raises under torch.func
        if not torch.compiler.is_compiling():
            self.note_blended(blended[0])
        return used[0], None if self.symmetric else used[1]

    def _split_checkpoints(self) -> None:
        """A side effect, which keeps torch from compiling a checkpoint around this call into one graph.

        The second run of that graph would start from the state after the first run.
        """
        self._changed.clear()

    def count_call(self, count: torch.Tensor) -> torch.Tensor:
        """Add this call to ``count``. Returns the count before it, that of the first run of a checkpoint."""
        if torch.compiler.is_compiling():
            self._split_checkpoints()
        after, before = count_events(self._handle, "calls", count, torch.ones_like(count))
        count.copy_(after)
        return before

    def note_blended(self, scale: torch.Tensor) -> None:
        """Update ``_is_set`` after a change of the state. On the CPU, this reads ``scale``."""
        if not self._is_set:
            self._is_set = None if scale.device.type != "cpu" else not bool(scale.isnan().any())

    @torch.no_grad()
    def initialize(self, x: torch.Tensor) -> None:
        """Initialize the parameters of mode "learned" from ``x``, on this process alone."""
        start = self._initial_values(x)
        if not self.accepts(start, None):
            raise InvalidArgs("the scale cannot be initialized from a tensor with NaN or infinity in it.")
        for kept, new in zip((self.scale, self.zero_point), start, strict=False):
            assert kept is not None
            kept.copy_(new.reshape(kept.shape))
        self.scale_floor.copy_(floor_of(self.scale))
        self.note_started(start)

    @torch.no_grad()
    def _initialize(self, x: torch.Tensor) -> None:
        """Initialize the parameters from the first batch.

        Synchronizes with the device once, to check that the values are finite, unless a CUDA graph is being
        captured. If they are not finite, the batch is rejected and the next batch is used.
        """
        if not self.scale.is_leaf:
            raise InvalidArgs(
                "the first batch cannot set the scale: it is not a parameter here, but a part or a function "
                "of one, as under FullyShardedDataParallel. Use fully_shard, pass scale=, or run one batch "
                "before."
            )
        refuse_sharded(x)
        start = self._initial_values(x)
        self._fit_shape(start[0].shape)
        any_data = None
        if world_size(self.process_group) > 1:
            start, any_data = broadcast_from_first(start, x.numel() > 0, self._collective())
        parameters = [self.scale] if self.zero_point is None else [self.scale, self.zero_point]
        start = [value.to(own.dtype).reshape(own.shape) for own, value in zip(parameters, start, strict=True)]
        if torch.compiler.is_compiling():
            start = [*start, floor_of(start[0])]
            state = [*parameters, self.scale_floor, self.rejected_batches]
            for kept, new in zip(state, start_learning(self._handle, state, start, any_data), strict=True):
                kept.copy_(new)
            return
        accepted = self.accepts(start, any_data)
        if accepted:
            for kept, new in zip(parameters, start, strict=True):
                kept.copy_(new)
            self.scale_floor.copy_(floor_of(self.scale))
            self.note_started(start)
        elif accepted is False:
            self.rejected_batches.add_(1)
            self._warn_rejected(1)

    def _initial_values(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The initial scale, and the initial zero point if it is learned, from batch ``x``."""
        if self.symmetric:
            codes = {"dtype": self.dtype, "q_min": self.q_min, "q_max": self.q_max}
            return [lsq_init(x, granularity=self.granularity, **codes)]  # type: ignore[arg-type]
        return [*choose_scale(x, granularity=self.granularity, symmetric=False, **self._scale_arguments())]

    def accepts(self, start: list[torch.Tensor], any_data: torch.Tensor | None) -> bool | None:
        """Whether learning may start from ``start``; None if no process had data."""
        if not can_synchronize(start[0]):
            return True
        if any_data is not None and not bool(any_data):
            return None
        return bool(start[0].isfinite().all())

    def note_started(self, start: list[torch.Tensor]) -> None:
        """Note that learning starts from ``start``, and write ``start`` to the shards of FSDP."""
        with torch.no_grad():
            for name, value in zip(("scale", "zero_point"), start, strict=False):
                if name in self._shards:
                    write_shard(self._shards[name], value)
        if self._has_own_state():
            self._is_set = True

    def _warn_rejected(self, rejected: int) -> None:
        if rejected:
            warnings.warn(
                "a batch with NaN or infinity in it was rejected: the scale stays as it was. "
                "rejected_batches counts them.",
                RuntimeWarning,
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        """State for copy and pickle. A process group cannot be pickled: the copy gets the default group."""
        own = ("_handle", "_key", "_shards", "_changed", "_has_reduced")
        kept = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**kept, "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._new_identity()
