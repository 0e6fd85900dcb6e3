"""Saves the state that a step changes, and restores it before every run."""

from __future__ import annotations

import copy
import dataclasses
import operator
import random
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.parametrize import is_parametrized

from holdfast.core.checks import kind_of
from holdfast.core.errors import InvalidArgs
from holdfast.core.torch_op import PLAIN
from holdfast.testing.outputs import BYTES, difference, flattened, of_module


class State(Protocol):
    """Saved state of an object that a step may change."""

    def restore(self, device: torch.device | None) -> None:
        """Restore the state, on ``device`` or on the original device if None."""

    def outputs(self) -> Iterator[tuple[str, Any]]:
        """The current state, by path."""


class _Tensor:
    """A tensor with its gradient. It is restored in place, so that other references see the change."""

    def __init__(self, tensor: torch.Tensor, path: str) -> None:
        self.tensor, self.path = tensor, path
        self.value, self.requires_grad = tensor.detach().clone(), tensor.requires_grad
        self.grad = (
            _Tensor(tensor.grad, f"{path}.grad") if tensor.is_leaf and tensor.grad is not None else None
        )

    def restore(self, device: torch.device | None) -> None:
        if self.tensor.is_leaf:
            self.tensor.grad = None
            self.tensor.requires_grad_(self.requires_grad)
        self._write(device or self.value.device)
        if self.grad is not None:
            self.grad.restore(device)
            self.tensor.grad = self.grad.tensor

    def _write(self, device: torch.device) -> None:
        now, before = self.tensor, self.value
        alike = now.device == device and now.shape == before.shape and now.dtype == before.dtype
        if alike and not _has_overlap(now):
            with torch.no_grad():
                now.copy_(before)
        else:
            now.data = before.to(device, copy=True)

    def outputs(self) -> Iterator[tuple[str, Any]]:
        yield from flattened(self.tensor, self.path)
        if self.tensor.is_leaf and self.tensor.grad is not None:
            yield from flattened(self.tensor.grad, f"{self.path}.grad")


def _has_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after ``expand``. torch does not write to such tensors."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


class _Attribute(_Tensor):
    """A tensor that is an attribute of a module. It is written only if the step changed it.

    It stays on its device: ``Module.to`` does not move it either.
    """

    def restore(self, device: torch.device | None) -> None:
        super().restore(None)

    def _write(self, device: torch.device) -> None:
        if difference(self.path, self.value, self.tensor.detach()) is not None:
            super()._write(device)


def _has_plain_bits(tensor: torch.Tensor) -> bool:
    dense = type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_nested
    return dense and not (tensor.is_meta or tensor.is_quantized or tensor.dtype in BYTES)


def _restorer(value: Any) -> Callable[[], None] | None:
    """A function that restores a container, an array or a random generator in place; None for other values.

    Others may refer to it, as the handles of hooks refer to the module's dicts.
    """
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state", copy.deepcopy(bits.state))
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    if isinstance(value, dict | list | set | deque):
        before, put = _content(value), value.update if isinstance(value, dict | set) else value.extend
        items = dict(value) if isinstance(value, dict) else before

        def restore() -> None:
            now = _content(value)  # a container that the step left alone may refuse changes
            if len(now) != len(before) or any(map(operator.is_not, now, before)):
                value.clear()
                put(items)

        return restore
    return None


def _class_restorer(module: torch.nn.Module) -> Callable[[], None]:
    """A function that restores the class of a module.

    A parametrized module has a class of its own, with a property for each parametrized tensor.
    """
    kind = type(module)
    before = dict(vars(kind)) if is_parametrized(module) else None

    def restore() -> None:
        if type(module) is not kind:
            module.__class__ = kind
        if before is not None:
            for name in vars(kind).keys() - before.keys():
                delattr(kind, name)
            for name in before.keys() - vars(kind).keys():
                setattr(kind, name, before[name])

    return restore


