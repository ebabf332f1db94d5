"""What a traced function costs: operations and bytes, counted from its jaxpr.

A compiler's own count takes the body of a loop once, whatever its length, and on
an absent GPU gives nothing.  Here every loop counts times its length, and what
`jax.checkpoint` (or a policy of jaxmem) recomputes is told apart by the name
scope that jax gives it.  It is the program as traced: what a compiler removes
later, such as recomputation that it finds superfluous, is still in it.

How single operations count is said in `jaxmem.estimate.counting`, in `flops` and `traffic`.
"""

import dataclasses

from jax.extend.core import ClosedJaxpr

from jaxmem.estimate.counting import (
    moved,
    two_levels,
    unrolled_remat,
    unrolled_without_barriers,
    walk,
)
from jaxmem.estimate.counting.ops import Op

__all__ = ["Costs", "costs", "two_levels", "unrolled_remat", "unrolled_without_barriers"]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Costs:
    """Operations and bytes of a program, on all devices together.

    Costs add, and scale with a number: `costs * (1 / devices)`.

    Attributes:
      flops: floating-point operations, a multiply-add as two: matrix products,
        elementwise operations and reductions.
      matmul_flops: those of matrix products, convolutions and fused attention alone.
      bytes: moved between memory and compute, if only the obvious is fused.
      recomputed_flops: of `flops`, what is recomputed because it was not kept.
      recomputed_matmul_flops: the same of `matmul_flops`.
      unknown_loops: how many `while` loops have no known length; they are counted once.
      uncounted: names of primitives whose operations are unknown and not counted.

    >>> Costs(flops=3, uncounted=("ffi_call",)) * 2 + Costs(flops=1)
    Costs(flops=7, matmul_flops=0, bytes=0, recomputed_flops=0, recomputed_matmul_flops=0,
          unknown_loops=0, uncounted=('ffi_call',))
    """

    flops: float = 0
    matmul_flops: float = 0
    bytes: float = 0
    recomputed_flops: float = 0
    recomputed_matmul_flops: float = 0
    unknown_loops: int = 0
    uncounted: tuple[str, ...] = ()

    def __add__(self, other: "Costs") -> "Costs":
        if not isinstance(other, Costs):
            return NotImplemented
        return Costs(
            **{name: getattr(self, name) + getattr(other, name) for name in _AMOUNTS},
            unknown_loops=self.unknown_loops + other.unknown_loops,
            uncounted=tuple(sorted({*self.uncounted, *other.uncounted})),
        )

    def __mul__(self, factor: float) -> "Costs":
        if not isinstance(factor, (int, float)):
            return NotImplemented
        amounts = {name: getattr(self, name) * factor for name in _AMOUNTS}
        return dataclasses.replace(self, **amounts)

    __rmul__ = __mul__


# ---------------------------------------------------------------- API


def costs(closed: ClosedJaxpr) -> Costs:
    """What a traced function costs, in whole numbers.

    What no result needs is left out.  Of a conditional the branch with the most
    operations counts, the body of a `shard_map` once for each shard.

    Args:
      closed: from `jax.make_jaxpr(fn)(*args)`.

    >>> import jax, jax.numpy as jnp
    >>> def model(weights, h):  # 24 layers of (32, 64) @ (64, 64)
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0]
    >>> found = costs(jax.make_jaxpr(model)(jnp.ones((24, 64, 64)), jnp.ones((32, 64))))
    >>> found.matmul_flops == 24 * (2 * 32 * 64 * 64)
    True
    """
    found = walk(closed)
    return Costs(
        flops=_sum(found.ops, "flops"),
        matmul_flops=_sum(found.ops, "matmul_flops"),
        bytes=moved(found.ops),
        recomputed_flops=_sum(found.ops, "flops", recomputed=True),
        recomputed_matmul_flops=_sum(found.ops, "matmul_flops", recomputed=True),
        unknown_loops=found.unknown_loops,
        uncounted=tuple(sorted(found.uncounted)),
    )


# ---------------------------------------------------------------- implementation

_AMOUNTS = ("flops", "matmul_flops", "bytes", "recomputed_flops", "recomputed_matmul_flops")


def _sum(ops: list[Op], what: str, recomputed: bool = False) -> int:
    return sum(
        getattr(op, what) * op.place.times * op.place.shards
        for op in ops
        if op.place.recomputed or not recomputed
    )
