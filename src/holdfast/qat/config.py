"""What to quantize, and how: ``Quantizer``, ``Config`` and the presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from holdfast.core.checks import finite_number, require_choice, require_dtype, shown, whole_number
from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import Format, format_of
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.nn.fake_quantize import FakeQuantize
from holdfast.nn.scale_mode import ScaleMode
from holdfast.ops.fake_quantize.plan import SteKind

MODES = {
    "learned": ScaleMode.LEARNED,
    "batch": ScaleMode.PER_BATCH,
    "ema": ScaleMode.EMA,
    "fixed": ScaleMode.FIXED,
}


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """How a weight or an activation is quantized.

    - ``dtype``: the format of the codes, such as torch.int8, torch.int4 or torch.float8_e4m3fn; or a
      ``Format``. ``range`` limits the codes to (q_min, q_max).
    - ``granularity``: which elements share a scale; one for the whole tensor by default. For a weight, axis 0
      is the output channel and axis 1 the input channel, also in layers that store them the other way round.
    - ``mode``: the source of the scale. "batch": the data of each call. "ema": a moving average over training
      batches, where a new one has the weight ``momentum``. "learned": a parameter, with the gradient factor
      ``grad_factor``. "fixed": ``scale`` and ``zero_point``; for a weight, without ``scale``, the scale of
      the weight at ``prepare``. "dynamic" is "batch" with one scale per token by default.
    - ``symmetric``: whether the zero point is 0. ``narrow``: whether a scale from the data leaves out the
      lowest code.
    - ``ste``: the straight-through estimator of the gradient.
    - ``start_step``: the number of training calls before quantization starts. Scales observe these calls.
    - ``scale_dtype``: the dtype in which the scale will be stored. The forward uses the rounded scale.
    - ``positive``: whether a learned scale has a positive floor.

    >>> import torch, holdfast as hf
    >>> hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerGroup(32), mode="learned").format.name
    'int4'
    """

    dtype: torch.dtype | Format = torch.int8
    granularity: Granularity = None  # type: ignore[assignment]  # __post_init__ sets it
    mode: str = "batch"
    symmetric: bool = True
    narrow: bool | None = None
    range: tuple[int, int] | None = None
    ste: SteKind | str = SteKind.IN_RANGE
    momentum: float = 0.1
    grad_factor: float | Literal["lsq"] = "lsq"
    scale: float | None = None
    zero_point: int | None = None
    start_step: int = 0
    scale_dtype: torch.dtype | None = None
    positive: bool = True

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, (*MODES, "dynamic"))
        if self.granularity is None:
            self._set("granularity", PerToken() if self.mode == "dynamic" else PerTensor())
        self._set("mode", "batch" if self.mode == "dynamic" else self.mode)
        if isinstance(self.dtype, Format):
            self._set("dtype", self.dtype.torch)
        require_dtype("dtype", self.dtype)
        self._set("start_step", whole_number("start_step", self.start_step, 0, 2**62))
        if self.range is not None:
            self._set("range", self._checked_range())
        self._set("scale", _number("scale", self.scale))
        self._set("zero_point", _number("zero_point", self.zero_point))
        # The module checks the other arguments. A weight may lack the scale of mode fixed.
        scale = 1.0 if self.mode == "fixed" and self.scale is None else self.scale
        self.module(scale=scale, scale_shape=() if isinstance(self.granularity, PerTensor) else (1,))

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return self.dtype if isinstance(self.dtype, Format) else format_of(self.dtype, "dtype")

    @property
    def code_range(self) -> tuple[int, int]:
        """The least and the greatest code."""
        return self.format.code_range if self.range is None else self.range

    def module(self, kind: type[FakeQuantize] = FakeQuantize, **arguments: Any) -> FakeQuantize:
        """A FakeQuantize for this record. ``arguments`` are further arguments of its constructor."""
        q_min, q_max = (None, None) if self.range is None else self.range
        return kind(
            dtype=self.format.torch, q_min=q_min, q_max=q_max, granularity=self.granularity,
            ste=self.ste, symmetric=self.symmetric, narrow=self.narrow, mode=MODES[self.mode],
            momentum=self.momentum, grad_factor=self.grad_factor, positive=self.positive,
            scale_dtype=self.scale_dtype,
            **{"scale": self.scale, "zero_point": self.zero_point, **arguments},
        )  # fmt: skip

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_range(self) -> tuple[int, int]:
        if not isinstance(self.range, (tuple, list)) or len(self.range) != 2:
            raise InvalidArgs(f"range is {shown(self.range)}; it must be (q_min, q_max), such as (-7, 7).")
        return self.range[0], self.range[1]


def _number(name: str, given: Any) -> Any:
    """A given scale or zero point as a number; None stays None. A record with a tensor has no hash."""
    value = given.item() if torch.is_tensor(given) and given.numel() == 1 else given
    if value is not None:
        finite_number(name, value, "one number, which holds for every scale of the granularity")
    return value


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the weights and the inputs of layers are quantized; None leaves them in float.

    ``parameters`` names the weights of a layer that ``prepare`` does not know, for example
    ``("gate_up_proj", "down_proj")`` of the experts of a mixture model.
    """

    weight: Quantizer | None = None
    activation: Quantizer | None = None
    parameters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "activation"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Quantizer):
                raise InvalidArgs(f"{name} is {shown(given)}; it must be a hf.qat.Quantizer, or None.")
        if self.weight is None and self.activation is None:
            raise InvalidArgs(
                "weight and activation are both None; a Config needs one of them. To leave a layer in float, "
                "use None in place of its Config."
            )
        self._check_parameters()
        activation = self.activation
        if activation is None:
            return
        if activation.mode in ("learned", "fixed") and not isinstance(activation.granularity, PerTensor):
            raise InvalidArgs(
                f"the activation has a {activation.mode} scale for {activation.granularity}; a "
                f"{activation.mode} scale of an activation is per tensor. Use PerTensor(), or another mode."
            )
        if activation.mode == "fixed" and activation.scale is None:
            raise InvalidArgs("the activation has mode fixed, which needs a scale; pass scale=.")

    def _check_parameters(self) -> None:
        names = self.parameters
        if names is None:
            return
        if self.weight is None:
            raise InvalidArgs("parameters are named, and the Config has no quantizer for them; pass weight=.")
        if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
            raise InvalidArgs(f"parameters is {shown(names)}; it must be names, such as ('w1', 'w2').")
        object.__setattr__(self, "parameters", tuple(names))


