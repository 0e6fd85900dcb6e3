"""A config for ``torchao.quantization.quantize_`` that gives layers the quantizers of holdfast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from holdfast.core.checks import require_choice, shown
from holdfast.core.errors import InvalidArgs
from holdfast.export.torchao_tensors import TENSORS, to_torchao
from holdfast.qat import Config, prepare, quantized_weights


@dataclass
class TorchaoConfig(AOBaseConfig):  # type: ignore[misc]
    """A config of ``quantize_``: step "prepare" is ``hf.qat.prepare``, step "convert" ``hf.export.torchao``.

    ``config`` is a ``hf.qat.Config``; only "prepare" needs it. ``tensor`` is passed to ``hf.export.torchao``.
    """

    config: Config | None = None
    step: str = "prepare"
    tensor: str = "intx"

    def __post_init__(self) -> None:
        require_choice("step", self.step, ("prepare", "convert"))
        require_choice("tensor", self.tensor, TENSORS)
        if self.step == "prepare" and not isinstance(self.config, Config):
            raise InvalidArgs(
                f"config is {shown(self.config)}; step 'prepare' needs a hf.qat.Config, such as "
                "hf.qat.preset('w4a16-g32')."
            )


@register_quantize_module_handler(TorchaoConfig)  # type: ignore[untyped-decorator]
def _transform(module: torch.nn.Module, config: TorchaoConfig, **ignored: Any) -> torch.nn.Module:
    if config.step == "convert":
        return to_torchao(module, config.tensor) if quantized_weights(module) else module
    assert config.config is not None
    return prepare(module, config.config)
