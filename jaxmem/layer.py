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

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.problem import Problem

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Body:
    """The jaxpr of a layer with the roles of its flat inputs and outputs."""

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
        return self.split_out(_jax.evaluate(self.jaxpr, [*consts, *carry, *x]))


@dataclasses.dataclass(frozen=True)
class Wrt:
    """What is differentiated: flags for the flat inputs and outputs of a layer."""

    ins: tuple[bool, ...]
    outs: tuple[bool, ...]


class Layer:
    """A `Body`, taken apart for the derivative with respect to some of its inputs.

    Attributes:
      body, wrt: what it was made of.
      linearised: the jaxpr from the layer's inputs to its outputs and all residuals.
      taped: (consts, carry, x) -> `tape` with the y, under a jit.
    """

    def __init__(self, body: Body, wrt: Wrt) -> None:
        self.body = body
        self.wrt = wrt
        self.wrt_consts, self.wrt_carry, self.wrt_x = body.split_in(wrt.ins)
        self._trace()
        # For schedules that tape a layer in several places: traced and lowered once, and
        # gone again before anything is optimised.
        self.taped = jax.jit(functools.partial(self.tape, with_y=True))

    def problem(self, length: int) -> Problem:
        """The sizes of a stack of such layers."""
        _, carry, x = self.body.split_in(self.body.jaxpr.in_avals)
        return Problem(
            length=length,
            carry_bytes=sum(map(nbytes, carry)),
            tape_bytes=sum(nbytes(self._residuals[i].aval) for i in self._kept),
            param_bytes=sum(map(nbytes, x)),
            alone_bytes=sum(nbytes(self._residuals[i].aval) for i in self._kept if self._stored(i)),
        )

    def _stored(self, index: int) -> bool:
        """Whether a residual is in memory even if it is used at once: no input, and not fused."""
        for eqn in self.linearised.jaxpr.eqns:
            if self._residuals[index] in eqn.outvars:
                return eqn.primitive.name not in _FUSED
        return False

    # ------------------------------------------------------------ the three things

    def advance(
        self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """(carry, y) of the layer."""
        return self.body(consts, carry, x)

    def step(self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> list[Any]:
        """The next carry alone."""
        jaxpr = self.body.jaxpr
        only = _jax.needed(jaxpr, jaxpr.jaxpr.outvars[: self.body.num_carry], keep_effects=True)
        outs = _jax.evaluate(jaxpr, [*consts, *carry, *x], only=only)
        return outs[: self.body.num_carry]

    def tape(
        self, consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any], with_y: bool = False
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """(next carry, y if asked for, tape)."""
        outvars = self.linearised.jaxpr.outvars
        num_out = self.body.num_carry + (self.body.num_y if with_y else 0)
        wanted = outvars[:num_out] + [self._residuals[i] for i in self._kept]
        only = _jax.needed(self.linearised, wanted, keep_effects=True)
        outs = _jax.evaluate(self.linearised, [*consts, *carry, *x], only=only)
        residuals = outs[self.body.num_carry + self.body.num_y :]
        next_carry, y = self.body.split_out(outs[: self.body.num_carry + self.body.num_y])
        return next_carry, y if with_y else [], [residuals[i] for i in self._kept]

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
        on_tape = [self._residuals[i] for i in self._kept]
        rebuilt = [r for r in self._residuals if not any(r is kept for kept in on_tape)]
        only = _jax.needed(self.linearised, rebuilt, keep_effects=False)
        inputs = [*consts, *[None] * self.body.num_carry, *x]
        outs = _jax.evaluate(self.linearised, inputs, only=only)
        residuals = outs[self.body.num_carry + self.body.num_y :]
        for kept, value in zip(on_tape, tape, strict=True):
            for place, residual in enumerate(self._residuals):
                if residual is kept:
                    residuals[place] = value
        cts = iter(jax.tree.unflatten(self._tree, residuals)([*ct_carry, *ct_y]))
        flat = [next(cts) if wrt else None for wrt in self.wrt.ins]
        return tuple([ct for ct in part if ct is not None] for part in self.body.split_in(flat))  # pyright: ignore[reportReturnType]

    # ------------------------------------------------------------ implementation

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
        traced = _jax.trace(with_residuals, body.jaxpr.in_avals)
        if _jax.has_jit(traced):
            inlined = functools.partial(_jax.evaluate, traced, special=_jax.without_jit)
            traced = _jax.trace(lambda *flat: inlined(flat), body.jaxpr.in_avals)
        self.linearised = traced
        self._tree = tree
        self._residuals = self.linearised.jaxpr.outvars[body.num_carry + body.num_y :]
        self._kept = _on_tape(self.linearised, self._residuals, body)


# ---------------------------------------------------------------- implementation


def nbytes(aval: Any) -> int:
    """Bytes of an abstract array; a dimension that is a symbol, under jax.export, counts as 1."""
    return math.prod(d for d in aval.shape if isinstance(d, int)) * aval.dtype.itemsize


# Operations that compilers fuse into what reads them; and those that are cheaper to do
# again than to store the result of, when all they work on is parameters: no product,
# no random bits.
_FUSED = frozenset(
    name
    for names in (
        "abs add and ceil clamp div eq floor ge gt integer_pow le lt max min mul ne neg not or",
        "rem round rsqrt select_n sign sqrt square sub xor real imag is_finite",
        "cos cosh erf erfc exp exp2 expm1 log log1p logistic pow sin sinh tan tanh",
        "broadcast_in_dim concatenate convert_element_type copy dynamic_slice expand_dims iota pad",
        "reduce_precision reshape rev slice squeeze transpose",
        "pvary pcast random_unwrap random_wrap sharding_constraint stop_gradient",
    )
    for name in names.split()
)
_CHEAP = _FUSED | {"reduce_max", "reduce_min", "reduce_sum"}


def _on_tape(closed: ClosedJaxpr, residuals: Sequence[Any], body: Body) -> list[int]:
    """Which residuals to store: each value once, none that inputs give cheaply."""
    jaxpr = closed.jaxpr
    consts, _, x = body.split_in(jaxpr.invars)
    free = {*jaxpr.constvars, *consts, *x}
    for eqn in jaxpr.eqns:
        inputs = [atom for atom in eqn.invars if not _jax.is_literal(atom)]
        if eqn.primitive.name in _CHEAP and all(atom in free for atom in inputs):
            free.update(eqn.outvars)
    kept = []
    for index, atom in enumerate(residuals):
        if not _jax.is_literal(atom) and atom not in free:
            free.add(atom)
            kept.append(index)
    return kept


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
        if grown == carry:
            # A carry that takes part must do so on both sides.
            return Wrt(tuple(ins), (*carry, *outs[body.num_carry :]))
        carry = grown


def _reached(closed: ClosedJaxpr, ins: Sequence[bool]) -> list[bool]:
    jaxpr = closed.jaxpr
    reached = {var for var, flag in zip(jaxpr.invars, ins, strict=True) if flag}
    for eqn in jaxpr.eqns:
        if any(not _jax.is_literal(atom) and atom in reached for atom in eqn.invars):
            reached.update(var for var in eqn.outvars if _jax.has_tangent(var.aval))
    return [not _jax.is_literal(atom) and atom in reached for atom in jaxpr.outvars]
