"""hf.qat in two processes: FSDP and DDP train a prepared model with the bits of one process.

Both processes have the same batches, so that the mean of their gradients is exact. ``main`` runs
in each of the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=(folder.resolve() / "rendezvous").as_uri(), rank=rank, world_size=2
    )
    torch.save({how: trained(how) for how in WAYS}, folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
