"""The frontier's peers: the same gradients, the evaluations they are known for, their own work."""

from pathlib import Path
from typing import Any

import frontier
import jax
import jax.numpy as jnp
import pytest
from frontier import Options

from front import claims, peers, rivals
from front.rivals import Rival
from front.table import EQUINOX, FIT, FRONTIER, HAND, PEERS, POLICY, Row
from jaxmem.estimate.costs import costs

LAYERS = 12
OTHERS = rivals.of_others(LAYERS)
# Another cut, or number of checkpoints, of what is there with a first one.
MORE = {
    "nn.remat_scan 2×2×3",
    "nn.remat_scan 12×1",
    "equinox 4 checkpoints",
    "equinox 6 checkpoints",
}
EACH = [
    pytest.param(rival, id=rival.name, marks=[pytest.mark.slow] if rival.name in MORE else [])
    for rival in OTHERS
]
SIZE: dict[str, Any] = {"batch": 2, "sequence": 64, "width": 32, "layers": LAYERS, "heads": 4}


def named(name: str) -> Rival:
    (found,) = (rival for rival in OTHERS if rival.name == name)
    return found


def stack_of(rival: Rival) -> peers.Stack:
    assert rival.stack is not None
    return rival.stack


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("rival", EACH)
def test_gradients_are_those_of_everything_kept(rival: Rival):
    assert peers.off(stack_of(rival), LAYERS) < 1e-5


def test_another_function_has_other_gradients():
    def without_the_last(layer: Any, x: jax.Array, params: Any) -> jax.Array:
        return jax.lax.scan(layer, x, jax.tree.map(lambda a: a[:-1], params))[0]

    assert peers.off(without_the_last, LAYERS) > 0.1


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("nn.remat", 2),
        ("nn.remat_scan 3×4", 2),
        ("nn.remat_scan 2×2×3", 3),
        ("nn.remat_scan 3×4 of nn.remat", 3),
        ("haliax save_carries", 2),
        ("haliax nested 3", 3),
        ("equinox all checkpoints", 2),
    ],
)
def test_layers_run_as_often_as_each_is_known_for(name: str, passes: int):
    assert peers.evaluations(stack_of(named(name)), LAYERS) == passes * LAYERS


def test_fewer_carries_of_equinox_are_more_evaluations():
    counted = [
        peers.evaluations(peers.equinox(checkpoints), LAYERS) for checkpoints in (2, 4, 6, LAYERS)
    ]
    assert counted == sorted(set(counted), reverse=True)


def test_loops_are_as_deep_as_divisors_allow():
    assert rivals.cut(24, 2) == (4, 6)
    assert rivals.cut(24, 3) == (2, 3, 4)
    assert rivals.cut(7, 2) == (1, 7)


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("rival", EACH)
def test_all_have_the_work_of_the_same_model(rival: Rival):
    job = peers.job(SIZE, stack_of(rival))
    work = costs(jax.make_jaxpr(job.step)(*job.args))
    if rival.kind == EQUINOX:  # nothing says how often its loop runs
        assert work.unknown_loops == 2
    else:
        assert work.unknown_loops == 0
        assert work.matmul_flops - work.recomputed_matmul_flops == peers.model_flops(SIZE)


def test_work_in_loops_of_unknown_length_is_that_of_their_evaluations():
    few, every = peers.equinox(4), peers.equinox(LAYERS)
    layer = 100
    model = 3 * LAYERS * layer
    runs = peers.evaluations(few, LAYERS)
    assert runs > 2 * LAYERS
    for compiled in (4 * layer, (LAYERS + 3) * layer):
        found = peers.loop_flops(compiled, model, few, LAYERS)
        assert found == runs * layer + 2 * LAYERS * layer
    # With every carry there, each round differentiates, and need not evaluate all of a layer.
    seen_once = (LAYERS + 2) * layer + 70
    assert peers.loop_flops(seen_once, model, every, LAYERS) == model + LAYERS * 70
    assert peers.loop_flops(model + LAYERS * 70, model, every, LAYERS) == model + LAYERS * 70
    for compiled in (seen_once, (LAYERS + 4) * layer, 5 * layer):
        with pytest.raises(ValueError, match="are not a loop over 12 evaluations of 100"):
            peers.loop_flops(compiled, model, few, LAYERS)


def test_parameters_are_nested_as_flax_itself_would():
    x, weight = jnp.ones((2, 3)), {"scale": jnp.ones((LAYERS, 3))}

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x * p["scale"], None

    fields = peers._block(layer, weight)
    nested = peers.nn.remat_scan(peers.Block, lengths=(3, 4))(*fields)
    variables = jax.eval_shape(nested.init, jax.random.key(0), x)
    assert variables["params"]["scale"].shape == (3, 4, 3)
    assert peers.linen_scan(3, 4)(layer, x, weight).tolist() == x.tolist()
    assert peers.linen()(layer, x, weight).tolist() == x.tolist()


# ---------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Path]:
    folder = tmp_path_factory.mktemp("results")
    (rows,) = frontier.main(Options(small=True, results=folder)).values()
    return rows, folder


def _of(rows: list[Row], *kinds: str) -> list[Row]:
    return [row for row in rows if row.kind in kinds]


@pytest.mark.slow
def test_each_kind_has_its_rows(made: tuple[list[Row], Path]):
    rows, folder = made
    assert {row.kind for row in rows} == {HAND, POLICY, *PEERS, FIT, FRONTIER}
    assert (folder / "frontier_local.png").read_bytes().startswith(b"\x89PNG")
    (kept,), policies = _of(rows, HAND), _of(rows, POLICY)
    for row in [*_of(rows, *PEERS), *policies]:
        assert row.required_bytes < kept.required_bytes
        assert row.work > kept.work
        assert row.model_matmul_flops == kept.work
    for row in _of(rows, *PEERS):
        assert row.note.startswith("gradients")
    # One answer for all that have the same memory.
    assert len(_of(rows, FIT)) == 5
    assert len({(row.budget_bytes, row.required_bytes) for row in _of(rows, FIT)}) == 3


def test_no_peer_needs_as_little_and_computes_less(made: tuple[list[Row], Path]):
    rows, _ = made
    assert [row for row in claims.below(rows) if row.kind in PEERS] == []
    assert "points of other libraries that lie below ours: 0 of 3" in claims.summary(rows)
    lowered = [row for row in rows if row.kind not in (FIT, FRONTIER)]
    assert len([row for row in claims.below(lowered) if row.kind in PEERS]) == 3


def test_a_second_call_compiles_nothing(
    made: tuple[list[Row], Path], monkeypatch: pytest.MonkeyPatch
):
    rows, folder = made
    for name in ("_frontier", "_fit"):
        monkeypatch.delattr(frontier, name)
    monkeypatch.delattr(Rival, "row")
    (again,) = frontier.main(Options(small=True, results=folder)).values()
    assert again == rows
