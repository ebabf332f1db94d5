"""Forms of a stack in plain jax: the scan itself, layers checkpointed, segments nested."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _jax
from jaxmem.policies import Full, LayerPolicy, from_jax, names
from jaxmem.trace.layer import Body
from jaxmem.trace.names import CARRY_NAME

# And under this one the single values that it keeps.
VALUE_NAME = "jaxmem_value"


@dataclasses.dataclass(frozen=True)
class Form:
    """How a stack is run: the layer and the arguments of its scan.

    Operands are flat: consts, initial carry, xs stacked along axis 0.  Results
    are flat too: final carry, ys stacked along axis 0.

    Attributes:
      interleaved: whether what one layer recomputes waits, operation by operation, for the
        gradients that need it: a layer of many operations that is in no loop.
      waits: whether it waits for those of the layer's results as well.
      casts_wait: whether casts of what is given wait for these, too, if no more than that is
        recomputed; they have to be arrays, as a loss's need not be.
      own_arrays: whether the arrays that its gradients are written into are made only where the
        backward pass begins: another loop's may be of the same types (`jaxmem._jax.loops`).
    """

    body: Body
    length: int
    reverse: bool = False
    unroll: Any = 1
    interleaved: bool = False
    waits: bool = True
    casts_wait: bool = False
    own_arrays: bool = False

    def index(self, step: Any) -> Any:
        """Where in the stacked inputs the layer of this step of the computation is."""
        return self.length - 1 - step if self.reverse else step

    def at(self, xs: Sequence[Any], step: Any) -> list[Any]:
        """One layer's slice of the stacked inputs."""
        return self.read(self.row(xs, step))

    def row(self, xs: Sequence[Any], step: Any) -> list[Any]:
        """The same as it lies."""
        return [lax.dynamic_index_in_dim(x, self.index(step), keepdims=False) for x in xs]

    def read(self, row: Sequence[Any]) -> list[Any]:
        """A layer's slice as the layer reads it, from where a loop over the inputs has it."""
        return list(row)

    def unrolled(self, steps: int) -> Any:
        """The unroll argument for an inner scan over so many steps."""
        return self.unroll if isinstance(self.unroll, bool) else max(1, min(self.unroll, steps))


def plain(form: Form, args: Sequence[Any]) -> list[Any]:
    """The scan as it was."""
    return _scan(form, form.body, args)


def checkpointed(form: Form, layer: LayerPolicy, host: bool, args: Sequence[Any]) -> list[Any]:
    """The scan with each layer under `jax.checkpoint`, its carry kept on the device or the host."""
    return _scan(form, _checkpointed(form, layer, host), args)


def as_body(form: Form, layer: LayerPolicy, host: bool) -> Form:
    """The same as a form, of which an executor makes what jax's scan would make of it."""
    run = _checkpointed(form, layer, host)

    def flat(*flat: Any) -> list[Any]:
        carry, y = run(*form.body.split_in(flat))
        return [*carry, *y]

    jaxpr = _jax.trace(flat, form.body.jaxpr.in_avals)
    return dataclasses.replace(form, body=dataclasses.replace(form.body, jaxpr=jaxpr))


def _checkpointed(form: Form, layer: LayerPolicy, host: bool) -> Callable[..., Any]:
    policy = layer.jax_policy
    if host:
        policy = (layer | names(offload=CARRY_NAME)).jax_policy

    def body(consts: Any, carry: Any, x: Any) -> Any:
        if host:
            # The name must be on what enters the layer: a name on what leaves it
            # is one layer late and moves nothing.
            # A key that is looked at (jax.debug_key_reuse) is used under its own name only.
            looked_at = _jax.keys_are_checked()
            carry = [
                c if looked_at and _jax.is_key(c) else _jax.named(c, CARRY_NAME) for c in carry
            ]
        return form.body(consts, carry, x)

    if layer == Full() and not host:
        policy = None  # jax's spelling of the same, which all of its versions treat alike
    else:
        _APPLIED[policy] = layer, host
    layer_again = jax.checkpoint(body, prevent_cse=False, policy=policy)

    def planned(consts: Any, carry: Any, x: Any) -> Any:
        with jax.named_scope(_jax.PLANNED):
            return layer_again(consts, carry, x)

    return planned


_APPLIED: weakref.WeakKeyDictionary[Any, tuple[LayerPolicy, bool]] = weakref.WeakKeyDictionary()


def applied(policy: Any) -> tuple[LayerPolicy, bool]:
    """(layer policy, whether carries go to the host) of a policy found in a checkpointed scan."""
    if policy is None:
        return Full(), False
    return _APPLIED.get(policy, (from_jax(policy), False))


def nested(form: Form, lengths: Sequence[int], args: Sequence[Any]) -> list[Any]:
    """Scans over checkpointed segments: copies parameters, but jax can differentiate it at will.

    Arrays on the host go to the device as a whole.
    """
    consts, init, xs = form.body.split_in(list(map(_jax.on_device, args)))
    if form.reverse:
        xs = [jnp.flip(x, 0) for x in xs]
    carry, ys = _nested(form, tuple(lengths), consts, init, xs, form.length)
    if form.reverse:
        ys = [jnp.flip(y, 0) for y in ys]
    return [*carry, *ys]


def _nested(
    form: Form, lengths: tuple[int, ...], consts: Any, carry: Any, xs: Any, n: int
) -> tuple[Any, Any]:
    if not lengths:
        return lax.scan(lambda c, x: form.body(consts, c, x), carry, xs, length=n)
    size, deeper = lengths[0], lengths[1:]

    def segment(length: int) -> Any:
        def run(consts: Any, carry: Any, xs: Any) -> Any:
            return _nested(form, deeper, consts, carry, xs, length)

        return jax.checkpoint(run, prevent_cse=False)

    whole, rest = divmod(n, size)
    parts = []
    if whole:
        cut = [x[: whole * size].reshape(whole, size, *x.shape[1:]) for x in xs]
        run = segment(size)
        carry, ys = lax.scan(lambda c, x: run(consts, c, x), carry, cut, length=whole)
        parts.append([y.reshape(whole * size, *y.shape[2:]) for y in ys])
    if rest:
        carry, ys = segment(rest)(consts, carry, [x[whole * size :] for x in xs])
        parts.append(ys)
    return carry, [jnp.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _scan(form: Form, body: Any, args: Sequence[Any]) -> list[Any]:
    consts, init, xs = form.body.split_in(args)
    carry, ys = lax.scan(
        lambda c, x: body(consts, c, x),
        init,
        xs,
        length=form.length,
        reverse=form.reverse,
        unroll=form.unroll,
    )
    return [*carry, *ys]
