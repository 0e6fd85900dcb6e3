"""``hf.testing.assert_reproducible`` finds every kind of planted difference, and nothing else."""

from __future__ import annotations

import operator
import random
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast.testing import Reproducible, assert_reproducible
from holdfast.testing.outputs import BYTES, difference

X = torch.linspace(-3, 3, 48).reshape(8, 6)


def refused(step: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """The error message for a step that is not reproducible."""
    with pytest.raises(hf.NotReproducible) as error:
        assert_reproducible(step, *inputs, **options)
    return str(error.value)


# Steps that are not reproducible.


def test_it_finds_an_order_that_depends_on_threads() -> None:
    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = x.flatten().tensor_split(torch.get_num_threads())
        return {"sum": torch.stack([part.sum() for part in parts]).sum(), "x": x}

    said = refused(step, torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    assert "1 thread vs 2 threads" in said and "output['sum']: " in said and "(0x" in said
    assert "output['x']" not in said and "number of threads" in said
    assert isinstance(assert_reproducible(step, X, threads=(2,)), Reproducible)


def test_it_finds_state_that_leaks_between_calls() -> None:
    calls = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone().index_put((torch.tensor(3), torch.tensor(5)), x[3, 5] + len(calls))

    said = refused(step, X)
    assert "run 1 vs run 2 on 1 thread: 1 output differs" in said and "output[3, 5]" in said
    assert "1 of 48 elements differ" in said and "model=" in said


def test_it_finds_a_result_that_depends_on_the_batch() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x - x.mean(0)

    assert_reproducible(step, X)
    said = refused(step, X, batch_split=(3, 5))
    assert (
        "the whole batch vs parts of 3, 5" in said and "output[1][0, 0]" in said and "output[0]" not in said
    )


def test_it_finds_another_shape_of_a_part() -> None:
    assert "shape (8, 8)" in refused(lambda x: x @ x.T, X, batch_split=2)


@pytest.mark.parametrize(
    "unseeded",
    [
        lambda: random.SystemRandom().random(),
        lambda: np.random.default_rng().random(3),
        lambda: torch.rand(3, generator=_seeded_by_the_clock()),
    ],
    ids=["python", "numpy", "torch"],
)
def test_it_finds_random_numbers_without_a_seed(unseeded: Callable[[], Any]) -> None:
    assert "random numbers without a seed" in refused(unseeded)


def _seeded_by_the_clock() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


def test_it_finds_a_write_to_an_input() -> None:
    inputs = {"x": X.clone()}
    said = refused(lambda given: given["x"].relu_(), inputs)
    assert "before vs after the step" in said and "inputs[0]['x'][0, 0]: -3.0 (0xc0400000) and 0.0" in said
    assert inputs["x"].equal(X), "the step has a copy"
    assert "inputs[0][0]: 0.0 (0x0" in refused(lambda array: np.negative(array, out=array)[0], np.arange(4.0))


def test_it_finds_an_output_that_comes_and_goes() -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> dict[str, Any]:
        calls.append(1)
        return {"x": x} if len(calls) == 1 else {"x": x, "late": x}

    assert "output['late']: nothing and a tensor of shape (8, 6)" in refused(step, X)


def test_it_names_the_gradient_of_a_module() -> None:
    model = torch.nn.Sequential(OrderedDict(encoder=torch.nn.Linear(6, 4, bias=False)))
    noise = iter(range(100))

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        grad = model.encoder.weight.grad
        assert grad is not None
        grad[3, 2] += next(noise)

    said = refused(step, X, model=model)
    assert "grads['encoder.weight'][3, 2]: " in said and "1 of 24 elements differ" in said
    assert "params[" not in said and next(model.parameters()).grad is None


class Plus(torch.nn.Module):
    """Adds another number in every call, to its input or to the gradient of its input."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.numbers, self.backward = iter(range(1000)), backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.backward:
            return x + next(self.numbers)
        x = x * 1
        x.register_hook(lambda gradient: gradient + next(self.numbers))
        return x * 1


class Block(torch.nn.Module):
    """Its own code adds another number in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.out = iter(range(1000)), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, weight: dict[str, float]) -> torch.Tensor:
        y: torch.Tensor = self.out(input=x + weight["x"] * next(self.numbers))
        return y


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x, weight={"x": 0.5})
        return y


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: Plus(backward=False), "in the output of '2.1' (Plus); its inputs are equal"),
        (lambda: Plus(backward=True), "in the backward pass of '2.1' (Plus); the gradients of its outputs"),
        (Scaled, "in the input of '2.1.block.out' (Linear), which '2.1.block' (Block) computes"),
    ],
)
def test_it_names_the_first_layer(layer: Any, said: str, checkpointed: bool) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(6, 6), layer(), torch.nn.Linear(6, 6))
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(inplace=True), inner)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        loss: torch.Tensor = y.square().sum()
        loss.backward()
        return loss

    shown = refused(step, X, model=model, threads=())
    assert f"The first difference is {said}" in shown
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_it_names_a_difference_outside_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, numbers = torch.nn.Sequential(torch.nn.Linear(6, 2)), iter(range(1000))

    def losses(x: torch.Tensor) -> None:
        (model(x) * next(numbers)).sum().backward()

    def stopping(x: torch.Tensor) -> torch.Tensor:
        if (number := next(numbers)) > 1001:
            raise ValueError("no further runs")
        y: torch.Tensor = model(x) * number
        return y

    said = refused(lambda x: model(x + next(numbers)), X, model=[model], threads=())
    assert "first difference is in the input of 'model[0]' (Sequential), which the step computes" in said
    assert "in the gradient that '0' (Linear) gets for its output" in refused(losses, X, model=model)
    assert "first difference" not in refused(lambda x: model(x) + next(numbers), X, model=model)
    with monkeypatch.context() as patched:
        for name, found in (("is_initialized", True), ("get_world_size", 2)):
            patched.setattr(torch.distributed, name, lambda found=found: found)
        assert "first difference" not in refused(lambda x: model(x + next(numbers)), X, model=model)
    numbers = iter(range(1000, 1100))
    assert "first difference" not in refused(stopping, X, model=model)


