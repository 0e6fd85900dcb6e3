"""hf.nn.FakeQuantize under FSDP: two processes with a sharded model give the bits of one process.

Both processes have the same batches, so that the mean of their gradients is exact. ``main`` runs
in each of the two.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast.core.bits import canonical
from ranks import OF_COMPILERS, run_two_processes

SECONDS, STEPS = 240, 4
IMPORTS = OF_COMPILERS

#: The modes, with the arguments that FSDP needs.
MODES: dict[str, dict[str, Any]] = {
    "learned": {"mode": "learned", "scale_shape": (1,)},
    "learned per channel": {"mode": "learned", "granularity": hf.PerChannel(1), "scale_shape": (5,)},
    "learned with zero points": {
        "mode": "learned", "granularity": hf.PerChannel(-1), "scale_shape": (5,), "symmetric": False,
    },
    "learned from a given scale": {"mode": "learned", "scale": 0.05, "scale_shape": (1,)},
    "per batch": {"mode": "per_batch", "symmetric": False},
    "ema": {},
    "ema with zero points": {"granularity": hf.PerChannel(1), "symmetric": False, "dtype": torch.uint8},
    "fixed": {"mode": "fixed", "scale": 0.1},
}  # fmt: skip


def model_of(name: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), hf.nn.FakeQuantize(**MODES[name]), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    )


def sharded(model: torch.nn.Sequential, how: str) -> torch.nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    if how == "each layer":
        for layer in model:
            fully_shard(layer)
    if how == "compiled":
        for layer in model:
            layer.compile(backend="aot_eager")
    return fully_shard(model, reshard_after_forward=how != "kept whole")


@torch.no_grad()
def sharded_on_meta(name: str) -> torch.nn.Sequential:
    """The same model, created on meta. Only the layers of torch are given values."""
    from torch.distributed.tensor import distribute_tensor

    with torch.device("meta"):
        model = sharded(model_of(name), "one group")
    model.to_empty(device="cpu")
    model[1].reset_parameters()
    values = model_of(name).state_dict()
    for index in (0, 3):
        for key, shard in model[index].named_parameters():
            shard.copy_(distribute_tensor(values[f"{index}.{key}"], shard.device_mesh, shard.placements))
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def trained(name: str, how: str | None) -> dict[str, Any]:
    """The outputs and the state after some steps. The first batch is NaN and is rejected."""
    model = model_of(name)
    if how == "from the meta device":
        model = sharded_on_meta(name)
    elif how is not None:
        model = sharded(model, how)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = model if how not in KINDS else partial(checkpoint, model, use_reentrant=KINDS[how])
    outputs = []
    for step in range(STEPS):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        if step == 0:
            with torch.no_grad(), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                model(torch.full_like(x, float("nan")))
        y = run(x.requires_grad_())
        optimizer.zero_grad()
        y.square().sum().backward()
        optimizer.step()
        outputs.append(y.detach().clone())
    kept = {key: whole(tensor) for key, tensor in model.state_dict().items()}
    return {"outputs": outputs, "state": kept, "again": resumed(model, name, how)}


def resumed(model: torch.nn.Sequential, name: str, how: str | None) -> torch.Tensor:
    """The output of another model after loading the state of this one."""
    other = model_of(name) if how is None else sharded(model_of(name), how)
    other.load_state_dict(model.state_dict())
    return other.train()(torch.ones(2, 4)).detach().clone()


#: Kinds of checkpoint, by ``use_reentrant``.
KINDS = {"checkpointed": False, "checkpointed, reentrant": True}

WAYS = ("one group", "each layer", "kept whole", "compiled", "from the meta device", *KINDS)


@pytest.mark.long
def test_two_processes_that_shard_have_the_bits_of_one(tmp_path: Path) -> None:
    found = run_two_processes(__file__, tmp_path, SECONDS)
    for name in MODES:
        alone = trained(name, None)
        for how in WAYS:
            for rank in (0, 1):
                where = f"{name}, {how}, rank {rank}"
                sharing = found[rank][name, how]
                assert alone["state"].keys() == sharing["state"].keys(), where
                for key, tensor in alone["state"].items():
                    assert torch.equal(canonical(tensor), canonical(sharing["state"][key])), (where, key)
                    assert not tensor.isnan().any(), (where, key)
                for a, b in zip(alone["outputs"], sharing["outputs"], strict=True):
                    assert torch.equal(a, b), where
                assert torch.equal(alone["again"], sharing["again"]), where


@pytest.mark.parametrize("given", [{}, {"mode": "learned"}, {"mode": "fixed", "scale": 0.1}])
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_scale_in_a_vector_has_the_bits_of_one_alone(given: dict[str, Any], symmetric: bool) -> None:
    alone, vector = (
        hf.nn.FakeQuantize(symmetric=symmetric, scale_shape=shape, **given) for shape in (None, (1,))
    )
    assert alone.scale.shape == () and vector.scale.shape == (1,)
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        a, b = alone(ours), vector(theirs)
        assert torch.equal(a, b)
        a.sum().backward()
        b.sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
    for one, other in ((alone, vector), (vector, alone)):
        loaded = hf.nn.FakeQuantize(symmetric=symmetric, scale_shape=tuple(other.scale.shape), **given)
        loaded.load_state_dict(one.state_dict())
        assert loaded.scale.shape == other.scale.shape and torch.equal(loaded.eval()(x), one.eval()(x))


@pytest.mark.parametrize("shape", [(2,), (1, 1), (0,)])
def test_another_shape_than_that_of_one_scale_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        hf.HoldfastError, match=r"scale_shape is .*; for PerTensor\(\) accepted are \(\) or \(1,\)"
    ):
        hf.nn.FakeQuantize(mode="learned", scale_shape=shape)


def test_a_scale_that_is_no_parameter_is_refused_at_the_first_batch() -> None:
    """Under FullyShardedDataParallel the initial value would be lost."""
    module = hf.nn.FakeQuantize(mode="learned")
    x = torch.ones(2, 3)
    with pytest.raises(
        hf.HoldfastError, match=r"the first batch cannot set the scale.*Use fully_shard, pass"
    ):
        torch.func.functional_call(module, {"scale": module.scale * 1}, (x,))
    assert not module.report()["is_set"]
    module(x)
    torch.func.functional_call(module, {"scale": module.scale * 1}, (x,)).sum().backward()
    assert module.scale.grad is not None


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=(folder.resolve() / "rendezvous").as_uri(), rank=rank, world_size=2
    )
    torch.save({(name, how): trained(name, how) for name in MODES for how in WAYS}, folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
