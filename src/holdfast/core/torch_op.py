"""torch operators: registration, tracing and vmap, and the plan of a call.

An operator takes plain values, so that torch can trace it; a dtype is passed by name. ``core.autograd``
registers derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

from holdfast.core import private
from holdfast.core.autograd import ARGUMENTS, LIBRARY, RECORDERS, RESULTS
from holdfast.core.checks import require_dtype, require_memory
from holdfast.core.contract import PlanPreference
from holdfast.core.dtypes import dtype_name
from holdfast.core.errors import InvalidArgs
from holdfast.core.last_call import getter_of
from holdfast.core.plan import Plan
from holdfast.core.repeated import Calls, Work
from holdfast.core.stream import Stream

_ON_FIRST_RUN = PlanPreference(precompile=False)
#: Maximum number of plans that ``cached_plan`` keeps of a kind. Images may have any size, and a plan of
#: interpolate may hold 100 kB of tables.
_MOST_PLANS = 1024

P = TypeVar("P", bound=Plan[Any, Any])

#: Called before an operator gets a tensor of another class, such as a DTensor.
ON_OTHER_TENSORS: list[Callable[[], None]] = []


def define(name: str, schema: str, kernel: Any, fake: Any) -> Any:
    """Register ``holdfast::name`` for CPU, CUDA and tracing; return a function that calls it.

    ``kernel`` takes the operator's arguments and returns ``Work``, or computes the result itself. If nothing
    traces, transforms or profiles a call, it bypasses torch's dispatcher, which takes longer than the launch.

    The function has an attribute ``again``: a function of the same arguments. If this is a recent call again,
    with equal values and tensors of equal metadata, it returns the result, otherwise None. A public function
    calls it first, because checks of valid arguments take longer than the launch, too.
    """
    ARGUMENTS[name], RESULTS[name] = arguments_in(schema), schema.partition("->")[2].count("Tensor")
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))

    def compute(*arguments: Any) -> Any:
        found = kernel(*arguments)
        return found.run() if isinstance(found, Work) else found

    def fake_on_one_device(*arguments: Any) -> Any:
        _require_one_device(arguments)
        return fake(*arguments)

    LIBRARY.impl(name, compute, "CPU")
    LIBRARY.impl(name, compute, "CUDA")
    torch.library.register_fake(f"holdfast::{name}", fake_on_one_device, lib=LIBRARY)
    operator, calls = getattr(torch.ops.holdfast, name).default, Calls(kernel)

    def call(*arguments: Any) -> Any:
        if is_compiling():
            return operator(*arguments)
        watched = private.is_watched()
        if not watched:
            for run in calls.recent:
                found = run(*arguments)
                if found is not None:
                    return found
        kinds = tuple(map(type, arguments))
        parts = None if watched else _parts(kinds)
        if parts is None:
            for prepare in ON_OTHER_TENSORS:
                prepare()
            return operator(*map(_in_memory, arguments))
        tensors = parts[0](arguments)
        records = torch.is_grad_enabled()
        key = (kinds, records, parts[1](arguments), *map(_shape, tensors))
        found = calls.repeat(key, arguments)
        if found is not None:
            return found
        if not all(map(_is_plain, tensors)):
            return operator(*map(_in_memory, arguments))
        if not (records and any(map(_requires_grad, tensors))):
            return calls.run(key, arguments, False)
        if name not in RECORDERS:
            return operator(*arguments)
        recorder = RECORDERS[name]
        recorder.check(arguments)
        with torch.no_grad():
            found = calls.run(key, arguments, True, recorder)
        return recorder.record(*arguments[: recorder.leading], (arguments[recorder.leading :], (found,)))

    def again(*arguments: Any) -> Any:
        if not is_compiling() and not private.is_watched():
            for run in calls.recent:
                found = run(*arguments)
                if found is not None:
                    return found
        return None

    call.again = again  # type: ignore[attr-defined]
    return call


@contextmanager
def dispatched() -> Iterator[None]:
    """Let all operators go through torch's dispatcher inside the block, where no launch is repeated."""
    before, private.is_watched = private.is_watched, lambda: True
    try:
        yield
    finally:
        private.is_watched = before


def below_autograd(kernel: Any) -> Any:
    """A function that calls ``kernel`` inside a backend kernel of torch, where nothing is recorded.

    ``kernel`` returns ``Work``, as for ``define``. The arguments are plain tensors and plain values.
    """
    calls = Calls(kernel)

    def call(*arguments: Any) -> Any:
        for run in calls.recent:
            found = run(*arguments)
            if found is not None:
                return found
        kinds = tuple(map(type, arguments))
        parts = _parts(kinds)
        if parts is None:
            return kernel(*arguments).run()
        records = torch.is_grad_enabled()
        key = (kinds, records, parts[1](arguments), *map(_shape, parts[0](arguments)))
        found = calls.repeat(key, arguments)
        return calls.run(key, arguments, records) if found is None else found

    return call