def test_what_only_a_later_run_raises_says_which() -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("too late")
        return x

    with pytest.raises(RuntimeError, match="too late") as error:
        assert_reproducible(step, X)
    assert error.value.__notes__ == ["Only the second raised this: 1 thread vs 2 threads."]


# Steps that are reproducible.


@pytest.mark.parametrize(
    "step",
    [
        lambda x: hf.fake_quantize(x, 0.1, dtype=torch.int8),
        lambda x: hf.quantize(x, 0.1, dtype=torch.int4, packed=True),
        lambda x: hf.quantize_dynamic(x, dtype=torch.int8, granularity=hf.PerToken()),
        lambda x: hf.embedding((x.abs() * 3).long(), torch.arange(40.0).reshape(20, 2)),
    ],
    ids=["fake_quantize", "quantize", "quantize_dynamic", "embedding"],
)
def test_the_ops_are_reproducible(step: Callable[..., Any]) -> None:
    found = assert_reproducible(step, X, batch_split=3)
    assert found.runs == 12 and found.outputs >= 1 and found.elements >= 24
    assert found.compared[-1] == "3 on parts of 3, 3, 2 samples"


def test_the_result_is_a_sentence() -> None:
    said = str(assert_reproducible(lambda: torch.tensor(1.0)))
    assert said.startswith("1 output with 1 element: equal in every bit in ")


