"""On TPUs nothing waits for the gradient of a loss, which then is no array."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.budgeted import problem as problem_of
from helpers.budgeted import question
from helpers.menagerie import assert_close, exact_jit

import jaxmem
from jaxmem.unrolled import Piece, UnrolledPlan


def step(weights, tokens, labels, decorate=jaxmem.remat_auto, derivative=jax.grad):
    """The gradient of a language model with a bias in front of its loss, in bfloat16."""

    @decorate
    def logits(weights, tokens):
        embedding, layers, bias = weights
        h = embedding[tokens].astype(jnp.bfloat16)
        for layer in layers:
            up, down = layer.astype(jnp.bfloat16)
            h = h + jax.nn.gelu(h @ up) @ down.T
            h = jax.nn.standardize(h)
        up, down = layers[-1].astype(jnp.bfloat16)
        h = jax.nn.standardize(jax.nn.gelu(h @ up @ down.T))
        return h @ embedding.astype(jnp.bfloat16).T + bias.astype(jnp.bfloat16)

    def loss(weights):
        found = logits(weights, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()

    return derivative(loss)(weights)


def shapes(rows: int, words: int, width: int = 256):
    spec = jax.ShapeDtypeStruct
    layers = [spec((2, width, 4 * width), "float32") for _ in range(3)]
    weights = [spec((words, width), "float32"), layers, spec((words,), "float32")]
    return weights, spec((rows,), "int32"), spec((rows,), "int32")


def waits(plan) -> bool:
    (region,) = plan.regions
    return region.plan.waits


def waiting(plan):
    """The same with everything that waits."""
    (region,) = plan.regions
    kept = dataclasses.replace(region.plan, waits=True)
    return dataclasses.replace(plan, regions=(dataclasses.replace(region, plan=kept),))


@pytest.mark.slow
def test_the_gradient_of_the_logits_is_no_array():
    args = shapes(4096, 32768)
    problem = problem_of(step, *args, target="v5e-16g")
    ask = question(step, *args, target="v5e-16g")
    plan = problem.plan(len(problem.front) // 2)
    assert not waits(plan)
    without, with_it = (ask.begin(one).result() for one in (plan, waiting(plan)))
    gradient = 4096 * 32768 * 2
    assert without.temp_bytes < with_it.temp_bytes - 0.9 * gradient
    assert without.matmul_flops == with_it.matmul_flops


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [jax.grad, jax.value_and_grad])
def test_labels_pick_from_logits_in_float32_where_the_loss_is_wanted(derivative):
    """A gather computes nothing itself on TPUs; without it, a loss is for nothing."""
    asked = functools.partial(step, derivative=derivative)
    args = shapes(16384, 16384, 512)  # so that on-chip memory is small beside them
    problem = problem_of(asked, *args, target="v5e-16g")
    least = len(problem.front) - 1
    report = problem.report(question(asked, *args, target="v5e-16g"), least)
    logits = {buffer.dtype for buffer in report.buffers if buffer.shape == (16384, 16384)}
    assert ("f32" in logits) == (derivative is jax.value_and_grad)
    fixed = report.required_bytes - report.temp_bytes
    assert abs((problem.predicted[least] - fixed) / report.temp_bytes - 1) < 0.15


@pytest.mark.slow
def test_on_gpus_all_waits():
    problem = problem_of(step, *shapes(512, 512), target="h100-80g")
    assert all(waits(problem.plan(place)) for place in range(len(problem.front)))


@pytest.mark.slow
def test_numbers_are_the_same():
    problem = problem_of(step, *shapes(64, 128, 32), target="v5e-16g")
    args = jax.tree.map(
        lambda spec: (
            jax.random.randint(jax.random.key(0), spec.shape, 0, 128)
            if spec.dtype == jnp.int32
            else 0.1 * jax.random.normal(jax.random.key(1), spec.shape)
        ),
        shapes(64, 128, 32),
    )
    expected = exact_jit(functools.partial(step, decorate=lambda fn: fn))(*args)
    last = len(problem.front) - 1
    for place in {last * part // 5 for part in range(6)}:
        plan = problem.plan(place)
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(*args), expected)


def test_it_is_written_with_the_plan():
    plan = UnrolledPlan(4, (Piece(0, 4, keep=(1,)),), waits=False)
    assert UnrolledPlan.from_data(plan.to_data()) == plan
    assert "waits" not in UnrolledPlan(4, (Piece(0, 4),)).to_data()
    with pytest.raises(ValueError, match="waits: expected true or false, got no"):
        UnrolledPlan.from_data({**plan.to_data(), "waits": "no"})
