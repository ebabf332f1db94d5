"""How often a `while` loop runs, where that can be seen in the jaxpr.

`lax.fori_loop` with bounds that are not Python numbers becomes a `while` whose
bounds are values.  Often these follow from constants by arithmetic on integers:
the counter of an outer loop, a row of a table.  Such values are followed here:
a `Known` holds one for each run of the code that makes it, along axis 0 (or a
single row where all runs see the same).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from jaxmem import _jax

# ---------------------------------------------------------------- types

Known = np.ndarray | None  # (runs or 1, *shape), integers or booleans

# What is larger than this is not followed.
_MOST = 1 << 20

# ---------------------------------------------------------------- API


def constant(value: Any) -> Known:
    """A constant of a jaxpr as a known value, if it is integers and small."""
    if isinstance(value, (bool, int)):
        return np.asarray([int(value)])
    if isinstance(value, Tracer) or getattr(value, "dtype", None) is None:
        return None
    if getattr(value.dtype, "kind", "") not in ("i", "u", "b") or math.prod(value.shape) > _MOST:
        return None
    if not getattr(value, "is_fully_addressable", True):
        return None
    return np.asarray(value)[None]


def follow(eqn: Any, operands: Sequence[Known]) -> Known:
    """The single result of an equation on known operands; None where it cannot be told."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or any(operand is None for operand in operands):
        return None
    out = eqn.outvars[0].aval
    if out.dtype.kind not in "iub" or math.prod(out.shape) > _MOST:
        return None
    runs = max((len(operand) for operand in operands if operand is not None), default=1)
    if runs * math.prod(out.shape) > _MOST:
        return None
    found = rule(eqn, *operands)
    return None if found is None else np.asarray(found).astype(out.dtype)


def repeated(value: Known, trips: np.ndarray | int, runs: int) -> Known:
    """A value from outside of a loop, as its body sees it.

    Args:
      value: known for each run of the loop.
      trips: of each of these runs, (runs or 1,), or one number.
      runs: how often the loop runs.
    """
    if value is None or len(value) == 1:
        return value
    counts = np.broadcast_to(trips, (runs,))
    return None if counts.sum() * value[0].size > _MOST else np.repeat(value, counts, axis=0)


def counted(start: Known, step: int, trips: np.ndarray | int, runs: int) -> Known:
    """A loop's counter, as its body sees it: start, start + step, … in each run."""
    if start is None:
        return None
    if step == 0:
        return repeated(start, trips, runs)
    counts = np.broadcast_to(trips, (runs,))
    total = int(counts.sum())
    if total > _MOST:
        return None
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(np.broadcast_to(start, (runs,)), counts)
    return starts + step * (np.arange(total) - begins)


def rows(value: Known, runs: int, reverse: bool) -> Known:
    """A stacked input of a `scan`, known outside of it, as its body sees it: row by row."""
    if value is None or runs * value[0].size > _MOST:
        return None
    value = value[:, ::-1] if reverse else value
    value = np.broadcast_to(value, (runs, *value.shape[1:]))
    return value.reshape(-1, *value.shape[2:])


def step_of(body: Any, position: int, out: Any, known: Callable[[Any], Known]) -> int | None:
    """By how much a loop's scalar carry changes in each iteration, if always by the same.

    Args:
      body: the jaxpr of an iteration.
      position: of the carry among its inputs.
      out: the atom that becomes the carry of the next iteration.
      known: the value of an atom at the beginning of an iteration.
    """
    carry = body.invars[position]
    if out is carry:
        return 0
    for eqn in body.eqns:
        if out in eqn.outvars:
            name = eqn.primitive.name
            if name not in ("add", "sub") or len(eqn.invars) != 2:
                return None
            left, right = eqn.invars
            if name == "add" and right is carry:
                left, right = right, left
            amount = known(right)
            if left is not carry or amount is None or amount.size != 1:
                return None
            return int(amount.item()) * (1 if name == "add" else -1)
    return None


def while_trips(
    eqn: Any, operands: Sequence[Known]
) -> tuple[np.ndarray | None, dict[int, int | None]]:
    """How often a `while` equation's body runs, for each run of the equation (or for all alike).

    Returns:
      The trips, (runs or 1,), None if they cannot be told; and the step of each
      carry that is an integer, by its position among the carries.
    """
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    init = operands[num_cond + num_body :]
    body_known = _reader(body, [*operands[num_cond : num_cond + num_body], *[None] * len(init)])
    steps = {
        k: step_of(body.jaxpr, num_body + k, body.jaxpr.outvars[k], body_known)
        for k, start in enumerate(init)
        if start is not None and start.ndim == 1
    }
    cond_known = _reader(cond, operands[:num_cond])
    position = {var: k - num_cond for k, var in enumerate(cond.jaxpr.invars)}

    def side(atom: Any) -> tuple[Known, int | None]:
        """The value at the first test, and its step."""
        k = -1 if _jax.is_literal(atom) else position.get(atom, -1)
        return (init[k], steps.get(k)) if k >= 0 else (cond_known(atom), 0)

    test = cond.jaxpr.eqns[0] if len(cond.jaxpr.eqns) == 1 else None
    if test is None or test.primitive.name not in _TESTS:
        return None, steps
    (left, left_step), (right, right_step) = (side(atom) for atom in test.invars)
    if left is None or right is None or left_step is None or right_step is None:
        return None, steps
    if left.ndim != 1 or right.ndim != 1:
        return None, steps
    return _count(test.primitive.name, left, left_step, right, right_step), steps


