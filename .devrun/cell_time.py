"""Bits against the reference, then times, of the gradients by cell. PYTHONPATH=src python .devrun/cell_time.py"""
import json, os, subprocess, sys, time
from contextlib import ExitStack
import torch, triton
import torch.nn.functional as F
import holdfast as hf
from holdfast.ops.grid_sample import gpu_cells, gpu_dgrid, gpu_dinput_by_cell as cell
from holdfast.ops.grid_sample.plan import *

T0 = time.time()
DEV = torch.device("cuda")
gen = torch.Generator(DEV).manual_seed(1)
S = hf.Stream.current("cuda")
TUNINGS = {"cell": cell.TUNING, "cells": gpu_cells.TUNING, "dgrid": gpu_dgrid.TUNING}


def tuned(changes):
    stack = ExitStack()
    for key, fields in changes.items():
        stack.enter_context(TUNINGS[key].replaced(**fields))
    return stack


def rand(*shape):
    return torch.rand(shape, device=DEV, generator=gen)


def affine(n, size, noise=0.0):
    k = len(size)
    theta = torch.eye(k, k + 1, device=DEV)[None].repeat(n, 1, 1)
    theta = theta + 0.03 * torch.randn(n, k, k + 1, device=DEV, generator=gen)
    grid = F.affine_grid(theta, [n, 1, *size], align_corners=False)
    return (grid + noise * torch.randn(grid.shape, device=DEV, generator=gen)).contiguous()


def around_centres(n, queries, points):
    return (rand(n, queries, 1, 2) * 2 - 1 + 0.05 * torch.randn((n, queries, points, 2), device=DEV, generator=gen)).contiguous()


ROWS = {
    "N8C64 affine": ((8, 64, 256, 256), lambda: affine(8, (256, 256))),
    "N8C64 noise": ((8, 64, 256, 256), lambda: affine(8, (256, 256), 0.01)),
    "N8C64 random": ((8, 64, 256, 256), lambda: rand(8, 256, 256, 2) * 2.1 - 1.05),
    "N8C64 one pixel": ((8, 64, 256, 256), lambda: rand(8, 256, 256, 2) * 0.001 + 0.0003),
    "N4C256 affine": ((4, 256, 128, 128), lambda: affine(4, (128, 128))),
    "3d C32 affine": ((1, 32, 80, 96, 112), lambda: affine(1, (80, 96, 112))),
    "N64C32 random": ((64, 32, 64, 64), lambda: rand(64, 300, 32, 2) * 2 - 1),
    "N64C32 centres": ((64, 32, 100, 134), lambda: around_centres(64, 13294, 4)),
}
PLANES = [
    {"plane_registers": 72, "volume_registers": 80}, {"plane_registers": 128, "volume_registers": 128}, {"plane_registers": None, "volume_registers": None},
    {"plane_pixels": 32, "plane_warps": 1}, {"plane_pixels": 64, "plane_warps": 2},
    {"plane_channels": 16}, {"plane_channels": 64},
]  # fmt: skip
LINES = [
    {"row_unroll": 1, "row_registers": 96}, {"row_blocks": 2, "row_registers": 80, "row_unroll": 1}, {"row_blocks": 2, "row_registers": 96},
    {"row_pixels": 8, "row_wide": 8, "row_warps": 1}, {"row_pixels": 16, "row_wide": 16, "row_warps": 2},
    {"row_pixels": 8, "row_wide": 8, "row_warps": 1, "row_unroll": 1, "row_registers": 96},
]  # fmt: skip
DGRID = [{"most_shared": 1}, {"most_shared": 4}, {"tile": 128, "warps": 4}, {"registers": None}, {"registers": 64}, {"threads": 2**20}]
CELLS = [{"tile": 256, "warps": 8}, {"copied": 2048}, {"copied": 8192}]
VARIANTS = {
    "N8C64 affine": [("i", {"cell": v}) for v in PLANES] + [("g", {"dgrid": v}) for v in DGRID],
    "N8C64 random": [("i", {"cell": v}) for v in LINES] + [("ig", {"cells": v}) for v in CELLS],
    "N4C256 affine": [("i", {"cell": v}) for v in PLANES] + [("g", {"dgrid": v}) for v in DGRID],
    "3d C32 affine": [("i", {"cell": v}) for v in PLANES] + [("g", {"dgrid": v}) for v in DGRID],
    "N8C64 noise": [("i", {"cell": v}) for v in PLANES],
    "N64C32 random": [("i", {"cell": v}) for v in LINES],
}
NEEDS = {"ig": (True, True), "i": (True, False), "g": (False, True)}


def descriptor(shape, size, dtype, needs):
    needs = NEEDS[needs]
    return GridSampleBackwardDescriptor(shape=shape, output_size=size, input_dtype=dtype, grid_dtype=torch.float32, needs_dinput=needs[0], needs_dgrid=needs[1])


