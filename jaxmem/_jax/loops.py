"""Scans outside of loops, whose arrays are made where the scan runs.

What a scan stacks is written into an array that jax makes of a constant, and a gradient that it
adds up begins as one.  XLA for GPUs, before jax 0.12, makes all that are of one type in one kernel,
in front of the first loop that wants one: those of all layers that are written out would be held
from there on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxmem._jax.evaluation import evaluate
from jaxmem._jax.jaxprs import is_literal, is_scan, is_var, scan_parts
from jaxmem._jax.types import (
    Aval,
    Eqn,
    as_varying,
    filled_with,
    is_key,
    split,
    stacked,
    varying,
    zeros_of,
)


def with_own_arrays(closed: ClosedJaxpr) -> Callable[[Eqn, list[Any]], list[Any] | None]:
    """For `evaluate`: scans of this jaxpr make the arrays that they fill, and nothing else does."""
    filled = {
        eqn.outvars[0]: eqn.invars[0].val
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim" and _is_number(eqn.invars[0])
    }

    def special(eqn: Eqn, operands: list[Any]) -> list[Any] | None:
        if not is_scan(eqn):
            return None
        values = [filled.get(atom) if is_var(atom) else None for atom in eqn.invars]
        return _scanned(eqn, operands, values)

    return special


def zeros_behind(tree: Any) -> tuple[Callable[[Any], Any], Any]:
    """(from a type, its zeros, made once the arrays of a tree are there; the tree)."""
    leaves, structure = jax.tree.flatten(tree)
    kind = varying(leaves[0]) if leaves else frozenset()
    tied = [at for at, leaf in enumerate(leaves) if varying(leaf) == kind]
    if not tied:
        return zeros_of, tree
    fenced, zero = _fenced([leaves[at] for at in tied], kind)
    for at, value in zip(tied, fenced, strict=True):
        leaves[at] = value

    return _zeros_from(zero, kind), jax.tree.unflatten(structure, leaves)


def zeros_after(value: Any) -> Callable[[Any], Any]:
    """From a type, its zeros, made once one number of an array, no whole one, can be known.

    The array itself need not be in memory for them, as it is behind a barrier.
    """
    # Of an array that is spread, what is looked at would be one device's.
    if not value.size or any(split(value)):
        return zeros_of
    first = lax.squeeze(lax.slice(value, [0] * value.ndim, [1] * value.ndim), range(value.ndim))
    first = lax.real(first) if np.iscomplexobj(first) else first
    # Never true, which XLA does not know: it simplifies neither comparison nor cast.
    return _zeros_from(lax.lt(first, np.array(-np.inf, first.dtype)), varying(value))


# ---------------------------------------------------------------- implementation


def _zeros_from(zero: Any, kind: frozenset[str]) -> Callable[[Aval], Any]:
    """From a type, its zeros, made of one that varies along these mesh axes."""

    def zeros(aval: Aval) -> Any:
        aval = aval.to_ct_aval()
        return filled_with(zero, aval) if kind <= varying(aval) else zeros_of(aval)

    return zeros


def _fenced(values: Sequence[Any], kind: frozenset[str]) -> tuple[list[Any], Any]:
    """(these, all of which vary along these mesh axes; zero, which is there only when they are)."""
    *fenced, zero = lax.optimization_barrier([*values, as_varying(jax.numpy.int32(0), kind)])
    return fenced, zero


def _is_number(atom: Any) -> bool:
    """Whether an atom is a number that a sum with zero leaves as it is, as it does not −0."""
    if not is_literal(atom) or np.iscomplexobj(atom.val):
        return False
    return not (np.equal(atom.val, 0) and np.signbit(atom.val))


def _scanned(eqn: Eqn, operands: Sequence[Any], values: Sequence[Any]) -> list[Any] | None:
    """The results of a scan.

    Args:
      values: of operands that are one number throughout, this; None for others.
    """
    scan = scan_parts(eqn)
    first_x = scan.num_consts + scan.num_carry
    rows = [stacked(aval, scan.length) for aval in scan.body.out_avals[scan.num_carry :]]
    carried = range(scan.num_consts, first_x)
    constant = [at for at in carried if values[at] is not None]
    given = [at for at in range(len(operands)) if at not in constant]
    if not (rows or constant) or not given or any(map(is_key, rows)):
        return None
    operands = list(operands)
    # A number that is there only when the loop may begin.
    kind = varying(operands[given[0]])
    tied = [at for at in given if varying(operands[at]) == kind]
    fenced, zero = _fenced([operands[at] for at in tied], kind)
    for at, value in zip(tied, fenced, strict=True):
        operands[at] = value
    for at in constant:
        aval = eqn.invars[at].aval
        operands[at] = filled_with(zero.astype(aval.dtype) + values[at], aval)
    consts, carry, xs = (
        operands[: scan.num_consts],
        operands[scan.num_consts : first_x],
        operands[first_x:],
    )

    def step(state: Any, x: Any) -> Any:
        done, carry, arrays = state
        outs = evaluate(scan.body, [*consts, *carry, *x])
        at = scan.length - 1 - done if scan.reverse else done
        arrays = [
            lax.dynamic_update_index_in_dim(array, row, at, 0)
            for array, row in zip(arrays, outs[scan.num_carry :], strict=True)
        ]
        return (done + 1, outs[: scan.num_carry], arrays), None

    start = jax.numpy.int32(0), carry, [filled_with(zero, aval) for aval in rows]
    (_, carry, arrays), _ = lax.scan(
        step, start, xs, length=scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    return [*carry, *arrays]