def _content(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _require_restorable(name: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgs(f"{name} has no shape yet; run one batch through the model first.")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidArgs(
            f"{name} was made in torch.inference_mode, so its value cannot be restored; make or load the "
            "model outside of it."
        )


class _Module:
    """A module: its tensors and attributes."""

    def __init__(self, module: torch.nn.Module, path: str) -> None:
        self.module, self.path = module, path
        self.states, self.restorers = list[State](), list[Callable[[], None]]()
        self.seen = dict[int, Any]()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _require_restorable(f"{path}.{name}" if path else name, tensor)
        self._save(module)

    def _save(self, value: Any) -> None:
        """Save ``value`` and what it contains."""
        if id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            tensors = {id(tensor): tensor for tensor in [*value.parameters(), *value.buffers()]}
            new = [tensor for key, tensor in tensors.items() if key not in self.seen]
            self.states += [_Tensor(tensor, self.path) for tensor in new]
            self.seen |= tensors
            for part in value.modules():
                self.restorers.append(_class_restorer(part))
                self._save(vars(part))
        elif isinstance(value, torch.Tensor):
            self.states += [_Attribute(value, self.path)] if _has_plain_bits(value) else []
        elif isinstance(value, STATEFUL):
            self.states.append(state_of(value, self.path))
        else:
            restorer = _restorer(value)
            self.restorers += [] if restorer is None else [restorer]
            if isinstance(value, dict | list | set | deque | tuple):
                for item in value.values() if isinstance(value, dict) else value:
                    self._save(item)

    def restore(self, device: torch.device | None) -> None:
        for restore in self.restorers:
            restore()
        for state in self.states:
            state.restore(device)

    def outputs(self) -> Iterator[tuple[str, Any]]:
        return of_module(self.module, f"{self.path}." if self.path else "")


class _Optimizer:
    """An optimizer: the state of each parameter, and the groups with their parameters and settings."""

    def __init__(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        self.optimizer, self.path = optimizer, path
        self.state = {parameter: _copied(dict(kept)) for parameter, kept in optimizer.state.items()}
        self.groups = [
            (group, list(group["params"]), _copied(_settings(group))) for group in optimizer.param_groups
        ]

    def restore(self, device: torch.device | None) -> None:
        state = {parameter: _copied(kept, device) for parameter, kept in self.state.items()}
        self.optimizer.state = defaultdict(dict, state)
        self.optimizer.param_groups[:] = [group for group, *_ in self.groups]
        for group, parameters, settings in self.groups:
            group.clear()
            group.update({"params": list(parameters), **_copied(settings, device)})

    def outputs(self) -> Iterator[tuple[str, Any]]:
        yield from flattened(self.optimizer.state_dict(), self.path)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class _Generator:
    """A generator of random numbers."""

    def __init__(self, generator: torch.Generator, path: str) -> None:
        self.generator, self.path, self.state = generator, path, generator.get_state()

    def restore(self, device: torch.device | None) -> None:
        self.generator.set_state(self.state)

    def outputs(self) -> Iterator[tuple[str, Any]]:
        yield from flattened(self.generator.get_state(), self.path)


class _Loadable:
    """Any other object with state_dict and load_state_dict, such as a scheduler or a gradient scaler."""

    def __init__(self, holder: Any, path: str) -> None:
        self.holder, self.path, self.state = holder, path, copy.deepcopy(holder.state_dict())

    def restore(self, device: torch.device | None) -> None:
        self.holder.load_state_dict(copy.deepcopy(self.state))

    def outputs(self) -> Iterator[tuple[str, Any]]:
        yield from flattened(self.holder.state_dict(), self.path)


def state_of(thing: Any, path: str) -> State:
    """Save the state of ``thing``."""
    if isinstance(thing, torch.nn.Module):
        return _Module(thing, path)
    for kind, holder in _HOLDERS.items():
        if isinstance(thing, kind):
            return holder(thing, path or "model")
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return _Loadable(thing, path or "model")
    raise InvalidArgs(
        f"{path or 'model'} is {kind_of(thing)}; model takes modules, optimizers, tensors, "
        f"generators, and what has state_dict and load_state_dict, alone or in a list."
    )


_HOLDERS: dict[type, Callable[[Any, str], State]] = {
    torch.optim.Optimizer: _Optimizer, torch.Tensor: _Tensor, torch.Generator: _Generator,
}  # fmt: skip
#: Inputs that are not copied but restored in place, because optimizers and closures refer to them.
STATEFUL = (torch.nn.Module, torch.optim.Optimizer, torch.Generator)


def random_state() -> Callable[[], None]:
    """A function that restores the current state of the random generators of Python, NumPy and torch."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def _copied(value: Any, device: torch.device | None = None) -> Any:
    return Copier(device)(value, "state")


@dataclass(frozen=True)
class BatchSlice:
    """Samples ``start`` to ``stop`` of a batch of ``size`` samples."""

    start: int
    stop: int
    size: int

    def of(self, value: Any) -> Any:
        """The slice of ``value`` along dim 0, or all of ``value`` if its dim 0 is not the batch."""
        return value[self.start : self.stop] if value.ndim and value.shape[0] == self.size else value


@dataclass
class Copier:
    """Copies inputs to a device. An object that occurs twice is copied once."""

    device: torch.device | None = None
    rows: BatchSlice | None = None
    made: dict[int, Any] = field(default_factory=dict)

    def __call__(self, value: Any, path: str) -> Any:
        if id(value) not in self.made:
            self.made[id(value)] = self._copy(value, path)
        return self.made[id(value)]

    def _copy(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return (self.rows.of(value) if self.rows else value).copy(order="K")
        if isinstance(value, STATEFUL):
            return value
        if isinstance(value, torch.device):
            return self.device or value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self(getattr(value, name), f"{path}.{name}") for name in value._fields))
        if type(value) in (list, tuple):
            return type(value)(self(item, f"{path}[{number}]") for number, item in enumerate(value))
        if isinstance(value, dict):
            items = {key: self(item, f"{path}[{key!r}]") for key, item in value.items()}
            return copy.copy(value) | items  # keeps the type, such as OrderedDict
        if isinstance(value, UserDict):  # such as the batches of a tokenizer
            batch = copy.copy(value)
            batch.update({key: self(item, f"{path}[{key!r}]") for key, item in value.items()})
            return batch
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            made: Any = copy.copy(value)
            for f in dataclasses.fields(value):  # also works for frozen dataclasses
                object.__setattr__(made, f.name, self(getattr(value, f.name), f"{path}.{f.name}"))
            return made
        try:
            return copy.deepcopy(value)
        except Exception as error:  # __deepcopy__ of a user may raise anything
            raise InvalidArgs(
                f"{path} is {kind_of(value)}, which cannot be copied ({error}). Every run needs a "
                f"copy of its own; give tensors, arrays, numbers, modules, or dicts, lists, tuples and "
                f"dataclasses of them."
            ) from error

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        device = self.device or value.device
        made = (self.rows.of(value) if self.rows else value).detach().clone().to(device)
        if isinstance(value, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
        made.requires_grad_(value.requires_grad)
        if value.is_leaf and value.grad is not None:
            made.grad = (self.rows.of(value.grad) if self.rows else value.grad).detach().clone().to(device)
        return made


def stateful_objects(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The modules, optimizers and generators in an input, with their paths."""
    if isinstance(value, STATEFUL):
        yield path, value
    else:
        for where, item in _items(value, path):
            yield from stateful_objects(item, where)


def _items(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The items of a container, with their paths."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{number}]", item) for number, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value))


def tensors_of(
    value: Any, path: str, *, but: Collection[int] = (), grads: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the tensors and arrays in an input, or of their gradients, with their paths.

    Skips objects whose id is in ``but``.
    """
    if id(value) in but:
        return
    if isinstance(value, torch.Tensor):
        kept = value.grad if grads and value.is_leaf else None if grads else value
        if kept is not None:
            yield from flattened(kept, f"{path}.grad" if grads else path)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and not grads:
        yield from flattened(value, path)
    else:
        for where, item in _items(value, path):
            yield from tensors_of(item, where, but=but, grads=grads)
