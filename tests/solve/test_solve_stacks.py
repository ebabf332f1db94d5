"""Plans of a stack, of several together, fronts of them, and the search on a front.

Pure: numbers in, numbers out.  What is listed is held against sums of its own and against all
plans of small stacks.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.solve.periodic import evaluations
from jaxmem.solve.revolve import extra_steps
from jaxmem.solve.search import search
from jaxmem.solve.stacks import Candidate, Choice, candidates, pareto
from jaxmem.solve.steps import StepCandidate, pareto_front, thinned_front

MANY = settings(derandomize=True, max_examples=100)

# ---------------------------------------------------------------- one stack


@st.composite
def choice_lists(draw: st.DrawFn) -> list[Choice]:
    """Everything kept, and options that keep less and cost more."""
    steps = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=3))
    choices = [Choice(100, 0.0, draw(st.integers(0, 50)))]
    for fewer, seconds in steps:
        last = choices[-1]
        if last.bytes <= fewer:
            break
        work = draw(st.integers(0, 150))
        choices.append(Choice(last.bytes - fewer, last.seconds + seconds, work))
    return choices


def beaten(one: Candidate | StepCandidate, others: Sequence[Candidate | StepCandidate]) -> bool:
    return any(
        other.bytes <= one.bytes
        and other.seconds <= one.seconds
        and (other.bytes, other.seconds) != (one.bytes, one.seconds)
        for other in others
    )


@given(st.integers(1, 40), st.integers(1, 30), choice_lists())
@MANY
def test_candidates_are_whole_plans_that_no_other_beats(
    length: int, carry: int, choices: list[Choice]
) -> None:
    found = candidates(length, carry, 3.0, choices)
    assert found
    assert [c.bytes for c in found] == sorted((c.bytes for c in found), reverse=True)
    assert not any(beaten(c, found) for c in found)
    for c in found:
        assert c.kept_bytes <= c.bytes
        if c.kind == "keep":
            assert sum(count for count, _ in c.runs) == length
            assert c.kept_bytes == sum(n * choices[k].bytes for n, k in c.runs)
            assert c.seconds == pytest.approx(sum(n * choices[k].seconds for n, k in c.runs))
            assert c.bytes >= c.kept_bytes
        elif c.kind == "periodic":
            own = length * choices[c.choice].seconds
            assert c.seconds == pytest.approx(3.0 * evaluations(length, c.lengths) + own)
            assert all(b < a for a, b in itertools.pairwise((length, *c.lengths)))
        else:
            assert c.seconds == pytest.approx(3.0 * extra_steps(length, c.slots))
            assert c.slots < length


@given(st.integers(2, 14), choice_lists())
@MANY
def test_no_two_runs_are_better_than_those_listed(length: int, choices: list[Choice]) -> None:
    """Of plans with up to two runs whose first keeps less, every one is matched or beaten."""
    found = candidates(length, 10**6, 1e6, choices)  # carries that nobody would keep
    alone = max(c.work_bytes for c in choices)

    def work(count: int, choice: Choice) -> int:
        return choice.work_bytes if count > 1 else alone

    for first, second in itertools.combinations_with_replacement(range(len(choices)), 2):
        low, high = choices[second], choices[first]  # the later of the list keeps less
        for count in range(1, length):
            others = length - count
            kept = count * low.bytes + others * high.bytes
            size = max(kept + work(others, high), count * low.bytes + work(count, low))
            seconds = count * low.seconds + others * high.seconds
            if low.bytes == high.bytes and low != high:
                continue
            if low == high:
                size = kept + work(length, low)
            assert any(c.bytes <= size and c.seconds <= seconds + 1e-9 for c in found)


def test_the_fastest_keeps_all_and_the_least_is_less_than_one_carry_a_layer() -> None:
    found = candidates(64, 10, 1.0, [Choice(100, 0.0), Choice(10, 1.0, work_bytes=100)])
    assert found[0].seconds == 0
    assert found[0].bytes == 6400
    assert found[-1].bytes < 64 * 10
    assert any(c.kind == "periodic" for c in found)


def test_copies_for_a_loop_are_there_in_loops_over_tapes() -> None:
    """Not where one layer at a time is recomputed, and reversed in the same round."""

    def bytes_by_plan(loop: int) -> dict[Any, int]:
        choices = [Choice(100, 0.0, 10, loop), Choice(10, 1.0, 20)]
        found = candidates(8, 1, 1.0, choices)
        return {(c.runs, c.lengths, c.choice, c.slots): c.bytes for c in found}

    without, copied = bytes_by_plan(0), bytes_by_plan(7)
    everything = (((8, 0),), (), 0, 0)
    assert copied[everything] == without[everything] + 7
    revolve = [plan for plan in copied if plan[-1]]
    assert revolve
    assert all(copied[plan] == without[plan] for plan in revolve)


@pytest.mark.parametrize("length", [1, 2, 3, 61, 64, 1000])
def test_lengths(length: int) -> None:
    found = candidates(length, 1, 1.0, [Choice(8, 0.0), Choice(1, 1.0, work_bytes=8)])
    assert found[0].runs == ((length, 0),)
    sizes = [c.bytes for c in found]
    assert sizes == sorted(set(sizes), reverse=True)


def test_no_layers_no_plans() -> None:
    assert candidates(0, 1, 1.0, [Choice(1, 0.0)]) == ()
    with pytest.raises(ValueError, match="at least one choice"):
        candidates(3, 1, 1.0, [])


@given(st.lists(st.builds(Candidate, st.integers(0, 9), st.integers(0, 9).map(float))))
@MANY
def test_pareto(found: list[Candidate]) -> None:
    best = pareto(found)
    assert not any(beaten(one, found) for one in best)
    for one in found:
        assert any(b.bytes <= one.bytes and b.seconds <= one.seconds for b in best)


def test_gradients_that_come_with_the_loops_are_not_there_before() -> None:
    """Three layers in a loop, behind them one that keeps everything and is reversed first."""
    choices = [Choice(100, 0.0, 10), Choice(10, 5.0, 20)]

    def bytes_of(later: int) -> int:
        found = candidates(4, 10**6, 1e6, choices, later_bytes=later)
        (tail,) = (c for c in found if c.runs == ((3, 1), (1, 0)))
        return tail.bytes

    assert [bytes_of(later) for later in (0, 50, 90)] == [130, 80, 50]


def test_what_the_loss_needs_counts_against_what_is_kept() -> None:
    choices = [Choice(100, 0.0), Choice(1, 1.0, work_bytes=100)]

    def least(turn: int) -> Candidate:
        found = candidates(8, 10**6, 1e6, choices, turn_bytes=turn)
        return min(found, key=lambda one: max(one.bytes, one.kept_bytes + turn))

    # All that the last layer keeps is there anyway while it is reversed, but not before that.
    assert least(0).kept_bytes == 107
    assert least(100).runs == ((8, 1),)
    assert least(100).kept_bytes == 8


# ---------------------------------------------------------------- several stacks

SMALL = st.lists(
    st.builds(
        lambda size, kept, seconds: Candidate(
            bytes=size + kept, seconds=float(seconds), kept_bytes=kept
        ),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=4,
).map(pareto)


def peak(picked: Sequence[Candidate]) -> int:
    """the peak: a stack is reversed with what those before it keep."""
    before = itertools.accumulate((c.kept_bytes for c in picked), initial=0)
    return max(kept + c.bytes for kept, c in zip(before, picked, strict=False))


@given(st.lists(SMALL, min_size=1, max_size=4))
@MANY
def test_together_finds_what_listing_all_combinations_finds(
    stacks: list[tuple[Candidate, ...]],
) -> None:
    all_of_them = [
        StepCandidate(peak(picked), sum(c.seconds for c in picked), ())
        for picked in itertools.product(*stacks)
    ]
    best = {(r.bytes, r.seconds) for r in all_of_them if not beaten(r, all_of_them)}
    found = pareto_front(stacks)
    assert {(r.bytes, r.seconds) for r in found if not beaten(r, found)} == best
    for candidate in found:
        picked = [stack[pick] for stack, pick in zip(stacks, candidate.picks, strict=True)]
        assert candidate.bytes == peak(picked)
        assert candidate.seconds == pytest.approx(sum(c.seconds for c in picked))
        assert candidate.kept_bytes == sum(c.kept_bytes for c in picked)


def test_a_stack_that_comes_first_is_live_while_the_next_is_reversed() -> None:
    first = (Candidate(bytes=10, seconds=0.0, kept_bytes=8),)
    second = (Candidate(bytes=5, seconds=0.0, kept_bytes=5),)
    assert pareto_front([first, second])[0].bytes == 13
    assert pareto_front([second, first])[0].bytes == 15


# ---------------------------------------------------------------- fronts


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=200, unique=True), st.integers(0, 10**6)
)
@MANY
def test_a_front_has_both_ends_and_steps_that_are_worth_it(sizes: list[int], others: int) -> None:
    sizes = sorted(sizes, reverse=True)
    candidates = [StepCandidate(size, float(k), (k,)) for k, size in enumerate(sizes)]
    found = thinned_front(candidates, others)
    assert len(found) <= 63
    assert found[0] == candidates[0]
    assert found[-1].bytes == candidates[-1].bytes or len(found) == 1
    assert list(found) == sorted(found, key=lambda r: r.seconds)
    steps = [(a.bytes + others) / (b.bytes + others) for a, b in itertools.pairwise(found[:-1])]
    assert all(step >= math.exp(0.0039) for step in steps) or len(candidates) <= 2


def test_a_front_keeps_sharp_corners() -> None:
    """A plan at which the price of a byte jumps is what most budgets want."""
    candidates = [StepCandidate(10_000 - k, k * 1e-3, (k,)) for k in range(500)]
    corner = StepCandidate(5_000, 1.0, (500,))
    candidates += [
        corner,
        *(StepCandidate(4_999 - 5 * k, 1 + 100.0 * (k + 1), (501 + k,)) for k in range(500)),
    ]
    assert corner in thinned_front(candidates, 0)


# ---------------------------------------------------------------- the search


@st.composite
def fronts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """What candidates need in truth, falling, and what was predicted."""
    steps = draw(st.lists(st.integers(1, 50), min_size=1, max_size=60))
    truth = list(itertools.accumulate(reversed(steps), initial=draw(st.integers(1, 500))))[::-1]
    off = draw(st.integers(-100, 100))
    predicted = [size + off + draw(st.integers(-5, 5)) for size in truth]
    return sorted(predicted, reverse=True), truth


@given(fronts(), st.data(), st.integers(1, 8))
@MANY
def test_search(given_front: tuple[list[int], list[int]], data: st.DataObject, most: int) -> None:
    predicted, truth = given_front
    budget = data.draw(st.integers(truth[-1] - 10, truth[0] + 10))
    asked: list[int] = []

    def compiled(candidate: int) -> int:
        asked.append(candidate)
        return truth[candidate]

    found = search(predicted, budget, compiled, most)
    assert len(asked) == len(set(asked)) <= most
    assert found.seen == {candidate: truth[candidate] for candidate in asked}
    if found.candidate is None:
        assert truth[-1] > budget or most < 2
        # That nothing fits, only the least of all can say; a single question goes by predictions.
        assert len(truth) - 1 in asked or most < 2
    else:
        assert truth[found.candidate] <= budget
        if found.closed:
            assert found.candidate == 0 or truth[found.candidate - 1] > budget
    if truth[-1] <= budget and most > 1:
        assert found.candidate is not None


@given(fronts())
@MANY
def test_six_compiles_answer_as_one_in_any_order(
    given_front: tuple[list[int], list[int]],
) -> None:
    """Where searches end closed, larger budgets never get a slower candidate."""
    predicted, truth = given_front
    budgets = sorted({truth[0], truth[-1], *(size + 1 for size in truth[::7])})
    found = [search(predicted, budget, truth.__getitem__) for budget in budgets]
    assert all(one.candidate is not None for one in found)
    closed = [one.candidate for one in found if one.closed and one.candidate is not None]
    assert closed == sorted(closed, reverse=True)


@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_where_all_fits_nothing_is_recomputed_however_few_the_compiles(most: int) -> None:
    truth = [130 - k for k in range(60)]
    found = search(truth, 10**6, truth.__getitem__, most)
    assert found.candidate == 0
    assert found.seen == {0: 130}
    assert found.closed


def test_what_recomputes_nothing_is_asked_for_before_nothing_is_said_to_fit() -> None:
    """Where loops are small they need more than the program without them."""
    truth = [90, *[300] * 7]
    assert search([200, 109, 108, 107, 106, 105, 104, 103], 100, truth.__getitem__).candidate == 0


def test_a_faster_candidate_that_was_predicted_to_need_hardly_more_is_tried() -> None:
    """A front that was seen: segments recomputed whole need more than was predicted."""
    predicted = [165, 149, 133, 129, 117, 113, 101, 97, 85, 81, 77, 73, 69]
    truth = [164, 148, 132, 128, 116, 112, 100, 96, 84, 88, 84, 80, 76]
    found = search(predicted, 84, truth.__getitem__)
    assert (found.candidate, found.closed) == (8, True)
    assert list(found.seen) == [9, 10, 8, 7]
    # What is predicted to need much more is not, nor is it when no more may be asked.
    assert search(predicted, 81, truth.__getitem__).candidate == 11
    assert search(predicted, 84, truth.__getitem__, 2).candidate == 12


def test_everything_kept_is_asked_for_if_it_may_fit() -> None:
    """It is less well predicted than plans that recompute something."""
    predicted, truth = [430, 400, 350, 300], [410, 425, 360, 300]
    assert search(predicted, 420, truth.__getitem__).candidate == 0
    assert list(search(predicted, 390, truth.__getitem__).seen) == [2, 1]


def test_the_least_is_looked_for_among_those_predicted_to_be_near_it():
    predicted, truth = [200, 130, 91, 90, 89], [200, 120, 84, 90, 95]
    found = search(predicted, 50, truth.__getitem__)
    assert found.candidate is None
    assert min(found.seen.values()) == 84
    assert search(predicted, 85, truth.__getitem__).candidate == 2
    assert list(search(predicted, 85, truth.__getitem__, 1).seen) == [4]


def test_next_to_nothing_may_stay_unused() -> None:
    """Among steps that are hardly apart no question is spent on the next one."""
    truth = [1000 - k for k in range(500)]
    predicted = [round(0.97 * size) for size in truth]
    found = search(predicted, 700, truth.__getitem__, enough=14, worth=20)
    assert found.closed
    assert len(found.seen) == 2
    assert found.candidate is not None
    assert 686 < truth[found.candidate] <= 700
    # But where it would spare much: what is expected to fit is asked for, down to the last.
    found = search(predicted, 700, truth.__getitem__, enough=14)
    assert (found.candidate, len(found.seen)) == (300, 3)
    # A next one that spares much is worth a question, if it may fit.
    truth, seconds = [100, 70, 69], [0.0, 1.0, 2.0]
    assert search([100, 71, 69], 70, truth.__getitem__, enough=2, seconds=seconds).candidate == 1


def test_what_one_kind_of_plans_is_off_says_nothing_of_another() -> None:
    predicted, truth = [100, 90, 91, 70, 60, 50], [130, 126, 91, 100, 60, 70]
    found = search(predicted, 92, truth.__getitem__, kinds="aababa")
    assert (found.candidate, list(found.seen), found.closed) == (2, [1, 2], True)
    assert list(search(predicted, 92, truth.__getitem__).seen)[:2] != [1, 2]


def test_where_much_is_unused_candidates_that_differ_well_are_tried() -> None:
    """Between what does not fit and what leaves half of the budget a faster one fits after all."""
    predicted, truth = [200, 104, 103, 50], [200, 95, 105, 50]
    assert search(predicted, 100, truth.__getitem__, apart=[1]).candidate == 1
    assert search(predicted, 100, truth.__getitem__, 2, apart=[1]).candidate == 3


def test_one_candidate() -> None:
    assert search([5], 7, [6].__getitem__).candidate == 0
    assert search([5], 5, [6].__getitem__).candidate is None


def test_the_only_plan_for_miles_is_not_passed_over() -> None:
    """Thousands of plans that are nearly alike leave room for the few that are not."""
    dense = [Candidate(20_000 - k, k / 1e4, kept_bytes=20_000 - k) for k in range(5000)]
    sparse = [Candidate(6_000 - 500 * k, 1.0 + k, kept_bytes=500) for k in range(9)]
    one = [*dense, *sparse]
    for count in (1, 2, 3):
        candidates = pareto_front([one] * count)
        for place in range(len(dense), len(one)):
            assert (place,) * count in {candidate.picks for candidate in candidates} or any(
                candidate.bytes <= (count - 1) * one[place].kept_bytes + one[place].bytes
                and candidate.seconds <= count * one[place].seconds
                for candidate in candidates
            )


def test_search_spends_what_is_left_where_the_last_rungs_are_not_the_least() -> None:
    predicted, truth = [208, 180, 158, 138, 108, 108, 98], [248, 200, 169, 129, 99, 109, 110]
    found = search(predicted, 100, truth.__getitem__)
    assert (found.candidate, list(found.seen), found.closed) == (4, [6, 0, 5, 4, 3], True)
    found = search(predicted, 90, truth.__getitem__)
    assert (found.candidate, min(found.seen.values())) == (None, 99)


def test_where_all_that_is_faster_spares_much_another_of_it_is_asked_for() -> None:
    """Many are predicted to need as much; the slowest of these fails, and the fastest fits."""
    predicted = [130, 103, 103, 102, 102, 102, 101, 94, 90]
    seconds = [0.0, 10.5, 10.6, 10.7, 10.8, 10.85, 10.9, 21.0, 22.0]
    truth = [131, 99, 101, 102, 102, 102, 102, 93, 90]
    found = search(predicted, 100, truth.__getitem__, 8, enough=2, seconds=seconds, worth=0.1)
    assert found.candidate == 1
    assert len(found.seen) <= 5
    few = [20.0 + 0.1 * k for k in range(len(truth))]  # not where little is to be spared
    found = search(predicted, 100, truth.__getitem__, 8, enough=8, seconds=few, worth=0.1)
    assert found.candidate == 7
