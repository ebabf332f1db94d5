"""`jaxmem.one_bit_adam` and `one_bit_lamb`: moments in both phases, bad gradients, errors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.menagerie import exact_jit
from helpers.one_bit import DEVICES, PARAMS, Run, gradients, mesh_of, reference, run
from helpers.updating import assert_alike, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem

MAKERS = {"adam": jaxmem.one_bit_adam, "lamb": jaxmem.one_bit_lamb}
BOTH = pytest.mark.parametrize("name", sorted(MAKERS))


def ordinary(optimizer: Any, steps: int) -> Any:
    """Parameters after steps with the mean of the devices' gradients."""
    params, state, update = PARAMS, optimizer.init(PARAMS), exact_jit(optimizer.update)
    for step in range(steps):
        mean = jax.tree.map(lambda leaf: jnp.asarray(leaf.mean(0)), gradients(step))
        updates, state = update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


# ---------------------------------------------------------------- the numbers

RATE = optax.linear_schedule(0.02, 0.005, 12)
ORDINARY: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "adam": (
        lambda: jaxmem.one_bit_adam(RATE, b2=0.98, warmup_steps=9),
        lambda: optax.adam(RATE, b2=0.98),
    ),
    "adamw": (
        lambda: jaxmem.one_bit_adam(RATE, 0.8, eps=1e-3, weight_decay=0.1, warmup_steps=9),
        lambda: optax.adamw(RATE, 0.8, eps=1e-3, weight_decay=0.1),
    ),
    "lamb": (
        lambda: jaxmem.one_bit_lamb(RATE, weight_decay=0.1, warmup_steps=9),
        lambda: optax.lamb(RATE, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_the_warm_up_is_the_ordinary_optimizer(name: str) -> None:
    ours, theirs = ORDINARY[name]
    found = run(ours(), 8)
    assert_alike(found.params, ordinary(theirs(), 8), tolerance=2e-6)
    assert (int(found.state.count), int(found.state.frozen)) == (8, 0)
    assert not any(leaf.any() for leaf in jax.tree.leaves(found.state.worker_error))
    found.step(gradients(8))
    assert int(found.state.frozen) == 9


@pytest.mark.parametrize("scaled", [False, True])
def test_after_the_warm_up_it_is_the_adam_of_the_paper(scaled: bool) -> None:
    rate, b1, b2, eps, decay, warm_up = 0.02, 0.9, 0.95, 1e-6, 0.01, 4
    optimizer = jaxmem.one_bit_adam(
        rate, b1, b2, eps, weight_decay=decay, warmup_steps=warm_up, scaled=scaled
    )
    found = Run(optimizer)
    theta, mu, nu = _leaves(PARAMS), _zeros(PARAMS), _zeros(PARAMS)
    sent, owned = (_leaves(part) for part in (found.state.worker_error, found.state.server_error))
    for t in range(1, 11):
        found.step(gradients(t))
        g = _leaves(gradients(t))
        sizes = [np.sqrt(v / (1 - b2**warm_up)) + eps for v in nu] if scaled else [1.0, 1.0]
        mu, nu, sent, owned = advanced(g, mu, nu, sent, owned, b1, b2, sizes, warm=t <= warm_up)
        for k, (m, v) in enumerate(zip(mu, nu, strict=True)):
            u = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2 ** min(t, warm_up))) + eps)
            theta[k] = theta[k] - rate * (u + decay * theta[k])
    state = found.state
    pairs = (
        (found.params, theta), (state.mu, mu), (state.nu, nu), (state.worker_error, sent),
        (state.server_error, owned),
    )  # fmt: skip
    for one, other in pairs:
        for a, b in zip(jax.tree.leaves(one), other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


def test_after_the_warm_up_it_is_the_lamb_of_the_paper() -> None:
    rate, b1, b2, b3, eps, decay, warm_up = 0.02, 0.9, 0.95, 0.9, 1e-6, 0.01, 4
    optimizer = jaxmem.one_bit_lamb(
        rate, b1, b2, eps, weight_decay=decay, warmup_steps=warm_up, b3=b3, factor=(0.7, 4.0)
    )
    found = Run(optimizer)
    theta, mu, nu = _leaves(PARAMS), _zeros(PARAMS), _zeros(PARAMS)
    fresh, means, last = _zeros(PARAMS), [0.0, 0.0], [1.0, 1.0]
    sent, owned = (_leaves(part) for part in (found.state.worker_error, found.state.server_error))
    seen = set()
    for t in range(1, 13):
        found.step(gradients(t))
        warm, seen_steps = t <= warm_up, min(t, warm_up)
        before = mu
        mu, nu, sent, owned = advanced(
            _leaves(gradients(t)), mu, nu, sent, owned, b1, b2, [1.0, 1.0], warm=warm
        )
        for k, (m, v) in enumerate(zip(mu, nu, strict=True)):
            adam = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**seen_steps)) + eps)
            u = adam + decay * theta[k]
            if warm:
                c = np.linalg.norm(theta[k]) / np.linalg.norm(u)
                means[k], fresh[k] = b3 * means[k] + (1 - b3) * float(c), v
            else:
                fresh[k] = b2 * fresh[k] + (1 - b2) * ((m - b1 * before[k]) / (1 - b1)) ** 2
                held = np.sqrt(v / (1 - b2**warm_up)) + eps
                r = (held / (np.sqrt(fresh[k] / (1 - b2**t)) + eps)).max()
                share = min(1.0, np.linalg.norm(adam) / np.linalg.norm(u))
                r = np.clip(r * share + 1 - share, 0.9 * last[k], 1.1 * last[k])
                last[k] = float(np.clip(r, 0.7, 4.0))
                seen.add(round(last[k], 3))
                c = last[k] * means[k] / (1 - b3**warm_up)
            theta[k] = theta[k] - rate * c * u
    for one, other in (
        (found.params, theta), (found.state.factor, last), (found.state.nu_fresh, fresh),
    ):  # fmt: skip
        for a, b in zip(jax.tree.leaves(one), other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-5)
    assert len(seen) > 3


