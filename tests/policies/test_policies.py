"""Policies as values, what contradicts itself, what is parsed, and what jax makes of them."""

import dataclasses
import json
import operator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from jaxmem import policies
from jaxmem.trace.residuals import saved_residuals

NONE, FULL = policies.none(), policies.full()
ALL = [
    NONE,
    FULL,
    policies.dots(),
    policies.dots_no_batch(),
    policies.names(save=["a", "b"]),
    policies.names(save="a", offload="b"),
    policies.from_jax(jax.checkpoint_policies.everything_saveable),
    policies.dots() | policies.names(save="a"),
    policies.sqrt(),
    policies.sqrt(4),
    policies.sqrt((4, 2)),
    policies.sqrt(levels=3),
    policies.revolve(),
    policies.revolve(3),
    policies.offload(),
    policies.offload(["a"]),
]
LAYER = [policy for policy in ALL if isinstance(policy, policies.LayerPolicy)]

# ---------------------------------------------------------------- values


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
def test_a_policy_is_a_frozen_hashable_value(policy):
    same = dataclasses.replace(policy)
    assert same == policy
    assert hash(same) == hash(policy)
    assert same is not policy
    field = next(iter(dataclasses.fields(policy)), None)
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        setattr(policy, field.name if field else "anything", None)


def test_policies_are_told_apart():
    assert len(set(ALL)) == len(ALL)
    assert policies.dots() != policies.dots_no_batch()
    assert policies.sqrt(levels=2) != policies.sqrt()
    assert policies.full() != policies.none()


def test_the_order_of_names_says_nothing():
    assert policies.names(save=["b", "a", "b"]) == policies.names(save=("a", "b"))
    assert policies.names(save=iter(["a"])) == policies.names(save="a")
    assert policies.sqrt([4, 2]) == policies.sqrt((4, 2))
    assert hash(policies.sqrt([4, 2])) == hash(policies.sqrt((4, 2)))


def test_the_names_that_a_policy_speaks_of():
    assert policies.names(save="a", offload="b").names == {"a", "b"}
    assert (policies.dots() | policies.names(save="a")).names == {"a"}
    assert policies.dots().names == frozenset()


# ---------------------------------------------------------------- contradictions


def test_a_name_cannot_be_both_saved_and_offloaded():
    with pytest.raises(ValueError, match="contradictory policy: 'b' both saved on the device and"):
        policies.names(save=["a", "b"], offload=["b", "c"])
    with pytest.raises(ValueError, match="give each name to save= or to offload=, not to both"):
        operator.or_(policies.names(save="a"), policies.names(offload="a"))
    with pytest.raises(ValueError, match="'a'"):
        operator.or_(policies.names(save="a") | policies.dots(), policies.names(offload="a"))
    # No contradiction: each name has one place.
    both = policies.names(save="a") | policies.names(offload="b")
    assert both.names == {"a", "b"}


loose: Any = policies  # as one without a type checker sees it


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: loose.names(save=[1]), TypeError, r"save= takes names \(str\), got 1"),
        (lambda: loose.offload([None]), TypeError, r"offload= takes names \(str\), got None"),
        (lambda: loose.revolve(0), ValueError, "slots must be at least 1, got 0"),
        (lambda: loose.revolve(2.5), TypeError, "slots must be a whole number of at least 1"),
        (lambda: loose.sqrt(levels=0), ValueError, "levels must be at least 1, got 0"),
        (lambda: loose.sqrt(0), ValueError, "segments must be at least 1, got 0"),
        (lambda: loose.sqrt((2, 0)), ValueError, "segments must be at least 1, got 0"),
        (lambda: loose.sqrt("many"), TypeError, "segments must be a whole number"),
        (
            lambda: operator.or_(policies.dots(), policies.sqrt()),
            TypeError,
            r"unsupported operand .*\|",
        ),
        (lambda: operator.or_(policies.dots(), "full"), TypeError, r"unsupported operand .*\|"),
    ],
)
def test_bad_values_are_told_when_they_are_built(make, error, text):
    with pytest.raises(error, match=text):
        make()


