"""Plans: a problem on one device, with a kernel selected for it.

``run`` accepts tensors of any strides. It checks them, chooses the loops and the compiled variant, and caches
the result by dtypes, shapes and strides. A repeated call costs one look-up and the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import torch

from holdfast.core import device_errors, importing, private, registry
from holdfast.core.checks import kind_of, shown
from holdfast.core.contract import (
    NUMERICS_VERSION,
    Direction,
    KernelSku,
    PlanPreference,
    PrecisionGuarantee,
    Verdict,
)
from holdfast.core.declaration import Implementation, bound_types, name_of_op, on_backends, resolved
from holdfast.core.descriptor import Descriptor, encoded
from holdfast.core.dtypes import dtype_name
from holdfast.core.errors import InvalidArgs, InvalidDescriptor, Unsupported
from holdfast.core.last_call import LastCall, Places, getter_of
from holdfast.core.operands import (
    NO_PLACES,
    Extents,
    Operand,
    addresses_of,
    launch_key,
    misalignment_of,
    places_of,
    refused_output,
    refused_place,
    refused_places,
    refused_tensor,
)
from holdfast.core.stream import NO_WORKSPACE, Stream, Workspace
from holdfast.core.workspace_layout import WorkspaceLayout

_NO_STREAM = object()

#: The key of a prepared launch, and the address of each operand (0 for a host value).
Signature = tuple[tuple[Any, ...], tuple[int, ...]]


class Args:
    """The operands and options of one run. ``core.declaration`` describes how a subclass declares them."""

    __slots__ = ()

    #: The names of the operands that are written, of the operands that are read, and of the options.
    outputs: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]
    flags: ClassVar[tuple[str, ...]]

    @classmethod
    def described(cls, desc: Descriptor) -> Self:
        """Args of contiguous meta tensors, to compile a kernel without data."""
        expected = {name: desc.expected(name) for name in (*cls.outputs, *cls.inputs)}
        made: dict[str, Any] = {
            name: found and torch.empty(found[0], dtype=found[1], device="meta")
            for name, found in expected.items()
        }
        return cls(**made)

    def operands(self) -> tuple[Operand, ...]:
        """The operands, outputs first."""
        raise NotImplementedError

    def options(self) -> tuple[bool, ...]:
        """The options, such as ``accumulate``."""
        return ()

    def signature(self) -> Signature:
        """The key of the launch, and the addresses of the operands."""
        operands = self.operands()
        addresses = addresses_of(operands)
        options = tuple((type(option), option) for option in self.options())
        key = (misalignment_of(addresses), options, *(launch_key(operand) for operand in operands))
        return key, tuple(addresses)


D = TypeVar("D", bound=Descriptor)
A = TypeVar("A", bound=Args)
A_contra = TypeVar("A_contra", bound=Args, contravariant=True)

#: Launches a prepared variant. Takes the stream, the workspace, the args and the address of each operand. It
#: may have an attribute ``bound``: a function of args, whose result launches with the host values of these
#: args and takes the handle of a stream, the aligned address of a workspace, and each operand's address. The
#: plan's device must be the current one. The address of the workspace is 0 if the launch has the attribute
#: ``bound_uses_workspace`` and it is False. The outputs of a bound launch are new. It may return False: then
#: the values of the operands need the launch itself, and the outputs may hold anything.
Launch = Callable[[Stream, Workspace, A, Sequence[int]], None]


class Kernel(Protocol[A_contra]):
    """One backend's implementation of a plan, made from a descriptor and a device."""

    workspace_size: int
    #: The layouts that runs use, one after another. No run writes outside their regions.
    workspace_layouts: tuple[WorkspaceLayout, ...]

    def compile(self) -> None:
        """Compile the variant for contiguous tensors."""

    def prepare(self, args: A_contra) -> Launch[Any]:
        """Prepare the launch for the dtypes, shapes and strides of ``args``, which were checked."""


class DescribedKernel(Generic[D]):
    """Base class of kernels on any backend. By default a kernel has no workspace."""

    workspace_size = 0
    workspace_layouts: tuple[WorkspaceLayout, ...] = ()
    #: The torch operator that this kernel sorts with; it allocates its own scratch memory. "" for none.
    sorted_by = ""
    #: The variant that the kernel uses for this problem, if it has several; ``explain`` prints it.
    variant = ""
    #: The number of torch's threads that the kernel was made for; None if it serves any.
    made_for_threads: int | None = None

    def __init__(self, desc: D, device: torch.device) -> None:
        self.desc = desc
        self.device = device

    def set_workspace(self, *layouts: WorkspaceLayout) -> None:
        """Ask for a workspace large enough for each of these layouts."""
        self.workspace_layouts = layouts
        self.workspace_size = max(layout.size for layout in layouts)

    def compile(self) -> None:
        """Does nothing: for backends without a compiler."""


