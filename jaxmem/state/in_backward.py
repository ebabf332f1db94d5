"""One backward pass (or several) in which parameters of layer stacks are updated.

A layer's gradient is complete when the backward pass has gone through that layer, and the layer's
parameters are not read again: so they can be updated there and then, in place, and the gradient of
one layer is all that exists at a time.  LOMO (Lv et al. 2023, arXiv 2306.09782) does this with SGD;
here it is any update of which `update.taken_apart` says that it goes row by row.

jax differentiates all that is not a stack.  Stacks run by their schedules, which read layers out
of the arrays that are updated and write new rows into them.  Those arrays are no cotangents (state
may hold integers), so that jax does not see them: they are handed over when a stack is reversed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.accumulate import gathered, inplace
from jaxmem.stacked import Into
from jaxmem.stacked.stack import Tangent
from jaxmem.state import rows, stored
from jaxmem.state.places import NOWHERE, Places
from jaxmem.state.update import (
    Known,
    RowProgram,
    Update,
    combined,
    identity,
    row_program,
    taken_apart,
)
from jaxmem.trace.context import note_updated, platform
from jaxmem.trace.layer import NoReverseMode, nbytes
from jaxmem.trace.source import source_line

# (number of a parameter, what was summed for it or for its row, its gradient) -> the gradient.
Total = Callable[[int, Any, Any], Any]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be differentiated, and by what updated.

    Attributes:
      closed: from parameters and other operands to the value and whatever else.
      params, rest: its operands.
      state: leaves of the optimizer's state.
      update: from the gradients' types to the optimizer's program, as in `Update.closed`.
      before: of each parameter, what gradients of other microbatches sum up to; None for nothing.
      seed: from all results to the cotangent of the value, the value that the optimizer is told,
        and how the gradient of a parameter follows from what was summed and this pass's.
      passes: how many backward passes there may be.
      places: where all these lie.
    """

    closed: ClosedJaxpr
    params: Sequence[Any]
    rest: Sequence[Any]
    state: Sequence[Any]
    update: Callable[[Sequence[Any]], ClosedJaxpr]
    before: Sequence[Any]
    seed: Callable[[Sequence[Any]], tuple[Any, Any, Total]]
    gradient_types: Sequence[Any]
    passes: int
    places: Places = NOWHERE


@dataclasses.dataclass(frozen=True)
class Done:
    """What came of it.

    Attributes:
      outs: results of the function.
      params, state: leaves after the update.
      update: how it was taken apart.
      elsewhere: of parameters that are not read in one stack alone, the reason why they could
        not be updated in the backward pass.
    """

    outs: list[Any]
    params: list[Any]
    state: list[Any]
    update: Update
    elsewhere: Mapping[int, str]


# ---------------------------------------------------------------- API


def run(task: Task) -> Done:
    """Differentiate, and update."""
    found = _found(task)
    closed, update, count = found.closed, found.update(task), len(task.params)
    inside = set(update.by_row)
    alone_summed = [leaf for leaf in inside if task.before[leaf] is None]
    note_updated(sum(nbytes(task.gradient_types[leaf]) for leaf in alone_summed))
    places = {
        eqn: {place: leaf for place, leaf in own.items() if leaf in inside}
        for eqn, own in found.places.items()
    }
    handover = _Handover(update, task)
    task.places.check_rows(update.by_row)
    alone = [leaf for leaf in range(count) if leaf not in inside]

    def special(token: Any, eqn: Any, operands: list[Any]) -> list[Any] | None:
        if not places.get(id(eqn)):
            return None
        return _run_stack(found.linear[id(eqn)], operands, token, places[id(eqn)], handover)

    def function(given: list[Any], token: Any) -> Any:
        full = [*task.params, *task.rest]
        for leaf, value in zip(alone, given, strict=True):
            full[leaf] = value
        splits = task.places.gathered({leaf: leaf for leaf in alone})
        outs = gathered.evaluate(closed, full, splits, functools.partial(special, token))
        outs = [_jax.as_array(out, aval) for out, aval in zip(outs, closed.out_avals, strict=True)]
        return outs[0], outs

    # What is differentiated by this is differentiated in any case, though no parameter goes in.
    token = jnp.zeros(())
    given = [_jax.on_device(task.params[leaf]) for leaf in alone]
    value, pull, outs = jax.vjp(function, given, token, has_aux=True)
    seed, told, total = task.seed(outs)
    seed = _jax.as_varying(seed.astype(value.dtype), _jax.varying(value))
    handover.begin(told, total)
    for number in range(update.passes):
        handover.start_pass(number)
        gradients, _ = pull(seed)
        handover.end_pass(
            {
                leaf: total(leaf, task.before[leaf], task.places.gradient(leaf, gradient))
                for leaf, gradient in zip(alone, gradients, strict=True)
            }
        )
    params, state = handover.results()
    return Done(outs, params, state, update, found.elsewhere)


