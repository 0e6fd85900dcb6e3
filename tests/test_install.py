"""Tests of ``hf.install``: choice, undoing, threads, forks, and torch's other features with it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # registers operators: not while a test compares the tables
import torch.nn.functional as F
from torch._decomp import decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fresh
import holdfast as hf
from holdfast.install import catalogue, frame, private, scatter
from holdfast.install.interpolate import UPSAMPLE
from holdfast.install.operators import Operator
from holdfast.install.serving import PassOn


@pytest.fixture(autouse=True)
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scatter, "SMALL", 0)
    yield
    hf.uninstall()


def dispatch_tables() -> dict[str, str]:
    """Every kernel of every replaceable operator, and every name that the frame touches."""
    names = torch._C._dispatch_get_all_op_names()
    found = {name: torch._C._dispatch_dump(name) + torch._C._dispatch_dump_table(name) for name in names}
    found["branch"] = str(decompositions._upsample_linear_vec)
    packets = [getattr(torch.ops.aten, name) for name in UPSAMPLE]
    kernels = [overload.py_kernels for packet in packets for overload in (packet.vec, packet.default)]
    found["traced"] = str([sorted(map(str, by_key.items())) for by_key in kernels])
    found["cache"] = str(torch._functorch.config.enable_autograd_cache)
    return found


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(dtype).requires_grad_()


def upsampled(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def served(operator: str) -> int:
    return hf.status()[operator].served


def test_uninstall_undoes_everything() -> None:
    before = dispatch_tables()
    for _ in range(2):
        hf.install()
        during = dispatch_tables()
        upsampled(image(1, 2, 4, 4)).sum().backward()
        hf.uninstall()
        assert dispatch_tables() == before != during


def test_only_backend_kernels_of_the_chosen_operators_change() -> None:
    before = dispatch_tables()
    hf.install(include=["upsample_bilinear2d_backward"])
    changed = {name for name, dump in dispatch_tables().items() if dump != before[name]}
    assert changed == {
        "aten::upsample_bilinear2d_backward", "aten::upsample_bilinear2d_backward.grad_input"
    }  # fmt: skip
    dump = torch._C._dispatch_dump("aten::upsample_bilinear2d_backward")
    mine = [line for line in dump.splitlines() if "holdfast" in line]
    assert mine and all(line.startswith(("CPU:", "CUDA:")) for line in mine)


def test_installing_twice_is_installing_once() -> None:
    hf.install()
    before = dispatch_tables()
    upsampled(image(1, 1, 4, 4))
    hf.install()
    assert dispatch_tables() == before
    assert served("upsample_bilinear2d") == 1
    hf.uninstall()
    hf.uninstall()


def test_with_blocks_nest() -> None:
    hf.install(include=["embedding"])
    with hf.installed(include=["interpolate"]):
        assert hf.status()["upsample_nearest2d"].installed
        assert not hf.status()["embedding_dense_backward"].installed
    assert hf.status()["embedding_dense_backward"].installed
    assert not hf.status()["upsample_nearest2d"].installed


def test_with_blocks_of_threads_end_in_any_order() -> None:
    """A block that ends first must not end the other one, nor may that one bring the first one back."""
    for other in (None, ["interpolate"]):
        first, second = hf.installed(), hf.installed(include=other)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert hf.status()["upsample_nearest2d"].installed
        assert hf.status()["embedding_dense_backward"].installed is (other is None)
        second.__exit__(None, None, None)
        assert not any(row.installed for row in hf.status())


def test_blocks_leave_a_bounded_number_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are running stay until they have returned."""
    monkeypatch.setattr(frame, "MOST_REMOVED", 3)
    monkeypatch.setattr(frame, "_removed", [])
    enter, leave = threading.Event(), threading.Event()

    def wait(*given: Any) -> Any:
        enter.set()
        assert leave.wait(60)
        raise PassOn("it has waited")

    operator = catalogue.catalogue()["upsample_bilinear2d"]
    with monkeypatch.context() as patch:
        patch.setitem(catalogue.catalogue(), operator.name, replace(operator, serve=wait))
        with hf.installed(include=[operator.name]):
            thread = threading.Thread(target=upsampled, args=(image(1, 1, 4, 4).detach(),))
            thread.start()
            assert enter.wait(60)
    (running,) = frame._removed
    for _ in range(8):
        with hf.installed(include=["upsample_bilinear2d"]):
            pass
    assert len(frame._removed) == 4 and frame._removed[0] is running
    leave.set()
    thread.join()
    with hf.installed(include=["upsample_bilinear2d"]):
        pass
    assert len(frame._removed) == 3 and running not in frame._removed


def test_install_within_a_block_holds_until_its_end() -> None:
    with hf.installed():
        hf.uninstall()
        assert not any(row.installed for row in hf.status())
        hf.install(include=["embedding"])
        assert {row.family for row in hf.status() if row.installed} == {"embedding"}
    assert not any(row.installed for row in hf.status())


