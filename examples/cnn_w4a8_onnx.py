"""A convolutional classifier with 4-bit weights and 8-bit inputs of layers, from training to onnxruntime.

BatchNorm is folded into the convolutions while the model is trained. The converted model has the outputs of
the trained one, and onnxruntime computes the codes and weights that holdfast computes. Both are checked in
every bit. Needs ``holdfast[onnxruntime]``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

CLASSES, SIZE = 4, 16


def waves(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images of waves, and their classes: the direction of the wave."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = labels * torch.pi / CLASSES
    phase = 6.28 * torch.rand(count, generator=generator)
    place = torch.arange(SIZE, dtype=torch.float32)
    x, y = place.view(1, 1, -1), place.view(1, -1, 1)
    along = x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1)
    image = (1.2 * along + phase.view(-1, 1, 1)).sin()
    return (image + 0.8 * torch.randn(image.shape, generator=generator))[:, None], labels


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def train(steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = hf.qat.prepare(network(), hf.qat.preset("w4a8"), fold_batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        image, label = waves(64, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(image), label).backward()
        optimizer.step()
    return model.eval()


def run_in_onnxruntime(path: Path, image: torch.Tensor) -> torch.Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, hf.export.onnx_session_options())
    (output,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    return torch.from_numpy(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="train for a few steps only")
    steps = 20 if parser.parse_args().quick else 150
    torch.set_num_threads(1)

    model = train(steps)
    print(hf.qat.report(model))
    image, label = waves(256, torch.Generator().manual_seed(2))
    with torch.no_grad():
        trained = model(image)
        deployed = hf.qat.convert(model)(image)
    assert deployed.equal(trained), "converting changed the output"

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        hf.export.onnx(model, (image,), path)
        checked = hf.export.check_onnx(path, (image,))
        output = run_in_onnxruntime(path, image)
        size = path.stat().st_size
    assert all(quantizer.different == 0 for quantizer in checked), "onnxruntime has other codes"
    right = (output.argmax(1) == label).float().mean().item()
    elements = sum(quantizer.elements for quantizer in checked)
    print(f"{right:.1%} of the images are classified correctly by onnxruntime; the file has {size:,} bytes")
    print(
        f"{len(checked)} quantizers with {elements:,} elements: the same bits in training and in onnxruntime"
    )


if __name__ == "__main__":
    main()
