"""Private interfaces of torch and of the system, all in one place.

Each function below has a probe, which looks for a private interface of torch and tries it. If that works, the
function's name is bound to the private interface. If not, the function itself is used: a fallback through
public interfaces, which is slower, or which serves fewer of torch's transforms, and gives the same results.

``backends.private`` has the private interfaces of the compilers. There are two modules because core imports
no backend.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

#: The fallback of each interface, by name.
FALLBACKS: dict[str, Callable[..., Any] | None] = {}


def found_by(probe: Callable[[], T]) -> T | None:
    """What a probe finds; None if it fails. A private interface may change in any way."""
    try:
        return probe()
    except Exception:
        return None


def instead_of(probe: Callable[[], Any], fallbacks: dict[str, Any]) -> Callable[[F], F]:
    """Bind the name of the decorated function to what ``probe`` finds, if it finds something that works."""

    def bind(fallback: F) -> F:
        fallbacks[fallback.__name__] = fallback
        return found_by(probe) or fallback

    return bind


def _probe_increment_version() -> Any:
    tensor = torch.zeros(1)
    torch._C._increment_version((tensor,))
    return torch._C._increment_version if tensor._version == 1 else None


@instead_of(_probe_increment_version, FALLBACKS)
def increment_version(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors were written."""
    torch.autograd.graph.increment_version(list(tensors))


def _probe_guard_of() -> Any:
    guards_of: Any = torch._C._dynamo.guards.TensorGuards

    def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
        try:
            guards = guards_of(
                *tensors,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            )
            return guards.check if guards.check(*tensors) else None
        except Exception:  # the tensors may be of a kind that guards do not take
            return None

    check = guard_of([torch.zeros(2, 3)])
    works = check is not None and check(torch.ones(2, 3)) and not check(torch.ones(3, 2).t())
    return guard_of if works and check and not check(torch.ones(2, 3, dtype=torch.int32)) else None


@instead_of(_probe_guard_of, FALLBACKS)
def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A quick check whether tensors have the dtypes, shapes, strides and devices of these; None for none."""
    return None


def _probe_is_zerotensor() -> Any:
    zero, plain = torch._efficientzerotensor(2), torch.zeros(2)
    is_zerotensor = torch.Tensor._is_zerotensor
    return is_zerotensor if is_zerotensor(zero) and not is_zerotensor(plain) else None


@instead_of(_probe_is_zerotensor, FALLBACKS)
def is_zerotensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch's zero tensors without memory. Not known: they are refused later."""
    return False


def _probe_has_dispatch() -> Any:
    python, keys_of = torch._C.DispatchKey.Python, torch._C._dispatch_keys

    def has_dispatch(tensor: torch.Tensor) -> bool:
        return bool(keys_of(tensor).has(python))

    return None if has_dispatch(torch.zeros(1)) else has_dispatch


@instead_of(_probe_has_dispatch, FALLBACKS)
def has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class takes operators itself; then it need not have memory of its own."""
    return bool(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def _probe_has_storage() -> Any:
    return torch._C._has_storage if torch._C._has_storage(torch.zeros(1)) else None


@instead_of(_probe_has_storage, FALLBACKS)
def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _probe_unwrapped() -> Any:
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

    def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        return tensor

    plain = torch.zeros(1)
    return unwrapped if unwrapped(plain) is plain else None


@instead_of(_probe_unwrapped, FALLBACKS)
def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside those that transforms of ``torch.func`` wrap around it. Not known: the outer one."""
    return tensor


def _probe_is_watched() -> Any:
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import peek_interpreter_stack

    def is_watched() -> bool:
        return bool(
            _len_torch_dispatch_stack()
            or _len_torch_function_stack()
            or peek_interpreter_stack() is not None
            or _get_tracing_state() is not None
            or forward_ad._current_level >= 0
            or _profiler_enabled()
        )

    with torch.overrides.BaseTorchFunctionMode():
        sees = is_watched()
    return is_watched if sees else None


@instead_of(_probe_is_watched, FALLBACKS)
def is_watched() -> bool:
    """Whether a mode, a transform, a trace or a profiler may watch the calls of operators. Not known: yes."""
    return True


def _probe_in_forward_mode() -> Any:
    def in_forward_mode() -> bool:
        return forward_ad._current_level >= 0

    with forward_ad.dual_level():
        sees = in_forward_mode()
    return in_forward_mode if sees else None


