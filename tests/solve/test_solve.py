"""The solvers against published tables, brute force, and a machine that runs their schedules."""

import functools
import itertools
import math
import time

import pytest
from helpers.mixed import mixed_steps
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.plans.plan import Plan
from jaxmem.solve import extra_steps, periodic_bytes, schedule, segment_lengths

# ---------------------------------------------------------------- periodic cuts


@pytest.mark.parametrize(
    ("n", "cost"), [(1, 2), (2, 3), (3, 4), (16, 8), (64, 16), (100, 20), (256, 32), (1000, 64)]
)
def test_one_level_of_unit_layers(n, cost):
    assert periodic_bytes(n, segment_lengths(n), 1, 1) == cost


@pytest.mark.parametrize("n", [16, 64, 100, 256])
def test_equal_sizes_give_the_textbook_square_root(n):
    assert segment_lengths(n) == (math.isqrt(n),)


@pytest.mark.parametrize("ratio", [4, 16])
def test_a_tape_r_times_the_carry_shortens_segments_by_the_root_of_r(ratio):
    (c,) = segment_lengths(1024, residual_bytes=ratio)
    assert c == 32 // math.isqrt(ratio)


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_memory_goes_with_the_root_of_the_length(levels):
    n = 4 ** (levels + 1)
    assert periodic_bytes(n, segment_lengths(n, levels), 1, 1) == (levels + 1) * 4


@pytest.mark.parametrize("prime", [2, 3, 7, 61, 127, 251, 509, 1021])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("tape", [1, 5, 100])
def test_primes_cost_what_their_neighbours_cost(prime, levels, tape):
    def cost(n):
        return periodic_bytes(n, segment_lengths(n, levels, 1, tape), 1, tape)

    assert cost(prime - 1) <= cost(prime) <= cost(prime + 1)


def nested_cuts(n: int, levels: int) -> list[tuple[int, ...]]:
    """Every cut there is: any length at each level."""
    if levels == 0:
        return [()]
    return [(c, *rest) for c in range(1, n + 1) for rest in nested_cuts(c, levels - 1)]


def slowly(n, lengths, carry, tape):
    """Bytes of a cut by walking through it: kept carries of each level, and the widest segment."""
    if not lengths:
        return tape * n
    starts = range(0, n, lengths[0])
    widest = max(min(lengths[0], n - start) for start in starts)
    return carry * len(starts) + slowly(widest, lengths[1:], carry, tape)


@given(
    n=st.integers(1, 14),
    levels=st.integers(1, 3),
    carry=st.integers(0, 9),
    tape=st.integers(1, 9),
)
def test_no_cut_needs_less(n, levels, carry, tape):
    found = segment_lengths(n, levels, carry, tape)
    assert len(found) == levels
    costs = {cut: slowly(n, cut, carry, tape) for cut in nested_cuts(n, levels)}
    assert all(periodic_bytes(n, cut, carry, tape) == cost for cut, cost in costs.items())
    assert costs[found] == min(costs.values())


@given(
    n=st.integers(1, 3000),
    levels=st.integers(1, 4),
    carry=st.integers(1, 99),
    tape=st.integers(1, 99),
)
def test_another_level_never_needs_much_more(n, levels, carry, tape):
    cost = [
        periodic_bytes(n, segment_lengths(n, k, carry, tape), carry, tape)
        for k in (levels, levels + 1)
    ]
    # A level more stores one carry more when there is nothing left to cut.
    assert cost[1] <= cost[0] + carry


def test_no_layers_have_no_cut():
    assert segment_lengths(0, 3) == ()
    assert periodic_bytes(0, (), 7, 7) == 0


def test_long_stacks_are_cut_at_once():
    began = time.perf_counter()
    assert periodic_bytes(10_000, segment_lengths(10_000, 3), 1, 1) == 40
    segment_lengths(99_991, 2, 3, 7)
    assert time.perf_counter() - began < 5


# ---------------------------------------------------------------- revolve

# Griewank & Walther's extra forward steps; rows are lengths, columns numbers of slots.
TABLE = {
    10: {2: 20, 3: 15, 4: 14, 5: 13, 8: 10},
    20: {2: 65, 3: 45, 4: 39, 5: 33, 8: 30, 10: 28, 16: 22},
    32: {2: 140, 3: 93, 4: 75, 5: 68, 8: 54, 10: 52, 16: 46},
    64: {2: 420, 3: 258, 4: 200, 5: 172, 8: 137, 10: 116, 16: 110},
    100: {2: 845, 3: 490, 4: 374, 5: 316, 8: 245, 10: 222, 16: 182},
    1000: {3: 12155, 5: 6284, 10: 3636, 32: 2405},
}
CELLS = [(n, s, extra) for n, row in TABLE.items() for s, extra in row.items()]


@functools.cache
def least_steps(n, slots):
    """The recurrence, as it stands in the paper."""
    if n <= 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(i + least_steps(i, slots) + least_steps(n - i, slots - 1) for i in range(1, n))


