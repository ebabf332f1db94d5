"""Gradients of a batch that does not fit, exactly: across steps, and inside one."""

from jaxmem.accumulate.multisteps import MultiSteps as MultiSteps
from jaxmem.accumulate.multisteps import MultiStepsState as MultiStepsState
from jaxmem.accumulate.weighted import Weighted as Weighted
