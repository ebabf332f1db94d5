"""Gradients of stacked parameters, added to their sum row by row.

The backward pass of a scan over layers writes each layer's gradient into a stacked array,
and only when that is full can it be added to the sum over microbatches: two buffers of the
parameters' size.  Here the sum itself goes down the stack in that array's place, and each layer
adds its gradient to its row.

In an ordinary scan the sum travels as the cotangent of a carry: the forward pass returns
it as it is, and a layer's backward pass (`_used`) adds to one row of it.  A stack whose
schedule is jaxmem's own writes single rows anyway, and is told to add.
"""

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.accumulate import gathered, shards
from jaxmem.accumulate.shards import Shards
from jaxmem.parallel.split import Split
from jaxmem.plans.plan import Plan
from jaxmem.rewrite.apply import through
from jaxmem.stacked import Form, Into
from jaxmem.stacked.stack import Stack, Tangent
from jaxmem.trace.context import note_plan, platform
from jaxmem.trace.find import subjaxprs
from jaxmem.trace.layer import Body, Layer, differentiated
from jaxmem.trace.row_casts import rounded_rows

Add = Callable[[Any, Any, Any], Any]  # rows of what is held, their gradient, factor -> rows

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Parameters that a function reads once, layer by layer, in a scan.

    Attributes:
      closed: the function.
      at: by id of an equation, for each of its operands that is such a parameter: the number
        of the function's argument.
      wanted: for these equations, which operands are differentiated.
    """

    closed: ClosedJaxpr
    at: Mapping[int, Mapping[int, int]]
    wanted: Mapping[int, Sequence[bool]]

    @property
    def arguments(self) -> frozenset[int]:
        """Numbers of the function's arguments that are such parameters."""
        return frozenset(number for places in self.at.values() for number in places.values())


# ---------------------------------------------------------------- API


def find(closed: ClosedJaxpr, candidates: Sequence[int], wanted: Sequence[int]) -> Stacked:
    """Which of these arguments a function reads in one scan and nowhere else.

    Args:
      closed: the function.
      candidates: numbers of arguments.
      wanted: numbers of all arguments that are differentiated.
    """
    search = _Search(dict.fromkeys(candidates, 0))
    invars = closed.jaxpr.invars
    search.walk(
        closed.jaxpr,
        {invars[number]: number for number in candidates},
        {invars[number] for number in wanted},
    )
    single = {
        eqn: {place: number for place, number in places.items() if search.uses[number] == 1}
        for eqn, places in search.at.items()
    }
    # A jitted function that is called twice is one jaxpr: its equations stand for both calls.
    met: collections.Counter[int] = collections.Counter()
    _count(closed, met)
    at = {eqn: places for eqn, places in single.items() if places and met[eqn] == 1}
    return Stacked(closed, at, search.wanted)


def evaluate(
    stacked: Stacked,
    args: Sequence[Any],
    held: Mapping[int, Any],
    factor: Any,
    add: Add,
    splits: Mapping[int, Split] = types.MappingProxyType({}),
) -> tuple[list[Any], dict[int, Any], Any]:
    """The function, with what is held for its stacked parameters passed through.

    Args:
      stacked: what `find` found.
      args: the function's arguments; stacked parameters may be on the host.
      held: by number of an argument, a tree of arrays stacked as it is.
      factor: a scalar.
      add: how a gradient is added.
      splits: of other arguments, how those are split that have to be gathered where they are read.

    Returns:
      The results, and `held` and `factor` as they are.  Given what is held before as their
      cotangents, and any factor, the cotangents of `held` are what is held afterwards.
    """
    held = dict(held)
    gradients: list[Any] = []  # of the backward pass so far

    def special(eqn: Any, operands: list[Any]) -> list[Any] | None:
        nonlocal factor
        places = stacked.at.get(id(eqn))
        if places is None:
            return through(eqn, operands, stacked.at, special)
        own = {place: held[number] for place, number in places.items()}
        # Of arrays on the host, jax would keep rows on the device, and of shards copies.
        in_shards = any(isinstance(rows, Shards) for rows in own.values())
        if in_shards or any(map(_jax.is_on_host, operands)):
            linear, scope = reversed_by(eqn, stacked.wanted[id(eqn)], in_shards)
            linear = gathered.gathering(linear, shards.gathered(own))
            shards.check_rows(own)
        else:
            linear, scope = _schedule(eqn, stacked.wanted[id(eqn)])
        with scope(operands):
            if isinstance(linear, Form):
                outs, own, factor = _scan(linear, operands, own, factor, add)
            else:
                outs, own, factor = _stack(linear, operands, own, factor, add, gradients)
        held.update({number: own[place] for place, number in places.items()})
        return outs

    outs = gathered.evaluate(stacked.closed, args, splits, special, gradients.append)
    return outs, held, factor