class Model(torch.nn.Module):
    """A model with an embedding, fake quantization and a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.table = hf.nn.Embedding(50, 6)
        self.quantizer = hf.nn.FakeQuantize(dtype=torch.int8)
        self.dropout = torch.nn.Dropout(0.5)
        self.calls = 0

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.quantizer(self.table(indices))) * self.calls


def training(
    optimizer: type[torch.optim.Optimizer],
) -> tuple[Model, torch.optim.Optimizer, Callable[..., Any]]:
    model = Model()
    chosen = optimizer(model.parameters(), lr=0.1)

    def step(indices: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad()
        loss = model(indices).square().mean()
        loss.backward()
        chosen.step()
        return loss

    return model, chosen, step


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_of_training_is_reproducible(optimizer: type[torch.optim.Optimizer]) -> None:
    model, chosen, step = training(optimizer)
    indices = torch.arange(40).remainder(7)
    step(indices)  # initialize the moving average and the optimizer
    before = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    grads = [parameter.grad for parameter in model.parameters()]
    found = assert_reproducible(step, indices, model=[model, chosen])
    assert found.outputs > 4
    after = model.state_dict()
    assert all(difference(name, value, after[name]) is None for name, value in before.items())
    assert model.calls == 1 and all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


def test_groups_and_settings_that_the_step_adds_to_an_optimizer_are_taken_away() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    before = optimizer.state_dict()
    assert_reproducible(step, torch.ones(2, 3), model=[model, optimizer], threads=(1,))
    assert optimizer.state_dict() == before
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], model[0].parameters()))


def test_state_that_is_not_named_is_found() -> None:
    model, _, step = training(torch.optim.Adam)
    said = refused(step, torch.arange(40).remainder(7), model=model)
    assert "params['table.weight']" in said, "Adam's averages went on"


def test_a_step_that_is_a_module_is_put_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for options in ({}, {"model": [torch.nn.Linear(2, 2)]}):
        assert_reproducible(model, X, threads=(), **options)
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    model.append(Plus(backward=False))
    said = refused(model, X, model=[torch.nn.Linear(2, 2)], threads=())
    assert "in the output of 'step.2' (Plus); its inputs are equal" in said


def test_models_and_optimizers_may_be_inputs() -> None:
    model, chosen, step = training(torch.optim.Adam)
    found = assert_reproducible(
        lambda held, indices: step(indices), {"m": model, "o": chosen}, torch.arange(9)
    )
    assert found.outputs > 4 and model.calls == 0


def test_random_numbers_of_every_source_are_put_back() -> None:
    generator = torch.Generator().manual_seed(3)
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())

    def step(x: torch.Tensor, held: torch.Generator) -> Any:
        return random.random(), np.random.rand(3), torch.rand(3), torch.rand(2, generator=held)

    assert_reproducible(step, X, generator)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert generator.get_state().equal(torch.Generator().manual_seed(3).get_state())


class Keeper(torch.nn.Module):
    """Keeps state in attributes of many kinds, and changes all of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.array = torch.zeros(3), np.zeros(3)
        self.seen, self.counts, self.last = list[int](), {"deep": {"calls": 0}}, deque[int](maxlen=2)
        self.names, self.shift, self.layers = set[str](), (torch.zeros(1),), [torch.nn.Linear(3, 3)]
        self.generator, self.random = torch.Generator(), random.Random(1)
        self.numbers, self.old_numbers = np.random.default_rng(1), np.random.RandomState(1)
        self.frozen, self.leaf = torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.mean.add_(x.mean(0))
        self.leaf.sum().backward()
        self.array += 1
        self.seen.append(len(self.seen))
        self.counts["deep"]["calls"] += 1
        self.last.append(len(self.seen))
        self.names.add(str(len(self.seen)))
        self.shift[0].add_(1)
        with torch.no_grad():
            self.layers[0].weight.add_(1)
        self.frozen.requires_grad_(not self.frozen.requires_grad)
        drawn = [self.random.random(), self.numbers.random(), self.old_numbers.rand()]
        return [x * float(number) for number in (*drawn, *self.state())] + [
            torch.rand(3, generator=self.generator)
        ]

    def state(self) -> list[float]:
        sums = [self.mean.sum(), self.array.sum(), self.shift[0].sum(), self.layers[0].weight.detach().sum()]
        grad = 0 if self.leaf.grad is None else self.leaf.grad.sum()
        sizes = [grad, len(self.seen), self.counts["deep"]["calls"], len(self.last), len(self.names)]
        return [*map(float, (*sums, *sizes, self.frozen.requires_grad))]


