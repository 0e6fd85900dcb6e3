"""Tests of private interfaces of libraries: each is in ``private``, exists, and has a fallback."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import fresh
import holdfast as hf
from holdfast.backends import private as compilers
from holdfast.backends.private import numba
from holdfast.core import private
from holdfast.install import private as installing

PACKAGE = Path(hf.__file__).parent
BACKENDS = PACKAGE / "backends" / "private"
INSTALL = PACKAGE / "install" / "private.py"
MODULES = {PACKAGE / "core" / "private.py", BACKENDS / "__init__.py", BACKENDS / "numba.py", INSTALL}
LIBRARIES = {"torch", "triton", "numba", "llvmlite"}
#: Public names that start with an underscore.
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_getframe", "_exit"}
#: Private attributes that a subclass of torch.nn.Module may use.
OF_MODULES = {"self._parameters", "self._buffers"}


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Every name that the package defines or assigns, including attributes."""
    found = set[str]()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def private_uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private modules, names and attributes of libraries that a module uses."""
    known = own | PUBLIC
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (prefix + alias.name for alias in node.names):
                library, *parts = name.split(".")
                hidden = library in LIBRARIES and any(part.startswith("_") for part in parts)
                if hidden or library == "ctypes" or name.startswith(("triton.runtime", "numba.core")):
                    yield name
        elif isinstance(node, ast.Attribute):
            hidden = node.attr.startswith("_") and not node.attr.startswith("__")
            text = ast.unparse(node)
            of_torch = text.startswith("torch.") and not text.startswith("torch.ops.aten.")
            other = not text.startswith("torch.") and node.attr not in known and text not in OF_MODULES
            if text.startswith(("triton.runtime", "numba.core")) or (hidden and (of_torch or other)):
                yield text


def test_private_interfaces_are_used_in_a_few_modules_only() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = own_names({path: tree for path, tree in trees.items() if path not in MODULES})
    found = {path: sorted(private_uses(tree, own)) for path, tree in trees.items()}
    assert {str(path.relative_to(PACKAGE)): uses for path, uses in found.items() if uses} == {
        str(path.relative_to(PACKAGE)): found[path] for path in MODULES
    }
    assert all(len(found[path]) > 2 for path in MODULES)


@pytest.mark.parametrize(
    "source",
    [
        "import ctypes",
        "from torch._C import _get_tracing_state",
        "import torch\ntorch._C._increment_version(())",
        "from triton.runtime import driver",
        "import numba.core.caching",
        "def f(t): return t._is_zerotensor()",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
    ],
)
def test_the_search_sees_private_interfaces(source: str) -> None:
    assert list(private_uses(ast.parse(source), own={"_own"}))


def test_every_interface_is_found_here() -> None:
    """If this fails, the installed version of a library makes holdfast use a slower fallback."""
    missing = {name for name, fallback in private.FALLBACKS.items() if getattr(private, name) is fallback}
    missing |= {name for name, found in installing.FALLBACKS.items() if getattr(installing, name) is found}
    assert missing <= {"raw_stream", "current_device"} if not torch.backends.cuda.is_built() else not missing
    assert {"pipeline_class"} <= numba.kernel_options().keys() & numba.part_options().keys()


def test_a_probe_that_fails_leaves_the_fallback() -> None:
    fallbacks: dict[str, Any] = {}

    def gone() -> Any:
        raise AttributeError("renamed")

    @private.instead_of(gone, fallbacks)
    def interface() -> str:
        return "fallback"

    @private.instead_of(lambda: lambda: "private", fallbacks)
    def other() -> str:
        return "fallback"

    assert (interface(), other()) == ("fallback", "private")
    assert [fallback() for fallback in fallbacks.values()] == ["fallback", "fallback"]


def forced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = private if name in private.FALLBACKS else compilers
    monkeypatch.setattr(module, name, module.FALLBACKS[name])


#: Uses operators, plans, gradients, modes and threads, and prints a digest of the results.
PROGRAM = """
import hashlib, torch, holdfast as hf
torch.set_num_threads(2)
draw = torch.Generator().manual_seed(1)
x = torch.randn(1100, 1000, generator=draw)
found = []
def train(scale):
    leaf = x.clone().requires_grad_()
    y = hf.fake_quantize(leaf, scale, 3, dtype=torch.int8, ste=hf.SteKind.TANH)
    y.square().sum().backward()
    found.extend((y.detach(), leaf.grad))
train(0.05)
train(torch.tensor(0.02))
for _ in range(3):
    found.append(hf.quantize(x, 0.05, 3))
observed = hf.choose_scale(x.clone().requires_grad_(), granularity=hf.PerToken())
observed = observed if isinstance(observed, tuple) else (observed,)
found.extend(t for t in observed if t is not None)
assert not any(t.requires_grad for t in found)
leaf = x[:3].clone().requires_grad_()
y = hf.fake_quantize(leaf, 0.5, dtype=torch.int4)
found.extend(torch.autograd.grad(y, leaf, torch.ones(2, 3, 1000), is_grads_batched=True))
digest = hashlib.sha256()
for tensor in found:
    digest.update(tensor.contiguous().numpy().tobytes())
print(digest.hexdigest())
"""

#: Forces fallbacks before anything is registered, by importing the modules before ``import holdfast``.
FORCE = """
import importlib.util, sys
def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for one, fallback in module.FALLBACKS.items():
        setattr(module, one, fallback)
