"""The one file that knows jax's private modules.

Three things are needed that jax's public API does not give:

* evaluating a jaxpr equation by equation, keeping source lines and name stacks;
* the parts of a `scan` equation, whose parameters differ between releases;
* primitives with rules of their own.  `stack_p` is a layer stack that has not
  been differentiated yet; `tangent_p` is its linear part, whose transpose is the
  schedule of the plan.  `jax.custom_vjp` would do for plain reverse mode, but
  forbids forward mode, and under `vmap` it makes a copy of the parameters'
  gradient for each example.
"""

import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax._src import ad_util, checkify, core, effects, source_info_util
from jax._src.interpreters import batching
from jax._src.lax import lax as lax_internal
from jax._src.state.types import RefEffect
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.core.primitives import jit_p, remat_p, scan_p
from jax.interpreters import ad, mlir

Eqn = Any
Aval = Any

# The name scope of checkpoints that a policy put around layers.
PLANNED = "jaxmem_policy"
# That of checkpoints that a plan put around pieces of code without a scan.
PIECE = "jaxmem_piece"
# jax's own name scope of what `jax.checkpoint` computes again.
RECOMPUTED = "rematted_computation"

# ---------------------------------------------------------------- jaxprs


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parts of a scan equation; operands are consts, carry, xs, results carry, ys."""

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any


def scan_parts(eqn: Eqn) -> Scan:
    """What a `scan` equation holds, whatever the release calls it."""
    params = eqn.params
    if "num_carry" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.11 on
        consts, carry, _ = params["ft_in"].unpack()
        num_consts, num_carry = len(consts), len(carry)
    return Scan(
        body=params["jaxpr"],
        num_consts=num_consts,
        num_carry=num_carry,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )


def is_scan(eqn: Eqn) -> bool:
    """Whether an equation is a `lax.scan`."""
    return eqn.primitive is scan_p


def is_jit(eqn: Eqn) -> bool:
    """Whether an equation is a call that `jax.jit` made."""
    return eqn.primitive is jit_p


def as_closed(jaxpr: Any) -> ClosedJaxpr:
    """A jaxpr from an equation's parameters, closed (some primitives hold them open)."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def all_subjaxprs(eqn: Eqn) -> list[ClosedJaxpr]:
    """Every jaxpr in an equation's parameters."""
    subs = [
        as_closed(item)
        for value in eqn.params.values()
        for item in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(item, core.Jaxpr | ClosedJaxpr)
    ]
    if not subs and (inner := in_checkpoint(eqn)) is not None:
        subs.append(inner)
    if is_stack(eqn):
        subs.append(eqn.params["stack"].form.body.jaxpr)
    return subs


def name_given_by(eqn: Eqn) -> str | None:
    """The name, if this is an equation made by `checkpoint_name`."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    new = _carried_by(eqn, "CheckpointName")
    return None if new is None else new.name


def _carried_by(eqn: Eqn, kind: str) -> Any:
    """What jax has for an operation under the flag jax_remat3: a value in a general primitive."""
    return next((value for value in eqn.params.values() if type(value).__name__ == kind), None)


def checkpointed_by(eqn: Eqn) -> tuple[Any] | None:
    """(policy,), if this is an equation made by `jax.checkpoint`."""
    if eqn.primitive is remat_p:
        return (eqn.params["policy"],)
    new = _carried_by(eqn, "RematTraced")
    return None if new is None else (new.policy,)


def in_checkpoint(eqn: Eqn) -> ClosedJaxpr | None:
    """What is computed in an equation made by `jax.checkpoint`; None if this is none."""
    if eqn.primitive is remat_p:
        return as_closed(eqn.params["jaxpr"])
    new = _carried_by(eqn, "RematTraced")
    return None if new is None else as_closed(new.jaxpr)


def without_jit(eqn: Eqn, operands: list[Any]) -> list[Any] | None:
    """For `evaluate`: the inside of what `jax.jit` made, if it constrains no shardings."""
    if eqn.primitive is not jit_p or _constrains(eqn):
        return None
    return evaluate(eqn.params["jaxpr"], operands, without_jit)


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr with the calls that `without_jit` looks into gone; itself if it has none."""
    if not any(eqn.primitive is jit_p and not _constrains(eqn) for eqn in closed.jaxpr.eqns):
        return closed
    return trace(lambda *flat: evaluate(closed, flat, without_jit), closed.in_avals)


