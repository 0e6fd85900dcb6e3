"""hf.nn.FakeQuantize on empty, rejected and ordinary batches: eager and compiled give the same state.

``main`` runs in each of two processes.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical
from ranks import run_two_processes

INF, NAN = float("inf"), float("nan")
SECONDS = 240

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ema": {},
    "ema with zero points": {"granularity": hf.PerChannel(1), "symmetric": False, "dtype": torch.uint8},
    "learned": {"mode": "learned"},
    "learned with zero points": {
        "mode": "learned", "granularity": hf.PerChannel(1), "scale_shape": (4,), "symmetric": False,
    },
    "per batch": {"mode": "per_batch"},
}  # fmt: skip

ORDINARY = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
SPOILT = ORDINARY[2, 1]
BATCHES = {
    "nan": ORDINARY.where(ORDINARY != SPOILT, NAN),
    "infinite": ORDINARY.where(ORDINARY != SPOILT, -INF),
    "empty": torch.zeros(0, 4),
    "zeros": torch.zeros(6, 4),
    "ordinary": ORDINARY,
    "larger": ORDINARY * 3,
}

#: Sequences that start with every pair of kinds, then ordinary batches; and a few more.
BEGINNINGS = itertools.permutations(("nan", "infinite", "empty", "zeros"), 2)
SEQUENCES = [
    *([*beginning, "ordinary", "larger"] for beginning in BEGINNINGS),
    ["nan", "nan", "nan"],
    ["ordinary", "nan", "larger", "empty", "infinite", "zeros", "ordinary"],
]  # fmt: skip


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(canonical(a), canonical(b))


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.filterwarnings("ignore:a batch with NaN or infinity:RuntimeWarning")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_eager_and_compiled_go_the_same_way(name: str) -> None:
    torch._dynamo.reset()
    fresh = hf.nn.FakeQuantize(**CONFIGURATIONS[name])
    held = copy.deepcopy(fresh)
    compiled = torch.compile(held, backend="aot_eager", fullgraph=True, dynamic=False)
    unset = fresh.state_dict()
    for sequence in SEQUENCES:
        eager = copy.deepcopy(fresh)
        held.train().load_state_dict(unset)
        for batch in sequence:
            ours, theirs = (BATCHES[batch].clone().requires_grad_() for _ in range(2))
            a, b = eager(ours), compiled(theirs)
            assert same(a.detach(), b.detach()), (sequence, batch)
            a.sum().backward()
            b.sum().backward()
            assert same(ours.grad, theirs.grad), (sequence, batch)
            assert same_state(eager, held), (sequence, batch)
        assert str(eager.report()) == str(held.report()), sequence
        for module in (eager, held):
            module.eval()
        if eager.report()["is_set"]:
            assert same(eager(ORDINARY), compiled(ORDINARY))
        else:
            for module in (eager, held):
                with pytest.raises(hf.HoldfastError, match="has seen no training batch that it could use"):
                    module(ORDINARY)
            with pytest.raises(Exception, match="has seen no training batch that it could use"):
                compiled(ORDINARY)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_equal_modules_share_a_graph() -> None:
    """The handle of a module is a tensor, so another module with the same settings is not compiled again."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    layers = torch.nn.ModuleList(hf.nn.FakeQuantize() for _ in range(4))
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
        layer(ORDINARY)
        layer(ORDINARY * 2)
    assert counter.frame_count == 1
    assert all(layer.report()["is_set"] for layer in layers)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.filterwarnings("ignore:a batch with NaN or infinity:RuntimeWarning")