def advanced(
    g: Any, mu: Any, nu: Any, sent: Any, owned: Any, b1: float, b2: float, sizes: Any, *, warm: bool
) -> Any:
    """Both moments and both errors after a step, in numpy."""
    if warm:
        mean = [leaf.mean(0) for leaf in g]
        mu = [b1 * m + (1 - b1) * x for m, x in zip(mu, mean, strict=True)]
        nu = [b2 * v + (1 - b2) * x**2 for v, x in zip(nu, mean, strict=True)]
        return mu, nu, sent, owned
    own = [(b1 * m + (1 - b1) * x) / s for m, x, s in zip(mu, g, sizes, strict=True)]
    mu, sent, owned = reference(own, sent, owned, [v > 0 for v in nu])
    return [m * s for m, s in zip(mu, sizes, strict=True)], nu, sent, owned


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def _zeros(tree: Any) -> list[np.ndarray]:
    return [np.zeros(leaf.shape) for leaf in jax.tree.leaves(tree)]


def test_the_warm_up_ends_when_the_variance_is_stable() -> None:
    """As the paper tests it: sums of the variance now and 1 / (1 - b2) steps ago."""
    b2, stability = 0.9, 0.8
    params = jnp.zeros(300)
    optimizer = jaxmem.one_bit_adam(1e-3, b2=b2, stability=stability, check_after=12)
    found = Run(optimizer, params=params)
    nu, sums = np.zeros(300), []
    for step in range(50):
        g = (3 if step < 8 else 1) * gradients(step, params=params)
        found.step(g)
        nu = b2 * nu + (1 - b2) * np.float64(g).mean(0) ** 2
        sums.append(nu.sum() / (1 - b2 ** (step + 1)))
    stable = [
        t for t in range(13, 51)
        if min(sums[t - 1], sums[t - 11]) >= stability * max(sums[t - 1], sums[t - 11])
    ]  # fmt: skip
    assert 20 < stable[0] < 50
    assert int(found.state.frozen) == stable[0]


def _quadratic(feedback: bool) -> float:
    """The squared distance to the minimum of a quadratic, which begins at 0.2."""
    random, steps = np.random.default_rng(0), 150
    goal = 0.5 * random.standard_normal(64)
    sizes = np.exp(random.uniform(-1, 1, 64))
    own = 0.5 * random.standard_normal((DEVICES, 64))
    own -= own.mean(0)  # what pulls the devices apart, and is nothing on average
    optimizer = jaxmem.one_bit_adam(
        optax.linear_schedule(0.02, 0.0, steps), b2=0.9, warmup_steps=8, error_feedback=feedback
    )
    found = Run(optimizer, params=jnp.zeros(64))
    for _ in range(steps):
        found.step(np.float32(sizes * (np.asarray(found.params) - goal + own)))
    return float(((found.params - goal) ** 2).mean())


def test_without_the_errors_it_does_not_arrive() -> None:
    with_errors, without = _quadratic(True), _quadratic(False)
    assert with_errors < 0.02
    assert without > 0.2


