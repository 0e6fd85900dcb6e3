"""Times a training step of a decoder stack in bfloat16, with and without quantization-aware training.

    python benchmarks/qat_step.py [--layers 3] [--tokens 4096] [--width 4096] [--json FILE]

Every variant is compiled by torch.compile and runs the same step: forward, backward, and optionally AdamW.
"formulas" stands for libraries that fake-quantize by formulas in torch: the scale of each group from its
largest magnitude, then ``round(x * (1 / scale))``, with a straight-through gradient. The variants take turns.
A turn is several steps, and the host waits for the device only after the last, as a training loop does.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn.utils import parametrize

import holdfast as hf

GROUP = 32
#: Steps per turn.
STEPS = 4


class Block(nn.Module):
    """A decoder block: attention over heads of 128, and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 43 // 16
        self.heads = width // 128
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, 128)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Formulas(nn.Module):
    """int4 in groups by formulas in torch, as libraries without kernels of their own compute it."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        groups = weight.unflatten(-1, (-1, GROUP)).float()
        scale = (groups.detach().abs().amax(-1, keepdim=True) / 7.5).clamp_min(torch.finfo(torch.float32).eps)
        scaled = groups * (1.0 / scale)
        rounded = scaled + (scaled.round() - scaled).detach()
        return (rounded.clamp(-8, 7) * scale).flatten(-2).to(weight.dtype)


def learned(model: nn.Module) -> None:
    config = hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerGroup(GROUP, axis=1), mode="learned")
    hf.qat.prepare(model, {nn.Linear: hf.qat.Config(weight=config)})


def with_formulas(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            parametrize.register_parametrization(module, "weight", Formulas())


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "no QAT": lambda model: None,
    "hf.qat w4a16-g32": lambda model: hf.qat.prepare(model, {nn.Linear: hf.qat.preset("w4a16-g32")}),
    "hf.qat w4a16-g32, learned scales": learned,
    "formulas, compiled": with_formulas,
}


def make_step(
    change: Callable[[nn.Module], object], device: str, layers: int, tokens: int, width: int
) -> Callable[..., None]:
    """A training step of a new model; ``step(True)`` also updates the weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(Block(width) for _ in range(layers))).to(torch.bfloat16)
        x = torch.randn(2, tokens // 2, width, dtype=torch.bfloat16)
        target = torch.randn_like(x)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compiled = torch.compile(model)

    def step(update: bool = False) -> None:
        F.mse_loss(compiled(x).float(), target.float()).backward()
        if update:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def milliseconds(step: Callable[[], None], device: str) -> float:
    """The time of one step, of STEPS that follow each other."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / STEPS


def main(
    layers: int = 3,
    tokens: int = 4096,
    width: int = 4096,
    turns: int = 15,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time every variant, and print its ratio to the step without quantization."""
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = {name: make_step(change, device, layers, tokens, width) for name, change in VARIANTS.items()}
    times: dict[str, dict[str, list[float]]] = {name: {"step": [], "update": []} for name in steps}
    for turn in track(range(-2, turns), "training", console=console, transient=True):
        for name, step in steps.items():
            taken = {"step": milliseconds(step, device)}
            taken["update"] = milliseconds(partial(step, True), device)
            for kind, found in taken.items():
                times[name][kind] += [found] if turn >= 0 else []
    table = Table("variant", "forward + backward, ms", "ratio", "with AdamW, ms", "ratio")
    median = {
        name: {kind: statistics.median(of) for kind, of in kinds.items()} for name, kinds in times.items()
    }
    base = median["no QAT"]
    for name, found in median.items():
        cells = [f for kind in found for f in (f"{found[kind]:.2f}", f"{found[kind] / base[kind]:.3f}")]
        table.add_row(name, *cells)
    console.print(table)
    if output is not None:
        versions = {"torch": torch.__version__, "holdfast": hf.__version__}
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        sizes = {"layers": layers, "tokens": tokens, "width": width, "turns": turns, "steps": STEPS}
        found = {"device": name, "versions": versions, **sizes, "milliseconds": median}
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
