"""Unchanged models, trained twice with deterministic algorithms on: equal bits, by holdfast's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

import holdfast as hf
from holdfast.install import scatter
from install_models import HARMLESS, PROBLEMS, prepared, step


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scatter, "SMALL", 0)
    torch.use_deterministic_algorithms(True)
    with hf.installed():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_model_is_trained_twice_with_equal_bits(name: str) -> None:
    model, inputs = prepared(name, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = partial(step, model, optimizer)
    found = hf.testing.assert_reproducible(train, *inputs, model=[model, optimizer], repeats=2, threads=())
    assert found.outputs > 5
    for operator in PROBLEMS[name].operators:
        row = hf.status()[operator]
        assert row.served and row.passed_on.keys() <= HARMLESS, row


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_loss_is_that_of_torch(name: str) -> None:
    losses = []
    for _ in range(2):
        model, inputs = prepared(name, "cpu")
        losses.append(step(model, torch.optim.SGD(model.parameters(), lr=0.1), *inputs))
        hf.uninstall()
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