# ---------------------------------------------------------------- gradients that are not finite


@BOTH
@pytest.mark.parametrize("warm", [True, False], ids=["warm-up", "signs"])
def test_a_step_with_a_bad_gradient_changes_nothing_anywhere(name: str, warm: bool) -> None:
    optimizer = MAKERS[name](1e-2, weight_decay=0.1, warmup_steps=5 if warm else 2)
    found = run(optimizer, 3)
    params, state = jax.tree.map(np.asarray, (found.params, found.state))
    bad = gradients(9)
    bad["layers"]["w"][2, 1, 3, 4] = np.nan if warm else np.inf  # on one of four devices
    found.step(bad)
    assert int(found.state.skipped) == 1
    assert_alike(found.params, params, tolerance=0)
    assert_alike(found.state._replace(skipped=state.skipped), state, tolerance=0)
    found.step(gradients(3))
    assert_alike(found.params, run(optimizer, 4).params, tolerance=0)


def test_float16_gradients_that_overflow_are_skipped_and_others_are_averaged_in_float32() -> None:
    params = jnp.ones(100, jnp.float16)
    found = Run(jaxmem.one_bit_adam(1e-2, warmup_steps=2), params=params)
    large = np.full((DEVICES, 100), 40000, np.float16)  # no float16 holds the sum of two
    for step in range(4):
        found.step(large)
        assert int(found.state.count) == step + 1
    assert found.params.dtype == jnp.float16
    np.testing.assert_allclose(found.params, 0.96, atol=2e-3)
    found.step(np.where(np.arange(DEVICES)[:, None] == 1, np.float16(np.inf), large))
    assert (int(found.state.count), int(found.state.skipped)) == (4, 1)


# ---------------------------------------------------------------- no variance at the switch


@BOTH
def test_numbers_without_a_variance_do_not_move_after_the_switch(name: str) -> None:
    optimizer = MAKERS[name](1e-2, warmup_steps=3)
    found = Run(optimizer)

    def step(k: int, is_there: bool) -> None:
        g = gradients(k)
        g["layers"]["w"][:, :, 2] *= is_there  # such as the embedding of a rare token
        g["b"] *= is_there
        found.step(g)

    for k in range(3):
        assert int(found.state.still) == 0
        step(k, is_there=False)
    assert int(found.state.still) == 5 + 33
    before = jax.tree.map(np.asarray, found.params)
    for k in range(3, 6):
        step(k, is_there=True)
    assert int(found.state.still) == 5 + 33
    np.testing.assert_array_equal(found.params["b"], before["b"])
    moved = np.asarray(found.params["layers"]["w"] != before["layers"]["w"])
    assert not moved[:, 2].any()
    assert np.delete(moved, 2, axis=1).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.state))
    step_of = jaxmem.one_bit_step(lambda p, x: 0.0, optimizer, mesh=mesh_of(DEVICES))
    said = str(step_of.explain(PARAMS, found.state)).splitlines()
    assert said[-2:] == [
        "  b: 5 numbers have no variance, and do not move",
        "  layers/w: 33 numbers have no variance, and do not move",
    ]


# ---------------------------------------------------------------- other trees and types


def test_trees_without_arrays_and_arrays_without_numbers_are_updated() -> None:
    assert run(jaxmem.one_bit_adam(1e-2, warmup_steps=1), 0, params={}).params == {}
    found = Run(jaxmem.one_bit_adam(1e-2, warmup_steps=1), params={})
    found.step({})
    assert int(found.state.frozen) == 1
    params = {"none": jnp.zeros((0, 3)), "one": jnp.zeros(())}
    found = Run(jaxmem.one_bit_adam(1e-2, warmup_steps=1), params=params)
    for step in range(3):
        found.step(gradients(step, params=params))
    assert np.isfinite(found.params["one"])


