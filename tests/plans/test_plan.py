"""Plans: what the constructors make, what they cost, how they read, JSON and files."""

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem import Plan, policies
from jaxmem.plans.choose import choose, needs_sizes
from jaxmem.solve.periodic import blocks
from jaxmem.solve.problem import Problem

LENGTHS = (0, 1, 2, 3, 7, 16, 61, 64)

# ---------------------------------------------------------------- making one


@pytest.mark.parametrize("n", LENGTHS)
def test_every_constructor_takes_every_length(n):
    plans = [
        Plan.none(n),
        Plan.full(n),
        Plan.full(n, policies.dots(), carries="host"),
        Plan.periodic(n),
        Plan.periodic(n, segments=4),
        Plan.periodic(n, levels=3),
        Plan.periodic(n, segments=[3, 2]),
        Plan.periodic(n, segments=[3, 2], levels=3),
        Plan.revolve(n),
        Plan.revolve(n, slots=1),
    ]
    for plan in plans:
        assert plan.length == n
        assert plan.extra_forwards() >= 0
        assert Plan.from_json(plan.to_json()) == plan
        assert str(plan).startswith(f"Plan of {n} layer")
        assert hash(plan) == hash(dataclasses.replace(plan))


@pytest.mark.parametrize(
    ("plan", "kind", "lengths"),
    [
        (Plan.periodic(64), "periodic", (8,)),
        (Plan.periodic(61), "periodic", (7,)),
        (Plan.periodic(64, segments=4), "periodic", (16,)),
        (Plan.periodic(61, segments=4), "periodic", (16,)),
        (Plan.periodic(64, segments=[4, 4]), "periodic", (16, 4)),
        (Plan.periodic(64, segments=4, levels=2), "periodic", (16, 4)),
        (Plan.periodic(64, levels=2), "periodic", (16, 4)),
        (Plan.periodic(7, segments=1), "periodic", (7,)),
        (Plan.periodic(7, segments=7), "full", ()),
        (Plan.periodic(7, segments=100), "full", ()),
        (Plan.periodic(1), "full", ()),
        (Plan.periodic(0), "none", ()),
        (Plan.cut(9, ()), "none", ()),
        (Plan.cut(9, [1, 1]), "full", ()),
    ],
)
def test_periodic_cuts(plan, kind, lengths):
    assert (plan.kind, plan.lengths) == (kind, lengths)


def test_numbers_of_numpy_are_numbers():
    n: Any = np.int64(64)
    four: Any = np.int32(4)
    assert Plan.periodic(n, four) == Plan.periodic(64, 4)
    assert Plan.revolve(n, four).to_json() == Plan.revolve(64, 4).to_json()


def call(make, *args: Any, **kwargs: Any):
    return functools.partial(make, *args, **kwargs)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (call(Plan.none, -1), ValueError, "the number of layers, must be at least 0, got -1"),
        (call(Plan.none, 1.5), TypeError, "must be a whole number, got 1.5"),
        (call(Plan.none, True), TypeError, "must be a whole number, got True"),
        (call(Plan.revolve, 4, slots=0), ValueError, "slots must be at least 1, got 0"),
        (call(Plan.revolve, 4, slots="8"), TypeError, "slots must be a whole number of at least 1"),
        (call(Plan.periodic, 4, levels=0), ValueError, "levels must be at least 1, got 0"),
        (call(Plan.periodic, 4, segments=0), ValueError, "segments must be at least 1, got 0"),
        (
            call(Plan.periodic, 4, segments=[2, -1]),
            ValueError,
            "segments must be at least 1, got -1",
        ),
        (call(Plan.periodic, 9, segments=[]), ValueError, "segments=() holds no number; pass None"),
        (
            call(Plan.periodic, 9, segments=[3, 2, 2], levels=2),
            ValueError,
            "segments=(3, 2, 2) gives numbers for 3 levels, but levels=2",
        ),
        (call(Plan, 4, "wild"), ValueError, "bad plan: kind: expected one of none, full"),
        (
            call(Plan, 4, "periodic"),
            ValueError,
            "bad plan: lengths: a periodic plan needs at least",
        ),
        (
            call(Plan, 4, "periodic", (5,)),
            ValueError,
            "bad plan: lengths[0]: 5 is longer than the 4 layers that it cuts",
        ),
        (
            call(Plan, 9, "periodic", (3, 4)),
            ValueError,
            "bad plan: lengths[1]: 4 is longer than the 3 layers that it cuts",
        ),
        (call(Plan, 4, "none", (2,)), ValueError, "lengths: a plan of kind 'none' has none"),
        (call(Plan, 4, "none", slots=3), ValueError, "slots: a plan of kind 'none' has none"),
        (call(Plan, 4, "revolve"), ValueError, "slots: expected a whole number of at least 1"),
        (
            call(Plan, 4, "none", layer=policies.dots()),
            ValueError,
            "layer: only a plan of kind 'full' has one",
        ),
        (
            call(Plan, 4, "revolve", slots=2, carries="host"),
            ValueError,
            "carries: only a plan of kind 'full' can keep them elsewhere",
        ),
        (
            call(Plan.full, 4, policies.sqrt()),
            ValueError,
            "bad plan: layer: expected a policy for one layer (full, dots, names",
        ),
        (call(Plan.full, 4, carries="disk"), ValueError, "carries: expected one of device, host"),
    ],
)
def test_bad_numbers_are_told(make, error, text):
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)


