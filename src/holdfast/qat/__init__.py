"""Quantization-aware training of whole models: prepare, train, convert. The bits stay the same throughout."""

from __future__ import annotations

from holdfast.qat.config import Config, Quantizer, preset, presets
from holdfast.qat.convert import convert
from holdfast.qat.prepare import prepare
from holdfast.qat.quantized import activation_quantizers, quantized_weights
from holdfast.qat.quantized_tensor import QuantizedTensor
from holdfast.qat.quantizers import ActivationQuantizer, WeightQuantizer
from holdfast.qat.report import Report, ReportRow, report

__all__ = [
    "ActivationQuantizer", "Config", "QuantizedTensor", "Quantizer", "Report", "ReportRow", "WeightQuantizer",
    "activation_quantizers", "convert", "prepare", "preset", "presets", "quantized_weights", "report",
]  # fmt: skip
