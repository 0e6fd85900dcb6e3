"""The trainings of the demo: a small classifier in float32, then fine-tuned with quantized layers.

Each training runs twice from one start. Losses and weights are compared in every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

import holdfast as hf
from holdfast.core.bits import digest
from holdfast.demo.data import CLASSES, Data

#: Formats of the weights, the best one first. Inputs of layers have 8 bits.
FORMATS = {"int8": torch.int8, "int4": torch.int4, "int2": torch.int2}  # type: ignore[attr-defined]
#: The estimator of the models that are deployed.
ESTIMATOR = hf.SteKind.IN_RANGE
BATCH = 96
RATES = {"float32": 3e-3}
QUANTIZED_RATE = 1e-3


@dataclass(frozen=True)
class Recipe:
    """What is trained: the format of the weights and, if they are quantized, the estimator."""

    format: str = "float32"
    ste: hf.SteKind | None = None

    @property
    def config(self) -> hf.qat.Config | None:
        """How the layers are quantized; None for float32."""
        if self.ste is None:
            return None
        weight = hf.qat.Quantizer(
            dtype=FORMATS[self.format], granularity=hf.PerChannel(0), mode="learned", ste=self.ste
        )
        return hf.qat.Config(weight=weight, activation=hf.qat.Quantizer(dtype=torch.int8, mode="ema"))

    def __str__(self) -> str:
        return self.format if self.ste is None else f"{self.format} with {self.ste}"


@dataclass(frozen=True)
class Training:
    """A trained model. ``digests`` has one of the losses and the state of each of the two runs."""

    recipe: Recipe
    model: nn.Module = field(repr=False)
    losses: list[float] = field(repr=False)
    accuracy: float
    digests: tuple[str, str]

    @property
    def equal(self) -> bool:
        """Whether both runs gave the same bits."""
        return self.digests[0] == self.digests[1]

    @property
    def size(self) -> int:
        """The bytes of the state of the model as it is now, trained or converted."""
        return sum(tensor.nbytes for tensor in self.model.state_dict().values())


def classifier() -> nn.Module:
    """Two convolutions and two linear layers, with weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, CLASSES),
        )  # fmt: skip


def batches(count: int, epochs: int) -> Iterator[torch.Tensor]:
    """Indices of the images of each step, in an order from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(BATCH)


def steps(data: Data, epochs: int) -> int:
    """The number of steps of one training."""
    return epochs * -(-len(data.images) // BATCH)


def train_twice(
    recipe: Recipe, start: nn.Module, data: Data, epochs: int, stepped: Callable[[], None]
) -> Training:
    """Train copies of ``start`` twice. ``stepped`` is called after each step."""
    model, losses = train(recipe, start, data, epochs, stepped)
    again, other = train(recipe, start, data, epochs, stepped)
    digests = _digest(model, losses), _digest(again, other)
    return Training(recipe, model, losses, accuracy(model, data), digests)


def train(
    recipe: Recipe, start: nn.Module, data: Data, epochs: int, stepped: Callable[[], None]
) -> tuple[nn.Module, list[float]]:
    """A trained copy of ``start``, in evaluation mode, and its losses."""
    model, losses = copy.deepcopy(start).train(), []
    if recipe.config is not None:
        hf.qat.prepare(model, recipe.config)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATES.get(recipe.format, QUANTIZED_RATE))
    for chosen in batches(len(data.images), epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.images[chosen]), data.labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stepped()
    return model.eval(), losses


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """The share of test images that get their class."""
    return float((model(data.test_images).argmax(1) == data.test_labels).double().mean())


def _digest(model: nn.Module, losses: list[float]) -> str:
    return digest({**model.state_dict(), "losses": torch.tensor(losses, dtype=torch.float64)})


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch. The model is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
