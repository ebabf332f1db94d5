"""Plans for chains: published tables, brute force over every nesting, a machine that runs them."""

import dataclasses
import functools
import heapq
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.solve.chain import ChainPlan, Kept, Option, Recomputed, Stage, solve_chain
from jaxmem.solve.stages import NO_MERGED, extra_seconds, peak_bytes

# ---------------------------------------------------------------- a machine


def run(plan: ChainPlan, stages, crossing=None, merged=NO_MERGED) -> tuple[int, float]:
    """Carries a plan out on arrays that have sizes only.  Returns its peak and its extra seconds.

    `crossing[j]` has the sizes of the arrays that the input of stage j consists of, by name; an
    array that several holders share is there once.
    """
    if crossing is None:
        crossing = [
            {(j, "carry"): stages[j - 1].carry_bytes if j else 0} for j in range(len(stages))
        ]
        crossing.append({(len(stages), "carry"): stages[-1].carry_bytes})
    held: list[dict] = []
    there = set(crossing[0])  # the chain's input
    peak, evaluated, reversed_stages = 0, 0.0, []

    def live(*more: dict, work: int) -> None:
        nonlocal peak
        arrays = {name: size for each in (*held, *more) for name, size in each.items()}
        peak = max(peak, sum(size for name, size in arrays.items() if name not in there) + work)

    def tape(step: Kept) -> dict:
        option = step.among(stages, merged).options[step.option]
        arrays = {(step.stage, "tape"): option.tape_bytes}
        for size, boundary in (
            (option.input_bytes, step.stage),
            (option.output_bytes, step.after),
        ):
            if size:  # all of it; the first stage's input has no size of its own
                assert boundary == 0 or size == sum(crossing[boundary].values())
                arrays[(step.stage, "tape")] -= size
                arrays |= crossing[boundary]
        return arrays

    def sweep(steps, gradient: int) -> None:
        nonlocal evaluated
        for step in steps:
            if isinstance(step, Recomputed):
                held.append(crossing[step.first])
                for j in range(step.first, step.last):
                    work = stages[j].overhead_bytes + gradient
                    live(crossing[j], crossing[j + 1], work=work)
                    evaluated += stages[j].seconds
            else:
                held.append(tape(step))
                live(crossing[step.stage], crossing[step.after], work=gradient)
                evaluated += sum(stage.seconds for stage in stages[step.stage : step.after])
        for step in reversed(steps):
            if isinstance(step, Recomputed):
                sweep(step.inner, stages[step.last - 1].gradient_bytes)
            else:
                stage = step.among(stages, merged)
                option = stage.options[step.option]
                live(work=stage.gradient_bytes + option.work_bytes)
                evaluated += option.seconds
                reversed_stages.extend(reversed(range(step.stage, step.after)))
            held.pop()

    sweep(plan.steps, stages[-1].gradient_bytes)
    assert reversed_stages == list(range(len(stages)))[::-1]
    return peak, evaluated - sum(stage.seconds for stage in stages)


# ---------------------------------------------------------------- published tables


def unit_stage(tape: int) -> Stage:
    """Rotor's unit stage: the tape ā of its sizes has the result in it and the input next to it."""
    return Stage(1.0, 1, (Option(1 + tape, 0.0, input_bytes=1, output_bytes=1),), gradient_bytes=1)


def unequal(stages: list[Stage]) -> list[Stage]:
    """The same chain, with an option at its end that no one would take: the stages differ."""
    useless = Option(10**6, 1.0)
    return [*stages[:-1], dataclasses.replace(stages[-1], options=(*stages[-1].options, useless))]


TABLES = {
    (10, 2): {
        4: 45, 5: 20, 6: 14, 7: 10, 8: 8, 9: 7, 11: 6, 12: 5, 14: 4, 16: 3, 18: 2, 20: 1, 21: 0,
    },
    (10, 4): {6: 45, 7: 20, 8: 15, 9: 13, 10: 11, 11: 9, 13: 8, 16: 7, 41: 0},
    (6, 2): {4: 15, 5: 8, 6: 5, 7: 4, 8: 3, 9: 3, 10: 2, 11: 2, 12: 1, 13: 0},
}  # fmt: skip
CELLS = [(*key, m, extra) for key, row in TABLES.items() for m, extra in row.items()]


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("n", "tape", "memory", "extra"), CELLS)
def test_the_published_tables(n, tape, memory, extra, equal):
    stages = [unit_stage(tape)] * n
    plan = solve_chain(stages if equal else unequal(stages)).plan(memory)
    assert plan is not None
    assert plan.seconds == extra
    assert plan.bytes <= memory
    assert run(plan, stages) == (plan.bytes, plan.seconds)


