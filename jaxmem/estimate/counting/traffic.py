"""Bytes that operations move between memory and compute, if only the obvious is fused.

The model, for a roofline and no more:

* Elementwise operations, broadcasts and conversions are fused with one another.
  Such a chain costs what it reads from memory and, only where its result must be
  in memory, what it writes.
* A result must be in memory if a matrix product, convolution, sort, gather, scatter or
  factorisation takes it, if it enters or leaves a loop (once for each
  iteration), or if the program returns it.
* Those operations read their operands once and write their results once.
* Reductions are fused with the chain in front of them, and write their results.
* Slices, reshapes and transposes are views: who takes one reads its bytes.
* A gather reads what it picks; a scatter or an update in place moves what it changes.

Caches are not modelled: whatever is read twice by two operations counts twice.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxmem import _jax
from jaxmem.estimate.counting import flops
from jaxmem.estimate.counting.ops import Op, Value
from jaxmem.estimate.counting.primitives import APART, REDUCTIONS, VIEWS

Kind = Literal["kernel", "fused", "reduction", "view"]

# ---------------------------------------------------------------- API


def moved(ops: Sequence[Op]) -> int:
    """Bytes that all operations of a program move, each times how often it runs."""
    kinds = [_kind(op) for op in ops]
    written = _in_memory(ops, kinds)
    # What must be read for a value that is no array in memory, by the arrays that hold it.
    behind: dict[Value, dict[Value, int]] = {}
    total = 0
    for op, kind in zip(ops, kinds, strict=True):
        if kind == "edge":
            continue
        if kind == "kernel":
            size = _unit(op)
        elif kind == "view":
            size = 0
            for out, base in _bases(op):
                found = behind.get(base, {base: base.size})
                behind[out] = {source: min(read, out.size) for source, read in found.items()}
        else:
            taken = op.ins[1:2] if kind == "update" else op.ins
            needs: dict[Value, int] = {}
            for value in taken:
                for source, read in behind.get(value, {value: value.size}).items():
                    needs[source] = max(needs.get(source, 0), read)
            size = 0
            if kind == "update":
                size = sum(needs.values()) + op.ins[1].size
            elif kind == "reduction":
                size = sum(needs.values()) + sum(out.size for out in op.outs)
            else:
                for out in op.outs:
                    if out in written or len(needs) > _MOST_SOURCES:
                        size += sum(needs.values()) + out.size
                    else:
                        behind[out] = needs
        total += size * op.place.times * op.place.shards
    return total


# ---------------------------------------------------------------- implementation

# A chain with more inputs than this is cut.
_MOST_SOURCES = 64


def kind_of(eqn: Any) -> Kind:
    """What an operation is to a compiler that fuses: a kernel of its own, or part of another's.

    A call is what stands in it: `jax.nn.relu`, whose derivative is its own, is one that is fused.
    """
    name = eqn.primitive.name
    if (known := _KINDS.get(name)) is not None:
        return known if known != "view" or eqn.invars else "fused"
    if (called := _jax.in_call(eqn)) is not None:
        kinds: set[Kind] = {kind_of(inner) for inner in called.jaxpr.eqns}
        if kinds <= {"fused", "view"}:
            return "fused" if "fused" in kinds else "view"
        return kinds.pop() if len(kinds) == 1 else "kernel"
    return "view" if _jax.name_given_by(eqn) is not None else "kernel"


# Looked up most often of all that planning asks for.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(flops.OF_ELEMENTS - APART, "fused"),
    **dict.fromkeys(REDUCTIONS, "reduction"),
    **dict.fromkeys(VIEWS, "view"),
    **dict.fromkeys(flops.MATMULS, "kernel"),
    "dynamic_update_slice": "kernel",
}


def _kind(op: Op) -> str:
    """`kind_of` an operation, and what it does not tell apart: edges, and updates in place."""
    if op.eqn is None:
        return "edge"
    return "update" if op.eqn.primitive.name == "dynamic_update_slice" else kind_of(op.eqn)


def _bases(op: Op) -> Iterator[tuple[Value, Value]]:
    """What each result of a view looks at."""
    several = len(op.ins) == len(op.outs)  # a barrier around several values
    for k, out in enumerate(op.outs):
        yield out, op.ins[k if several else 0]


def _in_memory(ops: Sequence[Op], kinds: Sequence[str]) -> set[Value]:
    """Results of chains that must be in memory, because of who takes them."""
    base: dict[Value, Value] = {}
    written: set[Value] = set()
    for op, kind in zip(ops, kinds, strict=True):
        if kind == "view":
            base.update(_bases(op))
        elif kind in ("kernel", "edge", "update"):
            # An update's operand is the array that it changes.
            for value in op.ins[:1] if kind == "update" else op.ins:
                while value in base:
                    value = base[value]
                written.add(value)
    return written


def _unit(op: Op) -> int:
    name = op.eqn.primitive.name
    if name == "pallas_call" and (estimate := op.eqn.params.get("cost_estimate")):
        return estimate.bytes_accessed
    written = sum(out.size for out in op.outs)
    if name == "gather":
        return op.ins[1].size + 2 * written
    if name.startswith("scatter"):
        return op.ins[1].size + op.ins[2].size * (2 if name == "scatter" else 3)
    if name in ("swap", "addupdate"):  # the first operand is a reference
        return op.ins[1].size * (1 if name == "swap" else 3)
    return sum(value.size for value in dict.fromkeys(op.ins)) + written
