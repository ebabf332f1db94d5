"""One layer of a stack, taken apart for reverse mode.

A layer is a jaxpr from (consts, carry, x) to (carry, y).  `Layer` gives the
three things that every schedule is made of:

* `advance`: the layer as it stands;
* `tape`: the layer, and the values that its backward needs;
* `pullback`: cotangents through the layer, from such a tape.

What goes onto the tape is decided here.  A residual that is a parameter itself
(or any other input that stays available) is not kept but read again, and so is
one that follows from parameters by casts, transposes and the like: a stack of
bfloat16 copies of the weights would cost as much as the weights.
"""

import contextlib
import copy
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.solve.problem import Problem
from jaxmem.trace import casts, context

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Body:
    """The jaxpr of a layer with the roles of its flat inputs and outputs.

    It is of arrays on the device; a row of a stack on the host is moved there where it is used.
    """

    jaxpr: ClosedJaxpr
    num_consts: int
    num_carry: int

    @property
    def num_x(self) -> int:
        return len(self.jaxpr.in_avals) - self.num_consts - self.num_carry

    @property
    def num_y(self) -> int:
        return len(self.jaxpr.out_avals) - self.num_carry

    def split_in(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        a, b = self.num_consts, self.num_consts + self.num_carry
        return list(flat[:a]), list(flat[a:b]), list(flat[b:])

    def split_out(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return list(flat[: self.num_carry]), list(flat[self.num_carry :])

    def __call__(
        self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        flat = [*consts, *carry, *map(_jax.on_device, x)]
        return self.split_out(_jax.evaluate(self.jaxpr, flat))


@dataclasses.dataclass(frozen=True)
class Wrt:
    """What is differentiated: flags for the flat inputs and outputs of a layer."""

    ins: tuple[bool, ...]
    outs: tuple[bool, ...]


class NoReverseMode(ValueError):
    """jax cannot differentiate something in reverse mode; the message is jax's own."""


class Layer:
    """A `Body`, taken apart for the derivative with respect to some of its inputs.

    Attributes:
      body, wrt: what it was made of.
      linearised: the jaxpr from the layer's inputs to its outputs and all residuals.
      values: its variables, inputs first, then what its operations make, in their order; a
        layer policy that keeps single values knows them by their place here.
      places: of each of these.
      kept: places in `values` of what the tape holds; None for what it holds in vain.
      recomputes: whether anything but what is cheap is recomputed from the tape.
      on_host: how many values of the tape, its last ones, are stored on the host.
      row_by_row: whether casts of stacked inputs are to be made of the layer's own row.
      taped: (consts, carry, x) -> `tape` with the y, under a jit.

    Raises:
      NoReverseMode: jax cannot linearise it, and has forward mode at most: a rule that
        computes values and tangents in one `lax.while_loop`, a callback.
    """

    def __init__(self, body: Body, wrt: Wrt) -> None:
        self.body = body = dataclasses.replace(body, jaxpr=casts.opened(body.jaxpr))
        self.wrt = wrt
        self.wrt_consts, self.wrt_carry, self.wrt_x = body.split_in(wrt.ins)
        self._trace()
        self.values = _values(self.linearised)
        self.places = {var: place for place, var in enumerate(self.values)}
        on_tape = (self.residuals[index] for index in _on_tape(self))
        self.kept: tuple[int | None, ...] = tuple(self.places[atom] for atom in on_tape)
        self.recomputes = False
        self.on_host = 0
        self.row_by_row = False
        self._tape_jitted()

    def casting_rows(self) -> "Layer":
        """The same layer, for a compiler that would cast all rows of a stacked input in advance.

        For TPUs, XLA makes of a cast of the row that a loop reads a copy of the whole array in the
        narrower type, ahead of the loop: half of the parameters' size again.  It does not look
        through a rounding to that type, after which the cast changes nothing.
        """
        other = copy.copy(self)
        other.row_by_row = True
        other._tape_jitted()
        return other

    def keeping(self, kept: Sequence[int], offload: Sequence[int] = ()) -> "Layer":
        """The same layer with another tape; what the backward needs beyond is recomputed.

        Args:
          kept: places in `values`.
          offload: of others, whose values go to the host where they are stored.

        Raises:
          ValueError: there is no such place, or what is kept is not enough.
        """
        if beyond := [place for place in (*kept, *offload) if place >= len(self.values)]:
            raise ValueError(
                f"bad plan: it keeps value {beyond[0]} of a layer that has {len(self.values)}; fit "
                "the step anew"
            )
        other = copy.copy(self)
        other.kept = (*kept, *offload)
        other.on_host = len(offload)
        other.recomputes = True
        if not other._suffices():
            raise ValueError(
                f"bad plan: from the values {list(other.kept)} of a layer, which it keeps, not all "
                "that the backward pass reads can be computed; fit the step anew"
            )
        other._tape_jitted()
        return other

    @property
    def residuals(self) -> Sequence[Any]:
        """What the backward reads: variables of `linearised`, or literals."""
        return self.linearised.jaxpr.outvars[self.body.num_carry + self.body.num_y :]

    @property
    def results(self) -> Sequence[Any]:
        """What it gives, carry and y: variables of `linearised`, or literals."""
        return self.linearised.jaxpr.outvars[: self.body.num_carry + self.body.num_y]

    @functools.cached_property
    def digest(self) -> str:
        """What tells this layer from others: types, operations, roles, what is differentiated."""
        roles = self.body.num_consts, self.body.num_carry
        return _jax.digest(self.linearised, f"{roles} {self.wrt}")

    @functools.cached_property
    def transposed(self) -> ClosedJaxpr:
        """(residuals, cotangents of the results) -> cotangents, of what is differentiated.

        Raises:
          NoReverseMode: jax can linearise the layer but not transpose it.
        """
        count = len(self.residuals)
        results = zip(self.body.jaxpr.out_avals, self.wrt.outs, strict=True)

        def run(*flat: Any) -> list[Any]:
            return jax.tree.leaves(jax.tree.unflatten(self._tree, flat[:count])([*flat[count:]]))

        cotangents = [aval.to_tangent_aval() for aval, wrt in results if wrt]
        residuals = [atom.aval for atom in self.residuals]
        with _in_reverse_mode():
            return _jax.inlined(_jax.trace(run, [*residuals, *cotangents]))

    @property
    def both_ways(self) -> ClosedJaxpr:
        """The forward and the backward pass, nothing kept or recomputed, for looking at.

        From the inputs, and cotangents of the results, to cotangents of what is differentiated.
        """
        forward = self.linearised
        everything = range(len(forward.jaxpr.eqns))
        return _jax.followed_by(
            forward, everything, self.transposed, self.residuals, forward.jaxpr.invars
        )

    @functools.cached_property
    def has_reverse_mode(self) -> bool:
        """Whether jax can transpose it: it cannot where a `lax.while_loop` is differentiated."""
        try:
            return bool(self.transposed)
        except NoReverseMode:
            return False

    def problem(self, length: int) -> Problem:
        """The sizes of a stack of such layers."""
        _, carry, x = self.body.split_in([var.aval for var in self.linearised.jaxpr.invars])
        tape = [self.values[place] for place in self.kept if place is not None]
        return Problem(
            length=length,
            carry_bytes=sum(map(nbytes, carry)),
            residual_bytes=sum(nbytes(var.aval) for var in tape),
            param_bytes=sum(map(nbytes, x)),
            alone_bytes=sum(nbytes(var.aval) for var in tape if self.is_stored(var)),
        )

    def made_by(self, var: Any) -> Any:
        """The equation that makes a value; None for an input."""
        return self._makers.get(var)

    def is_stored(self, var: Any) -> bool:
        """Whether a value is in memory even if it is used at once: no input, and not fused."""
        made_by = self.made_by(var)
        return made_by is not None and made_by.primitive.name not in FUSED

    def narrowed(self, outs: Sequence[bool], stored: bool = False) -> "Layer | None":
        """The same layer, for a backward pass that has cotangents of these results only.

        Args:
          outs: flags for the results.
          stored: whether it has to do with tapes that this layer made.

        Returns:
          None if what is on the tape does not give what that backward reads.
        """
        other = Layer(self.body, Wrt(self.wrt.ins, tuple(outs)))
        other.row_by_row = self.row_by_row
        if not (stored or self.recomputes):
            return other
        numbers: dict[Any, int] = {}
        own, others = (_numbered(layer.linearised, numbers) for layer in (self, other))
        places = {others[var]: place for place, var in enumerate(other.values) if var in others}
        found = [None if p is None else places.get(own[self.values[p]]) for p in self.kept]
        other.recomputes, other.on_host = True, self.on_host
        other.kept = tuple(p for p in found if stored or p is not None)
        return other if other._suffices() else None

    # ------------------------------------------------------------ the three things

    def advance(
        self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """(carry, y) of the layer."""
        if not self.row_by_row:
            return self.body(consts, carry, x)
        flat = [*consts, *carry, *map(_jax.on_device, x)]
        return self.body.split_out(_jax.evaluate(self._inlined, flat, self._cast))

    def step(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> list[Any]:
        """The next carry alone."""
        jaxpr = self._inlined if self.row_by_row else self.body.jaxpr
        only = _jax.needed(jaxpr, jaxpr.jaxpr.outvars[: self.body.num_carry], keep_effects=True)
        flat = [*consts, *carry, *map(_jax.on_device, x)]
        outs = _jax.evaluate(jaxpr, flat, self._cast, only=only)
        return outs[: self.body.num_carry]

    def tape(
        self,
        consts: Sequence[Any],
        carry: Sequence[Any],
        x: Sequence[Any],
        with_y: bool = False,
        own_arrays: bool = False,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """(next carry, y if asked for, tape).

        Args:
          own_arrays: whether no loop is around the layer, see `jaxmem._jax.loops`.
        """
        outvars = self.linearised.jaxpr.outvars
        num_carry, num_y = self.body.num_carry, self.body.num_y if with_y else 0
        wanted = [
            *outvars[: num_carry + num_y],
            *(self.values[place] for place in self.kept if place is not None),
        ]
        only = _jax.needed(self.linearised, wanted, keep_effects=True)
        flat = [*consts, *carry, *map(_jax.on_device, x)]
        special = _jax.with_own_arrays(self.linearised) if own_arrays else self._cast
        found = _jax.evaluate(self.linearised, flat, special, only=only, outs=wanted)
        return found[:num_carry], found[num_carry:][:num_y], found[num_carry + num_y :]

    def to_store(self, tape: Sequence[Any]) -> list[Any]:
        """A tape, those of its values on the host that belong there."""
        here = len(tape) - self.on_host
        return [*tape[:here], *(jax.device_put(v, jax.memory.Space.Host) for v in tape[here:])]

    def from_store(self, tape: Sequence[Any]) -> list[Any]:
        """A tape that was stored, all of it on the device."""
        here = len(tape) - self.on_host
        return [*tape[:here], *(jax.device_put(v, jax.memory.Space.Device) for v in tape[here:])]

    def pullback(
        self,
        consts: Sequence[Any],
        x: Sequence[Any],
        tape: Sequence[Any],
        ct_carry: Sequence[Any],
        ct_y: Sequence[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Cotangents of (consts, carry, x), of those that are differentiated.

        Args:
          consts, x: the layer's inputs that stay available.
          tape: what `tape` returned.
          ct_carry: cotangents of the differentiated carries.
          ct_y: cotangents of the differentiated ys.
        """
        pairs = zip(self.kept, tape, strict=True)
        given = {self.values[place]: value for place, value in pairs if place is not None}
        only = _jax.needed(self.linearised, self.residuals, keep_effects=False, given=given)
        inputs = [*consts, *[None] * self.body.num_carry, *map(_jax.on_device, x)]
        with jax.named_scope(_jax.RECOMPUTED) if self.recomputes else contextlib.nullcontext():
            residuals = _jax.evaluate(
                self.linearised, inputs, self._cast, only=only, given=given, outs=self.residuals
            )
        return self.by_role(jax.tree.unflatten(self._tree, residuals)([*ct_carry, *ct_y]))

    def by_role(self, cotangents: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Cotangents of the differentiated inputs as those of (consts, carry, x)."""
        cts = iter(cotangents)
        flat = [next(cts) if wrt else None for wrt in self.wrt.ins]
        return tuple([ct for ct in part if ct is not None] for part in self.body.split_in(flat))  # pyright: ignore[reportReturnType]

    @functools.cached_property
    def has_loops(self) -> bool:
        """Whether scans are among its operations."""
        return any(map(_jax.is_scan, (*self.linearised.jaxpr.eqns, *self.transposed.jaxpr.eqns)))

    # ------------------------------------------------------------ implementation

    @functools.cached_property
    def _inlined(self) -> ClosedJaxpr:
        return _jax.inlined(self.body.jaxpr)

    @functools.cached_property
    def _rows(self) -> set[Any]:
        """What is a row of a stacked input, or the same numbers in another shape."""
        found: set[Any] = set()
        for closed in (self._inlined, self.linearised):
            found.update(self.body.split_in(closed.jaxpr.invars)[2])
            for eqn in closed.jaxpr.eqns:
                source = eqn.invars[0] if eqn.primitive.name in _RESHAPING else None
                if _jax.is_var(source) and source in found:
                    found.update(eqn.outvars)
        return found

    def only_cast(self) -> set[Any]:
        """Inputs of `linearised` that are stacked, and read by casts to narrower types alone.

        In a loop of `casting_rows` no copy of the whole stack is made of these.
        """
        jaxpr = self.linearised.jaxpr
        of_row = {row: row for row in self.body.split_in(jaxpr.invars)[2]}
        others = {
            of_row.get(atom) for atom in (*self.residuals, *jaxpr.outvars) if _jax.is_var(atom)
        }
        for eqn in jaxpr.eqns:
            rows = [of_row[atom] for atom in eqn.invars if _jax.is_var(atom) and atom in of_row]
            if eqn.primitive.name in _RESHAPING:
                of_row.update((var, row) for row in rows for var in eqn.outvars)
            elif not (eqn.primitive.name == "convert_element_type" and narrows(eqn)):
                others.update(rows)
        return set(of_row.values()) - others

    def _cast(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        """For `evaluate`: see `casting_rows`."""
        if not (self.row_by_row and eqn.primitive.name == "convert_element_type"):
            return None
        (var,), (row,) = eqn.invars, operands
        return rounded_cast(eqn, row) if _jax.is_var(var) and var in self._rows else None

    def _suffices(self) -> bool:
        """Whether all that the backward reads follows from the tape, with no carry at hand."""
        jaxpr = self.linearised.jaxpr
        given = {self.values[place] for place in self.kept if place is not None}
        only = _jax.needed(self.linearised, self.residuals, keep_effects=False, given=given)
        read = {a for i in only for a in jaxpr.eqns[i].invars if _jax.is_var(a)}
        read.update(atom for atom in self.residuals if _jax.is_var(atom))
        _, carry, _ = self.body.split_in(jaxpr.invars)
        return not any(c in read and c not in given for c in carry)

    def _trace(self) -> None:
        body, wrt, tree = self.body, self.wrt, None

        def with_residuals(*flat: Any) -> list[Any]:
            nonlocal tree

            def primal(*diff: Any) -> tuple[list[Any], list[Any]]:
                given = iter(diff)
                full = [next(given) if d else f for d, f in zip(wrt.ins, flat, strict=True)]
                outs = _jax.evaluate(body.jaxpr, full)
                return [out for out, d in zip(outs, wrt.outs, strict=True) if d], outs

            diff = [f for f, d in zip(flat, wrt.ins, strict=True) if d]
            _, vjp, outs = jax.vjp(primal, *diff, has_aux=True)
            leaves, tree = jax.tree.flatten(vjp)
            return [*outs, *leaves]

        # jnp.where, jnp.tril and many others are jitted: looked into, as what is cheap
        # in them need not be kept either.  Only now that it is differentiated: cotangents
        # are added up in another order where there was no jit.
        with context.inside_layer(), _in_reverse_mode():
            traced = _jax.trace(with_residuals, body.jaxpr.in_avals)
        # What is done several times to the same (each of three products casts what it reads) is one
        # value to compilers, and is kept once; its cotangents are still several, as in the code.
        self.linearised = traced = _jax.with_equal_once(_jax.inlined(traced))
        self._tree = tree
        self._makers = {var: eqn for eqn in traced.jaxpr.eqns for var in eqn.outvars}

    def _tape_jitted(self) -> None:
        # For schedules that tape a layer in several places: traced and lowered once, and
        # gone again before anything is optimised.
        self.taped = jax.jit(functools.partial(self.tape, with_y=True))


# ---------------------------------------------------------------- implementation


@contextlib.contextmanager
def _in_reverse_mode() -> Iterator[None]:
    # The jaxpr of the layer is there already: what is raised here comes from rules of derivatives.
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise NoReverseMode(str(error)) from error


def rounded_cast(eqn: Any, row: Any) -> list[Any] | None:
    """The cast of a row to a narrower type, behind a rounding to it; None for any other cast.

    Why: see `Layer.casting_rows`.
    """
    if not narrows(eqn):
        return None
    info = jnp.finfo(eqn.params["new_dtype"])
    return _jax.bound(eqn, jax.lax.reduce_precision(row, info.nexp, info.nmant))


def narrows(cast: Any) -> bool:
    """Whether a cast is from a floating type to one of fewer bits."""
    old, new = cast.invars[0].aval.dtype, cast.params["new_dtype"]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new)):
        return False
    return jnp.finfo(new).bits < jnp.finfo(old).bits


def nbytes(aval: Any) -> int:
    """Bytes of an abstract array, 0 for what is none (a token).

    A dimension that is a symbol, under jax.export, counts as 1.
    """
    if not hasattr(aval, "shape"):
        return 0
    count = math.prod(aval.shape)
    if not isinstance(count, int):
        count = math.prod(d for d in aval.shape if isinstance(d, int))
    return count * aval.dtype.itemsize


# Operations that compilers fuse into what reads them; and those that are cheaper to
# recompute than to store the result of, when all they work on is parameters: no product,
# no random bits.
FUSED = frozenset(
    name
    for names in (
        "abs add and ceil clamp div eq floor ge gt integer_pow le lt max min mul ne neg not or",
        "rem round rsqrt select_n sign sqrt square sub xor real imag is_finite",
        "one_minus_square polynomial reciprocal",
        "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erfc exp exp2 expm1 log log1p",
        "log2 logistic pow sin sinh tan tanh",
        "broadcast_in_dim concatenate convert_element_type copy dynamic_slice expand_dims iota pad",
        "reduce_precision reshape rev slice squeeze transpose",
        "pvary pcast random_unwrap random_wrap sharding_constraint stop_gradient",
    )
    for name in names.split()
)
_RESHAPING = frozenset({"reshape", "squeeze", "transpose", "slice", "broadcast_in_dim"})
_CHEAP = FUSED | {"reduce_max", "reduce_min", "reduce_sum"}


def free_values(layer: Layer) -> set[Any]:
    """The values that are there in the backward pass anyway, or follow cheaply from such."""
    jaxpr = layer.linearised.jaxpr
    consts, _, x = layer.body.split_in(jaxpr.invars)
    return cheap_values(jaxpr, [*jaxpr.constvars, *consts, *x])


def cheap_values(jaxpr: Any, given: Sequence[Any]) -> set[Any]:
    """What follows by casts, transposes and the like from what is given, and that itself."""
    free = set(given)
    for eqn in jaxpr.eqns:
        inputs = [atom for atom in eqn.invars if not _jax.is_literal(atom)]
        if eqn.primitive.name in _CHEAP and all(atom in free for atom in inputs):
            free.update(eqn.outvars)
    return free


def _on_tape(layer: Layer) -> list[int]:
    """Which residuals to store: each value once, none that inputs give cheaply."""
    free, kept = free_values(layer), []
    for index, atom in enumerate(layer.residuals):
        if _jax.is_var(atom) and atom not in free:
            free.add(atom)
            kept.append(index)
    return kept


def _numbered(closed: ClosedJaxpr, numbers: dict[Any, int]) -> dict[Any, int]:
    """A number for each value: equal, in two jaxprs, for values that are made in the same way.

    What is made in the same way several times has several numbers, in the order of making.
    """
    jaxpr = closed.jaxpr
    found: dict[Any, int] = {}
    made: Counter[Any] = Counter()

    def number(key: Any) -> int:
        made[key] += 1
        key = key, made[key]
        return numbers.setdefault(key, len(numbers))

    for place, var in enumerate(jaxpr.invars):
        found[var] = number(place)
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        found[var] = number(id(const))
    for eqn in jaxpr.eqns:
        ins = tuple(repr(a) if _jax.is_literal(a) else found[a] for a in eqn.invars)
        params = tuple((key, str(value)) for key, value in sorted(eqn.params.items()))
        for place, var in enumerate(eqn.outvars):
            found[var] = number((eqn.primitive.name, ins, params, place))
    return found


def _values(closed: ClosedJaxpr) -> list[Any]:
    made = (var for eqn in closed.jaxpr.eqns for var in eqn.outvars)
    return [*closed.jaxpr.constvars, *closed.jaxpr.invars, *made]


def differentiated(
    body: Body, consts: Sequence[bool], carry: Sequence[bool], x: Sequence[bool]
) -> Wrt:
    """Which inputs and outputs of a layer take part, given which inputs of the stack do.

    A carry takes part when any layer makes it depend on something that does: a
    fixpoint over the layers.
    """
    carry = list(carry)
    while True:
        ins = [*consts, *carry, *x]
        outs = _reached(body.jaxpr, ins)
        carry_out, _ = body.split_out(outs)
        grown = [a or b for a, b in zip(carry, carry_out, strict=True)]
        if grown == carry or all(outs):  # more inputs would reach no less
            # A carry that takes part must do so on both sides.
            return Wrt((*consts, *grown, *x), (*grown, *outs[body.num_carry :]))
        carry = grown


def _reached(closed: ClosedJaxpr, ins: Sequence[bool]) -> list[bool]:
    """Which results have a tangent that is not known to be zero, as behind a `stop_gradient`."""
    found = _certainly_reached(closed.jaxpr, ins)
    could_be = list(map(_jax.has_tangent, closed.out_avals))
    if found == could_be or not any(ins):
        return found
    outs = jax.custom_jvp(lambda *values: list(values))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found[:] = (not isinstance(tangent, SymbolicZero) for tangent in tangents)
        return list(primals), list(tangents)

    outs.defjvp(rule, symbolic_zeros=True)

    def run(*args: Any) -> Any:
        def active(*diff: Any) -> list[Any]:
            given = iter(diff)
            full = [next(given) if flag else arg for flag, arg in zip(ins, args, strict=True)]
            return outs(*_jax.evaluate(closed, full))

        diff = [arg for flag, arg in zip(ins, args, strict=True) if flag]
        return jax.jvp(active, diff, list(map(_jax.zeros_like, diff)))

    with context.inside_layer():
        _jax.trace(run, closed.in_avals)
    return found


# Operations whose results have a tangent where one of their operands has one.
# fmt: off
_PASSING_ON = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "conv_general_dilated",
    "convert_element_type", "cos", "div", "dot_general", "exp", "log", "mul", "name", "neg",
    "reduce_sum", "reshape", "sin", "slice", "squeeze", "sub", "tanh", "transpose",
})
# fmt: on


def _certainly_reached(jaxpr: Any, ins: Sequence[bool]) -> list[bool]:
    """Of the results, those reached through such operations alone: for these nothing is traced."""
    reached = {var for var, flag in zip(jaxpr.invars, ins, strict=True) if flag}
    for eqn in jaxpr.eqns:
        passes_on = eqn.primitive.name in _PASSING_ON
        if passes_on and any(_jax.is_var(atom) and atom in reached for atom in eqn.invars):
            reached.update(var for var in eqn.outvars if _jax.has_tangent(var.aval))
    return [_jax.is_var(atom) and atom in reached for atom in jaxpr.outvars]
