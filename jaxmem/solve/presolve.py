"""Smaller graphs with the same answers, before a solver sees them.

A traced layer has hundreds of values, most of them stages of element-wise
chains between the few that are worth thinking about.  Four facts remove them:

1. What nothing wanted depends on takes no part.
2. What follows from free values in no time is free.
3. A value with one reader is not worth storing when all that its reader makes
   takes no more bytes and no more time to store: that does as well, and the
   reader need not run.
4. A value that cannot be stored, with one reader, is part of that reader.
"""

import dataclasses
import functools
import math

from jaxmem.solve.problem import Graph


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation, or several that only ever run together."""

    inputs: frozenset[int]
    outputs: frozenset[int]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Reduced:
    """What is left of `graph`: values keep their numbers, operations do not."""

    graph: Graph
    operations: tuple[Step, ...]
    wanted: frozenset[int]
    keepable: frozenset[int]
    hostable: frozenset[int]


@functools.lru_cache(maxsize=64)
def reduced(graph: Graph) -> Reduced:
    """The graph without what cannot matter; the best keep sets of one are best in the other."""
    free = set(graph.free)
    for operation in graph.operations:
        if operation.seconds == 0 and free.issuperset(operation.inputs):
            free.update(operation.outputs)
    wanted = graph.wanted - free

    needed, live = set(wanted), []
    for operation in reversed(graph.operations):
        outputs = needed.intersection(operation.outputs)
        if outputs and math.isfinite(operation.seconds):
            inputs = set(operation.inputs) - free
            needed |= inputs
            live.append([inputs, outputs, operation.seconds])
    keepable = {v for v in graph.keepable & needed if math.isfinite(graph.keep_seconds[v])}
    host = graph.host_seconds or ()
    hostable = {v for v in graph.keepable & needed if host and math.isfinite(host[v])}

    readers: dict[int, list[int]] = {v: [] for v in needed}
    for e, (inputs, _, _) in enumerate(live):
        for u in inputs:
            readers[u].append(e)
    gone = set()
    # From the last operation to the first: whatever reads a value is settled before its maker.
    for p, (inputs, outputs, seconds) in enumerate(live):
        for v in outputs - wanted:
            if len(readers[v]) != 1:
                continue
            after = live[readers[v][0]][1]
            if keepable.issuperset(after) and _no_more(graph.bytes, graph.keep_seconds, after, v):
                keepable.discard(v)
            if hostable.issuperset(after) and _no_more(host, host, after, v):
                hostable.discard(v)
        (v, *others) = outputs
        if others or v in wanted | keepable | hostable or len(readers[v]) != 1:
            continue
        reader = readers[v][0]
        merged, made, time = live[reader]
        live[reader] = [(merged - {v}) | inputs, made, time + seconds]
        for u in inputs:
            readers[u] = sorted({reader if e == p else e for e in readers[u]})
        gone.add(p)
    steps = [
        Step(frozenset(i), frozenset(o), s) for e, (i, o, s) in enumerate(live) if e not in gone
    ]
    return Reduced(
        graph=graph,
        operations=tuple(reversed(steps)),
        wanted=frozenset(wanted),
        keepable=frozenset(keepable),
        hostable=frozenset(hostable),
    )


def _no_more(sizes, times, several, one: int) -> bool:
    """Whether storing several values takes no more bytes and no more time than storing one."""
    return all(sum(row[v] for v in several) <= row[one] for row in (sizes, times))