# ---------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("none", NONE),
        ("full", FULL),
        ("dots", policies.dots()),
        ("dots_no_batch", policies.dots_no_batch()),
        ("sqrt", policies.sqrt()),
        ("revolve", policies.revolve(8)),
        ("offload", policies.offload()),
    ],
)
def test_names_of_policies(name, policy):
    assert policies.parse(name) == policy


def test_options_go_with_names():
    assert policies.parse("revolve", slots=3) == policies.revolve(3)
    assert policies.parse("sqrt", segments=4, levels=2) == policies.sqrt(4, levels=2)
    assert policies.parse("names", save=["a"]) == policies.names(save=["a"])
    assert policies.parse("offload", names="a") == policies.offload("a")


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
def test_a_policy_is_parsed_as_itself(policy):
    assert policies.parse(policy) is policy


def test_policies_of_jax_are_wrapped():
    dots = jax.checkpoint_policies.dots_saveable
    assert policies.parse(dots) == policies.from_jax(dots)
    assert policies.from_jax(dots).jax_policy is dots


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError) as error:
        policies.parse("sqr")
    assert str(error.value) == (
        "unknown remat policy 'sqr'; known are 'none', 'full', 'dots', 'dots_no_batch', 'sqrt', "
        "'revolve', 'offload', 'names', 'auto', or pass a policy from jaxmem.policies or a "
        "jaxmem.Plan"
    )


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (("revolve",), {"slot": 3}, "policy 'revolve' has no option 'slot'; it takes slots"),
        (("full",), {"slots": 3}, "policy 'full' has no option 'slots'; it takes no options"),
        ((FULL,), {"slots": 3}, r"options slots go with the name of a policy, and Full\(\) is"),
        ((3,), {}, "remat takes the name of a policy .* got 3 of type int"),
        ((None,), {}, "remat takes the name of a policy .* got None of type NoneType"),
        ((policies.Full,), {}, "remat takes the name of a policy .* of type type"),
    ],
)
def test_what_is_no_policy_is_told(args, options, text):
    with pytest.raises(TypeError, match=text):
        policies.parse(*args, **options)


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
def test_json_there_and_back(policy):
    assert policies.from_json(json.loads(json.dumps(policy.to_json()))) == policy


texts = st.sets(st.text(), max_size=3)


@given(texts, texts)
def test_json_of_any_names(save, offload):
    policy = policies.names(save=save - offload, offload=offload)
    assert policies.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    either = policies.dots() | policy
    assert policies.from_json(json.loads(json.dumps(either.to_json()))) == either


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (3, 'expected an object with the key "policy", got 3'),
        ({}, 'expected an object with the key "policy"'),
        ({"policy": "dotz"}, "policy: unknown 'dotz'; known are 'none', 'auto', 'full', 'dots'"),
        ({"policy": "dots", "extra": 1}, "policy 'dots': .*extra"),
        (
            {"policy": "from_jax", "name": "nowhere"},
            "name: jax.checkpoint_policies has no 'nowhere'",
        ),
        ({"policy": "revolve", "slots": 0}, "slots must be at least 1, got 0"),
        ({"policy": "revolve", "slots": "3"}, "policy 'revolve': slots must be a whole number"),
        ({"policy": "names", "save": ["a"], "offload": ["a"]}, "contradictory policy: 'a'"),
        (
            {"policy": "either", "first": {"policy": "dots"}, "second": {"policy": "sqrt"}},
            "either: Sqrt.* says how to cut a stack, not what a layer keeps",
        ),
        ({"policy": "either", "first": {"policy": "dots"}}, 'expected an object with the key "pol'),
    ],
)
def test_bad_json_says_where(data, text):
    with pytest.raises(ValueError, match=text):
        policies.from_json(data)


def test_code_is_not_json():
    with pytest.raises(ValueError, match="is code, which a plan's JSON cannot hold"):
        policies.from_jax(lambda prim, *_, **__: True).to_json()


# ---------------------------------------------------------------- what jax makes of them