def operands(desc, dout, image, grid):
    return GridSampleBackwardArgs(
        dout=dout, grid=grid, input=image if desc.needs_dgrid else None,
        dinput=torch.full_like(image, 7.0) if desc.needs_dinput else None,
        dgrid=torch.full_like(grid, 7.0) if desc.needs_dgrid else None,
    )  # fmt: skip


# Small problems: shape, output size, dtype, kind of grid, layout of dout, changes of the tuning.
SMALL = {"least_elements": 1}
CROWDED = SMALL | {"crowd": 16, "segment": 64}
BITS = [
    ((2, 20, 40, 44), (60, 50), torch.float32, "smooth", "c", SMALL),
    ((2, 20, 40, 44), (60, 50), torch.float32, "random", "c", SMALL),
    ((2, 21, 40, 13), (60, 50), torch.bfloat16, "random", "c", SMALL),
    ((2, 7, 9, 8), (40, 40), torch.float32, "one", "c", CROWDED),
    ((2, 33, 9, 8), (70, 70), torch.bfloat16, "one", "l", SMALL),
    ((2, 6, 12, 13), (70, 70), torch.float32, "random", "c", CROWDED),
    ((2, 40, 12, 36), (30, 70), torch.float32, "random", "l", CROWDED),
    ((1, 9, 12, 13, 40), (12, 20, 33), torch.float32, "smooth", "c", SMALL),
    ((2, 18, 7, 8, 9), (12, 10, 13), torch.float32, "random", "c", CROWDED),
    ((1, 130, 12, 33), (24, 17), torch.float32, "smooth", "c", SMALL),
    ((1, 1040, 5, 33), (9, 17), torch.float32, "smooth", "c", SMALL),
]


def bits(number):
    shape, size, dtype, kind, layout, changes = BITS[number]
    axes, bad = len(size), []
    make = {"smooth": lambda: affine(shape[0], size, 0.02), "random": lambda: rand(shape[0], *size, axes) * 2.6 - 1.3, "one": lambda: rand(shape[0], *size, axes) * 0.01}
    grid = make[kind]()
    for special in (False, True):
        image = torch.randn(shape, generator=gen, device=DEV).to(dtype)
        dout = torch.randn((*shape[:2], *size), generator=gen, device=DEV).to(dtype)
        if special:
            for at, value in ((5, "inf"), (-9, "nan"), (50, "-inf"), (0, "nan"), (700, "inf")):
                dout.view(-1)[at] = float(value)
            dout[:, 2] *= 1e-30
        if layout == "l":
            dout = dout.contiguous(memory_format=torch.channels_last if axes == 2 else torch.channels_last_3d)
        with tuned({"cell": changes}):
            made = []
            for backend, device in (("reference", "cpu"), ("gpu", "cuda")):
                desc, stream = descriptor(shape, size, dtype, "ig"), hf.Stream.current(device)
                plan = GridSampleBackwardPlan.select(stream, desc, hf.PlanPreference(backend=backend))
                if backend == "gpu":
                    assert isinstance(plan.kernel.sums, cell.CellSums), "not by cell"
                args = operands(desc, dout.to(device), image.to(device), grid.to(device))
                work = hf.Workspace.allocate(plan.workspace_size(), torch.device(device))
                if work.buffer is not None:
                    work.buffer.view(-1).view(torch.uint8).fill_(0x5A)
                for _ in range(3 if backend == "gpu" else 1):
                    plan.run(stream, work, args)
                torch.cuda.synchronize()
                made.append((args.dinput.cpu(), args.dgrid.cpu()))
        for name, x, y in zip(("dinput", "dgrid"), *made):
            differ = ((x != y) & ~(x.isnan() & y.isnan())).sum().item()
            if differ:
                bad.append(f"{name} special={special}: {differ} of {x.numel()} differ")
    print(f"BITS {number} {shape} {kind} {layout}: {bad or 'equal'}", flush=True)


def compile_base(name, dtype):
    shape, make = ROWS[name]
    size = tuple(make().shape[1:-1])
    for needs in ("ig", "g"):
        GridSampleBackwardPlan.select(S, descriptor(shape, size, getattr(torch, dtype), needs))


def compile_variants(name, first):
    shape, make = ROWS[name]
    size = tuple(make().shape[1:-1])
    for needs, changes in VARIANTS[name][int(first)::3]:
        with tuned(changes):
            GridSampleBackwardPlan.select(S, descriptor(shape, size, torch.float32, needs))


def bench(f):
    return triton.testing.do_bench(f, warmup=4, rep=14, return_mode="median") * 1e3