def test_exclude_takes_operators_away() -> None:
    hf.install(exclude=["grid_sample", "aten::upsample_nearest2d"])
    names = {row.operator for row in hf.status() if row.installed}
    assert not names & {"grid_sampler_2d", "upsample_nearest2d", "upsample_nearest2d.out"}
    assert {"upsample_nearest2d_backward", "affine_grid_generator"} <= names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"include": "interpolate"}, "include is 'interpolate'; it must be a list of names"),
        ({"include": ["interpolat"]}, "did you mean 'interpolate'"),
        ({"exclude": ["matmul"]}, "exclude names 'matmul', which is no operator that can be replaced"),
        ({"exclude": [3]}, r"exclude is \[3\]; it must be a list of names"),
        ({"fake_quantize": 1}, "fake_quantize is 1"),
        (
            {"include": ["fake_quantize"]},
            r"names 'fake_quantize', .*only.* Pass fake_quantize=True as well\.",
        ),
    ],
)
def test_refusals_are_sentences_and_change_nothing(given: dict[str, Any], message: str) -> None:
    before = dispatch_tables()
    with pytest.raises(hf.InvalidArgs, match=message):
        hf.install(**given)
    assert dispatch_tables() == before


def test_status_knows_every_name_of_its_table() -> None:
    status = hf.status()
    names = {line.split()[0] for line in str(status).splitlines()[1:]}
    assert {"scatter_reduce", "scatter_reduce_", "index_add"} <= names
    assert all(status[name].operator.partition(".")[0] == name for name in names)
    assert all(status[row.operator] is row for row in status)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("index_put", "'index_put' is a family of operators; ask for one, such as _index_put_impl_; "),
        ("upsample_bilinear", "'upsample_bilinear' is no operator that can be replaced; ask for one, such"),
        ("qr", "'qr' is no operator that can be replaced; print(hf.status()) lists all operators."),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(name: str, said: str) -> None:
    with pytest.raises(KeyError) as error:
        hf.status()[name]
    assert error.value.args[0].startswith(said)


def test_status_counts_calls_and_reasons() -> None:
    hf.install()
    upsampled(image(1, 1, 4, 4)).sum().backward()
    F.interpolate(torch.ones(1, 1, 4, 4, dtype=torch.uint8), scale_factor=2, mode="bilinear")
    row = hf.status()["upsample_bilinear2d"]
    assert (row.served, row.passed_on) == (1, {"the dtype is torch.uint8": 1})
    assert served("upsample_bilinear2d_backward") == 1
    text = str(hf.status())
    assert repr(hf.status()) == text
    assert "the dtype is torch.uint8" in text and "upsample_bilinear2d_backward" in text


def test_a_call_that_torch_refuses_raises_torch_s_error() -> None:
    def refused() -> str:
        with pytest.raises(RuntimeError) as error:
            F.grid_sample(torch.ones(1, 1, 4, 4), torch.ones(1, 2, 2, 3), align_corners=False)
        with pytest.raises(RuntimeError) as other:
            torch.ops.aten.upsample_bilinear2d_backward(torch.ones(1, 1, 8, 7), [8, 8], [1, 1, 4, 4], False)
        return str(error.value) + str(other.value)

    expected = refused()
    with hf.installed():
        assert refused() == expected


def test_results_go_into_out() -> None:
    x, out = image(1, 2, 4, 4).detach(), torch.full((1, 2, 8, 8), torch.nan)
    expected = torch.ops.aten.upsample_bilinear2d(x, [8, 8], False)
    with hf.installed():
        found = torch.ops.aten.upsample_bilinear2d.out(x, [8, 8], False, out=out)
        assert found is out and served("upsample_bilinear2d.out") == 1
        torch.testing.assert_close(out, expected)
        empty = torch.empty(0)
        torch.ops.aten.upsample_bilinear2d.out(x, [8, 8], False, out=empty)
        torch.testing.assert_close(empty, expected)
        assert sum(hf.status()["upsample_bilinear2d.out"].passed_on.values()) == 1


@pytest.mark.parametrize("warn_only", [None, False, True])
def test_it_works_with_every_setting_of_the_flag(warn_only: bool | None) -> None:
    x = image(1, 2, 4, 4)
    try:
        if warn_only is not None:
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
        with hf.installed():
            upsampled(x).sum().backward()
            assert served("upsample_bilinear2d_backward") == 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_branch_of_interpolate_with_the_flag_reaches_the_operator() -> None:
    """On CUDA ``interpolate`` calls this function; it takes tensors of any device."""
    branch: Any = decompositions
    for x, axes, name in ((image(1, 2, 3, 4), 2, "bilinear2d"), (image(1, 2, 3, 4, 5), 3, "trilinear3d")):
        expected = branch._upsample_linear_vec(x, None, False, [2.0] * axes)
        with hf.installed():
            found = branch._upsample_linear_vec(x, None, False, [2.0] * axes)
            assert served(f"upsample_{name}") == 1
        torch.testing.assert_close(found, expected)
    with hf.installed():
        large = torch.empty(1, 1, 1, 2**25, device="meta")
        assert branch._upsample_linear_vec(large, [1, 4], False, None).shape == (1, 1, 1, 4)
        assert not served("upsample_bilinear2d")
    with hf.installed(exclude=["upsample_bilinear2d_backward"]):
        branch._upsample_linear_vec(image(1, 2, 3, 4), None, False, [2.0, 2.0])
        assert not served("upsample_bilinear2d")