def test_blocks_cover_the_stack():
    assert blocks(61, 8) == [(7, 8), (1, 5)]
    assert blocks(64, 8) == [(8, 8)]
    assert blocks(5, 8) == [(1, 5)]
    assert blocks(0, 8) == []


# ---------------------------------------------------------------- what it costs


def walk(n, lengths):
    """Evaluations of a periodic plan, by walking through it layer by layer.

    A first forward pass over everything; then each segment, last first, is run
    again for its tapes, or for the carries inside it if it is cut again: its
    last part is not run for carries, since nothing behind it needs one.
    """

    def reverse(start, stop, cuts):
        if not cuts:
            return stop - start
        starts = list(range(start, stop, cuts[0]))
        again = starts[-1] - start
        return again + sum(
            reverse(first, min(first + cuts[0], stop), cuts[1:]) for first in reversed(starts)
        )

    starts = range(0, n, lengths[0])
    return n + sum(
        reverse(start, min(start + lengths[0], n), lengths[1:]) for start in reversed(starts)
    )


@st.composite
def cuts(draw):
    n = draw(st.integers(1, 300))
    lengths, outer = [], n
    for _ in range(draw(st.integers(1, 4))):
        outer = draw(st.integers(1, outer))
        lengths.append(outer)
    return n, tuple(lengths)


@given(cuts())
def test_extra_forwards_of_any_cut(cut):
    n, lengths = cut
    assert Plan.cut(n, lengths).extra_forwards() == walk(n, lengths) - n


@pytest.mark.parametrize("n", LENGTHS)
def test_extra_forwards_of_the_simple_plans(n):
    assert Plan.none(n).extra_forwards() == 0
    assert Plan.full(n).extra_forwards() == n
    assert Plan.periodic(n).extra_forwards() == n
    assert Plan.revolve(n, slots=1).extra_forwards() == n * (n - 1) // 2
    assert Plan.revolve(n, slots=max(n, 1)).extra_forwards() == max(n - 1, 0)


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("n", LENGTHS)
def test_each_level_costs_at_most_one_more_forward(n, levels):
    assert Plan.periodic(n, levels=levels).extra_forwards() <= levels * n


