"""AdaLomo: an adaptive optimizer whose state is as small as Adafactor's, for one layer at a time.

Lv et al. 2023, "AdaLomo: Low-memory Optimization with Adaptive Learning Rate", arXiv 2310.10195.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem import _jax
from jaxmem.accumulate.trees import described

# ---------------------------------------------------------------- types


class AdaLomoState(NamedTuple):
    """What `adalomo` remembers.

    Attributes:
      count: int32, steps so far.
      rows, columns: of each matrix of a parameter, means of squared gradients along its last axis
        and along the one before; of a parameter without matrices, `rows` has the second
        moment itself, and `columns` nothing.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    rows: Any
    columns: Any


# ---------------------------------------------------------------- API


def adalomo(
    learning_rate: float | Callable[[Any], Any],
    decay: float = 0.99,
    *,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    eps: float = 1e-3,
) -> optax.GradientTransformation:
    """AdaLomo, as an optax transformation: adaptive, with next to no state.

        step = jaxmem.value_and_update(loss, jaxmem.adalomo(5e-4))

    For a matrix θ [m, n] with gradient g, of which v is held as a product of rows and columns:

        r ← β r + (1 − β) mean(g², last axis)          [m]
        c ← β c + (1 − β) mean(g², axis before)        [n]
        u = g / √v,  v = r cᵀ / mean(r)
        θ ← θ − α · u / max(1, RMS(u) / clip) · max(eps, RMS(θ))

    The update is scaled by the size of the parameters, so that one learning rate does for
    all.  Every norm and mean is taken of one matrix alone: axes before the last two, such as that
    of layers, are batches of matrices.  (optax's Adafactor takes norms over all of
    a stack.)  So stacked parameters can be updated in the backward pass, and training a stack is
    the same as training its layers.  The paper corrects the moments of the first steps for their
    start at zero, as is done here.

    A parameter with fewer than two axes has a second moment of its size, and norms over all of
    it; one with two axes, such as the biases of layers stacked, counts as one matrix.

    Args:
      learning_rate: α: a number, or a schedule of optax.
      decay: β of the second moments.
      weight_decay: θ is also moved by −α · weight_decay · θ.
      clip: updates with a larger root mean square are made smaller.
      eps: parameters with a smaller root mean square count as having this.

    Raises:
      TypeError, ValueError: an argument is no number, or not in its range.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> params = {"w": jnp.ones((12, 64, 32))}
    >>> optimizer = jaxmem.adalomo(0.1)
    >>> state = optimizer.init(params)
    >>> state.rows["w"].shape, state.columns["w"].shape
    ((12, 64), (12, 32))
    >>> updates, state = optimizer.update(params, state, params)
    >>> bool(jnp.allclose(updates["w"], -0.1))
    True
    """
    for name, value in (("decay", decay), ("weight_decay", weight_decay)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"adalomo: {name} must be a number, got {described(value)}")
    if not 0 <= decay < 1:
        raise ValueError(f"adalomo: decay must be at least 0 and less than 1, got {decay}")
    for name, value in (("clip", clip), ("eps", eps)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"adalomo: {name} must be a number, got {described(value)}")
        if not value > 0:
            raise ValueError(f"adalomo: {name} must be more than 0, got {value}")

    def init(params: Any) -> AdaLomoState:
        return AdaLomoState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(lambda leaf: jnp.zeros(_rows_shape(leaf.shape), _wide(leaf)), params),
            jax.tree.map(lambda leaf: jnp.zeros(_columns_shape(leaf.shape), _wide(leaf)), params),
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        gradients = updates
        if params is None:
            raise ValueError(
                "adalomo scales updates by the size of the parameters; pass them to update as the "
                "third argument"
            )
        count = jnp.asarray(optax.safe_increment(state.count))
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        corrected = 1 - jnp.asarray(decay, jnp.float32) ** count.astype(jnp.float32)

        def held(old: jax.Array, new: jax.Array) -> jax.Array:
            return decay * old + (1 - decay) * new

        square = jax.tree.map(lambda g: jnp.square(g.astype(_wide(g))), gradients)
        rows = jax.tree.map(
            lambda s, r: held(r, s.mean(-1) if s.ndim > 1 else s), square, state.rows
        )
        columns = jax.tree.map(
            lambda s, c: held(c, s.mean(-2)) if s.ndim > 1 else c, square, state.columns
        )

        def moved(g: jax.Array, r: jax.Array, c: jax.Array, theta: jax.Array) -> jax.Array:
            theta_wide, scale = theta.astype(r.dtype), corrected.astype(r.dtype)
            second = r / scale
            if g.ndim > 1:
                # Both factors may be split over the same devices, which their product cannot be.
                *stacked, row, column = _jax.split(g)
                r, c = _jax.split_so(r, (*stacked, row)), _jax.split_so(c, (*stacked, column))
                mean = jnp.maximum(r.mean(-1, keepdims=True), jnp.finfo(r.dtype).tiny)
                second = (r / mean)[..., :, None] * (c / scale)[..., None, :]
            u = g.astype(r.dtype) / jnp.sqrt(jnp.maximum(second, _LEAST))
            u = u / jnp.maximum(1.0, _rms(u) / clip) * jnp.maximum(eps, _rms(theta_wide))
            new = -rate * (u + weight_decay * theta_wide if weight_decay else u)
            return new.astype(theta.dtype)

        found = jax.tree.map(moved, gradients, rows, columns, params)
        return found, AdaLomoState(count, rows, columns)

    return optax.GradientTransformation(init, update)


# ---------------------------------------------------------------- implementation

# Of second moments: what is divided by is not less.
_LEAST = 1e-30


def _wide(leaf: jax.Array) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _rows_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if len(shape) > 1 else shape


def _columns_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1]) if len(shape) > 1 else (1,)


def _rms(array: jax.Array) -> jax.Array:
    """The root mean square of each matrix, or of all of an array with fewer axes."""
    axes = (-2, -1) if array.ndim > 1 else tuple(range(array.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(array), axis=axes, keepdims=True))