def has_work(task: Task) -> bool:
    """Whether any parameter is updated in the backward pass; operands are not looked at."""
    found = _found(task)
    return bool(found.places) and bool(found.update(task).by_row)


def after(task: Task, gradients: Sequence[Any], value: Any) -> Done:
    """Update by these gradients, with no backward pass, as that `has_work` of no parameter's."""
    found = _found(task)
    update = found.update(task)
    handover = _Handover(update, task)
    handover.begin(value, handover.total)
    handover.end_pass(dict(enumerate(gradients)))
    params, state = handover.results()
    return Done([], params, state, update, found.elsewhere)


# ---------------------------------------------------------------- finding the stacks


@dataclasses.dataclass(frozen=True)
class _Found:
    """The stacks of a function.

    Attributes:
      closed: the function, inlined.
      linear: by id of an equation, its stack.
      places: and which of its operands are which parameters.
      elsewhere: see `Done`.
    """

    closed: ClosedJaxpr
    linear: Mapping[int, "_Linear"]
    places: Mapping[int, Mapping[int, int]]
    elsewhere: Mapping[int, str]

    def update(self, task: Task) -> Update:
        """The optimizer's program, taken apart for the parameters of these stacks."""
        wanted = {leaf for own in self.places.values() for leaf in own.values()}
        program = task.update(task.gradient_types)
        return taken_apart(program, len(task.params), len(task.state), wanted, task.passes)