def gradients_of(function: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def grid() -> torch.Tensor:
    return (image(2, 5, 5, 2).detach() / 3).requires_grad_()


def sampled(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, where, padding_mode="border", align_corners=True)


def test_second_derivatives_are_those_of_torch() -> None:
    def second(function: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
        gradients = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))

    calls = [
        (upsampled, image(2, 3, 4, 4, dtype=torch.float64)),
        (lambda w: F.embedding(torch.tensor([1, 1, 4]), w), image(5, 3, dtype=torch.float64)),
        (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), image(2, 3, 7, 5, dtype=torch.float64)),
    ]
    for function, leaf in calls:
        expected = second(function, leaf)
        with hf.installed():
            for one, other in zip(second(function, leaf), expected, strict=True):
                torch.testing.assert_close(one, other)
            assert torch.autograd.gradgradcheck(function, leaf)


def test_transforms_of_torch_func() -> None:
    x, where = image(2, 3, 4, 4).detach(), grid().detach()

    def loss(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        found = sampled(x[None], where[None]).square().sum()
        return found + upsampled(x[None]).sin().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))
    expected = per_sample(x, where)
    with hf.installed():
        found = per_sample(x, where)
        assert served("grid_sampler_2d_backward") and served("upsample_bilinear2d_backward")
        batched = torch.func.jacrev(lambda w: F.embedding(torch.tensor([1, 0, 1]), w))(torch.ones(3, 2))
    torch.testing.assert_close(found, expected)
    assert batched.sum() == 6


def test_fake_and_meta_tensors_reach_no_kernel() -> None:
    with hf.installed(), FakeTensorMode() as mode:
        fake = mode.from_tensor(image(1, 2, 4, 4))
        upsampled(fake).sum().backward()
        assert upsampled(torch.empty(1, 2, 4, 4, device="meta")).shape == (1, 2, 8, 8)
        assert fake.grad is not None and fake.grad.shape == fake.shape
        assert not any(row.served or row.passed_on for row in hf.status())


def test_meta_tensors_take_the_branch_of_the_flag() -> None:
    meta = torch.empty(1, 2, 4, 4, device="meta", requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        with hf.installed():
            upsampled(meta).sum().backward()
            assert not served("upsample_bilinear2d")
    finally:
        torch.use_deterministic_algorithms(False)
    assert meta.grad is not None and meta.grad.is_meta


def test_a_traced_gradient_of_embedding_that_is_sparse_or_of_integers_is_torch_s() -> None:
    index = torch.tensor([1, 1, 4])

    def gradient(dout: torch.Tensor, index: torch.Tensor, sparse: bool = False) -> torch.Tensor:
        return torch.ops.aten.embedding_backward(dout, index, 5, -1, False, sparse)

    with hf.installed():
        for dtype in (torch.float32, torch.complex64):
            dout = torch.ones(3, 2, dtype=dtype)
            trace = make_fx(lambda dout, index: gradient(dout, index), tracing_mode="symbolic")
            traced = trace(dout, index)
            ours = "holdfast.embedding_backward" in str(traced.graph)
            assert ours == (dtype == torch.float32)
            if ours:
                torch.testing.assert_close(traced(dout, index), gradient(dout, index))
        with enable_python_dispatcher():
            assert gradient(torch.ones(3, 2), index, sparse=True).is_sparse


def test_autocast_and_inference_mode() -> None:
    x, where = image(2, 3, 4, 4), grid()
    with hf.installed():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = sampled(x.bfloat16(), where)
        assert found.dtype == torch.float32 and served("grid_sampler_2d") == 1
        with torch.inference_mode():
            assert upsampled(image(1, 2, 4, 4).detach()).is_inference()


def test_affine_grid_has_the_dtype_of_torch_under_autocast() -> None:
    theta = image(2, 2, 3).detach()

    def made() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.affine_grid(theta, [2, 1, 4, 5], align_corners=False)

    expected = made()
    with hf.installed():
        assert made().dtype == expected.dtype and torch.equal(made(), expected)
        assert F.affine_grid(theta, [2, 1, 4, 5], align_corners=False).dtype == torch.float32
        assert served("affine_grid_generator") == 1


class Tagged(torch.Tensor):
    """A subclass without its own dispatch."""


def test_subclasses_and_parameters_are_served() -> None:
    x = image(1, 2, 4, 4)
    expected = upsampled(x)
    with hf.installed():
        found = upsampled(x.detach().as_subclass(Tagged))
        assert type(found) is Tagged and torch.equal(found.as_subclass(torch.Tensor), upsampled(x))
        assert upsampled(torch.nn.Parameter(x.detach())).requires_grad
        assert served("upsample_bilinear2d") == 3
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected.detach())


def test_quantized_tensors_keep_their_kernels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 deprecates them
        codes = torch.quantize_per_tensor(image(1, 2, 4, 4).detach(), 0.1, 0, torch.quint8)
    with hf.installed():
        assert F.interpolate(codes, scale_factor=2, mode="nearest").is_quantized