@pytest.mark.parametrize(("tape", "least"), [(2, 4), (4, 6)])
def test_the_least_memory_of_the_tables(tape, least):
    table = solve_chain([unit_stage(tape)] * 10)
    assert table.frontier()[0] == (least, 45.0)
    assert table.plan(least - 1) is None


@functools.cache
def optimum(n: int, tape: int, memory: int) -> int | None:
    """Extra forward steps of the best schedule of unit stages that there is, persistent or not.

    A shortest path over what is in memory: carries, tapes (with their results), and how many stages
    are still to be reversed.  The chain's input is no more than a carry that stays.
    """
    start = (frozenset[int](), frozenset[int](), n)
    best, queue = {start: 0}, [(0, 0, start)]
    order = itertools.count(1)
    while queue:
        steps, _, state = heapq.heappop(queue)
        carries, tapes, left = state
        if steps > best[state]:
            continue
        if left == 0:
            return steps - n
        held = len(carries) + tape * len(tapes) + 1  # and the gradient
        have = {0, *carries, *tapes}  # results by the stage that made them; 0: the chain's input
        after = []
        if left in tapes and left - 1 in have and held <= memory:
            rest = tapes - {left}
            after.append((0, held, (carries - {left}, rest, left - 1)))
        for stage in range(1, left + 1):
            if stage - 1 not in have:
                continue
            if stage < left and stage not in have:
                kept = carries | {stage}
                after.append((1, held + 1, (kept, tapes, left)))
                after.append((1, held + 1, (kept - {stage - 1}, tapes, left)))
            if stage not in tapes:
                kept = carries - {stage}
                after.append((1, held + tape, (kept, tapes | {stage}, left)))
                after.append((1, held + tape, (kept - {stage - 1}, tapes | {stage}, left)))
        after += [(0, held, (carries - {one}, tapes, left)) for one in carries]
        after += [(0, held, (carries, tapes - {one}, left)) for one in tapes]
        for cost, needs, new in after:
            if needs <= memory and steps + cost < best.get(new, math.inf):
                best[new] = steps + cost
                heapq.heappush(queue, (steps + cost, next(order), new))
    return None


def test_what_persistence_costs():
    table = solve_chain([unit_stage(2)] * 6)
    best = [optimum(6, 2, memory) for memory in range(4, 14)]
    assert best == [15, 7, 5, 3, 3, 2, 2, 1, 1, 0]
    plans = [table.plan(memory) for memory in range(4, 14)]
    assert [plan and plan.seconds for plan in plans] == [15, 8, 5, 4, 3, 3, 2, 2, 1, 0]


# ---------------------------------------------------------------- brute force


@functools.cache
def nestings(first: int, last: int, ways: tuple[Kept, ...]) -> list[tuple]:
    """Every plan for stages first..last-1, each of which, or several, can be kept in these ways."""
    if first == last:
        return [()]
    found = []
    for kept in ways:
        if kept.stage == first and kept.after <= last:
            found += [(kept, *rest) for rest in nestings(kept.after, last, ways)]
    for split in range(first + 1, last):
        for inner in nestings(first, split, ways):
            rests = nestings(split, last, ways)
            found += [(Recomputed(first, split, inner), *rest) for rest in rests]
    return found


def best_of_all(stages, merged=NO_MERGED) -> list[tuple[int, float]]:
    spans = {**{(s, s + 1): stage for s, stage in enumerate(stages)}, **merged}
    ways = tuple(
        Kept(first, option, after - first)
        for (first, after), stage in spans.items()
        for option in range(len(stage.options))
    )
    points = set()
    for steps in nestings(0, len(stages), ways):
        points.add(run(ChainPlan(0, 0.0, steps), stages, merged=merged))
    chosen: list[tuple[int, float]] = []
    for size, seconds in sorted(points):
        if not chosen or seconds < chosen[-1][1]:
            chosen.append((size, seconds))
    return chosen