def _found(task: Task) -> _Found:
    closed = _jax.inlined(task.closed)
    count = len(task.params)
    stacked = inplace.find(closed, range(count), range(count))
    linear, places, elsewhere = _stacks(closed, stacked)
    return _Found(closed, linear, places, {**_read_in_calls(closed, count), **elsewhere})


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A stack, ready to be reversed, and what has to be open where it runs."""

    tangent: Tangent
    scope: Callable[[Sequence[Any]], contextlib.AbstractContextManager[Any]]


def _stacks(
    closed: ClosedJaxpr, stacked: inplace.Stacked
) -> tuple[dict[int, _Linear], dict[int, dict[int, int]], dict[int, str]]:
    """Of the stacks that stand in the function itself: how they are reversed, and their parameters.

    And of parameters of others, why they cannot be updated there.
    """
    found: dict[int, _Linear] = {}
    places: dict[int, dict[int, int]] = {}
    elsewhere: dict[int, str] = {}
    here = {id(eqn): eqn for eqn in closed.jaxpr.eqns}
    for at, own in stacked.at.items():
        if at not in here:
            reason = "its stack is inside another call, such as a jax.jit with shardings"
            elsewhere.update(dict.fromkeys(own.values(), reason))
            continue
        try:
            tangent, scope = inplace.reversed_by(here[at], stacked.wanted[at])
        except NoReverseMode as error:
            reason = f"its stack has no reverse mode in jax: {str(error).split('. ')[0]}"
            elsewhere.update(dict.fromkeys(own.values(), reason))
            continue
        found[at] = _Linear(tangent, scope)
        places[at] = dict(own)
    return found, places, elsewhere


def _read_in_calls(closed: ClosedJaxpr, count: int) -> dict[int, str]:
    """Of operands that are read inside a call and nowhere else: that it is so."""
    found = {}
    for number, var in enumerate(closed.jaxpr.invars[:count]):
        readers = [eqn for eqn in closed.jaxpr.eqns if var in eqn.invars]
        if len(readers) != 1 or _jax.is_stack(readers[0]) or _jax.is_scan(readers[0]):
            continue
        if _jax.all_subjaxprs(readers[0]) or _jax.in_call(readers[0]):
            where = source_line(readers[0])
            is_checkpoint = _jax.in_checkpoint(readers[0]) is not None
            name = "jax.checkpoint" if is_checkpoint else readers[0].primitive.name
            place = f"{name} at {where}" if where else name
            found[number] = f"it is read inside another call ({place})"
    return found


def _run_stack(
    linear: _Linear,
    operands: list[Any],
    token: Any,
    places: Mapping[int, int],
    handover: "_Handover",
) -> list[Any]:
    """A stack whose backward pass reads from, and writes to, what is handed over."""
    tangent = gathered.gathering(linear.tangent, handover.task.places.gathered(places))
    wrt = tangent.wrt
    wanted = [place for place, flag in enumerate(wrt.ins) if flag]
    first = sum(place < tangent.first_x for place in wanted)
    numbers = {wanted.index(place) - first: leaf for place, leaf in places.items()}

    @jax.custom_vjp
    def call(args: Sequence[Any], token: Any) -> Any:
        return tangent.run(args)

    def forward(args: Sequence[Any], token: Any) -> Any:
        args = [box.value for box in args]  # with symbolic zeros each array comes in one
        outs, kept = tangent.forward(args)
        return outs, [*args, *kept]

    def backward(residuals: Any, cts: Any) -> Any:
        given = [
            None if isinstance(ct, SymbolicZero) else ct
            for ct, flag in zip(cts, wrt.outs, strict=True)
            if flag
        ]
        found = [None] * len(wrt.ins)
        if any(ct is not None for ct in given):
            into = handover.into(numbers)
            pulled = iter(tangent.pull(residuals, given, into))
            found = [next(pulled) if flag else None for flag in wrt.ins]
            handover.take({leaf: found[place] for place, leaf in places.items()})
        args = [None if place in places else ct for place, ct in enumerate(found)]
        return args, jnp.zeros(())

    call.defvjp(forward, backward, symbolic_zeros=True)
    with linear.scope(operands):
        return call(list(operands), token)


# ---------------------------------------------------------------- what stacks write to


class _Held(NamedTuple):
    """What is carried down the stack for a parameter.

    Attributes:
      arrays: in the last pass, the parameter and the leaves of its state; nothing before.
      sums: over the rows done so far.
    """

    arrays: tuple[Any, ...]
    sums: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Rows(Into):
    """What rows are computed from, and what comes of them.

    In the last pass new rows replace the old ones, from which layers are read till then.  Before,
    nothing is kept of them but sums.

    Attributes:
      held: by number among the differentiated xs, a `_Held`.
      factor: values without rows, a list; and by number, sums of other microbatches.
      leaves: by number, of the parameter.
      read: by number, where rows of the parameter and of its state are read in passes before the
        last.
      pass_number: of the backward pass.
    """

    leaves: Mapping[int, int] = dataclasses.field(default_factory=dict)
    read: Mapping[int, Sequence[Any]] = dataclasses.field(default_factory=dict)
    pass_number: int = 0
    update: Any = None
    programs: Mapping[int, RowProgram] = dataclasses.field(default_factory=dict)
    total: Total = lambda leaf, before, gradient: gradient
    places: Places = NOWHERE

    def computed(self, number: int, own: Sequence[Any], gradient: Any, index: Any) -> list[Any]:
        """Results of the program for one row.

        Args:
          own: the row of the parameter and of each leaf of its state.
          gradient: of the row.
        """
        update, leaf = self.update, self.leaves[number]
        wholes, sums = self.factor
        before = sums[number]
        if before is not None:
            before = lax.dynamic_index_in_dim(before, index, keepdims=False)
        gradient = self.total(leaf, before, self.places.gradient(leaf, gradient))
        names = [update.gradient(leaf), update.param(leaf), *map(update.state, update.held[leaf])]
        own = self.places.in_shards(leaf, update.held[leaf], own)
        rows = dict(zip(names, [gradient[None], *own], strict=True))
        program = self.programs[leaf]
        new = program(dict(zip(program.whole, wholes[number], strict=True)), rows, index)
        count = len(own) if self.held[number].arrays else 0
        return [*self.places.stored(leaf, update.held[leaf], new[:count]), *new[count:]]

    def inputs(self, xs: Sequence[Any], state: Sequence[Any], wrt: Sequence[bool]) -> Sequence[Any]:
        wanted = [place for place, flag in enumerate(wrt) if flag]
        found = list(xs)
        for number in self.held:
            if state[number].arrays:
                found[wanted[number]] = state[number].arrays[0]
        return found

    def written(
        self, xs: Sequence[Any], gradients: Sequence[Any], index: Any, pulled: Sequence[Any]
    ) -> list[Any]:
        found: list[Any] = []
        if platform() == "cpu":
            index = _after(index, pulled)
        for number, (x, gradient) in enumerate(zip(xs, gradients, strict=True)):
            if number in self.held:
                # In front of a barrier: a sum over devices behind which one stands is made whole.
                gradient = self.places.gradient(self.leaves[number], gradient)
            if found:
                # One after the other: a compiler holds new rows till they are in their places.
                found[-1], gradient = lax.optimization_barrier((found[-1], gradient))
            found.append(self.write(number, x, gradient, index))
        return found

    def write(self, number: int, rows: Any, gradient: Any, index: Any) -> Any:
        if number not in self.held:
            return super().write(number, rows, gradient, index)
        arrays, sums = rows
        read = arrays or self.read[number]
        leaf = self.leaves[number]
        names = [self.update.param(leaf), *map(self.update.state, self.update.held[leaf])]
        own = [
            _jax.beside(stored.rows_of(array, index, 1), name.aval)
            for array, name in zip(read, names, strict=True)
        ]
        compute = functools.partial(self.computed, number)
        varies = any(map(_jax.varying, [*own, gradient, index, *jax.tree.leaves(self.factor)]))
        is_plain = platform() == "cpu" and not varies and not any(map(stored.is_on_host, read))
        new = (_in_a_loop if is_plain else _as_it_is)(compute, own, gradient, index)
        eqns = self.update.sums_of(leaf, self.pass_number)
        parts = new[len(arrays) :]
        return _Held(
            self.places.stored(
                leaf,
                self.update.held[leaf],
                [
                    stored.with_rows(array, row, index)
                    for array, row in zip(arrays, new, strict=False)
                ],
            ),
            tuple(
                combined(eqn, total, part)
                for eqn, total, part in zip(eqns, sums, parts, strict=True)
            ),
        )

    def write_all(self, number: int, rows: Any, gradients: Any) -> Any:
        def step(held: Any, own: Any) -> Any:
            gradient, index = own
            return self.write(number, held, gradient, index), None

        indices = jnp.arange(gradients.shape[0], dtype=jnp.int32)
        return lax.scan(step, rows, (gradients, indices))[0]


def _as_it_is(compute: Callable[..., list[Any]], *operands: Any) -> list[Any]:
    return compute(*operands)


def _after(index: Any, values: Sequence[Any]) -> Any:
    """The index, for a compiler that removes barriers: it is known when the values are."""
    for value in values:
        if jnp.issubdtype(value.dtype, jnp.floating) and value.size:
            # Of a dimension that is typed as split over devices jax takes no single place.
            first = value[tuple(slice(None) if axes else 0 for axes in _jax.split(value))].max()
            first = first.astype(jnp.float32)
            bits = lax.population_count(lax.bitcast_convert_type(first, jnp.int32))
            index = index + jnp.minimum(bits, 0)  # 0, which a compiler does not see
    return index


def _in_a_loop(compute: Callable[..., list[Any]], own: Any, gradient: Any, index: Any) -> list[Any]:
    """New rows, computed in a loop of one turn.

    XLA for CPUs computes new moments once where they are stored and again where the parameter is,
    reads the old ones for that at no certain time, and so copies whole stacks at each layer.  It
    removes barriers, but not a loop whose number of turns it does not know.
    """
    shapes = jax.eval_shape(compute, own, gradient, index)
    begin = [jnp.zeros(shape.shape, shape.dtype, device=shape.sharding) for shape in shapes]
    turns = jnp.minimum(index, 0) + 1

    def turn(state: Any) -> Any:
        return state[0] + 1, compute(own, gradient, index)

    return lax.while_loop(lambda state: state[0] < turns, turn, (jnp.int32(0), begin))[1]


def _typed_as(array: Any, var: Any) -> Any:
    """An array that differs from device to device wherever this variable does."""
    if stored.is_on_disk(array):
        return array
    return _jax.as_varying(array, _jax.varying(var.aval))


class _Handover:
    """Arrays that are handed from stack to stack on the way back, and what is known meanwhile."""

    def __init__(self, update: Update, task: Task) -> None:
        self.update, self.task = update, task
        # What is updated after the pass is so in shards; the function has read it as it is.
        self.params = [task.places.shards(leaf, param) for leaf, param in enumerate(task.params)]
        self.known = Known(update, task.state, list(map(_jax.on_device, self.params)))
        # Inside `shard_map`, what is written to has the type of what is written.
        self.arrays = {
            leaf: (
                _typed_as(task.params[leaf], update.new_param(leaf)),
                *(_typed_as(task.state[n], update.new_state(n)) for n in update.held[leaf]),
            )
            for leaf in update.by_row
        }
        self.number = 0
        self.total: Total = lambda leaf, before, gradient: gradient
        self.sums: dict[int, tuple[Any, ...]] = {}
        self.done: set[int] = set()

    def begin(self, value: Any, total: Total) -> None:
        self.known.learn({self.update.value: value})
        self.total = total

    @property
    def is_last(self) -> bool:
        return self.number == self.update.passes - 1

    def start_pass(self, number: int) -> None:
        update = self.update
        self.number = number
        self.done = set()
        self.programs: dict[int, RowProgram] = {}
        self.wholes: dict[int, list[Any]] = {}
        for leaf in update.by_row:
            wanted: list[Any] = []
            sums = update.sums_of(leaf, number)
            if self.is_last:
                wanted = [update.new_param(leaf), *map(update.new_state, update.held[leaf])]
            given = [update.gradient(leaf), update.param(leaf)]
            given += map(update.state, update.held[leaf])
            program = row_program(update, [*wanted, *sums], given)
            self.programs[leaf] = program
            # Before any loop: what is first computed in one is not there outside.
            self.wholes[leaf] = self.known.whole(program.whole)
            self.sums[leaf] = tuple(_typed_as(identity(eqn), eqn.outvars[0]) for eqn in sums)

    def into(self, numbers: Mapping[int, int]) -> Into:
        """What the stack with these parameters writes to."""
        wholes = {number: self.wholes[leaf] for number, leaf in numbers.items()}
        before = {number: self.task.before[leaf] for number, leaf in numbers.items()}
        return _Rows(
            held={
                n: _Held(self.arrays[leaf] if self.is_last else (), self.sums[leaf])
                for n, leaf in numbers.items()
            },
            factor=(wholes, before),
            leaves=dict(numbers),
            read={n: self.arrays[leaf] for n, leaf in numbers.items()},
            pass_number=self.number,
            update=self.update,
            programs=self.programs,
            total=self.total,
            places=self.task.places,
        )

    def take(self, found: Mapping[int, Any]) -> None:
        """What came of them."""
        for leaf, held in found.items():
            self.done.add(leaf)
            self.sums[leaf] = held.sums
            if self.is_last:
                self.arrays[leaf] = held.arrays

    def end_pass(self, gradients: Mapping[int, Any]) -> None:
        """After a pass: gradients of the parameters that are not updated in it."""
        update = self.update
        for leaf in update.by_row:
            if leaf not in self.done:
                self._without_gradient(leaf)
        self.known.learn({update.gradient(leaf): g for leaf, g in gradients.items()})
        for leaf, sums in self.sums.items():
            for eqn, total in zip(update.sums_of(leaf, self.number), sums, strict=True):
                self.known.learn({eqn.outvars[0]: total})

    def _without_gradient(self, leaf: int) -> None:
        """A parameter that the value does not depend on has a gradient of zeros."""
        into = self.into({0: leaf})
        param = self.arrays[leaf][0]

        def step(held: Any, index: Any) -> Any:
            row = lax.dynamic_index_in_dim(param, index, keepdims=False)
            return into.write(0, held, _jax.zeros_like(row), index), None

        held, _ = lax.scan(step, into.held[0], jnp.arange(param.shape[0], dtype=jnp.int32))
        self.take({leaf: held})

    def results(self) -> tuple[list[Any], list[Any]]:
        """Parameters and state after the last pass."""
        update, task = self.update, self.task
        whole = [self.known.values.get(update.gradient(k)) for k in range(update.num_params)]
        found = rows.finished(self.known, whole, task.state, self.params)
        for leaf, (param, *state) in self.arrays.items():
            found["param", leaf] = param
            found |= {("state", n): a for n, a in zip(update.held[leaf], state, strict=True)}
        state, params = rows.collected(self.known, found, task.state)
        params = list(map(_jax.beside, params, task.params))
        params = [
            param if leaf in self.arrays else task.places.whole(leaf, task.params[leaf], param)
            for leaf, param in enumerate(params)
        ]
        return params, task.places.state_in_shards(state)
