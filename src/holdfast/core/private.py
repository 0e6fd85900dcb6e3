"""Private interfaces of torch and of the system.

Each function below has a probe, which finds and tries a private interface of torch. If the probe succeeds,
the function's name is bound to the private interface. Otherwise the function itself is used. It is a fallback
through public interfaces with the same results, which is slower or supports fewer of torch's transforms.

``backends.private`` has the private interfaces of the compilers, since core imports no backend.
"""

from __future__ import annotations

import copy
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
    """The result of a probe; None if it raises."""
    try:
        return probe()
    except Exception:  # a private interface that changed may raise anything; then its fallback serves
        return None


def instead_of(probe: Callable[[], Any], fallbacks: dict[str, Any]) -> Callable[[F], F]:
    """Bind the name of the decorated function to the result of ``probe``, if it is not None."""

    def bind(fallback: F) -> F:
        fallbacks[fallback.__name__] = fallback
        return found_by(probe) or fallback

    return bind


def none_if(found: Callable[..., Any], *given: Any) -> Callable[..., Any] | None:
    """``found``, a private function; None if it returns true for ``given``, which it should not."""
    return None if found(*given) else found


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
        except Exception:  # guards do not support every kind of tensor
            return None

    check = guard_of([torch.zeros(2, 3)])
    works = check is not None and check(torch.ones(2, 3)) and not check(torch.ones(3, 2).t())
    return guard_of if works and check and not check(torch.ones(2, 3, dtype=torch.int32)) else None


@instead_of(_probe_guard_of, FALLBACKS)
def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A fast check for equal dtypes, shapes, strides and devices of other tensors. Fallback: None."""
    return None


def _probe_is_zerotensor() -> Any:
    zero, plain = torch._efficientzerotensor(2), torch.zeros(2)
    is_zerotensor = torch.Tensor._is_zerotensor
    return is_zerotensor if is_zerotensor(zero) and not is_zerotensor(plain) else None


@instead_of(_probe_is_zerotensor, FALLBACKS)
def is_zerotensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a zero tensor of torch, without memory. Fallback: no; it is refused later."""
    return False


def _probe_has_dispatch() -> Any:
    python, keys_of = torch._C.DispatchKey.Python, torch._C._dispatch_keys
    return none_if(lambda tensor: bool(keys_of(tensor).has(python)), torch.zeros(1))


@instead_of(_probe_has_dispatch, FALLBACKS)
def has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor has its own dispatch; such a tensor may have no memory."""
    return bool(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


@instead_of(lambda: torch._C._has_storage if torch._C._has_storage(torch.zeros(1)) else None, FALLBACKS)
def has_storage(tensor: torch.Tensor) -> bool:
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
    """The innermost tensor under transforms of ``torch.func``. Fallback: the outer one."""
    return tensor


def _probe_is_wrapped() -> Any:
    found = torch._C._functorch.is_functorch_wrapped_tensor
    return None if found(torch.zeros(1)) else found


@instead_of(_probe_is_wrapped, FALLBACKS)
def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transform of ``torch.func`` made this tensor, possibly one that has ended. Fallback: yes."""
    return True


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
    """Whether a mode, a transform, a trace or a profiler may observe operator calls. Fallback: yes."""
    return True


def _probe_in_forward_mode() -> Any:
    with forward_ad.dual_level():
        return (lambda: forward_ad._current_level >= 0) if forward_ad._current_level >= 0 else None


@instead_of(_probe_in_forward_mode, FALLBACKS)
def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
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
    """Keep forward mode enabled for outer levels. Fallback: does nothing."""
    return nullcontext()


@instead_of(lambda: none_if(torch._C._are_functorch_transforms_active), FALLBACKS)
def transforms_active() -> bool:
    """Whether a transform of ``torch.func`` is active. Fallback: no; then torch refuses the transform."""
    return False


def _probe_single_level() -> Any:
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return enable_single_level_autograd_function


@instead_of(_probe_single_level, FALLBACKS)
def single_level() -> AbstractContextManager[Any]:
    """Record a single level of a transform of ``torch.func``. Fallback: does nothing."""
    return nullcontext()


def _probe_apply_of() -> Any:
    def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
        found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        return found

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy * 2

    x = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(apply_of(Doubled)(x), x)
    return apply_of if found == 2 else None


