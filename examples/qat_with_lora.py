"""LoRA adapters on a frozen base with 4-bit weights: the adapters learn around the quantization error.

The base is quantized from the start, so the adapters are trained on the weights that are deployed. Only the
adapters change: the codes of the base are the same before and after, in every bit, and ``convert`` packs them
without a change of the output.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import holdfast as hf


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two small matrices that is added to it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    steps = 30 if parser.parse_args().quick else 300
    torch.set_num_threads(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    x = torch.randn(256, 64)
    with torch.no_grad():
        target = model(x)  # the float model is the teacher
    model = nn.Sequential(LoRA(model[0]), nn.ReLU(), LoRA(model[2]))
    hf.qat.prepare(model, {"*.base": hf.qat.preset("w4a16-g32")})
    before = hf.qat.quantized_weights(model)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=3e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    after = hf.qat.quantized_weights(model)
    for name, weight in before.items():
        assert after[name].codes.equal(weight.codes) and after[name].scale.equal(weight.scale), name
    model.eval()
    with torch.no_grad():
        prepared = model(x)
        assert hf.qat.convert(model)(x).equal(prepared), "converting changed the output"
    assert losses[-1] < 0.7 * losses[0], "the adapters did not learn"
    codes = sum(weight.codes.numel() for weight in after.values())
    print(f"{codes:,} frozen 4-bit weights, {sum(p.numel() for p in trained):,} trained values in adapters")
    print(f"error of the output: {losses[0]:.2e} before, {losses[-1]:.2e} after {steps} steps")
    print("the codes of the base are unchanged, and the converted model has the same output, in every bit")


if __name__ == "__main__":
    main()
