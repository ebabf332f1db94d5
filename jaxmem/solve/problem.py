"""What a stack costs, as the solvers see it: lengths and bytes, no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes of one layer stack.

    Attributes:
      length: number of layers.
      carry_bytes: the state that one layer passes to the next.
      residual_bytes: what the backward of one layer needs beyond its parameters and
        whatever is cheaply had again from them.
      param_bytes: one layer's slice of the stacked inputs.
      alone_bytes: the part of the residuals that is in memory when the layer is
        recomputed and reversed at once, so that what is cheap never gets
        stored; None for all of it.
    """

    length: int
    carry_bytes: int = 1
    residual_bytes: int = 1
    param_bytes: int = 0
    alone_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """What makes some values of a `Graph` from others: indices of values, and its time."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Graph:
    """One layer as values and the operations that make them, in an order in which they can run.

    A value that no operation makes and that is not free has to be kept (or sent
    to the host) when something needs it.  Infinite seconds forbid what they
    measure: an operation that may not run twice, a value the host cannot take.

    Attributes:
      bytes: of each value.
      operations: in an order in which they can run; each value has one maker at most.
      free: there in the backward pass anyway (parameters and the like).
      wanted: what the backward pass reads.
      keepable: what may be kept; others can only be free or recomputed.
      keep_seconds: of each value: writing it and reading it back.
      host_seconds: of each value: to the host and back; None: nothing goes there.

    Raises:
      ValueError: the tuples differ in length, an index is of no value, a value
        has two makers, or an operation reads what is made only later.
    """

    bytes: tuple[int, ...]
    operations: tuple[Operation, ...]
    free: frozenset[int]
    wanted: frozenset[int]
    keepable: frozenset[int]
    keep_seconds: tuple[float, ...]
    host_seconds: tuple[float, ...] | None = None

    def __post_init__(self):
        n = len(self.bytes)
        for name, row in (("keep_seconds", self.keep_seconds), ("host_seconds", self.host_seconds)):
            if row is not None and len(row) != n:
                raise ValueError(
                    f"the graph has {n} values and {len(row)} {name}: one is needed for each value"
                )
        named = set(self.free | self.wanted | self.keepable)
        made: set[int] = set()
        read: set[int] = set()
        for k, operation in enumerate(self.operations):
            read.update(operation.inputs)
            if twice := made.intersection(operation.outputs):
                raise ValueError(f"value {min(twice)} is made twice, again by operation {k}")
            if early := read.intersection(operation.outputs):
                raise ValueError(
                    f"value {min(early)} is read before operation {k} makes it: list the "
                    "operations in an order in which they can run"
                )
            made.update(operation.outputs)
        if strange := [v for v in named | made | read if not 0 <= v < n]:
            raise ValueError(f"value {strange[0]} is named, and the graph has {n} values")
