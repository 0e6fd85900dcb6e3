"""Random problems of a plan: shapes, dtypes, modes, granularities, operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import holdfast as hf
from exact.long_sums import Problem, made
from exact.values import KINDS, Rng, terms
from holdfast.core.dtypes import FLOATS
from holdfast.core.formats import FLOAT_FORMATS, INTEGERS, format_of
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.grid_sample.plan import Mode, Padding
from holdfast.ops.interpolate.plan import ANTIALIASED, AXES
from holdfast.ops.interpolate.plan import Mode as Resize
from holdfast.ops.scatter.plan import BASES, REDUCTIONS

REALS = [record.torch for record in FLOATS.values()]


def one_of(rng: Rng, choices: Any) -> Any:
    found = list(choices)
    return found[int(rng.integers(len(found)))]


def size(rng: Rng, most: int) -> int:
    """A random size: every power of two with the same probability, or a number next to it."""
    near = 2 ** int(rng.integers(0, most.bit_length())) + int(rng.integers(-1, 2))
    return min(max(near, 1), most)


def real(rng: Rng, shape: Any, dtype: torch.dtype, factors: int = 1) -> torch.Tensor:
    """Random numbers of a random kind. Products of ``factors`` of them do not overflow."""
    count = int(np.prod(shape))
    return terms(one_of(rng, KINDS), rng, count, 1, dtype, factors).reshape(tuple(shape))


def indices(rng: Rng, shape: Any, rows: int) -> torch.Tensor:
    """Random indices of few or many rows, some of them out of range."""
    reach = min(size(rng, 64), rows)
    found = rng.integers(0, reach, shape)
    return torch.from_numpy(np.where(rng.random(shape) < 0.03, rows, found).astype(np.int64))


def segment_sum(plan: Any, rng: Rng) -> Problem:
    desc = plan.Descriptor(
        shape=(size(rng, 300),), segments=size(rng, 20), width=size(rng, 5), dtype=one_of(rng, REALS)
    )
    return made(
        plan.__name__, desc, terms=real(rng, (*desc.shape, desc.width), desc.dtype),
        destinations=indices(rng, desc.shape, desc.segments),
    )  # fmt: skip


def scatter(plan: Any, rng: Rng) -> Problem:
    shape = (size(rng, 20), size(rng, 20))
    dim, table = int(rng.integers(2)), list(shape)
    table[dim] = size(rng, 20)
    index = torch.from_numpy(rng.integers(0, min(size(rng, 64), table[dim]), shape))
    if plan.op == "gather":
        desc = plan.Descriptor(shape=shape, table=tuple(table), dim=dim, dtype=one_of(rng, REALS))
        return made(plan.__name__, desc, input=real(rng, table, desc.dtype), index=index)
    base, reduce = one_of(rng, BASES), one_of(rng, REDUCTIONS)
    alpha = one_of(rng, [1.0, 0.3]) if (base, reduce) == ("added", "sum") else 1.0
    desc = plan.Descriptor(
        shape=shape, table=tuple(table), dim=dim, width=one_of(rng, [None, 3]), base=base, reduce=reduce,
        alpha=alpha, dtype=one_of(rng, REALS),
    )  # fmt: skip
    given = desc.expected("input")
    return made(
        plan.__name__, desc, src=real(rng, desc.expected("src")[0], desc.dtype),
        input=None if given is None else real(rng, given[0], desc.dtype),
        index=index,
    )  # fmt: skip


def embedding(plan: Any, rng: Rng) -> Problem:
    fields: dict[str, Any] = {
        "shape": (size(rng, 20), size(rng, 20)), "num_embeddings": size(rng, 20),
        "embedding_dim": size(rng, 5), "dtype": one_of(rng, REALS),
    }  # fmt: skip
    if plan.direction == "forward":
        desc = plan.Descriptor(**fields, bad_index="skip")
        weight = real(rng, (desc.rows, desc.columns), desc.dtype)
        return made(plan.__name__, desc, weight=weight, indices=indices(rng, desc.shape, desc.rows))
    padding = one_of(rng, [None, 0])
    desc = plan.Descriptor(**fields, padding_idx=padding, scale_grad_by_freq=one_of(rng, [False, True]))
    dout = real(rng, (*desc.shape, desc.columns), desc.dtype)
    return made(plan.__name__, desc, dout=dout, indices=indices(rng, desc.shape, desc.rows))


def embedding_bag(plan: Any, rng: Rng) -> Problem:
    fields: dict[str, Any] = {
        "num_embeddings": size(rng, 20), "embedding_dim": size(rng, 70), "dtype": one_of(rng, REALS),
        "mode": one_of(rng, ["sum", "mean", "max"]), "padding_idx": one_of(rng, [None, 0]),
    }  # fmt: skip
    fields["per_sample_weights"] = fields["mode"] == "sum" and one_of(rng, [False, True])
    operands: dict[str, Any] = {}
    if one_of(rng, [False, True]):
        count = size(rng, 200)
        begins = np.sort(rng.integers(0, count + 1, size(rng, 8)))
        begins[0] = 0
        fields |= {"shape": (count,), "offsets": len(begins)}
        operands["offsets"] = torch.from_numpy(begins)
    else:
        fields["shape"] = (size(rng, 8), size(rng, 70))
    if plan.direction == "forward":
        desc = plan.Descriptor(**fields, bad_index="skip")
    else:
        weighted = fields["per_sample_weights"] and one_of(rng, [False, True])
        desc = plan.Descriptor(
            **fields, dper_sample_weights=weighted, dweight=not weighted or one_of(rng, [False, True]),
            scale_grad_by_freq=fields["mode"] != "max" and one_of(rng, [False, True]),
        )  # fmt: skip
    operands["indices"] = indices(rng, desc.shape, desc.rows)
    for name in ("weight", "dout", "per_sample_weights"):
        expected = desc.expected(name)
        if expected is not None and name in plan.operands:
            operands[name] = real(rng, *expected, factors=2)
    return made(plan.__name__, desc, **operands)


def grid_sample(plan: Any, rng: Rng) -> Problem:
    axes = one_of(rng, [2, 2, 3])
    dtype = one_of(rng, REALS)
    fields: dict[str, Any] = {
        "shape": (size(rng, 2), size(rng, 40), *(size(rng, 6) for _ in range(axes))),
        "output_size": tuple(size(rng, 8 if axes == 2 else 3) for _ in range(axes)),
        "mode": one_of(rng, Mode if axes == 2 else [Mode.BILINEAR, Mode.NEAREST]),
        "padding_mode": one_of(rng, Padding), "align_corners": one_of(rng, [False, True]),
        "input_dtype": dtype,
        "grid_dtype": one_of(rng, [dtype, torch.float32 if dtype.itemsize == 2 else dtype]),
    }  # fmt: skip
    if plan.direction == "backward":
        fields["needs_dinput"] = one_of(rng, [False, True])
        fields["needs_dgrid"] = not fields["needs_dinput"] or one_of(rng, [False, True])
    desc = plan.Descriptor(**fields)
    grid = rng.uniform(-1.3, 1.3, desc.grid_shape)
    grid = np.where(
        rng.random(grid.shape) < 0.2, np.round(grid * 4) / 4 + rng.normal(0, 1e-6, grid.shape), grid
    )
    operands: dict[str, Any] = {"grid": torch.from_numpy(grid).to(desc.grid_dtype)}
    for name in ("input", "dout"):
        expected = desc.expected(name)
        if expected is not None and name in plan.operands:
            operands[name] = real(rng, *expected, factors=2)
    return made(plan.__name__, desc, **operands)


def affine_grid(plan: Any, rng: Rng) -> Problem:
    axes = one_of(rng, [2, 3])
    desc = plan.Descriptor(
        shape=(size(rng, 3), axes, axes + 1), output_size=tuple(size(rng, 17) for _ in range(axes)),
        align_corners=one_of(rng, [False, True]), dtype=one_of(rng, REALS),
    )  # fmt: skip
    read = "theta" if plan.direction == "forward" else "dgrid"
    return made(plan.__name__, desc, **{read: real(rng, *desc.expected(read))})


def interpolate(plan: Any, rng: Rng) -> Problem:
    mode = one_of(rng, list(Resize))
    axes = AXES.get(mode) or one_of(rng, [1, 2, 3])
    longest = (40, 12, 5)[axes - 1]
    desc = plan.Descriptor(
        shape=(size(rng, 2), size(rng, 3), *(size(rng, longest) for _ in range(axes))),
        output_size=tuple(size(rng, longest) for _ in range(axes)), mode=mode, dtype=one_of(rng, REALS),
        align_corners=mode in AXES and one_of(rng, [False, True]),
        antialias=mode in ANTIALIASED and one_of(rng, [False, True]),
    )  # fmt: skip
    read = "input" if plan.direction == "forward" else "dout"
    return made(plan.__name__, desc, **{read: real(rng, *desc.expected(read))})


def shaped(rng: Rng) -> tuple[tuple[int, ...], Granularity]:
    """A random shape and a granularity that fits it."""
    shape = tuple(size(rng, 40) for _ in range(int(rng.integers(1, 4))))
    axis = int(rng.integers(len(shape)))
    divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
    return shape, one_of(
        rng, [PerTensor(), PerToken(), PerChannel(axis), PerGroup(one_of(rng, divisors), axis)]
    )


def scale_for(rng: Rng, desc: Any, dtype: torch.dtype) -> torch.Tensor:
    """Scales for which ordinary numbers lie in and around the range of the codes."""
    most = max(abs(end) for end in getattr(desc, "code_range", (8,)))
    sizes = rng.uniform(1, 6, desc.view.scale_shape) / max(min(most, 50), 1)
    return torch.from_numpy(np.asarray(sizes)).to(dtype)


def quantize(plan: Any, rng: Rng) -> Problem:
    """A problem of quantize or dequantize, of any granularity."""
    shape = tuple(size(rng, 12) for _ in range(int(rng.integers(1, 4))))
    axis = int(rng.integers(len(shape)))
    fields: dict[str, Any] = {"shape": shape}
    if "PerChannel" in plan.__name__:
        fields["axis"] = axis
    if "PerGroup" in plan.__name__:
        divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
        fields |= {"axis": axis, "group_size": one_of(rng, divisors)}
    dtype = one_of(rng, REALS)
    stored = [*INTEGERS.values(), *FLOAT_FORMATS.values()]
    codes = one_of(rng, [*(record.torch for record in stored), torch.float32, dtype])
    drawn = format_of(codes, "codes")
    if plan.op == "quantize":
        fields |= {"input_dtype": dtype, "output_dtype": codes}
        if drawn.carried:
            fields |= {"q_min": -int(rng.integers(0, 200)), "q_max": int(rng.integers(0, 200))}
    else:
        fields |= {"input_dtype": codes, "output_dtype": dtype}
    desc = plan.Descriptor(**fields)
    operands: dict[str, Any] = {"scale": scale_for(rng, desc, one_of(rng, [torch.float32, dtype]))}
    names = plan.Args.__dataclass_fields__
    if "zero_point" in names and drawn.zero_point:
        zero_points = rng.integers(-9, 9, desc.view.scale_shape)
        operands["zero_point"] = torch.from_numpy(np.asarray(zero_points)).to(torch.int32)
    for name in ("x", "dy"):
        if name in names:
            operands[name] = real(rng, *desc.expected(name), factors=2)
    if "q" in names and plan.direction == "forward":
        code_shape, storage = desc.expected("q")
        if plan.op == "quantize":
            operands["q"] = torch.zeros(code_shape, dtype=storage)
        elif drawn.is_float:
            operands["q"] = torch.from_numpy(rng.integers(0, 127, code_shape, dtype=np.uint8)).view(storage)
        elif storage.is_floating_point:
            operands["q"] = torch.from_numpy(rng.normal(0, 30, code_shape)).to(storage)
        else:
            low, high = desc.codes.code_range
            operands["q"] = torch.from_numpy(rng.integers(low, high + 1, code_shape)).to(storage)
    return made(plan.__name__, desc, **operands)


def fake_quantize(plan: Any, rng: Rng) -> Problem:
    shape, granularity = shaped(rng)
    dtype = one_of(rng, REALS)
    fields: dict[str, Any] = {"shape": shape, "granularity": granularity, "input_dtype": dtype}
    stored = [*INTEGERS.values(), *FLOAT_FORMATS.values()]
    learned = plan.op == "fake_quantize_learned"
    drawn = one_of(rng, [record for record in stored if not (learned and record.is_float)])
    fields["dtype"] = drawn.torch
    if plan.direction == "backward":
        fields["ste"] = one_of(rng, SteKind)
    scale_dtype = one_of(rng, [torch.float32, dtype])
    zero_point_dtype = one_of(rng, [torch.float32, dtype])
    if plan.op == "fake_quantize_learned":
        fields |= {"scale_dtype": scale_dtype, "grad_factor": float(rng.uniform(0.01, 2))}
        fields["zero_point_dtype"] = one_of(rng, [None, zero_point_dtype])
    desc = plan.Descriptor(**fields)
    operands: dict[str, Any] = {"scale": scale_for(rng, desc, scale_dtype)}
    zero_points = torch.from_numpy(np.asarray(rng.normal(0, 3, desc.view.scale_shape)))
    operands["zero_point"] = zero_points.to(zero_point_dtype) if drawn.zero_point else None
    if plan.op == "fake_quantize_learned" and desc.zero_point_dtype is None:
        operands |= {"zero_point": None, "dzero_point": None}
    operands["x"] = real(rng, shape, dtype, factors=2)
    if plan.direction == "backward":
        operands["dy"] = real(rng, shape, dtype, factors=2)
    return made(plan.__name__, desc, **operands)


def of_data(plan: Any, rng: Rng) -> Problem:
    """A problem of an op that reduces the elements of each scale."""
    shape, granularity = shaped(rng)
    dtype = one_of(rng, REALS)
    fields: dict[str, Any] = {"shape": shape, "granularity": granularity, "input_dtype": dtype}
    operands: dict[str, Any] = {}
    if plan.op == "lsq_init":
        fields["q_max"] = size(rng, 2**16)
    elif plan.op != "observe_range":
        symmetric = one_of(rng, [False, True])
        codes = [record for record in INTEGERS.values() if record.signed or not symmetric]
        codes += [record for record in FLOAT_FORMATS.values() if symmetric]
        named = "dtype" if plan.op == "dynamic_fake_quantize" else "output_dtype"
        fields |= {"symmetric": symmetric, named: one_of(rng, codes).torch}
    if plan.direction == "backward":
        return _of_chosen_scale(plan, rng, fields)
    desc = plan.Descriptor(**fields)
    if getattr(desc, "symmetric", False):
        operands["zero_point"] = None
    elif "zero_point" in plan.outputs:
        operands["zero_point"] = torch.zeros(desc.view.scale_shape, dtype=torch.int32)
    if "q" in plan.outputs:
        code_shape, storage = desc.expected("q")
        operands["q"] = torch.zeros(code_shape, dtype=storage)
    x = real(rng, shape, dtype)
    if operands.get("zero_point") is not None and shape and one_of(rng, [False, True]):
        x = x / 2 - x.flip(-1) / 2  # the range of a token is symmetric, so low / scale is close to a tie
    return made(plan.__name__, desc, x=x, **operands)


def _of_chosen_scale(plan: Any, rng: Rng, fields: dict[str, Any]) -> Problem:
    """A gradient with the scale that was chosen for x."""
    shape, dtype = fields["shape"], fields["input_dtype"]
    x = real(rng, shape, dtype)
    rule = {name: fields[name] for name in ("granularity", "symmetric", "dtype")}
    scale, *zero_point = hf.dynamic_fake_quantize(x, return_scale=True, **rule)[1:]
    operands = {"x": x, "dy": real(rng, shape, dtype), "scale": scale}
    desc = plan.Descriptor(**fields, ste=one_of(rng, SteKind))
    return made(plan.__name__, desc, **operands, zero_point=zero_point[0] if zero_point else None)


#: By op, the function that draws a problem of one of its plans.
DRAWN: dict[str, Callable[[Any, Rng], Problem]] = {
    "segment_sum": segment_sum,
    "scatter": scatter,
    "gather": scatter,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    "grid_sample": grid_sample,
    "affine_grid": affine_grid,
    "interpolate": interpolate,
    "quantize": quantize,
    "dequantize": quantize,
    "fake_quantize": fake_quantize,
    "fake_quantize_learned": fake_quantize,
    "lsq_init": of_data,
    "observe_range": of_data,
    "choose_scale": of_data,
    "dynamic_quantize": of_data,
    "dynamic_fake_quantize": of_data,
}
