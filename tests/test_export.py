"""``torch.export`` programs of every function and code dtype can be saved and loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from holdfast.core.formats import INTEGERS
from public_calls import CALLS, Call, flat


class Wrapped(torch.nn.Module):
    def __init__(self, call: Call, changed: dict[str, Any]) -> None:
        super().__init__()
        self.call, self.changed = call, changed

    def forward(self, tensors: dict[str, torch.Tensor]) -> Any:
        return self.call(**self.changed, **tensors)


def saved_and_loaded(call: Call, changed: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    program = torch.export.export(Wrapped(call, changed), (tensors,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()(tensors)


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Every call, and calls with codes also for every code dtype."""
    found: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in CALLS]
    for code in INTEGERS.values():
        signed = {"symmetric": code.signed} if code.bits != 2 else {"symmetric": False}
        whole = {"dtype": code.torch, "q_min": None, "q_max": None}
        found += [
            ("quantize", whole),
            ("fake_quantize", whole),
            ("choose_scale", whole | signed),
            ("scale_of_range", whole | signed),
            ("dynamic_quantize", whole | signed),
            ("lsq_init", whole),
            ("dequantize", {"code_dtype": code.torch, "q": torch.ones(4, 6, dtype=code.storage)}),
        ]
        if code.per_byte > 1:
            found += [
                ("quantize", whole | {"packed": True}),
                ("dequantize packed", {"code_dtype": code.torch, "length": 3 * code.per_byte}),
                ("pack", {"dtype": code.torch, "codes": torch.ones(4, 6, dtype=code.storage)}),
                ("unpack", {"dtype": code.torch, "length": 3 * code.per_byte}),
            ]
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "changed"), variants(), ids=lambda part: part if type(part) is str else "")
def test_a_program_is_saved_and_loaded(name: str, changed: dict[str, Any]) -> None:
    call = CALLS[name]
    tensors = {**call.tensors, **{k: v for k, v in changed.items() if isinstance(v, torch.Tensor)}}
    others = {k: v for k, v in changed.items() if not isinstance(v, torch.Tensor)}
    expected = call(**others, **tensors)
    found = saved_and_loaded(call, others, tensors)
    for mine, right in zip(flat(found), flat(expected), strict=True):
        assert mine.dtype == right.dtype and torch.equal(mine, right)


def test_no_operator_takes_a_dtype_that_cannot_be_saved() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("holdfast::"):
            operator = getattr(torch.ops.holdfast, name.removeprefix("holdfast::").partition(".")[0])
            assert "ScalarType" not in str(operator.default._schema)