def test_rejected_batches_alone_make_no_scale(symmetric: bool) -> None:
    module = hf.nn.FakeQuantize(symmetric=symmetric)
    before = module.state_dict()
    for batch in ("nan", "infinite", "nan"):
        assert module(BATCHES[batch]).isnan().any()
    assert not module.report()["is_set"] and module.report()["rejected_batches"] == 3
    assert all(same(module.state_dict()[key], before[key]) for key in before if key != "rejected_batches")
    with pytest.raises(hf.HoldfastError, match="has seen no training batch that it could use"):
        module.eval()(ORDINARY)
    loaded = hf.nn.FakeQuantize(symmetric=symmetric)
    loaded.load_state_dict(module.state_dict())
    assert str(loaded.report()) == str(module.report())


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.filterwarnings("ignore:a batch with NaN or infinity:RuntimeWarning")
@pytest.mark.parametrize("batches", [[], ["nan"], ["nan", "ordinary"]], ids=str)
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
def test_eval_looks_for_a_scale_that_only_the_device_knows(device: str, batches: list[str]) -> None:
    """On a GPU, the host does not know whether the batch was accepted, and a compiled graph cannot check."""
    torch._dynamo.reset()
    module, x = hf.nn.FakeQuantize(device=device), ORDINARY.to(device)
    for batch in batches:
        module(BATCHES[batch].to(device))
        if device == "cpu":
            module._is_set = None  # the value after a batch on a GPU
        assert module._is_set is None
    module.eval()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    if "ordinary" in batches:
        assert same(compiled(x), module(x)) and not module(x).isnan().any()
    else:
        for call in (compiled, module):  # an eager call checks, too
            with pytest.raises(Exception, match="has seen no training batch that it could use"):
                call(x)


def test_a_moving_average_of_which_a_part_is_not_set_has_no_scale() -> None:
    module = hf.nn.FakeQuantize(granularity=hf.PerChannel(1))
    module(ORDINARY)
    state = module.state_dict()
    state["scale"][1] = NAN
    loaded = hf.nn.FakeQuantize(granularity=hf.PerChannel(1))
    loaded.load_state_dict(state)
    assert not loaded.report()["is_set"]
    with pytest.raises(hf.HoldfastError, match="has seen no training batch that it could use"):
        loaded.eval()(ORDINARY)
    assert not loaded.train()(ORDINARY).isnan().any() and loaded.report()["is_set"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("made_there", [False, True])
def test_calibrating_in_inference_mode_leaves_state_to_train_on(name: str, made_there: bool) -> None:
    fields = {**CONFIGURATIONS[name]}
    with torch.inference_mode(made_there):
        module = hf.nn.FakeQuantize(**fields)
    plain = hf.nn.FakeQuantize(**fields)
    with torch.inference_mode():
        module(ORDINARY)
    plain(ORDINARY)
    ours, theirs = (BATCHES["larger"].clone().requires_grad_() for _ in range(2))
    a, b = module(ours), plain(theirs)
    a.sum().backward()
    b.sum().backward()
    assert same(a.detach(), b.detach()) and same(ours.grad, theirs.grad) and same_state(module, plain)


def test_state_that_was_moved_in_inference_mode_is_trained_on() -> None:
    module = hf.nn.FakeQuantize()
    with torch.inference_mode():
        module.double()
    assert module.scale.is_inference()
    module(ORDINARY.double().requires_grad_()).sum().backward()
    assert same(module.scale, hf.choose_scale(ORDINARY.double()))


# Two processes, of which one or both have empty batches.

#: For each step, the batches of the first and the second process.
SPREAD = [
    ("empty", "empty"),
    ("empty", "ordinary"),
    ("empty", "empty"),
    ("nan", "empty"),
    ("larger", "empty"),
]


def spread(rank: int | None) -> dict[str, Any]:
    """The states after each step on process ``rank``, or on a single process with all data if it is None."""
    found: dict[str, Any] = {}
    for name, fields in CONFIGURATIONS.items():
        shape = (4,) if "granularity" in fields else None  # an empty batch may determine the shape, too
        module = hf.nn.FakeQuantize(**{**fields, "scale_shape": shape})
        states = []
        for step in SPREAD:
            x = torch.cat([BATCHES[part] for part in step]) if rank is None else BATCHES[step[rank]]
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                assert module(x).shape == x.shape
            states.append({key: tensor.clone() for key, tensor in module.state_dict().items()})
        found[name] = states
    return found


def test_a_process_with_an_empty_batch_adds_nothing(tmp_path: Path) -> None:
    alone = spread(None)
    for found in run_two_processes(__file__, tmp_path, SECONDS):
        for name, states in alone.items():
            for step, (ours, theirs) in enumerate(zip(states, found[name], strict=True)):
                assert all(same(ours[key], theirs[key]) for key in ours), (name, step)


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=(folder.resolve() / "rendezvous").as_uri(), rank=rank, world_size=2
    )
    torch.save(spread(rank), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
