"""Tests of descriptors: hashing, JSON round trip, and errors for invalid JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.proof.conformance import cases_of

PLANS = hf.plans.all()
GOOD = hf.plans.QuantizePerGroupDescriptor(
    shape=(4, 6),
    group_size=3,
    axis=-1,
    input_dtype=torch.bfloat16,
    output_dtype=torch.int4,
    q_min=-7,
    q_max=7,
)


@pytest.mark.parametrize("name", PLANS)
def test_json_there_and_back(name: str) -> None:
    plan = PLANS[name]
    for case in cases_of(plan):
        text = case.descriptor.to_json()
        for kind in (hf.plans.Descriptor, plan.Descriptor):
            back = kind.from_json(text)
            assert back == case.descriptor
            assert type(back) is plan.Descriptor
            assert hash(back) == hash(case.descriptor)
            assert back.to_json() == text


@pytest.mark.parametrize("name", PLANS)
def test_descriptors_are_keys(name: str) -> None:
    plan = PLANS[name]
    described = [case.descriptor for case in cases_of(plan)]
    again = [case.descriptor for case in cases_of(plan)]
    assert {descriptor: i for i, descriptor in enumerate(described)}.keys() == set(again)


@pytest.mark.parametrize("name", PLANS)
def test_guarantees_name_the_outputs_that_are_written(name: str) -> None:
    plan, stream = PLANS[name], hf.Stream.current()
    pref = hf.PlanPreference(backend="reference", precompile=False)
    for case in cases_of(plan):
        promise = plan.select(stream, case.descriptor, pref).precision_guarantee()
        written = {output for output in plan.outputs if case.descriptor.expected(output) is not None}
        assert promise.ulp.keys() == written >= promise.per_term.keys()


def test_a_subclass_does_not_hide_the_descriptor_of_a_plan() -> None:
    kind = type("PaddedDescriptor", (hf.plans.QuantizePerGroupDescriptor,), {})
    try:
        assert hf.plans.Descriptor.from_json(GOOD.to_json()) == GOOD
        assert hf.plans.QuantizePerGroupDescriptor.from_json(GOOD.to_json()) == GOOD
    finally:
        hf.plans.Descriptor._by_name.pop(kind.__name__)


def test_descriptors_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.shape = (1,)  # type: ignore[misc]


def test_a_shape_may_be_any_sequence_of_sizes() -> None:
    assert hf.plans.QuantizePerTensorDescriptor(
        shape=torch.Size([2, 3])
    ) == hf.plans.QuantizePerTensorDescriptor(
        shape=[2, 3]  # type: ignore[arg-type]
    )


def _changed(**fields: Any) -> str:
    """The JSON of a valid descriptor with some fields replaced, or removed if the value is "left out"."""
    data = {**json.loads(GOOD.to_json()), **fields}
    return json.dumps({key: value for key, value in data.items() if value != "left out"})


BROKEN = {
    "nothing": ("", "not JSON"),
    "half an object": ('{"shape": [1', "not JSON"),
    "a list": ("[]", "a list, not an object"),
    "null": ("null", "not an object"),
    "a number": ("3", "an int, not an object"),
    "no such descriptor": (_changed(descriptor="QuantizePerPlanetDescriptor"), "QuantizePerPlanetDescriptor"),
    "a descriptor that is no name": (_changed(descriptor=5), "5"),
    "a base": (_changed(descriptor="QuantizeDescriptor"), "accepted here"),
    "another descriptor": (_changed(descriptor="QuantizePerTokenDescriptor"), "accepted here"),
    "no such field": (_changed(colour="red"), "no field 'colour'"),
    "a shape of text": (_changed(shape="4x6"), "a list of whole numbers"),
    "a shape of fractions": (_changed(shape=[4.0, 6]), "4.0"),
    "a shape of truths": (_changed(shape=[True, 6]), "True"),
    "a shape of shapes": (_changed(shape=[[4], 6]), "[4]"),
    "no shape": (_changed(shape="left out"), "shape"),
    "a negative size": (_changed(shape=[4, -6]), "negative"),
    "too many axes": (_changed(shape=[1] * 8 + [3]), "rank 9"),
    "no such dtype": (_changed(input_dtype="float31"), "'float31' is not a dtype"),
    "a dtype that is something else": (_changed(input_dtype="nn"), "'nn' is not a dtype"),
    "a dtype as a number": (_changed(input_dtype=32), "the name of a dtype"),
    "a dtype that is no input": (_changed(input_dtype="int8"), "accepted are torch.float16"),
    "a dtype that is no code": (_changed(output_dtype="int64"), "accepted are torch.int2"),
    "an axis of text": (_changed(axis="last"), "a whole number"),
    "an axis out of range": (_changed(axis=2), "axis 2 is out of range"),
    "a group of none": (_changed(group_size=0), "group_size is 0"),
    "a group that does not divide": (_changed(group_size=4), "does not divide"),
    "no group": (_changed(group_size="left out"), "group_size"),
    "a bound of text": (_changed(q_min="low"), "'low'"),
    "bounds the wrong way round": (_changed(q_min=5, q_max=-5), "q_min 5 is greater than q_max -5"),
    "bounds too wide": (_changed(q_max=8), "wider than torch.int4 holds, -8 to 7"),
    "packed as a number": (_changed(packed=1), "true or false"),
    "packed groups that share a byte": (_changed(packed=True), "multiple of 2"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_json_is_refused_with_a_sentence(what: str) -> None:
    text, said = BROKEN[what]
    with pytest.raises(hf.InvalidDescriptor) as refusal:
        hf.plans.QuantizePerGroupDescriptor.from_json(text)
    assert said in str(refusal.value)
    assert str(refusal.value).endswith(".")
    assert isinstance(refusal.value, ValueError)


def test_json_that_is_no_text_is_refused() -> None:
    with pytest.raises(hf.InvalidDescriptor, match="not JSON"):
        hf.plans.Descriptor.from_json(None)  # type: ignore[arg-type]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(name=st.sampled_from(sorted(PLANS)), field=st.integers(0, 20), value=anything)
def test_any_field_may_be_anything_and_is_refused_or_kept(name: str, field: int, value: Any) -> None:
    data = json.loads(cases_of(PLANS[name])[0].descriptor.to_json())
    key = sorted(data)[field % len(data)]
    text = json.dumps({**data, key: value})
    try:
        made = hf.plans.Descriptor.from_json(text)
    except hf.InvalidDescriptor:
        return
    assert hf.plans.Descriptor.from_json(made.to_json()) == made


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text())
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(hf.InvalidDescriptor):
        hf.plans.Descriptor.from_json(text)


@pytest.mark.parametrize(
    "name", ["per_row", "per_channel", "per_channel:x", "per_tensor:1", "per_group:1:2:3", ""]
)
def test_a_granularity_that_does_not_exist_is_refused(name: str) -> None:
    text = json.dumps(
        {"descriptor": "FakeQuantizeDescriptor", "shape": [4], "dtype": "int8", "granularity": name}
    )
    with pytest.raises(hf.InvalidDescriptor, match="granularity"):
        hf.plans.Descriptor.from_json(text)