def test_calls_in_threads_while_it_is_installed_and_removed() -> None:
    x, stop, wrong = image(2, 3, 8, 8), threading.Event(), list[Any]()
    expected = gradients_of(upsampled, x)
    with hf.installed():
        exact = gradients_of(upsampled, x)

    def train() -> None:
        leaf = x.detach().clone().requires_grad_()
        while not stop.is_set():
            try:
                for one, other in zip(gradients_of(upsampled, leaf), expected, strict=True):
                    torch.testing.assert_close(one, other)
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = dispatch_tables()
    for _ in range(60):
        hf.install()
        assert all(map(torch.equal, gradients_of(upsampled, x), exact))
        hf.uninstall()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and dispatch_tables() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_uses_and_removes_the_kernels() -> None:
    program = """
import os, torch, holdfast as hf, torch.nn.functional as F
x = torch.ones(2, 2, 32, 32, requires_grad=True)
def gradient():
    (found,) = torch.autograd.grad(F.interpolate(x, scale_factor=2, mode="bicubic").square().sum(), x)
    return found
hf.install()
expected = gradient()
child = os.fork()
if not child:
    same = torch.equal(gradient(), expected)
    hf.uninstall()
    gradient()
    hf.install()
    os._exit(0 if same and torch.equal(gradient(), expected) else 1)
_, code = os.waitpid(child, 0)
assert code == 0, code
assert torch.equal(gradient(), expected)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


class Resized(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return upsampled(torch.full((1, 1, 4, 4), float(index)))[0]


def test_workers_of_a_data_loader() -> None:
    with hf.installed():
        upsampled(image(1, 1, 4, 4))
        loader = torch.utils.data.DataLoader(Resized(), batch_size=2, num_workers=1)
        found = torch.cat(list(loader))
    assert found.shape == (4, 1, 8, 8) and found[3].eq(3).all()


def test_installing_is_silent_and_imports_no_compiler() -> None:
    program = """
import sys, warnings
warnings.simplefilter("error")
import torch, holdfast as hf
hf.install()
assert not {"triton", "numba", "torch._inductor", "torch._dynamo"} & sys.modules.keys()
assert not torch.cuda.is_initialized()
print(len(str(hf.status())) > 1000)
"""
    done = fresh.run(program, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("name", sorted(private.FALLBACKS))
def test_without_one_private_interface_the_results_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = image(1, 2, 4, 4).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    with hf.installed():
        expected = gradients_of(upsampled, x)
    before = dispatch_tables()
    monkeypatch.setattr(private, name, private.FALLBACKS[name])
    with hf.installed():
        found = gradients_of(upsampled, x)
        assert served("upsample_bilinear2d_backward") == 1
    monkeypatch.undo()
    assert dispatch_tables() == before
    assert all(map(torch.equal, found, expected))
    assert [one.stride() for one in found] == [one.stride() for one in expected]


def test_results_have_the_strides_of_torch_s() -> None:
    """Also if one format of memory is both: with one channel, or images of one pixel."""
    rng = random.Random(0)

    def strided() -> torch.Tensor:
        axes = rng.choice((2, 2, 3))
        sizes = [rng.choice((1, 1, 2, 3)) for _ in range(axes + 2)]
        last = {2: torch.channels_last, 3: torch.channels_last_3d}[axes]
        made = torch.rand([size + 1 for size in sizes]).contiguous(memory_format=last)
        made = made[tuple(slice(rng.randrange(2), None) for _ in sizes)]
        kept = {"memory_format": rng.choice((last, torch.preserve_format, torch.contiguous_format))}
        return made.clone(**kept) if rng.random() < 0.7 else made

    def strides(x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        x = x.detach().requires_grad_()
        out = call(x)
        dout = torch.ones_like(out, memory_format=torch.preserve_format)
        return [out.stride(), *(made.stride() for made in torch.autograd.grad(out, x, dout))]

    one = torch.rand(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)[:, :1:2, :1, :1]
    for x in (one, *(strided() for _ in range(100))):
        sizes = tuple(rng.choice((1, 2, 5)) for _ in x.shape[2:])
        mode = rng.choice(("nearest", "bicubic" if x.dim() == 4 else "trilinear", "area"))
        call = partial(F.interpolate, size=sizes, mode=mode)
        expected = strides(x, call)
        with hf.installed():
            assert strides(x, call) == expected, (x.shape, x.stride(), sizes, mode)


def test_every_operator_of_the_catalogue_exists_in_torch() -> None:
    for operator in catalogue.catalogue().values():
        assert isinstance(operator, Operator)
        packet = getattr(torch.ops.aten, operator.base)
        overload = operator.name.partition(".")[2] or "default"
        assert overload in packet.overloads(), operator.name
        keys = ("CompositeImplicitAutograd", "Autograd")
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator.name}", keys[0])


def test_a_zero_point_out_of_range_raises_torch_s_error() -> None:
    scale, zero = torch.ones(4), torch.tensor([0, 1, -9, 2], dtype=torch.int32)
    for call in (
        lambda: torch.fake_quantize_per_tensor_affine(torch.ones(4, 5), 0.1, 8, -8, 7),
        lambda: torch.fake_quantize_per_channel_affine(torch.ones(4, 5), scale, zero, 0, -8, 7),
    ):
        hf.install(fake_quantize=True)
        with pytest.raises(RuntimeError, match="must be between `quant_min` and `quant_max`"):
            call()


@pytest.mark.parametrize(("axis", "dtype"), [(-2, torch.float32), (0, torch.float64)])
def test_a_fake_quantize_that_torch_refuses_raises_its_error(axis: int, dtype: torch.dtype) -> None:
    scale, zero = torch.ones(4, dtype=dtype), torch.zeros(4, dtype=torch.int32)

    def message() -> str:
        with pytest.raises(RuntimeError) as error:
            torch.fake_quantize_per_channel_affine(torch.ones(4, 5, dtype=dtype), scale, zero, axis, -8, 7)
        return str(error.value)

    expected = message()
    with hf.installed(fake_quantize=True):
        assert message() == expected


def test_float_zero_points_keep_their_fractions() -> None:
    """torch does not round the zero points of its scheme per_channel_affine_float_qparams."""
    x, scale, zero = image(4, 33), torch.tensor([0.1, 0.2, 0.5, 0.03]), torch.tensor([0.25, 1.5, -3.4, 0.0])
    expected = torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -8, 7)
    with hf.installed(fake_quantize=True):
        found = torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -8, 7)
        row = hf.status()["fake_quantize_per_channel_affine_cachemask"]
    assert torch.equal(found, expected)
    assert row.passed_on == {"the zero points are floats, which torch does not round": 1}


def test_fake_quantize_is_replaced_on_request_only() -> None:
    x = image(4, 33)

    def both() -> list[torch.Tensor]:
        scale, zero = torch.tensor([0.1, 0.2, 0.5, 0.03]), torch.tensor([0, 1, -3, 0], dtype=torch.int32)
        calls = (
            lambda x: torch.fake_quantize_per_tensor_affine(x, 0.11, 2, -8, 7),
            lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -128, 127),
        )
        return [one for call in calls for one in gradients_of(call, x)]

    expected = both()
    hf.install()
    both()
    assert not any(row.installed for row in hf.status() if row.family == "fake_quantize")
    hf.install(fake_quantize=True)
    found = both()
    rows = [row for row in hf.status() if row.family == "fake_quantize"]
    assert [row.served for row in rows] == [1, 1], rows
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    own = hf.fake_quantize(x, 0.11, 2, q_min=-8, q_max=7)
    assert torch.equal(found[0], own)


def test_a_sharded_tensor() -> None:
    """DTensor picks its rules by torch's operators, and calls them on the shards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.randn(6, 4), mesh, [Shard(1)]).requires_grad_()
        index = distribute_tensor(torch.tensor([1, 1, 5]), mesh, None)
        with hf.installed():
            F.embedding(index, weight).sum().backward()
            assert served("embedding_dense_backward") == 1
        assert weight.grad is not None and weight.grad.full_tensor().sum() == 12
    finally:
        dist.destroy_process_group()


