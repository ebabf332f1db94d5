"""`low_memory`: one line above a model that puts layers that keep less in the place of its own.

Also known as approximate and memory-sharing backpropagation (LowMemoryBP).  What is decorated is
traced, and GELU, SiLU, ReLU, dropout, layer and RMS norms are found in it by what they compute:
those of jax, of Flax, and most that are written out.  Names, shapes and values of parameters stay,
and so do all outputs, bit for bit.

Known gap: scale and bias of a norm are not folded into the next layer, which would change outputs
by rounding; `jaxmem.layers.norm_linear` does it where that is wanted.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import linen as flax_linen

from jaxmem import linen
from jaxmem._util.imported import is_module, is_nnx_class, nnx_is_used
from jaxmem._util.text import columns
from jaxmem.errors import check_flags
from jaxmem.rewrite.low_memory import (
    LowMemory,
    Replacement,
    noting_replacements,
    with_low_memory,
)
from jaxmem.rewrite.scope import method_names

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Replacements:
    """What `low_memory` replaces in a function, in the order of the code; `print` it for a table.

    Attributes:
      rows: one for each place.
    """

    rows: tuple[Replacement, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all gradients are those of the plain code, but for rounding."""
        return all(row.gradient == "exact" for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Replacement]:
        return iter(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing is replaced by a layer that keeps less"
        approximate = sum(row.gradient == "approximate" for row in self.rows)
        one = len(self.rows) == 1
        head = f"{len(self.rows)} layer{'' if one else 's'} replaced by one that keeps less; "
        head += (
            f"{approximate} with an approximate gradient" if approximate else "gradients are exact"
        )
        cells = []
        for row in self.rows:
            times = f"{row.count} x " if row.count > 1 else ""
            shape = f"{times}{row.dtype}[{','.join(map(str, row.shape))}]"
            way = f"{row.what} by {row.by}"
            cells.append([way, shape, f"gradient {row.gradient}", row.module, row.source])
        return f"{head}\n{columns(cells, right=[])}"


# ---------------------------------------------------------------- API


def low_memory(
    target: Any = None, *, exact: bool = False, methods: str | Sequence[str] | None = None
) -> Any:
    """`target` with layers that keep less for the backward pass.

    | found                          | replaced by     | keeps, an element         | gradient    |
    |--------------------------------|-----------------|---------------------------|-------------|
    | `jax.nn.gelu`, exact or tanh   | `regelu2`       | 2 bits                    | approximate |
    | `jax.nn.silu` (swish)          | `resilu2`       | 2 bits                    | approximate |
    | `jax.nn.relu`                  | `relu`          | 1 bit                     | exact       |
    | dropout                        | `dropout`       | nothing: a key            | exact       |
    | layer, batch and RMS norms     | `ms_layer_norm`, `ms_rms_norm` | its result | exact       |

    The functions are those of `jaxmem.layers`.  Outputs are the same, bit for bit; parameters keep
    their names and shapes, so that saved ones load.  An exact gradient is equal but for rounding: a
    norm is kept in the dtype of its argument, if that is narrower than float32.  What is replaced,
    and where, `jaxmem.replacements` shows.

    Args:
      target: a function; a Flax linen module class, instance or method; a Flax NNX module class,
        instance or method.  The model or its loss, not its gradient.
      exact: replace only what leaves gradients as they are.
      methods: for module classes and instances, the methods to decorate; ``__call__`` by default.

    Returns:
      The same kind of thing, to be used in the same way.  With no target, a decorator.

    Raises:
      TypeError: `target` is none of the above.

    What is decorated is traced, so that ``if float(x) > 0`` works undecorated only.  Policies go
    on top (``@jaxmem.remat_sqrt`` above ``@jaxmem.low_memory``), or below around a scan, and what
    is kept has the names that they may speak of: "regelu2", "resilu2", "relu_mask", "dropout_key",
    "norm", "norm_rstd".  Max-poolings are left as they are: `jaxmem.layers.max_pool`.

    Source: Yang et al. 2024 (arXiv 2406.16282).

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.low_memory
    ... def model(w, x):
    ...     return (jax.nn.gelu(x @ w) ** 2).sum()
    >>> w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((8, 64), "float32")
    >>> [row.bytes for row in jaxmem.saved_residuals(model, w, x) if row.name == "regelu2"]
    [128]
    """
    check_flags(exact=exact)
    if target is None:
        return functools.partial(low_memory, exact=exact, methods=methods)
    rewrite = functools.partial(with_low_memory, choice=LowMemory(exact))
    if methods is not None and not is_module(target):
        raise TypeError(
            f"methods= goes with a Flax module class or instance, and {target!r} is none; "
            "decorate the method itself"
        )
    names = method_names(methods)
    if isinstance(target, type):
        if issubclass(target, flax_linen.Module):
            return linen.lifted_class(target, rewrite, names)
        if is_nnx_class(target):
            from jaxmem import nnx

            return nnx.lifted_class(target, rewrite, names)
        raise TypeError(
            f"jaxmem.low_memory decorates Flax module classes, and {target.__name__} is a class of "
            "another kind; decorate its method (the function that computes) instead"
        )
    if isinstance(target, flax_linen.Module):
        return linen.lifted_instance(target, rewrite, names)
    if is_nnx_class(type(target)):
        from jaxmem import nnx

        return nnx.lifted_instance(target, rewrite, names)
    if linen.is_method(target):
        return functools.partial(_function(target.__func__, rewrite), target.__self__)
    if not callable(target):
        raise TypeError(
            "jaxmem.low_memory takes a function, a Flax module class, a module instance or a "
            f"method, got an object of type {type(target).__name__}; it changes code, not arrays"
        )
    return _function(target, rewrite)


def replacements(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Replacements:
    """What `low_memory` replaces in a call of `fn`, which may have it at any place further in.

    Nothing is computed; arguments may be `jax.ShapeDtypeStruct`s.  What is decorated inside of a
    scan does not know its length, and stands here as often as it is traced.

    Raises:
      TypeError: `fn` is not callable.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> model = jaxmem.low_memory(lambda x: jax.nn.relu(x).sum())
    >>> print(jaxmem.replacements(model, jnp.ones((2, 3))))
    1 layer replaced by one that keeps less; gradients are exact
      relu by relu  float32[2,3]  gradient exact...
    """
    if not callable(fn):
        raise TypeError(
            "replacements takes a function and its arguments, got an object of type "
            f"{type(fn).__name__} as the function; pass replacements(fn, *args), not "
            "replacements(fn(*args))"
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in leaves]

    def flat(*arrays: Any) -> Any:
        given = iter(arrays)
        full = [next(given) if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, full)
        out = fn(*args, **kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

    with noting_replacements() as notes:
        jax.make_jaxpr(flat)(*(leaf for t, leaf in zip(traced, leaves, strict=True) if t))
    return Replacements(tuple(notes))


# ---------------------------------------------------------------- implementation


def _function(fn: Callable[..., Any], rewrite: Any) -> Callable[..., Any]:
    """The decorated function; what its arguments are is seen at the call."""
    plain, method = rewrite(fn), None

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal method
        if linen.is_called_on_module(fn, args):
            method = method or linen.lifted_method(fn, rewrite)
            return method(*args, **kwargs)
        if nnx_is_used():
            from jaxmem import nnx

            if nnx.is_bound_method(fn) or nnx.has_modules(args, kwargs):
                return nnx.lifted_call(fn, rewrite, args, kwargs)
        return plain(*args, **kwargs)

    return run