def without_consts(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """A jaxpr that takes its constants as its first operands, and these."""
    consts = list(closed.consts)
    if not consts:
        return closed, consts
    count = len(consts)
    avals = [*(var.aval for var in closed.jaxpr.constvars), *closed.in_avals]

    def run(*flat: Any) -> list[Any]:
        return evaluate(ClosedJaxpr(closed.jaxpr, flat[:count]), flat[count:])

    return trace(run, avals), consts


def in_call(eqn: Eqn) -> ClosedJaxpr | None:
    """What a mere call computes: a `jax.jit`, or a function with a derivative of its own.

    None if this is neither, or constrains shardings.
    """
    if eqn.primitive is jit_p:
        return None if _constrains(eqn) else eqn.params["jaxpr"]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return as_closed(eqn.params["call_jaxpr"])
    return None


def _constrains(eqn: Eqn) -> bool:
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def without_checkpoint(eqn: Eqn, operands: list[Any]) -> list[Any] | None:
    """For `evaluate`: the inside of what `jax.checkpoint` made."""
    inner = in_checkpoint(eqn)
    return None if inner is None else evaluate(inner, operands)


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant written into the jaxpr, not a variable."""
    return isinstance(atom, core.Literal)


def is_var(atom: Any) -> bool:
    """Whether an operand is a variable, not a constant written into the jaxpr."""
    return not isinstance(atom, core.Literal)


def trace(fn: Callable[..., Any], avals: Sequence[Aval]) -> ClosedJaxpr:
    """The jaxpr of a function of flat arguments, for avals exactly as given."""
    return jax.make_jaxpr(fn)(*avals)


def evaluate(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    special: Callable[[Eqn, list[Any]], list[Any] | None] | None = None,
    only: frozenset[int] | None = None,
    given: Mapping[Any, Any] | None = None,
    outs: Sequence[Any] | None = None,
    each: Callable[[int, Sequence[Any]], Sequence[Any]] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr; outputs that depend on equations left out come back as None.

    Args:
      closed: the jaxpr.
      args: its flat arguments; None where no equation in `only` needs one.
      special: called with each equation and its operands; returns the results,
        or None for the equation to be evaluated as it stands.
      only: indices of the equations to evaluate; None for all.
      given: variables whose values are known already.
      outs: the atoms to return; None for the jaxpr's own results.
      each: called with the index of each equation and its results; returns what to take
        for them.
    """
    jaxpr = closed.jaxpr
    wanted = jaxpr.outvars if outs is None else outs
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    known = given or {}
    env.update(known)

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env.get(atom)

    last_use = _last_use(jaxpr, only, wanted)
    for index, eqn in enumerate(jaxpr.eqns):
        if only is not None and index not in only:
            continue
        operands = [read(atom) for atom in eqn.invars]
        with _where_it_stood(eqn):
            found = special(eqn, operands) if special else None
            found = _bound(eqn, operands) if found is None else found
            if each is not None:
                found = each(index, found)
        env.update(zip(eqn.outvars, found, strict=True))
        if known:  # one of several results may be known
            env.update((var, known[var]) for var in eqn.outvars if var in known)
        for atom in last_use.get(index, ()):
            env.pop(atom, None)
    return [read(atom) for atom in wanted]


def as_array(value: Any, aval: Aval) -> Any:
    """A result as `jax.Array`; in a jaxpr scalars that are constant are none."""
    if isinstance(value, jax.Array):
        return value
    return lax_internal._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)  # pyright: ignore[reportAttributeAccessIssue]


