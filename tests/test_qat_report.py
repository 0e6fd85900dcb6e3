"""Tests of hf.qat.report."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import holdfast as hf


def test_a_row_measures_what_it_says(tmp_path: Path) -> None:
    weight = torch.tensor([[3.0, -9.0, 1.4, 0.0]])
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight.data.copy_(weight)
    fixed = hf.qat.Quantizer(dtype=torch.int4, mode="fixed", scale=1.0)
    hf.qat.prepare(model, hf.qat.Config(weight=fixed, activation=hf.qat.Quantizer(mode="ema")))
    x = torch.tensor([[127.0, -1.0, 0.5, 2.0]])
    before = str(hf.qat.report(model))
    row, empty = hf.qat.report(model).rows
    assert (row.name, row.format, row.mode) == ("0.weight", "int4", "fixed")
    assert (row.least_scale, row.largest_scale, row.clipped) == (1.0, 1.0, 0.25)
    error = (weight - torch.tensor([[3.0, -8.0, 1.0, 0.0]])).double().square().sum()
    assert row.snr == pytest.approx(10 * math.log10(weight.double().square().sum() / error))
    assert (empty.name, empty.least_scale, empty.snr) == ("0.input", None, None)
    model(x)
    report = hf.qat.report(model, x)
    assert report.rows[1].least_scale == 1 and report.rows[1].clipped == 0
    assert model.training and model[0].input_quantizer.training
    assert "0.weight" in before and "25.00%" in before and "dB" in str(report)
    assert repr(report) == str(report)
    report.plot(tmp_path / "report.svg")
    drawn = ElementTree.parse(tmp_path / "report.svg").getroot()
    bars = [element for element in drawn.iter() if element.tag.endswith("rect")]
    assert len(bars) == 1 + 2 * 2
    hf.qat.convert(model)
    assert hf.qat.report(model).rows[0].mode == "converted"
    with pytest.raises(hf.InvalidArgs, match="nothing was measured"):
        hf.qat.report(model).plot(tmp_path / "nothing.svg")
    assert not (tmp_path / "nothing.svg").exists()


def test_floor_events_are_reported() -> None:
    model = hf.qat.prepare(nn.Linear(4, 2), hf.qat.preset("w2a16"))
    model.parametrizations.weight[0].fake_quantize.scale.data[0] = -1.0
    model(torch.ones(1, 4))
    (row,) = hf.qat.report(model).rows
    assert row.floor_events == 1 and row.least_scale is not None and row.least_scale > 0


def test_a_model_without_quantized_layers_is_refused() -> None:
    with pytest.raises(hf.InvalidArgs, match="the model has no quantized layer"):
        hf.qat.report(nn.Linear(2, 2))


@pytest.mark.parametrize("preset", ["w8a8-tensor", "w4a16", "w8a8-dynamic"])
def test_tensors_without_elements_are_reported(preset: str) -> None:
    model = hf.qat.prepare(nn.Sequential(nn.Linear(4, 3), nn.Embedding(0, 3)), hf.qat.preset(preset))
    model[0](torch.ones(1, 4))
    rows = hf.qat.report(model[0], torch.ones(0, 4)).rows + hf.qat.report(model[1]).rows
    assert rows[0].snr is not None
    assert all(row.snr is None and row.clipped is None for row in rows[1:])
    one_scale = preset == "w8a8-tensor"
    assert (rows[-1].least_scale is not None) == one_scale
    hf.qat.convert(model.eval())
    assert (hf.qat.report(model).rows[1].least_scale is not None) == one_scale
