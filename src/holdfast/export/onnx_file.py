"""Export to ONNX: ``torch.onnx.export`` with the translations of ``onnx_operators``, then the lowering."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import onnx
import torch

from holdfast.core.checks import kind_of, whole_number
from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.export.onnx_formats import BFLOAT16_OPSET, DEFAULT_OPSET, codes_of, granularity_of, needed_opset
from holdfast.export.onnx_lowering import RULES, lower
from holdfast.export.onnx_operators import translations
from holdfast.export.prepared import is_prepared
from holdfast.qat import convert
from holdfast.qat.layers import require_module

_NEWEST = onnx.defs.onnx_opset_version()


def write_onnx(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | PathLike[str],
    opset: int | None,
    **options: Any,
) -> None:
    require_module(model)
    if not isinstance(args, tuple):
        raise InvalidArgs(f"args is {kind_of(args)}; it must be the tuple of the model's arguments, as (x,).")
    if opset is not None and whole_number("opset", opset, 1, 2**31) > _NEWEST:
        raise InvalidArgs(f"opset is {opset}; the installed onnx package has opsets up to {_NEWEST}.")
    if model.training and not isinstance(model, torch.fx.GraphModule):  # an exported module has no eval()
        raise InvalidArgs("the model is in training mode; call model.eval() before the export.")
    if is_prepared(model):
        model = convert(copy.deepcopy(model))
    if not all(parameter.is_contiguous() for parameter in model.parameters()):
        # ONNX has no strides; a change of the strides in the graph would take the name of a weight.
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
    kwargs, dynamic_shapes = options.pop("kwargs", None), options.pop("dynamic_shapes", None)
    with torch.no_grad(), _quiet():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        opset = _opset(program, opset)
        exported = torch.onnx.export(
            program, (), dynamo=True, opset_version=opset, verbose=False,
            custom_translation_table=translations(list(RULES)), **options,
        )  # fmt: skip
        assert exported is not None
        made = exported.model.opset_imports[""]
        if made != opset:
            raise Unsupported(
                f"torch exported the model to opset {made} and could not convert it to opset {opset}; pass "
                f"opset={made}."
            )
        lower(exported.model, opset)
        exported.model.ir_version = onnx.helper.OP_SET_ID_VERSION_MAP[("ai.onnx", opset)]
        exported.save(path)


def _opset(program: torch.export.ExportedProgram, opset: int | None) -> int:
    """The opset to export to. Raise if ``opset`` lacks what the program uses."""
    needed = _usual_opset(program) if opset is None else opset
    for name, arguments in _calls(program):
        if name not in RULES:
            raise Unsupported(
                f"the model calls holdfast::{name}, which has no ONNX form; exported are {', '.join(RULES)}. "
                "Use torch's own function in the model that is exported."
            )
        if "granularity" not in arguments:
            continue
        codes, granularity = codes_of(arguments)[0], granularity_of(arguments)
        least = needed_opset(codes, granularity)
        if opset is not None and opset < least:
            raise Unsupported(
                f"opset is {opset}, and ONNX has {codes.torch} with {granularity} from opset {least} on; "
                f"pass opset={least}."
            )
        needed = max(needed, least)
    return needed


def _usual_opset(program: torch.export.ExportedProgram) -> int:
    state = program.state_dict.values()
    return BFLOAT16_OPSET if any(tensor.dtype == torch.bfloat16 for tensor in state) else DEFAULT_OPSET


def _calls(program: torch.export.ExportedProgram) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls of operators of holdfast, with their arguments by name."""
    for graph in program.graph_module.modules():
        for node in getattr(getattr(graph, "graph", None), "nodes", ()):
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None or not schema.name.startswith("holdfast::"):
                continue
            name = schema.name.removeprefix("holdfast::")
            if graph is not program.graph_module:
                raise Unsupported(
                    f"the model calls holdfast::{name} in a branch or a loop; only calls outside of them are "
                    "exported to ONNX."
                )
            names = (argument.name for argument in schema.arguments)
            yield name, dict(zip(names, node.args, strict=False))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without messages about packages that torch did not find, deprecations and skipped optimizations."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