def test_attributes_of_modules_that_change_in_place_are_put_back() -> None:
    model, x = Keeper(), torch.randn(4, 3)
    before, kept = model.state(), [model.seen, model.counts["deep"], model.mean]
    assert_reproducible(model, x, model=model, threads=(1,))
    assert model.state() == before
    now = [model.seen, model.counts["deep"], model.mean]
    assert all(one is other for one, other in zip(kept, now, strict=True))
    once = Keeper()
    assert all(map(torch.equal, model(x)[:3], once(x)[:3]))  # the random numbers


class Frozen(dict[str, int]):
    """A dict that refuses changes, as configurations of models do."""

    def update(self, *given: Any, **named: Any) -> None:
        raise TypeError("it is frozen")

    clear = update  # type: ignore[assignment]


def test_a_container_that_the_step_only_reads_is_not_written() -> None:
    model = Model()
    model.config = Frozen(width=6)
    assert_reproducible(lambda x: x * model.config["width"], X, model=model, threads=(1,))
    assert model.config == {"width": 6}


def prepared_bias(layer: torch.nn.Module) -> None:
    config = hf.qat.Config(weight=hf.qat.Quantizer(), parameters=("bias",))
    hf.qat.prepare(layer, config)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_parametrizations_that_the_step_adds_or_removes_are_put_back(is_prepared: bool) -> None:
    config = hf.qat.Config(weight=hf.qat.Quantizer())
    layer = torch.nn.Linear(6, 6)
    changes = [lambda: hf.qat.prepare(layer, config)]
    if is_prepared:
        hf.qat.prepare(layer, config)
        changes = [
            lambda: hf.qat.convert(layer),
            lambda: remove_parametrizations(layer, "weight"),
            lambda: prepared_bias(layer),
        ]
    kind, weight, names = type(layer), layer.weight.detach().clone(), list(layer.state_dict())
    for change in changes:

        def step(x: torch.Tensor, change: Callable[[], Any] = change) -> torch.Tensor:
            change()
            return layer(x)

        assert_reproducible(step, X, model=layer, threads=())
        assert type(layer) is kind and list(layer.state_dict()) == names
        assert layer.weight.equal(weight) and layer.bias.shape == (6,) and layer(X).requires_grad


def test_modules_that_refer_to_each_other_are_put_back() -> None:
    one, other = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)
    one.others, other.others = [other], [one]  # type: ignore[assignment]
    assert_reproducible(lambda x: [other(one(x)), other.running_mean], X, model=one, threads=(1,))
    assert not other.running_mean.any() and one.others[0] is other  # type: ignore


def test_an_attribute_that_the_step_only_reads_is_not_written() -> None:
    """A write to a tensor that autograd has saved would make its gradient fail."""
    model = Model()
    model.kept = torch.randn(3, requires_grad=True).exp()  # exp saves its result
    with torch.inference_mode():
        model.constant = torch.ones(3)
    assert_reproducible(lambda x: x + model.kept.detach() + model.constant, torch.ones(3), model=model)
    model.kept.sum().backward()


def test_threads_are_put_back_also_after_an_error() -> None:
    before = torch.get_num_threads()
    refused(lambda x: x + torch.get_num_threads(), X)
    assert torch.get_num_threads() == before


def test_an_input_that_the_step_owns_may_change() -> None:
    weight = torch.ones(6, requires_grad=True)

    def step(x: torch.Tensor, w: torch.Tensor) -> None:
        assert w is weight
        (x * w).sum().backward()
        with torch.no_grad():
            w -= 0.1 * w.grad

    assert assert_reproducible(step, X, weight, model=weight).outputs == 2
    assert weight.equal(torch.ones(6)) and weight.grad is None


