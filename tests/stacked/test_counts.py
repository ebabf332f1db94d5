"""What really runs again: evaluations of a layer, counted at run time against the plans."""

import collections
import itertools
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import Plan, policies

# Griewank & Walther's table: extra forward steps for n layers and s carries.
REVOLVE = {
    10: {2: 20, 3: 15, 4: 14, 5: 13, 8: 10},
    20: {2: 65, 3: 45, 4: 39, 5: 33, 8: 30, 10: 28, 16: 22},
    32: {2: 140, 3: 93, 4: 75, 5: 68, 8: 54, 10: 52, 16: 46},
    64: {2: 420, 3: 258, 4: 200, 5: 172, 8: 137, 10: 116, 16: 110},
    100: {2: 845, 3: 490, 4: 374, 5: 316, 8: 245, 10: 222, 16: 182},
}


class Counter:
    """Counts the runs of a layer, by the number that the layer has."""

    def __init__(self) -> None:
        self.runs: collections.Counter[int] = collections.Counter()
        self._lock = threading.Lock()

    def __call__(self, number: jax.Array) -> None:
        with self._lock:
            self.runs[int(number)] += 1


def count(n: int, remat: str | policies.Policy | Plan, *, reverse: bool = False) -> Counter:
    """Run value_and_grad of n layers once, counting evaluations of each."""
    counter = Counter()

    def layer(h: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        w, number = x
        jax.debug.callback(counter, number)
        return jnp.tanh(w * h), None

    def loss(w: jax.Array) -> jax.Array:
        xs = (w, jnp.arange(n))
        return jaxmem.scan(layer, jnp.ones(2), xs, reverse=reverse, remat=remat)[0].sum()

    jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(jnp.ones((n, 2))))
    jax.effects_barrier()
    return counter


@pytest.mark.parametrize(
    ("n", "slots", "extra"),
    [
        pytest.param(n, s, extra, marks=[pytest.mark.slow] * (10 < n < 100))
        for n, row in REVOLVE.items()
        for s, extra in row.items()
    ],
)
def test_revolve_runs_what_the_published_table_says(n: int, slots: int, extra: int) -> None:
    counter = count(n, policies.revolve(slots))
    assert sum(counter.runs.values()) - n == extra
    assert Plan.revolve(n, slots).extra_forwards() == extra


PLANS = [
    Plan.none(7),
    Plan.full(7),
    Plan.periodic(1),
    Plan.periodic(7, 1),
    Plan.periodic(7, 3),
    Plan.periodic(16, 4),
    Plan.periodic(17, 4),
    Plan.periodic(61),
    Plan.periodic(61, levels=2),
    Plan.periodic(61, levels=3),
    Plan.periodic(64, [4, 4]),
    Plan.periodic(64, [4, 4, 4]),
    Plan.periodic(37, [5, 8]),
    Plan.cut(13, (6, 6)),
    Plan.cut(13, (6, 1)),
    Plan.revolve(1, 1),
    Plan.revolve(7, 1),
    Plan.revolve(61, 3),
    Plan.revolve(5, 100),
    Plan.full(7, policies.dots()),
]
BACKWARDS = [
    Plan.none(7),
    Plan.full(7),
    Plan.periodic(61, levels=2),
    Plan.cut(13, (6, 1)),
    Plan.revolve(61, 3),
]


@pytest.mark.parametrize(
    ("reverse", "plan"),
    [
        # Backwards one plan of each kind, and the others among the slow ones.
        pytest.param(reverse, plan, marks=[pytest.mark.slow] * (reverse and plan not in BACKWARDS))
        for reverse, plan in itertools.product([False, True], PLANS)
    ],
    ids=lambda one: f"{one.kind}-{one.length}-{one.lengths}" if isinstance(one, Plan) else None,
)
def test_extra_forwards_is_what_runs(plan: Plan, reverse: bool) -> None:
    counter = count(plan.length, plan, reverse=reverse)
    assert sum(counter.runs.values()) == plan.length + plan.extra_forwards()
    assert set(counter.runs) == set(range(plan.length)), "every layer runs"


@pytest.mark.parametrize("policy", ["full", "sqrt", "dots", "offload"])
@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")
def test_one_extra_forward_means_every_layer_twice(policy: str) -> None:
    assert set(count(19, policy).runs.values()) == {2}


def test_no_gradient_no_recomputation() -> None:
    counter = Counter()

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        jax.debug.callback(counter, 0)
        return jnp.tanh(w * h), None

    run = jax.jit(lambda w: jaxmem.scan(layer, jnp.ones(2), w, remat="revolve")[0])
    jax.block_until_ready(run(jnp.ones((20, 2))))
    jax.effects_barrier()
    assert counter.runs[0] == 20


def test_primes_cost_what_their_neighbours_cost() -> None:
    for levels in (1, 2, 3):
        costs = [Plan.periodic(n, levels=levels).extra_forwards() / n for n in (60, 61, 62, 64)]
        assert max(costs) - min(costs) <= 0.1 * min(costs)


@pytest.mark.slow  # one more size
def test_ten_thousand_layers_run() -> None:
    counter = count(10_000, policies.revolve(30))
    assert sum(counter.runs.values()) == 10_000 + Plan.revolve(10_000, 30).extra_forwards()