MAKERS = {
    "none": Plan.none,
    "full": Plan.full,
    "periodic": Plan.periodic,
    "two levels": lambda n: Plan.periodic(n, levels=2),
    "three levels": lambda n: Plan.periodic(n, levels=3),
    "four segments": lambda n: Plan.periodic(n, segments=4),
    "revolve": Plan.revolve,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("prime", [7, 13, 61, 127, 251])
def test_primes_cost_what_their_neighbours_cost(make, prime):
    below, here, above = (make(n).bytes(1, 1) for n in (prime - 1, prime, prime + 1))
    assert below <= here <= above
    below, here, above = (make(n).extra_forwards() for n in (prime - 1, prime, prime + 1))
    # Recomputation depends on where the cuts fall, so that it is not quite monotone.
    assert min(below, above) * 0.9 - 2 <= here <= max(below, above) * 1.1 + 2


def test_bytes_are_carries_and_tapes():
    assert Plan.none(64).bytes(2, 10) == 640
    assert Plan.full(64).bytes(2, 10) == 2 * 64 + 10
    assert Plan.full(64, carries="host").bytes(2, 10) == 10
    assert Plan.periodic(64, segments=8).bytes(2, 10) == 2 * 8 + 8 * 10
    assert Plan.periodic(64, segments=[4, 4]).bytes(2, 10) == 2 * (4 + 4) + 4 * 10
    assert Plan.revolve(64, slots=8).bytes(2, 10) == 2 * 8 + 10
    assert Plan.revolve(3, slots=8).bytes(2, 10) == 2 * 3 + 10
    for plan in (Plan.none(0), Plan.periodic(0), Plan.revolve(0)):
        assert plan.bytes(2, 10) == 0


# ---------------------------------------------------------------- JSON

names = st.lists(st.text(min_size=1), max_size=3)
layers = st.one_of(
    st.builds(policies.full),
    st.builds(policies.dots),
    st.builds(policies.dots_no_batch),
    st.builds(lambda save: policies.names(save=save), names),
    st.builds(lambda save: policies.dots_no_batch() | policies.names(offload=save), names),
    st.just(policies.from_jax(jax.checkpoint_policies.everything_saveable)),
)
plans = st.one_of(
    st.builds(Plan.none, st.integers(0, 10**6)),
    st.builds(Plan.full, st.integers(0, 10**6), layers, st.sampled_from(["device", "host"])),
    cuts().map(lambda cut: Plan.cut(*cut)),
    st.builds(Plan.revolve, st.integers(0, 500), st.integers(1, 600)),
)


@given(plans)
def test_json_there_and_back(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.extra_forwards() == plan.extra_forwards()
    json.loads(plan.to_json())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["jaxmem_plan", "length", "kind", "lengths", "slots", "layer", "carries"]
                )
                | st.text(),
                inner,
                max_size=6,
            )
        ),
    )
)
def test_any_other_json_is_refused_with_a_reason(data):
    if isinstance(data, dict):
        data = {"jaxmem_plan": 1, **data}
    try:
        plan = Plan.from_json(json.dumps(data))
    except ValueError as error:
        message = str(error)
    else:
        message = "" if Plan.from_json(plan.to_json()) == plan else "changed on its way"
    assert not message or message.startswith("bad plan: ")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "not JSON at line 1 column 1"),
        ('{"jaxmem_plan": 1,\n oops}', "not JSON at line 2 column 2"),
        ("[1]", "expected an object, got [1]"),
        ("{}", "jaxmem_plan: expected 1, the version"),
        ('{"jaxmem_plan": 2}', "jaxmem_plan: expected 1, the version"),
        ('{"jaxmem_plan": 1, "length": 3}', '"length" and "kind" are required'),
        ('{"jaxmem_plan": 1, "length": 3, "kind": "none", "x": 1}', "x: unknown key; known are"),
        ('{"jaxmem_plan": 1, "length": "3", "kind": "none"}', "length: expected a whole number"),
        ('{"jaxmem_plan": 1, "length": true, "kind": "none"}', "length: expected a whole number"),
        ('{"jaxmem_plan": 1, "length": 3, "kind": "sqrt"}', "kind: expected one of none, full"),
        ('{"jaxmem_plan": 1, "length": 3, "kind": ["none"]}', "kind: expected one of none, full"),
        (
            '{"jaxmem_plan": 1, "length": 3, "kind": "periodic", "lengths": 3}',
            "lengths: expected a list of whole numbers, got 3",
        ),
        (
            '{"jaxmem_plan": 1, "length": 9, "kind": "periodic", "lengths": [3, "2"]}',
            "lengths[1]: expected a whole number of at least 1, got '2'",
        ),
        (
            '{"jaxmem_plan": 1, "length": 3, "kind": "revolve", "slots": 0}',
            "slots: expected a whole number of at least 1, got 0",
        ),
        (
            '{"jaxmem_plan": 1, "length": 3, "kind": "full", "layer": "dots"}',
            "layer: expected an object with the key",
        ),
        (
            '{"jaxmem_plan": 1, "length": 3, "kind": "full", "layer": {"policy": "dotz"}}',
            "layer: policy: unknown 'dotz'; known are",
        ),
        (
            '{"jaxmem_plan": 1, "length": 3, "kind": "full", "layer": {"policy": "sqrt"}}',
            "layer: expected a policy for one layer",
        ),
        (
            '{"jaxmem_plan": 1, "length": 3, "kind": "full", "layer": {"policy": "dots", "b": 1}}',
            "layer: policy 'dots':",
        ),
    ],
)
def test_bad_json_says_where(text, where):
    with pytest.raises(ValueError) as error:
        Plan.from_json(text)
    assert str(error.value).startswith(f"bad plan: {where}")


def test_code_cannot_be_json():
    plan = Plan.full(3, policies.from_jax(lambda prim, *_, **__: False))
    with pytest.raises(ValueError, match="is code, which a plan's JSON cannot hold"):
        plan.to_json()


