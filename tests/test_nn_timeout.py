"""A process that is alone in training mode raises CollectiveFailed when its group times out.

``main`` runs in each of two processes.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.nn import collectives
from ranks import run_two_processes

SECONDS = 240
TIMEOUT = timedelta(seconds=2)

#: Each mode on the host, and as on a device, where the host waits for the first collective only.
MODES = ["ema", "per_batch", "learned"]
WAYS = [(mode, on_device) for mode in MODES for on_device in (False, True)]


def test_one_process_alone_in_training_mode_times_out_with_a_sentence(tmp_path: Path) -> None:
    alone, beside = run_two_processes(__file__, tmp_path, SECONDS)
    assert beside == {}
    for mode, on_device in WAYS:
        message, seconds = alone[mode, on_device]
        assert f"FakeQuantize(torch.int8, {mode}, PerTensor(), " in message
        assert "is in training mode on process 0 of 2 and joins the range of its batch" in message
        assert "must call the module in training mode, and equally often" in message
        assert "pass process_group=" in message
        reason = "Operation timed out" if on_device else "Timed out waiting 2000ms"
        assert f"did not all take part: {reason}" in message
        assert seconds < 60


def test_the_error_is_what_a_caller_would_catch() -> None:
    assert issubclass(hf.CollectiveFailed, (hf.HoldfastError, RuntimeError))


def test_a_group_without_a_timeout_has_the_usual_patience() -> None:
    class Unknown:
        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError("no backend")

    assert collectives._host_timeout(Unknown(), torch.device("cpu")) == timedelta(minutes=9)


@pytest.mark.parametrize("mode", ["ema", "learned"])
def test_train_alone_makes_the_next_meeting_the_first(mode: str) -> None:
    module = hf.nn.FakeQuantize(mode=mode)
    assert module._collective().first and not module._collective().first
    module.train()
    assert not module._collective().first
    module.eval()
    module.train()
    assert module._collective().first


def trained_alone(mode: str, on_device: bool, group: Any) -> tuple[str, float]:
    module = hf.nn.FakeQuantize(mode=mode, process_group=group)
    if on_device:
        assert collectives._host_timeout(group, torch.device("cpu")) == 0.9 * TIMEOUT
    start = time.monotonic()
    try:
        module(torch.ones(3))
    except hf.CollectiveFailed as error:
        return str(error), time.monotonic() - start
    raise AssertionError("It found the other process.")


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=(folder.resolve() / "rendezvous").as_uri(), rank=rank, world_size=2
    )
    groups = {way: torch.distributed.new_group([0, 1], timeout=TIMEOUT) for way in WAYS}
    for mode, on_device in WAYS:  # both processes take part
        collectives._waits_on_device = lambda tensor, on_device=on_device: on_device
        module = hf.nn.FakeQuantize(mode=mode)
        for batch in (torch.tensor([1.0 + rank]), torch.tensor([3.0 - rank])):
            module(batch)
        assert mode == "per_batch" or bool(module.scale > 0)
    found: dict[tuple[str, bool], tuple[str, float]] = {}
    if rank == 0:
        for on_device in (False, True):
            collectives._waits_on_device = lambda tensor, on_device=on_device: on_device
            ways = [(mode, on_device) for mode in MODES]
            with ThreadPoolExecutor() as pool:  # they wait at the same time
                found |= zip(ways, pool.map(lambda way: trained_alone(*way, groups[way]), ways), strict=True)
    else:
        for group in groups.values():  # evaluation has no collective
            hf.nn.FakeQuantize(mode="fixed", scale=0.5, process_group=group).eval()(torch.ones(3))
        while not (folder / "0.pt").exists():
            time.sleep(0.1)
    torch.save(found, folder / f"{rank}.pt")
