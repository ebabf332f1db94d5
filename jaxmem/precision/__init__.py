"""Parameters in float32, and computation in fewer bits."""

from jaxmem.precision.mixed import mixed_precision as mixed_precision
from jaxmem.precision.policy import Precision as Precision
