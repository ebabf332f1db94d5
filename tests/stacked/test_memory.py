"""Compiled memory: what the plans promise, held against the compiler's own numbers.

Temporaries are those of `jax.grad`, jitted, for the CPU.  Stacks are scans, for
which the CPU's buffer assignment has the same shape as the accelerators'.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import Plan, policies
from jaxmem.policies import Policy

Remat = str | Policy | Plan

CARRY = (2048, 16)
CARRY_BYTES = 2048 * 16 * 4


def dense(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


@jax.custom_vjp
def squash(h: jax.Array) -> jax.Array:
    return jnp.tanh(h)


squash.defvjp(lambda h: (jnp.tanh(h), h), lambda h, ct: (ct * (1 - jnp.tanh(h) ** 2),))


def one_to_one(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    """A layer whose residuals are its carry, no more."""
    return squash(h + w), None


def temporaries(
    remat: Remat, n: int, *, layer: object = dense, carry: tuple[int, ...] = CARRY, width: int = 0
) -> int:
    """Bytes of temporaries of the gradient of n layers."""
    return _temporaries(remat, n, layer, carry, width)


@functools.cache
def _temporaries(remat: Remat, n: int, layer: object, carry: tuple[int, ...], width: int) -> int:
    def loss(ws: jax.Array, h: jax.Array) -> jax.Array:
        h, ys = jaxmem.scan(layer, h, ws, remat=remat)  # pyright: ignore[reportArgumentType]
        return h.sum() + sum((y**2).sum() for y in jax.tree.leaves(ys))

    width = width or carry[-1]
    shape = (n, width) if layer is one_to_one else (n, width, width)
    specs = [jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct(carry, "float32")]
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*specs).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


POLICIES: dict[str, Remat] = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "sqrt": "sqrt",
    "sqrt-2": policies.sqrt(levels=2),
    "sqrt-3": policies.sqrt(levels=3),
    "revolve-8": policies.revolve(8),
    "revolve-3": policies.revolve(3),
}


def test_the_layer_of_the_growth_test_has_tape_equal_to_carry() -> None:
    ws, h = jnp.ones((4, CARRY[-1])), jnp.ones(CARRY)
    (found,) = jaxmem.stacks(lambda ws, h: jaxmem.scan(one_to_one, h, ws, remat="sqrt"), ws, h)
    assert found.problem.residual_bytes == found.problem.carry_bytes == CARRY_BYTES


def test_sqrt_grows_as_the_root_of_the_depth() -> None:
    growth = temporaries("sqrt", 1024, layer=one_to_one) / temporaries("sqrt", 64, layer=one_to_one)
    assert growth <= 4.6


def test_more_levels_grow_more_slowly() -> None:
    two, three = POLICIES["sqrt-2"], POLICIES["sqrt-3"]
    assert temporaries(two, 1024) / temporaries(two, 64) <= 16 ** (1 / 3) * 1.25
    assert temporaries(three, 1024) < temporaries(two, 1024) < temporaries("sqrt", 1024)


def test_revolve_does_not_grow() -> None:
    assert temporaries(policies.revolve(8), 1024) <= 1.3 * temporaries(policies.revolve(8), 64)


@pytest.mark.parametrize("name", POLICIES)
def test_a_prime_length_costs_what_its_neighbour_costs(name: str) -> None:
    prime, power = temporaries(POLICIES[name], 61), temporaries(POLICIES[name], 64)
    assert abs(prime - power) <= 0.15 * power


@pytest.mark.parametrize("layer", [dense, one_to_one])
@pytest.mark.parametrize(
    "n", [1, 2, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 16)), 61, 64]
)
def test_sqrt_is_never_above_full_nor_none(n: int, layer: object) -> None:
    ours = temporaries("sqrt", n, layer=layer)
    slack = 4096  # counters and the like; a carry is 128 KiB
    assert ours <= temporaries("full", n, layer=layer) + slack
    assert ours <= temporaries("none", n, layer=layer) + slack


def test_full_is_the_hand_written_form() -> None:
    def loss(ws: jax.Array, h: jax.Array) -> jax.Array:
        layer = jax.checkpoint(dense, prevent_cse=False)
        return jax.lax.scan(layer, h, ws)[0].sum()

    specs = [jax.ShapeDtypeStruct((64, 16, 16), "float32"), jax.ShapeDtypeStruct(CARRY, "float32")]
    by_hand = jax.jit(jax.grad(loss, (0, 1))).lower(*specs).compile().memory_analysis()
    assert by_hand is not None
    assert temporaries("full", 64) == by_hand.temp_size_in_bytes


def test_the_best_segment_depends_on_the_sizes() -> None:
    """A layer whose residuals are many carries is cut into shorter segments than sqrt(n)."""

    def wide(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        a = jnp.sin(jnp.repeat(h, 8, axis=-1))
        return h + jnp.cos(a @ jnp.repeat(w, 8, axis=0)), None

    ours = temporaries("sqrt", 64, layer=wide)
    assert ours < 0.8 * temporaries(Plan.periodic(64), 64, layer=wide)
    others = [temporaries(Plan.periodic(64, s), 64, layer=wide) for s in (2, 4, 8, 16, 32, 64)]
    assert ours <= 1.05 * min(others)


# ---------------------------------------------------------------- parameters

WIDTH = 2048
PARAM_BYTES = WIDTH * WIDTH * 4
CUTS = {
    "periodic-8": lambda n: Plan.periodic(n, 8),
    "periodic-4-2": lambda n: Plan.periodic(n, [4, 2]),
    "periodic-1": lambda n: Plan.periodic(n, 1),
    **{name: (lambda n, p=policy: p) for name, policy in POLICIES.items() if name != "none"},
}


LENGTHS = [61, pytest.param(64, marks=pytest.mark.slow)]  # a prime, and what is easy to cut


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("cut", CUTS)
def test_no_plan_copies_parameters_or_their_gradients(cut: str, n: int) -> None:
    heavy = functools.partial(temporaries, n=n, carry=(1, WIDTH))
    assert heavy(CUTS[cut](n)) <= heavy("none") + 2 * PARAM_BYTES


def low_precision(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    """Weights are cast in the layer; the cast ones are residuals of the product."""
    return jnp.tanh(h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32), None


@pytest.mark.parametrize("n", LENGTHS)
def test_casts_of_parameters_are_not_kept(n: int) -> None:
    heavy = functools.partial(temporaries, n=n, layer=low_precision, carry=(1, WIDTH))
    for plan in (Plan.periodic(n, 8), Plan.revolve(n, 8)):
        assert heavy(plan) <= heavy("full") + 2 * PARAM_BYTES


def with_large_y(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = jnp.tanh(h @ w)
    return h, h.sum() * jnp.ones((2048, 256))


Y_BYTES = 2048 * 256 * 4


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("cut", CUTS)
def test_no_plan_copies_ys(cut: str, n: int) -> None:
    heavy = functools.partial(temporaries, n=n, layer=with_large_y, carry=(4, 16))
    # No remat keeps residuals of the ys as well; ours may at most hold a layer's worth more.
    least = 2 * n * Y_BYTES
    if cut == "dots":
        assert heavy(CUTS[cut](n)) <= heavy("none")
    else:
        assert heavy(CUTS[cut](n)) <= least + 2 * Y_BYTES


def test_parameters_that_are_not_differentiated_get_no_gradient_buffer() -> None:
    def grad_of_input(remat: Remat) -> int:
        def loss(h: jax.Array, ws: jax.Array) -> jax.Array:
            return jaxmem.scan(dense, h, ws, remat=remat)[0].sum()

        specs = [
            jax.ShapeDtypeStruct((1, WIDTH), "float32"),
            jax.ShapeDtypeStruct((16, WIDTH, WIDTH), "float32"),
        ]
        analysis = jax.jit(jax.grad(loss)).lower(*specs).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    # One layer read for the forward, one for the backward; a gradient buffer would be 16.
    for plan in (Plan.periodic(16, 4), policies.revolve(4)):
        assert grad_of_input(plan) <= 2.1 * PARAM_BYTES


def test_shared_parameters_under_vmap_get_one_gradient() -> None:
    """A custom derivative rule makes one gradient for each example and adds them up afterwards."""
    batch = 64

    def peak(remat: Remat) -> int:
        def loss(ws: jax.Array, hs: jax.Array) -> jax.Array:
            return jax.vmap(lambda h: jaxmem.scan(dense, h, ws, remat=remat)[0].sum())(hs).sum()

        specs = [
            jax.ShapeDtypeStruct((16, 256, 256), "float32"),
            jax.ShapeDtypeStruct((batch, 256), "float32"),
        ]
        analysis = jax.jit(jax.grad(loss)).lower(*specs).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    one_example = 16 * 256 * 256 * 4
    assert peak(Plan.periodic(16, 4)) < peak("none") + one_example
    assert peak(policies.revolve(4)) < peak("none") + one_example


def test_compiling_does_not_depend_on_the_depth() -> None:
    """The schedule is a table that a loop reads: the program has one size for any depth."""

    def program(n: int) -> int:
        def loss(ws: jax.Array) -> jax.Array:
            return jaxmem.scan(dense, jnp.ones((2, 8)), ws, remat=policies.revolve(8))[0].sum()

        spec = jax.ShapeDtypeStruct((n, 8, 8), "float32")
        text = jax.jit(jax.grad(loss)).lower(spec).as_text()
        return text.count("\n")

    assert program(10_000) == program(100)
