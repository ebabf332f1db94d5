"""Corners in which a derivative rule of one's own is easily wrong; each was met once."""

import functools
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import Plan, policies

W = jax.random.normal(jax.random.key(0), (7, 4, 4)) * 0.5
X = jax.random.normal(jax.random.key(1), (4,))

POLICIES = {
    "segments": policies.sqrt(segments=3),
    "levels": policies.sqrt(segments=(2, 2)),
    "revolve-1": policies.revolve(1),
    "revolve-3": policies.revolve(3),
    "revolve-8": policies.revolve(8),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


def model(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(layer, x, w)[0].sum()


def sown(w: jax.Array, x: jax.Array) -> jax.Array:
    def with_metrics(h: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(h @ w), (jnp.log(jnp.abs(h) * 0), 2 * h)

    h, (_, used) = lax.scan(with_metrics, x, w)
    return h.sum() + used.sum()


@functools.cache
def gradients(fn: Any) -> Any:
    return jax.jit(jax.grad(fn, (0, 1)))(W, X)


@each_policy
def test_unused_ys_do_not_reach_the_gradient(policy: Any) -> None:
    """Zeros pulled through an infinite derivative would be NaN."""
    grads = gradients(jaxmem.remat(sown, policy))
    chex.assert_trees_all_close(grads, gradients(sown), rtol=1e-6)


@each_policy
def test_forward_mode_stops_where_a_gradient_is_stopped(policy: Any) -> None:
    """A carry that starts at an infinite derivative, and none of whose values has a tangent."""

    def stopped(w: jax.Array, x: jax.Array) -> jax.Array:
        def with_state(carry: Any, w: jax.Array) -> Any:
            h, state = carry
            return (jnp.tanh(h @ w) + jnp.sqrt(state), lax.stop_gradient(state + 0 * h.sum())), None

        return lax.scan(with_state, (x, jnp.zeros(())), w)[0][0].sum()

    def along(fn: Any) -> Any:
        return jax.jvp(lambda x: fn(W, x), (X,), (X,))

    chex.assert_trees_all_close(along(jaxmem.remat(stopped, policy)), along(stopped), rtol=1e-6)


def test_unused_ys_cost_no_memory() -> None:
    def temporaries(policy: Any) -> int:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            def attend(h: jax.Array, w: jax.Array) -> Any:
                scores = jax.nn.softmax(h @ h.T)
                return jnp.tanh(h @ w), scores.max(-1).mean()

            return jaxmem.scan(attend, x, w, remat=policy)[0].sum()

        specs = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 16, 16), (256, 16)]]
        analysis = jax.jit(jax.grad(loss)).lower(*specs).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    scores = 256 * 256 * 4
    assert temporaries(policies.sqrt(segments=8)) < temporaries("full") + 2 * scores


@each_policy
def test_double_precision(policy: Any) -> None:
    with jax.enable_x64(True):
        w, x = W.astype("float64"), X.astype("float64")
        grads = jax.jit(jax.grad(jaxmem.remat(model, policy), (0, 1)))(w, x)
        chex.assert_trees_all_close(grads, jax.jit(jax.grad(model, (0, 1)))(w, x), rtol=1e-14)


@each_policy
def test_forward_mode_under_a_named_axis(policy: Any) -> None:
    def mixed(x: jax.Array) -> jax.Array:
        def mean(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(lax.pmean(h @ w, "i")), None

        return lax.scan(mean, x, W)[0].sum()

    def push(f: Any) -> Any:
        xs = jnp.stack([X, 2 * X])
        return jax.vmap(lambda x: jax.jvp(f, (x,), (x,)), axis_name="i")(xs)

    chex.assert_trees_all_close(push(jaxmem.remat(mixed, policy)), push(mixed), rtol=1e-6)


def test_a_wrapper_around_a_decorated_layer_stays() -> None:
    def halved(f: Any) -> Any:
        @functools.wraps(f)
        def run(h: jax.Array, w: jax.Array) -> Any:
            h, y = f(h, w)
            return h * 0.5, y

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmem.NoStackWarning)
        ours = jaxmem.scan(halved(jaxmem.remat_sqrt(layer)), X, W)[0]
    chex.assert_trees_all_close(ours, lax.scan(halved(layer), X, W)[0], rtol=1e-6)


def test_masks_and_casts_in_jitted_functions_are_not_kept() -> None:
    def masked(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        keep = jnp.tril(jnp.ones((256, 256), bool))
        return jnp.where(keep, 1.0, 0.0) @ jnp.tanh(h @ jnp.clip(w, -1, 1)), None

    specs = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 16, 16), (256, 16)]]
    (found,) = jaxmem.stacks(lambda w, h: jaxmem.scan(masked, h, w, remat="sqrt"), *specs)
    carry = found.problem.carry_bytes
    assert found.problem.residual_bytes <= 4 * carry, "256 × 256 of mask would be 16"