@instead_of(_probe_apply_of, FALLBACKS)
def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The ``apply`` of a function, without the Python code that handles transforms and dead wrappers."""
    return function.apply


def _probe_untraced() -> Any:
    functions: Any = torch._C._dynamo.eval_frame
    skip = functions._FrameExecStrategy(functions._FrameAction.SKIP, functions._FrameAction.SKIP)

    def untraced(function: Any) -> Callable[..., Any]:
        functions.set_code_exec_strategy(function.__code__, skip)
        found: Callable[..., Any] = function
        return found

    def tried() -> None:
        """Its code is marked."""

    untraced(tried)
    return untraced


@instead_of(_probe_untraced, FALLBACKS)
def untraced(function: Any) -> Callable[..., Any]:
    """``function`` with a mark that torch.compile must not compile it, nor what it calls.

    Without it torch.compile does so where torch calls it and nothing is compiled, as in a backward pass.
    Fallback: no mark.
    """
    found: Callable[..., Any] = function
    return found


def _probe_any_requires_grad() -> Any:
    plain, recorded = torch.zeros(1), torch.zeros(1, requires_grad=True)
    found = torch._C._any_requires_grad
    return found if found(plain, recorded, None) and not found(plain, 1.0) else None


@instead_of(_probe_any_requires_grad, FALLBACKS)
def any_requires_grad(*arguments: Any) -> bool:
    """Whether one of the arguments is a tensor that requires a gradient."""
    return any(isinstance(given, torch.Tensor) and given.requires_grad for given in arguments)


@instead_of(lambda: none_if(torch._C._functorch.is_legacy_batchedtensor, torch.zeros(1)), FALLBACKS)
def is_legacy_batch(tensor: torch.Tensor) -> bool:
    """Whether a gradient is a batch of gradients (``is_grads_batched``). Fallback: yes."""
    return True


def _probe_redispatch_below_autograd() -> Any:
    below, keys = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    with below():
        pass

    def redispatch_below_autograd(operator: Any, keyset: Any, arguments: Sequence[Any]) -> Any:
        with below():
            return operator.redispatch(keyset & keys, *arguments)

    return redispatch_below_autograd


#: Redispatch an operator below autograd. Takes its overload, the dispatch keys and the arguments. If it is
#: None, ``torch.library`` registers gradients, without support for the transforms of ``torch.func``.
redispatch_below_autograd: Callable[[Any, Any, Sequence[Any]], Any] | None
redispatch_below_autograd = found_by(_probe_redispatch_below_autograd)
FALLBACKS["redispatch_below_autograd"] = None


def _probe_sparse_parts() -> Any:
    def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor._indices(), tensor._values()

    # Only looked up: torch 2.11 warns of the first sparse tensor of a process.
    found = hasattr(torch.Tensor, "_indices") and hasattr(torch.Tensor, "_values")
    return sparse_parts if found else None


@instead_of(_probe_sparse_parts, FALLBACKS)
def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a sparse COO tensor. Fallback: with equal indices summed."""
    tensor = tensor.coalesce()
    return tensor.indices(), tensor.values()


@instead_of(lambda: torch._C._cuda_getCurrentRawStream, FALLBACKS)  # missing in builds without CUDA
def raw_stream(index: int) -> int:
    """The handle of torch's current stream on a CUDA device."""
    return int(torch.cuda.current_stream(index).cuda_stream)


@instead_of(lambda: torch._C._cuda_getDevice, FALLBACKS)  # missing in builds without CUDA
def current_device() -> int:
    """The index of the current CUDA device."""
    return torch.cuda.current_device()


def _probe_empty_on() -> Any:
    functions: Any = torch._C._dynamo.guards
    known = {"cpu": functions._empty_strided_cpu, "cuda": functions._empty_strided_cuda}
    made = known["cpu"]((2, 3), (1, 2), torch.bfloat16)
    works = made.shape == (2, 3) and made.stride() == (1, 2) and made.dtype == torch.bfloat16
    return (lambda device: known[device.type]) if works and made.is_cpu else None


@instead_of(_probe_empty_on, FALLBACKS)
def empty_on(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """A function that allocates a tensor of a shape, strides and a dtype on a device.

    The device must be the current one. The shape and the strides are tuples.
    """
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _probe_backward_pass() -> Any:
    return torch._C._current_graph_task_id if torch._C._current_graph_task_id() == -1 else None


@instead_of(_probe_backward_pass, FALLBACKS)
def backward_pass() -> int:
    """The id of this thread's current backward pass; -1 if there is none. Fallback: -1."""
    return -1


def _probe_is_requested() -> Any:
    found, (first, second) = list[bool](), (torch.zeros(1, requires_grad=True) for _ in range(2))

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found.extend(is_requested(node) for node, _ in ctx.next_functions)
            return gradient, gradient

    def is_requested(node: Any) -> bool:
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:  # raised for leaves that torch.autograd.grad asks for
            return True

    with torch.enable_grad():
        torch.autograd.grad(Sum.apply(first, second), first)  # type: ignore[no-untyped-call]
    return is_requested if found == [True, False] else None


@instead_of(_probe_is_requested, FALLBACKS)
def is_requested(node: Any) -> bool:
    """Whether the current backward pass asks for the gradient that flows to ``node``. Fallback: yes."""
    return True


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """The timeout of a process group; 10 minutes if its backend has no such option."""
    try:
        told: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=10)
    return told


FALLBACKS["timeout_of"] = lambda group, device: timedelta(minutes=10)


def copied_recurrent(module: torch.nn.RNNBase, memo: dict[int, Any]) -> torch.nn.RNNBase:
    """A deepcopy without the weights of the last call, which torch cannot copy if they have a gradient.

    The next call of the copy reads its weights, since those that it refers to are gone. Without these
    attributes, all others are copied.
    """
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    copied = memo[id(module)] = module.__new__(type(module))
    count = len(getattr(module, "_flat_weights_names", ()))
    last = {"_flat_weights": [None] * count, "_flat_weight_refs": [_gone] * count}
    kept = {name: value for name, value in module.__dict__.items() if name not in last}
    copied.__dict__ = copy.deepcopy(kept, memo)
    copied.__dict__.update({name: value for name, value in last.items() if name in module.__dict__})
    return copied


def _gone() -> None:
    """A reference to a weight that is no more."""
