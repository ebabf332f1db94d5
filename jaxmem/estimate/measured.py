"""How long single operations take, measured on the attached device instead of estimated.

Operations that are kernels of their own are run alone, on zeros, and the median of several
runs is taken.  What is fused with its neighbours cannot be run alone and is estimated as a
`jaxmem.estimate.roofline.Roofline` does.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax

from jaxmem import _jax
from jaxmem.estimate.counting import kind_of
from jaxmem.estimate.roofline import Roofline

_RUNS = 5


@dataclasses.dataclass(frozen=True)
class Measured(Roofline):
    """A roofline whose kernels are measured; each once, whatever its place in a layer."""

    known: dict[Any, float] = dataclasses.field(default_factory=dict, compare=False)

    def operation(self, eqn: Any) -> float:
        """Seconds of one operation."""
        estimated = super().operation(eqn)
        if kind_of(eqn) != "kernel" or eqn.effects:
            return estimated
        types = tuple(str(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
        key = eqn.primitive.name, str(eqn.params), types
        if key not in self.known:
            self.known[key] = _seconds(eqn, estimated)
        return self.known[key]


def _seconds(eqn: Any, otherwise: float) -> float:
    """The median of some runs, or what it is otherwise taken for if it cannot run alone."""

    def alone(*args: Any) -> Any:
        given = iter(args)
        full = [next(given) if _jax.is_var(a) else a.val for a in eqn.invars]
        return eqn.primitive.bind(*full, **eqn.primitive.get_bind_params(eqn.params))

    avals = [atom.aval for atom in eqn.invars if _jax.is_var(atom)]
    try:
        # Outside of the trace that asks: what follows is run, not recorded.
        with jax.ensure_compile_time_eval():
            args = [jax.numpy.zeros(aval.shape, aval.dtype) for aval in avals]
            run = jax.jit(alone).lower(*args).compile()
            jax.block_until_ready(run(*args))
            times = []
            for _ in range(_RUNS):
                start = time.perf_counter()
                jax.block_until_ready(run(*args))
                times.append(time.perf_counter() - start)
    except (TypeError, ValueError, NameError, NotImplementedError):
        return otherwise  # an axis of a shard_map around it, a type without zeros
    return statistics.median(times)