def evaluate_each(eqns: Sequence[Eqn], given: Mapping[Any, Any]) -> dict[Any, Any]:
    """What equations make, one after the other, from values that are given."""
    made: dict[Any, Any] = {}
    for eqn in eqns:
        with _where_it_stood(eqn):
            operands = [
                a.val if is_literal(a) else made[a] if a in made else given[a] for a in eqn.invars
            ]
            made.update(zip(eqn.outvars, _bound(eqn, operands), strict=True))
    return made


@contextlib.contextmanager
def _where_it_stood(eqn: Eqn) -> Iterator[None]:
    """In the user's line, scopes and mode that an equation was traced in."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def _bound(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    found = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return found if eqn.primitive.multiple_results else [found]


def with_equations(closed: ClosedJaxpr, eqns: Sequence[Eqn]) -> ClosedJaxpr:
    """A jaxpr with other equations, for looking at: it is not checked."""
    return ClosedJaxpr(closed.jaxpr.replace(eqns=list(eqns)), closed.consts)


def renamed(eqn: Eqn, ins: Sequence[Any], outs: Sequence[Any]) -> Eqn:
    """An equation with other operands and results."""
    return eqn.replace(invars=list(ins), outvars=list(outs))


def is_dropped(var: Any) -> bool:
    """Whether nobody reads this result of an equation."""
    return isinstance(var, core.DropVar)


def another(var: Any) -> Any:
    """A new variable of the type of this one."""
    return core.Var(var.aval)


def reordered(closed: ClosedJaxpr, order: Sequence[int]) -> ClosedJaxpr:
    """A jaxpr with its equations in another order, in which each can run."""
    return with_equations(closed, [closed.jaxpr.eqns[at] for at in order])


def followed_by(
    first: ClosedJaxpr,
    only: Collection[int],
    second: ClosedJaxpr,
    atoms: Sequence[Any],
    given: Sequence[Any],
) -> ClosedJaxpr:
    """Some equations of one jaxpr, then another, for looking at: it is not checked or traced.

    Args:
      first, only: a jaxpr, and indices of the equations that are taken of it.
      second: what follows.
      atoms: of `first`, what the first inputs of `second` are.
      given: of `first`, what is an input; no equation that is taken makes it, then.
    """
    place = dict(zip(second.jaxpr.invars, atoms, strict=False))
    known = frozenset(given)

    def outer(several: Sequence[Any]) -> list[Any]:
        return [a if is_literal(a) else place.get(a, a) for a in several]

    def without_given(eqn: Eqn) -> Eqn:
        outs = [core.DropVar(v.aval) if v in known else v for v in eqn.outvars]
        return eqn.replace(outvars=outs) if known.intersection(eqn.outvars) else eqn

    jaxpr = second.jaxpr
    eqns = [
        *(without_given(first.jaxpr.eqns[at]) for at in sorted(only)),
        *(eqn.replace(invars=outer(eqn.invars)) for eqn in jaxpr.eqns),
    ]
    return ClosedJaxpr(
        core.Jaxpr(
            constvars=[*first.jaxpr.constvars, *jaxpr.constvars],
            invars=[*given, *jaxpr.invars[len(atoms) :]],
            outvars=outer(jaxpr.outvars),
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        ),
        [*first.consts, *second.consts],
    )


def _last_use(
    jaxpr: Any, only: frozenset[int] | None, wanted: Sequence[Any]
) -> dict[int, list[Any]]:
    """Values that no later equation reads, by equation; dropped, so that arrays are freed."""
    seen = {atom for atom in wanted if not is_literal(atom)}
    last: dict[int, list[Any]] = {}
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        if only is not None and index not in only:
            continue
        for atom in jaxpr.eqns[index].invars:
            if not is_literal(atom) and atom not in seen:
                seen.add(atom)
                last.setdefault(index, []).append(atom)
    return last


def digest(closed: ClosedJaxpr, *more: str) -> str:
    """What tells a jaxpr from others, in every process alike: types, operations, parameters.

    Lines of code, and names that say where in the code an operation stands, are not in it.
    """
    lines = [*more, *_described(closed)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# Names of this kind tell places in the code.
_PLACE_NAME = "jaxmem_operation_"


def place_name(place: int) -> str:
    """The name under which the results of an operation of straight-line code are kept."""
    return f"{_PLACE_NAME}{place}"


def place_named_by(eqn: Eqn) -> int | None:
    """The place that was made such a name, if this is the equation that gives it."""
    name = name_given_by(eqn) or ""
    return int(name.removeprefix(_PLACE_NAME)) if name.startswith(_PLACE_NAME) else None


def _described(closed: ClosedJaxpr) -> Iterator[str]:
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    numbers: dict[Any, int] = {var: number for number, var in enumerate(inputs)}
    yield " ".join(str(var.aval) for var in inputs)

    def written(atom: Any) -> str:
        return str(atom) if is_literal(atom) else str(numbers[atom])

    for eqn in jaxpr.eqns:
        ins = [written(atom) for atom in eqn.invars]
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        outs = [str(var.aval) for var in eqn.outvars]
        params = _canonical(eqn.params) if place_named_by(eqn) is None else ""
        yield f"{eqn.primitive.name} {ins} {outs} {params}"
    yield str([written(atom) for atom in jaxpr.outvars])


def _canonical(value: Any) -> str:
    """A parameter as text that no address and no order of a set gets into."""
    if isinstance(value, core.Jaxpr | ClosedJaxpr):
        return "; ".join(_described(as_closed(value)))
    if isinstance(value, dict):
        return str(sorted((str(key), _canonical(item)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return str(sorted(map(_canonical, value)))
    if isinstance(value, tuple | list):
        return str([_canonical(item) for item in value])
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    return re.sub(r"0x[0-9a-fA-F]+", "", str(value))


def as_program(eqn: Eqn) -> ClosedJaxpr:
    """A jaxpr of this one equation."""
    ins = list(dict.fromkeys(atom for atom in eqn.invars if is_var(atom)))
    empty = jax.make_jaxpr(lambda *args: args)(*(var.aval for var in ins))
    return ClosedJaxpr(empty.jaxpr.replace(invars=ins, outvars=eqn.outvars, eqns=[eqn]), ())


def needed(
    closed: ClosedJaxpr, outs: Iterable[Any], keep_effects: bool, given: Collection[Any] = ()
) -> frozenset[int]:
    """Indices of the equations that these atoms depend on, where those `given` are known."""
    jaxpr = closed.jaxpr
    wanted = {atom for atom in outs if not is_literal(atom) and atom not in given}
    found = set()
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[index]
        if any(var in wanted for var in eqn.outvars) or (keep_effects and eqn.effects):
            found.add(index)
            wanted.update(a for a in eqn.invars if not is_literal(a) and a not in given)
    return frozenset(found)


def can_be_recomputed(closed: ClosedJaxpr) -> bool:
    """Whether running this twice is harmless.

    jax's own list of what may be recomputed has ordered effects and writes to
    Refs on it, which then happen twice.
    """
    return not any(
        isinstance(effect, RefEffect)
        or effects.ordered_effects.contains(effect)
        or not effects.remat_allowed_effects.contains(effect)
        for effect in closed.effects
    )


def zeros_like(x: Any) -> Any:
    """Zeros of the cotangent type of an array, with its sharding and varying axes."""
    return ad_util.zeros_like_aval(core.typeof(x).to_ct_aval())


def stacked(aval: Aval, length: int) -> Aval:
    """The type of so many values of a type, stacked along a new leading axis."""
    return core.unmapped_aval(length, 0, aval)


def unfilled(aval: Aval, length: int) -> Any:
    """Room for so many values of a type, to be written before it is read."""
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.numpy.empty((length, *aval.shape), aval.dtype)
    return ad_util.zeros_like_aval(stacked(aval, length))


def varying(value: Any) -> frozenset[str]:
    """Mesh axes along which a value differs from device to device, inside `shard_map`."""
    kind = getattr(jax.typeof(value), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def shards() -> int:
    """How many devices run what is traced now, each its own copy: those of a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in getattr(mesh, "manual_axes", ()))