# ---------------------------------------------------------------- files


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    for plan in (Plan.revolve(64, slots=4), Plan.periodic(61)):
        plan.save(path)
        assert Plan.load(str(path)) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    Plan.none(3).save(path)
    with pytest.raises(ValueError, match="is code"):
        Plan.full(3, policies.from_jax(lambda prim, *_, **__: False)).save(path)

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        Plan.none(4).save(path)
    assert Plan.load(path) == Plan.none(3)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_loading_what_is_no_plan_names_the_file(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{"jaxmem_plan": 1, "length": -1, "kind": "none"}')
    with pytest.raises(ValueError, match=r"broken\.json: bad plan: length: expected"):
        Plan.load(path)


# ---------------------------------------------------------------- how it reads


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan.none(0), "Plan of 0 layers: everything kept, 0 extra forward evaluations"),
        (
            Plan.none(3),
            "Plan of 3 layers: everything kept, 0 extra forward evaluations\n"
            "  ===\n"
            "  = everything kept",
        ),
        (
            Plan.full(1),
            "Plan of 1 layer: carries kept, 1 extra forward evaluation\n  |\n  | carry kept",
        ),
        (
            Plan.full(3, policies.dots(), carries="host"),
            "Plan of 3 layers: carries kept on the host and Dots(batch=True), "
            "3 extra forward evaluations\n"
            "  ^^^\n"
            "  ^ carry kept on the host",
        ),
        (
            Plan.periodic(7, segments=3),
            "Plan of 7 layers: 2 segments of 3 and one of 1, 7 extra forward evaluations\n"
            "  |..|..|\n"
            "  | carry kept   . recomputed",
        ),
        (
            Plan.periodic(16, segments=[2, 2]),
            "Plan of 16 layers: 2 segments of 8, each in 2 segments of 4, "
            "24 extra forward evaluations\n"
            "  |...:...|...:...\n"
            "  | carry kept   : carry kept while its segment is reversed   . recomputed",
        ),
        (
            Plan.revolve(10, slots=3),
            "Plan of 10 layers: 3 carries, optimal schedule, 15 extra forward evaluations\n"
            "  |...|..|..\n"
            "  | carry kept   . recomputed",
        ),
    ],
)
def test_drawings(plan, text):
    assert str(plan) == text


def test_a_long_drawing_is_cut():
    lines = str(Plan.periodic(1000)).splitlines()
    assert lines[1].endswith(" … 936 more")
    assert len(lines[1]) < 100


# ---------------------------------------------------------------- from a policy


@pytest.mark.parametrize("n", LENGTHS)
def test_each_policy_means_a_plan(n):
    problem = Problem(n, carry_bytes=1, residual_bytes=1)
    dots = policies.dots()
    assert choose(policies.none(), problem) == Plan.none(n)
    assert choose(policies.full(), problem) == Plan.full(n)
    assert choose(dots, problem) == Plan.full(n, dots)
    assert choose(policies.names(save="z"), problem) == Plan.full(n, policies.names(save="z"))
    assert choose(policies.revolve(3), problem) == Plan.revolve(n, 3)
    assert choose(policies.sqrt(segments=3), problem) == Plan.periodic(n, 3)
    assert choose(policies.sqrt((3, 2)), problem) == Plan.periodic(n, (3, 2))
    assert choose(policies.offload(), problem) == Plan.full(n, carries="host")
    assert choose(policies.offload("z"), problem) == Plan.full(
        n, policies.names(offload="z"), carries="host"
    )
    assert choose(Plan.revolve(n, 2), problem) == Plan.revolve(n, 2)


def test_sqrt_of_equal_sizes_is_the_textbook():
    assert choose(policies.sqrt(), Problem(64)) == Plan.periodic(64)
    assert choose(policies.sqrt(levels=2), Problem(1000)) == Plan.periodic(1000, levels=2)


def test_sqrt_with_a_large_tape_is_full():
    assert choose(policies.sqrt(), Problem(64, carry_bytes=1, residual_bytes=1000)) == Plan.full(64)


@given(
    n=st.integers(0, 400),
    carry=st.integers(0, 50),
    tape=st.integers(1, 50),
    levels=st.integers(1, 3),
)
def test_sqrt_never_needs_more_than_full_or_none(n, carry, tape, levels):
    problem = Problem(n, carry_bytes=carry, residual_bytes=tape)
    needed = choose(policies.sqrt(levels=levels), problem).bytes(carry, tape)
    assert needed <= Plan.full(n).bytes(carry, tape)
    assert needed <= Plan.none(n).bytes(carry, tape)
    fewer = choose(policies.sqrt(levels=max(levels - 1, 1)), problem).bytes(carry, tape)
    assert needed <= fewer