def arguments_in(schema: str) -> dict[str, str]:
    """The name and the type of each argument in a schema, such as "(Tensor x, float scale) -> Tensor"."""
    given = schema[schema.index("(") + 1 : schema.index(")")].split(",")
    typed = [argument.partition("=")[0].rsplit(maxsplit=1) for argument in given if argument.strip() != "*"]
    return {name: kind.strip() for kind, name in typed}


def _in_memory(argument: Any) -> Any:
    """Replace a zero tensor of torch by one with memory. torch itself would expand a single element."""
    zero = isinstance(argument, torch.Tensor) and private.is_zerotensor(argument)
    return argument.clone() if zero else argument


def register_vmap(name: str, rule: Any) -> None:
    """Register ``rule(info, in_dims, *arguments)`` for ``holdfast::name`` under ``torch.vmap``.

    The memory of all tensors is checked first, because a rule may copy them by torch, which does not check.
    """
    names = tuple(ARGUMENTS[name])

    def checked(info: Any, in_dims: Any, *arguments: Any) -> Any:
        for argument, given in zip(names, arguments, strict=True):
            if isinstance(given, torch.Tensor):
                require_memory(argument, given)
        return rule(info, in_dims, *arguments)

    torch.library.register_vmap(f"holdfast::{name}", checked, lib=LIBRARY)


def _require_one_device(arguments: tuple[Any, ...]) -> None:
    """Raise if tensors are on different devices. A traced call has no plan that would check this."""
    first, *others = (argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    for device in others:
        if device != first:
            raise InvalidArgs(f"there are tensors on {first} and on {device}; move them to one device.")


#: The classes of tensors whose elements are in their memory.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_VALUES = frozenset((float, int, bool, str, tuple, torch.dtype, torch.Size, type(None)))


_requires_grad, _shape = attrgetter("requires_grad"), attrgetter("shape")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements of this tensor are in its memory. Only torch can unwrap a batch or a transform."""
    return not (
        tensor.is_neg()
        or tensor.is_meta
        or private.is_zerotensor(tensor)
        or private.is_wrapped(tensor)
        or private.is_legacy_batch(tensor)
    )


def is_plain_call(tensor: torch.Tensor) -> bool:
    """Whether nothing traces or transforms a call with this tensor, whose elements are in its memory."""
    return not is_compiling() and not private.is_watched() and type(tensor) in PLAIN and _is_plain(tensor)


@lru_cache(maxsize=256)
def _parts(kinds: tuple[type, ...]) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Functions that return the tensors and the values among arguments of these types.

    None if there is any other type than plain tensors and plain values.
    """
    if not PLAIN.union(_VALUES).issuperset(kinds):
        return None
    tensors = [position for position, kind in enumerate(kinds) if kind in PLAIN]
    values = [position for position, kind in enumerate(kinds) if kind not in PLAIN]
    return getter_of(tensors), getter_of(values)


def by_sample(call: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """A vmap rule that calls ``call`` once per sample, so that no sample affects another.

    If there are no samples, a sample of zeros tells the shape of the result, and is left out of it.
    """

    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        samples, given = info.batch_size, list(zip(arguments, in_dims, strict=True))
        if not samples:
            # The sum of no samples is zeros, with a gradient if the samples have one.
            given = [(a if dim is None else a.sum(dim, True, dtype=a.dtype), dim) for a, dim in given]
        found = [
            call(*(a if dim is None else a.select(dim, i) for a, dim in given))
            for i in range(max(samples, 1))
        ]
        if isinstance(found[0], tuple):
            stacked = tuple(torch.stack(results)[:samples] for results in zip(*found, strict=True))
            return stacked, (0,) * len(stacked)
        return torch.stack(found)[:samples], 0

    return rule


def named_dtype(name: str, dtype: Any) -> str:
    """The name of a dtype, as an operator takes it."""
    require_dtype(name, dtype)
    return dtype_name(dtype)


def cached_plan(make: Callable[..., P]) -> Callable[..., P]:
    """Keep the plans that ``make`` returns for its arguments, one for each number of threads of torch.

    The workspace of a plan may have a part for each thread.
    """

    @lru_cache(maxsize=_MOST_PLANS)
    def kept(threads: int, *arguments: Any, **fields: Any) -> P:
        return make(*arguments, **fields)

    @wraps(make)
    def plan(*arguments: Any, **fields: Any) -> P:
        return kept(torch.get_num_threads(), *arguments, **fields)

    return plan


def select_plan(plan: type[P], device: torch.device, **fields: Any) -> P:
    """The plan for the descriptor with these fields. It compiles at the first run."""
    return plan.select(Stream.current(device), plan.Descriptor(**fields), _ON_FIRST_RUN)