_CHANNEL, _ROW = PerChannel(0), PerToken()


def _weight(dtype: torch.dtype, granularity: Granularity = _CHANNEL, mode: str = "batch") -> Quantizer:
    return Quantizer(dtype=dtype, granularity=granularity, mode=mode)


_INT8, _INT4, _INT2 = torch.int8, torch.int4, torch.int2  # type: ignore[attr-defined]
_FP8 = torch.float8_e4m3fn
_STATIC, _DYNAMIC = Quantizer(dtype=_INT8, mode="ema"), Quantizer(dtype=_INT8, mode="dynamic")

PRESETS = {
    "w8a16": Config(weight=_weight(_INT8)),
    "w8a8": Config(weight=_weight(_INT8), activation=_STATIC),
    "w8a8-tensor": Config(weight=_weight(_INT8, PerTensor()), activation=_STATIC),
    "w8a8-dynamic": Config(weight=_weight(_INT8), activation=_DYNAMIC),
    "w8a8-fp8": Config(weight=_weight(_FP8), activation=Quantizer(dtype=_FP8, mode="dynamic")),
    "w4a16": Config(weight=_weight(_INT4)),
    "w4a16-g32": Config(weight=_weight(_INT4, PerGroup(32, axis=1))),
    "w4a16-g128": Config(weight=_weight(_INT4, PerGroup(128, axis=1))),
    "w4a8": Config(weight=_weight(_INT4), activation=_STATIC),
    "w4a8-dynamic": Config(weight=_weight(_INT4, PerGroup(32, axis=1)), activation=_DYNAMIC),
    "w2a16": Config(weight=_weight(_INT2, mode="learned")),
    "w2a16-g32": Config(weight=_weight(_INT2, PerGroup(32, axis=1), "learned")),
}


def presets() -> tuple[str, ...]:
    """The names that ``preset`` accepts."""
    return tuple(PRESETS)


def preset(name: str) -> Config:
    """A ``Config`` by name: bits of the weight, bits of the activation, and the size of a group.

    Weights have one scale per output channel, or one per group ("-g32", "-g128" and "w4a8-dynamic"), or one
    ("-tensor"). Activations of "a16" stay in float. Those of "a8" have one scale, a moving average, or with
    "-dynamic" and "-fp8" one per token of each batch. Codes are integers; those of "-fp8" are
    float8_e4m3fn. 2-bit weights have learned scales.

    >>> import holdfast as hf
    >>> hf.qat.preset("w4a16-g32").weight.granularity
    PerGroup(group_size=32, axis=1)
    """
    require_choice("preset", name, PRESETS)
    return PRESETS[name]