@given(n=st.integers(1, 60), carry=st.integers(1, 20), tape=st.integers(1, 20))
def test_sqrt_is_the_best_single_cut(n, carry, tape):
    needed = choose(policies.sqrt(), Problem(n, carry, tape)).bytes(carry, tape)
    every = [carry * -(-n // c) + tape * c for c in range(1, n + 1)]
    assert needed == min([tape * n, *every])


def test_a_plan_for_another_length_is_refused():
    with pytest.raises(ValueError, match="a plan for 12 layers cannot be used on a stack of 24"):
        choose(Plan.full(12), Problem(24))


def test_what_is_no_policy_is_refused():
    with pytest.raises(TypeError, match="no plan can be made from 'sqrt'"):
        choose("sqrt", Problem(24))  # pyright: ignore[reportArgumentType]


def test_only_sqrt_looks_at_sizes():
    assert needs_sizes(policies.sqrt())
    assert not needs_sizes(policies.sqrt(segments=4))
    assert not any(map(needs_sizes, [policies.full(), policies.revolve(), Plan.periodic(4)]))


# ---------------------------------------------------------------- single values kept

KEEP = policies.Keep((3, 1), bytes=10, layer="0123")
LESS = policies.Keep((1,), offload=(7,), bytes=4, layer="0123")


def test_runs_that_keep_the_same_are_one():
    plan = Plan.keep([(2, KEEP), (3, KEEP), (0, LESS), (1, None), (2, None)])
    assert plan.runs == ((5, KEEP), (3, None))
    assert (plan.length, plan.kind) == (8, "keep")
    assert Plan.keep([(2, None), (3, None)]) == Plan.none(5)
    assert Plan.keep([]) == Plan.none(0)


def test_what_single_values_cost():
    plan = Plan.keep([(2, LESS), (5, KEEP), (1, None)])
    assert plan.extra_forwards() == 7
    assert plan.bytes(carry_bytes=100, residual_bytes=30) == 2 * 4 + 5 * 10 + 30
    cut = Plan.cut(12, (3,), KEEP)
    assert cut.bytes(carry_bytes=100, residual_bytes=30) == 4 * 100 + 3 * 10
    assert Plan.cut(12, (3,)).bytes(carry_bytes=100, residual_bytes=30) == 4 * 100 + 3 * 30


def test_how_single_values_read():
    assert str(Plan.keep([(2, LESS), (5, KEEP), (1, None)])) == (
        "Plan of 8 layers: 2 layers keep 2 values (1 on the host) each, then 5 layers keep 2 "
        "values each, then 1 layer keeps everything, 7 layers are recomputed in part\n"
        "  +++++++=\n"
        "  = everything kept   + some values kept, the others recomputed"
    )
    assert "whose layers keep 2 values each" in str(Plan.cut(12, (3,), KEEP))


RUNS = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.none()
        | st.builds(
            policies.Keep,
            st.lists(st.integers(0, 50)).map(tuple),
            st.lists(st.integers(51, 60)).map(tuple),
            st.integers(0, 10**12),
            st.text(max_size=4),
        ),
    )
)


@given(RUNS)
@settings(derandomize=True, max_examples=50)
def test_runs_survive_json(runs):
    plan = Plan.keep(runs)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert plan.length == sum(count for count, _ in runs)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"runs": []}, "runs"),
        ({"runs": [[3, None]]}, "they are for 3 layers, and the plan for 4"),
        ({"runs": [[0, None], [4, None]]}, "expected (layers, what they keep)"),
        ({"runs": [[4]]}, "runs[0]"),
        ({"runs": [4]}, "runs[0]"),
        ({"runs": "four"}, "runs[0]"),
        ({"runs": [[4, {"policy": "dots"}]]}, "expected (layers, what they keep)"),
        ({"runs": [[4, {"policy": "keep", "values": [-1]}]]}, "whole numbers from 0 on, got -1"),
        ({"runs": [[4, {"policy": "keep", "values": [True]}]]}, "got True"),
        ({"runs": [[4, {"policy": "keep", "bytes": []}]]}, "bytes="),
        ({"runs": [[4, {"policy": "keep", "layer": 3}]]}, "layer="),
        ({"kind": "none"}, "runs"),
        ({"slots": 3}, "slots"),
        ({"lengths": [2]}, "lengths"),
    ],
)
def test_bad_runs_are_named(change, text):
    data = json.loads(Plan.keep([(4, KEEP)]).to_json()) | change
    with pytest.raises(ValueError, match="bad plan") as caught:
        Plan.from_json(json.dumps(data))
    assert text in str(caught.value)