def embedded(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.tensor([1, 1, 4]), weight)


def gathered(x: torch.Tensor) -> torch.Tensor:
    return x.gather(0, torch.tensor([[1, 1, 0], [1, 0, 0]])) + x[torch.tensor([1, 1])].sum()


def mixed(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(5, 3).index_add(0, torch.tensor([1, 1, 1, 0]), x)


def taken(x: torch.Tensor) -> torch.Tensor:
    return x.take(torch.tensor([1, 1, 14]))


def compiled_gradients(function: Any, x: torch.Tensor, **options: Any) -> tuple[list[torch.Tensor], set[str]]:
    """The results of compiled code, and the names of the operators that it calls."""
    torch._dynamo.reset()
    try:
        compiled = torch.compile(function, **options)
        gradients_of(compiled, x)
        with torch.autograd.profiler.profile() as profile:
            found = gradients_of(compiled, x)
    finally:
        torch._dynamo.reset()
    return found, {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    ("function", "shape", "flag", "operators"),
    [
        (upsampled, (1, 2, 6, 6), False, {"holdfast::interpolate_backward"}),
        (upsampled, (1, 2, 6, 6), True, {"holdfast::interpolate_backward"}),
        (embedded, (5, 3), False, {"holdfast::embedding_backward"}),
        (gathered, (5, 3), True, {"aten::scatter_reduce_", "aten::_index_put_impl_"}),
        (mixed, (4, 3), True, {"aten::_index_put_impl_"}),
        (taken, (5, 3), True, {"aten::_index_put_impl_"}),
    ],
    ids=["interpolate", "interpolate with the flag", "embedding", "gather", "index_add", "take"],
)
def test_compiled_code_uses_the_kernels(
    function: Any, shape: tuple[int, ...], flag: bool, operators: set[str]
) -> None:
    x = image(*shape)
    expected = gradients_of(function, x)
    torch.use_deterministic_algorithms(flag)
    try:
        with hf.installed():
            found, called = compiled_gradients(function, x)
            assert operators <= called, called
            for name in ("_index_put_impl_", "scatter_reduce_.two"):
                assert not hf.status()[name].passed_on
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("function", "shape", "operator"),
    [
        (lambda x: F.grid_sample(x, grid(), align_corners=False), (2, 3, 4, 4), "grid_sampler_2d"),
        (lambda x: F.affine_grid(x, [2, 1, 4, 4], False), (2, 2, 3), "affine_grid_generator"),
        (lambda x: F.adaptive_avg_pool2d(x, 3), (2, 3, 7, 7), "_adaptive_avg_pool2d"),
        (lambda x: F.adaptive_avg_pool3d(x, 3), (2, 3, 7, 7, 7), "_adaptive_avg_pool3d"),
        (lambda x: torch.zeros(6).put(torch.tensor([1, 1, 4]), x, accumulate=True), (3,), "put_"),
    ],
)
def test_status_says_whether_compiled_code_calls_an_operator(
    function: Any, shape: tuple[int, ...], operator: str
) -> None:
    with hf.installed():
        _, called = compiled_gradients(function, image(*shape))
        assert f"aten::{operator}" in called or not hf.status()[operator].compiled.startswith("yes")


