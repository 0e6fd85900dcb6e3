"""Runs operators on DTensors by the sharding rules of the ops.

A call is distributed for each dimension of the mesh separately: among the options of the rule the one is
chosen that moves the fewest bytes. Then the tensors are redistributed, every rank runs the operator on its
shards, and the results are DTensors. Terms of a sum are added in rank order before an operator reads them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from holdfast import ops
from holdfast.core.autograd import ARGUMENTS, LIBRARY
from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.core.sharding import SUM, Option, Place, Rule, Shards, Whole, wanted_placements
from holdfast.core.torch_op import ON_OTHER_TENSORS
from holdfast.distributed.partial import reduce_partial
from holdfast.nn import sharding as of_modules

_lock = threading.Lock()
_registered = False


def register_sharding_rules() -> None:
    """Register the sharding rules of all operators of holdfast for ``torch.distributed.tensor.DTensor``.

    This happens by itself when a function of holdfast first gets a DTensor, or at the import of holdfast if
    ``torch.distributed.tensor`` was imported before. Call it before ``torch.compile`` if neither is the case.
    """
    global _registered
    with _lock:
        if _registered:
            return
        from torch.distributed.tensor import DTensor

        rules = rules_of_operators()
        for name in ARGUMENTS:
            distribute = partial(_distribute, name, rules.get(name, Rule()))
            torch.library.register_torch_dispatch(f"holdfast::{name}", DTensor, distribute, lib=LIBRARY)
        _registered = True


def rules_of_operators() -> dict[str, Rule]:
    """The rule of each operator that has one. The others run on copies of everything."""
    modules = [*ops.modules("sharding"), of_modules]
    return {name: rule for module in modules for name, rule in getattr(module, "RULES", {}).items()}


def register_if_imported() -> None:
    """Register the rules if ``torch.distributed.tensor`` is imported: otherwise there is no DTensor."""
    if not _registered and "torch.distributed.tensor" in sys.modules:
        register_sharding_rules()


ON_OTHER_TENSORS.append(register_if_imported)


def _distribute(
    name: str, rule: Rule, kind: Any, operator: Any, types: Any, args: Sequence[Any], kwargs: Any = None
) -> Any:
    """Call ``holdfast::name`` with DTensors among its arguments."""
    from torch.distributed.tensor import DTensor

    given = dict(zip(ARGUMENTS[name], args, strict=False)) | (kwargs or {})
    if any("[]" in kind and "Tensor" in kind for kind in ARGUMENTS[name].values()):
        raise Unsupported(f"{name} got a DTensor, which it does not support; pass its local tensor.")
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    mesh = next(tensor for tensor in tensors.values() if isinstance(tensor, DTensor)).device_mesh
    with torch.no_grad():
        sharded = {key: _as_dtensor(key, tensor, mesh) for key, tensor in tensors.items()}
        given |= sharded
        offered = list(rule.options(Whole(given, mesh.size())))
        whole = operator(**{key: _described(value) for key, value in given.items()})
        results = whole if isinstance(whole, tuple) else (whole,)
        options = [Option({}, (None,) * len(results)), *offered]
        chosen = [_cheapest(options, sharded, results[0], mesh, dim) for dim in range(mesh.ndim)]
        inputs = {key: [option.inputs.get(key) for option in chosen] for key in sharded}
        outputs = [[option.outputs[i] for option in chosen] for i in range(len(results))]
        coordinate = mesh.get_coordinate()
        if coordinate is None:  # this rank is not in the mesh and has no shards
            found: Any = tuple(result.new_empty(0, device=mesh.device_type) for result in results)
        else:
            shards = Shards(Whole(given, mesh.size()), inputs, outputs, mesh.shape, coordinate)
            local = {key: _moved(sharded[key], places) for key, places in inputs.items()}
            found = rule.run(operator, given | local, shards)
        parts = found if isinstance(found, tuple) else (found,)
        wrapped = tuple(
            _wrapped(part, result, mesh, places)
            for part, result, places in zip(parts, results, outputs, strict=True)
        )
        return wrapped if isinstance(whole, tuple) else wrapped[0]


def _as_dtensor(name: str, tensor: Any, mesh: Any) -> Any:
    """``tensor`` as a DTensor on ``mesh``. A plain tensor of one number is the same on every rank."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise InvalidArgs(
                f"{name} is on the mesh {tensor.device_mesh} and another tensor on {mesh}; redistribute them "
                "to one mesh."
            )
        return tensor
    several = any(step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    if several or tensor.requires_grad:
        raise InvalidArgs(
            f"{name} is a plain tensor of shape {tuple(tensor.shape)} and another argument is a DTensor; "
            "make it a DTensor too, with distribute_tensor or DTensor.from_local."
        )
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _cheapest(
    options: Sequence[Option], sharded: dict[str, Any], result: torch.Tensor, mesh: Any, dim: int
) -> Option:
    """The option that moves the fewest bytes along a dimension of the mesh; the first one of several."""
    placements = wanted_placements()
    wanted = _place(placements[dim]) if placements else None
    ranks = mesh.shape[dim]

    def bytes_moved(option: Option) -> tuple[float, bool]:
        cost = sum(
            _bytes_moved(tensor, _place(tensor.placements[dim]), option.inputs.get(key), ranks)
            for key, tensor in sharded.items()
        )
        if isinstance(wanted, int):
            cost += _bytes_moved(result, option.outputs[0], wanted, ranks)
        return cost, option.outputs[0] != wanted

    return min(options, key=bytes_moved)


def _bytes_moved(tensor: torch.Tensor, now: Any, then: Any, ranks: int) -> float:
    """Bytes that a rank receives if ``tensor`` goes from one place to another."""
    if now == then or now is None:
        return 0.0
    moved = 2.0 if now == SUM else 1.0 if then is None else 1.0 / ranks
    return moved * tensor.numel() * tensor.element_size()


def _place(placement: Any) -> Any:
    """The place that a placement of torch stands for; the placement itself if there is none."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return placement.dim
    if type(placement) is Replicate:
        return None
    return SUM if type(placement) is Partial and placement.reduce_op == "sum" else placement


def _placement(place: Place) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if place is None:
        return Replicate()
    return Partial() if isinstance(place, str) else Shard(place)


def _moved(tensor: Any, places: Sequence[Place]) -> torch.Tensor:
    """The local part of ``tensor`` after moving it to ``places``."""
    wanted = [_placement(place) for place in places]
    if list(tensor.placements) != wanted:
        summed: Any = reduce_partial(tensor)
        tensor = summed.redistribute(placements=wanted)
    return tensor.to_local()  # type: ignore[no-any-return]


def _described(value: Any) -> Any:
    """A tensor on meta in place of a DTensor, to compute the shapes and strides of whole results."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _wrapped(local: torch.Tensor, whole: torch.Tensor, mesh: Any, places: Sequence[Place]) -> Any:
    from torch.distributed.tensor import DTensor

    if not whole.numel():  # every rank has all of it
        places = [None] * len(places)
        local = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device=local.device)
    placements = [_placement(place) for place in places]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
