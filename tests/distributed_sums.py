"""Checks of sums in rank order: ``ordered_all_reduce``, the hook of DDP, the reduce-scatter of FSDP2.

``test_distributed`` runs them in four processes. Some run in groups of two of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

import holdfast as hf
from holdfast.core.calls import Call
from public_calls import CALLS

RANKS = 4
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def shard(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes, so that another order of the sum has other bits."""
    drawn = torch.Generator().manual_seed(number)
    exponents = torch.randint(-6, 7, shape, generator=drawn).to(torch.float64)
    return (torch.randn(shape, generator=drawn, dtype=torch.float64) * 2.0**exponents).to(dtype)


def by_numpy(shards: list[torch.Tensor], divisor: float = 1) -> torch.Tensor:
    """The definition, in NumPy."""
    compute = np.float64 if shards[0].dtype == torch.float64 else np.float32
    total, *others = (shard.double().numpy().astype(compute) for shard in shards)
    for other in others:
        total = (total + other).astype(compute)
    return torch.from_numpy(np.asarray(total / compute(divisor), compute)).to(shards[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor, where: Any = "") -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, where
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(whole), b.contiguous().view(whole)), (where, a, b)


def rank() -> int:
    return distributed.get_rank()


@cache
def halves() -> list[Any]:
    """The groups of ranks 0 and 1, and of 2 and 3."""
    return [distributed.new_group([0, 1]), distributed.new_group([2, 3])]


