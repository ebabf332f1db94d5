"""How a program's values are split over devices, as jax's own partitioner, Shardy, decides.

Shardy takes the shardings of arguments and the constraints in a program, and propagates them to
all else before anything is partitioned.  Here it is run on a program in which every value is read
by an operation without results, which tells, when it is done, how its operand is split.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Primitive, jaxpr_as_fun, new_jaxpr_eqn
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from jaxmem._jax.jaxprs import as_closed, is_literal
from jaxmem._jax.private import debug_effect, join_effects, use_shardy_partitioner
from jaxmem._jax.types import Eqn

# A dimension's mesh axes, slowest first, for each dimension of a value.
Spec = tuple[tuple[str, ...], ...]

read_p = Primitive("jaxmem_read")
read_p.multiple_results = True


@read_p.def_effectful_abstract_eval
def _(*avals: Any, number: int) -> tuple[list[Any], Any]:
    # An effect that loops, checkpoints and derivatives allow, so that it is not removed.
    return [], {debug_effect}


def _lowered(ctx: Any, *operands: Any, number: int) -> list[Any]:
    from jax.extend.mlir.dialects import stablehlo

    stablehlo.CustomCallOp(
        [],
        [value for value in operands if isinstance(value, ir.Value)],
        call_target_name=ir.StringAttr.get(_TARGET),
        has_side_effect=ir.BoolAttr.get(True),
        backend_config=ir.StringAttr.get(str(number)),
    )
    return []


_TARGET = "jaxmem_read"
# Without functions that nobody calls any more.
_PASSES = "builtin.module(symbol-dce,sdy-propagation-pipeline)"
mlir.register_lowering(read_p, _lowered)


def splits(
    closed: ClosedJaxpr,
    in_shardings: Sequence[Any],
    out_shardings: Any = None,
    platform: str | None = None,
) -> Mapping[Any, Spec]:
    """How each value of a program is split, in it and in the loops and calls that it is made of.

    Args:
      closed: the program.
      in_shardings: of its operands; what is no `NamedSharding` is open.
      out_shardings: of its results.
      platform: "cpu", "gpu" or "tpu", for which there are kernels of it; None for the default one.

    Raises:
      NotImplementedError, RuntimeError, ValueError: jax cannot lower the program for it.
    """
    reader = _Reader()
    marked = reader.marked(closed)

    def run(*args: Any) -> list[Any]:
        return jaxpr_as_fun(marked)(*args)

    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        if isinstance(sharding, NamedSharding)
        else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for aval, sharding in zip(closed.in_avals, in_shardings, strict=True)
    ]
    jitted = jax.jit(run) if out_shardings is None else jax.jit(run, out_shardings=out_shardings)
    platform = platform or jax.default_backend()
    names = ("cuda",) if platform == "gpu" else (platform,)
    with use_shardy_partitioner(True):  # also where the compiler is to use another one
        lowered = jitted.trace(*avals).lower(lowering_platforms=names)
        module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        _inline(module.operation)
        manager = passmanager.PassManager.parse(_PASSES)
        manager.run(module.operation)
        found: dict[int, list[Any]] = {}
        for call in _operations(module.operation, "stablehlo.custom_call"):
            if ir.StringAttr(call.attributes["call_target_name"]).value != _TARGET:
                continue
            number = int(ir.StringAttr(call.attributes["backend_config"]).value)
            found.setdefault(number, [_split(value) for value in call.operands])
    return {
        var: spec
        for number, specs in found.items()
        for var, spec in zip(reader.read[number], specs, strict=True)
        if spec is not None
    }


def mesh_of(shardings: Sequence[Any]) -> Any:
    """The mesh of several devices that arguments are spread over, or that is set; None for none."""
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if mesh.size > 1), None)


def local_shape(
    shape: Sequence[int], spec: Spec | None, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape that one device holds; a dimension that does not divide is padded.

    Args:
      sizes: of the mesh's axes.
    """
    if spec is None or len(spec) != len(shape):
        return tuple(shape)
    pairs = zip(shape, spec, strict=True)
    return tuple(-(-size // devices_along(axes, sizes)) for size, axes in pairs)


def devices_along(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """How many devices there are along these axes, of which some are parts: "tensor:2"."""
    parts = (axis.partition(":") for axis in axes)
    return math.prod(int(part) if part else sizes[name] for name, _, part in parts)


def read(values: Sequence[Any], number: int) -> None:
    """Have values of a program that is traced read, so that they are found in its jaxpr."""
    own = [value for value in values if isinstance(value, jax.Array)]
    if own:
        read_p.bind(*own, number=number)


def read_number(eqn: Eqn) -> int | None:
    """The number of a reading that `read` put into a program; None for any other equation."""
    return eqn.params["number"] if eqn.primitive is read_p else None


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, closed or open."""
    return isinstance(value, _JAXPRS)


def is_looked_into(eqn: Eqn) -> bool:
    """Whether an equation is a loop, a branch or a call that is partitioned like the rest."""
    return eqn.primitive.name in _LOOKED_INTO


def changed_inside(
    eqn: Eqn, change: Callable[[Any], Any], leave: Collection[str] = ()
) -> dict[str, Any]:
    """Those parameters of an equation that are jaxprs, each changed.

    Args:
      change: from a jaxpr, closed or open, to another of its kind.
      leave: names of parameters that are left out.
    """
    new = {}
    for name, value in eqn.params.items():
        several = _several_of(value)
        if name not in leave and several and all(map(is_jaxpr, several)):
            made = tuple(map(change, several))
            new[name] = made if isinstance(value, tuple) else made[0]
    return new


# ---------------------------------------------------------------- implementation


def _several_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, number: int) -> Any:
    return read_p.bind(*primals, number=number), []


def _batched(args: Sequence[Any], dims: Sequence[Any], *, number: int) -> Any:
    return read_p.bind(*args, number=number), []


ad.primitive_jvps[read_p] = _jvp
batching.primitive_batchers[read_p] = _batched


class _Reader:
    """Adds to a program an operation that reads what was made, after each that makes something."""

    def __init__(self) -> None:
        self.read: list[list[Any]] = []
        self._known: dict[int, Any] = {}

    def marked(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self._jaxpr(closed.jaxpr), closed.consts)

    def _jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._known:
            eqns = self._reads(jaxpr.invars)
            for eqn in jaxpr.eqns:
                if eqn.primitive is read_p:
                    continue
                inner = self._inside(eqn)
                eqns += [inner, *self._reads(inner.outvars)]
            effects = join_effects(*(eqn.effects for eqn in eqns))
            new = jaxpr.replace(eqns=eqns, effects=effects)
            self._known[id(jaxpr)] = jaxpr, new  # the first holds its id
        return self._known[id(jaxpr)][1]

    def _inside(self, eqn: Eqn) -> Eqn:
        if not is_looked_into(eqn):
            return eqn
        new = changed_inside(eqn, self._held, ("cond_jaxpr",))
        inner = (one for value in new.values() for one in _several_of(value))
        effects = frozenset(eqn.effects).union(*(as_closed(one).effects for one in inner))
        return eqn.replace(params={**eqn.params, **new}, effects=effects)

    def _held(self, jaxpr: Any) -> Any:
        return self.marked(jaxpr) if hasattr(jaxpr, "consts") else self._jaxpr(jaxpr)

    def _reads(self, variables: Sequence[Any]) -> list[Eqn]:
        own = [
            var
            for var in variables
            if not is_literal(var)
            and not isinstance(var, DropVar)
            and hasattr(var.aval, "shape")
            and not jax.numpy.issubdtype(var.aval.dtype, jax.dtypes.extended)
        ]
        if not own:
            return []
        self.read.append(own)
        number = len(self.read) - 1
        return [new_jaxpr_eqn(own, [], read_p, {"number": number}, {debug_effect})]


_JAXPRS = (Jaxpr, ClosedJaxpr)
# fmt: off
_LOOKED_INTO = frozenset({
    "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call", "jit",
    "pjit", "remat2", "scan", "shard_map", "while",
})
# fmt: on


def _operations(operation: Any, name: str) -> Iterator[Any]:
    """All of a name in an operation, in the order of the program."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == name:
                    yield inner.operation
                yield from _operations(inner.operation, name)


def _inline(module: Any) -> None:
    """Put functions where they are called, as XLA does before it asks Shardy.

    Shardy would split operands of two calls of one function as if they were one.
    """
    functions = {
        ir.StringAttr(function.attributes["sym_name"]).value: function
        for function in _operations(module, "func.func")
    }
    while calls := list(_operations(functions["main"], "func.call")):
        for call in calls:
            callee = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
            copy = callee.clone(ir.InsertionPoint(callee)).operation
            (block,) = copy.regions[0].blocks
            for argument, operand in zip(block.arguments, call.operands, strict=True):
                argument.replace_all_uses_with(operand)
            *body, end = block.operations
            for operation in body:
                operation.operation.move_before(call)
            for result, value in zip(call.results, end.operands, strict=True):
                result.replace_all_uses_with(value)
            call.erase()
            copy.erase()


def _split(value: Any) -> Spec | None:
    """The axes of each dimension of a value, None if nothing is said of it."""
    if isinstance(value.owner, ir.Block):
        argument = ir.BlockArgument(value)
        return _of_argument(value.owner.owner.operation, argument.arg_number)
    return _of_result(value.owner.operation, ir.OpResult(value).result_number)


def _of_result(operation: Any, number: int) -> Spec | None:
    attributes = operation.attributes
    if "sdy.sharding" not in attributes:
        if "sharding" in attributes:  # a constraint, or a change of how it is split
            return _axes(attributes["sharding"])
        if "out_shardings" in attributes:
            return _axes(_several(attributes["out_shardings"])[number])
        return None
    several = _several(attributes["sdy.sharding"])
    return _axes(several[number])


def _of_argument(operation: Any, number: int) -> Spec | None:
    attributes = operation.attributes
    if operation.name == "func.func":
        own = attributes["arg_attrs"][number] if "arg_attrs" in attributes else {}
        return _axes(own["sdy.sharding"]) if "sdy.sharding" in own else None
    if operation.name == "stablehlo.while":
        return _of_result(operation, number)
    if "in_shardings" in attributes:
        spec = _axes(_several(attributes["in_shardings"])[number])
        manual: set[str] = set()
        if "manual_axes" in attributes:  # of a shard_map, inside of which these are parts
            manual = {str(axis) for axis in sdy.ManualAxesAttr(attributes["manual_axes"])}
        return spec and tuple(tuple(a for a in axes if a not in manual) for axes in spec)
    return None


def _several(attribute: Any) -> Any:
    return sdy.TensorShardingPerValueAttr(attribute).shardings


def _axes(attribute: Any) -> Spec:
    sharding = sdy.TensorShardingAttr(attribute)
    return tuple(
        tuple(_axis(sdy.AxisRefAttr(axis)) for axis in sdy.DimensionShardingAttr(dim).axes)
        for dim in sharding.dimension_shardings
    )


def _axis(axis: Any) -> str:
    # Of a part of an axis, ("tensor":(1)2), the whole is not meant.
    info = axis.sub_axis_info
    return axis.name if info is None else f"{axis.name}:{sdy.SubAxisInfoAttr(info).size}"
