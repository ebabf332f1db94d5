"""`quantize_state`: an optimizer whose state is stored in 8 bits.

8-bit optimizers (Dettmers et al. 2022, arXiv 2110.02861): moments are decoded, updated in float32
and encoded again; the update itself is computed from them before they are rounded.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.accumulate.trees import difference, leaf_names, own_zero
from jaxmem.errors import JaxmemWarning, check_positive, warn
from jaxmem.state import created, intervals, rows, stored
from jaxmem.state.codecs import Codec, Coded
from jaxmem.state.codecs import codec as codec_of
from jaxmem.state.update import is_as_a_whole, traced
from jaxmem.state.wrapping import check_keep, check_optimizer

# ---------------------------------------------------------------- API


def quantize_state(
    optimizer: Any,
    codec: str | Codec = "dynamic",
    block: int | None = None,
    *,
    min_size: int = 4096,
    keep: Callable[[str], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The same optimizer with its state in 8 bits per number: AdamW's 8 bytes become 2.

        optimizer = jaxmem.quantize_state(optax.adamw(3e-4))

    Large arrays of the state are stored as `Coded`: codes of one byte, and for each block of
    numbers one scale; all else, such as counters, stays as it is.  An update decodes them, runs the
    optimizer in float32 and encodes what comes of it, some rows at a time where each row of the new
    state follows from the same row of the old, so that no copy of a large array in float32 exists.
    In `jaxmem.value_and_update` this happens in the backward pass.

    Arrays that are never negative, such as second moments, have codes without signs.  Which they
    are is found from what the optimizer computes.  Arrays that `init` makes of the parameters'
    values, such as the iterates that `optax.contrib.schedule_free` averages, stay as they are: of
    these, steps are smaller than what 8 bits round.

    The paper keeps the state of embeddings in 32 bits, for their gradients are rare and large;
    ``keep=lambda path: "embed" in path`` does so.

    Args:
      optimizer: an optax transformation.
      codec: "dynamic", the paper's; "companding", without a table; or a value such as
        `jaxmem.Dynamic(block=512)`.  The same for all of a run: codes do not say whose they are.
      block: how many numbers share a scale; None for the codec's own, 256 or 32.
      min_size: arrays with fewer numbers stay as they are.
      keep: from the path of an array in the optimizer's state, such as "0/nu/embedding", to whether
        it stays as it is.

    Returns:
      An optax transformation.  Its state is that of `optimizer`, with `Coded` in the place of
      arrays.

    Raises:
      TypeError, ValueError: an option cannot be; at an update: the state is not that of `init`,
        or the optimizer changes the form of its state.

    Warns:
      jaxmem.JaxmemWarning: the optimizer's update wants other arguments than `value`, so that it
        is not found what it computes; its state stays as it is.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> params = {"w": jnp.ones((64, 512)), "b": jnp.ones(512)}
    >>> adam = jaxmem.quantize_state(optax.adam(1e-3))
    >>> state = adam.init(params)
    >>> state[0].mu["w"].codes.dtype.name, state[0].nu["w"].codes.dtype.name, state[0].nu["b"].dtype
    ('int8', 'uint8', dtype('float32'))
    >>> updates, state = jax.jit(adam.update)(params, state, params)
    >>> bool(jnp.allclose(updates["w"], -1e-3))
    True
    """
    check_optimizer("quantize_state", optimizer)
    check_keep(keep, "stays as it is")
    quantized = _Quantized(
        optax.with_extra_args_support(optimizer),
        codec_of(codec, block),
        check_positive("min_size", min_size),
        keep or (lambda path: False),
    )
    return optax.GradientTransformationExtraArgs(quantized.init, quantized.update)


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Quantized:
    optimizer: Any
    codec: Codec
    min_size: int
    keep: Callable[[str], bool]

    def init(self, params: Any) -> Any:
        state = self.optimizer.init(params)
        if any(map(stored.is_on_disk, stored.flatten(state)[0])):
            raise ValueError(
                "the state is on disk already, and not in 8 bits; put jaxmem.disk_state around "
                "jaxmem.quantize_state"
            )
        signed = self._signed(params, state)
        leaves, tree = jax.tree.flatten(state)
        return tree.unflatten(
            [
                leaf if sign is None else _encoded(self.codec, leaf, sign)
                for leaf, sign in zip(leaves, signed, strict=True)
            ]
        )

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        state = created.in_its_form(state, self.init, updates if params is None else params)
        flat, tree = jax.tree.flatten(state, is_leaf=_is_coded)
        signs = [leaf.codes.dtype == jnp.int8 if _is_coded(leaf) else None for leaf in flat]
        if all(sign is None for sign in signs):
            return self.optimizer.update(updates, state, params, **extra)
        like = jax.eval_shape(self.optimizer.init, updates if params is None else params)
        form = tree.unflatten([leaf.codes if _is_coded(leaf) else leaf for leaf in flat])
        found = difference(form, like, ("the state", "what init returns for these parameters"))
        if found:
            raise ValueError(
                f"the state is not of this optimizer and these parameters: {found}; pass what init "
                "of this quantize_state returned, or what an update before did"
            )
        types = jax.tree.leaves(like)

        def run(updates: Any, state: Sequence[Any], params: Any, extra: Any) -> tuple[Any, Any]:
            whole = [
                leaf if sign is None else self.codec.decode(leaf, of.dtype)
                for leaf, of, sign in zip(state, types, signs, strict=True)
            ]
            found, after = self.optimizer.update(updates, tree.unflatten(whole), params, **extra)
            changed = difference(after, like, ("the state after an update", "that before it"))
            if changed:
                raise ValueError(
                    f"the optimizer changes the form of its state: {changed}; quantize_state "
                    "stores arrays in their places, and needs a transformation that keeps them"
                )
            new = [
                leaf if sign is None else self.codec.encode(leaf, signed=sign)
                for leaf, sign in zip(jax.tree.leaves(after), signs, strict=True)
            ]
            return found, new

        if is_as_a_whole():
            found, new = run(updates, flat, params, extra)
            return found, tree.unflatten(new)
        found, new = rows.by_rows(run, updates, flat, params, extra)
        return found, tree.unflatten(new)

    def _signed(self, params: Any, state: Any) -> list[bool | None]:
        """Of each leaf of the state whether its codes have signs; None if it stays as it is."""
        leaves = jax.tree.leaves(state)
        chosen = [
            math.prod(jnp.shape(leaf)) >= self.min_size
            and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            and not self.keep(name)
            for leaf, name in zip(leaves, leaf_names(state), strict=True)
        ]
        if not any(chosen):
            return [None] * len(leaves)
        found = self._intervals(params, state)
        return [
            within[0] < 0 if one and within is not None else None
            for one, within in zip(chosen, found, strict=True)
        ]

    def _intervals(self, params: Any, state: Any) -> list[intervals.Interval | None]:
        """Between which numbers each leaf stays; None of those that begin as parameters do."""
        types = jax.tree.map(jnp.asarray, params)
        init = traced(lambda params, *_: ((), self.optimizer.init(params)), types, (), (), ())

        def update(gradients: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any]:
            return self.optimizer.update(gradients, state, params, value=value)

        value = jax.ShapeDtypeStruct((), jnp.float32)
        try:
            program = traced(update, types, state, types, value)
        except Exception as error:
            warn(
                "quantize_state: the optimizer's update fails when called with gradients, state, "
                f"parameters and value=, so that its state stays as it is: {error}",
                JaxmemWarning,
            )
            return [None] * len(jax.tree.leaves(state))
        kept = intervals.kept(init, program, len(init.in_avals), len(init.out_avals))
        copied = intervals.reads_operands(init)
        return [None if copy else within for copy, within in zip(copied, kept, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encoded(codec: Codec, leaf: Any, signed: bool) -> Coded:
    """The codes of an array, compiled: one operation after the other takes many times as long.

    XLA must not know the array to be constant, or it takes minutes to find its codes.
    """
    return codec.encode(leaf + own_zero(leaf.dtype), signed=signed)


def _is_coded(node: Any) -> bool:
    return isinstance(node, Coded)
