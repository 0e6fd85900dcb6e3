"""The images of the demo: the handwritten digits of scikit-learn, or shapes drawn here if it is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

#: Images that are kept for the test.
TEST_IMAGES = 357
CLASSES, SIZE = 10, 8


@dataclass(frozen=True)
class Data:
    """Images of shape [count, 1, 8, 8] with values from 0 to 1, and their classes. ``name`` says whose."""

    name: str
    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load(count: int | None = None) -> Data:
    """The data, or ``count`` of its training images."""
    if importlib.util.find_spec("sklearn") is None:
        name, (images, labels) = "shapes drawn here (scikit-learn is not installed)", shapes(1797)
    else:
        name, (images, labels) = "handwritten digits of scikit-learn", digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:][:count]
    return Data(name, images[train], labels[train], images[test], labels[test])


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 handwritten digits, and their values."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(loaded.target, dtype=torch.int64)


def shapes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One random shape for each class, shifted, with noise; and the classes."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand((CLASSES, 1, SIZE, SIZE), generator=generator).round()
    labels = torch.randint(CLASSES, (count,), generator=generator)
    shifts = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    images = torch.stack([
        drawn[label].roll(tuple(shift), dims=(1, 2))
        for label, shift in zip(labels.tolist(), shifts, strict=True)
    ])  # fmt: skip
    return (images + 0.4 * torch.randn(images.shape, generator=generator)).clamp(0, 1), labels
