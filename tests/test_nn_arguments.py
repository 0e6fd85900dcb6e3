"""hf.nn.FakeQuantize raises on invalid arguments and leaves its state unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holdfast as hf

NAN, INF = float("nan"), float("inf")
CHANNELS = hf.PerChannel(0)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"symmetric": "no"}, "symmetric is 'no'; it must be True or False"),
        ({"symmetric": 0}, "symmetric is 0; it must be True or False"),
        ({"narrow": 1}, "narrow is 1; it must be True or False"),
        ({"mode": "fixed", "scale": 1.0, "narrow": "yes"}, "narrow is 'yes'; it must be True or False"),
        ({"momentum": True}, "momentum is True; it is the weight of a new batch"),
        ({"momentum": NAN}, "momentum is nan; it is the weight of a new batch"),
        ({"device": "nowhere"}, "device is 'nowhere'; it must be a device of torch"),
        ({"device": 1.5}, "device is 1.5; it must be a device of torch"),
        ({"process_group": "all"}, "process_group is a str; it must be what torch.distributed.new_group"),
        ({"mode": "fixed", "scale": 10**400}, "scale is an integer of more than 64 bits"),
        (
            {"mode": "fixed", "scale": torch.tensor(1j)},
            "scale is torch.complex64; it must be of real numbers",
        ),
        ({"mode": "fixed", "scale": torch.tensor(True)}, "scale is torch.bool; it must be of real numbers"),
        (
            {"mode": "fixed", "scale": 1.0, "zero_point": 2**31},
            "zero_point is 2147483648; it must fit 32 bits",
        ),
        (
            {"mode": "learned", "scale": 1.0, "symmetric": False, "zero_point": NAN},
            "zero_point is nan; it must",
        ),
        ({"mode": "fixed", "scale": 1.0, "scale_shape": "ab"}, "scale_shape is 'ab'; it must be a sequence"),
        (
            {"scale_shape": (-1,), "granularity": hf.PerToken()},
            r"scale_shape is \(-1,\); .* sizes of at least 0",
        ),
        ({"scale_shape": (2, 3), "granularity": CHANNELS}, r"scale_shape is \(2, 3\); .* one size, such as"),
        ({"scale_shape": (2,)}, r"scale_shape is \(2,\); for PerTensor\(\) accepted are \(\) or \(1,\)"),
        ({"scale_shape": (2,), "mode": "per_batch"}, r"accepted are \(\) or \(1,\)"),
    ],
)
def test_what_cannot_be_used_is_refused_when_the_module_is_made(given: Any, sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence) as refusal:
        hf.nn.FakeQuantize(**given)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("switch", ["enable_observer", "enable_fake_quant"])
def test_switches_are_true_or_false(switch: str) -> None:
    module = hf.nn.FakeQuantize()
    for given in ("no", 0, None, torch.tensor(False)):
        with pytest.raises(hf.HoldfastError, match=r"enabled is .*; it must be True or False\."):
            getattr(module, switch)(given)
    assert module.observes and module.quantizes


@pytest.mark.parametrize("prefix", ["", "0."])
@pytest.mark.parametrize(
    ("given", "entries", "sentence"),
    [
        ({}, {"_extra_state": None}, "_extra_state is None; it must be a tensor of three zeros or ones"),
        ({}, {"_extra_state": [1, 0, 1]}, r"_extra_state is \[1, 0, 1\]; it must be a tensor of three"),
        ({}, {"_extra_state": torch.ones(2)}, r"_extra_state is torch.float32 of shape \(2,\); it must be"),
        ({}, {"_extra_state": torch.tensor([0, 2, 1])}, r"_extra_state is \[0, 2, 1\]; it must be"),
        ({}, {"_extra_state": torch.tensor([NAN, 1, 1])}, r"_extra_state is \[nan, 1.0, 1.0\]; it must be"),
        ({}, {"scale": torch.tensor(3)}, "scale is torch.int64; it must be of floating point numbers"),
        ({}, {"scale": torch.tensor(0.0)}, "scale is 0.0; it must be positive and finite"),
        ({}, {"scale": torch.tensor(-INF)}, "scale is -inf; it must be positive and finite"),
        ({}, {"rejected_batches": torch.tensor(-1)}, "rejected_batches is -1; it must be a count"),
        (
            {},
            {"rejected_batches": torch.tensor(0.5)},
            "rejected_batches is torch.float32; it must be of integers",
        ),
        (
            {"symmetric": False},
            {"zero_point": torch.tensor(0.5)},
            "zero_point is torch.float32; it must be of int",
        ),
        ({"symmetric": False}, {"low": torch.tensor(1j)}, "low is torch.complex64; it must be of floating"),
        ({"mode": "fixed", "scale": 1.0}, {"scale": torch.tensor(NAN)}, "scale is nan; it must be positive"),
        ({"mode": "learned"}, {"scale": torch.tensor(True)}, "scale is torch.bool; it must be of floating"),
        (
            {"granularity": CHANNELS},
            {"scale": torch.ones(3), "_extra_state": 7},
            "_extra_state is 7; it must",
        ),
    ],
)
def test_a_bad_state_is_refused_and_none_of_it_is_loaded(
    given: dict[str, Any], entries: dict[str, Any], sentence: str, prefix: str
) -> None:
    module = hf.nn.FakeQuantize(**given)
    module.disable_observer()
    model = torch.nn.Sequential(module) if prefix else module
    before = model.state_dict()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    bad = {**before, **{prefix + name: entry for name, entry in entries.items()}}
    if "rejected_batches" not in entries and prefix + "rejected_batches" in bad:
        bad[prefix + "rejected_batches"] = torch.tensor(5)
    with pytest.raises(hf.HoldfastError, match=prefix + sentence) as refusal:
        model.load_state_dict(bad)
    assert str(refusal.value).endswith("Nothing was loaded into this module.")
    after = model.state_dict()
    assert kept.keys() == after.keys()
    assert all(torch.equal(kept[name].nan_to_num(7), after[name].nan_to_num(7)) for name in kept)
    assert not module.observes


def test_a_learned_scale_is_loaded_as_the_optimizer_left_it() -> None:
    module = hf.nn.FakeQuantize(mode="learned", scale=1.0)
    module.load_state_dict({**module.state_dict(), "scale": torch.tensor(-0.5)})
    assert float(module.scale.detach()) == -0.5
