"""What one layer keeps: brute force over all keep sets, known tricks, and large graphs."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.solve import keep
from jaxmem.solve.keep import Keep, keep_within, least_bytes, menu, price
from jaxmem.solve.presolve import reduced
from jaxmem.solve.problem import Graph, Operation

# ---------------------------------------------------------------- brute force


def cost(graph: Graph, kept: set[int], sent: set[int]) -> float | None:
    """Seconds of keeping these values; None where the backward cannot have all it wants."""
    maker = {v: e for e, op in enumerate(graph.operations) for v in op.outputs}
    again: set[int] = set()

    def fetch(value: int) -> bool:
        if value in graph.free or value in kept or value in sent:
            return True
        e = maker.get(value)
        if e is None or math.isinf(graph.operations[e].seconds):
            return False
        if e in again:
            return True
        again.add(e)
        return all(fetch(u) for u in graph.operations[e].inputs)

    if not all(fetch(v) for v in sorted(graph.wanted)):
        return None
    host = graph.host_seconds or ()
    return (
        sum(graph.operations[e].seconds for e in again)
        + sum(graph.keep_seconds[v] for v in kept)
        + sum(host[v] for v in sent)
    )


def everything(graph: Graph) -> list[tuple[int, float]]:
    """(bytes, seconds) of every keep set there is."""
    places = "dkh" if graph.host_seconds else "dk"
    values, found = sorted(graph.keepable), []
    for choice in itertools.product(places, repeat=len(values)):
        kept = {v for v, place in zip(values, choice, strict=True) if place == "k"}
        sent = {v for v, place in zip(values, choice, strict=True) if place == "h"}
        seconds = cost(graph, kept, sent)
        if seconds is not None and math.isfinite(seconds):
            found.append((sum(graph.bytes[v] for v in kept), seconds))
    return found


def pareto(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those no other beats, fastest first."""
    chosen: list[tuple[int, float]] = []
    for size, seconds in sorted(set(points)):
        if not chosen or seconds < chosen[-1][1] - 1e-9:
            chosen.append((size, seconds))
    return chosen[::-1]


def hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The corners of the lower convex hull, fastest first."""
    corners: list[tuple[int, float]] = []
    for point in pareto(points):
        while len(corners) > 1:
            (a, x), (b, y), (c, z) = corners[-2], corners[-1], point
            if (y - x) * (a - c) < (z - x) * (a - b) - 1e-9:
                break
            corners.pop()
        corners.append(point)
    return corners


def honest(graph: Graph, found: Keep) -> None:
    """That a result says what it is."""
    assert set(found.kept) <= graph.keepable
    assert set(found.offloaded) <= graph.keepable
    assert found.bytes == sum(graph.bytes[v] for v in found.kept)
    seconds = cost(graph, set(found.kept), set(found.offloaded))
    assert seconds == pytest.approx(found.seconds, rel=1e-12, abs=1e-15)
    have = set(graph.free) | set(found.kept) | set(found.offloaded)
    for e in found.recomputed:  # in this order, it runs
        assert have.issuperset(graph.operations[e].inputs)
        have.update(graph.operations[e].outputs)
    assert have >= graph.wanted


@st.composite
def graphs(draw, most=8):
    n = draw(st.integers(2, most))
    few = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 7.0])
    made, operations = draw(st.integers(1, 2)), []
    while made < n:
        outputs = min(draw(st.sampled_from([1, 1, 2])), n - made)
        inputs = draw(st.sets(st.integers(0, made - 1), min_size=1, max_size=3))
        seconds = draw(st.sampled_from([0.0, 1.0, 2.0, 3.0, 7.0, math.inf]))
        made += outputs
        operations.append(
            Operation(tuple(sorted(inputs)), tuple(range(made - outputs, made)), seconds)
        )
    values = st.sets(st.integers(0, n - 1))
    row = st.lists(few, min_size=n, max_size=n).map(tuple)
    away = st.lists(st.sampled_from([1.0, 3.0, math.inf]), min_size=n, max_size=n).map(tuple)
    return Graph(
        bytes=tuple(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))),
        operations=tuple(operations),
        free=frozenset(draw(st.sets(st.integers(0, 1)))),
        wanted=frozenset(draw(values)),
        keepable=frozenset(range(n)) - draw(values.map(lambda some: frozenset(sorted(some)[:2]))),
        keep_seconds=draw(row),
        host_seconds=draw(st.none() | away) if n <= 6 else None,
    )


@settings(derandomize=True, max_examples=60)
@given(graph=graphs())
def test_no_keep_set_does_better(graph):
    points = everything(graph)
    if not points:
        assert keep_within(graph, 10**9) is None
        with pytest.raises(ValueError, match="neither be kept nor recomputed"):
            least_bytes(graph)
        return
    assert least_bytes(graph) == min(points)[0]
    for budget in sorted({0, *(size + d for size, _ in points for d in (-1, 0))}):
        found = keep_within(graph, budget)
        best = min((seconds for size, seconds in points if size <= budget), default=None)
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert found.bytes <= budget
        assert found.seconds == pytest.approx(best, abs=1e-12)
        assert found.gap == 0.0
        honest(graph, found)


@settings(derandomize=True, max_examples=60)
@given(graph=graphs(), rate=st.sampled_from([0.0, 0.01, 0.1, 0.25, 1 / 3, 1.0, 3.0, 100.0]))
def test_a_price_finds_the_hull(graph, rate):
    points = everything(graph)
    if not points:
        with pytest.raises(ValueError, match="neither be kept nor recomputed"):
            price(graph, rate)
        return
    found = price(graph, rate)
    honest(graph, found)
    best = min(seconds + rate * size for size, seconds in points)
    assert found.seconds + rate * found.bytes == pytest.approx(best, abs=1e-9)


@settings(derandomize=True, max_examples=60)
@given(graph=graphs())
def test_the_menu_has_the_hull_and_nothing_that_is_beaten(graph):
    points = everything(graph)
    if not points:
        with pytest.raises(ValueError, match="neither be kept nor recomputed"):
            menu(graph)
        return
    best = pareto(points)
    bare = [(found.bytes, found.seconds) for found in menu(graph, points=0)]
    assert bare == [pytest.approx(point) for point in hull(points)]
    full = [(found.bytes, found.seconds) for found in menu(graph, points=1000)]
    assert full == [pytest.approx(point) for point in best]
    for found in menu(graph, points=2):
        honest(graph, found)
        assert any((found.bytes, found.seconds) == pytest.approx(point) for point in best)


# ---------------------------------------------------------------- what a layer looks like


def layer(sizes, operations, wanted, free=(0,), **more) -> Graph:
    return Graph(
        bytes=tuple(sizes),
        operations=tuple(Operation(*operation) for operation in operations),
        free=frozenset(free),
        wanted=frozenset(wanted),
        keepable=more.pop("keepable", frozenset(range(len(sizes)))),
        keep_seconds=more.pop("keep_seconds", (0.0,) * len(sizes)),
        **more,
    )


def test_a_dropped_value_costs_the_whole_chain_behind_it():
    # 0 -> 1 -> 2 -> 3, each a second; only the ends are read.
    chain = layer((1, 9, 9, 9), [((i,), (i + 1,), 1.0) for i in range(3)], wanted={3})
    assert keep_within(chain, 8) == Keep((), (), (0, 1, 2), 0, 3.0)
    assert keep_within(chain, 9) == Keep((3,), (), (), 9, 0.0)


def test_the_narrow_input_of_a_cast_is_kept_rather_than_its_output():
    cast = layer((8, 2, 4), [((0,), (1,), 5.0), ((1,), (2,), 0.1)], wanted={2})
    assert [found.kept for found in menu(cast)] == [(2,), (1,), ()]
    assert keep_within(cast, 3) == Keep((1,), (), (1,), 2, 0.1)


def test_the_seed_or_the_mask_rather_than_the_values_that_were_dropped_out():
    # 0: input, 1: seed, 2: mask of 1, 3: input where the mask is set.
    dropout = layer(
        (400, 8, 100, 400),
        [((1,), (2,), 2.0), ((0, 2), (3,), 1.0)],
        wanted={2, 3},
        free={0},
    )
    assert [(found.kept, found.seconds) for found in menu(dropout)] == [
        ((2, 3), 0.0),
        ((2,), 1.0),
        ((1,), 3.0),
    ]


def test_a_value_that_comes_with_another_one_is_not_kept_too():
    # One operation makes 1 and 2, and only 1 may be kept: the run for 2 brings 1 along.
    both = layer((1, 5, 5), [((0,), (1, 2), 1.0)], {1, 2}, keepable=frozenset({1}))
    assert menu(both) == (Keep((), (), (0,), 0, 1.0),)


def test_writing_and_reading_back_can_cost_more_than_recomputing():
    cheap = layer((1, 5), [((0,), (1,), 1.0)], wanted={1}, keep_seconds=(0.0, 2.0))
    assert menu(cheap) == (Keep((), (), (0,), 0, 1.0),)


def test_the_host_takes_what_the_link_carries_sooner_than_it_is_computed():
    host = (math.inf, 2.0, 2.0)
    chain = [((0,), (1,), 5.0), ((1,), (2,), 1.0)]
    away = layer((1, 8, 8), chain, wanted={1, 2}, host_seconds=host)
    assert [(found.kept, found.offloaded, found.recomputed) for found in menu(away)] == [
        ((1, 2), (), ()),
        ((1,), (), (1,)),
        ((), (1,), (1,)),
    ]


def test_what_runs_in_no_time_from_free_values_is_free():
    reshaped = layer((4, 4, 4), [((0,), (1,), 0.0), ((1,), (2,), 3.0)], wanted={1, 2})
    assert reduced(reshaped).wanted == {2}
    assert keep_within(reshaped, 4) == Keep((2,), (), (0,), 4, 0.0)


def test_an_operation_that_may_not_run_twice_has_its_result_kept():
    once = layer((1, 6), [((0,), (1,), math.inf)], wanted={1})
    assert least_bytes(once) == 6
    assert keep_within(once, 5) is None


def test_the_error_names_the_value_that_is_missing():
    lost = layer((1, 6, 2), [((1,), (2,), 1.0)], wanted={2}, keepable=frozenset({0}))
    with pytest.raises(ValueError, match=r"none that may run twice: \[1\]. Add what .* `keepable`"):
        menu(lost)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"operations": [((2,), (1,), 1.0), ((0,), (2,), 1.0)]}, "value 2 is read before"),
        ({"operations": [((0,), (1,), 1.0), ((0,), (1,), 1.0)]}, "value 1 is made twice"),
        ({"wanted": {7}}, "value 7 is named, and the graph has 3 values"),
        ({"keep_seconds": (0.0,)}, "3 values and 1 keep_seconds"),
        ({"host_seconds": (0.0,) * 4}, "3 values and 4 host_seconds"),
    ],
)
def test_graphs_that_make_no_sense(change, text):
    right = {"sizes": (1, 1, 1), "operations": [((0,), (1,), 1.0)], "wanted": {1}}
    layer(**right)
    with pytest.raises(ValueError, match=text):
        layer(**(right | change))


# ---------------------------------------------------------------- large graphs


def large(seed: int, n: int = 200) -> Graph:
    """Values of very different sizes and times, as of a layer of gigabytes."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 1000) * 10 ** rng.randint(0, 7) for _ in range(n)]
    operations = []
    for v in range(3, n):
        inputs = sorted({max(0, v - rng.randint(1, 10)) for _ in range(rng.randint(1, 3))})
        seconds = rng.choice([1e-9, 1e-6, 1e-3]) * (0.5 + rng.random())
        operations.append((tuple(inputs), (v,), seconds))
    wanted = {v for v in range(n) if rng.random() < 0.4}
    times = tuple(size * 1e-12 for size in sizes)
    return layer(sizes, operations, wanted, free={0, 1, 2}, keep_seconds=times)


