"""A training step of unchanged models: torch, torch in deterministic mode, and ``hf.install``, on CUDA.

python benchmarks/install_step.py [FILE.json]

The step is forward, backward and SGD in float32. Each model is first trained twice with holdfast installed
and deterministic algorithms on, and its parameters must be equal in every bit. A mode in which torch raises
has no time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import holdfast as hf
from install_models import Detector, GraphNetwork, LanguageModel, Recommender, UNet

Inputs = tuple[torch.Tensor, ...]
STEPS, WARM = 20, 5


def _graph(nodes: int, edges: int) -> Inputs:
    ends = torch.randint(0, nodes, (2, edges))
    ends[1, : edges // 10] = torch.randint(0, 10, (edges // 10,))  # hubs
    return torch.randn(nodes, 3), ends, torch.randint(0, 64, (nodes,)).sort().values


PROBLEMS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Inputs]]] = {
    "deformable attention, 8 images of 640 x 640, 300 queries": (
        lambda: Detector(256, queries=300, layers=6, heads=8, stride=8),
        lambda: (torch.randn(8, 3, 640, 640),),
    ),
    "U-Net, bilinear, 8 images of 256 x 256": (lambda: UNet(64), lambda: (torch.randn(8, 3, 256, 256),)),
    "U-Net, bicubic, 8 images of 256 x 256": (
        lambda: UNet(64, mode="bicubic"),
        lambda: (torch.randn(8, 3, 256, 256),),
    ),
    "graph network, 10^5 nodes, 10^6 edges": (lambda: GraphNetwork(128), lambda: _graph(100_000, 1_000_000)),
    "recommender, 10^6 rows, 8192 bags of 32": (
        lambda: Recommender(1_000_000, 64),
        lambda: (torch.randint(0, 1_000_000, (8192 * 32,)), torch.arange(0, 8192 * 32, 32)),
    ),
    "transformer, 32000 tokens, 32 x 512": (
        lambda: LanguageModel(32_000, 512, 512),
        lambda: ((torch.rand(32, 512) ** 3 * 32_000).long(),),
    ),
}
#: Whether holdfast is installed and deterministic algorithms are on.
MODES = {
    "torch": (False, False),
    "installed": (True, False),
    "installed, flag on": (True, True),
    "torch, flag on": (False, True),
}


def prepared(name: str) -> tuple[torch.nn.Module, Any, Inputs]:
    torch.manual_seed(0)
    model, inputs = PROBLEMS[name]
    made = model().cuda()
    return made, torch.optim.SGD(made.parameters(), lr=1e-3), tuple(given.cuda() for given in inputs())


def step(model: torch.nn.Module, optimizer: Any, inputs: Inputs) -> None:
    optimizer.zero_grad()
    model(*inputs).backward()
    optimizer.step()


def trained(name: str) -> list[torch.Tensor]:
    model, optimizer, inputs = prepared(name)
    for _ in range(3):
        step(model, optimizer, inputs)
    return [parameter.detach().clone() for parameter in model.parameters()]


def milliseconds(name: str) -> float:
    """The median time of a step."""
    model, optimizer, inputs = prepared(name)
    for _ in range(WARM):
        step(model, optimizer, inputs)
    times = []
    for _ in range(STEPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step(model, optimizer, inputs)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": name}
    torch.use_deterministic_algorithms(True)
    with hf.installed():
        found["equal_bits"] = all(map(torch.equal, trained(name), trained(name)))
        found["passed_on"] = {row.operator: row.passed_on for row in hf.status() if row.passed_on}
        found["served"] = {row.operator: row.served for row in hf.status() if row.served}
    for mode, (install, flag) in MODES.items():
        torch.use_deterministic_algorithms(flag)
        try:
            if install:
                hf.install()
            found[mode] = milliseconds(name)
        except RuntimeError as error:
            found[mode] = None
            found["error"] = str(error).split(", but")[0].splitlines()[0]
        finally:
            hf.uninstall()
            torch.use_deterministic_algorithms(False)
            torch.cuda.empty_cache()
    return found


def main(path: str | None) -> None:
    warnings.simplefilter("ignore")
    found = [measured(name) for name in PROBLEMS]
    print(f"{'milliseconds per step':58}" + "".join(f"{mode:>20}" for mode in MODES) + "  equal bits")
    for row in found:
        times = ("raises" if row[mode] is None else f"{row[mode]:.2f}" for mode in MODES)
        print(f"{row['model']:58}" + "".join(f"{time:>20}" for time in times) + f"  {row['equal_bits']}")
        for operator, reasons in row["passed_on"].items():
            print(f"    passed on: {operator}: {reasons}")
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": found}
    if path:
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