def test_names_given_in_a_custom_vjp() -> None:
    @jax.custom_vjp
    def attend(h: jax.Array) -> jax.Array:
        return jnp.sin(h)

    attend.defvjp(
        lambda h: (jnp.sin(h), checkpoint_name(jnp.cos(h), "cosine")), lambda c, ct: (ct * c,)
    )

    def named(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (attend(h @ w), None), x, w)[0].sum()

    decorated = jaxmem.remat(named, policies.names(save="cosine"))
    chex.assert_trees_all_close(jax.grad(decorated)(W, X), jax.grad(named)(W, X), rtol=1e-6)


def test_names_outside_the_stack_are_no_names_of_it() -> None:
    def named(w: jax.Array, x: jax.Array) -> jax.Array:
        return checkpoint_name(jnp.sin(model(w, x)), "outside")

    with pytest.raises(ValueError, match="'outside', but nothing in the layers has that name"):
        jaxmem.remat(named, policies.names(save="outside"))(W, X)


@pytest.mark.parametrize("policy", ["full", policies.sqrt(segments=3)], ids=["full", "segments"])
def test_writes_to_a_ref_are_refused(policy: Any) -> None:
    def counting(w: jax.Array, ref: Any) -> jax.Array:
        def count(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            ref[...] = ref[...] + 1
            return jnp.tanh(h @ w), None

        return lax.scan(count, X, w)[0].sum()

    ref = jax.new_ref(jnp.zeros(()))
    with pytest.raises(ValueError, match="a Ref that is read or written"):
        jax.jit(jaxmem.remat(counting, policy))(W, ref)


@pytest.mark.filterwarnings("ignore::jaxmem.NoEffectWarning")
def test_the_policy_further_in_stays_the_only_one() -> None:
    for inner in ("full", "dots", policies.revolve(2)):
        once = jaxmem.remat(model, inner)
        for outer in ("full", "sqrt", policies.sqrt(segments=3)):
            (found,) = jaxmem.stacks(jaxmem.remat(once, outer), W, X)
            assert found.plan == jaxmem.stacks(once, W, X)[0].plan


def test_disabled_jit_runs_the_function_as_it_is() -> None:
    with jax.disable_jit():
        ours = jaxmem.scan(layer, X, W, remat=Plan.periodic(7))[0].sum()
    chex.assert_trees_all_close(ours, model(W, X), rtol=1e-6)


def test_policy_that_was_not_called() -> None:
    with pytest.raises(TypeError, match=r"call it, as in jaxmem.policies.sqrt\(\)"):
        jaxmem.remat(model, policies.sqrt)  # pyright: ignore[reportArgumentType]


def test_none_among_the_arguments_of_a_report() -> None:
    x = jnp.ones(8)
    report = jaxmem.memory_report(lambda p, _: p["w"] * 2, {"w": x, "b": None}, None)
    assert report.arguments == {"p/w": 32}


@jax.custom_jvp
def root(x: jax.Array) -> jax.Array:
    """Square root by Newton's method, which runs on in its derivative until both are exact."""
    return lax.while_loop(lambda y: jnp.abs(y**2 - x).max() > 1e-4, lambda y: (y + x / y) / 2, x)


@root.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents

    def go_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        y, dy = state
        return (jnp.abs(y**2 - x).max() > 1e-4) | (jnp.abs(2 * y * dy - dx).max() > 1e-4)

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, dy = state
        return (y + x / y) / 2, (dy + dx / y - x * dy / y**2) / 2

    return lax.while_loop(go_on, step, (x, dx))


def halved(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda y: y.max() > 0.1, lambda y: y / 2, x)


def times(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 2 + (x.sum() > 0).astype(int), lambda _, y: jnp.sin(y) * x, x)


ALL = POLICIES | {
    "sqrt": policies.sqrt(),
    "full": policies.full(),
    "dots": policies.dots(),
    "offload": policies.offload(),
    "names": policies.names(offload=["kept"]),
    "keep": Plan.keep([(4, None), (3, policies.Keep((0, 1)))]),
}


def model_of(operation: Any) -> Any:
    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(checkpoint_name(operation(1 + (h @ w) ** 2), "kept"))
            return h, h.sum()

        h, sums = lax.scan(layer, x, w)
        return (h**2).sum() + sums.sum()

    return model


@functools.cache
def forward(operation: Any, policy: str | None) -> Any:
    """Values and derivatives along a direction, of one input and of several."""
    fn = model_of(operation)
    if policy:
        fn = jaxmem.remat(fn, ALL[policy])

    def along(w: jax.Array, x: jax.Array) -> Any:
        return jax.jvp(fn, (w, x), (jnp.cos(w), x))

    several = jnp.stack([X, 2 * X])
    found = jax.jit(lambda w, x, several: (along(w, x), jax.vmap(along, (None, 0))(w, several)))(
        W, X, several
    )
    with pytest.raises(ValueError, match="reverse-mode autodiff|Reverse-mode differentiation"):
        jax.grad(fn)(W, X)
    return found


@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")
@pytest.mark.parametrize(
    ("operation", "policy"),
    # jax can linearise the last two, though not transpose them.
    [*((root, policy) for policy in ALL), (halved, "segments"), (times, "revolve-3")],
)
def test_operations_that_have_forward_mode_only(operation: Any, policy: str) -> None:
    ours, theirs = forward(operation, policy), forward(operation, None)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)
