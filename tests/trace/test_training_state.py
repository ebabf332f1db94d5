"""Which leaves of a call's arguments are parameters, and which an optimizer's state."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem.compile.program import Program
from jaxmem.trace.state_fields import StateLeaf
from jaxmem.trace.training_state import Leaf, Named, Told, told

W = jnp.ones((3, 4))


def found(fn: object, *args: object, **named: Named) -> dict[str, str]:
    """What each argument is: its field, "parameter" or ""."""
    program = Program(fn, args, {}, **named)  # type: ignore[arg-type]
    return {a.name: a.field or ("parameter" if a.is_parameter else "") for a in program.arguments}


def step(params, state, x):
    return params, state, x


def weights_step(weights, state, x):
    return weights, state, x


def test_parameters_are_told_by_their_name() -> None:
    state = optax.adam(1e-3).init({"w": W})
    assert found(step, {"w": W}, state, W) == {
        "params/w": "parameter",
        "state/0/count": "count",
        "state/0/mu/w": "mu",
        "state/0/nu/w": "nu",
        "x": "",
    }
    # A part of a path, as in a train state.
    assert found(lambda train: train, {"params": {"w": W}, "rest": W}) == {
        "train/params/w": "parameter",
        "train/rest": "",
    }


def test_parameters_are_told_by_the_paths_that_the_state_repeats() -> None:
    weights = {"a": {"w": W, "b": jnp.ones(4)}}
    state = optax.adam(1e-3).init(weights)
    batch = {"a": {"w": jnp.ones((5, 4))}}  # of another shape
    told = found(weights_step, weights, state, batch)
    assert [name for name, what in told.items() if what == "parameter"] == [
        "weights/a/b",
        "weights/a/w",
    ]


def test_of_two_trees_alike_none_is_claimed() -> None:
    def update(gradient, state, weights):
        return gradient, state, weights

    tree = {"w": W}
    told = found(update, tree, optax.adam(1e-3).init(tree), tree)
    assert "parameter" not in told.values()
    told = found(update, tree, optax.adam(1e-3).init(tree), tree, parameters="weights")
    assert told["weights/w"] == "parameter"
    assert told["gradient/w"] == ""


def test_a_batch_that_is_a_named_tuple_is_no_state_once_that_is_named() -> None:
    sharded = optax.TraceState({"x": W})
    assert found(step, {"w": W}, {"m": W}, sharded)["x/trace/x"] == "trace"
    told = found(step, {"w": W}, {"m": W}, sharded, optimizer_state="state")
    assert told == {"params/w": "parameter", "state/m": "m", "x/trace/x": ""}


def test_the_longer_path_decides() -> None:
    tree = {"params": {"w": W}, "m": {"w": W}, "scale": W}
    told = found(lambda train: train, tree, optimizer_state=0, parameters="train/params")
    assert told == {
        "train/m/w": "m",
        "train/params/w": "parameter",
        "train/scale": "scale",
    }


def test_several_and_a_single_array() -> None:
    def several(w, m, v):
        return w, m, v

    told = found(several, W, W, W, optimizer_state=["m", 2], parameters=0)
    assert told == {"w": "parameter", "m": "m", "v": "v"}


def leaves(*paths: str) -> list[Leaf]:
    return [Leaf(path, k, (3,), StateLeaf(None)) for k, path in enumerate(paths)]


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        (
            {"optimizer_state": "stat"},
            ValueError,
            "optimizer_state='stat' is no array among the arguments, which are state, x; give the "
            "position of one, or a path as the report prints it, such as 'state/mu'",
        ),
        ({"parameters": 2}, ValueError, "parameters=2 is no array among the arguments"),
        (
            {"parameters": True},
            TypeError,
            "parameters takes the position of an argument or its path, or several of those, got "
            "True of type bool; an argument of the function of that name goes by position",
        ),
        (
            {"parameters": "state", "optimizer_state": 0},
            ValueError,
            "the argument 'state' is named in optimizer_state= and in parameters=, and state/m can "
            "be one of them only; take it out of one, or give the path of a part of it",
        ),
    ],
)
def test_what_is_refused(named: dict[str, Named], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        told(leaves("state/m", "x"), 2, **named)


def test_nothing_is_claimed_of_nothing() -> None:
    assert told([], 0) == Told((), ())
    assert told(leaves("x"), 1).parameters == (False,)


def test_arguments_that_the_program_drops_keep_their_places() -> None:
    def unused(x, state):
        return 2 * x

    state = optax.adam(1e-3).init({"w": W})
    program = Program(unused, (jax.ShapeDtypeStruct((3,), "float32"), state), {})
    assert [a.field for a in program.arguments] == [None, "count", "mu", "nu"]
