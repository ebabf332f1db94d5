"""Operations of a traced program and the values between them.

Operations refer to `Value`s, not to variables: an argument of a jitted function
and the parameter that it becomes are one `Value`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from jaxmem.estimate.counting.trips import Known


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """An array of the program: its bytes, and its contents where they are known integers."""

    size: int
    known: Known = None


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in the program an operation stands.

    Attributes:
      times: how often it runs on one shard.
      shards: on how many shards.
      recomputed: whether it recomputes what was computed before.
      planned: whether that is by a policy of jaxmem.
      transposed: whether it is part of a backward pass.
      looped: whether it stands in a loop.
      checkpoint: who put the innermost `jax.checkpoint` around it there: nobody, a policy of
        jaxmem, or the code itself.
    """

    times: int = 1
    shards: int = 1
    recomputed: bool = False
    planned: bool = False
    transposed: bool = False
    looped: bool = False
    checkpoint: Literal["none", "policy", "own"] = "none"


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """One operation.  Where `eqn` is None, values enter or leave a loop or the program."""

    eqn: Any
    place: Place
    ins: Sequence[Value]
    outs: Sequence[Value] = ()
    flops: int = 0
    matmul_flops: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Walk:
    """A whole program.

    Attributes:
      ops: its operations, each after those whose results it takes.
      unknown_loops: how many `while` loops have no known length; they are in `ops` once.
      uncounted: names of primitives whose cost is unknown.
      checkpoints: the equations of `jax.checkpoint`, with their places.
    """

    ops: list[Op] = dataclasses.field(default_factory=list)
    unknown_loops: int = 0
    uncounted: set[str] = dataclasses.field(default_factory=set)
    checkpoints: list[tuple[Any, Place]] = dataclasses.field(default_factory=list)


def size_of(aval: Any) -> int:
    """Bytes of a value of this type, 0 for tokens and the like."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None:  # a reference
        inner = getattr(aval, "inner_aval", None)
        return 0 if inner is None else size_of(inner)
    return 0 if dtype is None else math.prod(shape) * dtype.itemsize
