"""The parametrization of a converted weight: its codes are the stored tensor, and reading it dequantizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import PerGroup
from holdfast.ops.dequantize.torch_op import dequantize
from holdfast.ops.packing.torch_op import pack, unpack
from holdfast.qat.quantized_tensor import QuantizedTensor, widened


class Dequantizer(torch.nn.Module):
    """Dequantizes codes, packed if they have less than a byte, with the scale and zero point in its buffers.

    Casting the module changes the dtype of the dequantized weight. The scale stays as it is, except that one
    in float64 becomes float32 with a weight in less than float64.

    The buffer ``layout`` is a text as bytes, such as "int4 per_channel:0". Codes of other formats may have
    the same dtype and shape, so a state_dict tells what its codes mean.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    layout: torch.Tensor

    def __init__(self, tensor: QuantizedTensor) -> None:
        super().__init__()
        self.format, self.granularity, self.dtype = tensor.format, tensor.granularity, tensor.dtype
        self.shape = tuple(tensor.codes.shape)
        self.register_buffer("scale", tensor.scale)
        self.register_buffer("zero_point", tensor.zero_point)
        self.register_buffer("layout", self._layout())

    def _layout(self) -> torch.Tensor:
        device = "cpu" if self.scale.is_meta else self.scale.device
        return torch.tensor(list(self._text().encode()), dtype=torch.uint8, device=device)

    def _text(self) -> str:
        return f"{self.format.name} {self.granularity.name}"

    @property
    def packed(self) -> bool:
        """Whether several codes share a byte. The kernels unpack no byte with codes of two groups."""
        split, per_byte = self.granularity, self.format.per_byte
        if isinstance(split, PerGroup) and split.axis == len(self.shape) - 1 and split.group_size % per_byte:
            return False
        return per_byte > 1

    def stored(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes as they are stored: packed. Float codes are bytes, which no cast of the module changes."""
        if self.packed:
            return as_laid_out(codes, pack(codes, self.format.torch))
        return codes.view(torch.uint8) if self.format.is_float else codes

    def quantized_tensor(self, stored: torch.Tensor) -> QuantizedTensor:
        """The weight that ``stored`` codes stand for."""
        codes = stored
        if self.packed:
            codes = as_laid_out(stored, unpack(stored, self.format.torch, self.shape[-1]))
        elif self.format.is_float:
            codes = stored.view(self.format.torch)
        return QuantizedTensor(codes, self.scale, self.zero_point, self.format, self.granularity, self.dtype)

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return self.quantized_tensor(stored).dequantize()
        weight = dequantize(
            stored.contiguous(), widened(self.scale), self.zero_point, dtype=self.dtype,
            granularity=self.granularity, code_dtype=self.format.torch, packed=True, length=self.shape[-1],
        )  # fmt: skip
        return as_laid_out(stored, weight)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """Refuse what is assigned to the weight: there is no quantizer to find codes for it."""
        raise InvalidArgs(
            "the weight of a converted layer is codes, and no other weight can be assigned to it; assign it "
            "before hf.qat.convert, or load the state_dict of a converted model."
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        scale = self.scale
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scale.device)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        narrowed = scale.dtype == torch.float64 != self.dtype
        wanted = torch.float32 if narrowed else scale.dtype
        if self.scale.dtype != wanted:
            self.scale = scale.to(self.scale.device, wanted)
        self.layout = self._layout()  # to_empty leaves it without values
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load a state. Codes with another layout are an error; states without a layout are accepted."""
        key, errors = f"{prefix}layout", rest[-1]
        given, scale = state_dict.get(key), state_dict.get(f"{prefix}scale", self.scale)
        if isinstance(given, torch.Tensor) and not given.is_meta:
            text = bytes(given.flatten().tolist()).decode(errors="replace")
            if text != self._text():
                layer, _, weight = prefix.partition("parametrizations.")
                errors.append(
                    f"the codes of {layer}{weight.partition('.')[0]} in the state are {text}; those of this "
                    f"model are {self._text()}. Convert a model with the config of the one that was saved."
                )
                return
        if scale.dtype == torch.float64 == self.dtype != self.scale.dtype:
            self.scale = self.scale.double()  # the model was cast to float64 after its conversion
        if f"{prefix}scale" in state_dict:  # else the state has these codes under another name of the layer
            state_dict = {**state_dict, key: self._layout().to(scale.device)}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{self.format.name}, {self.granularity}, shape={self.shape}, dtype={self.dtype}"


def as_laid_out(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its axes in the order in which ``like`` has them in memory."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if last is not None and like.is_contiguous(memory_format=last):
        # With one channel, or a kernel of one element, a tensor has both formats; its strides decide.
        strides = like.stride(1), like.stride(-1)
        return tensor.clone(memory_format=last) if strides == (1, like.shape[1]) else tensor
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    if order == list(range(like.dim())):
        return tensor
    back = [order.index(axis) for axis in range(like.dim())]
    laid_out = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return laid_out.permute(back)
