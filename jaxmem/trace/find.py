"""Finds layer stacks in a traced function: its outermost scans.

A scan is a stack of layers when it carries or reads anything that can be
differentiated; counters and random-bit loops are not.  The search goes through
the calls that a scan may sit in (jit, checkpoint, shard_map, cond), never into
a scan's own layer, nor into functions that have a derivative rule of their own.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.trace.layer import nbytes
from jaxmem.trace.source import source_line

Where = Callable[["LayerStack"], bool] | int


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """A layer stack in a traced function, as shown to `where=` and in messages.

    Attributes:
      index: its position among the stacks, in the order of execution.
      length: number of layers.
      name: the name scopes that it is in, such as "Encoder/layers".
      source: the line of the scan.
      carry_bytes: state passed from layer to layer.
      param_bytes: one layer's slice of the stacked inputs.
    """

    index: int
    length: int
    name: str
    source: str
    carry_bytes: int
    param_bytes: int

    def __str__(self) -> str:
        name = f" in {self.name}" if self.name else ""
        return f"stack {self.index}: {self.length} layers{name}, from {self.source}"


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
      stacks: pairs of a stack and its equation: a scan, or a `stack_p` that has a policy.
      equations: how many equations were searched.
      skipped: scans that are not stacks, since nothing in them can be differentiated.
      takes_gradients: whether a backward pass is among the equations.
    """

    stacks: list[tuple[LayerStack, Any]]
    equations: int
    skipped: int
    takes_gradients: bool = False


def find(closed: ClosedJaxpr) -> Found:
    """All layer stacks of a jaxpr."""
    stacks: list[tuple[LayerStack, Any]] = []
    equations = skipped = 0
    takes_gradients = False
    for eqn, scope in _walk(closed, ""):
        equations += 1
        name = _join(scope, str(eqn.source_info.name_stack))
        takes_gradients |= "transpose(" in name
        if _jax.is_stack(eqn):
            form = eqn.params["stack"].form
            if form.interleaved:
                continue  # a piece of unrolled code, under its plan
            body, length = form.body, form.length
            parts = body.jaxpr, body.num_consts, body.num_carry
        elif _jax.is_scan(eqn):
            scan = _jax.scan_parts(eqn)
            if scan.length == 0 or not any(_jax.has_tangent(v.aval) for v in eqn.outvars):
                skipped += 1
                continue
            parts, length = (scan.body, scan.num_consts, scan.num_carry), scan.length
        else:
            continue
        jaxpr, num_consts, num_carry = parts
        sizes = [nbytes(aval) for aval in jaxpr.in_avals]
        info = LayerStack(
            index=len(stacks),
            length=length,
            name=name,
            source=source_line(eqn),
            carry_bytes=sum(sizes[num_consts : num_consts + num_carry]),
            param_bytes=sum(sizes[num_consts + num_carry :]),
        )
        stacks.append((info, eqn))
    return Found(stacks, equations, skipped, takes_gradients)


def subjaxprs(eqn: Any) -> list[ClosedJaxpr]:
    """The jaxprs of an equation that are searched for stacks."""
    if (inner := _jax.in_checkpoint(eqn)) is not None:
        return [inner]
    if eqn.primitive.name in _CALLS:
        return [_jax.as_closed(eqn.params["jaxpr"])]
    if eqn.primitive.name in ("closed_call", "core_call"):
        return [_jax.as_closed(eqn.params["call_jaxpr"])]
    if eqn.primitive.name == "cond":
        return [_jax.as_closed(branch) for branch in eqn.params["branches"]]
    return []


def names_in(closed: ClosedJaxpr) -> set[str]:
    """All names given by `checkpoint_name` anywhere in a jaxpr, including in layers."""
    found = set()
    for eqn in closed.jaxpr.eqns:
        if (name := _jax.name_given_by(eqn)) is not None:
            found.add(name)
        for sub in _jax.all_subjaxprs(eqn):
            found |= names_in(sub)
    return found


_CALLS = ("jit", "pjit", "shard_map")


def _walk(closed: ClosedJaxpr, scope: str) -> Iterator[tuple[Any, str]]:
    for eqn in closed.jaxpr.eqns:
        yield eqn, scope
        for sub in subjaxprs(eqn):
            yield from _walk(sub, _join(scope, str(eqn.source_info.name_stack)))


def _join(*scopes: str) -> str:
    return "/".join(scope for scope in scopes if scope)
