"""`jaxmem.pipeline`: a loss whose layers lie on several devices, one stage on each.

GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved stages (Narayanan et al. 2021,
arXiv 2104.04473), in one compiled program: a `jax.shard_map` over the mesh axis of the stages,
with a loop over the ticks of the schedule in it.

Known gaps, each refused with its reason: the gradient of the batch and of auxiliary outputs, state
that all layers share and change, forward mode.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmem import _jax
from jaxmem.accumulate.call import Path
from jaxmem.pipeline import batch
from jaxmem.pipeline.function import write_back
from jaxmem.pipeline.mapped import without_gradient
from jaxmem.pipeline.options import Options, check_mesh, checked
from jaxmem.pipeline.part import inside, parts_of
from jaxmem.pipeline.plan import PipelinePlan
from jaxmem.pipeline.told import explained, note
from jaxmem.policies import Policy
from jaxmem.trace.find import Where

# ---------------------------------------------------------------- API


def pipeline(
    target: Callable[..., Any] | None = None,
    *,
    axis: str = "stage",
    microbatches: int | str = 8,
    schedule: str = "eager-1f1b",
    chunks: int = 1,
    policy: str | Policy | Callable[..., Any] | None = None,
    layers: Sequence[int] | str | None = None,
    recompute: bool = True,
    where: Where | None = None,
    batch_argnums: int | Sequence[int] = (1,),
    rng_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    has_aux: bool = False,
    aux: Any = "stack",
    accumulator_dtype: Any = jnp.float32,
    mesh: Any = None,
) -> Any:
    """A loss function whose layer stack is split over the devices of a mesh axis.

    The function is written for one device and a whole batch.  Each stage, which is a device along
    the axis (with data, fsdp and tensor axes: a group of them), holds some consecutive layers; the
    batch goes through the stages in microbatches, so that all stages have something to do:

        pipelined = jaxmem.pipeline(loss, axis="stage", microbatches=32)
        with jax.set_mesh(jax.make_mesh((8,), ("stage",))):
            value, grads = jax.jit(jax.value_and_grad(pipelined))(params, batch)

    The layers are those of a `jax.lax.scan` (also `nn.scan`, `nnx.scan`, `jaxmem.scan`).  What is
    before it runs on the first stage, what is after it on the last; what both read, such as a
    tied embedding, gets the sum of their gradients.  Value and gradient are those of

        jaxmem.value_and_grad(loss, microbatches=m, rng_argnums=..., has_aux=..., ...)

    up to rounding: the mean over the rows, or what a `jaxmem.Weighted` says; rows dealt to
    microbatches in the same way; for each microbatch the key that it has there; auxiliary outputs
    combined by the same words; state, such as batch statistics, passed on from each microbatch to
    the next one.  An NNX module gets the state that the last one left.

    State needs a place on the way where microbatches come by in turn: each layer's own, stacked
    along its leading axis as its parameters are (linen: `variable_axes={"batch_stats": 0}`); what
    is made without the layers, such as statistics before them and counters, which a pass over the
    microbatches computes beforehand; and what is read only after the layers.  Other state is
    refused, as the first stage would wait for the last one.

    | schedule | inputs of stages held, of microbatches | bubble |
    |---|---|---|
    | "gpipe" | m | (S − 1) / (m + S − 1) |
    | "1f1b" | S | the same |
    | "eager-1f1b" | 2 S − 1 | the same |
    | "interleaved" | (v + 1) S − 1, for 1/v of the layers each | (S − 1) / (v m + S − 1) |

    Stages wait for each other after each tick.  In "1f1b" half of them do a forward pass while
    the others do a backward pass, which takes longer; in all other schedules all do the same.
    `explain` gives the time that follows.  With other axes in the mesh, all stages compute in each
    tick: the compiler's collectives want it.  Each then computes as well what is before and after
    the layers, and "1f1b" takes twice the time of "eager-1f1b".

    Args:
      target: returns the mean loss over its rows, a scalar, or a `jaxmem.Weighted`; with `has_aux`
        a pair of that and arrays.  None to use this as a decorator with arguments.
      axis: the mesh axis of the stages.  Other axes of the mesh stay with the compiler, which
        splits each stage's arrays over them as elsewhere.
      microbatches: m.  They need not divide the rows: microbatches of two sizes
        then go through one after the other, each with a bubble of its own.  "auto" for
        `jaxmem.fit` to choose from numbers near 1, 2, 4 and 8 for each stage, those that divide the
        rows where there are such; without it four for each stage.
      schedule: see the table; `explain` shows it.  "auto" likewise; without `jaxmem.fit`
        "eager-1f1b", or "interleaved" if there are chunks.
      chunks: v, groups of layers on each device, for interleaved stages; the stages divide m then.
      policy: what a layer keeps while its stage is recomputed and differentiated, as `jaxmem.remat`
        takes it, where no plan of `jaxmem.fit` says it; None for the policy that the stack has
        already, and otherwise "full".
      layers: how many each chunk has, in the order of the layers; "cost" for sizes by which the
        slowest stage is fastest, with what is before and after the layers counted.  None for equal
        sizes if layers divide by the chunks, and for "cost" otherwise.
      recompute: False for "gpipe" with everything kept that the policy keeps, of all microbatches;
        on a mesh of stages alone.
      where: which of several stacks: a predicate on `jaxmem.LayerStack`, or its index.
      batch_argnums: arguments whose leaves are split along their leading axis.
      rng_argnums: arguments that are random keys; each microbatch gets one of its own.
      carry_argnums, has_aux, aux: state and auxiliary outputs, as in `jaxmem.value_and_grad`.
      accumulator_dtype: what gradients are summed in over the microbatches; None for each
        parameter's own dtype, as with recompute=False in any case.
      mesh: the mesh, also of absent devices; None for the one that is set by `jax.set_mesh`.

    Returns:
      A function of the same arguments that returns the loss, in float32 or wider, for `jax.grad`,
      `jax.value_and_grad` and `jaxmem.value_and_grad`, to be used under `jax.jit`; with `has_aux` a
      pair, of which the second is not differentiated, so that these get has_aux=True as well.  Its
      method `explain` says what it will do.  Arrays that it differentiates are arguments, or closed
      over.

    Raises:
      TypeError, ValueError: an option cannot be; at the call: the mesh lacks the axis, the layers
        are fewer than the chunks, the function returns something else, or has no stack, or state
        has no place.

    Memory on a device: its layers, their gradients in `accumulator_dtype`, the inputs of stages as
    above and one recomputed stage; of what is before and after the layers, each stage holds the
    parameters and their gradients.  Parameters belong on their stage: split the leading axis of
    stacked ones, `PartitionSpec("stage")`.  Where layers do not divide by the stages, or stages are
    interleaved, they are moved to their stage in each step.  What is computed before the layers and
    read by all of them, such as a mask or an encoder's output, each stage computes.  Of layers' ys,
    those that are auxiliary outputs as they are stay on their stage; others, which something reads
    after the layers, go with a microbatch from stage to stage, in room for those of all layers.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(params, x):
    ...     h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["in"], params["w"])[0]
    ...     return ((h @ params["in"].T - x) ** 2).mean()
    >>> params = {"in": jnp.ones((4, 8)), "w": jnp.ones((6, 8, 8)) / 8}
    >>> mesh = jaxmem.target("h100-80g", devices=3).mesh({"stage": 3})  # or one of jax.make_mesh
    >>> pipelined = jaxmem.pipeline(loss, schedule="1f1b", microbatches=4, mesh=mesh)
    >>> print(pipelined.explain(params, jnp.ones((16, 4))))
    1f1b, 3 stages, microbatches: 4 of 4 rows; 12 ticks, bubble 33.3%
               layers             FLOPs  in flight
      stage 0       2  1.05 of the mean          3
      stage 1       2  0.85 of the mean          2
      stage 2       2  1.09 of the mean          1
    a stage's input is 128 B; 384 B of them are held; layers: Full()
    time of the ticks: 1.95 times that without a bubble, a backward pass being 4 forward ones

    With a running mean in each layer, and the mean of what layers are sized as:

    >>> def loss(w, x, means):
    ...     def layer(h, own):
    ...         w, mean = own
    ...         h = jnp.tanh((h - mean) @ w)
    ...         return h, (0.9 * mean + 0.1 * h.mean(0), jnp.abs(h).mean())
    ...     h, (means, sizes) = jax.lax.scan(layer, x, (w, means))
    ...     return (h**2).mean(), (means, sizes)
    >>> args = jnp.ones((6, 8, 8)) / 8, jnp.ones((16, 8)), jnp.zeros((6, 8))
    >>> pipelined = jaxmem.pipeline(
    ...     loss, carry_argnums=2, has_aux=True, aux=("carry", "mean"), mesh=mesh
    ... )
    >>> step = jax.value_and_grad(pipelined, has_aux=True)
    >>> (value, (means, sizes)), gradient = jax.eval_shape(step, *args)
    >>> means.shape, sizes.shape, gradient.shape
    ((6, 8), (6,), (6, 8, 8))
    """
    options = checked(
        axis, microbatches, schedule, chunks, policy, layers, recompute, where, batch_argnums,
        rng_argnums, carry_argnums, has_aux, aux, accumulator_dtype, mesh,
    )  # fmt: skip
    if target is None:
        return lambda target: Pipelined(target, options)
    return Pipelined(target, options)


class Pipelined:
    """A function in pipeline stages, as `pipeline` returns it."""

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        if not callable(fun):
            raise TypeError(
                f"pipeline takes a loss function, got an object of type {type(fun).__name__}; "
                "options go by name, as in pipeline(loss, microbatches=8)"
            )
        self._fun, self._options = fun, options
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = self._options
        changed: list[Path] = []

        def run(mesh: Any, args: Any, kwargs: Any) -> Any:
            call, parts = parts_of(options, self._fun, mesh, args, kwargs)
            note(parts, mesh)
            value, aux, after = batch.run(call, parts, mesh, options.aux, options.has_aux)
            changed[:] = after
            return value, without_gradient(aux, value), list(after.values())

        value, aux, after = self._traced(run, args, kwargs)
        write_back(self._fun, args, kwargs, dict(zip(changed, after, strict=True)))
        return (value, aux) if options.has_aux else value

    def explain(self, *args: Any, **kwargs: Any) -> PipelinePlan:
        """What a call with such arguments does: schedule, bubble, what is held, and where.

        Nothing is compiled.  Arguments may be `jax.ShapeDtypeStruct`s.
        """
        found: list[PipelinePlan] = []

        def look(mesh: Any, args: Any, kwargs: Any) -> jax.Array:
            _, parts = parts_of(self._options, self._fun, mesh, args, kwargs)
            with inside(mesh, self._options.axis):
                found.append(explained(parts))
            return jnp.zeros(())

        _abstract(lambda *args, **kwargs: self._traced(look, args, kwargs), args, kwargs)
        return found[0]

    # ------------------------------------------------------------ implementation

    def _mesh(self) -> Any:
        axis, mesh = self._options.axis, self._options.mesh
        here = jax.sharding.get_abstract_mesh()
        if axis in here.manual_axes:
            raise ValueError(
                f"the pipeline is called inside of a shard_map over {axis!r}, and makes its own; "
                "call it outside"
            )
        if mesh is None:
            mesh = here
            if not mesh.axis_names:
                raise ValueError(
                    "a pipeline has no mesh, and none is set; set one with jax.set_mesh, or pass "
                    'mesh=, such as jax.make_mesh((4,), ("stage",))'
                )
        check_mesh(mesh, axis)
        is_abstract = isinstance(mesh, jax.sharding.AbstractMesh) and axis not in here.axis_names
        if is_abstract and not _jax.is_staged():
            raise ValueError(
                f"mesh= is abstract, {dict(mesh.shape)} without devices, and the pipeline is to "
                "run; pass a mesh of devices, such as one of jax.make_mesh, or compile it alone, "
                "as jax.jit(...).lower and jaxmem.memory_report do"
            )
        # Inside of another shard_map only the mesh that is set there will do.
        return here if axis in here.axis_names else mesh

    def _traced(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function of the mesh and a call, on a mesh whose axes the compiler sees to."""
        mesh = self._mesh()
        explicit, auto = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
        if explicit not in mesh.axis_types:
            return run(mesh, args, kwargs)
        kinds = tuple(auto if kind == explicit else kind for kind in mesh.axis_types)
        if isinstance(mesh, jax.sharding.Mesh):
            inner: Any = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
        else:
            inner = mesh.update_axis_types(dict(zip(mesh.axis_names, kinds, strict=True)))
        leaves, tree = jax.tree.flatten((args, kwargs))
        flags = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

        def of_arrays(*arrays: Any) -> Any:
            args, kwargs = tree.unflatten(_filled(leaves, flags, arrays))
            return run(inner, args, kwargs)

        arrays = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]
        outer: Any = getattr(mesh, "abstract_mesh", mesh)
        as_auto: Any = jax.sharding.auto_axes(of_arrays, out_sharding=PartitionSpec())
        with jax.sharding.use_abstract_mesh(outer):
            return as_auto(*arrays)


def _filled(leaves: Sequence[Any], flags: Sequence[bool], given: Iterable[Any]) -> list[Any]:
    """Leaves, those that are flagged replaced."""
    own = iter(given)
    return [next(own) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]


def _abstract(run: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Trace a call with arrays, or types of arrays."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    flags = [isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for leaf in leaves]

    def flat(*given: Any) -> Any:
        args, kwargs = tree.unflatten(_filled(leaves, flags, given))
        return run(*args, **kwargs)

    jax.eval_shape(flat, *(leaf for leaf, flag in zip(leaves, flags, strict=True) if flag))
