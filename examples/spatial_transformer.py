"""A spatial transformer: a classifier that learns to rotate and shift its image before it classifies it.

It is trained twice from the same seed, on the CPU and on a GPU if there is one (or only on ``--device``). All
weights must have equal bits after both runs. ``hf.grid_sample`` and ``hf.affine_grid`` also give equal bits
on CPU and GPU, which is checked with tensors of the trained model.

The whole training does not give equal bits on CPU and GPU: torch's convolutions, matrix products, sums and
exponentials round differently on each device.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

CLASSES, SIZE = 5, 16


class SpatialTransformer(nn.Module):
    """Predicts an affine map from the image, samples the image with it, and classifies the result."""

    def __init__(self) -> None:
        super().__init__()
        self.localize = nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128, 6)
        )
        self.classify = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, CLASSES)
        )
        last = self.localize[-1]
        nn.init.zeros_(last.weight)
        last.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))  # start with the identity map

    def straighten(self, image: torch.Tensor) -> torch.Tensor:
        theta = self.localize(image).view(-1, 2, 3)
        return hf.grid_sample(image, hf.affine_grid(theta, image.shape))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classify(self.straighten(image))


def turned_glyphs(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Randomly rotated and shifted glyphs, and their classes. Each class has one random glyph."""
    glyphs = torch.rand((CLASSES, 1, 4, 4), generator=torch.Generator().manual_seed(1)).round()
    glyphs = F.pad(F.interpolate(glyphs, scale_factor=2.0), (4, 4, 4, 4))
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = (torch.rand(count, generator=generator) - 0.5) * 1.6
    shift = (torch.rand((count, 2), generator=generator) - 0.5) * 0.4
    turn = torch.stack([angle.cos(), -angle.sin(), shift[:, 0], angle.sin(), angle.cos(), shift[:, 1]], dim=1)
    grid = hf.affine_grid(turn.view(-1, 2, 3), (count, 1, SIZE, SIZE))
    return hf.grid_sample(glyphs[labels], grid), labels


def train(device: str, steps: int) -> tuple[SpatialTransformer, float]:
    """Train a model from a fixed seed. Returns the model and its accuracy on new images."""
    torch.manual_seed(0)
    model = SpatialTransformer().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        image, label = (tensor.to(device) for tensor in turned_glyphs(64, generator))
        optimizer.zero_grad()
        F.cross_entropy(model(image), label).backward()
        optimizer.step()
    image, label = (tensor.to(device) for tensor in turned_glyphs(512, generator))
    with torch.no_grad():
        right = (model(image).argmax(1) == label).float().mean().item()
    return model, right


def digest(model: nn.Module) -> str:
    """A digest of all weights, 16 hexadecimal digits."""
    total = hashlib.sha256()
    for name, weight in model.state_dict().items():
        total.update(name.encode() + weight.cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def check_across_devices(model: SpatialTransformer) -> None:
    """Check that holdfast gives equal bits on CPU and GPU for the same tensors."""
    image, _ = turned_glyphs(64, torch.Generator().manual_seed(3))
    theta = model.to("cpu").localize(image).view(-1, 2, 3).detach()
    found = []
    for device in ("cpu", "cuda"):
        x, t = (tensor.to(device).requires_grad_() for tensor in (image, theta))
        grid = hf.affine_grid(t, image.shape)
        out = hf.grid_sample(x, grid)
        found.append([out, *torch.autograd.grad(out, (x, t), out.detach())])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device to train on; default: all")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in [given.device] if given.device else here:
        (model, right), (again, _) = train(device, given.steps), train(device, given.steps)
        assert digest(model) == digest(again), f"two trainings on {device} differ"
        print(f"{device}: {right:.1%} right; weights {digest(model)}, twice")
        if device == "cuda":
            check_across_devices(model)
            print("the sampling and its gradients: the same bits on cpu and cuda")


if __name__ == "__main__":
    main()
