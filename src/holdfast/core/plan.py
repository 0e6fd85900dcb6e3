"""The plan protocol: select, ask, run.

A plan is one problem (a descriptor) on one device with one kernel picked for it. ``run`` accepts tensors of
any strides. What it works out about them (are they right? which loops? which compiled variant?) it remembers
by their dtypes, shapes and strides, so that a repeated call costs a look-up and a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import torch

from holdfast.core import deferred, importing, registry
from holdfast.core.checks import refused_kind, refused_memory, short_memory, shown
from holdfast.core.contract import Direction, KernelSku, PlanPreference, PrecisionGuarantee, Verdict
from holdfast.core.descriptor import Descriptor
from holdfast.core.errors import InvalidArgs, InvalidDescriptor, Unsupported
from holdfast.core.latest import Latest, Places, host_key, picked, rooms_of
from holdfast.core.pieces import Pieces
from holdfast.core.stream import NO_WORKSPACE, Stream, Workspace
from holdfast.core.strided import overlaps_itself, span

#: Places that no operands are at.
NOWHERE: Places = ((), ())

#: A tensor, or a value that the host holds (a scale as a float, a zero point as an int or None).
Operand = torch.Tensor | float | int | None

_increment_version = torch._C._increment_version
_NO_STREAM = object()

#: What a prepared launch depends on, and the address of each operand (0 for a value of the host).
Signature = tuple[tuple[Any, ...], tuple[int, ...]]


class Args:
    """The tensors of one run. Each subclass is a dataclass and says what its operands are."""

    __slots__ = ()

    def operands(self) -> tuple[Operand, ...]:
        """What the kernel reads and writes, the outputs first."""
        raise NotImplementedError

    def options(self) -> tuple[bool, ...]:
        """What a launch depends on besides its operands: truths, such as ``accumulate``."""
        return ()

    def signature(self) -> Signature:
        """What a launch depends on, and the addresses of its operands."""
        operands = self.operands()
        addresses = _addresses(operands)
        options = tuple((type(option), option) for option in self.options())
        key = (_misalignment(addresses), options, *(_described(operand) for operand in operands))
        return key, tuple(addresses)


D = TypeVar("D", bound=Descriptor)
A = TypeVar("A", bound=Args)
A_contra = TypeVar("A_contra", bound=Args, contravariant=True)

#: Runs one prepared variant: the stream, the workspace, the args, and each operand's address.
Launch = Callable[[Stream, Workspace, A, Sequence[int]], None]


class Kernel(Protocol[A_contra]):
    """One backend's implementation of a plan, made from a descriptor and a device."""

    workspace_size: int
    #: How runs cut the workspace: one way, or several after another. No run writes beside the pieces.
    cuts: tuple[Pieces, ...]

    def compile(self) -> None:
        """Compile the variant that contiguous tensors take."""

    def prepare(self, args: A_contra) -> Launch[Any]:
        """Settle everything that follows from the dtypes, shapes and strides of valid ``args``."""


class DescribedKernel(Generic[D]):
    """What kernels have on any backend: a descriptor, a device, and no workspace unless they say so."""

    workspace_size = 0
    cuts: tuple[Pieces, ...] = ()

    def __init__(self, desc: D, device: torch.device) -> None:
        self.desc = desc
        self.device = device

    def cut_workspace(self, *cuts: Pieces) -> None:
        """Ask for a workspace that is cut in these ways."""
        self.cuts = cuts
        self.workspace_size = max(pieces.size for pieces in cuts)

    def compile(self) -> None:
        """Nothing, where there is no compiler."""


def refused_place(name: str, tensor: torch.Tensor, device: torch.device) -> str:
    """Why a kernel on ``device`` cannot read or write the memory of ``tensor``, or nothing."""
    reason = refused_kind(name, tensor)
    if reason:
        return reason
    if tensor.is_neg():
        return f"{name} is a negated view, whose memory holds the opposite; call resolve_neg() first."
    if tensor.device != device:
        return f"{name} is on {tensor.device} and the plan runs on {device}; move it there."
    return refused_memory(name, tensor)


def refused_tensor(name: str, tensor: Any, expected: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    """Why ``tensor`` is not what the descriptor asks for; if nothing is expected, there must be none."""
    if expected is None:
        return "" if tensor is None else f"{name} is given, and the descriptor says that there is none."
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is a {type(tensor).__name__}; it must be a torch tensor."
    shape, dtype = expected
    if tensor.dtype != dtype:
        return f"{name} has dtype {tensor.dtype}; the descriptor asks for {dtype}."
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}; the descriptor asks for {shape}."
    return ""


