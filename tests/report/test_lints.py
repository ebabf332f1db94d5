"""Each lint on a program to which it applies, and not on one to which it does not."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.releases import SINCE_0_11
from helpers.xla_flags import quick

import jaxmem

LAYERS, WIDTH = 8, 128
UNROLLED = 3  # each is compiled by itself


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sin(h @ w) @ w) + h


def scanned(weights: jax.Array, h: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (layer(h, w), None), h, weights)[0].sum()


def unrolled(weights: jax.Array, h: jax.Array, **checkpoint: Any) -> jax.Array:
    again = jax.checkpoint(layer, **checkpoint)
    for k in range(UNROLLED):
        h = again(h, weights[k])
    return h.sum()


ARGS = spec(LAYERS, WIDTH, WIDTH), spec(1024, WIDTH)


def lints(fn: Any, *args: Any, **options: Any) -> dict[str, jaxmem.Lint]:
    options = {"target": "h100-80g", **options}
    report = jaxmem.memory_report(fn, *args, compiler_options=quick(options["target"]), **options)
    for lint in report.lints:
        assert lint.message
        assert lint.remedy
        assert " ".join(lint.remedy.split()) in " ".join(str(report).split())
    return {lint.kind: lint for lint in report.lints}


def sgd(loss: Any) -> Any:
    def step(weights: Any, h: Any) -> Any:
        return optax.apply_updates(weights, jax.grad(loss)(weights, h))

    return step


def test_a_program_with_nothing_wrong_has_none():
    assert lints(sgd(jaxmem.remat_full(scanned)), *ARGS, donate_argnums=0) == {}


def test_nothing_donated():
    few = ARGS[0], spec(16, WIDTH)
    found = lints(sgd(scanned), *few, target="local")["not-donated"]
    assert found.message.startswith("nothing is donated")
    assert "weights" in found.message
    assert "donate_argnums" in found.remedy

    def adam(params: Any, state: Any, h: Any) -> Any:
        updates, state = optax.adam(1e-3).update(jax.grad(scanned)(params, h), state)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optax.adam(1e-3).init, ARGS[0])
    partly = lints(adam, few[0], state, few[1], donate_argnums=0, target="local")["not-donated"]
    assert partly.message.startswith("not all that could be is donated")
    assert "state" in partly.remedy
    assert "not-donated" not in lints(adam, few[0], state, few[1], donate_argnums=(0, 1))


def test_results_of_other_shapes_ask_for_no_donation():
    assert "not-donated" not in lints(lambda h: h @ h.T, spec(512, 64))


def test_a_policy_that_changed_nothing():
    # A layer whose residuals are its carry: any cut of two needs more than no cut.
    @jaxmem.remat_sqrt
    def sines(h: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (jnp.sin(h), None), h, None, length=2)[0].sum()

    found = lints(jax.grad(sines), ARGS[1])
    assert "keeps everything in a stack of 2 layers" in found["policy-no-effect"].message
    # Nothing is differentiated.
    for policy in ("full", "sqrt", "revolve"):
        found = lints(jaxmem.remat(scanned, policy), *ARGS)
        assert "no gradient goes through them" in found["policy-no-effect"].message
    assert "policy-no-effect" not in lints(jax.grad(jaxmem.remat(scanned, "none")), *ARGS)


def test_recomputation_that_the_compiler_removed():
    off = lints(jax.grad(lambda w, h: unrolled(w, h, prevent_cse=False)), *ARGS)
    assert "merged it with the first computation" in off["recomputation-removed"].message
    assert "test_lints.py" in off["barriers-off"].message
    on = lints(jax.grad(unrolled), *ARGS)
    assert "recomputation-removed" not in on
    assert "barriers-off" not in on
    # The CPU backend of jax 0.10 removes the barriers themselves.
    cpu = lints(jax.grad(unrolled), *ARGS, target="local")
    assert ("recomputation-removed" in cpu) is not SINCE_0_11
    assert ("merges recomputation" in cpu["cpu-numbers"].message) is not SINCE_0_11


def test_barriers_off_inside_a_scan_is_right():
    def checkpointed(weights: jax.Array, h: jax.Array) -> jax.Array:
        again = jax.checkpoint(layer, prevent_cse=False)
        return jax.lax.scan(lambda h, w: (again(h, w), None), h, weights)[0].sum()

    found = lints(jax.grad(checkpointed), *ARGS)
    assert "barriers-off" not in found
    assert "recomputation-removed" not in found


def test_two_levels_over_the_same_layer():
    @jaxmem.remat_full
    def twice(weights: jax.Array, h: jax.Array) -> jax.Array:
        again = jax.checkpoint(layer)
        return jax.lax.scan(lambda h, w: (again(h, w), None), h, weights)[0].sum()

    assert "test_lints.py" in lints(jax.grad(twice), *ARGS)["two-levels"].message
    assert "two-levels" not in lints(jax.grad(jaxmem.remat_sqrt(levels=2)(scanned)), *ARGS)


def test_cpu_numbers():
    assert (
        "not predictive" in lints(jax.grad(scanned), *ARGS, target="local")["cpu-numbers"].message
    )
    assert "cpu-numbers" not in lints(jax.grad(scanned), *ARGS)


def test_convolutions_without_cudnn():
    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    args = spec(2, 8, 16, 16), spec(8, 8, 3, 3)
    assert "nvidia-cudnn" in lints(convolved, *args)["cudnn-missing"].remedy
    assert "cudnn-missing" not in lints(convolved, *args, target="v5e-16g")
    assert "cudnn-missing" not in lints(jax.grad(scanned), *ARGS)


@pytest.mark.slow
def test_padding():
    def narrow(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=64)[1]

    # Whichever two dimensions the compiler puts last, tiles of 8 × 128 fit badly.
    found = lints(narrow, spec(130, 130), target="v5e-16g")["padding"]
    assert "% of the memory at the peak is padding" in found.message
    assert "f32[64,130,130]" in found.message
    assert "padding" not in lints(narrow, spec(128, 128), target="v5e-16g")


def test_the_compilers_own_rematerialisation():
    # A GPU whose memory the program does not fit in, so that the compiler tries.
    small = spec(64, 256, 256), spec(2**19, 256)
    found = lints(jax.grad(scanned), *small, target="l4-24g", suggest=False)
    assert "compiler-remat" in found
