"""Problems with sums of a given number of terms and few outputs, so that a million terms are fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import holdfast as hf
from exact.values import Rng, terms
from holdfast.ops.grid_sample.plan import Mode, Padding


@dataclass(frozen=True)
class Problem:
    """A descriptor of a plan and its args, with outputs that are not written yet."""

    plan: Any
    desc: Any
    args: Any


def unwritten(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def made(plan: str, desc: Any, **operands: Any) -> Problem:
    """A problem. Allocates expected outputs that are not given."""
    chosen = hf.plans.all()[plan]
    for name in chosen.outputs:
        expected = desc.expected(name)
        if name not in operands and expected is not None:
            shape, dtype = expected if isinstance(expected[-1], torch.dtype) else (expected, desc.dtype)
            operands[name] = unwritten(shape, dtype)
    return Problem(chosen, desc, chosen.Args(**operands))


@dataclass(frozen=True)
class Long:
    """``count`` terms of ``kind`` in ``dtype``."""

    count: int
    dtype: torch.dtype
    kind: str
    rng: Rng

    def terms(self, width: int = 1, factors: int = 1) -> torch.Tensor:
        return terms(self.kind, self.rng, self.count, width, self.dtype, factors)

    def factors(self, count: int) -> torch.Tensor:
        """Factors between 1/2 and 2."""
        sizes = self.rng.uniform(0.5, 2, count) * self.rng.choice([-1, 1], count)
        return torch.from_numpy(sizes).to(self.dtype)

    @property
    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.count, dtype=torch.int64)


def segment_sum(of: Long) -> Iterator[Problem]:
    desc = hf.plans.SegmentSumDescriptor(shape=(of.count,), segments=1, width=2, dtype=of.dtype)
    yield made("SegmentSumPlan", desc, terms=of.terms(2), destinations=of.zeros)


def scatter(of: Long) -> Iterator[Problem]:
    for reduce, base in (("sum", "added"), ("mean", "added"), ("mean", "zeros")):
        desc = hf.plans.ScatterDescriptor(
            shape=(of.count,), table=(1,), dtype=of.dtype, reduce=reduce, base=base
        )
        given = None if base == "zeros" else of.terms()[:1, 0].clone()
        yield made("ScatterPlan", desc, input=given, index=of.zeros, src=of.terms()[:, 0])


def embedding_backward(of: Long) -> Iterator[Problem]:
    for by_count in (False, True):
        desc = hf.plans.EmbeddingBackwardDescriptor(
            shape=(of.count,), num_embeddings=1, embedding_dim=1, dtype=of.dtype, scale_grad_by_freq=by_count
        )
        yield made("EmbeddingBackwardPlan", desc, dout=of.terms(), indices=of.zeros)


def embedding_bag(of: Long) -> Iterator[Problem]:
    order = torch.arange(of.count)
    for mode, weighted in (("sum", False), ("mean", False), ("sum", True)):
        desc = hf.plans.EmbeddingBagDescriptor(
            shape=(1, of.count), num_embeddings=of.count, embedding_dim=1, dtype=of.dtype, mode=mode,
            per_sample_weights=weighted,
        )  # fmt: skip
        weights = of.factors(of.count).reshape(1, -1) if weighted else None
        yield made(
            "EmbeddingBagPlan", desc, weight=of.terms(), indices=order[None], per_sample_weights=weights
        )


def embedding_bag_backward(of: Long) -> Iterator[Problem]:
    fields: dict[str, Any] = {"shape": (of.count, 1), "num_embeddings": 1, "dtype": of.dtype}
    for mode, weighted in (("sum", False), ("mean", False), ("sum", True)):
        desc = hf.plans.EmbeddingBagBackwardDescriptor(
            **fields, embedding_dim=1, mode=mode, per_sample_weights=weighted
        )
        weights = of.factors(of.count).reshape(-1, 1) if weighted else None
        yield made(
            "EmbeddingBagBackwardPlan", desc, dout=of.terms(), indices=of.zeros[:, None],
            per_sample_weights=weights,
        )  # fmt: skip
    desc = hf.plans.EmbeddingBagBackwardDescriptor(
        shape=(1, 1), num_embeddings=1, embedding_dim=of.count, dtype=of.dtype, mode="sum",
        per_sample_weights=True, dweight=False, dper_sample_weights=True,
    )  # fmt: skip
    yield made(
        "EmbeddingBagBackwardPlan", desc, dout=of.terms().T.contiguous(), indices=of.zeros[:1, None],
        weight=of.factors(of.count)[None],
    )  # fmt: skip


def grid_sample_backward(of: Long) -> Iterator[Problem]:
    # Sixteen corners are slow, and their sums have the same form as those of four.
    few = of.count < 100 or of.count == 4097
    for mode in Mode if few else (Mode.NEAREST, Mode.BILINEAR):
        # All samples lie around one pixel of a two-pixel image.
        fields: dict[str, Any] = {"mode": mode, "input_dtype": of.dtype, "grid_dtype": of.dtype}
        desc = hf.plans.GridSampleBackwardDescriptor(
            shape=(1, 1, 1, 2), output_size=(1, of.count), needs_dgrid=False, padding_mode=Padding.ZEROS,
            **fields,
        )  # fmt: skip
        grid = torch.from_numpy(of.rng.uniform(-0.49, 0.1, (1, 1, of.count, 2))).to(of.dtype)
        yield made("GridSampleBackwardPlan", desc, dout=of.terms().reshape(1, 1, 1, -1), grid=grid)
    desc = hf.plans.GridSampleBackwardDescriptor(
        shape=(1, of.count, 1, 2), output_size=(1, 1), needs_dinput=False, input_dtype=of.dtype,
        grid_dtype=of.dtype,
    )  # fmt: skip
    # One pixel dominates, and its slopes are nearly 1.
    grid = torch.from_numpy(of.rng.uniform(-0.01, 0.01, (1, 1, 1, 2))).to(of.dtype)
    image = of.factors(2 * of.count).reshape(1, -1, 1, 2) * torch.tensor([1, 2**-9], dtype=of.dtype)
    yield made("GridSampleBackwardPlan", desc, dout=of.terms().reshape(1, -1, 1, 1), grid=grid, input=image)


def affine_grid_backward(of: Long) -> Iterator[Problem]:
    for size, aligned in (((1, of.count), False), ((of.count, 1), True)):
        desc = hf.plans.AffineGridBackwardDescriptor(
            shape=(1, 2, 3), output_size=size, dtype=of.dtype, align_corners=aligned
        )
        yield made("AffineGridBackwardPlan", desc, dgrid=of.terms(2).reshape(desc.grid_shape))


def interpolate(of: Long) -> Iterator[Problem]:
    """All terms in one window."""
    desc = hf.plans.InterpolateDescriptor(
        shape=(1, 1, of.count), output_size=(1,), mode="area", dtype=of.dtype
    )
    yield made("InterpolatePlan", desc, input=of.terms().reshape(desc.shape))


def interpolate_backward(of: Long) -> Iterator[Problem]:
    """All terms from one pixel."""
    for mode in ("nearest", "linear"):
        desc = hf.plans.InterpolateBackwardDescriptor(
            shape=(1, 1, 1), output_size=(of.count,), mode=mode, dtype=of.dtype
        )
        yield made("InterpolateBackwardPlan", desc, dout=of.terms().reshape(desc.output_shape))


def learned_backward(of: Long) -> Iterator[Problem]:
    """The terms are dy. The values of x cover the range of the codes and more."""
    x = torch.from_numpy(of.rng.normal(0, 6, of.count)).to(of.dtype)
    desc = hf.plans.FakeQuantizeLearnedBackwardDescriptor(
        shape=(of.count,), input_dtype=of.dtype, dtype=torch.int4, scale_dtype=of.dtype,
        zero_point_dtype=of.dtype, grad_factor=0.3,
    )  # fmt: skip
    yield made(
        "FakeQuantizeLearnedBackwardPlan", desc, x=x, dy=of.terms(factors=2)[:, 0],
        scale=torch.tensor(0.7, dtype=of.dtype), zero_point=torch.tensor(1.0, dtype=of.dtype),
    )  # fmt: skip


def rows(count: int, dtype: torch.dtype, rng: Rng) -> Iterator[Problem]:
    """Many short sums per run: the tree sums of 257 rows."""
    shape, token = (257, count), hf.PerToken()
    x = torch.from_numpy(rng.normal(0, 6, shape)).to(dtype)
    learned = hf.plans.FakeQuantizeLearnedBackwardDescriptor(
        shape=shape, granularity=token, input_dtype=dtype, dtype=torch.int4, scale_dtype=dtype,
        zero_point_dtype=dtype,
    )  # fmt: skip
    scales = torch.from_numpy(rng.uniform(0.5, 1, 257)).to(dtype)
    yield made(
        "FakeQuantizeLearnedBackwardPlan", learned, x=x, dy=x.flip(0), scale=scales,
        zero_point=torch.zeros_like(scales),
    )  # fmt: skip
    yield made(
        "LsqInitPlan",
        hf.plans.LsqInitDescriptor(shape=shape, granularity=token, input_dtype=dtype, q_max=7),
        x=x,
    )


def lsq_init(of: Long) -> Iterator[Problem]:
    desc = hf.plans.LsqInitDescriptor(shape=(of.count,), input_dtype=of.dtype, q_max=7)
    yield made("LsqInitPlan", desc, x=of.terms()[:, 0])


#: For every plan with sums of variable length, functions that make a problem of a given length.
LONG: dict[str, Callable[[Long], Iterator[Problem]]] = {
    "SegmentSumPlan": segment_sum,
    "ScatterPlan": scatter,
    "EmbeddingBackwardPlan": embedding_backward,
    "EmbeddingBagPlan": embedding_bag,
    "EmbeddingBagBackwardPlan": embedding_bag_backward,
    "GridSampleBackwardPlan": grid_sample_backward,
    "AffineGridBackwardPlan": affine_grid_backward,
    "InterpolatePlan": interpolate,
    "InterpolateBackwardPlan": interpolate_backward,
    "FakeQuantizeLearnedBackwardPlan": learned_backward,
    "LsqInitPlan": lsq_init,
}


def rng_of(*label: Any) -> Rng:
    """A random generator seeded with the label."""
    return np.random.default_rng(list(repr(label).encode()))