small = st.integers(0, 5)
whole = st.integers(0, 8).map(float)


@st.composite
def one_stage(draw, before: int, carry: int):
    options = []
    for _ in range(draw(st.integers(1, 2))):
        given, made = (size * draw(st.integers(0, 1)) for size in (before, carry))
        tape = draw(small) + given + made
        options.append(Option(tape, draw(whole), draw(small), given, made))
    return Stage(draw(whole), carry, tuple(options), draw(small), draw(small))


@st.composite
def chains(draw, most=5):
    carries = [0, *draw(st.lists(small, min_size=1, max_size=most))]
    return [draw(one_stage(*pair)) for pair in itertools.pairwise(carries)]


@st.composite
def equal_stages(draw, most=5):
    carry = draw(small)
    return [draw(one_stage(carry, carry))] * draw(st.integers(1, most))


@settings(derandomize=True, max_examples=40)
@given(stages=chains())
def test_no_nesting_of_unequal_stages_does_better(stages):
    table = solve_chain(stages)
    assert table.frontier() == best_of_all(stages)
    for size, _ in table.frontier():
        plan = table.plan(size)
        assert plan is not None
        assert run(plan, stages) == (plan.bytes, plan.seconds)
        assert plan.bytes == peak_bytes(plan.steps, stages)
        assert plan.seconds == extra_seconds(plan.steps, stages)


@settings(derandomize=True, max_examples=40)
@given(stages=equal_stages())
def test_no_nesting_of_equal_stages_does_better(stages):
    table = solve_chain(stages)
    assert table.frontier() == best_of_all(stages)


@settings(derandomize=True, max_examples=60)
@given(stages=chains(most=4), data=st.data())
def test_no_nesting_does_better_where_several_stages_are_one_as_well(stages, data):
    spans = [(s, t) for s, t in itertools.combinations(range(len(stages) + 1), 2) if t - s > 1]
    merged = {}
    for first, after in data.draw(st.lists(st.sampled_from(spans), max_size=3)) if spans else ():
        before, last = stages[first - 1].carry_bytes if first else 0, stages[after - 1]
        drawn = data.draw(one_stage(before, last.carry_bytes))
        merged[first, after] = dataclasses.replace(drawn, gradient_bytes=last.gradient_bytes)
    table = solve_chain(stages, merged=merged)
    assert table.frontier() == best_of_all(stages, merged)
    for size, _ in table.frontier():
        plan = table.plan(size)
        assert plan is not None
        assert run(plan, stages, merged=merged) == (plan.bytes, plan.seconds)


# ---------------------------------------------------------------- what passes through


@settings(derandomize=True, max_examples=40)
@given(stages=chains(), data=st.data())
def test_what_passes_through_is_held_once(stages, data):
    n = len(stages)
    spans = data.draw(
        st.lists(st.tuples(st.integers(1, n), st.integers(1, n), st.integers(1, 5)), max_size=4)
    )
    crossing = [
        {span: span[2] for span in spans if min(span[:2]) <= j <= max(span[:2])}
        for j in range(n + 1)
    ]
    crossing[0] = {}
    sizes = [sum(row.values()) for row in crossing]
    stages = [
        Stage(
            stage.seconds,
            sizes[j + 1],
            tuple(stored(option, stages, j, sizes) for option in stage.options),
        )
        for j, stage in enumerate(stages)
    ]

    def carried(i: int, j: int) -> int:
        return sum(size for name, size in crossing[j].items() if name not in crossing[i])

    table, apart = solve_chain(stages, carried=carried), solve_chain(stages)
    for size, seconds in apart.frontier():
        plan = table.plan(size)
        assert plan is not None
        assert plan.seconds <= seconds
        peak, extra = run(plan, stages, crossing)
        assert peak <= plan.bytes <= size
        assert extra == plan.seconds


def stored(option: Option, stages, j: int, sizes) -> Option:
    """The same option where the stage's input and result have other sizes."""
    given = sizes[j] if option.input_bytes else 0
    made = sizes[j + 1] if option.output_bytes else 0
    own = option.tape_bytes - option.input_bytes - option.output_bytes
    return Option(own + given + made, option.seconds, option.work_bytes, given, made)


