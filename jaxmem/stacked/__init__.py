"""Executors: a plan and a layer in, jax operations out.

Each schedule is a pair of functions: `forward` runs the stack and returns what
is kept, `backward` turns that and the cotangents of the results into cotangents
of the operands.  All of them read single layers out of the stacked inputs by
index and write single gradients into the stacked gradients by index, so that no
schedule ever holds a copy of a segment's parameters.  Stacked inputs may be on the host: then
rows go to the device one by one, and gradients of them go to the host.
"""

from jaxmem.stacked.forms import Form, applied, as_body, checkpointed, nested, plain
from jaxmem.stacked.schedules import Schedule, schedule_for
from jaxmem.stacked.state import NOWHERE, Into

__all__ = [
    "NOWHERE", "Form", "Into", "Schedule", "applied", "as_body", "checkpointed", "nested", "plain",
    "schedule_for",
]  # fmt: skip
