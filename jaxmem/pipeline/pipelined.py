"""`jaxmem.pipeline`: a loss whose layers lie on several devices, one stage on each.

GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved stages (Narayanan et al. 2021,
arXiv 2104.04473), in one compiled program: a `jax.shard_map` over the mesh axis of the stages,
with a loop over the ticks of the schedule in it.

Known gaps, each refused with its reason: batch statistics and other state that the loss changes,
auxiliary outputs, the gradient of the batch, forward mode.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _jax, policies
from jaxmem.accumulate.call import Call, take_apart
from jaxmem.accumulate.micro import real_loss
from jaxmem.accumulate.split import Group, Split
from jaxmem.accumulate.trees import at_least_float32
from jaxmem.accumulate.weighted import Weighted, check_finished, ratio
from jaxmem.pipeline import kept, one_by_one
from jaxmem.pipeline.auto import inputs_held, resolved, waits
from jaxmem.pipeline.choices import chunk_sizes, flops_of, kept_by_layers, policy_of
from jaxmem.pipeline.cut import Cut, cut
from jaxmem.pipeline.device import Inputs, Program
from jaxmem.pipeline.one_by_one import Gradients
from jaxmem.pipeline.options import Options, check_mesh, checked, manual_axes
from jaxmem.pipeline.plan import PipelinePlan, PipelineStage
from jaxmem.pipeline.schedule import PipelineSchedule
from jaxmem.pipeline.stage import Stages
from jaxmem.policies import ByLayer, NoRemat, Policy
from jaxmem.trace import context
from jaxmem.trace.find import Where

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """The microbatches of one size.

    Attributes:
      group: which they are.
      program: what is run.
      consts: operands of the program that the function closes over.
      outside: the same function as it is outside of the mapped axis, for what is computed there.
    """

    group: Group
    program: Program
    consts: list[Any]
    outside: Callable[[], Cut]


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

        jaxmem.value_and_grad(loss, microbatches=m, rng_argnums=...)

    up to rounding: the mean over the rows, or what a `jaxmem.Weighted` says; rows dealt to
    microbatches in the same way; for each microbatch the key that it has there.

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
      target: returns the mean loss over its rows, a scalar, or a `jaxmem.Weighted`.  None to use
        this as a decorator with arguments.
      axis: the mesh axis of the stages.  Other axes of the mesh stay with the compiler, which
        splits each stage's arrays over them as elsewhere.
      microbatches: m.  They need not divide the rows: microbatches of two sizes
        then go through one after the other, each with a bubble of its own.  "auto" for
        `jaxmem.fit` to choose; without it four for each stage.
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
      accumulator_dtype: what gradients are summed in over the microbatches; None for each
        parameter's own dtype, as with recompute=False in any case.
      mesh: the mesh, also of absent devices; None for the one that is set by `jax.set_mesh`.

    Returns:
      A function of the same arguments that returns the loss, in float32 or wider, for `jax.grad`,
      `jax.value_and_grad` and `jaxmem.value_and_grad`, to be used under `jax.jit`.  Its method
      `explain` says what it will do.  Arrays that it differentiates are arguments, or closed over.

    Raises:
      TypeError, ValueError: an option cannot be; at the call: the mesh lacks the axis, the layers
        are fewer than the chunks, the function returns something else, or has no stack.

    Memory on a device: its layers, their gradients in `accumulator_dtype`, the inputs of stages as
    above and one recomputed stage; of what is before and after the layers, each stage holds the
    parameters and their gradients.  Parameters belong on their stage: split the leading axis of
    stacked ones, `PartitionSpec("stage")`.  Where layers do not divide by the stages, or stages are
    interleaved, they are moved to their stage in each step.  What is computed before the layers and
    read by all of them, such as a mask or an encoder's output, each stage computes.

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
    """
    options = checked(
        axis, microbatches, schedule, chunks, policy, layers, recompute, where, batch_argnums,
        rng_argnums, accumulator_dtype, mesh,
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

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self._traced(self._value, args, kwargs)

    def _value(self, mesh: Any, args: Any, kwargs: Any) -> jax.Array:
        call, parts = self._parts(mesh, args, kwargs)
        _note(parts, mesh)
        operands = _Operands(call)
        scales, weights = _scales(call, parts, operands)
        check_finished(weights)
        total: Any = None
        for part in parts:
            value = self._run(mesh, part, operands, scales(part.group.size))
            total = value if total is None else total + value
        return total

    def explain(self, *args: Any, **kwargs: Any) -> PipelinePlan:
        """What a call with such arguments does: schedule, bubble, what is held, and where.

        Nothing is compiled.  Arguments may be `jax.ShapeDtypeStruct`s.
        """
        found: list[PipelinePlan] = []

        def look(mesh: Any, args: Any, kwargs: Any) -> jax.Array:
            _, parts = self._parts(mesh, args, kwargs)
            with self._inside(mesh):
                found.append(_plan(parts))
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
        # Inside of another shard_map only the mesh that is set there will do.
        return here if axis in here.axis_names else mesh

    def _traced(self, run: Callable[..., jax.Array], args: Any, kwargs: Any) -> jax.Array:
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

        def of_arrays(*arrays: Any) -> jax.Array:
            args, kwargs = tree.unflatten(_filled(leaves, flags, arrays))
            return run(inner, args, kwargs)

        arrays = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]
        outer: Any = getattr(mesh, "abstract_mesh", mesh)
        as_auto: Any = jax.sharding.auto_axes(of_arrays, out_sharding=PartitionSpec())
        with jax.sharding.use_abstract_mesh(outer):
            return as_auto(*arrays)

    def _inside(self, mesh: Any) -> contextlib.AbstractContextManager[Any]:
        """What is traced where it is open may run on the stages: types of arrays tell the mesh."""
        abstract = getattr(mesh, "abstract_mesh", mesh)
        manual = {self._options.axis: jax.sharding.AxisType.Manual}
        return jax.sharding.use_abstract_mesh(abstract.update_axis_types(manual))

    def _parts(self, mesh: Any, args: Any, kwargs: Any) -> tuple[Call, list[_Part]]:
        call = take_apart(
            self._fun,
            args,
            kwargs,
            argnums=(),
            batch_argnums=self._options.batch_argnums,
            rng_argnums=self._options.rng_argnums,
            carry_argnums=(),
            microbatches=self._options.microbatches or 1,
        )
        stages, rows = mesh.shape[self._options.axis], call.split.rows
        options = resolved(self._options, stages, rows, mesh.size // stages)
        assert options.microbatches is not None
        call = dataclasses.replace(call, split=Split.of(rows, options.microbatches))
        return call, [self._part(options, call, group, mesh) for group in call.split.groups]

    def _part(self, options: Options, call: Call, group: Group, mesh: Any) -> _Part:
        assert options.schedule is not None
        stages = mesh.shape[options.axis]
        label = getattr(self._fun, "__name__", "the function")

        def traced() -> tuple[Cut, list[Any], bool]:
            closed, consts, is_mean = _traced(call, group.size, label)
            if not _jax.can_be_recomputed(closed):
                raise ValueError(
                    f"{label} has side effects that must not happen twice, and a pipeline "
                    "recomputes its stages; move them out, or use jax.debug.callback or "
                    "jax.pure_callback"
                )
            count = len(consts) + len(_Operands(call).shared)
            return cut(closed, count, options.where, label), consts, is_mean

        with self._inside(mesh):
            found, consts, is_mean = traced()
            policy = policy_of(options, found)
            sizes = chunk_sizes(options, found, stages, is_mean)
        others = set(mesh.axis_names) - {options.axis, *manual_axes(mesh)}
        branches = all(mesh.shape[axis] == 1 for axis in others)
        if not (branches or options.recompute):
            raise ValueError(
                f"recompute=False is for a mesh of stages alone, and this one is {dict(mesh.shape)}"
                f"; leave recompute= out, or pass a mesh whose axes but {options.axis!r} have one "
                "device"
            )
        program = Program(
            Stages(found, sizes, policy, is_mean, branches),
            options.axis,
            PipelineSchedule.of(options.schedule, stages, group.count, options.chunks),
            group.first,
            call.split.microbatches,
            options.recompute,
            options.accumulator_dtype,
            branches,
        )
        return _Part(group, program, consts, functools.cache(lambda: traced()[0]))

    def _run(
        self, mesh: Any, part: _Part, operands: "_Operands", scales: list[jax.Array]
    ) -> jax.Array:
        program = part.program
        stages = program.schedule.stages
        shared = [*part.consts, *operands.shared]
        stacked = _stacked(part, [*shared, *operands.nothing_of_microbatch])
        if program.stages.cut.length % stages == 0 and _jax.is_staged():
            stacked = [_along(mesh, program.axis, x) for x in stacked]
        # What no stage reads is on none: above all not the parameters of all layers.
        read = program.stages.cut.read
        shared = [x if number in read else jnp.zeros(()) for number, x in enumerate(shared)]
        inputs = Inputs(
            program.stages.arranged(stacked, stages), shared, operands.rows(part.group),
            operands.keys, scales,
        )  # fmt: skip
        return _on_stages(program, mesh)(inputs)


# ---------------------------------------------------------------- the call


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


class _Operands:
    """The arrays of a call, in the order in which a microbatch gets them."""

    def __init__(self, call: Call) -> None:
        self.call = call
        own = {*call.rows, *call.keys}
        self.paths = [
            path
            for path, leaf in call.leaves.items()
            if path not in own and isinstance(leaf, jax.Array | np.ndarray)
        ]
        self.shared = [jnp.asarray(call.leaves[path]) for path in self.paths]
        self.keys = [jnp.asarray(call.leaves[path]) for path in call.keys]

    @property
    def all_paths(self) -> list[tuple[int, int]]:
        return [*self.paths, *self.call.rows, *self.call.keys]

    def rows(self, group: Group) -> list[jax.Array]:
        """Of these microbatches, [size, microbatches, …]."""
        return [dict(self.call.split.dealt(self.call.leaves[path]))[group]
                for path in self.call.rows]  # fmt: skip

    @property
    def nothing_of_microbatch(self) -> list[None]:
        """In the place of a microbatch's own, where nothing reads them."""
        return [None] * (len(self.call.rows) + len(self.keys))


def _stacked(part: _Part, operands: Sequence[Any]) -> list[Any]:
    """Parameters of layers, stacked."""
    cut = part.program.stages.cut
    places = {var: number for number, var in enumerate(cut.closed.jaxpr.invars)}
    if all(x in places for x in cut.parameters):
        return [operands[places[x]] for x in cut.parameters]
    outside = part.outside()
    return outside.evaluate(operands, outside.parameters)


def _along(mesh: Any, axis: str, x: jax.Array) -> jax.Array:
    """Stacked parameters, and with them their gradient, in equal shares over the stages.

    Where stages are interleaved a compiler would gather the gradient on each device otherwise.
    """
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(axis, *[free] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _traced(call: Call, size: int, label: str) -> tuple[ClosedJaxpr, list[Any], bool]:
    """The function on a microbatch: its constants are its first operands.

    Returns:
      The jaxpr; the constants; whether its result is a mean, and not totals and weights.
    """
    operands = _Operands(call)
    paths = operands.all_paths
    is_mean = True

    def flat(*arrays: Any) -> list[Any]:
        nonlocal is_mean
        given = dict(zip(paths, arrays, strict=True))
        known = {**call.leaves, **given}
        args = [call.argument(position, known) for position in range(len(call.trees))]
        out = call.fun(*args, **call.kwargs)
        for position, arg in enumerate(args):
            count = call.trees[position].num_leaves
            _check_unchanged(call, label, arg, [(position, k) for k in range(count)], known)
        if isinstance(out, tuple):
            raise TypeError(
                f"{label} returned {len(out)} values, and a pipeline has the loss alone: no "
                "auxiliary outputs, and no batch statistics or other state that it changes; "
                "return the loss, with auxiliary losses added to it"
            )
        is_mean = not isinstance(out, Weighted)
        if not isinstance(out, Weighted):
            return [real_loss(label, out)]
        totals, weights = zip(*out.terms, strict=True)
        return [*(real_loss(label, total) for total in totals), *weights]

    own = set(call.rows)

    def type_of(path: Any) -> Any:
        leaf = jnp.asarray(call.leaves[path])
        shape = (size, *leaf.shape[1:]) if path in own else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)

    closed = _jax.inlined(jax.make_jaxpr(flat)(*map(type_of, paths)))
    closed, consts = _jax.without_consts(closed)
    return closed, consts, is_mean


def _check_unchanged(
    call: Call, label: str, arg: Any, paths: Sequence[Any], known: Mapping[Any, Any]
) -> None:
    """That the function left an argument, such as an NNX module, as it was."""
    after = jax.tree.leaves(arg)
    for path, leaf in zip(paths, after, strict=False):
        if leaf is not known[path]:
            raise ValueError(
                f"{label} changes {call.names[path]}, and a pipeline has the loss alone: no batch "
                "statistics, no counters of nnx.Rngs, no other state that it changes; use layers "
                "without (normalisation of each row, keys by rng_argnums=)"
            )


def _scales(
    call: Call, parts: Sequence[_Part], operands: _Operands
) -> tuple[Callable[[int], list[jax.Array]], list[Any]]:
    """How the mean of a microbatch of so many rows, or each total, counts; and all weights."""
    outs = parts[0].program.stages.cut.closed.out_avals
    if parts[0].program.stages.is_mean:
        dtype = at_least_float32(outs[0].dtype)
        return lambda size: [jnp.asarray(size / call.split.rows, dtype)], []
    count = len(outs) // 2
    dtype = at_least_float32(*(aval.dtype for aval in outs[:count]))
    weights: list[Any] = [jnp.zeros((), aval.dtype) for aval in outs[count:]]
    for part in parts:
        found = part.outside()
        if found.depends(range(count, 2 * count)):
            raise ValueError(
                "the weight of a jaxmem.Weighted depends on what the layers compute, and a "
                "pipeline has to know it before they run; compute it from the batch alone"
            )
        atoms = found.closed.jaxpr.outvars[count:]
        own = Inputs([], [*part.consts, *operands.shared], operands.rows(part.group),
                     operands.keys, [])  # fmt: skip

        def add(weights: list[Any], index: Any, part: Any = part, own: Any = own,
                found: Any = found, atoms: Any = atoms) -> tuple[list[Any], None]:  # fmt: skip
            new = found.evaluate(part.program.operands(own, index), atoms)
            return [a + b for a, b in zip(weights, new, strict=True)], None

        weights, _ = jax.lax.scan(add, weights, jnp.arange(part.group.count))
    weights = list(map(jax.lax.stop_gradient, weights))
    scales = [ratio(jnp.ones((), dtype), weight) for weight in weights]
    return lambda size: scales, weights


def _on_stages(program: Program, mesh: Any) -> Callable[[Inputs], jax.Array]:
    """The program over the mesh, with a derivative that is made together with the value."""
    axis = program.axis
    own, whole = PartitionSpec(axis), PartitionSpec()
    in_specs = Inputs(own, whole, whole, whole, whole)  # pyright: ignore[reportArgumentType]

    def over(local: Callable[..., Any], out_specs: Any) -> Callable[[Inputs], Any]:
        # Types that tell what varies over devices would ask the function to be written for them.
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, axis_names={axis},
            check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped)

    def value(inputs: Inputs) -> jax.Array:
        executor = one_by_one if program.recompute else kept
        return jax.lax.psum(executor.value(program, inputs), axis)

    def with_gradients(inputs: Inputs, wanted: Gradients) -> tuple[jax.Array, Gradients]:
        if program.recompute:
            found, sums = one_by_one.value_and_gradients(program, inputs, wanted)
            sums = sums._replace(params=[None if x is None else x[None] for x in sums.params])
        else:
            found, sums = _differentiated(program, inputs, wanted)
        shared = jax.lax.psum(sums.shared, axis)
        return jax.lax.psum(found, axis), Gradients(sums.params, shared)

    @jax.custom_vjp
    def call(inputs: Inputs) -> jax.Array:
        return over(value, whole)(inputs)

    def forward(boxes: Inputs) -> tuple[jax.Array, Any]:
        is_box = lambda leaf: hasattr(leaf, "perturbed")  # noqa: E731
        inputs = jax.tree.map(lambda box: box.value, boxes, is_leaf=is_box)
        if any(box.perturbed and jnp.issubdtype(box.value.dtype, jnp.inexact)
               for box in [*boxes.rows, *boxes.scales]):  # fmt: skip
            raise ValueError(
                "the gradient of the batch is asked for, and a pipeline has none; differentiate "
                "with respect to parameters alone"
            )

        def flags(boxes: Iterable[Any]) -> list[bool]:
            return [box.perturbed and jnp.issubdtype(box.value.dtype, jnp.inexact) for box in boxes]

        wanted = Gradients(flags(boxes.params), flags(boxes.shared))
        local = functools.partial(with_gradients, wanted=wanted)
        out_specs = (whole, Gradients(own, whole))  # pyright: ignore[reportArgumentType]
        found, sums = over(local, out_specs)(inputs)
        types = [[jax.typeof(x).dtype for x in xs] for xs in (inputs.params, inputs.shared)]
        return found, (sums, _Types(types))

    def backward(kept: Any, cotangent: Any) -> tuple[Inputs]:
        sums, types = kept
        if isinstance(cotangent, SymbolicZero):
            sums = Gradients(*([None] * len(xs) for xs in sums))
        found = [
            [None if x is None else (x * cotangent.astype(x.dtype)).astype(dtype)
             for x, dtype in zip(xs, dtypes, strict=True)]
            for xs, dtypes in zip(sums, types.value, strict=True)
        ]  # fmt: skip
        return (Inputs(found[0], found[1], None, None, None),)  # pyright: ignore[reportArgumentType]

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """Something that is no array, next to arrays."""

    value: Any

    def __hash__(self) -> int:
        return hash(str(self.value))