@dataclass(frozen=True)
class Candidate:
    """A backend as ``select`` saw it: usable, or not for ``reason``."""

    backend: str
    reason: str = ""


@dataclass
class _Extents:
    """The bytes that each operand reaches over; for each tensor its position, these bytes, its itemsize."""

    of_operands: tuple[int, ...]
    of_tensors: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, operands: Sequence[Operand]) -> Self:
        tensors = [(i, operand) for i, operand in enumerate(operands) if isinstance(operand, torch.Tensor)]
        sizes = {i: tensor.element_size() for i, tensor in tensors}
        reached = {i: span(tensor.shape, tensor.stride()) * sizes[i] for i, tensor in tensors}
        return cls(
            tuple(reached.get(i, 0) for i in range(len(operands))),
            tuple((i, reached[i], sizes[i]) for i, _ in tensors),
        )


@dataclass
class _Admitted(Generic[A]):
    launch: Launch[A] | None
    extents: _Extents
    misalignment: tuple[int, ...]
    #: Places that were found to fit: all memory is there, and no output is in that of another operand.
    fit: Places
    #: Where the workspace was then; 0 for none.
    scratch: int
    #: Takes the outputs that there are from the operands.
    written: Callable[[Sequence[Any]], Sequence[Any]]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _addresses(operands: Sequence[Operand]) -> list[int]:
    return [_address(operand) if isinstance(operand, torch.Tensor) else 0 for operand in operands]


def _address(tensor: torch.Tensor) -> int:
    if type(tensor) not in _PLAIN and refused_memory("", tensor):
        raise TypeError  # a tensor in name only, whose address would be a lie
    return tensor.data_ptr()


def _rooms(operands: Sequence[Operand]) -> list[int]:
    return rooms_of(operand for operand in operands if isinstance(operand, torch.Tensor))


def _misalignment(addresses: Sequence[int]) -> tuple[int, ...]:
    """How far each address is from a multiple of 16, nothing if all are one: kernels make use of that."""
    if not reduce(or_, addresses, 0) & 15:
        return ()
    return tuple(address & 15 for address in addresses)


def _described(operand: Operand) -> Any:
    """What a launch depends on in an operand."""
    if isinstance(operand, torch.Tensor):
        kind = type(operand), operand.is_neg(), operand._is_zerotensor()
        return operand.dtype, operand.shape, operand.stride(), operand.device, kind
    return type(operand), host_key(operand)