def graphed(f):
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stream = hf.Stream.current("cuda")
        f(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            f(stream)
    torch.cuda.synchronize()
    return bench(graph.replay)


def run_all():
    out = {}
    base = [[name, dtype] for name in ("N8C64 affine", "N4C256 affine", "3d C32 affine", "N64C32 random", "N64C32 centres") for dtype in ("float32", "bfloat16")]
    variants = [[name, str(n)] for name in VARIANTS if name != "N8C64 noise" for n in range(3)]
    running, failed = [], []

    def drain(most):
        while len(running) > most:
            for job, process in list(running):
                if process.poll() is not None:
                    running.remove((job, process))
                    text = process.communicate()[0]
                    for line in text.splitlines():
                        if line.startswith("BITS"):
                            print(line, flush=True)
                    if process.returncode:
                        failed.append(job)
                        print("FAILED", job, text[-1500:], flush=True)
            time.sleep(0.05)

    def start(job):
        running.append((job, subprocess.Popen([sys.executable, __file__, *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))

    for job in base:
        start(["base", *job])
    for number in range(len(BITS)):
        drain(15)
        start(["bits", str(number)])
    while any(job[0] == "base" for job, _ in running):
        drain(max(len(running) - 1, 0))
    print(f"base compiled: {time.time() - T0:.0f} s", flush=True)
    for job in variants:
        drain(15)
        start(["variants", *job])
    drain(0)
    print(f"bits and compilation: {time.time() - T0:.0f} s", flush=True)
    plans = [(row, dtype, False) for dtype in (torch.float32, torch.bfloat16) for row in ROWS.items()]
    plans += [((name, ROWS[name]), torch.float32, True) for name in VARIANTS]
    if True:
        for (name, (shape, make)), dtype, with_variants in plans:
            key = f"{name} {'f32' if dtype == torch.float32 else 'bf16'}"
            if time.time() - T0 > 84:
                print("skipped", key)
                continue
            torch.cuda.empty_cache()
            grid = make()
            size = tuple(grid.shape[1:-1])
            image = torch.randn(shape, generator=gen, device=DEV).to(dtype)
            dout = torch.randn((*shape[:2], *size), generator=gen, device=DEV).to(dtype)
            op = torch.ops.aten.grid_sampler_2d_backward if len(size) == 2 else torch.ops.aten.grid_sampler_3d_backward
            own = grid.to(dtype)
            row = out.get(key, {})
            if not with_variants:
                row = {"torch": bench(lambda: op(dout, image, own, 0, 0, False, [True, True]))}
                expected = op(dout.float(), image.float(), grid, 0, 0, False, [True, True])
            todo = VARIANTS[name] if with_variants else [("ig", {}), ("i", {}), ("g", {})]
            for needs, changes in todo:
                if changes and time.time() - T0 > 84:
                    break
                desc = descriptor(shape, size, dtype, needs)
                label = needs + "".join(f" {k}={v}" for fields in changes.values() for k, v in fields.items())
                try:
                    with tuned(changes):
                        plan = GridSampleBackwardPlan.select(S, desc)
                    args, work = operands(desc, dout, image, grid), hf.Workspace.allocate(plan.workspace_size(), DEV)
                    row[label] = graphed(lambda stream: plan.run(stream, work, args))
                except Exception as error:
                    row[label] = None
                    print("ERROR", key, label, repr(error)[:200], flush=True)
                    continue
                if needs == "ig" and not changes:
                    row["ig eager"] = bench(lambda: plan.run(S, work, args))
                    row["ws MiB"] = plan.workspace_size() / 2**20
                    row["by"] = type(plan.kernel.sums).__name__
                    if isinstance(plan.kernel.sums, cell.CellSums):
                        row["images"], row["copies"] = plan.kernel.sums.images, plan.kernel.sums.copies
                    for label, x, y in zip(("err dinput", "err dgrid"), (args.dinput, args.dgrid), expected):
                        row[label] = ((x.float() - y).abs().max() / y.abs().max()).item()
                    if name in ("N8C64 affine", "N8C64 random", "N4C256 affine", "N64C32 centres"):
                        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                            for _ in range(5):
                                plan.run(S, work, args)
                            torch.cuda.synchronize()
                        row["kernels"] = {e.key[:24]: round(e.device_time_total / 5, 1) for e in profile.key_averages()}
                args = work = plan = None
            out[key] = row
            json.dump(out, open(os.environ["OUT"] + "/cell_time.json", "w"), indent=1)
            if with_variants:
                row = {k: v for k, v in row.items() if k[0] in "ig" and k != "images"}
            shown = {k: round(v, 1) if isinstance(v, float) and v > 1 else v for k, v in row.items()}
            print(key, json.dumps(shown), flush=True)
    print(f"failed: {failed}; {time.time() - T0:.0f} s")
    print(f"{'':24s}{'torch':>9s}{'both':>9s}{'eager':>9s}{'dinput':>9s}{'dgrid':>9s}{'ratio':>7s}")
    for key, row in out.items():
        if row.get("ig"):
            print(f"{key:24s}" + "".join(f"{row[k]:9.1f}" if row.get(k) else "        -" for k in ("torch", "ig", "ig eager", "i", "g")) + f"{row['torch'] / row['ig']:7.2f}")


if len(sys.argv) == 1:
    run_all()
else:
    {"bits": lambda n: bits(int(n)), "base": compile_base, "variants": compile_variants}[sys.argv[1]](*sys.argv[2:])
