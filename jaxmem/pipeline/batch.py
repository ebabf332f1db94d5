"""A batch through the pipeline: microbatches of each size, and what is made of all of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _jax
from jaxmem.accumulate.call import Call, Path
from jaxmem.accumulate.combine import Spec
from jaxmem.accumulate.trees import at_least_float32
from jaxmem.accumulate.weighted import check_finished, ratio
from jaxmem.pipeline.carried import Carried, Outputs, after_layers, of_layers
from jaxmem.pipeline.cut import Cut
from jaxmem.pipeline.device import Inputs, Program
from jaxmem.pipeline.function import Operands
from jaxmem.pipeline.mapped import constant, on_stages
from jaxmem.pipeline.part import Part

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Ahead:
    """What is known before the pipeline runs.

    Attributes:
      weights: sums over the batch, of a `jaxmem.Weighted`.
      before: of the microbatches of each size, the states that do not depend on the layers.
      after: these after the last microbatch.
    """

    weights: list[Any]
    before: list[list[Any]]
    after: dict[Path, Any]

    def scales(self, call: Call, cut: Cut, size: int) -> list[jax.Array]:
        """How the mean of a microbatch of so many rows, or each total, counts."""
        outs, results = cut.closed.out_avals, cut.results
        if results.is_mean:
            return [jnp.asarray(size / call.split.rows, at_least_float32(outs[0].dtype))]
        dtype = at_least_float32(*(aval.dtype for aval in outs[: results.losses // 2]))
        return [ratio(jnp.ones((), dtype), weight) for weight in self.weights]


# ---------------------------------------------------------------- API


def run(
    call: Call, parts: Sequence[Part], mesh: Any, spec: Spec, has_aux: bool
) -> tuple[jax.Array, Any, dict[Path, Any]]:
    """The loss of the batch, its auxiliary outputs, and what the last microbatch left of modules.

    Args:
      spec: how auxiliary outputs are combined.
    """
    operands = Operands(call)
    known = _ahead(parts, operands)
    check_finished(known.weights)
    values = dict(zip(operands.paths, operands.shared, strict=True))
    total: Any = None
    made: list[Carried] = []
    for part, before in zip(parts, known.before, strict=True):
        cut = part.program.stages.cut
        scales = known.scales(call, cut, part.group.size)
        value, own = _run(mesh, part, operands, scales, before, values)
        total = value if total is None else total + value
        made.append(jax.lax.stop_gradient(own))
        values |= _states(part.program, made[-1])
    values |= known.after
    results = parts[0].program.stages.cut.results
    aux = None
    if has_aux:
        aux = results.assembled(spec, _outputs(call, parts, made), values)
    modules = {path for path, _ in results.changed} - set(results.carried)
    return total, aux, {path: values[path] for path in sorted(modules)}


# ---------------------------------------------------------------- implementation


def _paths(cut: Cut, kind: str) -> list[Path]:
    """Where the leaves are of the states of a kind."""
    pairs = zip(cut.states, cut.results.changed, strict=True)
    return [path for state, (path, _) in pairs if state.kind == kind]


def _ahead(parts: Sequence[Part], operands: Operands) -> Ahead:
    """A pass over the microbatches for what does not depend on the layers."""
    cut = parts[0].program.stages.cut
    count = 0 if cut.results.is_mean else cut.results.losses // 2
    outs = cut.closed.out_avals[count : 2 * count]
    weights: list[Any] = [jnp.zeros((), aval.dtype) for aval in outs]
    paths = _paths(cut, "before")
    known = dict(zip(operands.paths, operands.shared, strict=True))
    states = constant([known[path] for path in paths])
    before = []
    for part in parts if count or paths else ():
        found = part.outside()
        numbers = range(count, 2 * count)
        late = {state.number for kind in ("layers", "after") for state in found.of_kind(kind)}
        atoms = [found.closed.jaxpr.outvars[number] for number in numbers]
        if found.depends(numbers) or found.reads(atoms) & late:
            raise ValueError(
                "the weight of a jaxmem.Weighted depends on what the layers compute, and a "
                "pipeline has to know it before they run; compute it from the batch alone"
            )
        atoms += [found.closed.jaxpr.outvars[state.out] for state in found.of_kind("before")]
        shared = jax.lax.stop_gradient([*part.consts, *operands.shared])
        after = [shared[state.number] for state in found.of_kind("after")]
        own = Inputs([], shared, operands.rows(part.group), operands.keys, [], [], [], after)

        def add(state: Any, index: Any, part: Any = part, own: Any = own,
                found: Any = found, atoms: Any = atoms) -> tuple[Any, Any]:  # fmt: skip
            weights, states = state
            given = part.program.operands(own, index, before=states)
            new = found.evaluate(given, atoms)
            weights = [a + b for a, b in zip(weights, new[:count], strict=True)]
            return (weights, new[count:]), states

        state, old = jax.lax.scan(add, (weights, states), jnp.arange(part.group.count))
        weights, states = state
        before.append(old)
    before = before or [[] for _ in parts]
    weights = list(map(jax.lax.stop_gradient, weights))
    return Ahead(weights, before, dict(zip(paths, states, strict=True)))


def _run(
    mesh: Any,
    part: Part,
    operands: Operands,
    scales: list[jax.Array],
    before: list[Any],
    values: Mapping[Path, Any],
) -> tuple[jax.Array, Carried]:
    program = part.program
    count, cut = program.schedule.stages, program.stages.cut
    shared = [*part.consts, *operands.shared]
    stacked = _stacked(part, [*shared, *operands.nothing_of_microbatch])
    if cut.length % count == 0 and _jax.is_staged():
        stacked = [_along(mesh, program.axis, x) for x in stacked]
    # What no stage reads is on none: above all not the parameters of all layers.
    read = cut.read - {state.number for state in cut.states if state.kind != "same"}
    shared = [x if number in read else jnp.zeros(()) for number, x in enumerate(shared)]
    layers, after = ([values[path] for path in _paths(cut, kind)] for kind in ("layers", "after"))
    inputs = Inputs(
        program.stages.arranged(stacked, count), shared, operands.rows(part.group), operands.keys,
        scales, before, program.stages.arranged(layers, count), after,
    )  # fmt: skip
    return on_stages(program, mesh)(inputs)


def _stacked(part: Part, operands: Sequence[Any]) -> list[Any]:
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


# ---------------------------------------------------------------- what stages made


def _states(program: Program, made: Carried) -> dict[Path, Any]:
    """What microbatches left of states on the stages."""
    cut = program.stages.cut
    layers = [program.stages.rearranged(x) for x in made.layers]
    after = [x[-1] for x in made.after]
    return {
        **dict(zip(_paths(cut, "layers"), layers, strict=True)),
        **dict(zip(_paths(cut, "after"), after, strict=True)),
    }


def _outputs(call: Call, parts: Sequence[Part], made: Sequence[Carried]) -> list[Any]:
    """Auxiliary outputs, combined over all microbatches."""
    cut = parts[0].program.stages.cut
    pairs = list(zip(parts, made, strict=True))
    of_rows = _combined(
        call, of_layers(cut), [_of_layers(part.program, one) for part, one in pairs]
    )
    last = [jax.tree.map(lambda x: x[-1], (one.sums, one.kept)) for one in made]
    others = iter(_combined(call, after_layers(cut), last))
    kept = dict(zip(cut.outputs_of_layers, of_rows, strict=True))
    return [kept[k] if k in kept else next(others) for k in range(len(cut.results.outputs))]


def _of_layers(program: Program, made: Carried) -> tuple[Any, Any]:
    """What is summed and collected of outputs of layers, with the layers in their order."""
    stages, schedule = program.stages, program.schedule
    sums = []
    for mode, own in zip(of_layers(stages.cut).spec.modes, made.sums_of_layers, strict=True):
        if mode == "mean":
            sums.append((stages.rearranged(own[0]), own[1][0, 0]))
        else:
            sums.append(jax.tree.map(stages.rearranged, own))

    def of_each(x: Any) -> Any:
        x = x.reshape(schedule.stages, schedule.chunks, schedule.microbatches, *x.shape[2:])
        return jax.vmap(stages.rearranged, in_axes=2)(x)

    return sums, jax.tree.map(of_each, made.kept_of_layers)


def _combined(call: Call, outputs: Outputs, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The results of outputs, from what is summed and collected of each size of microbatches."""
    sums = pairs[0][0]
    for other, _ in pairs[1:]:
        sums = outputs.joined(sums, other)
    leaves = [output.of([0.0] * len(output.outs)) for output in outputs.outputs]
    return outputs.spec.result(sums, [kept for _, kept in pairs], [], leaves, call.split, ())[0]
