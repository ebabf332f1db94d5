"""Between which numbers the leaves of an optimizer's state stay, whatever the gradients are.

Second moments and the like are never negative, and a codec that knows that has one more bit for
them.  Which leaves these are is not told by their names but by what the optimizer computes: an
interval is found for each value from those of its operands, first of the state as `init` makes it,
then of what an update makes of that, until nothing grows any more.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax

Interval = tuple[float, float]

ANY: Interval = (-math.inf, math.inf)

# ---------------------------------------------------------------- API


def results(closed: ClosedJaxpr, given: Sequence[Interval]) -> list[Interval]:
    """Between which numbers the results of a program are.

    Args:
      given: the same of its operands.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, Interval] = dict(zip(jaxpr.invars, given, strict=True))
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        known[var] = _of_constant(const)

    def read(atom: Any) -> Interval:
        return _of_constant(atom.val) if _jax.is_literal(atom) else known.get(atom, ANY)

    related = _Related(read)
    for eqn in jaxpr.eqns:
        found = related.of(eqn) or _of_equation(eqn, [read(atom) for atom in eqn.invars])
        if any(map(math.isnan, found)):  # of two that are infinite
            found = ANY
        known.update((var, found) for var in eqn.outvars)
    return [read(atom) for atom in jaxpr.outvars]


def reads_operands(closed: ClosedJaxpr) -> list[bool]:
    """Of each result of a program, whether it follows from an operand."""
    made = set(closed.jaxpr.invars)
    for eqn in closed.jaxpr.eqns:
        if any(not _jax.is_literal(atom) and atom in made for atom in eqn.invars):
            made.update(eqn.outvars)
    return [not _jax.is_literal(atom) and atom in made for atom in closed.jaxpr.outvars]


def kept(init: ClosedJaxpr, update: ClosedJaxpr, num_params: int, num_state: int) -> list[Interval]:
    """Of each leaf of a state, between which numbers it is after any number of updates.

    Args:
      init: parameters -> the state's leaves.
      update: gradients, state, parameters and more -> the state's leaves and more.
    """
    held = results(init, [ANY] * num_params)
    rest = len(update.in_avals) - num_params - num_state
    while True:
        after = results(update, [*[ANY] * num_params, *held, *[ANY] * rest])[:num_state]
        grown = [_grown(old, new) for old, new in zip(held, after, strict=True)]
        if grown == held:
            return held
        held = grown


# ---------------------------------------------------------------- implementation


class _Related:
    """Results whose operands follow from one another, so that their intervals alone say too little.

    These are a · a and (k · a) · a; a + k · (b − a), which is between a and b; and, as in Yogi,
    v − k · sign(v − q) · q, which has the sign of v and q; k from 0 to 1.
    """

    def __init__(self, read: Callable[[Any], Interval]) -> None:
        self._read = read
        self._makers: dict[Any, tuple[str, Sequence[Any]]] = {}
        # The first variable with this value.
        self._first: dict[Any, Any] = {}
        self._made: dict[Any, Any] = {}

    def of(self, eqn: Any) -> Interval | None:
        """Between which numbers the result is, if it is one of these."""
        name, (out, *_) = eqn.primitive.name, eqn.outvars
        if name not in ("add", "sub", "mul", "sign", "square"):
            return None
        operands = [self._one(atom) for atom in eqn.invars]
        if name == "square":
            name, operands = "mul", operands * 2
        key = name, *(("literal", str(a)) if _jax.is_literal(a) else a for a in operands)
        self._first[out] = self._made.setdefault(key, out)
        self._makers[out] = name, operands
        if name == "mul":
            return self._product(out)
        if name == "add":
            return self._between(*operands) or self._between(*reversed(operands))
        return self._less(*operands) if name == "sub" else None

    def _product(self, out: Any) -> Interval | None:
        factors = self._factors(out)
        twice = [a for a in factors if not _jax.is_literal(a) and _count(factors, a) == 2]
        if not twice:
            return None
        rest = [a for a in factors if a is not twice[0]]
        return _mul(_square(self._read(twice[0])), self._times(rest))

    def _between(self, a: Any, product: Any) -> Interval | None:
        factors = self._factors(product)
        for difference in factors:
            b, less = self._operands("sub", difference) or (None, None)
            rest = [factor for factor in factors if factor is not difference]
            if less is a and len(rest) == len(factors) - 1 and _is_part(self._times(rest)):
                return _hull(self._read(a), self._read(b))
        return None

    def _less(self, v: Any, product: Any) -> Interval | None:
        for sign in self._factors(product):
            (difference,) = self._operands("sign", sign) or (None,)
            less, q = self._operands("sub", difference) or (None, None)
            factors = self._factors(product, q)
            rest = [factor for factor in factors if factor is not sign and factor is not q]
            if less is v and len(rest) == len(factors) - 2 and _is_part(self._times(rest)):
                low, high = _hull(self._read(v), self._read(q))
                return (0.0 if low >= 0 else -math.inf), (0.0 if high <= 0 else math.inf)
        return None

    def _one(self, atom: Any) -> Any:
        return atom if _jax.is_literal(atom) else self._first.get(atom, atom)

    def _operands(self, name: str, atom: Any) -> Sequence[Any] | None:
        """Those of the operation that made a value, if it has this name."""
        if atom is None or _jax.is_literal(atom):
            return None
        made, operands = self._makers.get(atom, ("", ()))
        return operands if made == name else None

    def _factors(self, product: Any, last: Any = None) -> list[Any]:
        """What a product is made of; `last` is not taken apart."""
        found, todo = [], [product]
        while todo and len(found) < _FACTORS:
            atom = todo.pop()
            operands = None if atom is last else self._operands("mul", atom)
            todo += operands or ()
            found += () if operands else (atom,)
        return [*found, *todo]

    def _times(self, factors: Sequence[Any]) -> Interval:
        return functools.reduce(_mul, map(self._read, factors), (1.0, 1.0))


