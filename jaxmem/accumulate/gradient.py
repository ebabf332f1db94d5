"""`jax.value_and_grad` for a batch that does not fit: microbatches in a loop, inside one step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.accumulate import modules, shards
from jaxmem.accumulate.call import Call, positional, take_apart, there
from jaxmem.accumulate.combine import Spec
from jaxmem.accumulate.loop import Result, run
from jaxmem.accumulate.mapped import axes_of, on_devices
from jaxmem.accumulate.objective import Sink
from jaxmem.accumulate.parts import Parts
from jaxmem.accumulate.shards import Shards
from jaxmem.accumulate.trees import at_least_float32, floating, sum_dtype, weighed
from jaxmem.accumulate.weighted import check_finished, ratio
from jaxmem.parallel.zero import Zero

# ---------------------------------------------------------------- types


class BatchAux(NamedTuple):
    """Auxiliary outputs of a batch, and what the loss was divided by.

    Attributes:
      aux: as `fun` returned it and `aux=` combined it; None without `has_aux`.
      weight: the sum of the weights: a scalar of the value's dtype, and for a loss of several
        terms one for each. For a mean loss, the number of rows.
    """

    aux: Any
    weight: Any

    @property
    def empty(self) -> jax.Array:
        """Whether nothing in the batch had any weight, so that loss and gradient are zeros."""
        return jnp.all(jnp.asarray(self.weight) == 0)


# ---------------------------------------------------------------- API


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    *,
    microbatches: int = 8,
    batch_argnums: int | Sequence[int] = (1,),
    rng_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    aux: Any = "stack",
    batch_sharding: NamedSharding | PartitionSpec | None = None,
    accumulator_dtype: Any = jnp.float32,
    gradient_dtype: Any = None,
    return_weight: bool = False,
    zero: Zero | None = None,
) -> Callable[..., Any]:
    """The value and the gradient of a batch, computed microbatch by microbatch.

    As `jax.value_and_grad`, with the activations of one microbatch at a time:

        loss_and_grad = jaxmem.value_and_grad(loss, microbatches=8)
        value, grads = loss_and_grad(params, batch)

    `loss` returns the mean over its rows, or a `jaxmem.Weighted` for the
    exact mean over something else, such as tokens.  Whatever the sizes and weights of the
    microbatches, the result is the value and the gradient of the whole batch.  What
    a function computes *across* rows (batch normalisation, contrastive losses) sees
    one microbatch, as it must.

    Args:
      fun: returns a real scalar or a `Weighted`, and with `has_aux` a pair of that and
        arrays.  It may return None and strings nowhere.
      argnums: of what the gradient is wanted; of a batch argument too.  An NNX
        module stands for its parameters (or what an `nnx.DiffState` says), and what else `fun`
        changes in it is carried from microbatch to microbatch.
      has_aux: as in jax.
      microbatches: how many.  They need not divide the rows: 13 rows in 4 are 4 + 3 + 3 + 3.
        Rows are dealt like cards: where m divides them, microbatch j gets j, j + m, j + 2m, …
      batch_argnums: arguments whose leaves are split along their leading axis. Leaves without
        axes go to every microbatch.
      rng_argnums: arguments that are random keys; each microbatch gets one of its own.  With
        one microbatch the key is used as it is.  A key elsewhere is the same for all, of which
        a `JaxmemWarning` tells (not of raw uint32 keys, which look like any other array).
      carry_argnums: arguments, such as batch statistics, of which each microbatch returns the
        next one's, where `aux` says "carry".
      aux: how auxiliary outputs are combined: one word for all, or words in a tree that
        begins as the outputs do.  "stack": [microbatches, …]; "concat": one entry per row,
        in the order of the batch; "sum"; "mean", weighted as the loss; "last"; "carry".
        A `Weighted` among them becomes its mean over the batch.  With `batch_sharding` each
        device stacks its own: "stack" gives [devices × microbatches, …], those of the
        first device first.
      batch_sharding: how the batch lies over devices, to sum gradients over them once
        per step and not in every microbatch: a `NamedSharding`, or a `PartitionSpec` where
        a mesh is set; its first entry counts.  `fun` then sees the rows of one device, and draws
        of random keys differ between devices.  Parameters are held whole by each
        device.  Inside `jax.shard_map`, it names axes to sum over.
      accumulator_dtype: what gradients are summed in; None for each parameter's own dtype.
        Parameters of 64 bits keep theirs.
      gradient_dtype: what gradients come back in; None for what they were summed in.
      zero: the `jaxmem.Zero` by which training state is split over devices: gradients come back
        in shards, and each layer's is reduce-scattered into its own as the backward pass has it.
        With `batch_sharding`, stage 1 sums on each device, and reduce-scatters once a step.
      return_weight: return ((value, `BatchAux`), gradients), which tells the weight.

    Returns:
      A function of fun's arguments that returns as `jax.value_and_grad` does. Put it, or
      the step it is in, under `jax.jit`.  The value is in float32 or wider.  A batch
      without any weight has the value 0 and the gradient 0.

    Raises:
      TypeError, ValueError: an option cannot be; at the call: arguments or what `fun`
        returns. The text says which and what to pass instead.  A negative weight raises
        where its value is known, and gives NaN under `jit`.

    Memory: one accumulator of the parameters' size, and one microbatch.  Parameters that
    are stacked and read in one `lax.scan` over layers need no other gradient: each layer adds
    its own to the accumulator.  Parameters may be in host memory, whatever `fun` is: those that are
    so stacked go to the device layer by layer, all others as a whole; the accumulator, and with it
    the gradient, is on the device.  Terms of several weights (`Weighted` + `Weighted`) need the
    sums of the weights first: what computes them runs twice.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, batch):
    ...     error = batch["mask"] * (batch["x"] @ w - batch["y"]) ** 2
    ...     return jaxmem.Weighted(error.sum(), batch["mask"].sum())
    >>> key = jax.random.key(0)
    >>> batch = {
    ...     "x": jax.random.normal(key, (13, 3)), "y": jnp.ones(13),
    ...     "mask": (jnp.arange(13) % 3 > 0).astype(jnp.float32),
    ... }
    >>> value, gradient = jaxmem.value_and_grad(loss, microbatches=4)(jnp.zeros(3), batch)
    >>> exact = jax.grad(lambda w: loss(w, batch).mean)(jnp.zeros(3))
    >>> float(value), bool(jnp.allclose(gradient, exact))
    (1.0, True)
    """
    if not callable(fun):
        raise TypeError(
            f"value_and_grad takes a function, got an object of type {type(fun).__name__}"
        )
    positions, filters = modules.wanted(argnums)
    parts = Parts.checked(
        argnums=positions,
        has_aux=has_aux,
        microbatches=microbatches,
        aux=aux,
        batch_argnums=batch_argnums,
        rng_argnums=rng_argnums,
        carry_argnums=carry_argnums,
        batch_sharding=batch_sharding,
        return_weight=return_weight,
    )
    sink = Mean(
        floating("accumulator_dtype", accumulator_dtype),
        floating("gradient_dtype", gradient_dtype),
        shards.checked("value_and_grad", zero, batch_sharding),
    )

    single = isinstance(positions, int)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result, call = accumulate(fun, parts, sink, args, kwargs, filters)
        return outputs(parts, result), gradients(call, result, single)

    return wrapped


# ---------------------------------------------------------------- implementation


def accumulate(
    fun: Callable[..., Any],
    parts: Parts,
    sink: Sink,
    args: Sequence[Any],
    kwargs: Any,
    filters: Mapping[int, Any],
) -> tuple[Result, Call]:
    """Run `fun` on its microbatches, wherever they lie.

    NNX modules among the arguments get the state that the last microbatch left.

    Args:
      filters: which variables of such a module are differentiated, by its position; those
        of `nnx.Param` where nothing is said.
    """
    if modules.present(args, kwargs):
        return _of_modules(fun, parts, sink, filters, args, kwargs)
    axes, mesh, count = axes_of(parts.batch_sharding)
    call = take_apart(
        fun,
        args,
        kwargs,
        argnums=parts.argnums,
        batch_argnums=parts.batch_argnums,
        rng_argnums=parts.rng_argnums,
        carry_argnums=parts.carry_argnums,
        microbatches=parts.microbatches,
        devices=count,
    )
    go = functools.partial(run, spec=parts.aux, has_aux=parts.has_aux, axes=axes)
    result = go(call, sink) if mesh is None else on_devices(go, call, sink, mesh, axes)
    check_finished(result.weights)
    return result, call


def outputs(parts: Parts, result: Result) -> Any:
    """What is returned next to the gradients."""
    if parts.return_weight:
        weight = tuple(jnp.asarray(weight, result.value.dtype) for weight in result.weights)
        aux = result.aux if parts.has_aux else None
        return result.value, BatchAux(aux, weight[0] if len(weight) == 1 else weight)
    return (result.value, result.aux) if parts.has_aux else result.value


def gradients(call: Call, result: Result, single: bool) -> Any:
    """Gradients in the form of the arguments that they are of."""
    own = set(call.rows)
    shared = [path for path in call.diff if path not in own]
    found = {**dict(zip(shared, result.held, strict=True)), **result.rows}
    trees = [call.argument(position, {**call.leaves, **found}) for position in call.argnums]
    return trees[0] if single else tuple(trees)


def _of_modules(
    fun: Callable[..., Any],
    parts: Parts,
    sink: Sink,
    filters: Mapping[int, Any],
    args: Sequence[Any],
    kwargs: Any,
) -> tuple[Result, Call]:
    args, kwargs = positional(fun, args, kwargs)
    # Counted from the end, before more arguments stand there.
    parts = dataclasses.replace(
        parts,
        **{
            what: there(fun, args, what, getattr(parts, what))
            for what in ("argnums", "batch_argnums", "rng_argnums", "carry_argnums")
        },
    )
    filters = {number % len(args): wanted for number, wanted in filters.items()}
    call, own, positions = modules.pure(fun, args, parts.argnums, filters, parts.has_aux)
    states = range(len(args), len(own))
    aux = parts.aux.tree.unflatten(parts.aux.modes)
    inner = dataclasses.replace(
        parts,
        has_aux=True,
        carry_argnums=(*states, *parts.carry_argnums),
        aux=Spec.of((["carry"] * len(states), aux if parts.has_aux else "stack")),
    )
    result, found = accumulate(call, inner, sink, own, kwargs, {})
    after, aux = result.aux
    modules.write_back(args, positions, after)
    return dataclasses.replace(result, aux=aux), found


@dataclasses.dataclass(frozen=True)
class Mean:
    """A sum, divided in the end.

    Attributes:
      dtype: what is summed in; None for each leaf's own.
      result_dtype: what comes back; None for what was summed in.
      zero: by which gradients are held in shards.
    """

    dtype: np.dtype | None
    result_dtype: np.dtype | None
    zero: Zero | None
    in_backward = False
    wants_share = False
    arrays = ()

    def with_arrays(self, arrays: Any) -> "Mean":
        return self

    def specs(self, leaves: Sequence[jax.Array], names: Sequence[str], axes: Sequence[str]) -> Any:
        return shards.specs(self.zero, names, leaves, axes)

    def begin(
        self, leaves: Sequence[jax.Array], names: Sequence[str], axes: Sequence[str]
    ) -> list[Any]:
        zeros = [jnp.zeros_like(leaf, dtype=sum_dtype(leaf, self.dtype)) for leaf in leaves]
        return shards.begun(self.zero, names, leaves, zeros, axes)

    def add(self, held: Any, gradient: jax.Array, factor: Any) -> Any:
        if isinstance(held, Shards):
            return held.added(self.add, gradient, factor)
        dtype = at_least_float32(held.dtype, gradient.dtype)
        new = gradient if factor is None else weighed(gradient, factor)
        return (held.astype(dtype) + new.astype(dtype)).astype(held.dtype)

    def end(self, held: Any, divisor: Any, axes: Sequence[str]) -> list[jax.Array]:
        return shards.finished(self.divided, held, divisor, axes)

    def divided(self, total: jax.Array, divisor: Any, leaf: jax.Array) -> jax.Array:
        dtype = sum_dtype(leaf, self.dtype if self.result_dtype is None else self.result_dtype)
        if isinstance(divisor, int):
            wide = at_least_float32(total.dtype)
            mean = total if divisor == 1 else total.astype(wide) / divisor
        else:
            mean = ratio(total, divisor)
        return mean.astype(dtype)
