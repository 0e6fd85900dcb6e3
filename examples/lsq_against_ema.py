"""Learned scales (LSQ) against moving averages: the same model and data, at 4, 3 and 2 bits.

A moving average makes the scale cover the largest weight, so that few codes are left for the small ones. A
learned scale finds its own trade. Every training runs twice, and its losses are the same in every bit.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import holdfast as hf

#: The codes of each number of bits. 3 bits are a part of the codes of int4.
CODES = {4: (torch.int4, None), 3: (torch.int4, (-4, 3)), 2: (torch.int2, None)}


def teacher() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and the outputs of a random network with a few large weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=generator)
    first, last = torch.randn(64, 32, generator=generator), torch.randn(64, 8, generator=generator)
    first[torch.rand(first.shape, generator=generator) < 0.02] *= 6
    return x, (x @ first.T / 6).relu() @ last / 8


def train(bits: int, mode: str, steps: int) -> list[float]:
    """The losses of a student with quantized weights, whose scales are from ``mode``."""
    torch.manual_seed(1)
    student = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    dtype, code_range = CODES[bits]
    weight = hf.qat.Quantizer(dtype=dtype, range=code_range, granularity=hf.PerChannel(0), mode=mode)
    hf.qat.prepare(student, hf.qat.Config(weight=weight))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    (x, y), losses = teacher(), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(student(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    steps = 60 if parser.parse_args().quick else 400
    torch.set_num_threads(1)

    print(f"loss after {steps} steps, mean of the last ten")
    print("bits   learned   moving average")
    for bits in CODES:
        found = {}
        for mode in ("learned", "ema"):
            losses = train(bits, mode, steps)
            assert losses == train(bits, mode, steps), f"two trainings at {bits} bits differ"
            found[mode] = sum(losses[-10:]) / 10
        print(f"{bits:4d} {found['learned']:9.4f} {found['ema']:16.4f}")
    assert found["learned"] < found["ema"], "at 2 bits the learned scale is better"
    print("each training ran twice with the same losses, in every bit")


if __name__ == "__main__":
    main()