def half() -> Any:
    return halves()[rank() // 2]


@check
def a_process_outside_the_group_is_refused() -> None:
    other = halves()[1 - rank() // 2]
    with pytest.raises(hf.InvalidArgs, match="this process is not in the process group that is given"):
        hf.distributed.ordered_all_reduce(torch.ones(3), other)


@check
def sums_have_the_bits_of_the_definition() -> None:
    for dtype in FLOATS:
        for shape in ((), (1,), (3,), (7, 5), (64,), (0, 2)):
            shards = [shard(r, shape, dtype) for r in range(RANKS)]
            same_bits(hf.distributed.ordered_all_reduce(shards[rank()]), by_numpy(shards))
            mean = hf.distributed.ordered_all_reduce(shards[rank()], divisor=3)
            same_bits(mean, by_numpy(shards, 3))
            pair = shards[rank() // 2 * 2 :][:2]
            same_bits(hf.distributed.ordered_all_reduce(pair[rank() % 2], half()), by_numpy(pair))


@check
def another_order_would_have_other_bits() -> None:
    shards = [shard(r, (1000,), torch.float32) for r in range(RANKS)]
    assert not torch.equal(by_numpy(shards), by_numpy(shards[::-1]))
    pairs = by_numpy([by_numpy(shards[:2]), by_numpy(shards[2:])])
    assert not torch.equal(by_numpy(shards), pairs)


@check
def neither_the_buffer_nor_the_strides_change_a_bit() -> None:
    shards = [shard(r, (37, 11), torch.bfloat16) for r in range(RANKS)]
    for size in (1, 8, 100, 2**20):
        same_bits(hf.distributed.ordered_all_reduce(shards[rank()], buffer_bytes=size), by_numpy(shards))
    same_bits(hf.distributed.ordered_all_reduce(shards[rank()].t()), by_numpy(shards).t())


@check
def delays_change_no_bit() -> None:
    pause = random.Random(rank())
    shards = [shard(r, (501,), torch.float16) for r in range(RANKS)]
    for _ in range(6):
        time.sleep(pause.random() / 20)
        same_bits(hf.distributed.ordered_all_reduce(shards[rank()]), by_numpy(shards))


@check
def zeros_keep_their_signs_and_nan_stays() -> None:
    for values in ((-0.0,) * 4, (0.0, -0.0, -0.0, -0.0), (1.0, float("nan"), 2.0, 3.0), (65504.0,) * 4):
        shards = [torch.tensor([value], dtype=torch.float16) for value in values]
        found, expected = hf.distributed.ordered_all_reduce(shards[rank()]), by_numpy(shards)
        assert (found.isnan() and expected.isnan()) or found.view(torch.int16) == expected.view(torch.int16)


@check
def the_same_shards_on_one_two_and_four_ranks() -> None:
    """Also where the ranks have different numbers of shards."""
    for dtype in FLOATS:
        shards = [shard(s, (9, 3), dtype) for s in range(4)]
        of_four = hf.distributed.ordered_all_reduce([shards[rank()]], divisor=4)
        two = 2 * (rank() % 2)
        of_two = hf.distributed.ordered_all_reduce(shards[two : two + 2], half(), divisor=4)
        uneven = [shards[:3], [shards[3], None, None]][rank() % 2]
        same_bits(of_four, by_numpy(shards, 4))
        same_bits(of_two, of_four)
        same_bits(hf.distributed.ordered_all_reduce(uneven, half(), divisor=4), of_four)
        alone = [distributed.new_group([r]) for r in range(RANKS)][rank()]
        same_bits(hf.distributed.ordered_all_reduce(shards, alone, divisor=4), of_four)


@check
def the_gradient_is_the_sum_of_the_gradients() -> None:
    mine = [shard(10 * rank() + i, (5,), torch.float32).requires_grad_() for i in range(2)]
    factors = [shard(100 + r, (5,), torch.float32) for r in range(RANKS)]
    (hf.distributed.ordered_all_reduce(mine, divisor=3) * factors[rank()]).sum().backward()
    for term in mine:
        assert term.grad is not None
        same_bits(term.grad, by_numpy(factors, 3))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        hf.nn.Embedding(20, 8),
        nn.Linear(8, 8),
        hf.nn.FakeQuantize(mode="learned", scale_shape=(1,)),
        nn.Linear(8, 4),
    )


def batch(number: int) -> torch.Tensor:
    return torch.randint(20, (6,), generator=torch.Generator().manual_seed(number))


def gradients_of(module: nn.Module, number: int) -> dict[str, torch.Tensor]:
    """The gradients that one rank computes from a batch."""
    module.zero_grad()
    module(batch(number)).square().sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def averaged(start: nn.Module, members: int) -> dict[str, torch.Tensor]:
    """The mean over the batches of all ranks, by the definition."""
    found = [gradients_of(start, r) for r in range(members)]
    return {name: by_numpy([gradients[name] for gradients in found], members) for name in found[0]}


def settled() -> nn.Sequential:
    """A model whose scale was set on one batch, so that a forward pass needs no collective."""
    made = model()
    made[2].initialize(torch.tensor([[0.5, -1.0]]))
    return made


@check
def the_hook_of_ddp_has_the_bits_of_the_definition() -> None:
    halves()
    for group, members, dtype in ((None, RANKS, torch.float32), (half(), 2, torch.bfloat16)):
        expected = averaged(settled().to(dtype), members)
        for size in (25, 1e-4):  # one bucket, and many
            ddp = nn.parallel.DistributedDataParallel(
                settled().to(dtype), process_group=group, bucket_cap_mb=size
            )
            ddp.register_comm_hook(group, hf.distributed.ordered_hook)
            for _ in range(2):  # DDP makes new buckets after the first step
                found = gradients_of(ddp, rank() % members)
                for name, gradient in expected.items():
                    same_bits(found[f"module.{name}"], gradient)


@check
def the_reduce_scatter_of_fsdp_has_the_bits_of_the_definition() -> None:
    from torch.distributed.fsdp import fully_shard

    for dtype in (torch.float32, torch.bfloat16):
        expected = averaged(settled().to(dtype), RANKS)
        sharded = settled().to(dtype)
        for layer in (sharded[1], sharded[2], sharded):  # the scale stays float32
            fully_shard(layer)
            layer.set_custom_reduce_scatter(hf.distributed.OrderedReduceScatter())
        found = gradients_of(sharded, rank())
        for name, gradient in expected.items():
            same_bits(found[name].full_tensor(), gradient)


@check
def training_on_two_ranks_has_the_bits_of_four() -> None:
    """Four batches in each step: one on each of four ranks, or two on each of two."""
    of_two, of_four = settled(), settled()
    for members, group, made in ((4, None, of_four), (2, half(), of_two)):
        own = range(4)[rank() % members * (4 // members) :][: 4 // members]
        optimizer = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            found = [gradients_of(made, number) for number in own]
            for name, parameter in made.named_parameters():
                terms = [gradients[name] for gradients in found]
                parameter.grad = hf.distributed.ordered_all_reduce(terms, group, divisor=4)
            optimizer.step()
    for a, b in zip(of_two.parameters(), of_four.parameters(), strict=True):
        same_bits(a.detach(), b.detach())


class Op(nn.Module):
    """A public function. Its differentiable arguments are parameters; the others are constants."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        # FSDP takes no scalar parameters, and all of one dtype.
        self.given = nn.ParameterDict(
            {f"of_{name}": call.arguments[name].detach().float() for name in call.by if name in call.tensors}
        )
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, number: int) -> torch.Tensor:
        given = {name.removeprefix("of_"): parameter for name, parameter in self.given.items()}
        given = {name: value.to(self.call.arguments[name].dtype) for name, value in given.items()}
        return weighted(self.call(**given), number) + weighted(self.shift * 2, number)


class Layer(nn.Module):
    """A module, called with the same batch on all ranks."""

    def __init__(self, layer: nn.Module, x: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.x, self.shift = layer, x, nn.Parameter(torch.ones(3))

    def forward(self, number: int) -> torch.Tensor:
        return weighted(self.layer(self.x), number) + weighted(self.shift, number)


def weighted(found: Any, number: int) -> torch.Tensor:
    """A sum of all results, with weights that depend on the rank."""
    results = [result.float() for result in (found if isinstance(found, tuple) else (found,))]
    drawn = [shard(50 + number, tuple(result.shape), torch.float32) for result in results]
    terms = [(result * weights).sum() for result, weights in zip(results, drawn, strict=True)]
    return torch.stack(terms).sum()


class Everything(nn.Module):
    """Every public function and module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        x, tokens = torch.randn(4, 6), torch.randint(20, (3, 4))
        quantized = hf.qat.prepare(nn.Sequential(nn.Linear(6, 5)), hf.qat.Config(
            weight=hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerGroup(2, axis=1), mode="learned"),
            activation=hf.qat.Quantizer(mode="ema"),
        ))  # fmt: skip
        layers = {
            "embedding": Layer(hf.nn.Embedding(20, 4, padding_idx=1), tokens),
            "embedding_bag": Layer(hf.nn.EmbeddingBag(20, 4, mode="mean"), tokens),
            "learned": Layer(hf.nn.FakeQuantize(mode="learned", scale_shape=(1,)), x),
            "ema": Layer(hf.nn.FakeQuantize(granularity=hf.PerChannel(1)), x),
            "per batch": Layer(hf.nn.FakeQuantize(mode="per_batch"), x),
            "fixed": Layer(hf.nn.FakeQuantize(mode="fixed", scale=0.1), x),
            "qat": Layer(quantized, x),
        }
        self.parts = nn.ModuleList([*map(Op, CALLS.values()), *layers.values()])

    def forward(self, number: int) -> torch.Tensor:
        return torch.stack([part(number) for part in self.parts]).sum()


def of_everything(module: nn.Module, number: int) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module(number).backward()
    named = module.named_parameters()
    return {name.removeprefix("module."): p.grad for name, p in named if p.grad is not None}


@check
def a_step_of_everything_by_ddp_and_fsdp_on_two_and_four_ranks() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    terms = [of_everything(Everything(), number) for number in range(RANKS)]
    assert len(terms[0]) > 2 * len(CALLS)
    for group, members in ((None, RANKS), (half(), 2)):
        expected = {name: by_numpy([term[name] for term in terms[:members]], members) for name in terms[0]}
        ddp = nn.parallel.DistributedDataParallel(Everything(), process_group=group)
        ddp.register_comm_hook(group, hf.distributed.ordered_hook)
        mesh = DeviceMesh.from_group(group or distributed.group.WORLD, "cpu")
        fsdp = Everything()
        for part in (*fsdp.parts, fsdp):
            fully_shard(part, mesh=mesh)
            part.set_custom_reduce_scatter(hf.distributed.OrderedReduceScatter())
        for step in range(2):
            for how in (ddp, fsdp):
                found = of_everything(how, rank() % members)
                assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
                for name, gradient in expected.items():
                    got = found[name].full_tensor() if how is fsdp else found[name]
                    if step == 0 or "layer" not in name:  # the state of modules goes on
                        same_bits(got, gradient, (name, members, how is fsdp, step))