@instead_of(_probe_in_forward_mode, FALLBACKS)
def in_forward_mode() -> bool:
    """Whether derivatives in forward mode are under way."""
    try:
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:  # there is no level
        return False
    return True


def _probe_recording_forward_mode() -> Any:
    with forward_ad._set_fwd_grad_enabled(True):
        return lambda: forward_ad._set_fwd_grad_enabled(True)


@instead_of(_probe_recording_forward_mode, FALLBACKS)
def recording_forward_mode() -> AbstractContextManager[Any]:
    """Leave the forward mode of outer levels on, where there is a way to."""
    return nullcontext()


def _probe_transforms_active() -> Any:
    active = torch._C._are_functorch_transforms_active
    return None if active() else active


@instead_of(_probe_transforms_active, FALLBACKS)
def transforms_active() -> bool:
    """Whether a transform of ``torch.func`` is under way. Not known: no; torch refuses it then."""
    return False


def _probe_single_level() -> Any:
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return enable_single_level_autograd_function


@instead_of(_probe_single_level, FALLBACKS)
def single_level() -> AbstractContextManager[Any]:
    """Record one level of a transform of ``torch.func`` alone, where there is a way to."""
    return nullcontext()


def _probe_any_requires_grad() -> Any:
    plain, recorded = torch.zeros(1), torch.zeros(1, requires_grad=True)
    found = torch._C._any_requires_grad
    return found if found(plain, recorded, None) and not found(plain, 1.0) else None


@instead_of(_probe_any_requires_grad, FALLBACKS)
def any_requires_grad(*arguments: Any) -> bool:
    """Whether one of the arguments is a tensor that requires a gradient."""
    return any(isinstance(given, torch.Tensor) and given.requires_grad for given in arguments)


def _probe_is_legacy_batch() -> Any:
    found = torch._C._functorch.is_legacy_batchedtensor
    return None if found(torch.zeros(1)) else found


@instead_of(_probe_is_legacy_batch, FALLBACKS)
def is_legacy_batch(tensor: torch.Tensor) -> bool:
    """Whether a gradient is a batch of gradients (``is_grads_batched``). Not known: it may be."""
    return True


def _probe_redispatch_below_autograd() -> Any:
    below, keys = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    with below():
        pass

    def redispatch_below_autograd(operator: Any, keyset: Any, arguments: Sequence[Any]) -> Any:
        with below():
            return operator.redispatch(keyset & keys, *arguments)

    return redispatch_below_autograd


#: Go on with an operator below autograd: its overload, the keys, the arguments. None where there is no such
#: interface; ``torch.library`` then registers gradients, and refuses the transforms of ``torch.func``.
redispatch_below_autograd: Callable[[Any, Any, Sequence[Any]], Any] | None
redispatch_below_autograd = found_by(_probe_redispatch_below_autograd)
FALLBACKS["redispatch_below_autograd"] = None


def _probe_sparse_parts() -> Any:
    def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor._indices(), tensor._values()

    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (2,), check_invariants=True)
    return sparse_parts if sparse_parts(twice)[1].numel() == 2 else None


@instead_of(_probe_sparse_parts, FALLBACKS)
def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a sparse COO tensor; of equal indices the sum."""
    tensor = tensor.coalesce()
    return tensor.indices(), tensor.values()


def _probe_raw_stream() -> Any:
    return torch._C._cuda_getCurrentRawStream  # a build without CUDA has none


@instead_of(_probe_raw_stream, FALLBACKS)
def raw_stream(index: int) -> int:
    """The handle of torch's current stream on a CUDA device."""
    return int(torch.cuda.current_stream(index).cuda_stream)


def _probe_backward_pass() -> Any:
    return torch._C._current_graph_task_id if torch._C._current_graph_task_id() == -1 else None


@instead_of(_probe_backward_pass, FALLBACKS)
def backward_pass() -> int:
    """The number of the backward pass that this thread is in; -1 if it is in none, or it is not known."""
    return -1


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """The timeout of a process group; the usual one where its backend does not tell."""
    try:
        told: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=10)
    return told


FALLBACKS["timeout_of"] = lambda group, device: timedelta(minutes=10)


def _probe_advise_large_pages() -> Any:
    if sys.platform != "linux":
        return None
    madvise, large = ctypes.CDLL(None).madvise, 14
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, size: madvise(address, size, large)


@instead_of(_probe_advise_large_pages, FALLBACKS)
def advise_large_pages(address: int, size: int) -> int:
    """Ask the system for large pages in a range of pages; 0 if it agrees. Not asked: pages stay small."""
    return -1
