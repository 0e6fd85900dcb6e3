"""hf.qat in two processes: FSDP and DDP train a prepared model with the bits of one process.

Both processes have the same batches, so that the mean of their gradients is exact. ``main`` runs
in each of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.core.bits import canonical
from ranks import run_two_processes

SECONDS = 240
IMPORTS = ("torch._dynamo", "torch.distributed.fsdp")
WAYS = ("fsdp", "fsdp of each layer", "ddp")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    learned = hf.qat.Quantizer(
        dtype=torch.int4, granularity=hf.PerGroup(2, axis=1), mode="learned", scale_dtype=torch.bfloat16
    )
    return hf.qat.prepare(model, {
        "1": hf.qat.Config(weight=learned, activation=hf.qat.Quantizer(mode="ema", start_step=1)),
        "3": hf.qat.Config(weight=learned, activation=hf.qat.Quantizer(mode="learned", symmetric=False)),
        "0": hf.qat.Config(weight=hf.qat.Quantizer(mode="ema")),
    })  # fmt: skip


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def trained(how: str | None) -> dict[str, Any]:
    """The state after some steps, and the codes of the weights."""
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    run: nn.Module = model
    if how == "ddp":
        run = nn.parallel.DistributedDataParallel(model)
    elif how is not None:
        for layer in model if "each" in how else ():
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for step in range(4):
        x = torch.randint(10, (6,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        run(x).square().sum().backward()
        optimizer.step()
    codes = {name: tensor.codes for name, tensor in hf.qat.quantized_weights(model).items()}
    return {"state": {key: whole(tensor) for key, tensor in model.state_dict().items()}, "codes": codes}


def test_two_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    found = run_two_processes(__file__, tmp_path, SECONDS)
    alone = trained(None)
    for how in WAYS:
        for rank in (0, 1):
            for kind, expected in alone.items():
                assert expected.keys() == found[rank][how][kind].keys()
                for key, tensor in expected.items():
                    other = found[rank][how][kind][key]
                    assert torch.equal(canonical(tensor), canonical(other)), (how, rank, key)


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_a_sharded_model_is_refused_with_the_way_out(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    prepared = hf.qat.prepare(nn.Sequential(nn.Linear(8, 4)), hf.qat.preset("w8a16"))
    sharded = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    for model in (sharded[1], prepared):
        fully_shard(model, mesh=mesh)
    with pytest.raises(hf.InvalidArgs, match=r"sharded by fully_shard already; call hf\.qat\.prepare before"):
        hf.qat.prepare(sharded, hf.qat.preset("w8a16"))
    with pytest.raises(hf.InvalidArgs, match=r"0\.weight is a DTensor; load the full state_dict"):
        hf.qat.convert(prepared)
    assert prepared(torch.ones(2, 8)).shape == (2, 4)


def test_weights_and_inputs_that_are_dtensors(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallel() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    torch.manual_seed(0)
    alone = hf.qat.prepare(
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), hf.qat.preset("w8a8-dynamic")
    )
    model, x = hf.qat.prepare(parallel(), hf.qat.preset("w8a8-dynamic")), torch.randn(3, 8)
    for run in (model, alone):
        run(x).square().sum().backward()
    gradients = (run[0].parametrizations.weight.original.grad for run in (model, alone))
    torch.testing.assert_close(*map(whole, gradients))
    with pytest.raises(hf.InvalidArgs, match=r'0\.weight is a DTensor, .* the mode is "learned"'):
        hf.qat.prepare(parallel(), hf.qat.preset("w2a16"))
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    for mode in ("ema", "learned"):
        with pytest.raises(hf.Unsupported, match="x is a DTensor, whose scale cannot be kept or joined"):
            hf.nn.FakeQuantize(mode=mode)(sharded)


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=(folder.resolve() / "rendezvous").as_uri(), rank=rank, world_size=2
    )
    torch.save({how: trained(how) for how in WAYS}, folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
