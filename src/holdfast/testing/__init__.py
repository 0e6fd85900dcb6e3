"""``assert_reproducible``: runs a user's training step repeatedly and compares every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.checks import kind_of
from holdfast.core.errors import InvalidArgs, NotReproducible
from holdfast.testing.layers import Watch, first_difference
from holdfast.testing.outputs import Difference, Outputs, differences, flattened
from holdfast.testing.state import BatchSlice, Copier, random_state, state_of, stateful_objects, tensors_of

__all__ = ["Reproducible", "assert_reproducible"]

#: Maximum number of differences in a message.
SHOWN = 8

_SAME = (
    "The same call gave other bits. Look for random numbers without a seed, for state that the step keeps "
    "between calls (name it in model=), and for sums in the order of arrival."
)
_THREADS = "The number of threads changed the bits. Look for sums that are split among the threads."
_DEVICES = "The devices compute in another way. Look for operators that do not promise equal bits on both."
_BATCH = (
    "A sample's result depends on what else is in its batch. Look for sums over dim 0, and for kernels that "
    "are picked by the size of the batch."
)
_IN_PLACE = (
    "The step writes to an input, so a second call with it begins with other values. Clone the input, or "
    "name it in model= if it is the step's to change."
)


@dataclass(frozen=True)
class Reproducible:
    """The result of ``assert_reproducible``: number of runs, outputs and elements, and the runs compared."""

    runs: int
    outputs: int
    elements: int
    compared: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.outputs:,} output{'s' * (self.outputs > 1)} with {self.elements:,} "
            f"element{'s' * (self.elements != 1)}: equal in every bit in {self.runs} runs, "
            f"{'; '.join(self.compared)}."
        )


@dataclass(frozen=True)
class _Config:
    """Device and number of CPU threads of a run. None: unchanged."""

    device: torch.device | None = None
    threads: int | None = None

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return " on ".join(filter(None, (str(self.device or ""), threads)))


def assert_reproducible(
    step: Callable[..., Any],
    *inputs: Any,
    model: Any = None,
    repeats: int = 3,
    threads: Sequence[int] = (1, 2, 8),
    batch_split: int | Sequence[int] | None = None,
    devices: Sequence[str | torch.device] | None = None,
) -> Reproducible:
    """Check that ``step(*inputs)`` gives the same bits in every run. Raises ``NotReproducible`` otherwise.

    The step runs ``repeats`` times for each number of CPU ``threads`` and on each of the ``devices``. Every
    run gets copies of the inputs and starts from the same state: modules, optimizers and generators among the
    inputs or in ``model`` (one object or a list), ``step`` if it is a module, and the random generators of
    torch, NumPy and Python. All state is restored at the end.

    The check compares the returned values, the gradients of the inputs, and the parameters, gradients and
    buffers after the step. NaNs are equal to each other; 0.0 and -0.0 are different. To name the first layer
    with other bits, the error repeats the two runs that differ.

    ``batch_split`` is a number of parts, or a list of their sizes. The step then also runs on parts of the
    inputs, split along dim 0. The result of each sample must be the same as in the whole batch.

    >>> import torch, holdfast as hf
    >>> print(hf.testing.assert_reproducible(torch.sin, torch.linspace(0, 1, 10), threads=(1, 2)))
    1 output with 10 elements: equal in every bit in 6 runs, 3 on 1 thread; 3 on 2 threads.
    """
    configs = _configs(repeats, threads, devices)
    trial = _Trial(step, inputs, model)
    slices = trial.slices(batch_split)
    if repeats * len(configs) + len(slices) < 2:
        raise InvalidArgs("One run has nothing to be compared with; give repeats=2 or more.")
    with trial.restored():
        first = trial.run(configs[0])
        for config in configs:
            for number in range(1 + (config == configs[0]), repeats + 1):
                between = _between(configs[0], config, number)
                again = trial.run(config, note=f"Only the second raised this: {between}.")
                if found := differences(first, again):
                    layer = trial.first_layer(configs[0], config)
                    raise NotReproducible(_message(found, between, layer, _advice(configs[0], config)))
        compared = [f"{repeats} on {config}" if str(config) else f"{repeats} alike" for config in configs]
        if slices:
            whole, parts = _per_sample(first, [trial.run(configs[0], rows) for rows in slices], slices)
            sizes = ", ".join(str(rows.stop - rows.start) for rows in slices)
            _compare(whole, parts, f"the whole batch vs parts of {sizes}", _BATCH)
            compared.append(f"{len(slices)} on parts of {sizes} samples")
    elements = sum(value.numel() if isinstance(value, torch.Tensor) else 1 for value in first.values())
    return Reproducible(repeats * len(configs) + len(slices), len(first), elements, tuple(compared))


class _Trial:
    """A step, its inputs, and the state to restore before each run."""

    def __init__(self, step: Callable[..., Any], inputs: tuple[Any, ...], model: Any) -> None:
        if not callable(step):
            raise InvalidArgs(f"step is {kind_of(step)}; give a function to call with the inputs.")
        self.step, self.inputs = step, inputs
        several = isinstance(model, list | tuple)
        self.model = list(model) if several else [] if model is None else [model]
        names = [f"model[{n}]" if several else "" for n in range(len(self.model))]
        found = {id(thing): (name, thing) for name, thing in zip(names, self.model, strict=True)}
        if isinstance(step, torch.nn.Module):
            found.setdefault(id(step), ("step" if found else "", step))
        for path, thing in stateful_objects(inputs, "inputs"):
            found.setdefault(id(thing), (path, thing))
        self.states = [state_of(thing, path) for path, thing in found.values()]
        self.modules = _modules(found.values())
        self.random, self.threads = random_state(), torch.get_num_threads()
        self.owned = {id(thing): thing for thing in self.model}
        self.before = self._tensors(inputs)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all state on exit."""
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)
            self._restore(None)

    def _restore(self, device: torch.device | None) -> None:
        for state in self.states:
            state.restore(device)
        self.random()

    def first_layer(self, *configs: _Config) -> str:
        """A sentence about the first layer with other bits when two runs are repeated; "" if none."""
        if _has_other_processes():  # which would have to take part in the step's collectives
            return ""
        watched = [Watch(self.modules) for _ in configs]
        try:
            for config, watch in zip(configs, watched, strict=True):
                self.run(config, watch=watch)
        except Exception:  # the difference is known, whatever these further runs raise
            return ""
        return first_difference(*watched)

    def run(
        self, config: _Config, rows: BatchSlice | None = None, note: str = "", watch: Watch | None = None
    ) -> Outputs:
        """Run the step once. Returns everything to compare."""
        self._restore(config.device)
        torch.set_num_threads(config.threads or self.threads)
        copy = Copier(config.device, rows, dict(self.owned))
        given = copy(self.inputs, "inputs")
        before = self.before if rows is None else self._tensors(given)
        try:
            with watch.recording() if watch else nullcontext():
                result = self.step(*given)
        except Exception as error:
            if note:
                error.add_note(note)
            raise
        _compare(before, self._tensors(given), "before vs after the step", _IN_PLACE)
        outputs = {} if result is None else dict(flattened(result, "output"))
        for state in self.states:
            outputs |= state.outputs()
        outputs |= self._tensors(given, grads=True)
        if not outputs:
            raise InvalidArgs(
                "step returned nothing, and there is no model and no gradient to look at. Return what should "
                "be reproducible, or name what the step changes: model=."
            )
        return outputs

    def _tensors(self, inputs: Any, grads: bool = False) -> Outputs:
        """The tensors of the inputs that are not in ``model``, or their gradients."""
        return dict(tensors_of(inputs, "inputs", but=self.owned, grads=grads))

    def slices(self, split: int | Sequence[int] | None) -> list[BatchSlice]:
        """The parts of the batch, from the argument ``batch_split``."""
        if split is None:
            return []
        batch = next((t.shape[0] for _, t in tensors_of(self.inputs, "inputs") if t.ndim), 0)
        if _whole(split):
            parts = int(split)  # type: ignore[arg-type]
            sizes = (
                [batch // parts + (n < batch % parts) for n in range(parts)] if 2 <= parts <= batch else []
            )
        else:
            sizes = list(split) if isinstance(split, list | tuple) else []
        if len(sizes) < 2 or not all(_whole(size) and size > 0 for size in sizes) or sum(sizes) != batch:
            advice = (
                f"give a number of parts from 2 to {batch}, or the sizes of the parts, which add up to it"
                if batch > 1
                else "hand in a batch of 2 samples or more"
            )
            raise InvalidArgs(
                f"batch_split is {split!r}, and the first input has {batch} samples along dim 0; {advice}."
            )
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        return [BatchSlice(start, start + size, batch) for start, size in zip(starts, sizes, strict=True)]


def _modules(things: Iterable[tuple[str, Any]]) -> dict[str, torch.nn.Module]:
    """All modules by name. A module of torch.jit takes no hooks."""
    found: dict[torch.nn.Module, str] = {}
    for path, thing in things:
        for name, module in thing.named_modules() if isinstance(thing, torch.nn.Module) else ():
            if not isinstance(module, torch.jit.ScriptModule):
                found.setdefault(module, ".".join(filter(None, (path, name))))
    return {name: module for module, name in found.items()}


def _has_other_processes() -> bool:
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return known and torch.distributed.get_world_size() > 1


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _configs(repeats: int, threads: Sequence[int], devices: Sequence[Any] | None) -> list[_Config]:
    if not _whole(repeats) or repeats < 1:
        raise InvalidArgs(f"repeats is {repeats!r}; give a whole number from 1.")
    if not isinstance(threads, list | tuple) or not all(_whole(n) and n > 0 for n in threads):
        raise InvalidArgs(f"threads is {threads!r}; give numbers of threads from 1, such as (1, 2), or ().")
    if devices is not None and not (isinstance(devices, list | tuple) and devices):
        raise InvalidArgs(f"devices is {devices!r}; give a list such as ('cpu', 'cuda').")
    counts: Sequence[int | None] = threads or (None,)
    if devices is None:
        return [_Config(None, count) for count in counts]
    known = [_device(device) for device in devices]
    return [_Config(device, n) for device in known for n in (counts if device.type == "cpu" else (None,))]


def _device(given: Any) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise InvalidArgs(f"devices names {given!r}, which is no device; give 'cpu' or 'cuda'.") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgs(f"devices names {given!r}; only 'cpu' and 'cuda' can be compared.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgs(
            f"devices names {given!r}, but torch sees no CUDA device here; leave it out, or ask "
            f"torch.cuda.is_available() first."
        )
    return device


def _between(first: _Config, config: _Config, number: int) -> str:
    if config == first:
        return f"run 1 vs run {number}" + (f" on {config}" if str(config) else "")
    return f"{first} vs {config}" + (f", run {number}" if number > 1 else "")


def _advice(first: _Config, config: _Config) -> str:
    return _SAME if config == first else _DEVICES if config.device != first.device else _THREADS


def _per_sample(first: Outputs, parts: list[Outputs], slices: list[BatchSlice]) -> tuple[Outputs, Outputs]:
    """The outputs with one row per sample: from the whole batch, and concatenated from the parts."""
    size, whole, joined = slices[0].size, {}, {}
    for path, value in first.items():
        if not (path.startswith("output") and isinstance(value, torch.Tensor) and value.ndim):
            continue
        pieces = [part.get(path) for part in parts]
        tensors = [piece for piece in pieces if isinstance(piece, torch.Tensor)]
        if value.shape[0] != size or any(piece.shape == value.shape for piece in tensors):
            continue  # not one row per sample
        whole[path] = value
        fitting = len(tensors) == len(pieces) and all(
            piece.shape == (rows.stop - rows.start, *value.shape[1:]) and piece.dtype == value.dtype
            for piece, rows in zip(tensors, slices, strict=True)
        )
        joined[path] = torch.cat(tensors) if fitting else tensors[0] if tensors else None
    if not whole:
        raise InvalidArgs(
            f"batch_split was given, but nothing that step returns has {size} samples along dim 0; return "
            f"results of each sample, such as logits, or losses before they are added up."
        )
    return whole, joined


def _compare(first: Outputs, second: Outputs, between: str, cause: str) -> None:
    found = differences(first, second)
    if found:
        raise NotReproducible(_message(found, between, "", cause))


def _message(found: list[Difference], between: str, layer: str, cause: str) -> str:
    many = f"{len(found)} outputs differ" if len(found) > 1 else "1 output differs"
    lines = [f"the step is not reproducible, {between}: {many}."]
    lines += [f"  {one}" for one in found[:SHOWN]]
    lines += [f"  ... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n".join([*lines, *filter(None, (layer, cause))])
