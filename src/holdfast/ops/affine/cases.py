"""Test inputs of the quantization ops: shapes, layouts, values, scales and zero points.

There is a list for each granularity. The lists are not the product of all settings: at each granularity
every real dtype is combined with a quarter of the code dtypes, and with all of them over the four
granularities. The other cases vary one setting at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.case import laid_out, outputs_of, random_bits
from holdfast.core.dtypes import FLOATS, Float, dtype_name, float_dtype
from holdfast.core.formats import E4M3FN, FLOAT_FORMATS, INT4, INTEGERS, UINT4, Format, format_of
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.values import BITS, of_any_bits, of_every_exponent, rounded, special_values, spread
from holdfast.ops.affine.plan import Scale, ZeroPoint

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """The settings of a case. Each op makes its descriptor and args from them."""

    name: str
    granularity: Granularity
    shape: tuple[int, ...]
    real: torch.dtype = torch.float32
    codes: torch.dtype = torch.int8
    packed: bool = False
    limits: tuple[int, int] | None = None
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the inputs, and of the output
    values: str = "spread"
    scale: str = "float32"
    zero_point: str = "tensor"
    accumulate: bool = False
    upstream: str = ""  # the layout of dy, if it differs from that of x

    @property
    def code_range(self) -> tuple[int, int]:
        return self.limits or format_of(self.codes, "codes").code_range

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return self.granularity.view(self.shape).scale_shape

    @property
    def fields(self) -> dict[str, Any]:
        """Descriptor fields of the granularity."""
        return asdict(self.granularity)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class _Shapes:
    """Shapes for one granularity: a plain one, odd ones by name, and shapes for particular cases."""

    plain: tuple[tuple[int, ...], Granularity]
    image: tuple[tuple[int, ...], Granularity]
    square: tuple[tuple[int, ...], Granularity]
    many: tuple[tuple[int, ...], Granularity]
    even: tuple[tuple[int, ...], Granularity]
    odd: Mapping[str, tuple[tuple[int, ...], Granularity]] = field(default_factory=dict)


_SHAPES: dict[type[Granularity], _Shapes] = {
    PerTensor: _Shapes(
        plain=((37, 45), PerTensor()), image=((2, 3, 5, 7), PerTensor()), square=((12, 12), PerTensor()),
        many=((33, 1021), PerTensor()), even=((6, 46), PerTensor()),
        odd={
            "rank 0": ((), PerTensor()), "one element": ((1,), PerTensor()), "rank 1": ((7,), PerTensor()),
            "rank 8": ((2, 1, 3, 2, 1, 2, 3, 2), PerTensor()), "empty": ((3, 0, 5), PerTensor()),
        },
    ),
    PerChannel: _Shapes(
        plain=((5, 37, 9), PerChannel(1)), image=((2, 3, 5, 7), PerChannel(1)),
        square=((12, 12), PerChannel(0)), many=((33, 1021), PerChannel(0)), even=((7, 46), PerChannel(-1)),
        odd={
            "first axis": ((11, 43), PerChannel(0)), "last axis": ((43, 11), PerChannel(-1)),
            "last axis, wide": ((3, 2053), PerChannel(1)), "only axis": ((29,), PerChannel(0)),
            "axis of one": ((3, 1, 31), PerChannel(-2)), "rank 8": ((2, 1, 3, 2, 1, 2, 3, 2), PerChannel(3)),
            "empty": ((4, 0), PerChannel(0)), "no channels": ((0, 4), PerChannel(0)),
        },
    ),
    PerToken: _Shapes(
        plain=((5, 7, 47), PerToken()), image=((2, 3, 5, 7), PerToken()), square=((12, 12, 5), PerToken()),
        many=((33, 1021), PerToken()), even=((5, 3, 46), PerToken()),
        odd={
            "rank 0": ((), PerToken()), "rank 1": ((9,), PerToken()), "tokens of one": ((13, 1), PerToken()),
            "one long token": ((1, 2053), PerToken()), "rank 8": ((2, 1, 3, 2, 1, 2, 3, 2), PerToken()),
            "empty tokens": ((4, 0), PerToken()), "no tokens": ((0, 5), PerToken()),
        },
    ),
    PerGroup: _Shapes(
        plain=((7, 252), PerGroup(12)), image=((2, 6, 5, 8), PerGroup(2, axis=1)),
        square=((12, 12), PerGroup(1, axis=0)), many=((33, 1020), PerGroup(20)),
        even=((3, 2, 48), PerGroup(6)),
        odd={
            "first axis": ((12, 41), PerGroup(3, axis=0)), "middle axis": ((3, 20, 7), PerGroup(4, axis=-2)),
            "groups of one": ((5, 7), PerGroup(1)), "one group": ((5, 21), PerGroup(21)),
            "rank 1": ((24,), PerGroup(8)), "rank 8": ((2, 1, 3, 2, 1, 2, 3, 2), PerGroup(3, axis=6)),
            "empty": ((0, 8), PerGroup(4)), "no groups": ((3, 0), PerGroup(4)),
        },
    ),
}  # fmt: skip


def shapes_of(granularity: type[Granularity]) -> _Shapes:
    """The shapes for a granularity."""
    return _SHAPES[granularity]


#: Groups whose size is a multiple of 32, in more than one tile of the CPU.
GROUPS_OF_32 = [
    Problem("groups of 32", PerGroup(32), (9, 960)),
    Problem("groups of 32, pairs", PerGroup(32), (9, 960), codes=INT4.torch, packed=True),
    Problem(
        "groups of 32, bfloat16 pairs", PerGroup(32), (3, 3, 960), real=torch.bfloat16, codes=UINT4.torch,
        packed=True, values="special",
    ),
    Problem(
        "groups of 96, bfloat16, strided scale", PerGroup(96), (31, 288), real=torch.bfloat16,
        scale="strided", zero_point="strided",
    ),
]  # fmt: skip

P = TypeVar("P", bound=Problem)

#: Rows with a scale each, whose length is no multiple of 32, in more than one tile of the CPU.
ODD_ROWS = [
    Problem("rows of 45", PerChannel(0), (200, 45), values="special", scale="unusual mixed"),
    Problem("rows of 300", PerChannel(0), (61, 300), values="ties", scale="dyadic"),
    Problem("rows of 300, bfloat16", PerChannel(0), (61, 300), real=torch.bfloat16, zero_point="none"),
]


def accumulating(problems: Sequence[P]) -> list[P]:
    """The same problems with ``accumulate``."""
    return [replace(problem, name=f"{problem.name}, accumulate", accumulate=True) for problem in problems]


#: Fields of a problem with scales of every magnitude, and values of the same magnitudes.
EVERY_SIZE: dict[str, Any] = {"scale": "every size", "zero_point": "none", "values": "of the scale"}
_REALS = [record.torch for record in FLOATS.values()]
#: Every integer code dtype, unpacked; then packed, where several codes fit in a byte.
STORED = [(code.torch, False) for code in INTEGERS.values()] + [
    (code.torch, True) for code in INTEGERS.values() if code.per_byte > 1
]
#: Pairs of a real dtype and a floating dtype that stores its codes.
_CARRIED = [
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float64", "float64"), ("float16", "float16"),
    ("float32", "float16"), ("bfloat16", "float32"), ("float64", "float32"), ("float16", "bfloat16"),
]  # fmt: skip


def problems(plan: AnyPlan, *, reads_codes: bool = False) -> list[Problem]:
    """The problems of ``plan``. ``reads_codes``: its input is codes, so real values do not matter."""
    kind: type[Granularity] = plan.Descriptor.kind  # type: ignore[attr-defined]
    index, shapes = list(_SHAPES).index(kind), _SHAPES[kind]
    shape, granularity = shapes.plain
    plain = Problem("plain", granularity, shape)
    found = [*_of_dtypes(plain, index), *_of_carriers(plain, index), *_of_shapes(plain, shapes)]
    found += [*_of_layouts(plain, shapes), *_of_pairs(plain, shapes), *_of_scales(plain, index)]
    if not reads_codes:
        found += [*_of_ranges(plain), *_of_values(plain)]
    found += _of_float_formats(plain, shapes, reads_codes)
    if plan.direction == "forward":
        return found
    found += [
        replace(plain, name="accumulate", accumulate=True),
        replace(plain, name="accumulate in bfloat16", real=torch.bfloat16, accumulate=True),
        replace(plain, name="accumulate, float8_e4m3fn", accumulate=True, **float_fields(E4M3FN)),
    ]
    # The forward cases cover these forms of the scale.
    forms = ("scales with keepdim", "scale in float64", "expanded scale, no zero point")
    return [problem for problem in found if not problem.packed and problem.name not in forms]


def _of_dtypes(plain: Problem, index: int) -> list[Problem]:
    """Each real dtype with every fourth code dtype. ``index``, of the granularity, chooses which fourth."""
    return [
        replace(
            plain, name=f"{dtype_name(real)} to {stored_name(codes, packed)}", real=real, codes=codes,
            packed=packed,
        )
        for i, real in enumerate(_REALS)
        for j, (codes, packed) in enumerate(STORED)
        if (i + j) % 4 == index
    ]  # fmt: skip


def stored_name(codes: torch.dtype, packed: bool) -> str:
    """The name of a code dtype, with "packed" if the codes are packed."""
    return f"{'packed ' if packed else ''}{dtype_name(codes)}"


def _of_carriers(plain: Problem, index: int) -> list[Problem]:
    return [
        replace(
            plain, name=f"{real} to codes in {carrier}", real=FLOATS[real].torch, codes=FLOATS[carrier].torch,
            limits=(-100, 155), values="special" if i < 4 else "spread",
        )
        for i, (real, carrier) in enumerate(_CARRIED)
        if i % 4 == index
    ]  # fmt: skip


def _of_shapes(plain: Problem, shapes: _Shapes) -> list[Problem]:
    # "many elements" are enough for every thread to get some.
    named = {**shapes.odd, "square": shapes.square, "many elements": shapes.many}
    return [_of(plain, sized, name=name) for name, sized in named.items()]


def _of(problem: Problem, sized: tuple[tuple[int, ...], Granularity], **fields: Any) -> Problem:
    """``problem`` with the shape and granularity ``sized``."""
    return replace(problem, shape=sized[0], granularity=sized[1], **fields)


def _of_layouts(plain: Problem, shapes: _Shapes) -> list[Problem]:
    image = _of(plain, shapes.image)
    return [
        replace(image, name="transposed input", layouts=("transposed", "contiguous")),
        replace(image, name="transposed output", layouts=("contiguous", "transposed"), real=torch.bfloat16),
        replace(image, name="channels last", layouts=("channels last", "channels last"), accumulate=True),
        replace(plain, name="sliced to padded rows", layouts=("sliced", "padded rows"), real=torch.float16),
        replace(plain, name="broadcast to sliced", layouts=("broadcast", "sliced"), accumulate=True),
        replace(plain, name="unaligned", layouts=("unaligned", "unaligned")),
        replace(
            image, name="packed, leading axes transposed", codes=UINT4.torch, packed=True,
            layouts=("leading transposed", "leading transposed"),
        ),
    ]  # fmt: skip


def _of_pairs(plain: Problem, shapes: _Shapes) -> list[Problem]:
    """16-bit numbers and an even last axis: a kernel may read two numbers at once for one byte of codes."""
    pairs = _of(plain, shapes.even, packed=True)
    found = [
        replace(
            pairs, name="bfloat16 pairs", real=torch.bfloat16, codes=INT4.torch, values="special"
        ),
        replace(
            pairs, name="float16 pairs, no zero point", real=torch.float16, codes=UINT4.torch,
            zero_point="none", values="special",
        ),
    ]  # fmt: skip
    if plain.scale_shape:
        sized = replace(pairs, name="bfloat16 pairs, scales of every size", **EVERY_SIZE)
        found.append(replace(sized, real=torch.bfloat16, codes=INT4.torch))
    return found


def _of_ranges(plain: Problem) -> list[Problem]:
    return [
        replace(plain, name="narrow range", limits=(-5, 9), values="ties"),
        replace(plain, name="one code", limits=(4, 4), values="ties"),
    ]


def _of_scales(plain: Problem, index: int) -> list[Problem]:
    half = (torch.bfloat16, torch.float16)[index % 2]
    found = [
        replace(plain, name="host scale", scale="host", zero_point="none"),
        replace(plain, name="host scale in float64", scale="host", zero_point="host", real=torch.float64),
        replace(plain, name=f"scale in {dtype_name(half)}", scale="own", real=half),
        replace(plain, name="scale in float64", scale="own", real=torch.float64),
        replace(plain, name="expanded scale, no zero point", scale="expanded", zero_point="none"),
        replace(plain, name="strided scale", scale="strided", zero_point="strided"),
        replace(plain, name="huge zero point of the host", zero_point="host huge", codes=torch.uint8),
        replace(plain, name="scales with keepdim", scale="keepdim"),
    ]
    for value in _HUGE if plain.scale_shape == () else ["mixed"]:
        found.append(
            replace(plain, name=f"zero points far out: {value}", values="ties", zero_point=f"far {value}")
        )
    for value in _UNUSUAL if plain.scale_shape == () else ["mixed"]:
        found.append(
            replace(plain, name=f"unusual scales: {value}", values="special", scale=f"unusual {value}")
        )
    return found


def _of_values(plain: Problem) -> list[Problem]:
    found = []
    for real in _REALS:
        found.append(replace(plain, name=f"special {dtype_name(real)}", real=real, values="special"))
        found.append(
            replace(plain, name=f"ties of {dtype_name(real)}", real=real, values="ties", scale="dyadic")
        )
    if plain.scale_shape:
        found.append(replace(plain, name="scales of every size", **EVERY_SIZE))
    found.append(replace(plain, name="ties, odd zero point", values="ties", scale="dyadic", zero_point="odd"))
    found.append(replace(plain, name="ties, awkward scale", values="ties", scale="host", zero_point="odd"))
    return found


def float_fields(codes: Format) -> dict[str, Any]:
    """Fields of a problem with codes in a float format, which has no zero point."""
    return {"codes": codes.torch, "zero_point": "none"}


def _of_float_formats(plain: Problem, shapes: _Shapes, reads_codes: bool) -> list[Problem]:
    """Every real dtype, with special values and with ties; then other cases that differ from integers."""
    found = []
    for codes in FLOAT_FORMATS.values():
        float_plain = replace(plain, **float_fields(codes))
        for real in _REALS:
            name = f"{dtype_name(real)} to {codes.name}"
            of_real = replace(float_plain, real=real)
            found.append(replace(of_real, name=f"{name}, special", values="special"))
            if not reads_codes:
                found.append(replace(of_real, name=f"{name}, ties", values="ties", scale="dyadic"))
        unusual = "0" if plain.scale_shape == () else "mixed"
        more = [
            replace(float_plain, name="spread", real=torch.bfloat16, scale="own"),
            replace(float_plain, name="bounds, awkward scale", scale="host", values="bounds"),
            replace(float_plain, name="ties, awkward scale", scale="host", values="ties"),
            replace(float_plain, name="unusual scales", values="special", scale=f"unusual {unusual}"),
            replace(float_plain, name="every exponent", values="exponents", scale="expanded"),
        ]
        if plain.scale_shape:
            more.append(replace(float_plain, name="scales of every size", **EVERY_SIZE))
        layouts = ("transposed", "sliced")
        more.append(_of(float_plain, shapes.image, name="transposed to sliced", layouts=layouts))
        more.append(_of(float_plain, shapes.many, name="many elements"))
        found += [replace(problem, name=f"{codes.name}: {problem.name}") for problem in more]
    return found


def real_values(problem: Problem, label: str) -> torch.Tensor:
    """Values of an input or of a gradient, as ``problem.values`` asks."""
    record, count = float_dtype(problem.real, "real"), prod(problem.shape)
    values = rounded(spread(label, count, record.precision, -9, 5), problem.real)
    wanted = None
    if count == 0:
        return values.reshape(problem.shape)
    if problem.values == "special":
        wanted = special_values(record)
    elif problem.values == "ties":
        wanted = tie_values(problem, record)
    elif problem.values == "two ties":
        s, z = _first_scale(problem)
        wanted = rounded(np.array([0.5 - z, 1.5 - z]) * s, problem.real)
    elif problem.values == "bounds":
        wanted = bound_values(problem, record)
    elif problem.values == "of the scale":
        values = values_near_scale(problem, label).flatten()
    elif problem.values == "exponents":
        values = of_every_exponent(label, count, record)
    elif problem.values == "any bits":
        values = of_any_bits(label, count, record)
    if wanted is not None:
        step = 1 if len(wanted) >= count else 2  # if there is room, every other value stays as it is
        found = values[::step]
        found.copy_(wanted.repeat(-(-count // len(wanted)))[: len(found)])
    return values.reshape(problem.shape)


def tie_values(problem: Problem, record: Float) -> torch.Tensor:
    """(k + 0.5) * scale around zero and around both bounds, and the two adjacent numbers of each.

    For a float format, the midpoints of all adjacent values, including the one just above the range.
    """
    s, z = _first_scale(problem)
    codes = format_of(problem.codes, "codes")
    if codes.is_float:
        values = np.array([codes.value(k) for k in range(codes.highest_code + 1)] + [_next_value(codes)])
        middles = (values[1:] + values[:-1]) / 2
        return _with_neighbours(np.concatenate([middles[::-1], -middles[::-1]]), s, record)
    ends = [k + end - z for end in problem.code_range for k in (-2, -1, 0, 1)]
    return _with_neighbours(np.array([-3, -2, -1, 0, 1, 2, *ends]) + 0.5, s, record)


def bound_values(problem: Problem, record: Float) -> torch.Tensor:
    """k * scale at both bounds, next to them and half-way between, and the two adjacent numbers of each."""
    s, z = _first_scale(problem)
    low, high = (end - z for end in problem.code_range)
    codes = format_of(problem.codes, "codes")
    if codes.is_float:
        above = _next_value(codes)
        return _with_neighbours(np.array([low, high, above, -above, (high + above) / 2, 0]), s, record)
    return _with_neighbours(np.array([low, high, low - 1, high + 1, (low + high) / 2, 0]), s, record)


def _next_value(codes: Format) -> float:
    """The value one step above the greatest one of a float format."""
    greatest = float(codes.code_range[1])
    return 2 * greatest - codes.value(codes.highest_code - 1)


def values_near_scale(problem: Problem, label: str) -> torch.Tensor:
    """Values of 2^-27 to 2^7 times the scale, alternately around zero and around the middle of the range."""
    view, scale = problem.granularity.view(problem.shape), torch.as_tensor(make_scale(problem))
    own = [size if varies else 1 for size, varies in zip(view.shape, view.varies, strict=True)]
    own = own if scale.numel() > 1 else [1] * len(own)  # a Python scale is for all elements
    scales = scale.double().reshape(own).expand(view.shape).reshape(problem.shape).numpy()
    record = float_dtype(problem.real, "real")
    steps = spread(label, scales.size, record.precision, -27, 7)
    steps[::2] += sum(problem.code_range) / 2
    return rounded(steps.reshape(scales.shape) * scales, problem.real)


def _first_scale(problem: Problem) -> tuple[float, int]:
    """The scale and the rounded, saturated zero point of the first element."""
    scale, zero_point = make_scale(problem), make_zero_point(problem)
    s = float(scale) if not isinstance(scale, torch.Tensor) else float(scale.double().flatten()[0])
    z = zero_point.flatten()[0].item() if isinstance(zero_point, torch.Tensor) else zero_point or 0
    return s, min(max(round(z), -(2**23)), 2**23)


def _with_neighbours(quotients: Array, s: float, record: Float) -> torch.Tensor:
    values = rounded(quotients * s, record.torch)
    bits = values.view(BITS[record.bits])
    return torch.cat([values, (bits + 1).view(record.torch), (bits - 1).view(record.torch)])


def code_values(problem: Problem, label: str) -> torch.Tensor:
    """Unpacked codes: first every code of the range, as far as there is room, then random ones."""
    low, high = problem.code_range
    count, carrier = prod(problem.shape), format_of(problem.codes, "codes")
    if carrier.is_float:
        bits = (random_bits(label, count) >> np.uint64(56)).astype(np.uint8)
        bits[:256] = np.arange(256, dtype=np.uint8)[:count]
        return torch.from_numpy(bits).view(carrier.storage).reshape(problem.shape)
    picked = low + (random_bits(label, count) >> np.uint64(20)).astype(np.int64) % (high - low + 1)
    picked[: high - low + 1] = np.arange(low, high + 1)[:count]
    if not carrier.carried:
        return torch.from_numpy(picked).to(carrier.storage).reshape(problem.shape)
    values = rounded(picked.astype(np.float64), carrier.torch)
    if problem.values == "special":
        wanted = special_values(float_dtype(carrier.torch, "codes"))
        values[: len(wanted)] = wanted[:count]
    return values.reshape(problem.shape)


def make_args(args: type[Args], desc: Any, problem: Problem, **given: torch.Tensor) -> Args:
    """Args of ``problem``: random inputs, and outputs filled with poison or with old values.

    ``given`` has other values of some inputs.
    """
    of_input, of_output = problem.layouts
    flags = {"accumulate": problem.accumulate} if "accumulate" in args.flags else {}
    made: dict[str, Any] = {"scale": make_scale(problem), "zero_point": make_zero_point(problem)}
    for name in args.inputs:
        if name not in made:
            values = given[name] if name in given else real_values(problem, f"{name}/{problem.name}")
            layout = problem.upstream or of_input if name == "dy" else of_input
            made[name] = laid_out(values.to(desc.expected(name)[1]), layout)

    def old(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return real_values(problem, f"{name}/{problem.name}")

    outputs = outputs_of(args, desc, of_output, old if any(flags.values()) else None)
    inputs: dict[str, Any] = {name: made[name] for name in args.inputs}
    return args(**outputs, **inputs, **flags)


_UNUSUAL = {
    "0": 0.0, "-0": -0.0, "-0.5": -0.5, "inf": float("inf"), "nan": float("nan"),
    "1e-45": 2.0**-149, "1e-40": 1e-40, "1e38": 1e38, "3e-31": 3e-31,
}  # fmt: skip
_HUGE = {
    "2^23": 2**23, "-2^23": -(2**23), "2^23 - 1": 2**23 - 1, "1 - 2^23": 1 - 2**23, "2^23 + 1": 2**23 + 1,
    "2^31 - 1": 2**31 - 1, "-2^31": -(2**31), "2^21 + 1": 2**21 + 1, "-777777": -777777,
}  # fmt: skip


#: Scales from the least number to the greatest. Some have a mantissa of ones, the hard case of a division.
_SCALES_OF_EVERY_SIZE = [
    2.0**-149, 5 * 2.0**-149, -1e-40, 2.0**-126, (2 - 2.0**-23) * 2.0**-126, 1.3 * 2.0**-100, 3e-31, 2.0**-60,
    1e-9, 1 - 2.0**-24, 1.0, 2 - 2.0**-23, -1e9, 1e20, 1.7 * 2.0**100, 2.0**120, 1.1 * 2.0**126, 2.0**127,
    (2 - 2.0**-23) * 2.0**127,
]  # fmt: skip
#: Floating zero points: halves, which round to even, and values far outside any range of codes.
_FLOATING_ZERO_POINTS = [
    2.5, -0.5, 3.5, 0.75, -1.25, 7.0, -2.5, float("nan"), float("inf"), -float("inf"), 1e30, 2.0**22 + 0.5,
    -(2.0**22) - 1.5,
]  # fmt: skip


def scale_unit(problem: Problem) -> float:
    """A power of two; times the greatest code it is about 8."""
    low, high = problem.code_range
    return float(2.0 ** (3 - max(abs(low), abs(high), 1).bit_length()))


def make_scale(problem: Problem) -> Scale:
    """The scale in the form that ``problem.scale`` asks for."""
    kind, shape = problem.scale, problem.scale_shape
    count, unit = prod(shape), scale_unit(problem)
    if kind == "host":
        return 0.1 * unit
    if kind.startswith("host "):
        return float(kind.removeprefix("host "))
    record = float_dtype(problem.real if kind == "own" else torch.float32, "scale")
    values = np.abs(spread(f"scale/{shape}/{kind}", count, record.precision, -1, 1)) * unit
    if kind == "dyadic":
        values = np.resize([1.0, 0.75, 0.5, 1.25], count) * unit
    elif kind == "expanded":
        values = values[:1]
    elif kind.startswith("unusual "):
        chosen = _UNUSUAL.get(kind.removeprefix("unusual "))
        values = np.resize([unit, *_UNUSUAL.values()] if chosen is None else [chosen], count)
    elif kind == "every size":
        values = np.resize(_SCALES_OF_EVERY_SIZE, count)
    made = rounded(values, record.torch)
    if kind == "any bits":
        made = of_any_bits(f"scale/{problem.name}", count, record)
    if kind == "expanded" and count:
        return made.reshape((1,) * len(shape)).expand(shape)
    return _shaped(problem, made, kind)


def make_zero_point(problem: Problem) -> ZeroPoint:
    """The zero point in the form that ``problem.zero_point`` asks for."""
    kind, shape = problem.zero_point, problem.scale_shape
    count = prod(shape)
    if kind == "none":
        return None
    if kind == "host":
        return -3
    if kind == "host huge":
        return 2**40
    if kind.startswith("host "):
        return int(kind.removeprefix("host "))
    if kind in ("floating", "floating own"):
        record = float_dtype(problem.real if kind == "floating own" else torch.float32, "zero point")
        return _shaped(problem, rounded(np.resize(_FLOATING_ZERO_POINTS, count), record.torch), kind)
    if kind == "any bits":
        words = random_bits(f"zero point/{problem.name}", count).astype(np.int64)
        return _shaped(problem, torch.from_numpy(words >> (32 + words % 32)).to(torch.int32), kind)
    values = (random_bits(f"zero point/{shape}", count) >> np.uint64(30)).astype(np.int64) % 23 - 11
    if kind == "odd":
        values = values | 1
    elif kind.startswith("far "):
        chosen = _HUGE.get(kind.removeprefix("far "))
        values = np.resize(list(_HUGE.values()) if chosen is None else [chosen], count)
    return _shaped(problem, torch.from_numpy(np.ascontiguousarray(values)).to(torch.int32), kind)


def _shaped(problem: Problem, flat: torch.Tensor, kind: str) -> torch.Tensor:
    """The values in the shape and layout that ``kind`` names."""
    shape = problem.scale_shape
    if kind == "keepdim":
        view = problem.granularity.view(problem.shape)
        if view.split is None:
            shape = tuple(size if varies else 1 for size, varies in zip(view.shape, view.varies, strict=True))
        else:
            shape = (view.scale_count,)
    if kind == "strided" and shape:
        return laid_out(flat.reshape(shape), "sliced")
    return laid_out(flat.reshape(shape))