# Of a product, so many factors are looked at one by one.
_FACTORS = 16


def _count(several: Sequence[Any], one: Any) -> int:
    return sum(each is one for each in several)


def _is_part(times: Interval) -> bool:
    return 0 <= times[0] <= times[1] <= 1


def _grown(old: Interval, new: Interval) -> Interval:
    """An interval that holds both; one that grows does so to 0 or without end, so that all ends."""
    low, high = old
    if not new[0] >= low:
        low = 0.0 if new[0] >= 0 else -math.inf
    if not new[1] <= high:
        high = 0.0 if new[1] <= 0 else math.inf
    return low, high


def _of_constant(value: Any) -> Interval:
    try:
        array = np.asarray(value)
        array = np.empty(0) if np.iscomplexobj(array) else array.astype(np.float64)
    except (TypeError, ValueError):  # a random key, an array that is being traced
        return ANY
    if not array.size or np.isnan(array).any():
        return ANY
    return float(array.min()), float(array.max())


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _mul(x: Interval, y: Interval) -> Interval:
    found = [_product(a, b) for a in x for b in y]
    return min(found), max(found)


def _div(x: Interval, y: Interval) -> Interval:
    if y[0] < 0:
        return ANY if y[1] > 0 else _neg(_div(x, _neg(y)))
    low = 0.0 if math.isinf(y[1]) else 1 / y[1] if y[1] else math.inf
    high = 1 / y[0] if y[0] else math.inf
    return _mul(x, (low, high))


def _neg(x: Interval) -> Interval:
    return -x[1], -x[0]


def _square(x: Interval) -> Interval:
    ends = x[0] * x[0], x[1] * x[1]
    return (0.0 if x[0] <= 0 <= x[1] else min(ends)), max(ends)


def _pow(x: Interval, y: Interval) -> Interval:
    if not x[0] >= 0:
        return ANY
    with np.errstate(all="ignore"):
        ends = [float(np.float64(a) ** b) for a in x for b in y]
    return min(ends), max(ends)


def _hull(*several: Interval) -> Interval:
    return min(low for low, _ in several), max(high for _, high in several)


def _of_equation(eqn: Any, ins: Sequence[Interval]) -> Interval:
    name = eqn.primitive.name
    if name == "integer_pow":
        power = float(eqn.params["y"])
        if power == 2:
            return _square(ins[0])
        return (0.0, math.inf) if power % 2 == 0 else _pow(ins[0], (power, power))
    if name == "reduce_sum":
        return (0.0 if ins[0][0] >= 0 else -math.inf), (0.0 if ins[0][1] <= 0 else math.inf)
    if name == "select_n":
        return _hull(*ins[1:])
    if name == "concatenate":
        return _hull(*ins)
    if name in _SAME:
        return ins[0]
    rule = _RULES.get(name)
    return ANY if rule is None else rule(*ins)


# Results that are made of the first operand's numbers.  A cast may round.
_SAME = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "device_put", "dynamic_slice",
    "expand_dims", "gather", "optimization_barrier", "reduce_max", "reduce_min", "reshape", "rev",
    "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose",
})  # fmt: skip

_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "add_any": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "square": _square,
    "abs": lambda x: (max(0.0, x[0], -x[1]), max(abs(x[0]), abs(x[1]))),
    "sqrt": lambda x: (math.sqrt(max(x[0], 0.0)), math.sqrt(max(x[1], 0.0))),
    "rsqrt": lambda x: (0.0, math.inf),
    "exp": lambda x: (0.0, math.inf),
    "logistic": lambda x: (0.0, 1.0),
    "tanh": lambda x: (-1.0, 1.0),
    "sign": lambda x: (-1.0 if x[0] < 0 else 0.0, 1.0 if x[1] > 0 else 0.0),
    "pow": _pow,
    "clamp": lambda low, x, high: (
        min(max(x[0], low[0]), high[0]),
        min(max(x[1], low[1]), high[1]),
    ),
    "pad": lambda x, y: _hull(x, y),
    "eq": lambda x, y: (0.0, 1.0),
}
