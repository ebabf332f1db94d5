"""What the user has imported, found without importing it."""

import sys


def nnx_is_used() -> bool:
    """Whether `flax.nnx` has been imported: before that, nothing can be a module of it."""
    return "flax.nnx" in sys.modules
