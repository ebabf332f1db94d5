"""What the user has imported, found without importing it."""

import sys
from typing import Any


def nnx_is_used() -> bool:
    """Whether `flax.nnx` has been imported: before that, nothing can be a module of it."""
    return "flax.nnx" in sys.modules


def is_nnx_class(kind: type) -> bool:
    """Whether a class is one of NNX modules."""
    if not nnx_is_used():
        return False
    from flax import nnx

    return issubclass(kind, nnx.Module)


def is_module(target: Any) -> bool:
    """Whether something is a Flax module, linen or NNX, or a class of such."""
    from flax import linen

    kind = target if isinstance(target, type) else type(target)
    return issubclass(kind, linen.Module) or is_nnx_class(kind)
