"""Checkmate's program: published optima, and what it says about one layer's keep sets."""

import math

import pytest
from helpers.staged import Staged, staged
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.solve.keep import keep_within
from jaxmem.solve.problem import Graph, Operation


def training_chain(n: int) -> list[tuple[int, ...]]:
    """n layers, a loss, and their backwards: each reads the gradient before it and its layer."""
    inputs: list[tuple[int, ...]] = [()] + [(i - 1,) for i in range(1, n + 1)]
    return inputs + [tuple({n + j - 1, n - j}) for j in range(1, n + 1)]


def run(inputs, sizes, found: Staged, budgets) -> float:
    """Carries a schedule out, letting go of everything as soon as nothing needs it; its seconds."""
    have: set[int] = set()
    n = len(inputs)
    for t, (computed, held) in enumerate(zip(found.computed, found.held, strict=True)):
        assert have >= set(held)
        have = set(held)
        after = set(found.held[t + 1]) if t + 1 < n else set()
        for position, node in enumerate(computed):
            assert have.issuperset(inputs[node])
            have.add(node)
            assert sum(sizes[i] for i in have) <= budgets[t]
            needed = {u for later in computed[position + 1 :] for u in inputs[later]}
            have = {i for i in have if i in needed | after}
        assert t in computed
    return sum(len(computed) for computed in found.computed)


OPTIMA = {3: (3, 1, 0), 4: (6, 2, 1, 0), 5: (10, 3, 2, 1, 0), 8: (28, 9, 5, 4, 3, 2, 1, 0)}
CELLS = [
    pytest.param(n, budget, extra, marks=[pytest.mark.slow] if extra in (9, 28) else [])
    for n, row in OPTIMA.items()
    for budget, extra in enumerate(row, start=3)
]


@pytest.mark.parametrize(("n", "budget", "extra"), CELLS)
def test_the_published_optima_of_a_chain(n, budget, extra):
    inputs = training_chain(n)
    ones = [1] * len(inputs)
    found = staged(inputs, [1.0] * len(inputs), ones, budget)
    assert found is not None
    assert found.gap == 0.0
    assert found.seconds - len(inputs) == extra
    assert run(inputs, ones, found, [budget] * len(inputs)) == found.seconds


@pytest.mark.parametrize("n", list(OPTIMA))
def test_two_values_are_not_enough(n):
    inputs = training_chain(n)
    assert staged(inputs, [1.0] * len(inputs), [1] * len(inputs), 2) is None


@st.composite
def layers(draw):
    """One layer, value v made by operation v - 1, of which the backward reads some."""
    n = draw(st.integers(2, 6))
    operations = [
        Operation(
            tuple(sorted(draw(st.sets(st.integers(0, v - 1), min_size=1, max_size=2)))),
            (v,),
            float(draw(st.integers(1, 9))),
        )
        for v in range(1, n)
    ]
    return Graph(
        bytes=(0, *draw(st.lists(st.integers(1, 9), min_size=n - 1, max_size=n - 1))),
        operations=tuple(operations),
        free=frozenset({0}),
        wanted=frozenset(draw(st.sets(st.integers(1, n - 1), min_size=1))),
        keepable=frozenset(range(n)),
        keep_seconds=(0.0,) * n,
    )


@settings(derandomize=True, max_examples=25)
@given(graph=layers(), budget=st.integers(0, 30))
def test_what_crosses_the_border_is_all_that_a_layer_keeps(graph, budget):
    # Forward, a border at which little may be held, and a backward that reads all it wants:
    # with memory to spare on either side, the best schedule is the best keep set.
    n = len(graph.bytes)
    inputs = [(), *(operation.inputs for operation in graph.operations)]
    inputs += [(), (n, *sorted(graph.wanted))]
    seconds = [0.0, *(operation.seconds for operation in graph.operations), 0.0, 0.0]
    sizes, plenty = [*graph.bytes, 0, 0], sum(graph.bytes)
    found = staged(inputs, seconds, sizes, [*[plenty] * n, budget, plenty])
    best = keep_within(graph, budget)
    assert found is not None
    assert best is not None
    again = found.seconds - sum(seconds)
    assert again == pytest.approx(best.seconds)


@settings(derandomize=True, max_examples=20)
@given(graph=layers(), budget=st.integers(2, 30))
def test_schedules_run_within_their_budget(graph, budget):
    inputs = [(), *(operation.inputs for operation in graph.operations)]
    inputs.append(tuple(sorted(graph.wanted)))
    sizes = [*graph.bytes, 1]
    found = staged(inputs, [1.0] * len(inputs), sizes, budget)
    widest = max(
        sum(sizes[i] for i in {node, *row}) for node, row in enumerate(inputs)
    )  # what one node needs
    if found is None:
        assert budget < sum(sizes)
        return
    assert budget >= widest
    assert run(inputs, sizes, found, [budget] * len(inputs)) == found.seconds


def test_a_larger_budget_never_costs_more():
    inputs = training_chain(4)
    costs = []
    for budget in range(3, 12):
        found = staged(inputs, [1.0, 2.0] * 4 + [1.0], [2, 1] * 4 + [1], budget)
        costs.append(found.seconds if found else math.inf)
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == math.inf
    assert costs[-1] == 13.0


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"node 1 has the inputs \(1,\): list nodes in an order"):
        staged([(), (1,)], [1.0, 1.0], [1, 1], 2)
    with pytest.raises(TimeoutError, match="no schedule of 33 nodes was found in 0 s"):
        staged(training_chain(16), [1.0] * 33, [1] * 33, 6, time_limit=0.0)