class Plan(Generic[D, A]):
    """One problem on one device, with a kernel picked for it."""

    op: ClassVar[str]
    direction: ClassVar[Direction]
    outputs: ClassVar[tuple[str, ...]]
    Descriptor: ClassVar[type[Descriptor]]
    Args: ClassVar[type[Args]]
    #: Which class implements the plan on each backend, as "module:class"; imported when picked.
    kernels: ClassVar[Mapping[str, str]]
    #: The module that lists the named inputs of this plan.
    cases: ClassVar[str]

    #: How many combinations of strides and dtypes a plan remembers before it starts anew.
    _remembered: ClassVar[int] = 256

    def __init_subclass__(cls) -> None:
        if "Descriptor" in cls.__dict__:
            registry.register_plan(cls)

    def __init__(self, descriptor: D, device: torch.device, backend: str, kernel: Kernel[A]) -> None:
        self.descriptor = descriptor
        self.device = device
        self.backend = backend
        self.kernel = kernel
        self._admitted: dict[tuple[Any, ...], _Admitted[A]] = {}
        self._latest: Latest[_Admitted[A]] | None = None
        self._stream: object = _NO_STREAM  # the one that the last run was on

    @classmethod
    def select(cls, stream: Stream, desc: D, pref: PlanPreference | None = None) -> Self:
        """Validate ``desc``, pick a kernel for it on the stream's device, and compile it."""
        pref = pref or PlanPreference()
        if not isinstance(stream, Stream) or not isinstance(pref, PlanPreference):
            raise InvalidArgs(
                f"select was given a {type(stream).__name__} and a {type(pref).__name__}; it takes a Stream, "
                "such as Stream.current(), and a PlanPreference."
            )
        if type(desc) is not cls.Descriptor:
            raise InvalidDescriptor(
                f"{cls.__name__} was given a {type(desc).__name__}; it takes a {cls.Descriptor.__name__}."
            )
        desc.validate()
        candidates = cls.consider(stream, desc, pref)
        for candidate in candidates:
            if not candidate.reason:
                kernel = cls._kernel(candidate.backend, desc, stream.device)
                if pref.precompile and not desc.empty:
                    kernel.compile()
                return cls(desc, stream.device, candidate.backend, kernel)
        reasons = "; ".join(f"{candidate.backend}: {candidate.reason}" for candidate in candidates)
        raise Unsupported(f"{cls.__name__} has no kernel for this on {stream.device}. {reasons}.")

    @classmethod
    def consider(cls, stream: Stream, desc: D, pref: PlanPreference | None = None) -> list[Candidate]:
        """Every backend with the reason why it would not be picked; the first without one is."""
        pref = pref or PlanPreference()
        known = registry.backends()
        candidates = [
            Candidate(name, cls._why_not(backend, stream, desc, pref)) for name, backend in known.items()
        ]
        if pref.backend is not None and pref.backend not in known:
            reason = f"no such backend; the preference may name {', '.join(known)} or None"
            candidates.append(Candidate(str(pref.backend), reason))
        return candidates

    @classmethod
    def _why_not(cls, backend: registry.Backend, stream: Stream, desc: D, pref: PlanPreference) -> str:
        if pref.backend is not None and pref.backend != backend.name:
            return f"the preference asks for {pref.backend}"
        if backend.name not in cls.kernels:
            return "has no kernel for this plan"
        reason = backend.why_not(stream.device)
        if reason is None and pref.max_workspace_bytes is not None:
            needed = cls._kernel(backend.name, desc, stream.device).workspace_size
            if needed > pref.max_workspace_bytes:
                return f"needs {needed} bytes of workspace and {pref.max_workspace_bytes} are allowed"
        return reason or ""

    @classmethod
    def _kernel(cls, backend: str, desc: D, device: torch.device) -> Kernel[A]:
        return cast(Kernel[A], importing.load(cls.kernels[backend])(desc, device))

    def sku(self) -> KernelSku:
        """Which kernel was picked."""
        raise NotImplementedError

    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the kernel promises."""
        raise NotImplementedError

    def bytes_moved(self) -> int:
        """The fewest bytes that a run must read and write: the floor of its time."""
        raise NotImplementedError

    def workspace_size(self) -> int:
        """The bytes of workspace that ``run`` needs."""
        return self.kernel.workspace_size

    def can_implement(self, args: A) -> Verdict:
        """Whether ``run`` would take these args; if not, why."""
        return Verdict(self._refusal(args))

    def run(self, stream: Stream, workspace: Workspace | torch.Tensor | None, args: A) -> None:
        """Launch on ``stream``. Raises before anything is written if the args do not fit."""
        deferred.raise_reported()
        if stream is not self._stream:
            self._stream = self._checked_stream(stream)
        if type(args) is not self.Args:
            raise InvalidArgs(self._refusal(args))
        if not isinstance(workspace, Workspace):
            workspace = NO_WORKSPACE if workspace is None else Workspace.of(workspace)
        needed = self.kernel.workspace_size
        scratch = workspace.require(needed, self.device) if needed else 0
        operands = args.operands()
        admitted, places = self._recall(args, operands)
        if admitted is None:
            admitted = self._admit(args, scratch)
        else:
            reason = self._refused_values(args)
            if not reason and (places is not admitted.fit or scratch != admitted.scratch):
                reason = self._refused_places(args, operands, places, admitted.extents, scratch, admitted.fit)
                admitted.fit, admitted.scratch = places, scratch
            if reason:
                admitted.fit = NOWHERE
                raise InvalidArgs(reason)
        if admitted.launch is not None:
            admitted.launch(stream, workspace, args, places[0])
            # What autograd saved and a kernel has overwritten must not go into a gradient unnoticed.
            _increment_version(admitted.written(operands))
            if workspace.buffer is not None:
                _increment_version((workspace.buffer,))

    def _checked_stream(self, stream: Any) -> Stream:
        if not isinstance(stream, Stream):
            raise InvalidArgs(
                f"the stream is a {type(stream).__name__}; it must be a Stream of this library, such as "
                "Stream.current() or Stream.wrap(...) of one of torch's."
            )
        if stream.device != self.device:
            raise InvalidArgs(
                f"the stream is on {stream.device} and the plan was selected for {self.device}."
            )
        return stream

    def _recall(self, args: A, operands: Sequence[Operand]) -> tuple[_Admitted[A] | None, Places]:
        """What is remembered of args like these, if anything, and where their operands are."""
        latest, options = self._latest, args.options()
        try:
            places = latest and latest.places(operands, options)
            if latest and places:
                admitted = latest.prepared
                if places == admitted.fit:
                    return admitted, admitted.fit
                if admitted.misalignment == _misalignment(places[0]):
                    return admitted, places
            key, addresses = args.signature()
            remembered = self._admitted.get(key)
            rooms = _rooms(operands)
        except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without memory of its own
            raise InvalidArgs(self._refusal(args)) from None
        if remembered is not None:
            self._latest = Latest.of(remembered, operands, options)
        return remembered, (list(addresses), rooms)

    def _admit(self, args: A, scratch: int) -> _Admitted[A]:
        reason = self._refusal(args, scratch)
        if reason:
            raise InvalidArgs(reason)
        launch = None if self.descriptor.empty else self.kernel.prepare(args)
        operands = args.operands()
        key, addresses = args.signature()
        outputs = [i for i, _ in enumerate(self.outputs) if operands[i] is not None]
        admitted = _Admitted(
            launch,
            _Extents.of(operands),
            _misalignment(addresses),
            (list(addresses), _rooms(operands)),
            scratch,
            picked(outputs),
        )
        if len(self._admitted) >= self._remembered:
            self._admitted.clear()
        self._admitted[key] = admitted
        return admitted

    def _refusal(self, args: A, scratch: int = 0) -> str:
        """Why these args cannot be run, or nothing. ``scratch`` is the address of the workspace."""
        if type(args) is not self.Args:
            return f"{type(self).__name__} was given {type(args).__name__}; it takes {self.Args.__name__}."
        for option in args.options():
            if not isinstance(option, bool):
                return f"accumulate is {shown(option)}; it must be True or False."
        for name in _names(args):
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
            if out is not None and overlaps_itself(out.shape, out.stride()):
                return (
                    f"{name} has strides {tuple(out.stride())} for shape {tuple(out.shape)}, so that "
                    "elements share memory; outputs must not overlap themselves. Allocate it anew."
                )
        operands = args.operands()
        places = (_addresses(operands), _rooms(operands))
        return self._refused_places(args, operands, places, _Extents.of(operands), scratch)

    def _refused_layout(self, args: A) -> str:
        """Why shapes, dtypes or devices do not fit the descriptor, or nothing."""
        raise NotImplementedError

    def _refused_values(self, args: A) -> str:
        """Why a value that the host holds cannot be used, or nothing. Asked on every run."""
        return ""

    def _refused_places(
        self,
        args: A,
        operands: Sequence[Operand],
        places: Places,
        reached: _Extents,
        scratch: int,
        known: Places = NOWHERE,
    ) -> str:
        """Why memory is missing, or written twice, or nothing. What is where it was ``known`` to be fits."""
        addresses, rooms = places
        before, rooms_before = known
        for nth, (i, extent, itemsize) in enumerate(reached.of_tensors):
            room = rooms[nth]
            if before and addresses[i] == before[i] and room == rooms_before[nth]:
                continue
            tensor: Any = operands[i]
            if extent and (tensor.storage_offset() * itemsize + extent > room or not addresses[i]):
                return short_memory(_name_of(args, tensor), tensor, extent)
        extents = reached.of_operands
        for i, name in enumerate(self.outputs):
            start = addresses[i]
            end = start + extents[i]
            for other in range(i + 1, len(extents)):
                if addresses[other] < end and start < addresses[other] + extents[other]:
                    return (
                        f"{name} shares memory with another argument; an output must have memory of its own. "
                        "Allocate it with torch.empty_like."
                    )
        size = self.kernel.workspace_size if scratch else 0
        for address, extent in zip(addresses, extents, strict=True):
            if address < scratch + size and scratch < address + extent:
                return (
                    "the workspace shares memory with an argument; it must have memory of its own. Allocate "
                    "it with Workspace.allocate."
                )
        return ""


def _names(args: Args) -> Sequence[str]:
    return tuple(type(args).__dataclass_fields__)  # type: ignore[attr-defined]


def _name_of(args: Args, operand: Operand) -> str:
    return next(name for name in _names(args) if getattr(args, name) is operand)


#: Any plan class.
AnyPlan = type[Plan[Any, Any]]