def test_when_nothing_passes_through_no_one_has_to_ask():
    stages = [unit_stage(2)] * 9
    table = solve_chain(stages, carried=lambda i, j: stages[j - 1].carry_bytes)
    assert table.frontier() == solve_chain(stages).frontier()


def test_a_skip_connection_is_paid_for_once():
    # An array of 100 goes past all stages; each has a carry of 1 next to it.
    stages = [Stage(1.0, 101, (Option(1000, 0.0),)) for _ in range(6)]
    table = solve_chain(stages, carried=lambda i, j: 1 if i else 101)
    shared, apart = table.plan(1210), solve_chain(stages).plan(1210)
    assert shared is not None
    assert apart is not None
    assert shared.seconds < apart.seconds


# ---------------------------------------------------------------- longer chains

# In multiples of its carry of 2: what a transformer layer can keep.
LAYER = Stage(
    34.0,
    2,
    (
        Option(34, 0.0),
        Option(24, 1.0, work_bytes=10),
        Option(18, 3.0, work_bytes=16),
        Option(10, 9.0, work_bytes=24),
        Option(2, 34.0, work_bytes=32, input_bytes=2),
    ),
    gradient_bytes=2,
    overhead_bytes=4,
)


def uneven(n: int) -> list[Stage]:
    """Stages of many sizes, none of which is a multiple of anything."""
    stages = []
    for j in range(n):
        carry, seconds = 10**6 + 7919 * (j * j % 101), 1e-3 + 1e-5 * (j * 37 % 89)
        tape = carry * (5 + j * 31 % 29)
        options = [
            Option(int(tape * (1 - k / 6) ** 1.5), seconds * k / 6, work_bytes=int(tape * k / 6))
            for k in range(6)
        ]
        stages.append(Stage(seconds, carry, tuple(options), carry, 2 * carry))
    return stages


def test_rounding_never_takes_a_plan_over_its_budget():
    stages = uneven(25)
    table, fine = solve_chain(stages, 200), solve_chain(stages, 2000)
    forward = sum(stage.seconds for stage in stages)
    for (size, seconds), (larger, faster) in itertools.pairwise(table.frontier()):
        assert size < larger
        assert seconds > faster
        plan = table.plan(larger - 1)
        assert plan is not None
        assert (plan.bytes, plan.seconds) == (size, seconds)
        assert run(plan, stages) == (plan.bytes, pytest.approx(plan.seconds))
    least, most = fine.frontier()[0][0], fine.frontier()[-1][0]
    assert table.frontier()[-1] == (most, 0.0)
    for part in range(2, 10):
        coarse, best = (each.plan(least + (most - least) * part // 10) for each in (table, fine))
        assert coarse is not None
        assert best is not None
        assert coarse.seconds <= best.seconds + 0.01 * forward


def test_a_hundred_unequal_stages():
    stages = uneven(100)
    frontier = solve_chain(stages, 200).frontier()
    # From a few layers' worth to everything.
    assert frontier[0][0] < frontier[-1][0] / 20
    assert frontier[-1][1] == 0.0
    assert frontier[0][1] > sum(stage.seconds for stage in stages)


# ---------------------------------------------------------------- edges


def test_one_stage_is_kept():
    table = solve_chain([Stage(1.0, 3, (Option(5, 0.0), Option(2, 0.5, work_bytes=1)))])
    assert table.frontier() == [(5, 0.5), (8, 0.0)]
    assert table.plan(7) == ChainPlan(5, 0.5, (Kept(0, 1),))
    assert table.plan(4) is None


def test_plans_compare_by_value():
    first, second = (solve_chain(uneven(5)).plan(10**9) for _ in range(2))
    assert first == second
    assert len({first, second}) == 1


def test_stages_of_no_size_and_no_time():
    table = solve_chain([Stage(0.0, 0, (Option(0, 0.0),))] * 3)
    assert table.frontier() == [(0, 0.0)]
    assert table.plan(0) == ChainPlan(0, 0.0, (Kept(0, 0), Kept(1, 0), Kept(2, 0)))


def test_chains_that_make_no_sense():
    with pytest.raises(ValueError, match="pass at least one Stage"):
        solve_chain([])
    with pytest.raises(ValueError, match="pass at least one Option"):
        Stage(1.0, 1, ())