# What has to be open where a scan runs, given its operands.
Scope = Callable[[Sequence[Any]], contextlib.AbstractContextManager[Any]]


def reversed_by(
    eqn: Any, wanted: Sequence[bool], looks_into_checkpoints: bool = False
) -> tuple[Tangent, Scope]:
    """A scan, under a policy or not, by a schedule that reads and writes single rows.

    Args:
      eqn: its equation.
      wanted: which operands are differentiated.
      looks_into_checkpoints: whether what keeps casts in the loop does so in a `jax.checkpoint`.

    Returns:
      The schedule, and what has to be open where it runs.

    Raises:
      NoReverseMode: jax cannot differentiate it in reverse mode.
    """
    casting_rows = platform() == "tpu"
    if _jax.is_stack(eqn):
        stack: Stack = eqn.params["stack"]
        linear = stack.linear(wanted)
        note_plan(stack.policy, linear.plan)
        return linear, functools.partial(stack.scope, linear.layer, linear.plan)
    form = _form(eqn)
    if casting_rows and looks_into_checkpoints:
        form = dataclasses.replace(form, body=rounded_rows(form.body))
    layer = Layer(form.body, differentiated(form.body, *form.body.split_in(wanted)))
    layer = layer.casting_rows() if casting_rows else layer
    return Tangent(form, layer, Plan.none(form.length)), contextlib.nullcontext


# ---------------------------------------------------------------- finding


def _count(closed: ClosedJaxpr, met: collections.Counter[int]) -> None:
    """How often each equation is met, on every way that `evaluate` may take."""
    for eqn in closed.jaxpr.eqns:
        met[id(eqn)] += 1
        for sub in subjaxprs(eqn):
            _count(sub, met)


class _Search:
    """Follows arguments through calls.

    Attributes:
      uses: how often each candidate is read.
      at, wanted: see `Stacked`.
    """

    def __init__(self, uses: dict[int, int]) -> None:
        self.uses = uses
        self.at: dict[int, dict[int, int]] = {}
        self.wanted: dict[int, list[bool]] = {}

    def walk(self, jaxpr: Any, origin: Mapping[Any, int], reached: set[Any]) -> None:
        """Look through the equations.

        Args:
          origin: the candidates among the variables.
          reached: the variables that something differentiated reaches; added to.
        """
        for eqn in jaxpr.eqns:
            atoms = [None if _jax.is_literal(atom) else atom for atom in eqn.invars]
            known = {place: origin[atom] for place, atom in enumerate(atoms) if atom in origin}
            wanted = [atom in reached for atom in atoms]
            if any(wanted):
                reached.update(var for var in eqn.outvars if _jax.has_tangent(var.aval))
            if _jax.is_jit(eqn) and known:
                inner = _jax.as_closed(eqn.params["jaxpr"]).jaxpr
                self.walk(
                    inner,
                    {inner.invars[place]: number for place, number in known.items()},
                    {var for var, flag in zip(inner.invars, wanted, strict=True) if flag},
                )
                continue
            for number in known.values():
                self.uses[number] += 1
            if known and not eqn.effects and _is_form(eqn) and (form := _form(eqn)).length:
                first = form.body.num_consts + form.body.num_carry
                places = {place: number for place, number in known.items() if place >= first}
                if places:
                    self.at[id(eqn)], self.wanted[id(eqn)] = places, wanted
        for atom in jaxpr.outvars:
            if not _jax.is_literal(atom) and atom in origin:
                self.uses[origin[atom]] += 1


def _is_form(eqn: Any) -> bool:
    return _jax.is_stack(eqn) or _jax.is_scan(eqn)


def _form(eqn: Any) -> Form:
    """The scan that an equation is, bound to a policy or not."""
    if _jax.is_stack(eqn):
        return eqn.params["stack"].form
    scan = _jax.scan_parts(eqn)
    return Form(
        Body(scan.body, scan.num_consts, scan.num_carry), scan.length, scan.reverse, scan.unroll
    )