def run(n, slots):
    """A machine that executes a schedule and counts.  Returns its layer evaluations."""
    plan = schedule(n, slots)
    store: list[int | None] = [0] + [None] * (len(plan.held[0]) - 1)
    tape, evaluations, reversed_layers = None, 0, []

    def sweep(start, stop, wanted):
        """Evaluate layers start..stop, keep wanted carries on the way and the last one's tape."""
        nonlocal tape, evaluations
        for layer in range(start, stop + 1):
            for slot, position in enumerate(wanted):
                if position == layer:
                    store[slot] = layer
            evaluations += 1
        tape = stop

    sweep(0, n - 1, plan.held[n - 1])
    for layer in range(n - 1, -1, -1):
        if layer < n - 1:
            start = store[plan.restart[layer]]
            assert start is not None
            assert start <= layer, "a restart from a carry behind the layer"
            sweep(start, layer, plan.held[layer])
        for slot, position in enumerate(plan.held[layer]):
            if 0 <= position <= layer:
                assert store[slot] == position, "a carry that the schedule counts on is not held"
        assert store[0] == 0, "the initial state was overwritten"
        assert tape == layer
        reversed_layers.append(layer)
    assert reversed_layers == list(range(n - 1, -1, -1))
    assert len(store) <= slots
    return evaluations


@pytest.mark.parametrize(("n", "slots", "extra"), CELLS)
def test_the_published_table(n, slots, extra):
    assert extra_steps(n, slots) == extra
    assert schedule(n, slots).extra == extra
    assert run(n, slots) == n + extra


def test_the_closed_form_is_the_recurrence():
    for n, slots in itertools.product(range(1, 41), range(1, 12)):
        assert extra_steps(n, slots) == least_steps(n, slots), (n, slots)


def test_small_schedules_run_and_are_optimal():
    for n, slots in itertools.product(range(1, 41), range(1, 12)):
        assert run(n, slots) == n + least_steps(n, slots), (n, slots)


@given(n=st.integers(1, 400), slots=st.integers(1, 60))
def test_any_schedule_runs_at_the_predicted_cost(n, slots):
    assert run(n, slots) == n + extra_steps(n, slots) == n + schedule(n, slots).extra


def test_the_edges():
    assert extra_steps(0, 3) == extra_steps(1, 1) == 0
    assert schedule(0, 3).held == ()
    assert schedule(0, 3).extra == 0
    assert schedule(1, 5).held == ((0,),)
    assert extra_steps(50, 1) == 50 * 49 // 2
    # As many slots as layers: each layer but the last is recomputed for its tape.
    assert extra_steps(50, 50) == extra_steps(50, 1000) == 49


def test_a_slot_more_never_costs_more():
    for n in (2, 7, 61, 64, 1000):
        costs = [extra_steps(n, slots) for slots in range(1, 80)]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("slots", [1, 2, 8, 100])
def test_ten_thousand_layers_take_no_time(slots):
    schedule.cache_clear()
    began = time.perf_counter()
    found = schedule(10_000, slots)
    assert found.extra == extra_steps(10_000, slots)
    assert time.perf_counter() - began < 5
    if slots >= 8:  # with fewer, the run itself takes millions of steps
        assert run(10_000, slots) == 10_000 + Plan.revolve(10_000, slots).extra_forwards()


# ---------------------------------------------------------------- mixed

# Maddison's extra forward steps, in the places of TABLE.
MIXED = {
    10: {2: 16, 3: 9, 4: 7, 5: 5, 8: 2},
    20: {2: 59, 3: 35, 4: 26, 5: 18, 8: 13, 10: 10, 16: 4},
    32: {2: 132, 3: 78, 4: 55, 5: 45, 8: 27, 10: 24, 16: 16},
    64: {2: 409, 3: 233, 4: 165, 5: 131, 8: 85, 10: 62, 16: 51},
    100: {2: 831, 3: 454, 4: 321, 5: 252, 8: 163, 10: 137, 16: 90},
}


@pytest.mark.parametrize(
    ("n", "slots", "extra"), [(n, s, extra) for n, row in MIXED.items() for s, extra in row.items()]
)
def test_the_published_table_of_mixed_schedules(n, slots, extra):
    assert mixed_steps(n, slots) == extra


@functools.cache
def least_mixed_steps(n, slots):
    """All steps, the first n too, by the recurrence as it stands in the paper."""
    if n <= slots + 1:
        return n
    if slots == 1:
        return n * (n + 1) // 2 - 1
    return min(
        1 + least_mixed_steps(n - 1, slots - 1),
        min(
            i + least_mixed_steps(i, slots) + least_mixed_steps(n - i, slots - 1)
            for i in range(2, n)
        ),
    )


def test_mixed_steps_are_the_recurrence():
    for n, slots in itertools.product(range(1, 31), range(1, 12)):
        assert mixed_steps(n, slots) == least_mixed_steps(n, slots) - n, (n, slots)


@given(n=st.integers(0, 100), slots=st.integers(1, 60))
def test_slots_of_tapes_only_help(n, slots):
    found = mixed_steps(n, slots)
    assert found <= extra_steps(n, slots)
    assert mixed_steps(n, slots + 1) <= found <= mixed_steps(n + 1, slots)
    assert (found == 0) == (n <= slots + 1)
