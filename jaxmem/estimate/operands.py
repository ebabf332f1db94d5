"""What kernels read and compilers compute for them alone: the bytes that it takes, in both passes.

What is elementwise is fused into what is elementwise behind it, and takes next to nothing there.  A
matrix product reads an array: somebody has to write that, from other arrays.  If it is computed
again in the backward pass, it is for each product that reads it.  Convolutions are left out: with
what they read counted, plans of a ResNet-50 took more time in the same memory, not less.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

from jaxmem import _jax
from jaxmem.estimate.arrays import behind_views, kind_in, union, views_in
from jaxmem.trace.layer import Layer, nbytes


def bytes_for_kernels(layer: Layer, stored: Collection[Any]) -> dict[Any, int]:
    """Of elementwise results that are arrays, bytes read and written for them in a backward pass.

    Args:
      stored: what is in memory, see `jaxmem.estimate.arrays.in_memory`.
    """
    behind: dict[Any, frozenset[Any]] = {}
    found: dict[Any, int] = {}
    times, of_convolutions = _readers(layer)
    for eqn in layer.linearised.jaxpr.eqns:
        kind, atoms = kind_in(eqn), list(filter(_jax.is_var, eqn.invars))
        read = union(behind.get(atom, frozenset([atom])) for atom in atoms)
        for var in eqn.outvars:
            own = frozenset([var])
            if kind == "fused" and var in stored:
                behind[var] = own
                if var not in of_convolutions:
                    size = nbytes(var.aval) + sum(nbytes(one.aval) for one in read)
                    found[var] = size * max(times[var], 1)
            else:
                behind[var] = own if kind in ("kernel", "reduction") else read
    return found


def may_pad(eqn: Any) -> bool:
    """Whether XLA for GPUs may pad what a product of several matrices each reads.

    To rows of 16 bytes, as cuBLAS wants them: the 197 patches of an image to 200.  Whether it does
    goes by whether Triton makes the product, which is not known in advance.
    """
    if eqn.primitive.name != "dot_general":
        return False
    _, batch = eqn.params["dimension_numbers"]
    return bool(batch[0]) and any(
        atom.aval.dtype.itemsize == 2 and size % _ALIGNED
        for atom, axes in zip(eqn.invars, batch, strict=True)
        for axis, size in enumerate(atom.aval.shape)
        if axis not in axes
    )


# ---------------------------------------------------------------- implementation

# Elements of 16 bits, which products have rows of in multiples.
_ALIGNED = 8


def _readers(layer: Layer) -> tuple[Counter[Any], set[Any]]:
    """How many kernels of the backward pass read each value, and which ones convolutions read."""
    reverse = layer.transposed.jaxpr
    views = views_in(layer.linearised.jaxpr) | views_in(reverse)
    residuals = zip(reverse.invars, layer.residuals, strict=False)
    views |= {var: value for var, value in residuals if _jax.is_var(value)}
    times: Counter[Any] = Counter()
    of_convolutions: set[Any] = set()
    for eqn in reverse.eqns:
        if kind_in(eqn) == "kernel":
            for atom in set(filter(_jax.is_var, eqn.invars)):
                read = behind_views(atom, views)
                times.update(read)
                if eqn.primitive.name == "conv_general_dilated":
                    of_convolutions.update(read)
    return times, of_convolutions
