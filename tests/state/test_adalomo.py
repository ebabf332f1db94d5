"""AdaLomo: its formulas, and that a stack is trained as its layers are."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.updating import PARAMS, TOKENS, assert_alike, language_loss, normal, ordinary, run

import jaxmem


def by_hand(theta: Any, gradients: Any, rate: float, decay: float) -> Any:
    """In float64, by numpy, of one matrix."""
    theta = np.asarray(theta, np.float64)
    rows, columns = np.zeros(theta.shape[0]), np.zeros(theta.shape[1])
    for step, gradient in enumerate(gradients, 1):
        square = np.asarray(gradient, np.float64) ** 2
        rows = decay * rows + (1 - decay) * square.mean(1)
        columns = decay * columns + (1 - decay) * square.mean(0)
        second = np.outer(rows, columns) / rows.mean() / (1 - decay**step)
        u = np.asarray(gradient, np.float64) / np.sqrt(second)
        u = u / max(1.0, np.sqrt((u**2).mean())) * max(1e-3, np.sqrt((theta**2).mean()))
        theta = theta - rate * u
    return theta


def test_its_steps_are_those_of_the_formulas() -> None:
    theta, gradients = normal(0, 6, 4), [normal(k, 6, 4) for k in range(1, 4)]
    optimizer: Any = jaxmem.adalomo(0.1, decay=0.9)
    state, found = optimizer.init(theta), theta
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, found)
        found = found + updates
    np.testing.assert_allclose(found, by_hand(theta, gradients, 0.1, 0.9), rtol=1e-5)


def test_a_stack_is_trained_as_its_layers_are() -> None:
    theta, gradient = normal(0, 3, 6, 4), normal(1, 3, 6, 4)
    optimizer: Any = jaxmem.adalomo(0.1)
    updates, _ = optimizer.update(gradient, optimizer.init(theta), theta)
    alone = [
        optimizer.update(g, optimizer.init(t), t)[0] for g, t in zip(gradient, theta, strict=True)
    ]
    chex.assert_trees_all_close(updates, jnp.stack(alone), rtol=1e-6)


def test_it_goes_in_the_backward_pass() -> None:
    optimizer = jaxmem.adalomo(0.05, weight_decay=0.01)
    step = jaxmem.value_and_update(language_loss, optimizer)
    plan = step.explain(PARAMS, optimizer.init(PARAMS), TOKENS)
    assert {leaf.path: leaf.in_backward for leaf in plan.leaves}["layers/w"]
    ours = run(step, optimizer, PARAMS, TOKENS)
    theirs = run(ordinary(language_loss, optimizer), optimizer, PARAMS, TOKENS)
    assert_alike(ours, theirs)
    assert ours[0][-1] < ours[0][0]


@pytest.mark.slow
def test_zeros_and_vectors_do_no_harm() -> None:
    params = {"scale": jnp.zeros(3), "w": jnp.zeros((2, 3)), "x": jnp.zeros(())}
    optimizer = jaxmem.adalomo(0.1)
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    chex.assert_tree_all_finite(updates)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"decay": 1.0}, ValueError, "decay must be at least 0 and less than 1"),
        ({"decay": "0.9"}, TypeError, "decay must be a number"),
        ({"clip": 0}, ValueError, "clip must be more than 0"),
        ({"eps": None}, TypeError, "eps must be a number"),
    ],
)
def test_errors_say_what_is_wrong(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        jaxmem.adalomo(0.1, **arguments)


def test_it_wants_the_parameters() -> None:
    optimizer = jaxmem.adalomo(0.1)
    with pytest.raises(ValueError, match="pass them to update as the third argument"):
        optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)))