def kept_by(policy: policies.LayerPolicy) -> set[str]:
    """Names of what one layer keeps under a policy, its carry aside."""

    def layer(x, w):
        score = checkpoint_name(jnp.einsum("bij,bjk->bik", x, x), "score")  # a batched product
        mixed = checkpoint_name(jnp.sin(score), "mixed")
        return jnp.cos(checkpoint_name(mixed @ w, "out")), None

    remat = jax.checkpoint(layer, policy=policy.jax_policy, prevent_cse=False)
    w = jax.ShapeDtypeStruct((5, 4, 4), "float32")
    x = jax.ShapeDtypeStruct((2, 4, 4), "float32")
    kept = saved_residuals(lambda w, x: jax.lax.scan(remat, x, w)[0].sum(), w, x)
    return {
        row.name + (" on the host" if row.place == "host" else "")
        for row in kept
        if row.kind == "computed" and row.name != "carry"
    }


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (FULL, set()),
        (policies.dots(), {"score", "out"}),
        (policies.dots_no_batch(), {"out"}),
        (policies.names(save="mixed"), {"mixed"}),
        (policies.names(save=["mixed", "out"]), {"mixed", "out"}),
        (policies.names(offload="mixed"), {"mixed on the host"}),
        (policies.names(save="out", offload="mixed"), {"out", "mixed on the host"}),
        (policies.names(), set()),
        (policies.dots_no_batch() | policies.names(save="mixed"), {"out", "mixed"}),
        (policies.names(save="mixed") | policies.dots_no_batch(), {"out", "mixed"}),
        (policies.dots_no_batch() | policies.names(offload="mixed"), {"out", "mixed on the host"}),
        (policies.names(save="out") | policies.names(save="score"), {"out", "score"}),
        (FULL | policies.dots(), {"score", "out"}),
        (policies.from_jax(jax.checkpoint_policies.dots_saveable), {"score", "out"}),
        (policies.from_jax(lambda prim, *_, **__: prim.name == "dot_general"), {"score", "out"}),
    ],
)
def test_what_is_kept(policy, kept):
    assert kept_by(policy) == kept


def test_jax_gets_its_own_policies():
    """jax tells its policies apart by identity and class in places."""
    own = jax.checkpoint_policies
    assert FULL.jax_policy is own.nothing_saveable
    assert policies.dots().jax_policy is own.dots_saveable
    assert policies.dots_no_batch().jax_policy is own.dots_with_no_batch_dims_saveable
    like = type(own.save_only_these_names("a"))
    assert type(policies.names(save="a").jax_policy) is like


@pytest.mark.parametrize(
    "policy", [p for p in ALL if p not in LAYER], ids=lambda policy: type(policy).__name__
)
def test_stack_policies_say_nothing_of_one_layer(policy):
    assert not hasattr(policy, "jax_policy")


# ---------------------------------------------------------------- of fit


def test_auto_is_a_policy_by_name():
    assert policies.parse("auto") == policies.auto() == policies.Auto()
    assert policies.from_json(json.loads(json.dumps(policies.auto().to_json()))) == policies.auto()
    with pytest.raises(TypeError):
        policies.parse("auto", slots=3)


def test_places_are_sorted_and_met_once():
    keep = policies.Keep((3, 1, 3), offload=(9, 2), bytes=5, layer="ab")
    assert keep == policies.Keep((1, 3), (2, 9), 5, "ab")
    assert policies.from_json(json.loads(json.dumps(keep.to_json()))) == keep
    assert keep.offloads
    assert not policies.Keep((1,)).offloads
    assert str(keep) == "4 values (2 on the host)"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"values": (-1,)}, "values= takes places"),
        ({"values": (1.5,)}, "values= takes places"),
        ({"values": (True,)}, "values= takes places"),
        ({"offload": ("a",)}, "offload= takes places"),
        ({"bytes": -1}, "bytes= takes a whole number"),
        ({"layer": None}, "layer= takes the digest"),
    ],
)
def test_what_are_no_places(fields: Any, text):
    with pytest.raises(TypeError, match=text):
        policies.Keep(**fields)


def test_single_values_are_for_plans_alone():
    with pytest.raises(TypeError, match="jaxmem.use_plan"):
        policies.Keep((1,)).jax_policy  # noqa: B018
