"""Quantization-aware training in two processes, with DDP and with FSDP2: both ranks have the same bits.

Each rank has its own half of every batch. Scales that follow the data are made of the ranges of both halves.
After training, the weights, scales and codes of both ranks are equal in every bit, and those of DDP and FSDP2
are equal, too.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast as hf

RANKS, BATCH = 2, 32


def network() -> nn.Module:
    """4-bit weights with learned scales, and 8-bit inputs with a moving average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    weight = hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerGroup(32), mode="learned")
    return hf.qat.prepare(model, hf.qat.Config(weight=weight, activation=hf.qat.Quantizer(mode="ema")))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A digest of names and bits, 16 hexadecimal digits."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()[:16]


def train(way: str, steps: int) -> tuple[str, float]:
    """A digest of the state and the codes after training on this rank, and the last loss."""
    model = network()
    run: nn.Module = model
    if way == "DDP":
        run = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(BATCH, 32, generator=generator)
        y = x[:, :8] * x[:, 8:16]
        mine = slice(dist.get_rank(), None, RANKS)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(run(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    codes = {f"{name}.codes": weight.codes for name, weight in hf.qat.quantized_weights(model).items()}
    return digest({**state, **codes}), loss.item()


def rank_main(rank: int, folder: str, steps: int) -> None:
    """One process. Rank 0 collects what all ranks found, checks it and prints it."""
    torch.set_num_threads(1)
    meeting = (Path(folder).resolve() / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own collectives
        found = {way: train(way, steps) for way in ("DDP", "FSDP2")}
    every: list = [None] * RANKS
    dist.all_gather_object(every, found)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        for way in found:
            digests, losses = zip(*(one[way] for one in every), strict=True)
            assert len(set(digests)) == 1, f"{way}: the ranks differ"
            assert len(set(losses)) > 1, f"{way}: the ranks had the same batches"
            print(f"{way:5} {digests[0]} on both ranks; losses {', '.join(f'{loss:.4f}' for loss in losses)}")
        assert found["DDP"][0] == found["FSDP2"][0], "DDP and FSDP2 differ"
        print(
            f"weights, scales and codes after {steps} steps: the same bits on both ranks, with DDP and FSDP2"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="train for a few steps only")
    steps = 5 if parser.parse_args().quick else 100
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, steps), nprocs=RANKS)


if __name__ == "__main__":
    main()
