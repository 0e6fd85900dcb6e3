"""``report``: how well the codes of a model stand for its weights and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.core.errors import InvalidArgs
from holdfast.nn.sharded import full_tensor
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize.torch_op import fake_quantize
from holdfast.qat.dequantizer import Dequantizer
from holdfast.qat.layers import require_module
from holdfast.qat.plot import bars
from holdfast.qat.quantized import activation_quantizers, float_weight, parametrized_weights
from holdfast.qat.quantizers import ActivationQuantizer, QuantizerModule, WeightQuantizer


@dataclass(frozen=True)
class ReportRow:
    """A quantized weight, or the quantized input of a layer.

    ``clipped`` is the share of elements that are outside the range of the codes, and ``snr`` the
    signal-to-noise ratio in decibels: the energy of the tensor over that of the quantization error. Both are
    None if the float tensor is not known or has no elements. ``floor_events`` counts the learned scales that
    the floor held.
    """

    name: str
    format: str
    granularity: str
    mode: str
    least_scale: float | None
    largest_scale: float | None
    clipped: float | None
    snr: float | None
    floor_events: int


@dataclass(frozen=True, repr=False)
class Report:
    """The rows of a report. It prints as a table, also in a notebook or a rich console."""

    rows: tuple[ReportRow, ...]

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("layer", "format", "granularity", "mode", "scale", "clipped", "SNR", "floor events")
        for row in self.rows:
            scales = "" if row.least_scale is None else f"{row.least_scale:.3g} to {row.largest_scale:.3g}"
            clipped = "" if row.clipped is None else f"{row.clipped:.2%}"
            snr = "" if row.snr is None else f"{row.snr:.1f} dB"
            events = str(row.floor_events or "")
            table.add_row(row.name, row.format, row.granularity, row.mode, scales, clipped, snr, events)
        return table

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(width=140)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def plot(self, path: str | Path) -> None:
        """Draw the signal-to-noise ratio and the share of clipped values of each layer, as an SVG file."""
        measured = [row for row in self.rows if row.snr is not None and row.clipped is not None]
        if not measured:
            raise InvalidArgs("nothing was measured; report a prepared model, or pass a batch to report().")
        panels = {
            "signal to noise, dB": [row.snr or 0.0 for row in measured],
            "clipped, %": [100 * (row.clipped or 0.0) for row in measured],
        }
        Path(path).write_text(bars([f"{row.name} ({row.format})" for row in measured], panels))


@torch.no_grad()
def report(model: nn.Module, *batch: Any) -> Report:
    """A ``Report`` on the quantized weights and activations of a prepared or converted model.

    Activations are measured on ``batch``, the arguments of one call of the model in evaluation mode; without
    it, only their scales are reported. The float weights of a converted model are gone, so they are not
    measured. Synchronizes with the device, and changes no state.

    >>> import torch, holdfast as hf
    >>> model = hf.qat.prepare(torch.nn.Linear(64, 8), hf.qat.preset("w8a8-dynamic"))
    >>> report = hf.qat.report(model, torch.randn(4, 64))
    >>> [row.name for row in report.rows], report.rows[0].snr > 30
    (['weight', 'input'], True)
    """
    require_module(model)
    rows = []
    for name, parametrizations in parametrized_weights(model):
        last: Any = parametrizations[-1]
        if isinstance(last, WeightQuantizer):
            rows.append(_row(name, last, full_tensor(float_weight(parametrizations))))
        elif isinstance(last, Dequantizer):
            least, largest = _ends(last.scale)
            shown = last.format.name, str(last.granularity), "converted"
            rows.append(ReportRow(name, *shown, least, largest, None, None, 0))
    activations = activation_quantizers(model)
    inputs = _inputs(model, activations, batch) if batch else {}
    for name, quantizer in activations.items():
        rows.append(_row(f"{name}.input" if name else "input", quantizer, inputs.get(name)))
    if not rows:
        raise InvalidArgs("the model has no quantized layer; call hf.qat.prepare first.")
    return Report(tuple(rows))


def _row(name: str, quantizer: QuantizerModule, x: torch.Tensor | None) -> ReportRow:
    made, events = quantizer.fake_quantize, quantizer.fake_quantize.report().get("floor_events", 0)
    shown = quantizer.format.name, str(quantizer.granularity), quantizer.mode
    if not quantizer.is_set() or (x is None and quantizer.mode == "batch"):
        return ReportRow(name, *shown, None, None, None, None, events)
    scale, zero_point = made.evaluation_scale(x)
    least, largest = _ends(scale)
    if x is None or not x.numel():
        return ReportRow(name, *shown, least, largest, None, None, events)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = fake_quantize(
            leaf, scale, zero_point, dtype=made.dtype, q_min=made.q_min, q_max=made.q_max,
            granularity=made.granularity, ste=SteKind.IN_RANGE,
        )  # fmt: skip
        (in_range,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    clipped = 1 - float(in_range.double().mean())
    return ReportRow(
        name, *shown, least, largest, clipped, _decibels(x.double(), y.detach().double()), events
    )


def _ends(scale: torch.Tensor) -> tuple[float, float] | tuple[None, None]:
    """The least and the largest scale. A tensor without elements may have none."""
    return (float(scale.min()), float(scale.max())) if scale.numel() else (None, None)


def _decibels(x: torch.Tensor, y: torch.Tensor) -> float:
    signal, noise = float(x.square().sum()), float((x - y).square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _inputs(
    model: nn.Module, activations: dict[str, ActivationQuantizer], batch: tuple[Any, ...]
) -> dict[str, torch.Tensor]:
    """The last input of each activation quantizer in one call of the model."""
    seen: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[module] = args[0]

    hooks = [quantizer.register_forward_pre_hook(keep) for quantizer in activations.values()]
    try:
        with _evaluation(model):
            model(*batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: seen[module] for name, module in activations.items() if module in seen}


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and back to the mode of each module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
