"""The HTML page of ``holdfast demo``: one file that needs nothing beside itself."""

from __future__ import annotations

import torch

import holdfast as hf
from holdfast.demo import charts
from holdfast.demo.run import Result
from holdfast.demo.training import FORMATS, Training
from holdfast.proof.page import templates

#: Bins of the histogram of float weights.
BINS = 64


def page(result: Result) -> str:
    """The page as HTML."""
    return templates().get_template("demo/page.html").render(
        result=result, loss_chart=_losses(result), accuracy_chart=_accuracies(result),
        histograms=[_histogram(number, training) for number, training in enumerate(result.shown)],
        estimators=_estimators(result),
    )  # fmt: skip


def _estimators(result: Result) -> list[str]:
    found = [str(training.recipe.ste) for training in result.trainings if training.recipe.ste is not None]
    return list(dict.fromkeys(found))


def _losses(result: Result) -> str:
    return charts.loss_chart({training.recipe.format: training.losses for training in result.shown})


def _accuracies(result: Result) -> str:
    names = _estimators(result)
    groups: dict[str, list[tuple[int, float]]] = {name: [] for name in FORMATS}
    for training in result.trainings:
        if training.recipe.ste is not None:
            series = names.index(str(training.recipe.ste))
            groups[training.recipe.format].append((series, training.accuracy))
    level = result.trainings[0]
    return charts.accuracy_chart(groups, level.accuracy, level.recipe.format, names)


def _histogram(number: int, training: Training) -> str:
    """The codes of all quantized weights, or the values of float weights."""
    title = training.recipe.format
    weights = hf.qat.quantized_weights(training.model)
    if weights:
        low, high = next(iter(weights.values())).format.code_range
        codes = torch.cat([weight.codes.flatten() for weight in weights.values()])
        counts = torch.bincount(codes.to(torch.int64) - low, minlength=high - low + 1)
        return charts.histogram(title, counts.tolist(), f"{low:g}", f"{high:g}", number)
    values = torch.cat([w.detach().flatten() for w in training.model.parameters() if w.dim() > 1])
    end = float(values.abs().max())
    counts = torch.histc(values, BINS, -end, end).to(torch.int64)
    return charts.histogram(title, counts.tolist(), f"{-end:.2f}", f"{end:.2f}", number)
