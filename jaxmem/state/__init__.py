"""Training state that takes a fraction of its memory: gradients, optimizer state, parameters."""

from jaxmem.state.step import UpdatedLeaf as UpdatedLeaf
from jaxmem.state.step import UpdatePlan as UpdatePlan
from jaxmem.state.step import value_and_update as value_and_update