def has_tangent(aval: Aval) -> bool:
    """Whether values of this type can be differentiated at all."""
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


# ---------------------------------------------------------------- primitives


class Differentiable(Protocol):
    """What `stack_p` carries: a stack with its policy.  Hashed by identity."""

    def run(self, args: Sequence[Any]) -> list[Any]: ...

    def batched(
        self, batch: Callable[..., Any], flags: Sequence[bool]
    ) -> tuple["Differentiable", list[bool], list[int], list[bool], list[int]]: ...

    def jvp(
        self, args: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]: ...

    def out_avals(self) -> Sequence[Aval]: ...

    @property
    def effects(self) -> Any: ...

    def unplanned(self, outs: Sequence[Any]) -> list[Any]:
        """The results of its plain scan, if that is what will be differentiated."""
        ...


class Linear(Protocol):
    """What `tangent_p` carries: a linear map given its residuals.  Hashed by identity."""

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Apply the map; in plain jax, differentiable in both arguments."""
        ...

    def pull(self, residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        """Apply its transpose; a cotangent may be None for zero."""
        ...

    @property
    def num_residuals(self) -> int: ...

    @property
    def tangent_avals(self) -> Sequence[Aval]: ...


stack_p = Primitive("jaxmem_stack")
stack_p.multiple_results = True
tangent_p = Primitive("jaxmem_stack_tangent")
tangent_p.multiple_results = True


def bind_stack(stack: Differentiable, args: Sequence[Any]) -> list[Any]:
    """The results of a stack on its flat operands."""
    return stack_p.bind(*args, stack=stack)


def bind_tangent(linear: Linear, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The linear part of a stack, applied; to be transposed by its schedule."""
    return tangent_p.bind(*residuals, *tangents, linear=linear)