# ---------------------------------------------------------------- implementation

_TESTS = ("lt", "le", "gt", "ge")


def _count(
    name: str, left: np.ndarray, left_step: int, right: np.ndarray, right_step: int
) -> np.ndarray | None:
    if name in ("gt", "ge"):
        left, left_step, right, right_step = right, right_step, left, left_step
    closing = left_step - right_step  # by how much the gap shrinks in each iteration
    if closing <= 0:
        return None
    gap = right.astype(np.int64) - left.astype(np.int64)
    if name in ("le", "ge"):
        gap = gap + 1
    return np.maximum(-(-gap // closing), 0)


def _reader(closed: Any, values: Sequence[Known]) -> Callable[[Any], Known]:
    """How to look up the inputs of a jaxpr, of which the first may be known."""
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.invars[: len(values)], values, strict=True))
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        known[var] = constant(const)
    return lambda atom: constant(atom.val) if _jax.is_literal(atom) else known.get(atom)


def _same(eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    return x


def _elementwise(fn: Callable[..., Any]) -> Callable[..., Any]:
    def rule(eqn: Any, *operands: np.ndarray) -> np.ndarray:
        rank = len(eqn.outvars[0].aval.shape)
        # A literal may be a scalar among arrays.
        wide = [x.reshape(len(x), *[1] * (rank + 1 - x.ndim), *x.shape[1:]) for x in operands]
        return fn(*wide)

    return rule


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(np.int64), np.broadcast_arrays(*cases))


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    if not np.all(y):
        return None
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))  # towards zero


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    return np.fmod(x, y) if np.all(y) else None


def _reshape(eqn: Any, x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), *eqn.outvars[0].aval.shape)


def _broadcast(eqn: Any, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(eqn.params["shape"])
    for d, size in zip(eqn.params["broadcast_dimensions"], x.shape[1:], strict=True):
        shape[d] = size
    return np.broadcast_to(x.reshape(len(x), *shape), (len(x), *eqn.params["shape"]))


def _iota(eqn: Any) -> np.ndarray:
    shape, d = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    along = np.arange(shape[d]).reshape([-1 if k == d else 1 for k in range(len(shape))])
    return np.broadcast_to(along, shape)[None]


def _slice(eqn: Any, x: np.ndarray) -> np.ndarray:
    params = eqn.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    cuts = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[(slice(None), *(slice(int(a), int(b), int(c)) for a, b, c in cuts))]


def _dynamic_slice(eqn: Any, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    runs = max(len(x), *(len(start) for start in starts))
    sizes = eqn.params["slice_sizes"]
    rows = np.broadcast_to(x, (runs, *x.shape[1:]))
    index = [np.arange(runs).reshape(-1, *[1] * len(sizes))]
    for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        # Starts are moved inside, as jax does.
        begin = np.clip(np.broadcast_to(start, (runs,)), 0, x.shape[d + 1] - size)
        along = np.arange(size).reshape([-1 if k == d else 1 for k in range(len(sizes))])
        index.append(begin.reshape(index[0].shape) + along)
    return rows[tuple(index)]


_RULES: dict[str, Callable[..., Any]] = {
    name: _elementwise(fn)
    for name, fn in {
        "abs": np.abs,
        "add": np.add,
        "and": np.bitwise_and,
        "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
        "div": _divide,
        "eq": np.equal,
        "ge": np.greater_equal,
        "gt": np.greater,
        "le": np.less_equal,
        "lt": np.less,
        "max": np.maximum,
        "min": np.minimum,
        "mul": np.multiply,
        "ne": np.not_equal,
        "neg": np.negative,
        "not": np.invert,
        "or": np.bitwise_or,
        "rem": _remainder,
        "select_n": _select,
        "sign": np.sign,
        "sub": np.subtract,
        "xor": np.bitwise_xor,
    }.items()
} | {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _same,
    "copy": _same,
    "copy_p": _same,
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "pvary": _same,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _reshape,
    "stop_gradient": _same,
}