@dataclass(frozen=True)
class Candidate:
    """An implementation that ``select`` considered. ``reason`` says why it is not usable; "" if it is."""

    backend: str
    reason: str = ""
    implementation: Implementation | None = None

    @property
    def label(self) -> str:
        """The backend, and the name of the implementation if it has one."""
        impl = self.implementation
        return f"{self.backend} {impl.name}" if impl and impl.name else self.backend


@dataclass
class PreparedLaunch(Generic[A]):
    """The launch for args of one kind. ``launch`` is None if there is nothing to compute."""

    launch: Launch[A] | None
    extents: Extents
    misalignment: tuple[int, ...]
    #: Places that passed the check of sizes and overlaps.
    checked: Places
    #: The address of the workspace in that check; 0 for none.
    scratch: int
    #: Returns the outputs that are not None, given the operands.
    written: Callable[[Sequence[Any]], Sequence[Any]]


class Plan(Generic[D, A]):
    """One problem on one device, with a kernel selected for it.

    The class name of a subclass gives its op (see ``core.declaration``). A subclass must define ``ulp``; all
    else has a default. A subclass with ``abstract=True`` is not registered.
    """

    op: ClassVar[str]
    direction: ClassVar[Direction]
    Descriptor: ClassVar[type[Descriptor]]
    Args: ClassVar[type[Args]]
    #: The names of all operands, outputs first; of the outputs; of the inputs.
    operands: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]
    #: The implementations; those of one backend are in order of preference.
    kernels: ClassVar[Sequence[Implementation]]
    #: The module that lists the cases of this plan.
    cases: ClassVar[str]

    #: Maximum number of cached launches. The cache is cleared when it is full.
    _max_launches: ClassVar[int] = 256
    #: Version of the plan's arithmetic.
    numerics_version: ClassVar[int] = NUMERICS_VERSION

    def __init_subclass__(cls, abstract: bool = False) -> None:
        own, bound = vars(cls), bound_types(cls)
        if bound is not None:
            op, direction, kernel = name_of_op(cls.__name__)
            declared = {"op": op, "direction": direction, "Descriptor": bound[0], "Args": bound[1]}
            declared |= {
                "cases": f"{cls.__module__.rpartition('.')[0]}.cases",
                "kernels": on_backends(kernel),
            }
            for name, value in declared.items():
                if name not in own:
                    setattr(cls, name, value)
            cls.outputs, cls.inputs = cls.Args.outputs, cls.Args.inputs
            cls.operands = (*cls.outputs, *cls.inputs)
            cls.kernels = resolved(cls.__module__, cls.kernels)
        if "Descriptor" in own and not abstract:
            registry.register_plan(cls)

    def __init__(
        self, descriptor: D, device: torch.device, backend: str, kernel: Kernel[A], implementation: str = ""
    ) -> None:
        self.descriptor = descriptor
        self.device = device
        self.backend = backend
        self.kernel = kernel
        self.implementation = implementation
        self._launches: dict[tuple[Any, ...], PreparedLaunch[A]] = {}
        self._last_call: LastCall[PreparedLaunch[A]] | None = None
        self._stream: object = _NO_STREAM  # the stream of the last run

    def __repr__(self) -> str:
        desc = self.descriptor
        said = (f"{f.name}={encoded(getattr(desc, f.name))}" for f in fields(desc) if _in_repr(desc, f))
        return f"<{type(self).__name__} {', '.join(said)} on {self.device}, {self.backend} backend>"

    @classmethod
    def select(cls, stream: Stream, desc: D, pref: PlanPreference | None = None) -> Self:
        """Validate ``desc``, pick a kernel for it on the stream's device, and compile it."""
        pref = pref or PlanPreference()
        if not isinstance(stream, Stream) or not isinstance(pref, PlanPreference):
            raise InvalidArgs(
                f"select was given {kind_of(stream)} and {kind_of(pref)}; it takes a Stream, "
                "such as Stream.current(), and a PlanPreference."
            )
        if type(desc) is not cls.Descriptor:
            raise InvalidDescriptor(
                f"{cls.__name__} was given {kind_of(desc)}; it takes a {cls.Descriptor.__name__}."
            )
        desc.validate()
        candidates = cls.consider(stream, desc, pref)
        for candidate in candidates:
            if candidate.implementation is not None and not candidate.reason:
                kernel = cls._make_kernel(candidate.implementation, desc, stream.device)
                if pref.precompile and not desc.empty:
                    kernel.compile()
                return cls(desc, stream.device, candidate.backend, kernel, candidate.implementation.name)
        reasons = "; ".join(f"{candidate.label}: {candidate.reason}" for candidate in candidates)
        raise Unsupported(f"{cls.__name__} has no kernel for this on {stream.device}. {reasons}.")

    @classmethod
    def consider(cls, stream: Stream, desc: D, pref: PlanPreference | None = None) -> list[Candidate]:
        """All candidates in order of preference. ``select`` takes the first one without a ``reason``."""
        pref = pref or PlanPreference()
        known = registry.backends()
        candidates = []
        for name, backend in known.items():
            implementations = cls.implementations(name)
            if not implementations:
                candidates.append(Candidate(name, "has no kernel for this plan"))
            for impl in implementations:
                candidates.append(Candidate(name, cls._why_not(backend, impl, stream, desc, pref), impl))
        if pref.backend is not None and pref.backend not in known:
            reason = f"no such backend; the preference may name {', '.join(known)} or None"
            candidates.append(Candidate(str(pref.backend), reason))
        return candidates

    @classmethod
    def _why_not(
        cls, backend: registry.Backend, impl: Implementation, stream: Stream, desc: D, pref: PlanPreference
    ) -> str:
        if pref.backend is not None and pref.backend != backend.name:
            return f"the preference asks for {pref.backend}"
        reason = backend.why_not(stream.device)
        if reason is None and impl.why_not is not None:
            reason = impl.why_not(desc, stream.device, pref)
        if not reason and pref.max_workspace_bytes is not None:
            needed = cls._make_kernel(impl, desc, stream.device).workspace_size
            if needed > pref.max_workspace_bytes:
                return f"needs {needed} bytes of workspace and {pref.max_workspace_bytes} are allowed"
        return reason or ""

    @classmethod
    def implementations(cls, backend: str) -> list[Implementation]:
        """The implementations on a backend, in order of preference."""
        return [impl for impl in cls.kernels if impl.backend == backend]

    @classmethod
    def _kernel(cls, backend: str, desc: D, device: torch.device) -> Kernel[A]:
        return cls._make_kernel(cls.implementations(backend)[0], desc, device)

    @classmethod
    def _make_kernel(cls, impl: Implementation, desc: D, device: torch.device) -> Kernel[A]:
        return cast(Kernel[A], importing.load(impl.entry_point)(desc, device))

    def mode(self) -> str:
        """The variant of the op, as the SKU names it."""
        return ""

    def ulp(self) -> dict[str, float]:
        """The error bound of each output, in the units of ``PrecisionGuarantee``."""
        raise NotImplementedError

    def per_term(self) -> dict[str, float]:
        """``PrecisionGuarantee.per_term``; empty if no output has such terms."""
        return {}

    def sku(self) -> KernelSku:
        """Which kernel was selected."""
        desc, kernel = self.descriptor, self.kernel
        named = (self.mode(), self.implementation, getattr(kernel, "sorted_by", ""))
        input_dtype, output_dtype = map(dtype_name, desc.named_dtypes)
        return KernelSku(
            op=self.op, direction=self.direction, mode=", ".join(filter(None, named)),
            input_dtype=input_dtype, output_dtype=output_dtype, backend=self.backend,
            architecture=registry.backends()[self.backend].architecture(self.device),
            index_dtype=dtype_name(getattr(desc, "index_dtype", torch.int64)),
            numerics_version=self.numerics_version,
        )  # fmt: skip

    def precision_guarantee(self) -> PrecisionGuarantee:
        """The guarantees of the selected kernel."""
        compute = self.descriptor.compute.name
        return PrecisionGuarantee(
            compute, compute, numerics_version=self.numerics_version, ulp=self.ulp(), per_term=self.per_term()
        )

    def bytes_moved(self) -> int:
        """The minimum number of bytes that a run reads and writes; bounds its time from below."""
        expected = filter(None, map(self.descriptor.expected, self.operands))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected)

    def workspace_size(self) -> int:
        """The bytes of workspace that ``run`` needs."""
        return self.kernel.workspace_size

    def can_implement(self, args: A) -> Verdict:
        """Whether ``run`` accepts these args, and the reason if it does not."""
        return Verdict(self._refusal(args))

    def run(self, stream: Stream, workspace: Workspace | torch.Tensor | None, args: A) -> None:
        """Launch on ``stream``. If the args are not valid, it raises before anything is written."""
        device_errors.raise_reported()
        if stream is not self._stream:
            self._stream = self._checked_stream(stream)
        if type(args) is not self.Args:
            raise InvalidArgs(self._refusal(args))
        if not isinstance(workspace, Workspace):
            workspace = NO_WORKSPACE if workspace is None else Workspace.of(workspace)
        needed = self.kernel.workspace_size
        scratch = workspace.require(needed, self.device) if needed else 0
        operands = args.operands()
        cached, places = self._look_up(args, operands)
        if cached is None:
            cached = self._prepare(args, scratch)
        else:
            reason = self._refused_values(args)
            if not reason and (places is not cached.checked or scratch != cached.scratch):
                workspace_at = (scratch, needed)
                reason = refused_places(
                    self.operands, len(self.outputs), operands, places, cached.extents, workspace_at,
                    cached.checked,
                )  # fmt: skip
                cached.checked, cached.scratch = places, scratch
            if reason:
                cached.checked = NO_PLACES
                raise InvalidArgs(reason)
        if cached.launch is not None:
            cached.launch(stream, workspace, args, places[0])
            # Autograd then notices if a tensor that it saved for a gradient was overwritten.
            private.increment_version(cached.written(operands))
            if workspace.buffer is not None:
                private.increment_version((workspace.buffer,))

    def prepared(self, args: A) -> PreparedLaunch[A] | None:
        """The launch that ``run`` has prepared for args of this kind, if any."""
        return self._launches.get(args.signature()[0])

    def _checked_stream(self, stream: Any) -> Stream:
        if not isinstance(stream, Stream):
            raise InvalidArgs(
                f"the stream is {kind_of(stream)}; it must be a Stream of this library, such as "
                "Stream.current() or Stream.wrap(...) of one of torch's."
            )
        if stream.device != self.device:
            raise InvalidArgs(
                f"the stream is on {stream.device} and the plan was selected for {self.device}."
            )
        return stream

    def _look_up(self, args: A, operands: Sequence[Operand]) -> tuple[PreparedLaunch[A] | None, Places]:
        """The cached launch for these args, if any, and the places of their operands."""
        last, options = self._last_call, args.options()
        try:
            places = last and last.places(operands, options)
            if last and places:
                cached = last.prepared
                checked = cached.checked  # read once: other threads may run this plan
                if places == checked:
                    return cached, checked
                if cached.misalignment == misalignment_of(places[0]):
                    return cached, places
            found = self._launches.get(args.signature()[0])
            places = places_of(operands)
        except (AttributeError, RuntimeError, TypeError):  # not a tensor, or a tensor without memory
            raise InvalidArgs(self._refusal(args)) from None
        if found is not None:
            self._last_call = LastCall.of(found, operands, options)
        return found, places

    def _prepare(self, args: A, scratch: int) -> PreparedLaunch[A]:
        reason = self._refusal(args, scratch)
        if reason:
            raise InvalidArgs(reason)
        launch = None if self.descriptor.empty else self.kernel.prepare(args)
        operands = args.operands()
        key, addresses = args.signature()
        outputs = [i for i, _ in enumerate(self.outputs) if operands[i] is not None]
        cached = PreparedLaunch(
            launch, Extents.of(operands), misalignment_of(addresses), places_of(operands), scratch,
            getter_of(outputs),
        )  # fmt: skip
        if len(self._launches) >= self._max_launches:
            self._launches.clear()
        self._launches[key] = cached
        return cached

    def _refusal(self, args: A, scratch: int = 0) -> str:
        """Why these args are not accepted, or "". ``scratch`` is the address of the workspace."""
        if type(args) is not self.Args:
            return f"{type(self).__name__} was given {type(args).__name__}; it takes {self.Args.__name__}."
        for name, option in zip(self.Args.flags, args.options(), strict=True):
            if not isinstance(option, bool):
                return f"{name} is {shown(option)}; it must be True or False."
        for name in self.operands:
            operand = getattr(args, name)
            if isinstance(operand, torch.Tensor):
                reason = refused_place(name, operand, self.device)
                if reason:
                    return reason
        reason = self._refused_layout(args) or self._refused_values(args)
        if reason:
            return reason
        for name in self.outputs:
            out = getattr(args, name)
            reason = "" if out is None else refused_output(name, out)
            if reason:
                return reason
        operands = args.operands()
        places, reached = places_of(operands), Extents.of(operands)
        workspace = (scratch, self.kernel.workspace_size)
        return refused_places(self.operands, len(self.outputs), operands, places, reached, workspace)

    def _refused_layout(self, args: A) -> str:
        """Why an operand does not match the descriptor, or ""."""
        reasons = (self._refused_operand(name, getattr(args, name)) for name in self.operands)
        return next(filter(None, reasons), "")

    def _refused_operand(self, name: str, operand: Any) -> str:
        """Why the operand ``name`` does not match the descriptor, or ""."""
        return refused_tensor(name, operand, self.descriptor.expected(name))

    def _refused_values(self, args: A) -> str:
        """Why a host value cannot be used, or "". Called on every run."""
        return ""


def _in_repr(desc: Descriptor, f: Field[Any]) -> bool:
    """Whether the repr shows this field: it has no default, or another value than its default."""
    return bool(f.default is MISSING or getattr(desc, f.name) != f.default)


#: Any plan class.
AnyPlan = type[Plan[Any, Any]]
