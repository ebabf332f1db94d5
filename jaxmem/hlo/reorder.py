"""What an order made for time costs in device memory.

A GPU's compiler first orders a program for little memory (list scheduling: always the
operation that frees most).  It then orders every computation with an asynchronous operation in it
anew, to overlap that with others, without regard to memory until the device is nearly full: those
are transfers to and from the host and, since the XLA of jax 0.11, also copies of what a loop
reads and writes of a stack.  What that costs is found by list scheduling the loop again.
Known gaps: operands and results of an operation are taken to have buffers of their own, and what a
loop carries to stay where it is.
"""

from collections.abc import Iterable, Iterator, Sequence

from jaxmem.hlo.bodies import result
from jaxmem.hlo.buffers import Schedule
from jaxmem.hlo.shapes import Shape
from jaxmem.hlo.text import Computation, Instruction, Module

# ---------------------------------------------------------------- API


def overlap_bytes(module: Module, order: Schedule, points: Sequence[tuple[int, int]]) -> int:
    """By how much the peak would be lower if loops were ordered for memory.

    Args:
      points: live bytes as `liveness.live_bytes` gives them.
    """
    position = {name: step for step, name in enumerate(order.order)}
    heights = _Heights(points)
    spared: list[tuple[int, int, int]] = []
    for body in _reordered(module):
        steps = [position[i.name] for i in body.instructions if i.name in position]
        if steps and (less := _peak(body) - _peak(body, _for_memory(body))) > 0:
            spared.append((min(steps), max(steps), less))
    if not spared:
        return 0
    edges = sorted({0, *(edge for start, end, _ in spared for edge in (start, end + 1))})
    lower = 0
    for start, end in zip(edges, [*edges[1:], None], strict=True):
        inside = [less for first, last, less in spared if first <= start <= last]
        lower = max(lower, heights.highest(start, end) - max(inside, default=0))
    return max(heights.highest(0, None) - lower, 0)


# ---------------------------------------------------------------- implementation

_HOST = 5
_NO_WORK = frozenset(["bitcast", "get-tuple-element", "opt-barrier", "tuple"])
# Far above any layer's: what is larger is a loop unrolled, and not worth the quadratic time.
_MANY = 4096


class _Heights:
    """Live bytes along the schedule."""

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        self.points = points

    def highest(self, start: int, end: int | None) -> int:
        """The most from a step on until before another."""
        before = [height for step, height in self.points if step <= start][-1:]
        within = (h for step, h in self.points if step > start and (end is None or step < end))
        return max([*before, *within], default=0)


def _reordered(module: Module) -> Iterator[Computation]:
    """Bodies of loops in which something is asynchronous."""
    for loop in module.instructions.values():
        body = module.body(loop, "body") if loop.opcode == "while" else None
        own = [] if body is None or len(body.instructions) > _MANY else body.instructions
        if body is not None and any(one.opcode.endswith("-start") for one in own):
            yield body


def _on_device(shape: Shape) -> int:
    if shape.elements is None:
        return 0 if shape.space == _HOST else shape.bytes
    return sum(map(_on_device, shape.elements))


class _Graph:
    """The operations of a computation: what each needs, and the bytes that it makes."""

    def __init__(self, body: Computation) -> None:
        by_name = {i.name: i for i in body.instructions}
        self.made: dict[str, int] = {}
        self.needs: dict[str, set[str]] = {}
        self.users: dict[str, set[str]] = {}
        # The operations whose buffers a value is in: its own, or those of what it passes on.
        sources: dict[str, set[str]] = {}
        for instruction in body.instructions:
            operands = [name for name in instruction.operands if name in by_name]
            held = set().union(*(sources[name] for name in operands))
            if instruction.opcode in _NO_WORK:
                sources[instruction.name] = held
                continue
            name = instruction.name
            done = instruction.opcode.endswith("-done")
            sources[name] = {name, *held} if done else {name}
            self.needs[name] = held
            self.made[name] = 0 if done else _result_bytes(instruction)
            self.users[name] = set()
            for source in held:
                self.users[source].add(name)
        # What the loop carries is where it was before, and is there throughout.
        for name in sources[body.root.name]:
            self.made[name] = 0


def _result_bytes(instruction: Instruction) -> int:
    if instruction.opcode in ("constant", "parameter"):
        return 0
    return _on_device(result(instruction))


def _peak(body: Computation, order: Iterable[str] | None = None) -> int:
    """The most bytes that are live in an order, which is the text's if not given."""
    graph = _Graph(body)
    left = {name: len(users) for name, users in graph.users.items()}
    live = most = 0
    for name in graph.made if order is None else order:
        live += graph.made[name]
        most = max(most, live)
        live -= graph.made[name] if not left[name] else 0
        for source in graph.needs[name]:
            left[source] -= 1
            live -= graph.made[source] if not left[source] else 0
    return most


def _for_memory(body: Computation) -> list[str]:
    """List scheduling: of what can be run, always what frees most; else in the text's order."""
    graph = _Graph(body)
    place = {name: k for k, name in enumerate(graph.made)}
    left = {name: len(users) for name, users in graph.users.items()}
    waits = {name: len(needs) for name, needs in graph.needs.items()}
    ready = [name for name, count in waits.items() if not count]
    found: list[str] = []

    def gain(name: str) -> tuple[int, int]:
        freed = sum(graph.made[source] for source in graph.needs[name] if left[source] == 1)
        return freed - graph.made[name], -place[name]

    while ready:
        name = max(ready, key=gain)
        ready.remove(name)
        found.append(name)
        for source in graph.needs[name]:
            left[source] -= 1
        for user in graph.users[name]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return found
