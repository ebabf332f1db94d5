"""`dynamic_loss_scale`: gradients of float16 that neither vanish nor overflow.

Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2): the loss is
multiplied by a number as large as gradients in float16 bear.  Where one of them is not finite the
step is left out and the number halved; after so many good steps it is doubled.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem._util.imported import nnx_is_used
from jaxmem.accumulate.stepped import stepped
from jaxmem.accumulate.trees import at_least_float32, described
from jaxmem.errors import check_positive
from jaxmem.state.update import is_as_a_whole
from jaxmem.state.wrapping import check_optimizer

# ---------------------------------------------------------------- types


class DynamicLossScaleState(NamedTuple):
    """What `dynamic_loss_scale` remembers.

    Attributes:
      scale: float32, what the next loss is to be multiplied by.
      good_steps: int32, steps since the scale last changed.
      skipped: int32, steps that were left out since the beginning.
      finite: bool, whether the last step was made.
      inner_state: of the optimizer.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    finite: jax.Array
    inner_state: Any


# ---------------------------------------------------------------- API


def dynamic_loss_scale(
    optimizer: Any,
    initial: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    *,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The same optimizer for gradients of a loss that was multiplied by a scale.

        optimizer = jaxmem.dynamic_loss_scale(optax.adamw(3e-4))

        def scaled(params, batch, scale):
            return loss(params, batch) * scale

        scale = jaxmem.loss_scale(state)
        value, gradients = jax.value_and_grad(scaled)(params, batch, scale)
        updates, state = optimizer.update(gradients, state, params)     # value / scale is the loss

    An update divides the gradients by the scale, in float32 at the least, and passes them on.  If
    a gradient is infinite or NaN, nothing is updated: parameters and the optimizer's state stay as
    they are, bit for bit, and the scale is divided by `factor`.  After `growth_interval` steps
    without that it is multiplied by it.

    In `jaxmem.MultiSteps` the scale is that of a whole window, which is left out if one of its
    microbatches overflows; around `MultiSteps` each microbatch is left out by itself.  In
    `jaxmem.value_and_update` the scale is an argument of the loss like any other, and the backward
    pass runs twice, as no parameter may be updated before all gradients are known to be finite.
    Gradients of arrays that are spread over devices count as a whole, so that all devices do the
    same.  Where the state is donated, read the scale inside of what is jitted: outside it is one of
    the arrays that are given away.

    Args:
      optimizer: an optax transformation.  One that takes `value=` gets it divided by the scale.
      initial: the scale to begin with; a power of two divides out exactly.
      growth_interval: how many good steps there are before the scale grows.
      factor: by how much it grows and shrinks.
      min_scale, max_scale: between which numbers it stays.
      axis_name: inside `jax.shard_map` or `jax.pmap`, the axes over which gradients differ when
        they come here; what overflows on one device is left out on all.

    Returns:
      An optax transformation with the state `DynamicLossScaleState`.

    Raises:
      TypeError, ValueError: an option cannot be; at an update: the state is not that of `init`.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> optimizer = jaxmem.dynamic_loss_scale(optax.sgd(1.0), initial=8)
    >>> params = jnp.float32(1.0)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.float32(4.0), state, params)
    >>> float(updates), float(jaxmem.loss_scale(state))
    (-0.5, 8.0)
    >>> updates, state = optimizer.update(jnp.float32(jnp.inf), state, params)
    >>> float(params + updates), float(jaxmem.loss_scale(state)), int(state.skipped)
    (1.0, 4.0, 1)
    """
    check_optimizer("dynamic_loss_scale", optimizer)
    scaled = _Scaled(
        optax.with_extra_args_support(optimizer),
        _number("initial", initial),
        check_positive("growth_interval", growth_interval),
        _number("factor", factor),
        _number("min_scale", min_scale),
        _number("max_scale", max_scale),
        axis_name,
    )
    if scaled.factor <= 1:
        raise ValueError(f"factor must be greater than 1, got {factor}")
    if not scaled.min_scale <= scaled.initial <= scaled.max_scale:
        raise ValueError(
            f"initial={initial} must be between min_scale={min_scale} and max_scale={max_scale}"
        )
    return optax.GradientTransformationExtraArgs(scaled.init, scaled.update)


def loss_scale(state: Any) -> jax.Array:
    """What the next loss is to be multiplied by: a float32 scalar.

    Args:
      state: of an optimizer that is, or has in it, a `dynamic_loss_scale`; an `nnx.Optimizer`'s
        `opt_state`, too.

    Raises:
      ValueError: there is none in it, or there are several.
    """
    found = [leaf for leaf in _named(state) if leaf is not None]
    if len(found) != 1:
        raise ValueError(
            f"loss_scale: {'several states' if found else 'no state'} of dynamic_loss_scale in "
            f"what was passed, a {type(state).__name__}; pass the state of the optimizer, with one "
            "jaxmem.dynamic_loss_scale in it"
        )
    (scale,) = found
    if nnx_is_used():
        from flax import nnx

        # The number of now: the next update changes the variable.
        return scale[...] if isinstance(scale, nnx.Variable) else scale
    return scale


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Scaled:
    optimizer: Any
    initial: float
    growth_interval: int
    factor: float
    min_scale: float
    max_scale: float
    axis_name: Any

    def init(self, params: Any) -> DynamicLossScaleState:
        return DynamicLossScaleState(
            scale=jnp.full((), self.initial, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            finite=jnp.ones((), jnp.bool_),
            inner_state=self.optimizer.init(params),
        )

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, DynamicLossScaleState]:
        if not isinstance(state, DynamicLossScaleState):
            raise TypeError(
                "dynamic_loss_scale: the state must be what init or the last update returned, got "
                f"a {type(state).__name__}"
            )
        gradients = jax.tree.map(lambda leaf: _divided(leaf, state.scale), updates)
        if extra.get("value") is not None:
            extra["value"] = _divided(extra["value"], state.scale)
        finite = self._finite(updates)
        if is_as_a_whole():
            found, inner = self.optimizer.update(gradients, state.inner_state, params, **extra)
            # `where` works row by row, and so can be done in the backward pass.
            inner = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), inner, state.inner_state
            )
        else:
            found, _, inner = stepped(
                self.optimizer, finite, updates, gradients, state.inner_state, params, extra
            )
        # Of all numbers −0 alone leaves each what it was: −0 + 0 is 0.
        changes = jax.tree.map(
            lambda leaf: jnp.where(finite, leaf, jnp.full((), -0.0, leaf.dtype)), found
        )
        good = state.good_steps + 1
        grows = finite & (good >= self.growth_interval)
        scale = jnp.where(
            finite,
            jnp.where(grows, jnp.minimum(state.scale * self.factor, self.max_scale), state.scale),
            jnp.maximum(state.scale / self.factor, self.min_scale),
        )
        return changes, DynamicLossScaleState(
            scale=scale,
            good_steps=jnp.where(finite & ~grows, good, 0),
            skipped=jnp.where(finite, state.skipped, optax.safe_increment(state.skipped)),
            finite=finite,
            inner_state=inner,
        )

    def _finite(self, gradients: Any) -> jax.Array:
        """Whether all gradients are finite, on all devices."""
        flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradients)]
        finite = jnp.asarray(True)
        for flag in flags:
            finite = finite & flag
        if self.axis_name is None:
            return finite
        return jax.lax.pmin(finite.astype(jnp.int32), self.axis_name) > 0


def _divided(leaf: Any, scale: jax.Array) -> jax.Array:
    """A gradient of the loss, from one of the scaled loss; small ones do not vanish."""
    leaf = jnp.asarray(leaf)
    dtype = at_least_float32(leaf.dtype)
    return leaf.astype(dtype) / scale.astype(jnp.finfo(dtype).dtype)


def _number(what: str, value: Any) -> float:
    real = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not real:
        raise TypeError(f"{what} must be a number, got {described(value)}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be finite and greater than 0, got {value}")
    return float(value)


def _named(state: Any) -> list[Any]:
    """The scales of all such states in a tree."""
    if isinstance(state, DynamicLossScaleState):
        return [state.scale, *_named(state.inner_state)]
    found = []
    known: Any = DynamicLossScaleState
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, known))
    for node in nodes:
        if isinstance(node, known):
            found += [node.scale, *_named(node.inner_state)]
    return found
