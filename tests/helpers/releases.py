"""What differs between releases of jax, where a test compares with what a compiler did."""

import jax

# One residual for a tanh instead of two; rooms of 32 MiB instead of 4 for a GPU's library of matrix
# products; a CPU's compiler that heeds barriers; another order of backward passes on GPUs.
SINCE_0_11 = jax.__version_info__ >= (0, 11)
# A GPU's compiler that does not make the arrays of all loops at once.
SINCE_0_12 = jax.__version_info__ >= (0, 12)
