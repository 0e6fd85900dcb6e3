"""Tests of preparing and launching Triton kernels, without a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl

import holdfast as hf
from holdfast.backends import gpu, private, steps
from holdfast.backends.tuning import constants_of
from holdfast.core import repeated
from holdfast.core.declaration import Output, arguments
from holdfast.core.operands import NO_PLACES, Extents
from holdfast.core.plan import Args, DescribedKernel, PreparedLaunch
from holdfast.core.stream import Stream
from holdfast.core.workspace_layout import ALIGNMENT, WorkspaceLayout


class Handle:
    """A compiled kernel whose launcher loads slowly, and counts concurrent loads."""

    loading = most = 0
    counting = threading.Lock()

    @property
    def run(self) -> Any:
        with Handle.counting:
            Handle.loading += 1
            Handle.most = max(Handle.most, Handle.loading)
        time.sleep(0.01)
        with Handle.counting:
            Handle.loading -= 1
        return self


def nothing() -> None:
    """A kernel without parameters."""


class Kernel:
    """A kernel that finishes compiling only when all kernels compile at the same time."""

    fn = staticmethod(nothing)

    def __init__(self, together: threading.Barrier) -> None:
        self.together = together

    def warmup(self, *given: Any, **options: Any) -> Handle:
        self.together.wait(timeout=30)
        return Handle()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare kernels as on a machine with one GPU."""
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    monkeypatch.setattr(steps, "interpreted", lambda: False)
    monkeypatch.setattr(gpu, "_handles", {})
    monkeypatch.setattr(private, "launcher", lambda handle, early: (handle, ()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("compiled")
def test_threads_compile_side_by_side_but_load_one_after_the_other() -> None:
    together = threading.Barrier(4)

    def prepare(kernel: Kernel) -> Any:
        given = gpu.Parameters.of(kernel, {})
        return gpu.prepare(kernel, given, grid=(1, 1), device=torch.device("cuda", 0), num_warps=1)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(prepare, [Kernel(together) for _ in range(4)]))) == 4
    assert Handle.most == 1


class Unloaded:
    """A compiled kernel. Reading ``run`` loads its binary; otherwise its first launch does."""

    function = 7

    def __init__(self) -> None:
        self.done: list[Any] = []

    @property
    def run(self) -> Any:
        self.done.append("loaded")
        return self

    def __call__(self, *given: Any) -> None:
        self.done += given if "loaded" in self.done else ("loaded", *given)


class Driver:
    """The CUDA driver library; records the attributes of functions."""

    def __init__(self, name: str) -> None:
        self.cuFuncSetAttribute = lambda function, *given: SET.append((function.value, *given))


def no_driver(name: str) -> Any:
    raise OSError(f"{name} is not there")


SET: list[tuple[int, int, int]] = []


def loaded_and_launched() -> tuple[list[Any], list[Any], list[Any]]:
    """What a new kernel does when it is prepared and when it is launched, and the attributes it sets."""

    class Compiled:
        fn = staticmethod(nothing)
        handle = Unloaded()

        def warmup(self, *given: Any, **options: Any) -> Any:
            return self.handle

    SET.clear()
    kernel = Compiled()
    launch = gpu.prepare(
        kernel, gpu.Parameters.of(kernel, {}), grid=(3, 2), device=torch.device("cuda", 0), num_warps=1,
        shared_percent=28,
    )  # fmt: skip
    before = list(kernel.handle.done)
    launch.run(*launch.grid, 1, 99, *launch.between, *launch.tail)
    return before, kernel.handle.done, list(SET)


@pytest.mark.usefixtures("compiled")
def test_without_an_early_load_the_first_launch_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    early = loaded_and_launched()
    monkeypatch.setattr(private, "load_binary", private.FALLBACKS["load_binary"])
    late = loaded_and_launched()
    assert (early[0], late[0]) == (["loaded"], [])
    assert early[1] == late[1] == ["loaded", 3, 2, 1, 99]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("library", [no_driver, lambda name: object(), None], ids=["none", "other", "forced"])
def test_without_a_carve_out_a_kernel_is_launched_the_same(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.ctypes, "CDLL", Driver)
    *wanted, attributes = loaded_and_launched()
    assert attributes == [(7, 9, 28)]
    if library is None:
        forced = private.FALLBACKS["prefer_shared_memory"]
        monkeypatch.setattr(private, "prefer_shared_memory", forced)
    else:
        monkeypatch.setattr(private.ctypes, "CDLL", library)
    assert loaded_and_launched() == (*wanted, [])


def scaled(out: Any, x: Any, partial: Any, bits: Any, n: Any, sizes: Any, TILE: tl.constexpr) -> None:
    """A kernel with a parameter of each kind."""


