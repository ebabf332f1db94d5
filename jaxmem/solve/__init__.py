"""Solvers: sizes and lengths in, schedules out.  Plain numbers, no jax.

`periodic` cuts a stack into equal segments, several levels deep; `revolve`
places a fixed number of checkpoints.  `keep` chooses what one layer keeps, `chain`
what becomes of each stage of a chain.  Those that load scipy are imported from
their own files.  A new solver is one more small file.
"""

from jaxmem.solve.periodic import periodic_bytes, segment_lengths
from jaxmem.solve.revolve import Schedule, extra_steps, first_sweep, schedule

__all__ = [
    "Schedule",
    "extra_steps",
    "first_sweep",
    "periodic_bytes",
    "schedule",
    "segment_lengths",
]