def element_wise(n: int) -> Graph:
    """A chain of values of one size, of which the backward reads the last."""
    return layer([4] * n, [((i,), (i + 1,), 1.0) for i in range(n - 1)], wanted={n - 1})


def test_element_wise_chains_are_one_operation():
    small = reduced(element_wise(50))
    assert small.keepable == {49}
    assert [(step.inputs, step.outputs, step.seconds) for step in small.operations] == [
        (frozenset(), {49}, 49.0)
    ]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_hundred_values(seed):
    graph = large(seed)
    found = menu(graph, points=6)
    assert len(found) > 10
    for faster, smaller in itertools.pairwise(found):
        assert faster.bytes > smaller.bytes
        assert faster.seconds < smaller.seconds
    for each in found:
        honest(graph, each)
        assert each.gap <= 1e-5
    assert found[-1].bytes == least_bytes(graph)
    # No point lies below a line that a price draws.
    for rate in (1e-15, 1e-13, 1e-11):
        best = price(graph, rate)
        line = best.seconds + rate * best.bytes
        assert all(each.seconds + rate * each.bytes >= line * (1 - 1e-6) for each in found)


def test_no_budget_is_exceeded_by_a_single_byte():
    graph = large(2)
    least, most = least_bytes(graph), menu(graph, points=0)[0].bytes
    last = math.inf
    for part in range(1, 10):
        budget = least + (most - least) * part // 10
        found = keep_within(graph, budget)
        assert found is not None
        assert found.bytes <= budget
        assert found.seconds <= last * (1 + 1e-5)
        last = found.seconds


def test_out_of_time_there_is_still_an_answer_that_says_how_good_it_is():
    graph = large(3)
    corners = menu(graph, points=0)
    budget = (corners[0].bytes + corners[-1].bytes) // 2
    best = keep_within(graph, budget, time_limit=60)
    hasty = keep_within(graph, budget, time_limit=0.0)
    assert best is not None
    assert hasty is not None
    honest(graph, hasty)
    assert hasty.bytes <= budget
    assert 0 < hasty.gap < 0.2
    assert hasty.seconds * (1 - hasty.gap) <= best.seconds * (1 + 1e-9)


def test_the_same_graph_has_the_same_menu():
    graph, menus = large(4, 80), []
    for _ in range(2):
        for cache in (keep._fastest, keep._smallest, keep._corners, reduced):
            cache.cache_clear()
        menus.append(menu(graph))
    assert menus[0] == menus[1]