def is_stack(eqn: Eqn) -> bool:
    """Whether an equation is a layer stack bound to its policy."""
    return eqn.primitive is stack_p


def is_planned(eqn: Eqn) -> bool:
    """Whether an equation is a stack that has its policy already, as a scan or bound to it."""
    if not is_scan(eqn):
        return is_stack(eqn)
    return any(
        checkpointed_by(inner) is not None and PLANNED in str(inner.source_info.name_stack)
        for inner in eqn.params["jaxpr"].jaxpr.eqns
    )


@stack_p.def_impl
def _(*args: Any, stack: Differentiable) -> list[Any]:
    return stack.run(args)


@stack_p.def_effectful_abstract_eval
def _(*avals: Aval, stack: Differentiable) -> tuple[Sequence[Aval], Any]:
    return stack.out_avals(), stack.effects


mlir.register_lowering(
    stack_p, mlir.lower_fun(lambda *args, stack: stack.run(args), multiple_results=True)
)


def _stack_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, stack: Differentiable
) -> tuple[Sequence[Any], Sequence[Any]]:
    given = [None if type(t) is ad.Zero else t for t in tangents]
    outs, out_tangents = stack.jvp(primals, given)
    return outs, [
        ad.Zero(core.typeof(out).to_tangent_aval()) if t is None else t
        for out, t in zip(outs, out_tangents, strict=True)
    ]


ad.primitive_jvps[stack_p] = _stack_jvp


