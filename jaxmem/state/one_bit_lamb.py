"""1-bit LAMB: 1-bit Adam for large batches, with a learning rate for each layer.

Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed", arXiv 2104.06069.  LAMB scales each layer's step by the norm of its parameters
over that of its update; with a variance that is held fixed this would no longer follow the
gradients.  So the coefficients are averaged in the warm-up, and then follow how the variance would
have gone on, which is estimated from the compressed momentum.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.state.one_bit import Core, check_number, check_params

# ---------------------------------------------------------------- types


class OneBitLambState(NamedTuple):
    """What `one_bit_lamb` remembers.

    Attributes:
      count, frozen, skipped, still, norms, mu, nu, worker_error, server_error: as in
        `OneBitAdamState`.
      nu_fresh: second moments that go on after the warm-up, float32 in the shapes of the
        parameters; `nu` in the warm-up.
      coefficient: for each array the decaying mean of its coefficient in the warm-up, which
        starts at zero.
      factor: for each array what its coefficient was last multiplied by after the warm-up.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    frozen: jax.Array
    skipped: jax.Array
    still: jax.Array
    norms: jax.Array
    mu: Any
    nu: Any
    worker_error: Any
    server_error: Any
    nu_fresh: Any
    coefficient: Any
    factor: Any


# ---------------------------------------------------------------- API


def one_bit_lamb(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    *,
    warmup_steps: int | None = None,
    stability: float = 0.96,
    check_after: int = 0,
    weight_decay: float = 0.0,
    coefficient: tuple[float, float] = (0.01, 10.0),
    b3: float = 0.9,
    factor: tuple[float, float] = (0.5, 4.0),
    factor_change: float = 0.1,
    axis: str | tuple[str, ...] = "data",
    scaled: bool = False,
    error_feedback: bool = True,
) -> optax.GradientTransformation:
    """1-bit LAMB, as an optax transformation: `one_bit_adam` with a coefficient for each array.

        optimizer = jaxmem.one_bit_lamb(1e-3, warmup_steps=1000, weight_decay=0.01)
        step = jaxmem.one_bit_step(loss, optimizer, mesh=mesh)  # a mesh with an axis "data"

    With u = m̂ / (√v̂ + eps) + weight_decay · θ, the step of an array is −α · c · u.  In the warm-up

        c = ‖θ‖ / ‖u‖, within `coefficient`

    as in optax.lamb (1 where a norm is 0).  Then moments are those of `one_bit_adam`, and

        c = r · (decaying mean of c in the warm-up, by b3)
        r = largest of (√v̂ + eps) / (√v̂_fresh + eps), within 1 ± `factor_change` of the last r
            and within `factor`

    where v is the variance held fixed, and v_fresh goes on with the gradient that the exchanged
    momentum amounts to, (m − b1 · m_before) / (1 − b1).  With weight decay, r counts by the share
    of ‖u‖ that is not of the decay.

    A stack of layers in one array has one coefficient, as in optax.lamb.  Each array has scales of
    its own here, so momenta of several layers need not be brought to one size, as in the paper.

    The state is P larger than that of `one_bit_adam`: (4 + 1/N) P.

    Args:
      coefficient: the least and the largest c in the warm-up.
      b3: of its decaying mean.
      factor: the least and the largest r.
      factor_change: by which share r changes from step to step, at most.
      learning_rate, b1, b2, eps, warmup_steps, stability, check_after, weight_decay, axis,
        scaled, error_feedback: as in `one_bit_adam`.

    Returns:
      An optax transformation with a `OneBitLambState`.

    Raises:
      TypeError, ValueError: as in `one_bit_adam`; at `update`: without parameters.
    """
    name = "one_bit_lamb"
    core = Core(
        name, b1, b2, eps, warmup_steps, stability, check_after, axis, scaled, error_feedback
    )
    check_number(name, "weight_decay", weight_decay, 0)
    check_number(name, "b3", b3, 0, below=1)
    check_number(name, "factor_change", factor_change, 0)
    for what, limits in (("coefficient", coefficient), ("factor", factor)):
        if len(limits) != 2 or not 0 < limits[0] <= limits[1]:
            raise ValueError(
                f"{name}: {what} must be the least and the largest, both more than 0, got {limits}"
            )

    def init(params: Any) -> OneBitLambState:
        return OneBitLambState(
            **core.begun(params),
            nu_fresh=jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            coefficient=jax.tree.map(lambda p: jnp.zeros((), jnp.float32), params),
            factor=jax.tree.map(lambda p: jnp.ones((), jnp.float32), params),
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        check_params(name, params)
        moments = core.advanced(updates, state)
        warm = state.frozen == 0
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        warm_steps = jnp.maximum(moments.frozen, 1)

        def fresh(m: jax.Array, before: jax.Array, v: jax.Array, old: jax.Array) -> jax.Array:
            gradient = (m - b1 * before) / (1 - b1)
            return jnp.where(warm, v, b2 * old + (1 - b2) * gradient**2)

        def moved(
            theta: Any, m: Any, v: Any, v_fresh: Any, mean: Any, last: Any
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            theta_wide = theta.astype(jnp.float32)
            adam = core.ratio(moments, m, v)
            u = adam + weight_decay * theta_wide
            norms = jnp.linalg.norm(theta_wide.ravel()), jnp.linalg.norm(u.ravel())
            is_zero = (norms[0] == 0) | (norms[1] == 0)
            own = jnp.where(is_zero, 1.0, norms[0] / jnp.where(is_zero, 1.0, norms[1]))
            own = jnp.clip(own, *coefficient)

            held, going = core.size(v, warm_steps), core.size(v_fresh, moments.count)
            r = jnp.max(held / going, where=v > 0, initial=0.0)
            if weight_decay:
                share = jnp.linalg.norm(adam.ravel()) / jnp.where(is_zero, 1.0, norms[1])
                share = jnp.minimum(share, 1.0)
                r = r * share + 1 - share
            r = jnp.clip(r, last * (1 - factor_change), last * (1 + factor_change))
            r = jnp.where(warm, last, jnp.clip(r, *factor))
            mean = jnp.where(warm, b3 * mean + (1 - b3) * own, mean)
            after = r * mean / (1 - b3 ** warm_steps.astype(jnp.float32))
            step = -rate * jnp.where(warm, own, after) * u
            return jnp.where(moments.finite, step, 0.0).astype(theta.dtype), mean, r

        nu_fresh = jax.tree.map(fresh, moments.mu, state.mu, moments.nu, state.nu_fresh)
        found = jax.tree.map(
            moved, params, moments.mu, moments.nu, nu_fresh, state.coefficient, state.factor
        )
        found, mean, r = jax.tree.transpose(
            jax.tree.structure(params), jax.tree.structure((0, 0, 0)), found
        )
        held = core.held(state, moments, nu_fresh=nu_fresh, coefficient=mean, factor=r)
        return found, OneBitLambState(**held)

    return optax.GradientTransformation(init, update)