def test_axes_of_a_mesh_may_be_two() -> None:
    mesh = jax.make_mesh(
        (2, 2), ("replica", "data"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    axes = ("replica", "data")
    optimizer = jaxmem.one_bit_adam(1e-2, warmup_steps=2, axis=axes)
    step = jaxmem.one_bit_step(lambda w, x: ((x @ w) ** 2).mean(), optimizer, mesh=mesh, axis=axes)
    x = normal(0, 8, 40)
    params, state = step.init(jnp.ones(40))
    other = jaxmem.one_bit_step(
        lambda w, x: ((x @ w) ** 2).mean(), jaxmem.one_bit_adam(1e-2, warmup_steps=2),
        mesh=mesh_of(4),
    )  # fmt: skip
    theirs, held = other.init(jnp.ones(40))
    for _ in range(4):
        _, params, state = jax.jit(step)(params, state, x)
        _, theirs, held = jax.jit(other)(theirs, held, x)
    assert_alike(np.asarray(params), np.asarray(theirs), tolerance=1e-6)


# ---------------------------------------------------------------- errors

adam: Any = jaxmem.one_bit_adam
lamb: Any = jaxmem.one_bit_lamb


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: adam(1e-3, b1=1.0), "one_bit_adam: b1 must be at least 0 and less than 1, got"),
        (lambda: adam(1e-3, b2="x"), "one_bit_adam: b2 must be a number, got 'x' of type str"),
        (lambda: adam(1e-3, eps=-1.0), "one_bit_adam: eps must be at least 0, got -1.0"),
        (
            lambda: lamb(1e-3, warmup_steps=0),
            "one_bit_lamb: warmup_steps must be at least 1",
        ),
        (lambda: lamb(1e-3, b3=1), "one_bit_lamb: b3 must be at least 0 and less than 1, got 1"),
        (lambda: lamb(1e-3, factor=(2.0, 1.0)), "one_bit_lamb: factor must be the least and the"),
        (lambda: adam(1e-3, stability=1.0), "stability must be at least 0 and less than 1, got"),
    ],
)
def test_options_that_cannot_be_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert said in str(caught.value)


def _one_device() -> None:
    Run(jaxmem.one_bit_adam(1e-2, warmup_steps=2), devices=1)


def _outside_init() -> None:
    jaxmem.one_bit_adam(1e-2).init(PARAMS)


def _outside_update() -> None:
    optimizer = jaxmem.one_bit_lamb(1e-2, warmup_steps=2)
    optimizer.update(PARAMS, run(optimizer, 0).state, PARAMS)


def _without_params() -> None:
    optimizer = jaxmem.one_bit_adam(1e-2, weight_decay=0.1)
    optimizer.update(PARAMS, run(optimizer, 0).state)


def _of_others() -> None:
    found = Run(jaxmem.one_bit_adam(1e-2))
    found.params = {"b": PARAMS["b"]}
    found.step({"b": gradients(0)["b"]})


def _other_devices() -> None:
    found = Run(jaxmem.one_bit_adam(1e-2), devices=8)
    other = Run(jaxmem.one_bit_adam(1e-2), devices=4)
    other.state = jax.tree.map(np.asarray, found.state)
    other.step(gradients(0))


def _whole_numbers() -> None:
    Run(jaxmem.one_bit_adam(1e-2), params={"a": jnp.ones(3), "n": jnp.ones(3, jnp.int32)})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (_one_device, "sends signs between the devices of 'data', and there is one; pass a mesh"),
        (_outside_init, "no device axis 'data' is known here, so it is not known for how many"),
        (_outside_update, "one_bit_lamb: update averages over the devices of 'data', and is"),
        (_without_params, "one_bit_adam: the update depends on the parameters; pass them to"),
        (_of_others, "the state has layers/w, which the gradient lacks; pass the state that init"),
        (
            _other_devices,
            "the errors of b are float32[2, 5] and float32[2, 8] on a device, and not [1, 5] and "
            "[1, 8]: the state is of another number of devices than 4, or not split; pass it by "
            "jaxmem.redistribute_errors(state, devices)",
        ),
        (_whole_numbers, "one_bit_adam: n is int32[3], and signs are sent of real floating-point"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_are_told_with_the_remedy(call: Callable[[], None], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert said in str(caught.value)


@pytest.mark.slow
def test_gradients_that_jax_has_summed_already_are_refused_by_their_path() -> None:
    optimizer = jaxmem.one_bit_adam(1e-2, warmup_steps=2)
    state = run(optimizer, 0).state
    specs = jaxmem.one_bit_specs(state)

    def step(params: Any, state: Any, x: jax.Array, own: bool = False) -> Any:
        if own:
            params = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        gradient = jax.grad(lambda p: sum((leaf.sum() * x).mean() for leaf in jax.tree.leaves(p)))(
            params
        )
        return optimizer.update(gradient, state)

    mapped = functools.partial(
        jax.shard_map, mesh=mesh_of(4), in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
    with pytest.raises(ValueError, match="the gradient of b is the same on all devices already"):
        mapped(step)(PARAMS, state, jnp.ones(8))
    _, after = jax.jit(mapped(functools.partial(step, own=True)))(PARAMS, state, jnp.ones(8))
    assert int(after.count) == 1
