"""An optimizer's update, taken apart into what can be done layer by layer and what cannot.

Any optax transformation is a function of trees; traced, its jaxpr says which results read what.
A parameter that is stacked over layers can be updated one row at a time where each row of its new
value, and of what the state holds for it, follows from the same row of gradient, parameter and
state, and from values that are the same for all rows: counters, learning rates.  Where it
follows from sums over rows as well (a norm of the whole gradient), these have to be known before
the first row is updated: the backward pass is then run once more, and that time nothing but the
sums is kept of each gradient.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.accumulate.trees import at_least_float32
from jaxmem.state import rules, stored
from jaxmem.trace.source import source_line

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Rows:
    """That a value has a row for each layer of a stacked parameter.

    Attributes:
      leaf: number of the parameter.
      axis: along which the rows are.
    """

    leaf: int
    axis: int


@dataclasses.dataclass(frozen=True)
class Update:
    """`update(gradients, state, parameters, value)` as a program, and how it is cut.

    All of it is flat: operands are the gradients, the state's leaves, the parameters and the value
    of the loss; results the new state's leaves and the new parameters.

    Attributes:
      closed: the program.
      num_params, num_state: how many leaves there are.
      by_row: numbers of the parameters that are updated row by row.
      held: of each of these, the numbers of the leaves of the state that go with it.
      why_not: of each parameter that was to be and is not, the reason.
      passes: how many backward passes are needed.
      rows: of each variable that has rows, which.
      after: of each variable, how many backward passes must be over for it to be known; of one with
        rows, for its rows to be known in the next.
    """

    closed: ClosedJaxpr
    num_params: int
    num_state: int
    by_row: tuple[int, ...]
    held: Mapping[int, tuple[int, ...]]
    why_not: Mapping[int, str]
    passes: int
    rows: Mapping[Any, Rows]
    after: Mapping[Any, int]

    def gradient(self, leaf: int) -> Any:
        return self.closed.jaxpr.invars[leaf]

    def state(self, number: int) -> Any:
        return self.closed.jaxpr.invars[self.num_params + number]

    def param(self, leaf: int) -> Any:
        return self.closed.jaxpr.invars[self.num_params + self.num_state + leaf]

    @property
    def value(self) -> Any:
        return self.closed.jaxpr.invars[-1]

    def new_state(self, number: int) -> Any:
        return self.closed.jaxpr.outvars[number]

    def new_param(self, leaf: int) -> Any:
        return self.closed.jaxpr.outvars[self.num_state + leaf]

    def sums(self, number: int) -> list[Any]:
        """The operations over all rows whose parts a backward pass collects."""
        return [
            eqn
            for eqn in self.closed.jaxpr.eqns
            if eqn.outvars[0] not in self.rows
            and self.after.get(eqn.outvars[0]) == number + 1
            and self._leaf_of_sum(eqn) is not None
        ]

    def _leaf_of_sum(self, eqn: Any) -> int | None:
        """The parameter whose rows an operation takes together."""
        atom = eqn.invars[0] if eqn.invars else None
        own = None if atom is None or _jax.is_literal(atom) else self.rows.get(atom)
        return None if own is None else own.leaf

    def sums_of(self, leaf: int, number: int) -> list[Any]:
        return [eqn for eqn in self.sums(number) if self._leaf_of_sum(eqn) == leaf]


# ---------------------------------------------------------------- API


@contextlib.contextmanager
def as_a_whole() -> Iterator[None]:
    """While open, an update is traced as a whole, and taken apart by what has it traced."""
    token = _as_a_whole.set(True)
    try:
        yield
    finally:
        _as_a_whole.reset(token)


def is_as_a_whole() -> bool:
    """Whether `as_a_whole` is open."""
    return _as_a_whole.get()


def traced(update: Any, gradients: Any, state: Any, params: Any, value: Any) -> ClosedJaxpr:
    """The program of `update`, with what can be looked into in its place."""
    flat, tree = jax.tree.flatten((gradients, state, params, value))

    def run(*flat: Any) -> list[Any]:
        new_params, new_state = update(*tree.unflatten(flat))
        return [*jax.tree.leaves(new_state), *jax.tree.leaves(new_params)]

    with as_a_whole():
        closed = _jax.trace(run, [_typed(leaf) for leaf in flat])
    return _jax.trace(lambda *flat: _jax.evaluate(closed, flat, _looked_into), closed.in_avals)


def taken_apart(
    closed: ClosedJaxpr,
    num_params: int,
    num_state: int,
    wanted: Collection[int],
    passes: int,
    over_gradients: bool = False,
) -> Update:
    """Which of the parameters can be updated row by row.

    Args:
      closed: see `Update`.
      wanted: numbers of the parameters that are to be, rows along their first axis.
      passes: how many backward passes there may be.
      over_gradients: whether results replace the gradients, and not the parameters.
    """
    why_not: dict[int, str] = {}
    held: dict[int, set[int]] = {leaf: set() for leaf in wanted}
    settled = False  # whether it is known which leaves of the state go with which parameter
    while True:
        search = _Search(closed, num_params, num_state, held, passes, over_gradients, settled)
        if search.refused:
            for leaf, reason in search.refused.items():
                why_not[leaf] = reason
                held.pop(leaf, None)
                for own in held.values():
                    own.clear()
            settled = False
            continue
        if search.more:
            for leaf, numbers in search.more.items():
                held[leaf] |= numbers
            continue
        if settled:
            break
        settled = True
    return Update(
        closed=closed,
        num_params=num_params,
        num_state=num_state,
        by_row=tuple(sorted(held)),
        held={leaf: tuple(sorted(numbers)) for leaf, numbers in held.items()},
        why_not=why_not,
        passes=search.passes,
        rows=search.rows,
        after=search.after,
    )


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """How values with rows are computed for one row.

    A source of an operand is a literal, a variable that has no rows and is read whole, or a
    variable with the axis along which a row of it is meant.

    Attributes:
      count: of how many rows at once.
      steps: operations with the parameters that differ, the sources of their operands, and the
        variables and axis of what they make.
      cut: variables of which a row is cut out of the whole, and the axis.
      whole: variables that are read whole, or cut.
      results: sources of the results.
    """

    count: int
    steps: tuple[tuple[Any, Mapping[str, Any], tuple[Any, ...], tuple[Any, ...]], ...]
    cut: tuple[tuple[Any, int], ...]
    whole: tuple[Any, ...]
    results: tuple[Any, ...]

    def __call__(self, whole: Mapping[Any, Any], rows: Mapping[Any, Any], index: Any) -> list[Any]:
        """The results for some rows.

        Args:
          whole: values of variables without rows.
          rows: of operands that have rows, these.
          index: which is the first.
        """
        known: dict[Any, Any] = {(var, 0): row for var, row in rows.items()}
        for var, axis in self.cut:
            known[var, axis] = lax.dynamic_slice_in_dim(whole[var], index, self.count, axis)

        def read(source: Any) -> Any:
            if isinstance(source, tuple):
                return known[source]
            return source.val if _jax.is_literal(source) else whole[source]

        for eqn, params, sources, made in self.steps:
            found = _jax.bound_with(eqn, params, *map(read, sources))
            known.update(zip(made, found, strict=True))
        return [read(source) for source in self.results]


def row_program(
    update: Update, wanted: Sequence[Any], given: Sequence[Any], count: int = 1
) -> RowProgram:
    """How these are computed for so many rows.

    Args:
      wanted: variables with rows, or operations that take all rows together: what they make of one.
      given: operands that have rows.
    """
    build = _Build(update, given, count)
    results = []
    for want in wanted:
        if not hasattr(want, "invars"):
            results.append(build.row(want, update.rows[want].axis))
            continue
        atom = want.invars[0]
        source = build.row(atom, update.rows[atom].axis)
        made = (want, 0)
        build.steps.append((want, {}, (source,), (made,)))
        results.append(made)
    return RowProgram(
        count=count,
        steps=tuple(build.steps),
        cut=tuple(build.cut),
        whole=tuple(dict.fromkeys(build.whole)),
        results=tuple(results),
    )


class Known:
    """Values of an update that are the same for all rows, as they get known."""

    def __init__(self, update: Update, state: Sequence[Any], params: Sequence[Any]) -> None:
        self.update = update
        jaxpr = update.closed.jaxpr
        self.values: dict[Any, Any] = dict(zip(jaxpr.constvars, update.closed.consts, strict=True))
        for number, leaf in enumerate(state):
            if update.state(number) not in update.rows:
                self.values[update.state(number)] = leaf
        for number, leaf in enumerate(params):
            if number not in update.by_row:
                self.values[update.param(number)] = leaf

    def learn(self, values: Mapping[Any, Any]) -> None:
        for var, value in values.items():
            narrower = hasattr(value, "dtype") and value.dtype != var.aval.dtype
            self.values[var] = value.astype(var.aval.dtype) if narrower else value

    def whole(self, wanted: Sequence[Any]) -> list[Any]:
        """Values of variables without rows."""
        closed = self.update.closed
        unknown = [a for a in wanted if not _jax.is_literal(a) and a not in self.values]
        needed = _jax.needed(closed, unknown, keep_effects=False, given=self.values)
        eqns = [closed.jaxpr.eqns[index] for index in sorted(needed)]
        for atom in [*wanted, *(atom for eqn in eqns for atom in eqn.invars)]:
            if not _jax.is_literal(atom) and stored.is_on_disk(self.values.get(atom)):
                self.values[atom] = stored.whole(self.values[atom])
        self.values.update(_jax.evaluate_each(eqns, self.values))
        return [a.val if _jax.is_literal(a) else self.values[a] for a in wanted]


def combined(eqn: Any, first: Any, second: Any) -> Any:
    """What an operation over all rows gives for two parts of them, from what it gives for each.

    Args:
      first: of `identity`, or what came of this before; sums are in float32 at the least.
    """
    kind = rules.COMBINED[eqn.primitive.name]
    return _COMBINE[kind](first, second.astype(first.dtype))


def identity(eqn: Any) -> jax.Array:
    """What it gives for no rows."""
    aval = eqn.outvars[0].aval
    kind = rules.COMBINED[eqn.primitive.name]
    if kind in ("max", "min"):
        floating = jnp.issubdtype(aval.dtype, jnp.floating)
        info: Any = None if floating else jnp.iinfo(aval.dtype)
        least, most = (-jnp.inf, jnp.inf) if floating else (info.min, info.max)
        return jnp.full(aval.shape, least if kind == "max" else most, aval.dtype)
    is_sum = kind == "add" and jnp.issubdtype(aval.dtype, jnp.inexact)
    dtype = at_least_float32(aval.dtype) if is_sum else aval.dtype
    return jnp.full(aval.shape, kind == "and", dtype)


# ---------------------------------------------------------------- implementation

_as_a_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("as_a_whole", default=False)

_COMBINE = {
    "add": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
}


def _typed(leaf: Any) -> Any:
    """The type of an array, or what is one already."""
    is_type = isinstance(leaf, jax.ShapeDtypeStruct | core.ShapedArray)
    return leaf if is_type else jax.typeof(leaf)


def _looked_into(eqn: Any, operands: list[Any]) -> list[Any] | None:
    """For `evaluate`: calls inlined, and of a choice between branches both run, and selected from.

    An update has no side effects, and a row of a branch that is not taken costs little, unless
    there are loops or the like in it.
    """
    inner = _jax.in_call(eqn)
    if inner is not None:
        return _jax.evaluate(inner, operands, _looked_into)
    if eqn.primitive.name in rules.EACH and len(operands) > 1:
        return [
            _jax.bound_with(eqn, rules.for_one(eqn, number), operand)[0]
            for number, operand in enumerate(operands)
        ]
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2 or eqn.effects:
        return None
    branches = [_jax.as_closed(branch) for branch in eqn.params["branches"]]
    if not all(map(_is_cheap, branches)):
        return None
    which, *rest = operands
    no, yes = (_jax.evaluate(branch, rest, _looked_into) for branch in branches)
    which = lax.convert_element_type(which, bool)
    return [lax.select(which, jnp.asarray(a), jnp.asarray(b)) for a, b in zip(yes, no, strict=True)]


def _is_cheap(closed: ClosedJaxpr) -> bool:
    """Whether a program is operations that have rules, and calls and choices of such."""

    def is_cheap(eqn: Any) -> bool:
        inner = _jax.in_call(eqn)
        if inner is not None:
            return _is_cheap(inner)
        if eqn.primitive.name == "cond":
            return all(_is_cheap(_jax.as_closed(branch)) for branch in eqn.params["branches"])
        return rules.is_known(eqn)

    return all(map(is_cheap, closed.jaxpr.eqns))


def _axes(eqn: Any, rows: Mapping[Any, Rows]) -> list[int | None]:
    own = [None if _jax.is_literal(atom) else rows.get(atom) for atom in eqn.invars]
    return [None if found is None else found.axis for found in own]


class _Build:
    """Finds the operations that make rows, each once, and what they read."""

    def __init__(self, update: Update, given: Sequence[Any], count: int) -> None:
        self.update, self.count = update, count
        self.makers = {var: eqn for eqn in update.closed.jaxpr.eqns for var in eqn.outvars}
        self.known: set[Any] = {(var, update.rows[var].axis) for var in given}
        self.steps: list[Any] = []
        self.cut: list[Any] = []
        self.whole: list[Any] = []

    def row(self, var: Any, axis: int) -> Any:
        """The source of one row of a variable."""
        wanted = var, axis
        todo = [wanted]
        while todo:
            var, axis = source = todo[-1]
            if source in self.known:
                todo.pop()
                continue
            eqn = self.makers.get(var)
            if var in self.update.rows:
                assert eqn is not None
                how = rules.rule(eqn, _axes(eqn, self.update.rows))
            else:
                way = None if eqn is None else rules.without_rows(eqn, axis)
                if eqn is None or way is None:
                    self.known.add(source)
                    self.cut.append(source)
                    self.whole.append(var)
                    continue
                how = way
            sources = tuple(
                atom if own is None or _jax.is_literal(atom) else (atom, own)
                for atom, own in zip(eqn.invars, how.into, strict=True)
            )
            missing = [s for s in sources if isinstance(s, tuple) and s not in self.known]
            if missing:
                todo += missing
                continue
            made = tuple((out, how.out) for out in eqn.outvars)
            self.whole += [s for s in sources if _jax.is_var(s) and not isinstance(s, tuple)]
            self.steps.append((eqn, how.params(eqn, self.count), sources, made))
            self.known.update(made)
        return wanted


class _Search:
    """Follows rows through an update, once.

    Attributes:
      rows, after: see `Update`.
      refused: parameters that cannot be updated row by row, and why.
      more: leaves of the state that have to go with a parameter.
      passes: how many backward passes are needed.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        num_params: int,
        num_state: int,
        held: Mapping[int, set[int]],
        passes: int,
        over_gradients: bool,
        settled: bool,
    ) -> None:
        self.jaxpr = jaxpr = closed.jaxpr
        self.rows: dict[Any, Rows] = {}
        self.after: dict[Any, int] = dict.fromkeys([*jaxpr.constvars, *jaxpr.invars], 0)
        self.refused: dict[int, str] = {}
        self.more: dict[int, set[int]] = {}
        self._makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        # Of each variable, over the rows of which parameters something in it was summed.
        self._summed: dict[Any, frozenset[int]] = {}
        for leaf in range(num_params):
            if leaf in held:
                self.rows[jaxpr.invars[leaf]] = Rows(leaf, 0)
                self.rows[jaxpr.invars[num_params + num_state + leaf]] = Rows(leaf, 0)
                for number in held[leaf]:
                    self.rows[jaxpr.invars[num_params + number]] = Rows(leaf, 0)
            else:
                # Known when the backward pass is over.
                self.after[jaxpr.invars[leaf]] = 1
        for index in sorted(_jax.needed(closed, jaxpr.outvars, keep_effects=False)):
            self._follow(jaxpr.eqns[index], settled)
            if self.refused:
                return
        self.passes = 1
        for var in jaxpr.outvars:
            if not _jax.is_literal(var):
                self._count(var, passes)
        self._replaced = 0 if over_gradients else num_params + num_state
        self._check(num_params, num_state, held)

    def _count(self, var: Any, passes: int) -> None:
        """How many backward passes a result needs: what has rows gets them in the last one."""
        wanted = self.after[var] + (var in self.rows)
        if wanted > passes:
            leaves = {self.rows[var].leaf} if var in self.rows else self._summed[var]
            reason = (
                f"its update needs {wanted} backward passes, for norms or the like over "
                f"all rows; pass passes={wanted} if they are worth it"
            )
            self.refused.update(dict.fromkeys(leaves, reason))
        self.passes = max(self.passes, wanted)

    def _follow(self, eqn: Any, settled: bool) -> None:
        atoms = [atom for atom in eqn.invars if not _jax.is_literal(atom)]
        after = max((self.after[atom] for atom in atoms), default=0)
        leaves = sorted({self.rows[atom].leaf for atom in atoms if atom in self.rows})
        summed = frozenset().union(*(self._summed.get(atom, ()) for atom in atoms))
        found: Rows | None = None
        if len(leaves) > 1:
            self._refuse(leaves, eqn, "takes it together with another parameter")
        elif leaves:
            axes = _axes(eqn, self.rows)
            if rules.reduces_rows(eqn, axes):
                after += 1
                summed |= {leaves[0]}
            else:
                try:
                    how = rules.rule(eqn, axes)
                    if settled:
                        self._check_cut(eqn, how)
                    found = Rows(leaves[0], how.out)
                except rules.Mixed as error:
                    self._refuse(leaves, eqn, str(error))
        for var in eqn.outvars:
            self.after[var] = after
            self._summed[var] = summed
            if found is not None:
                self.rows[var] = found

    def _check_cut(self, eqn: Any, how: rules.Rule) -> None:
        """Raises `Mixed` if a row is to be cut out of an array that would have to be made whole."""
        todo = list(zip(eqn.invars, how.into, strict=True))
        while todo:
            atom, axis = todo.pop()
            if (
                axis is None
                or _jax.is_literal(atom)
                or atom in self.rows
                or atom not in self._makers
            ):
                continue
            maker = self._makers[atom]
            way = rules.without_rows(maker, axis)
            if way is None:
                raise rules.Mixed(f"a row of what {maker.primitive.name} makes whole is read")
            todo += zip(maker.invars, way.into, strict=True)

    def _refuse(self, leaves: Sequence[int], eqn: Any, reason: str) -> None:
        where = source_line(eqn)
        place = f"{eqn.primitive.name} at {where}" if where else eqn.primitive.name
        for leaf in leaves:
            self.refused.setdefault(leaf, f"{reason} ({place})")

    def _check(self, num_params: int, num_state: int, held: Mapping[int, set[int]]) -> None:
        for number, var in enumerate(self.jaxpr.outvars[:num_state]):
            own = None if _jax.is_literal(var) else self.rows.get(var)
            if own is None:
                for leaf, numbers in held.items():
                    if number in numbers:  # it is as it was, or something else
                        self.refused.setdefault(leaf, "the state it had is replaced")
                continue
            before = self.jaxpr.invars[num_params + number].aval
            if own.axis != 0 or (before.shape, before.dtype) != (var.aval.shape, var.aval.dtype):
                self.refused.setdefault(
                    own.leaf,
                    f"a leaf of its state changes from {before.str_short()} to "
                    f"{var.aval.str_short()}, rows along axis {own.axis}",
                )
            elif number not in held[own.leaf]:
                self.more.setdefault(own.leaf, set()).add(number)
        for leaf in range(num_params):
            var = self.jaxpr.outvars[num_state + leaf]
            own = None if _jax.is_literal(var) else self.rows.get(var)
            if leaf not in held:
                if own is not None:
                    reason = "the new value of another parameter is made of its rows"
                    self.refused.setdefault(own.leaf, reason)
                continue
            before = self.jaxpr.invars[self._replaced + leaf].aval
            if own != Rows(leaf, 0):
                self.refused.setdefault(leaf, "its new value does not follow from its gradient")
            elif (before.shape, before.dtype) != (var.aval.shape, var.aval.dtype):
                self.refused.setdefault(leaf, "its new value has another type")