def test_a_backward_pass_in_a_compiled_step_compiles_no_kernel() -> None:
    """torch runs it eagerly, and compiles the functions of Python that it calls."""
    x, graphs = image(1, 2, 4, 4), []

    def step() -> None:
        upsampled(x).square().sum().backward()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with hf.installed():
        step()
        expected, x.grad = x.grad, None
        torch.compile(step, backend=backend)()
        assert served("upsample_bilinear2d_backward") == 2
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert x.grad is not None and expected is not None and torch.equal(x.grad, expected)


def test_compiled_code_takes_any_size() -> None:
    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.5, mode="bicubic")

    with hf.installed():
        torch._dynamo.reset()
        compiled = torch.compile(resized, dynamic=True, backend="aot_eager")
        for size in (4, 7, 10):
            x = image(1, 2, size, size + 1)
            for one, other in zip(gradients_of(compiled, x), gradients_of(resized, x), strict=True):
                torch.testing.assert_close(one, other)
    torch._dynamo.reset()
    codes = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    with hf.installed():
        found = torch.compile(upsampled, backend="aot_eager")(codes)
    assert found.dtype == torch.uint8
    torch._dynamo.reset()


def test_an_exported_program_calls_the_operators_of_torch() -> None:
    x = image(1, 2, 4, 4).detach()
    with hf.installed():
        program = torch.export.export(torch.nn.Upsample(scale_factor=2, mode="bilinear"), (x,))
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert targets == ["aten.upsample_bilinear2d.vec"]
        before = served("upsample_bilinear2d")
        program.module()(x)
        assert served("upsample_bilinear2d") == before + 1


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("mode", ["nearest-exact", "linear", "bilinear", "bicubic"])
def test_a_decomposed_program_is_that_of_torch(mode: str) -> None:
    antialias = mode in ("bilinear", "bicubic")
    x = image(1, 2, 4) if mode == "linear" else image(1, 2, 4, 4)

    class Resized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            small = F.interpolate(x, scale_factor=0.5, mode=mode, antialias=antialias)
            return F.interpolate(small, scale_factor=4, mode=mode)

    def targets() -> list[str]:
        program = torch.export.export(Resized(), (x.detach(),)).run_decompositions()
        return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]

    expected = targets()
    with hf.installed():
        assert targets() == expected


def test_few_terms_on_the_cpu_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    table, index = torch.zeros(4, 8), torch.tensor([1, 1, 3])
    many = torch.randint(0, 4, (2**11,), generator=torch.Generator().manual_seed(0))
    with hf.installed():
        table.index_add(0, index, torch.ones(3, 8))
        table.bfloat16().index_add(0, index, torch.ones(3, 8).bfloat16())
        table.index_add(0, many, torch.ones(2**11, 8))
        row = hf.status()["index_add"]
        assert (row.served, list(row.passed_on.values())) == (2, [1])


def test_an_index_out_of_range_is_refused() -> None:
    table, terms = torch.zeros(4, 8), torch.ones(2, 8)
    calls = [
        lambda index: table.index_add_(0, index, terms),
        lambda index: table.index_put_((index,), terms, accumulate=True),
        lambda index: table.index_put_((index, index), torch.ones(2), accumulate=True),
        lambda index: table.scatter_add_(0, index[:, None].expand(2, 8), terms),
        lambda index: table.t().index_put_((index,), torch.ones(2, 4), accumulate=True),
    ]
    with hf.installed():
        for call in calls:
            for bad in (8, -9):
                with pytest.raises(IndexError):
                    call(torch.tensor([0, bad]))
    assert not table.any()


#: Calls with empty tensors, which torch accepts: of a table without columns, and of no lines.
EMPTY_SUMS: dict[str, Any] = {
    "scatter_add_": lambda table, index: table.scatter_add_(
        0, index[:, None].expand(-1, table.shape[1]), table.new_zeros(len(index), table.shape[1])
    ),
    "index_add_": lambda table, index: table.index_add_(
        0, index, table.new_zeros(len(index), table.shape[1])
    ),
    "index_add_ along the last dim": lambda table, index: table.mT.index_add_(
        -1, index, table.new_zeros(table.shape[1], len(index))
    ),
    "index_put_": lambda table, index: table.index_put_(
        (index,), table.new_zeros(len(index), table.shape[1]), accumulate=True
    ),
}