def _schedule(eqn: Any, wanted: Sequence[bool]) -> tuple[Tangent | Form, Scope]:
    """A stack's own schedule; a form for what runs as an ordinary scan."""
    if not _jax.is_stack(eqn):
        return _form(eqn), contextlib.nullcontext
    stack: Stack = eqn.params["stack"]
    linear = stack.linear(wanted)
    note_plan(stack.policy, linear.plan)
    # How often a stage runs its pipeline says, and not the program that it is found in.
    own = functools.partial(stack.scope, linear.layer, linear.plan)
    scope = contextlib.nullcontext if stack.is_stage else own
    if linear.plan.kind == "none":
        return stack.form, scope
    if stack.is_stage and linear.plan == Plan.full(linear.plan.length):
        # Fewer copies of a layer's parameters are made where its loop is in another one.
        return stack.checkpointed(linear.plan), scope
    return linear, scope


# ---------------------------------------------------------------- an ordinary scan


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _used(add: Add, slices: Any, held: Any, factor: Any, index: Any) -> Any:
    """Everything as it is; backwards, the gradient of the slices is added to a row."""
    return slices, held, factor


def _forward(add: Add, slices: Any, held: Any, factor: Any, index: Any) -> Any:
    return (slices, held, factor), index


def _backward(add: Add, index: Any, cts: Any) -> Any:
    gradients, held, factor = cts
    written = {}
    for place, gradient in gradients.items():
        rows = held[place]
        own = jax.tree.map(lambda r: lax.dynamic_index_in_dim(r, index, keepdims=False), rows)
        written[place] = jax.tree.map(
            lambda r, new: lax.dynamic_update_index_in_dim(r, new, index, 0),
            rows,
            add(own, gradient, factor),
        )
    return None, written, factor, None


_used.defvjp(_forward, _backward)


def _scan(
    form: Form, operands: list[Any], held: dict[int, Any], factor: Any, add: Add
) -> tuple[list[Any], dict[int, Any], Any]:
    body = form.body
    consts, init, xs = body.split_in(operands)
    first = body.num_consts + body.num_carry

    def layer(state: Any, own: Any) -> Any:
        carry, held, factor = state
        index, x = own
        slices = {place: x[place - first] for place in held}
        used: Any = _used(add, slices, held, factor, index)
        slices, held, factor = used
        for place, value in slices.items():
            x[place - first] = value
        carry, y = body(consts, carry, x)
        return (carry, held, factor), y

    (carry, held, factor), ys = lax.scan(
        layer,
        (init, held, factor),
        (jnp.arange(form.length, dtype=jnp.int32), xs),
        length=form.length,
        reverse=form.reverse,
        unroll=form.unroll,
    )
    return [*carry, *ys], held, factor


# ---------------------------------------------------------------- a stack under a policy


def _stack(
    linear: Tangent,
    operands: list[Any],
    held: dict[int, Any],
    factor: Any,
    add: Add,
    gradients: Sequence[Any],
) -> tuple[list[Any], dict[int, Any], Any]:
    """A stack with a schedule of its own, which adds where it would write."""
    wrt = linear.wrt
    wanted = [place for place, flag in enumerate(wrt.ins) if flag]
    first = sum(place < linear.first_x for place in wanted)

    @jax.custom_vjp
    def run(args: Sequence[Any], held: Any, factor: Any) -> Any:
        return linear.run(args), held, factor

    def forward(args: Sequence[Any], held: Any, factor: Any) -> Any:
        # With symbolic zeros each array comes in a box.
        def opened(boxes: Any) -> Any:
            return jax.tree.map(lambda b: b.value, boxes, is_leaf=lambda b: hasattr(b, "value"))

        args, held, factor = opened(args), opened(held), opened(factor)
        outs, kept = linear.forward(args)
        return (outs, held, factor), [*args, *kept]

    def backward(residuals: Any, cts: Any) -> Any:
        outs, held, factor = cts
        given = [
            None if isinstance(ct, SymbolicZero) else ct
            for ct, flag in zip(outs, wrt.outs, strict=True)
            if flag
        ]
        numbers = {place: wanted.index(place) - first for place in held}
        held = shards.after(held, [*(ct for ct in given if ct is not None), *gradients])
        into = Into({numbers[place]: rows for place, rows in held.items()}, factor, add)
        if any(ct is not None for ct in given):
            pulled = iter(linear.pull(residuals, given, into))
            found = [next(pulled) if flag else None for flag in wrt.ins]
            held = {place: found[place] for place in held}
        else:
            found = [None] * len(wrt.ins)
        args = [None if place in held else ct for place, ct in enumerate(found)]
        return args, held, factor

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(list(operands), held, factor)
