"""torch's own sample inputs for every replaced operator, with holdfast installed: results and gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.install import scatter
from opinfo_samples import compare, op_infos, results, samples

#: Why a call may be passed on to torch, which is deterministic there or refuses the call with the flag on.
REASONS = r"the dtype is torch\.int64|the reduction is|nothing is accumulated|the input is empty or"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(info, dtype, id=f"{info.formatted_name}-{str(dtype).removeprefix('torch.')}")
    for info in op_infos()
    for dtype in DTYPES
    if dtype in info.supported_dtypes("cpu")
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scatter, "SMALL", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples use what torch warns of
        yield
    hf.uninstall()


@pytest.mark.parametrize(("info", "dtype"), CASES)
def test_results_and_gradients_are_those_of_torch(info: Any, dtype: torch.dtype) -> None:
    wide = torch.float32 if dtype.itemsize == 2 else None
    given = samples(info, dtype, "cpu")
    expected = [results(info.op, sample, wide) for sample in given]
    with hf.installed():
        found = [[results(info.op, sample) for sample in given] for _ in range(2)]
        assert any(row.served for row in hf.status())
        assert all(re.match(REASONS, reason) for row in hf.status() for reason in row.passed_on), hf.status()
        assert not any(row.passed_on for row in hf.status() if "backward" in row.operator)
    for sample, one, again, other in zip(given, *found, expected, strict=True):
        compare(one, other, sample)
        for first, second in zip(one, again, strict=True):
            assert first is None or torch.equal(first.nan_to_num(7), second.nan_to_num(7))