def _stack_transpose(cts: Sequence[Any], *args: Any, stack: Differentiable) -> list[Any]:
    # Only `jax.linear_transpose` of a stack that is itself linear comes here.
    linear = [ad.is_undefined_primal(arg) for arg in args]

    def run(*lin: Any) -> list[Any]:
        rest = iter(lin)
        return stack.run(
            [next(rest) if is_lin else a for is_lin, a in zip(linear, args, strict=True)]
        )

    specs = [arg.aval for arg in args if ad.is_undefined_primal(arg)]
    given = [ad.instantiate_zeros(ct) if type(ct) is ad.Zero else ct for ct in cts]
    found = iter(jax.linear_transpose(run, *specs)(given))
    return [next(found) if is_lin else None for is_lin in linear]


ad.primitive_transposes[stack_p] = _stack_transpose


def _stack_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, stack: Differentiable
) -> tuple[list[Any], list[Any]]:
    def batch(body: ClosedJaxpr, flags: Sequence[bool], instantiate: Sequence[bool]) -> Any:
        return batching.batch_jaxpr(body, axis_data, list(flags), list(instantiate))

    is_batched = [dim is not None for dim in dims]
    new, in_flags, in_axes, out_flags, out_axes = stack.batched(batch, is_batched)
    moved = []
    for arg, dim, flag, axis in zip(args, dims, in_flags, in_axes, strict=True):
        if flag and dim is None:
            arg = batching.broadcast(arg, axis_data.size, axis, axis_data.explicit_mesh_axis)
        elif flag:
            arg = jax.numpy.moveaxis(arg, dim, axis)
        moved.append(arg)
    outs = bind_stack(new, moved)
    return outs, [axis if flag else None for flag, axis in zip(out_flags, out_axes, strict=True)]


batching.fancy_primitive_batchers[stack_p] = _stack_batch


def _stack_checkify(
    error: Any, enabled: Any, *args: Any, stack: Differentiable
) -> tuple[Any, list[Any]]:
    closed = trace(lambda *args: stack.run(args), list(map(core.typeof, args)))
    error, outs = checkify.checkify_jaxpr(closed, enabled, error, *args)
    return error, stack.unplanned(outs)


# Where jax keeps its rules elsewhere, the stack is evaluated without checks.
getattr(checkify, "error_checks", {})[stack_p] = _stack_checkify


def _tangent_run(*args: Any, linear: Linear) -> list[Any]:
    split = linear.num_residuals
    return linear.push(args[:split], args[split:])


tangent_p.def_impl(_tangent_run)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent_run, multiple_results=True))


@tangent_p.def_abstract_eval
def _(*avals: Aval, linear: Linear) -> Sequence[Aval]:
    return linear.tangent_avals


def _tangent_transpose(cts: Sequence[Any], *args: Any, linear: Linear) -> list[Any]:
    split = linear.num_residuals
    given = [None if type(ct) is ad.Zero else ct for ct in cts]
    return [None] * split + linear.pull(args[:split], given)


ad.primitive_transposes[tangent_p] = _tangent_transpose


def _tangent_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linear
) -> tuple[Sequence[Any], Sequence[Any]]:
    # A second derivative: differentiate the plain form.
    given = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(lambda *args: _tangent_run(*args, linear=linear), list(primals), given)


ad.primitive_jvps[tangent_p] = _tangent_jvp


def _tangent_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, linear: Linear
) -> tuple[list[Any], list[int]]:
    # Forward mode under vmap: batch the plain form.  (A stack that is mapped and
    # then differentiated is batched as a whole, by `_stack_batch`.)
    mapped = jax.vmap(
        lambda *args: _tangent_run(*args, linear=linear),
        in_axes=list(dims),
        axis_name=axis_data.name,
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )
    outs = mapped(*args)
    return outs, [0] * len(outs)


batching.fancy_primitive_batchers[tangent_p] = _tangent_batch
