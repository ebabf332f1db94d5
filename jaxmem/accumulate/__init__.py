"""Gradients of a batch that does not fit, exactly: across steps, and inside one."""

from jaxmem.accumulate.adam import AdamA as AdamA
from jaxmem.accumulate.adam import AdamAState as AdamAState
from jaxmem.accumulate.gradient import BatchAux as BatchAux
from jaxmem.accumulate.gradient import value_and_grad as value_and_grad
from jaxmem.accumulate.multisteps import MultiSteps as MultiSteps
from jaxmem.accumulate.multisteps import MultiStepsState as MultiStepsState
from jaxmem.accumulate.weighted import Weighted as Weighted
