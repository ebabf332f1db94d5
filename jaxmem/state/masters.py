"""`master_weights`: parameters in bfloat16, and 8 bits more of each in the optimizer's state.

Split weights (FlashOptim and others): a bfloat16 number is the upper half of a float32 number,
rounded.  What rounding took away, counted in 128ths of half a unit in the last place, is an
integer of 8 bits, and both together are a master weight of 24 bits.  With 16 bits it is the
float32 number itself.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmem import _jax
from jaxmem.accumulate.trees import described, difference, leaf_names
from jaxmem.errors import JaxmemWarning, warn
from jaxmem.state.wrapping import check_optimizer

# ---------------------------------------------------------------- types


class MasterWeightsState(NamedTuple):
    """What `master_weights` remembers.

    Attributes:
      correction: of each parameter in bfloat16, int8 or int16 of its shape; of others one zero,
        as checkpoints take no array without numbers.
      inner_state: of the optimizer, as for parameters in float32.
    """

    correction: Any
    inner_state: Any

    def masters(self, params: Any) -> Any:
        """The master weights in float32, to be saved or evaluated; others as they are."""
        _check(params, self.correction, None)
        here = jax.tree.map(_jax.on_device, (params, self.correction))
        return jax.tree.map(_joined, *here)

    def with_masters(self, params: Any, masters: Any) -> "MasterWeightsState":
        """The same, with the corrections that make these masters of these parameters.

        Args:
          params: the parameters, of which those in bfloat16 are `masters` cast to it.
          masters: in float32.
        """
        _check(params, self.correction, None)
        found = difference(masters, params, ("the tree of masters", "that of the parameters"))
        if found:
            raise ValueError(f"{found}; pass the float32 weights that the parameters are cast from")

        def correction(param: Any, master: Any, old: Any) -> Any:
            if not _is_half(param):
                return old
            master = _jax.on_device(jnp.asarray(master, jnp.float32))
            magnitude = _rounded(master, _BITS[old.dtype.name])
            param = _jax.on_device(param).astype(jnp.float32)
            return _jax.beside(_correction(master, magnitude, param, old.dtype), old)

        return self._replace(correction=jax.tree.map(correction, params, masters, self.correction))


# ---------------------------------------------------------------- API


def master_weights(optimizer: Any, *, bits: int = 8) -> optax.GradientTransformationExtraArgs:
    """An optimizer for parameters in bfloat16, which holds what bfloat16 rounds away of them.

        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        optimizer = jaxmem.master_weights(optax.adamw(3e-4))

    In bfloat16, steps of less than 1/256 of a weight are rounded away, and training stalls.  Here
    parameter and correction together are a master weight of 16 significant bits (bfloat16 has 8,
    float32 has 24), at 3 bytes in place of the 4 of a float32 parameter; forward and backward pass
    read the 2 of bfloat16, and the gradient has 2 as well.  An update takes the master weight, runs
    the optimizer on it in float32, and splits what comes of it.  Steps of less than 1/65536 of a
    weight are rounded away still; with ``bits=16`` nothing is: the master is the float32 weight.

    `optax.apply_updates` gives the very parameters that the correction goes with: the updates are
    in float32, and what comes after it in `optax.chain` must not change them.  All of it is
    elementwise, so that `jaxmem.value_and_update` updates stacks with it in the backward pass.  It
    goes around or into `jaxmem.quantize_state` and `jaxmem.offload_state`, which leave the
    corrections as they are, or put them on the host.  With state in 8 bits, take
    `jaxmem.value_and_update`: in the ordinary step with gradients in bfloat16, whole arrays of it
    exist in float32, which is more than is saved.

    Parameters in float32 stay as they are, with no correction: cast to bfloat16 those that are to
    be, such as all but the norms.  At first the master weights are the parameters as cast.  To
    begin with all bits of float32 weights, and to get them back:

        state = state.with_masters(params, weights)
        weights = state.masters(params)

    of the `MasterWeightsState`, wherever in the state of other transformations it is.

    Args:
      optimizer: an optax transformation.
      bits: of a correction, 8 or 16.

    Returns:
      An optax transformation, whose state is a `MasterWeightsState`.

    Raises:
      TypeError, ValueError: an option cannot be; parameters are in float16 or less, which have
        another range than float32; at an update: the state is not of these parameters or
        these bits.

    Warns:
      jaxmem.JaxmemWarning: no parameter is in bfloat16, so that nothing is saved.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> params = {"w": jnp.ones((64, 512), jnp.bfloat16)}
    >>> optimizer = jaxmem.master_weights(optax.sgd(1e-3))
    >>> state = optimizer.init(params)
    >>> for _ in range(3):
    ...     updates, state = jax.jit(optimizer.update)(params, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params["w"].dtype.name, state.correction["w"].dtype.name
    ('bfloat16', 'int8')
    >>> float(params["w"][0, 0]), round(float(state.masters(params)["w"][0, 0]), 4)
    (0.99609375, 0.997)
    """
    check_optimizer("master_weights", optimizer)
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"master_weights: bits must be 8 or 16, got {described(bits)}")
    if bits not in _BITS.values():
        raise ValueError(
            f"master_weights: bits must be 8, for master weights of 24 bits, or 16, for float32, "
            f"got {bits}"
        )
    masters = _Masters(optax.with_extra_args_support(optimizer), bits)
    return optax.GradientTransformationExtraArgs(masters.init, masters.update)


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Masters:
    optimizer: Any
    bits: int

    def init(self, params: Any) -> MasterWeightsState:
        leaves = jax.tree.leaves(params)
        _check_types(params)
        if leaves and not any(map(_is_half, leaves)):
            warn(
                "master_weights: no parameter is in bfloat16, so that nothing is saved "
                f"({leaf_names(params)[0]} is {described(leaves[0])}); cast them before init: "
                "jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)",
                JaxmemWarning,
            )
        params = jax.tree.map(_jax.on_device, params)
        dtype = jnp.dtype(f"int{self.bits}")
        return MasterWeightsState(
            jax.tree.map(
                lambda p: jnp.zeros_like(p, dtype) if _is_half(p) else jnp.zeros((1,), dtype),
                params,
            ),
            self.optimizer.init(jax.tree.map(_wide, params)),
        )

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError(
                "master_weights needs the parameters, which are half of the master weights; pass "
                "them to update as the third argument"
            )
        _check(params, state.correction, self.bits)
        gradients = jax.tree.map(
            lambda p, g: g.astype(jnp.float32) if _is_half(p) else g, params, updates
        )
        masters = jax.tree.map(_joined, params, state.correction)
        found, inner = self.optimizer.update(gradients, state.inner_state, masters, **extra)
        leaves, tree = jax.tree.flatten(params)
        split = [
            _split(p, (m + u).astype(jnp.float32), c.dtype) if _is_half(p) else (u, c)
            for p, m, u, c in zip(
                leaves,
                *map(tree.flatten_up_to, (masters, found, state.correction)),
                strict=True,
            )
        ]
        new, correction = (tree.unflatten([pair[n] for pair in split]) for n in (0, 1))
        return new, MasterWeightsState(correction, inner)


_BITS = {"int8": 8, "int16": 16}

# Of float32 numbers as integers.  Of two with the same sign, the one of larger magnitude is the
# larger integer, and the next number is the next integer, also from one exponent to the next.
_MAGNITUDE, _INFINITE, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_HALF_UNIT = 0x8000  # half of the last place of bfloat16


def _split(param: Any, master: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The update that makes of a parameter the upper half of a master weight, and the rest.

    Rounding is done with integers: a cast to bfloat16 and back is something that XLA may leave out.
    """
    magnitude = _rounded(master, _BITS[dtype.name])
    # Halves go up, away from what is even, so that the rest is from -128 to 127 and not to 128.
    upper = _floats(master, _upper(magnitude + _HALF_UNIT))
    before = param.astype(jnp.float32)
    # In float32 the sum before + (upper - before) is `upper`, or is rounded to it, if that is more
    # than 2**-16 of what was before, neither infinite nor subnormal.  For the others, the rest is
    # taken from what `optax.apply_updates` will make of the sum.  Infinity stays what it is.
    update = jnp.where(before == upper, 0.0, upper - before)
    after = before + update
    bits = _magnitude(after)
    even = _upper(bits + (_HALF_UNIT - 1) + (_upper(bits) >> 16 & 1))
    stored = _floats(after, jnp.where(jnp.isnan(after), _NAN, even))
    return update, _correction(master, magnitude, stored, dtype)


def _correction(master: Any, magnitude: jax.Array, stored: jax.Array, dtype: Any) -> jax.Array:
    """What is missing in a bfloat16 number; nothing where it, or the master, is not finite."""
    own, limits = _magnitude(stored), jnp.iinfo(dtype)
    apart = (magnitude - own) >> (16 - _BITS[dtype.name])
    fits = (own < _INFINITE) & (magnitude < _INFINITE) & (_sign(stored) == _sign(master))
    return jnp.where(fits, jnp.clip(apart, limits.min, limits.max), 0).astype(dtype)


def _joined(param: Any, correction: Any) -> Any:
    """The master weight."""
    if not _is_half(param):
        return param
    bits = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << 16
    number = lax.bitcast_convert_type(bits, jnp.float32)
    own = _magnitude(number)
    rest = correction.astype(jnp.int32) << (16 - _BITS[correction.dtype.name])
    # What is not finite stays so, and a correction of other parameters makes no NaN of zeros.
    return _floats(number, jnp.where(own < _INFINITE, jnp.maximum(own + rest, 0), own))


def _rounded(master: jax.Array, bits: int) -> jax.Array:
    """The magnitude as an integer, of which parameter and correction have all bits; or NaN's."""
    found = _magnitude(master)
    if bits == 8:
        found = (found + (0x7F + (found >> 8 & 1))) & ~0xFF
    return jnp.where(jnp.isnan(master), _NAN, found)


def _magnitude(number: Any) -> jax.Array:
    return lax.bitcast_convert_type(jnp.asarray(number, jnp.float32), jnp.int32) & _MAGNITUDE


def _sign(number: Any) -> jax.Array:
    return lax.bitcast_convert_type(jnp.asarray(number, jnp.float32), jnp.int32) & ~_MAGNITUDE


def _upper(magnitude: jax.Array) -> jax.Array:
    return magnitude & ~0xFFFF


def _floats(signed_as: Any, magnitude: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(_sign(signed_as) | magnitude, jnp.float32)


def _is_half(leaf: Any) -> bool:
    return jnp.result_type(leaf) == jnp.bfloat16


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if _is_half(leaf) else leaf


def _check_types(params: Any) -> None:
    for leaf, name in zip(jax.tree.leaves(params), leaf_names(params), strict=True):
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 and not _is_half(leaf):
            raise TypeError(
                f"master_weights: {name or 'the parameter'} is {described(leaf)}, which has "
                "another range than float32, so that a master weight is no number of it with a "
                "correction; cast it to bfloat16"
            )


def _check(params: Any, correction: Any, bits: int | None) -> None:
    """Raises `ValueError` if these are no corrections of these parameters, of so many bits."""
    _check_types(params)
    like = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(jnp.shape(p) if _is_half(p) else (1,), jnp.int8), params
    )
    found = difference(correction, like, ("the state's correction", "one of these parameters"))
    if found:
        raise ValueError(
            f"the state is not of these parameters: {found}; pass the parameters that init had, in "
            "their types, as steps since have changed them"
        )
    for leaf, name in zip(jax.tree.leaves(correction), leaf_names(correction), strict=True):
        if leaf.dtype.name not in _BITS or bits not in (None, _BITS[leaf.dtype.name]):
            raise ValueError(
                f"the state is of another optimizer than master_weights with bits={bits}: its "
                f"correction of {name} is {described(leaf)}; pass the state that its init returned"
            )
