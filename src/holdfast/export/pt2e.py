"""Fake quantization for PT2E: classes for ``QuantizationSpec(observer_or_fake_quant_ctr=...)`` of torchao."""

from __future__ import annotations

import operator
from operator import attrgetter
from typing import Any

import torch
from torchao.quantization.pt2e import FakeQuantizeBase

from holdfast.core.dtypes import dtype_name
from holdfast.core.errors import Unsupported
from holdfast.core.formats import format_of
from holdfast.core.granularity import ONE_SCALE, Granularity, PerChannel
from holdfast.nn import FakeQuantize
from holdfast.nn.scale_mode import ScaleMode
from holdfast.qat.quantizers import whole_zero_point

_SYMMETRIC = {
    torch.per_tensor_symmetric: True, torch.per_channel_symmetric: True, torch.per_tensor_affine: False,
    torch.per_channel_affine: False, None: True,
}  # fmt: skip


class PT2EFakeQuantize(FakeQuantizeBase):  # type: ignore[misc]
    """Fake quantization with one scale, for a ``QuantizationSpec``.

    The spec gives ``dtype``, ``quant_min``, ``quant_max`` and ``qscheme``. ``with_args`` takes arguments of
    ``hf.nn.FakeQuantize``, such as ``mode``, ``momentum``, ``ste`` and ``scale_dtype``. The default mode is
    "ema". Mode "per_batch" finds the scale of each activation anew; leave ``is_dynamic`` of the spec out.

    ``convert_pt2e`` replaces the module by the operators quantize and dequantize of holdfast, and a weight by
    its codes. The result has the bits of the prepared model.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme | None = None,
        is_dynamic: bool = False,
        *,
        granularity: Granularity = ONE_SCALE,
        **arguments: Any,
    ) -> None:
        super().__init__()
        if qscheme not in _SYMMETRIC:
            raise Unsupported(
                f"qscheme is {qscheme}; accepted are per_tensor and per_channel, each symmetric or affine."
            )
        if is_dynamic:
            raise Unsupported(
                "the spec has is_dynamic=True, for which convert_pt2e accepts only its own operators; leave "
                'it out, and pass mode="per_batch" to with_args.'
            )
        if arguments.get("mode") == "per_batch" and arguments.get("scale_dtype") is not None:
            raise Unsupported(
                "scale_dtype is for a scale that is stored; a dynamic one is not. Leave it out."
            )
        self.dtype, self.qscheme, self.is_dynamic = dtype, qscheme, is_dynamic
        self.ch_axis = getattr(granularity, "axis", -1)
        self.fake_quantize = FakeQuantize(
            dtype=dtype, q_min=quant_min, q_max=quant_max, granularity=granularity,
            symmetric=_SYMMETRIC[qscheme], **arguments,
        )  # fmt: skip
        lowest, highest = format_of(dtype, "dtype").code_range
        self.quant_min = lowest if quant_min is None else quant_min
        self.quant_max = highest if quant_max is None else quant_max

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fake_quantize(x)  # type: ignore[no-any-return]

    def enable_observer(self, enabled: bool = True) -> None:
        super().enable_observer(enabled)
        self.fake_quantize.enable_observer(enabled)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        super().enable_fake_quant(enabled)
        self.fake_quantize.enable_fake_quant(enabled)

    @torch.no_grad()
    def calculate_qparams(self, x: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and the zero point. Only mode "per_batch" needs ``x``."""
        scale, zero_point = self.fake_quantize.evaluation_scale(x)
        zeros = torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
        return scale.detach(), whole_zero_point(zeros.detach())

    def convert(self, model: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        """Replace the call ``node`` of this module by quantize and dequantize. ``convert_pt2e`` calls it."""
        (x,) = node.args
        assert isinstance(x, torch.fx.Node)
        with model.graph.inserting_before(node):
            if x.op != "get_attr" and self.fake_quantize.mode is ScaleMode.PER_BATCH:
                result = self._dynamic(model, x)
            else:
                result = self._static(model, x, str(node.target))
        result.meta.update(node.meta)
        node.replace_all_uses_with(result)
        model.graph.erase_node(node)
        if x.op == "get_attr" and not x.users:
            model.graph.erase_node(x)

    @property
    def _codes(self) -> tuple[str, int | None, int | None]:
        given = (self.fake_quantize.q_min, self.fake_quantize.q_max)
        return dtype_name(self.dtype), *given

    def _dynamic(self, model: torch.fx.GraphModule, x: torch.fx.Node) -> torch.fx.Node:
        """Scales of the data, found by the operator."""
        made = self.fake_quantize
        name = "dynamic_fake_quantize" if made.symmetric else "dynamic_fake_quantize_affine"
        arguments = (x, made.granularity.name, *self._codes, str(made.ste), made.narrow)
        results = model.graph.call_function(getattr(torch.ops.holdfast, name).default, arguments)
        return model.graph.call_function(operator.getitem, (results, 0))

    @torch.no_grad()
    def _static(self, model: torch.fx.GraphModule, x: torch.fx.Node, name: str) -> torch.fx.Node:
        """Constant scales. A weight becomes its codes."""
        weight = attrgetter(str(x.target))(model) if x.op == "get_attr" else None
        scale, zero_point = self.calculate_qparams(weight)
        granularity = self.fake_quantize.granularity.name
        scales = (
            _buffer(model, f"{name}_scale", scale), 1.0,
            _buffer(model, f"{name}_zero_point", zero_point), 0, granularity,
        )  # fmt: skip
        quantize = torch.ops.holdfast.quantize.default
        if weight is None:
            real = x.meta["val"].dtype if "val" in x.meta else torch.float32
            q = model.graph.call_function(quantize, (x, *scales, *self._codes, False))
        else:
            real = weight.dtype
            codes = quantize(weight, scale, 1.0, zero_point, 0, granularity, *self._codes, False)
            q = _buffer(model, f"{name}_codes", codes)
        arguments = (q, *scales, dtype_name(real), dtype_name(self.dtype), None)
        return model.graph.call_function(torch.ops.holdfast.dequantize.default, arguments)


class PT2EPerChannelFakeQuantize(PT2EFakeQuantize):
    """``PT2EFakeQuantize`` with a scale for each index of the axis ``ch_axis`` of the spec.

    PT2E gives ``ch_axis`` only to classes whose name contains "PerChannel".
    """

    def __init__(self, *args: Any, ch_axis: int | None = None, **arguments: Any) -> None:
        super().__init__(*args, granularity=PerChannel(0 if ch_axis is None else ch_axis), **arguments)


def _buffer(model: torch.fx.GraphModule, name: str, tensor: torch.Tensor) -> torch.fx.Node:
    model.register_buffer(name, tensor)
    return model.graph.get_attr(name)
