"""Times interpolate and its gradient on a GPU, against torch's operator.

    python benchmarks/interpolate.py --json benchmarks/interpolate/h200.json

Prints microseconds of torch and of the plans, and of a copy of as many bytes. Results of two images are first
compared with those of the CPU, bit by bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table

import holdfast as hf

#: Shape of the input, size of the output, mode, whether it is antialiased, and whether channels are last.
CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], str, bool, bool], ...] = (
    ((8, 64, 128, 128), (256, 256), "nearest", False, False),
    ((8, 64, 128, 128), (256, 256), "nearest", False, True),
    ((8, 64, 128, 128), (256, 256), "bilinear", False, False),
    ((8, 64, 128, 128), (256, 256), "bilinear", False, True),
    ((8, 64, 128, 128), (256, 256), "bicubic", False, False),
    ((2, 32, 32, 64, 64), (64, 128, 128), "trilinear", False, False),
    ((4, 256, 32, 32), (64, 64), "bilinear", False, False),
    ((8, 48, 100, 100), (177, 177), "bilinear", False, False),
    ((4, 19, 128, 256), (512, 1024), "bilinear", False, False),
    ((4, 21, 64, 64), (512, 512), "bilinear", False, False),
    ((8, 64, 256, 256), (128, 128), "bilinear", False, False),
    ((8, 64, 256, 256), (128, 128), "area", False, False),
    ((16, 3, 512, 512), (224, 224), "bilinear", True, False),
    ((16, 3, 512, 512), (224, 224), "bicubic", True, False),
)


def microseconds(call: Callable[[], object]) -> float:
    found = triton.testing.do_bench(call, warmup=3, rep=12, return_mode="median")
    return round(float(found) * 1e3, 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def measured(
    shape: tuple[int, ...], size: tuple[int, ...], mode: str, antialias: bool, last: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Times of one case. Exits if the GPU and the CPU differ."""
    generator = torch.Generator("cuda").manual_seed(7)
    layout = torch.channels_last if last else torch.contiguous_format
    image, dout = (
        torch.randn(sizes, device="cuda", generator=generator).to(dtype).contiguous(memory_format=layout)
        for sizes in (shape, (*shape[:2], *size))
    )
    options: dict[str, Any] = {"size": size, "mode": mode, "antialias": antialias}
    name = f"{'x'.join(map(str, shape))} to {'x'.join(map(str, size))} {mode}{' antialias' * antialias}"
    some = image[:2].cpu().requires_grad_()
    of_cpu = hf.interpolate(some, **options)
    (gradient_of_cpu,) = torch.autograd.grad(of_cpu, some, dout[:2].cpu())

    stream, fields = hf.Stream.current("cuda"), {"output_size": size, "mode": mode, "antialias": antialias}
    forward = hf.plans.InterpolatePlan.select(
        stream, hf.plans.InterpolateDescriptor(shape=shape, dtype=dtype, **fields)
    )
    backward = hf.plans.InterpolateBackwardPlan.select(
        stream, hf.plans.InterpolateBackwardDescriptor(shape=shape, dtype=dtype, **fields)
    )
    out, dinput = torch.empty_like(dout), torch.empty_like(image)
    read = hf.plans.InterpolateArgs(input=image, out=out)
    written = hf.plans.InterpolateBackwardArgs(dout=dout, dinput=dinput)
    forward.run(stream, None, read)
    backward.run(stream, None, written)
    if not (same_bits(out[:2].cpu(), of_cpu.detach()) and same_bits(dinput[:2].cpu(), gradient_of_cpu)):
        raise SystemExit(f"{name} {dtype}: the GPU and the CPU differ; nothing was timed.")

    source = image.clone().requires_grad_()
    of_torch = F.interpolate(source, **options)
    gradient = lambda: torch.autograd.grad(of_torch, source, dout, retain_graph=True)  # noqa: E731
    copied = torch.empty((image.nbytes + dout.nbytes) // 2, dtype=torch.uint8, device="cuda")
    return {
        "case": name,
        "dtype": str(dtype).removeprefix("torch."),
        "channels_last": last,
        "copy": microseconds(copied.clone),
        "forward": {
            "torch": microseconds(lambda: F.interpolate(image, **options)),
            "holdfast": microseconds(lambda: forward.run(stream, None, read)),
        },
        "backward": {
            "torch": microseconds(gradient),
            "holdfast": microseconds(lambda: backward.run(stream, None, written)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    path = parser.parse_args().json
    device = torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    found = {
        "device": device,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "unit": "microseconds",
        "rows": rows,
    }
    cases = [(*case, dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)]
    for case in track(cases, "interpolate", transient=True):
        rows.append(measured(*case))
        if path:  # after each case, so that an interrupted run keeps its results
            path.write_text(json.dumps(found, indent=1) + "\n")
    shown = Table("case", "dtype", "last", "copy", "forward: torch, holdfast", "backward: torch, holdfast")
    for row in rows:
        times = (", ".join(map(str, row[name].values())) for name in ("forward", "backward"))
        shown.add_row(row["case"], row["dtype"], "yes" * row["channels_last"], str(row["copy"]), *times)
    Console(width=120).print(shown, f"{device}, microseconds")


if __name__ == "__main__":
    main()