def _differentiated(
    program: Program, inputs: Inputs, wanted: Gradients
) -> tuple[jax.Array, Gradients]:
    """Value and gradients of the loop over ticks, by jax."""

    def flagged(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
        return [x if flag else None for x, flag in zip(values, flags, strict=True)]

    def loss(params: list[Any], shared: list[Any]) -> jax.Array:
        own = inputs._replace(
            params=[a if b is None else b for a, b in zip(inputs.params, params, strict=True)],
            shared=[a if b is None else b for a, b in zip(inputs.shared, shared, strict=True)],
        )
        return kept.value(program, own)

    found, sums = jax.value_and_grad(loss, (0, 1))(
        flagged(inputs.params, wanted.params), flagged(inputs.shared, wanted.shared)
    )
    return found, Gradients(*sums)


# ---------------------------------------------------------------- what is explained


def _plan(parts: Sequence[_Part]) -> PipelinePlan:
    first = max(parts, key=lambda part: part.group.size).program
    stages, schedule = first.stages, first.schedule
    layer, begin, end = flops_of(stages.cut, stages.is_mean)
    policy = kept_by_layers(stages)
    count = schedule.stages
    found = []
    for stage in range(count):
        own = stages.sizes[stage::count]
        flops = layer * sum(own)
        flops += begin * (stage == 0) + end * (stage == count - 1)
        held = max(part.program.schedule.in_flight[stage] for part in parts)
        found.append(PipelineStage(own, flops, held))
    held = max(
        part.program.stages.message_bytes * inputs_held(part.program.schedule) for part in parts
    )
    return PipelinePlan(
        tuple(part.program.schedule for part in parts),
        tuple(part.group.size for part in parts),
        tuple(found),
        stages.message_bytes,
        held,
        repr(policy),
        # Two for the gradients, one for a stage that is recomputed, and one for its layers.
        2.0 + first.recompute + (not isinstance(policy, NoRemat)),
        first.branches,
    )


def _note(parts: Sequence[_Part], mesh: Any) -> None:
    """Tell who plans the step what its stages hold, and how long they wait."""
    told = context.policy_instead(policies.auto())
    if not isinstance(told, ByLayer):
        return
    programs = [part.program for part in parts]
    times = [waits(program.schedule, not program.branches) for program in programs]
    seconds, again = (sum(several) for several in zip(*times, strict=True))
    devices = mesh.size // programs[0].schedule.stages
    held = [program.stages.message_bytes * inputs_held(program.schedule) for program in programs]
    told.note_pipeline(max(held) // devices, seconds, again)