@pytest.mark.parametrize("name", EMPTY_SUMS)
@pytest.mark.parametrize("indices", [0, 5])
@pytest.mark.parametrize("columns", [0, 3])
def test_empty_sums_change_nothing(name: str, indices: int, columns: int) -> None:
    table = torch.ones(4, columns, dtype=torch.bfloat16)
    index = torch.arange(indices) % 4
    with hf.installed():
        EMPTY_SUMS[name](table, index)
    assert torch.equal(table, torch.ones(4, columns, dtype=torch.bfloat16))


@pytest.mark.parametrize("rows", [4, 0])
def test_the_gradient_of_an_empty_gather(rows: int) -> None:
    for shape in ((rows, 0), (rows, 0, 1)):
        table = torch.zeros(shape, dtype=torch.float16, requires_grad=True)
        with hf.installed():
            torch.gather(table, 0, torch.zeros((5, *shape[1:]), dtype=torch.int64)).sum().backward()
        assert table.grad is not None and table.grad.shape == shape
        for dim, index in ((0, torch.zeros(rows, dtype=torch.int64)), (1, torch.zeros(0, dtype=torch.int64))):
            with hf.installed():
                (gradient,) = torch.autograd.grad(torch.index_select(table, dim, index).sum(), table)
            assert gradient.shape == shape


def test_in_place_sums_have_the_bits_of_new_ones() -> None:
    draw = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.randn(5, 7, generator=draw).to(dtype)
        index = torch.randint(0, 5, (300,), generator=draw)
        terms = torch.randn(300, 7, generator=draw).to(dtype)
        expected = hf.index_add(table, 0, index, terms)
        with hf.installed():
            for found in (
                table.index_add(0, index, terms),
                table.clone().index_add_(0, index, terms),
                table.clone().index_put_((index,), terms, accumulate=True),
                table.clone().scatter_add_(0, index[:, None].expand(300, 7), terms),
                table.t().contiguous().t().index_put((index - 5,), terms, accumulate=True),
                table.scatter_reduce(0, index[:, None].expand(300, 7), terms, "sum"),
            ):
                assert torch.equal(found, expected)


def test_sums_go_into_out() -> None:
    table, index, terms = torch.ones(4, 3), torch.tensor([1, 1, 3]), torch.ones(3, 3)
    elements = index[:, None].expand(3, 3)
    with hf.installed():
        out = torch.empty(4, 3)
        assert torch.index_add(table, 0, index, terms, out=out) is out
        assert out.sum() == 21 and served("index_add.out") == 1
        torch.scatter_add(table, 0, elements, terms, out=out)
        assert out.sum() == 21 and served("scatter_add.out") == 1
        torch.ops.aten.scatter_reduce.two_out(table, 0, elements, terms, "mean", out=out)
        assert out.sum() == 12 and served("scatter_reduce.two_out") == 1
        shared = table.clone()
        torch.scatter_add(shared, 0, elements, terms, out=shared)
        assert shared.sum() == 21
        assert hf.status()["scatter_add.out"].passed_on == {"the output shares memory with an input": 1}