def test_gradients_of_inputs_are_compared() -> None:
    x = X.clone().requires_grad_()
    noise = iter(range(100))
    assert "inputs[0].grad[0, 0]" in refused(lambda x: (x * next(noise)).sum().backward(), x)
    assert assert_reproducible(lambda x: x.square().sum().backward(), x).outputs == 1
    assert x.grad is None


Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Record:
    """A dataclass as input and output."""

    value: torch.Tensor
    name: str = "n"


def test_nested_structures_go_in_and_come_out() -> None:
    def step(record: Record, pair: Pair, table: OrderedDict[str, Any]) -> Any:
        assert isinstance(table, OrderedDict) and pair.a is table["same"]
        return [Record(record.value + 1), Pair(pair.a, {"deep": (1, 2.5, None, True)})], table["array"] * 2

    shared = torch.ones(3)
    table = OrderedDict(same=shared, array=np.arange(4))
    found = assert_reproducible(step, Record(X), Pair(shared, "text"), table)
    assert found.outputs == 8
    noise = iter(range(100))
    said = refused(lambda record: [Record(record.value, str(next(noise)))], Record(X))
    assert "output[0].name: '0' (str) and '1' (str)" in said


def test_a_batch_of_a_tokenizer_is_split() -> None:
    """It is a UserDict, which is no dict."""

    class Batch(UserDict[str, Any]):
        pass

    def step(batch: Batch) -> torch.Tensor:
        sizes.append(len(batch["x"]))
        return batch["x"] + batch["shift"]

    sizes: list[int] = []
    batch = Batch(x=X, shift=torch.ones(6))
    assert_reproducible(step, batch, batch_split=(5, 3), threads=(), repeats=2)
    assert sorted(set(sizes)) == [3, 5, 8] and batch["x"] is X


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([-1], dtype=torch.int32).view(torch.float32), torch.tensor([float("nan")]), True),
        (torch.tensor([1 + 0j]), torch.tensor([complex(1, -0.0)]), False),
        (torch.tensor([complex("nan+1j")]), torch.tensor([complex("nan+1j")]), True),
        (torch.tensor([1.0]).to(torch.float8_e5m2), torch.tensor([1.5]).to(torch.float8_e5m2), False),
        (
            torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn),
            True,
        ),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.tensor(True), torch.tensor(False), False),
        (1, True, False),
        ("a", "a", True),
    ],
)
def test_bits_are_compared(first: Any, second: Any, same: bool) -> None:
    assert (difference("y", first, second) is None) == same


@pytest.mark.parametrize("dtype", sorted(BYTES, key=str), ids=str)
def test_elements_of_less_than_a_byte_are_compared(dtype: torch.dtype) -> None:
    codes, calls = torch.arange(6, dtype=torch.uint8), count()
    assert_reproducible(lambda x: codes.view(dtype), X, threads=(1,))
    assert "0 (0x00) and 1 (0x01)" in refused(lambda x: (codes + next(calls)).view(dtype), X, threads=(1,))


def test_sparse_gradients_are_compared() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    found = assert_reproducible(lambda n: table(n).sum().backward(), torch.arange(4), model=table)
    assert found.outputs == 3, "the table, and the indices and values of its gradient"


def test_a_buffer_that_repeats_its_memory_is_put_back() -> None:
    model = torch.nn.Module()
    model.register_buffer("wide", torch.zeros(1).expand(4))
    assert_reproducible(lambda x: x + model.wide.sum(), X, model=model)


