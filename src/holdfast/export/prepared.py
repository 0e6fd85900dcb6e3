"""Whether a model is prepared and not converted yet."""

from __future__ import annotations

import torch

from holdfast.qat import WeightQuantizer, activation_quantizers
from holdfast.qat.quantized import parametrized_weights


def is_prepared(model: torch.nn.Module) -> bool:
    """Whether ``hf.qat.convert`` has something to convert in ``model``."""
    kinds = (parametrizations[-1] for _, parametrizations in parametrized_weights(model))
    unfinished = (not quantizer.converted for quantizer in activation_quantizers(model).values())
    return any(isinstance(kind, WeightQuantizer) for kind in kinds) or any(unfinished)