ONES = torch.ones(2, 5)
#: Sums that torch refuses.
REFUSED: dict[str, Any] = {
    "a mask of another length": lambda x: x.index_put_((torch.tensor([True, False]),), ONES, accumulate=True),
    "a mask of another shape": lambda x: x.index_put_(
        (torch.ones(4, 4).bool(),), torch.ones(1), accumulate=True
    ),
    "bytes of another length": lambda x: x.index_put_(
        (torch.ones(1, dtype=torch.uint8),), ONES[:1], accumulate=True
    ),
    "a mask without dims": lambda x: x.index_put_(
        (torch.tensor(True),), torch.ones(1, 4, 5), accumulate=True
    ),
    "indices that do not broadcast": lambda x: x.index_put_(
        (torch.tensor([1, 2]), torch.tensor([1, 2, 3])), torch.ones(1), accumulate=True
    ),
    "put_ with int32": lambda x: x.put_(torch.tensor([1]).int(), torch.ones(1), accumulate=True),
    "put_ of no terms into an expanded tensor": lambda x: x[:1].expand(3, 5).put_(
        torch.empty(0).long(), torch.empty(0), accumulate=True
    ),
    "put_ of a tensor into its transpose": lambda x: x.t().put_(torch.arange(20), x, accumulate=True),
    "put_ into nothing": lambda x: x[:0].put_(torch.tensor([0]), torch.ones(1), accumulate=True),
    "index_add_ of a scalar": lambda x: x.view(-1).index_add_(0, torch.tensor(1), torch.tensor(1.0)),
    "index_add_ to a scalar": lambda x: x[0, 0].index_add_(0, torch.tensor([0]), torch.ones(1)),
    "scatter_add_ of another rank to a scalar": lambda x: x[0, 0].scatter_add_(
        0, torch.tensor(0), torch.ones(1, 1)
    ),
    "index_add_ of an empty index of bytes": lambda x: x.index_add_(
        0, torch.empty(0, dtype=torch.uint8), ONES[:0]
    ),
    "index_add_ of a tensor to itself": lambda x: x.index_add_(0, torch.arange(4), x),
    "scatter_add_ of a tensor to itself": lambda x: x.scatter_add_(0, torch.zeros(4, 5).long(), x),
    "scatter_reduce_ of a tensor to itself": lambda x: x.scatter_reduce_(
        0, torch.zeros(4, 5).long(), x, "mean"
    ),
    "index_add_ out of range": lambda x: x.index_add_(0, torch.tensor([0, -1]), ONES),
    "scatter_add_ out of range": lambda x: x.scatter_add_(0, torch.tensor([[0], [4]]).expand(2, 5), ONES),
    "scatter_add out of range": lambda x: x.scatter_add(0, torch.tensor([[0, 0], [4, 0]]), ONES),
    "index_put_ out of range": lambda x: x.index_put_((torch.tensor([0, -5]),), ONES, accumulate=True),
    "put_ out of range": lambda x: x.put_(torch.tensor([20]), torch.ones(1), accumulate=True),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_sums_that_torch_refuses_raise_its_error_and_change_nothing(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as error:
        REFUSED[name](torch.zeros(4, 5))
    table = torch.zeros(4, 5)
    with hf.installed(), pytest.raises(error.type) as refusal:
        REFUSED[name](table)
    assert isinstance(refusal.value, hf.InvalidIndex) or str(refusal.value) == str(error.value)
    assert not table.any()


@pytest.mark.parametrize("axes", [2, 3])
def test_the_gradient_of_an_empty_pool_raises_torch_s_error(axes: int) -> None:
    pool = getattr(F, f"adaptive_avg_pool{axes}d")
    image = torch.ones((2, 3, *[4] * axes), requires_grad=True)
    with hf.installed():
        with pytest.raises(RuntimeError, match="non-zero size for non-batch dimensions"):
            pool(image, (0, *[2] * (axes - 1))).sum().backward()
        (gradient,) = torch.autograd.grad(pool(image[:0], (2,) * axes).sum(), image)
    assert not gradient.any()


def test_an_index_out_of_range_is_named_as_it_was_given() -> None:
    table = torch.zeros(4, 8)
    with hf.installed():
        said = r"position 1 of the flattened index of axis 1 is -9; the axis has 8 rows; .* -8 to 7\. Correct"
        with pytest.raises(hf.InvalidIndex, match=said):
            table.index_put_((torch.tensor([0, 1]), torch.tensor([3, -9])), torch.ones(2), accumulate=True)
        with pytest.raises(
            hf.InvalidIndex, match=r"position 0 .* is 9; .* accepted are 0 to 3\. Correct the index\.$"
        ):
            table.index_add_(0, torch.tensor([9]), torch.ones(1, 8))


def test_few_values_that_are_broadcast_to_many_terms_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several threads torch adds these terms in the order of arrival."""
    monkeypatch.undo()
    draw = torch.Generator().manual_seed(0)
    index, values = torch.randint(0, 9, (400,), generator=draw), torch.randn(400, 1, generator=draw)
    with hf.installed():
        found = torch.zeros(9, 512).index_put_((index,), values, accumulate=True)
        assert served("_index_put_impl_") == 1
        torch.zeros(9, 8).index_put_((index,), values, accumulate=True)
        assert served("_index_put_impl_") == 1
    assert torch.equal(found, hf.index_add(torch.zeros(9, 512), 0, index, values.expand(400, 512)))


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_an_expanded_tensor_is_left_to_torch() -> None:
    def summed() -> torch.Tensor:
        table = torch.zeros(4, 1).expand(4, 5)
        return table.index_put_((torch.tensor([0]),), ONES[:1], accumulate=True)

    expected = summed()
    with hf.installed():
        assert torch.equal(summed(), expected)
        assert hf.status()["_index_put_impl_"].passed_on == {"elements of the tensor share memory": 1}


def test_a_transposed_tensor_is_not_added_to_itself() -> None:
    index, said = torch.tensor([1, 1, 0, 2]), "refer to a single memory location"
    with hf.installed():
        for add in (
            lambda table: table.index_add_(0, index, table),
            lambda table: table.scatter_add_(0, index[:, None].expand(4, 3), table),
        ):
            table = torch.ones(3, 4).t()
            with pytest.raises(RuntimeError, match=said):
                add(table)
            assert table.eq(1).all()
        rows = torch.ones(8, 3)
        rows[::2].index_add_(0, index, rows[1::2])  # rows of the same storage that are apart
        assert served("index_add_") == 1
    assert rows[::2].sum(1).tolist() == [6, 9, 6, 3]


def test_a_sum_may_go_into_another_part_of_the_same_storage() -> None:
    storage = torch.ones(8, 3)
    with hf.installed():
        torch.index_add(storage[:4], 0, torch.tensor([1, 1]), torch.ones(2, 3), out=storage[4:])
        assert served("index_add.out") == 1
    assert storage[5].eq(3).all() and storage.sum() == 30