def sloppy(n: Any, out: Any) -> None:
    """A kernel whose pointer comes after an integer."""


class Recorded:
    """A kernel that is not compiled. Its launcher records its arguments."""

    def __init__(self, function: Any) -> None:
        self.fn = function
        self.warmed: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *given: Any, grid: Any, **options: Any) -> Any:
        self.warmed = given, options

        class Loaded:
            run = None

            def __call__(self, *given: Any) -> None:
                launched.append(given)

        launched = self.launched
        return Loaded()


@arguments
class ScaledArgs(Args):
    out: Output
    bias: torch.Tensor | None = None
    x: torch.Tensor
    factor: float = 2.0


ARGS = ScaledArgs(x=torch.zeros(6), out=torch.zeros(6))
STREAM = Stream.current("cpu")


def addresses(args: Args) -> Sequence[int]:
    return [one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in args.operands()]


def added(kernel: Any, *sources: object, **parameters: Any) -> steps.Steps:
    made = steps.Steps(torch.device("cuda", 0), ARGS)
    made.add(kernel, (3, 2), *sources, num_warps=4, **parameters)
    return made


@pytest.mark.usefixtures("compiled")
def test_parameters_are_passed_in_the_order_of_the_signature() -> None:
    kernel, layout = Recorded(scaled), WorkspaceLayout()
    layout.take(5, torch.int8)
    region = layout.take(3, torch.float32)
    launch = added(
        kernel, TILE=64, sizes=(4, 5), n=6, partial=region, x=steps.Part("x", 2, 3), out="bias",
        bits=gpu.EachRun(lambda args: int(args.factor)),
    ).launch  # fmt: skip
    workspace = hf.Workspace.allocate(layout.size, "cpu")
    for factor in (3.0, 4.0):
        args = ScaledArgs(x=torch.zeros(6), out=torch.zeros(6), factor=factor)
        launch(STREAM, workspace, args, addresses(args))
        # An absent operand gets the pointer of the first operand that is present.
        out, x, partial = args.out.data_ptr(), args.x.data_ptr() + 8, region.tensor(workspace).data_ptr()
        assert kernel.launched.pop() == (3, 2, 1, STREAM.handle, out, x, partial, int(factor), 6, (4, 5), 64)
    assert kernel.warmed is not None
    (_, _, _, bits, n, sizes), options = kernel.warmed
    assert (bits > 2**31, n, sizes) == (True, 6, (4, 5))
    assert options["TILE"] == 64 and options["num_warps"] == 4