"""


#: The same for two kernels that compile quickly, with enough elements for two threads.
SHORT_PROGRAM = """
import hashlib, torch, holdfast as hf
torch.set_num_threads(2)
x = torch.linspace(-9, 9, 2**21)
y = hf.dequantize(hf.quantize(x, 0.05, 3), 0.05, 3)
print(hashlib.sha256(y.numpy().tobytes()).hexdigest())
"""


def run(program: str, module: str) -> str:
    """The output of a program in a new process, with the fallbacks of a module."""
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    program = FORCE + f"load('holdfast.{module}', {str(path)!r})\n" + program
    return fresh.run(program, check=True).stdout


def run_here(program: str) -> str:
    """The output of a program in this process."""
    threads, output = torch.get_num_threads(), io.StringIO()
    try:
        with redirect_stdout(output):
            exec(program, {})
    finally:
        torch.set_num_threads(threads)
    return output.getvalue()


def test_without_any_private_interface_of_torch_the_results_are_the_same() -> None:
    assert run(PROGRAM, "core.private") == run_here(PROGRAM)


#: Importing an operator registers it through this interface, so only the test above can replace it.
REGISTERED = {"redispatch_below_autograd"}


@pytest.mark.parametrize("name", sorted(private.FALLBACKS.keys() - REGISTERED))
def test_without_one_private_interface_of_torch_the_results_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[torch.Tensor]:
        x = torch.linspace(-4, 4, 60).reshape(5, 12)
        leaf = x.clone().requires_grad_()
        weight = torch.ones(7, 3).requires_grad_()
        hf.fake_quantize(leaf, 0.1, dtype=torch.int4).square().sum().backward()
        hf.embedding(torch.tensor([1, 1, 5]), weight).sum().backward()
        assert leaf.grad is not None and weight.grad is not None
        quantized = [hf.quantize(x + shift, 0.1) for shift in (0, 1, 2)]
        return [leaf.grad, weight.grad, *quantized, *map(torch.Tensor.float, quantized)]

    wanted = results()
    forced(name, monkeypatch)
    assert all(map(torch.equal, results(), wanted))


def test_public_ways_tell_what_private_ones_do() -> None:
    """Fallbacks that return information return the right one, where the public interface has it."""

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    plain, recorded = torch.ones(2), torch.ones(2, requires_grad=True)
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (2,))  # type: ignore[attr-defined]
    sparse = torch.eye(2).to_sparse()
    for ask in (private.has_dispatch, private.FALLBACKS["has_dispatch"]):
        assert ask is not None and [ask(plain), ask(wrapped)] == [False, True]
    for ask in (private.has_storage, private.FALLBACKS["has_storage"]):
        assert ask is not None and [ask(plain), ask(sparse)] == [True, False]
    for ask in (private.any_requires_grad, private.FALLBACKS["any_requires_grad"]):
        assert ask is not None and [ask(plain, None, 1.0), ask(plain, recorded)] == [False, True]
    for ask in (private.in_forward_mode, private.FALLBACKS["in_forward_mode"]):
        assert ask is not None and not ask()
        with forward_ad.dual_level():
            assert ask()
    for count, write in enumerate((private.increment_version, private.FALLBACKS["increment_version"]), 1):
        assert write is not None
        write((plain,))
        assert plain._version == count


class Handle:
    """A compiled Triton kernel that records its launches."""

    def __init__(self, **there: Any) -> None:
        self.launched: list[Any] = []
        vars(self).update(there)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.launched.append((*grid, stream, *arguments))


class Run:
    """Triton's launch entry and the C function that it calls."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = False

    def __init__(self, launched: list[Any]) -> None:
        self.launch = lambda *given: launched.append(("C", *given))
        self.launched = launched

    def __call__(self, *given: Any) -> None:
        self.launched.append(given)


@pytest.mark.parametrize(
    ("version", "there", "wanted"),
    [
        ("3.6.0", ("run", "asm", "function", "packed_metadata"), "C"),
        ("3.6.0", ("run", "function", "packed_metadata"), "entry"),
        ("3.7.1", ("run", "asm", "function", "packed_metadata"), "entry"),
        ("3.7.1", ("run", "function"), "public"),
        ("9.0.0", (), "public"),
    ],
)
def test_a_kernel_is_launched_in_the_best_way_there_is(
    version: str, there: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    launched: list[Any] = []
    parts = {"run": Run(launched), "asm": {"ptx": "griddepcontrol.wait"}, "function": 7, "packed_metadata": 8}
    handle = Handle(**{name: parts[name] for name in there}, launched=launched)
    compilers.load_binary(handle)
    compilers.prefer_shared_memory(handle, 28)
    run, between = compilers.launcher(handle, early=True)
    run(3, 2, 1, 99, *between, 11, 12)
    hooks = (8, None, None, None)
    assert launched == [
        {
            "C": ("C", 3, 2, 1, 99, 7, False, True, None, None, *hooks, 11, 12),
            "entry": (3, 2, 1, 99, 7, *hooks, 11, 12),
            "public": (3, 2, 1, 99, 11, 12),
        }[wanted]
    ]


@pytest.mark.long
def test_without_private_interfaces_of_numba_the_results_are_the_same() -> None:
    """Each process then compiles all kernels."""
    assert run(SHORT_PROGRAM, "backends.private.numba") == run_here(SHORT_PROGRAM)


def test_without_threads_of_torch_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, before = torch.linspace(-9, 9, 2**21), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = hf.quantize(x, 0.05, 3)
        forced("team_of_torch", monkeypatch)
        assert torch.equal(hf.quantize(x, 0.05, 3), wanted)
    finally:
        torch.set_num_threads(before)
