"""Tests of reset_parameters: it restores the state of a new module from any memory content."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical

ROWS = hf.PerChannel(1)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ema": {},
    "ema with zero points": {"granularity": ROWS, "symmetric": False},
    "ema of a known shape": {"granularity": ROWS, "scale_shape": (4,)},
    "fixed": {"mode": "fixed", "scale": 0.1, "zero_point": 3},
    "fixed channels": {"mode": "fixed", "granularity": ROWS, "scale": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "learned": {"mode": "learned"},
    "learned with zero points": {
        "mode": "learned", "granularity": ROWS, "scale_shape": (4,), "symmetric": False,
    },
    "learned from a start": {
        "mode": "learned", "granularity": ROWS, "scale_shape": (4,), "symmetric": False, "scale": 0.1,
        "zero_point": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    },
    "per batch": {"mode": "per_batch"},
}  # fmt: skip


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(
        torch.equal(canonical(ours[key]), canonical(theirs[key])) for key in ours
    )


def spoil(module: torch.nn.Module) -> None:
    """Overwrite the state with wrong values, in place of the undefined memory that ``to_empty`` leaves."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(77)


def trains_as(module: torch.nn.Module, fresh: torch.nn.Module) -> bool:
    ours, theirs = module(X), fresh(X)
    return torch.equal(ours, theirs) and equal(module, fresh) and str(module.report()) == str(fresh.report())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_reset_is_the_state_of_a_new_module(name: str, trained: bool) -> None:
    fresh = hf.nn.FakeQuantize(**CONFIGURATIONS[name])
    module = copy.deepcopy(fresh)
    if trained:
        module(X * 3)
    module.to_empty(device="cpu")
    spoil(module)
    module.reset_parameters()
    assert equal(module, fresh)
    assert str(module.report()) == str(fresh.report())
    assert trains_as(module, fresh)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_that_comes_from_the_meta_device_is_reset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(77))
    with torch.device("meta"):
        module = hf.nn.FakeQuantize(**CONFIGURATIONS[name])
    module.to_empty(device="cpu")
    assert trains_as(module, hf.nn.FakeQuantize(**CONFIGURATIONS[name]))


def test_a_scale_that_changes_later_is_not_the_one_that_was_given() -> None:
    scale = torch.tensor([0.5, 0.25, 1.0, 2.0])
    module = hf.nn.FakeQuantize(mode="fixed", granularity=ROWS, scale=scale)
    scale.fill_(9)
    module.reset_parameters()
    assert module.scale.tolist() == [0.5, 0.25, 1, 2]


def test_a_scale_without_values_cannot_be_reset_to() -> None:
    module = hf.nn.FakeQuantize(mode="fixed", scale=torch.ones((), device="meta"))
    module.to_empty(device="cpu")
    with pytest.raises(hf.InvalidArgs, match=r"scale was given on the meta device.*load a state_dict"):
        module.reset_parameters()
    module.load_state_dict(hf.nn.FakeQuantize(mode="fixed", scale=0.5).state_dict())
    assert module(torch.tensor([0.7])) == 0.5


def test_switches_stay() -> None:
    module = hf.nn.FakeQuantize(mode="learned")
    module.freeze()
    module.reset_parameters()
    assert module.frozen and not module.scale.requires_grad


@pytest.mark.parametrize("kind", [hf.nn.Embedding, hf.nn.EmbeddingBag])
def test_tables_reset_as_in_torch(kind: type[Any]) -> None:
    with torch.device("meta"):
        table = kind(5, 3, padding_idx=2)
    table.to_empty(device="cpu")
    torch.manual_seed(0)
    table.reset_parameters()
    torch.manual_seed(0)
    plain = getattr(torch.nn, kind.__name__)(5, 3, padding_idx=2)
    assert torch.equal(table.weight, plain.weight) and not table.weight[2].any()