class Selected(NamedTuple):
    """A plan, as a repeated call uses it."""

    device: torch.device
    kernel: Any
    outputs = ScaledArgs.outputs


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 1)])
def test_a_repeated_call_launches_with_its_own_addresses(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the current stream of its device, and on a new workspace. Its device must be the current one."""
    kernel, layout, streams = Recorded(scaled), WorkspaceLayout(), list[int]()
    if device.type == "cpu":  # there is no memory of the other
        layout.take(5, torch.int8)
    region = layout.take(3, torch.float32) if device.type == "cpu" else None
    monkeypatch.setattr(repeated.private, "raw_stream", lambda index: streams.append(index) or len(streams))
    allocated = list[Any]()

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        allocated.append((shape, dtype))
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(repeated.private, "empty_on", lambda device: empty)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(repeated.private, "current_device", lambda: current[0])
    current = [1]
    launch = added(
        kernel, TILE=64, sizes=(), n=6, partial=region, x="x", out="out",
        bits=gpu.EachRun(lambda args: int(args.factor)),
    ).launch  # fmt: skip
    plan: Any = Selected(device, DescribedKernel(None, device))
    plan.kernel.set_workspace(layout)
    made = [(torch.zeros(6), torch.zeros(6)) for _ in range(3)]
    prepared: Any = PreparedLaunch(launch, Extents.of(ARGS.operands()), (), NO_PLACES, 0, tuple)
    args = ScaledArgs(x=made[0][0], out=made[0][1], factor=3.0)
    work = repeated.Work(plan, args, args.out)
    run = repeated._written_out(made[0][:1], work, prepared, lambda x: True, None, False)
    assert run is not None
    allocated.clear()
    kept = list[torch.Tensor]()
    for nth, (x, _) in enumerate(made, start=1):
        kept.append(run(x))
        *_, stream, out, given, partial, bits, n, sizes, tile = kernel.launched.pop()
        assert (out, given) == (kept[-1].data_ptr(), x.data_ptr())
        assert (bits, n, sizes, tile) == (3, 6, (), 64)
        assert stream == (nth if device.type == "cuda" else 0)
        assert partial == out if region is None else (partial - region.offset) % ALIGNMENT == 0
    assert streams == ([1, 1, 1] if device.type == "cuda" else [])
    scratch = [((layout.size,), torch.uint8)] if region else []
    assert allocated == [((6,), torch.float32), *scratch] * 3
    assert len({tensor.data_ptr() for tensor in kept}) == 3
    assert run(torch.zeros(7)[1:]) is None and not kernel.launched  # its address is not aligned
    current[0] = 0
    assert (run(made[0][0]) is None) == (device.type == "cuda")  # its device is not the current one


@pytest.mark.usefixtures("compiled")
def test_a_wide_parameter_is_compiled_wide_and_passed_as_it_is() -> None:
    kernel = Recorded(scaled)
    launch = added(kernel, out="out", x="x", partial=None, bits=gpu.Wide(0), n=6, sizes=(), TILE=64).launch
    launch(STREAM, hf.Workspace.allocate(0, "cpu"), ARGS, addresses(ARGS))
    assert kernel.launched[0][4:] == (*map(torch.Tensor.data_ptr, (ARGS.out, ARGS.x, ARGS.out)), 0, 6, (), 64)
    assert kernel.warmed is not None and kernel.warmed[0][3] > 2**31


GIVEN: dict[str, Any] = {"out": "out", "x": "x", "partial": None, "bits": 1, "n": 6, "sizes": (6,), "TILE": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n": ...},
            "the launch of scaled lacks n; give each of the kernel's parameters once, by name: out, x",
        ),
        ({"m": 6}, "the launch of scaled names m, which the kernel does not have; give each of"),
        ({"n": ..., "m": 6}, "the launch of scaled lacks n and names m, which the kernel does not have;"),
        ({"x": "y"}, "a launch names the operand 'y'; the args have out, bias, x, factor."),
        (
            {"n": gpu.EachRun(int), "bits": 1},
            "n of scaled comes too late in the kernel's signature; pointers",
        ),
    ],
)
def test_a_wrong_name_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in (GIVEN | changes).items() if value is not ...}
    with pytest.raises(TypeError) as raised:
        added(Recorded(scaled), **given)
    assert message in str(raised.value)


class Sizes(NamedTuple):
    """A source of a launch."""

    n: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Tile:
    tile: int
    n: int = 7


@pytest.mark.usefixtures("compiled")
def test_a_launch_finds_what_it_does_not_give_in_sources_and_operands() -> None:
    kernel = Recorded(scaled)
    # TILE and partial come from mappings, n and sizes from a record, out and x from the args.
    launch = added(
        kernel, Sizes(5, (4, 5)), constants_of(Tile(64)), {"partial": "bias", "n2": 8}, bits=1
    ).launch
    launch(STREAM, hf.Workspace.allocate(0, "cpu"), ARGS, addresses(ARGS))
    out, x = ARGS.out.data_ptr(), ARGS.x.data_ptr()
    assert kernel.launched.pop()[4:] == (out, x, out, 1, 5, (4, 5), 64)
    # What is given goes before what is found.
    launch = added(kernel, Sizes(5, (4, 5)), Tile(64), x="out", partial=None, bits=1, n=6, TILE=32).launch
    launch(STREAM, hf.Workspace.allocate(0, "cpu"), ARGS, addresses(ARGS))
    assert kernel.launched.pop()[4:] == (out, out, out, 1, 6, (4, 5), 32)


def test_a_name_in_two_sources_is_refused() -> None:
    with pytest.raises(TypeError, match="the launch of scaled finds n in 2 of its sources; give n by name"):
        added(Recorded(scaled), Sizes(5, (4, 5)), Tile(64), partial=None, bits=1)


def test_the_methods_of_a_tuple_are_not_parameters() -> None:
    def counted(count: Any) -> None:
        """A kernel with a parameter named like a method of a tuple."""

    with pytest.raises(TypeError, match="the launch of counted lacks count"):
        added(Recorded(counted), Sizes(5, (4, 5)))


def test_args_are_not_a_source() -> None:
    with pytest.raises(TypeError, match="a launch takes the operands of its args by itself"):
        added(Recorded(scaled), ARGS)


def test_a_pointer_after_an_integer_is_refused() -> None:
    with pytest.raises(TypeError, match="out of sloppy comes too late in the kernel's signature"):
        added(Recorded(sloppy), n=6, out="out")


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(TypeError, match="got multiple values for keyword argument 'n'"):
        added(Recorded(scaled), n=6, **GIVEN)


def test_operands_are_known_by_the_names_of_their_fields() -> None:
    assert steps.operand_names(ScaledArgs) == ("out", "bias", "x", "factor")
    for plan in hf.plans.all().values():
        names = steps.operand_names(plan.Args)
        assert len(set(names)) == len(names)
        assert set(names) <= set(plan.Args.__dataclass_fields__)  # type: ignore[attr-defined]
        assert names[: len(plan.outputs)] == plan.outputs