# Invalid arguments.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"repeats": 0}, "repeats is 0; give a whole number from 1"),
        ({"repeats": True}, "repeats is True"),
        ({"repeats": 1, "threads": ()}, "One run has nothing to be compared with"),
        ({"threads": 2}, "threads is 2; give numbers of threads"),
        ({"threads": (1, 0)}, "threads is (1, 0)"),
        ({"devices": "cpu"}, "devices is 'cpu'; give a list"),
        ({"devices": ("toaster",)}, "'toaster', which is no device"),
        ({"devices": ("meta",)}, "only 'cpu' and 'cuda'"),
        ({"batch_split": 9}, "batch_split is 9, and the first input has 8 samples"),
        ({"batch_split": 1}, "batch_split is 1"),
        ({"batch_split": (3, 4)}, "batch_split is (3, 4)"),
        ({"batch_split": "two"}, "batch_split is 'two'"),
        ({"model": 3}, "model is an int; model takes modules"),
        ({"model": [torch.nn.Linear(1, 1), "x"]}, "model[1] is a str"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(hf.HoldfastError) as error:
        assert_reproducible(lambda x: x, X, **options)
    assert said in str(error.value)


def made_in_inference_mode() -> torch.nn.Module:
    with torch.inference_mode():
        return torch.nn.Sequential(torch.nn.Linear(6, 2))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (torch.nn.Sequential(torch.nn.LazyLinear(3)), "0.weight has no shape yet; run one batch"),
        (made_in_inference_mode(), "0.weight was made in torch.inference_mode, so its value cannot"),
    ],
)
def test_a_model_that_cannot_be_restored_is_refused(model: torch.nn.Module, said: str) -> None:
    with pytest.raises(hf.InvalidArgs, match=said):
        assert_reproducible(model, X, model=model)


@pytest.mark.parametrize(
    ("step", "inputs", "options", "said"),
    [
        (3, (), {}, "step is an int; give a function"),
        (lambda: None, (), {}, "step returned nothing"),
        (lambda: object(), (), {}, "output is an object, which cannot be compared"),
        (lambda: np.array(["a"]), (), {}, "output is an array of <U1"),
        (lambda x: 1, ((n for n in "ab"),), {}, "inputs[0] is a generator, which cannot be copied"),
        (lambda x: x.sum(), (X,), {"batch_split": 2}, "nothing that step returns has 8 samples"),
        (lambda x: x.to_sparse_csr(), (X,), {}, "output is a tensor of layout torch.sparse_csr, which"),
        (lambda x: x.to("meta"), (X,), {}, "output is a tensor on the meta device, which cannot be compared"),
        (lambda x: x, (X[:1],), {"batch_split": 2}, "1 samples along dim 0; hand in a batch of 2 samples"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bad_steps_are_refused_with_a_sentence(step: Any, inputs: Any, options: Any, said: str) -> None:
    with pytest.raises(hf.InvalidArgs) as error:
        assert_reproducible(step, *inputs, **options)
    assert said in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without CUDA")
def test_cuda_is_not_left_out_in_silence() -> None:
    with pytest.raises(hf.InvalidArgs, match="torch sees no CUDA device here"):
        assert_reproducible(lambda x: x, X, devices=("cpu", "cuda"))


def test_not_reproducible_is_an_assertion() -> None:
    assert issubclass(hf.NotReproducible, AssertionError) and issubclass(hf.NotReproducible, hf.HoldfastError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="these need a CUDA device")
class TestOnCuda:
    """The CPU against the GPU."""

    def test_training_is_the_same_on_both(self) -> None:
        model = hf.nn.Embedding(50, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(indices: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            out = hf.fake_quantize(model(indices), 0.25, dtype=torch.int8)
            out.backward(torch.ones_like(out))
            optimizer.step()
            return out

        indices = torch.arange(40).remainder(7)
        found = assert_reproducible(step, indices, model=[model, optimizer], devices=("cpu", "cuda"))
        assert found.compared[-1] == "3 on cuda"
        assert model.weight.device.type == "cpu" and model.weight.grad is None

    def test_a_difference_is_named(self) -> None:
        said = refused(lambda x: x + x.is_cuda, X, devices=("cpu", "cuda"))
        assert "cpu on 1 thread vs cuda" in said and "devices compute in another way" in said
