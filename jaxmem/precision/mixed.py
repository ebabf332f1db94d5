"""`mixed_precision`: parameters in float32, computation in bfloat16 or float16.

Mixed precision training (Micikevicius et al. 2018, arXiv 1710.03740) keeps parameters in float32
and computes on copies of them in 16 bits.  Cast as a whole these copies are half of the parameters'
size again, live from the forward to the backward pass.  Here each operation that reads a parameter
casts it, inside the loop over layers, and casts it once more in the backward pass.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as flax_linen

from jaxmem import linen
from jaxmem._util.imported import is_nnx_class, nnx_is_used
from jaxmem.precision.apply import INPUT, PARAM, STATE, applied
from jaxmem.precision.policy import _UNSET, Precision
from jaxmem.rewrite.scope import method_names

# ---------------------------------------------------------------- API


def mixed_precision(
    target: Any = None,
    policy: Any = None,
    *,
    param_dtype: Any = _UNSET,
    compute_dtype: Any = _UNSET,
    output_dtype: Any = _UNSET,
    reductions: Any = _UNSET,
    keep: Callable[[str], bool] | None = None,
    methods: str | Sequence[str] | None = None,
) -> Any:
    """`target` computing in bfloat16 or float16 on parameters in float32.

        @jaxmem.mixed_precision
        def loss(params, batch): ...

        @jaxmem.mixed_precision(compute_dtype="float16", output_dtype="float16")
        class Block(nn.Module): ...

    Floating-point arguments are cast to the type to compute in, and floating-point results to
    that of the output; what the code itself casts (the ``dtype=`` of a Flax layer) is cast as it
    says.  Of modules the parameters are cast (linen's collection "params", `nnx.Param`) and the
    arguments; batch statistics and other state stay as they are.  Integers, random keys and complex
    numbers stay as they are.

    Numbers are those of a cast ahead of the function.  Memory is not: a parameter is cast where an
    operation reads it, a stack of layers layer by layer inside of its loop, and cast again for the
    backward pass; beyond the parameters there are one or two layers in the narrow type, never a
    copy of all.  Gradients arrive in the type of the parameters, and are added up in it.

    It composes with the decorators of `remat`, inside or outside of them, with `fit`,
    `value_and_grad` and `value_and_update`.  Where one function under mixed precision calls
    another, the inner one computes in its own type, on parameters that the outer one has rounded to
    its own.

    float16 has a range of 6e-8 to 65504: use `jaxmem.dynamic_loss_scale` with it.

    Args:
      target: a function; a Flax linen module class, instance or method; a Flax NNX module class,
        instance or method.  None makes a decorator.
      policy: in jmp's words, "params=float32,compute=bfloat16,output=float32", or the name of the
        type to compute in alone; a `Precision`, or a `jmp.Policy`.
      param_dtype: what parameters are held in, float32 by default; narrower ones are warned of.
      compute_dtype: bfloat16 by default.
      output_dtype: float32 by default; None leaves results as computed.
      reductions: float32 computes sums, means, variances, norms and softmaxes in it: what an
        exponential, a logarithm, a root or a reduction makes is not rounded before a product, a
        loop or a call reads it, and what is kept of it for the backward pass has 32 bits, too.
        None, the default, leaves them to the code.  (jax itself adds up in float32 where it sums
        numbers of 16 bits, and rounds the sum.)
      keep: from the path of an argument, such as "0/norm/scale", to whether it stays as it is.
        In modules the path of a parameter begins behind "params".
      methods: for module classes and instances, the methods to decorate; ``__call__`` by default.

    Returns:
      The same kind of thing, to be used in the same way.

    Raises:
      TypeError: `target` is none of the above; a type is none.
      ValueError: a type is not one of real floating-point numbers, a word of a policy is unknown.

    Warns:
      jaxmem.NoEffectWarning: no argument is floating-point, or `keep` chooses none.
      jaxmem.JaxmemWarning: a parameter is narrower than `param_dtype`, or complex; the function
        takes gradients itself, or closes over an array that is traced.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.mixed_precision
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> weights, h = jnp.stack([jnp.eye(4)] * 64), jnp.ones(4)
    >>> value, gradient = jax.value_and_grad(model)(weights, h)
    >>> value.dtype.name, gradient.dtype.name, bool(value == model(weights.astype("bfloat16"), h))
    ('float32', 'float32', True)
    """
    if isinstance(target, str | Precision) and policy is None:
        target, policy = None, target
    precision = Precision.parse(
        policy,
        param_dtype=param_dtype,
        compute_dtype=compute_dtype,
        output_dtype=output_dtype,
        reductions=reductions,
    )
    if keep is not None and not callable(keep):
        raise TypeError(
            f"keep takes a function from the path of an argument to whether it stays, got {keep!r}"
        )
    if target is None:
        return lambda target: _decorated(target, precision, keep, methods)
    return _decorated(target, precision, keep, methods)


# ---------------------------------------------------------------- implementation


def _decorated(
    target: Any,
    precision: Precision,
    keep: Callable[[str], bool] | None,
    methods: str | Sequence[str] | None,
) -> Any:
    kind = target if isinstance(target, type) else type(target)
    is_linen, is_nnx = issubclass(kind, flax_linen.Module), is_nnx_class(kind)
    if methods is not None and not (is_linen or is_nnx):
        raise TypeError(
            f"methods= goes with a Flax module class or instance, and {target!r} is none; "
            "decorate the method itself"
        )
    names = method_names(methods)
    if is_linen:
        change = functools.partial(_of_linen, precision=precision, keep=keep)
        if isinstance(target, type):
            return linen.lifted_class(target, change, names)
        return linen.lifted_instance(target, change, names)
    if is_nnx:
        from jaxmem import nnx

        change = functools.partial(_of_nnx, precision=precision, keep=keep)
        if isinstance(target, type):
            return nnx.lifted_class(target, change, names)
        return nnx.lifted_instance(target, change, names)
    if isinstance(target, type) or not callable(target):
        what = f"class {target.__name__}" if isinstance(target, type) else f"a {kind.__name__}"
        raise TypeError(
            "mixed_precision takes a function, a Flax module class, a module instance or a method, "
            f"got {what}; types apply to code, not to arrays.  Options go by name, as in "
            "mixed_precision(compute_dtype='float16')"
        )
    if linen.is_method(target):
        inner = _function(target.__func__, precision, keep)
        return functools.partial(inner, target.__self__)
    return _function(target, precision, keep)


def _function(
    fn: Callable[..., Any], precision: Precision, keep: Callable[[str], bool] | None
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if linen.is_called_on_module(fn, args):
            change = functools.partial(_of_linen, precision=precision, keep=keep)
            return linen.lifted_method(fn, change)(*args, **kwargs)
        if nnx_is_used():
            from jaxmem import nnx

            if nnx.is_bound_method(fn) or nnx.has_modules(args, kwargs):
                change = functools.partial(_of_nnx, precision=precision, keep=keep)
                return nnx.lifted_call(fn, change, args, kwargs)
        return applied(fn, precision, _label(fn), _all_params, _every, keep)(*args, **kwargs)

    return run


def _label(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__name__)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _every(out: Any) -> list[bool]:
    return [True] * len(jax.tree.leaves(out))


def _all_params(given: Any) -> list[tuple[str, str]]:
    """Of a function: positional arguments have numbers, the others names."""
    args, kwargs = given
    return [
        (PARAM, _path(path))
        for tree in (args, kwargs)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


# ---------------------------------------------------------------- modules


def _of_linen(
    pure: Callable[..., Any], precision: Precision, keep: Callable[[str], bool] | None
) -> Callable[..., Any]:
    """A method as a function of (variables, keys, args, kwargs), returning (result, variables)."""

    def roles(given: Any) -> list[tuple[str, str]]:
        (variables, keys, args, kwargs), _ = given
        found = []
        for path, _ in jax.tree_util.tree_leaves_with_path(variables):
            names = [getattr(entry, "key", None) for entry in path]
            if "params" in names:
                found.append((PARAM, _path(path[names.index("params") + 1 :])))
            else:
                found.append((STATE, _path(path)))
        found += [(STATE, "")] * len(jax.tree.leaves(keys))
        return found + [(INPUT, path) for _, path in _all_params((args, kwargs))]

    def result(out: Any) -> list[bool]:
        return [*_every(out[0]), *(False for _ in jax.tree.leaves(out[1]))]

    return applied(pure, precision, _label(pure), roles, result, keep, is_module=True)


def _of_nnx(
    pure: Callable[..., Any], precision: Precision, keep: Callable[[str], bool] | None
) -> Callable[..., Any]:
    """A call as a function of one tree of states, returning (changes, kept, result)."""
    from flax import nnx

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    def roles(given: Any) -> list[tuple[str, str]]:
        (tree,), _ = given
        found = []
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
            kind = INPUT
            if is_variable(node):
                kind = PARAM if isinstance(node, nnx.Param) else STATE
            states = [at for at, key in enumerate(path) if getattr(key, "name", None) == "states"]
            own = path[states[-1] + 2 :] if states else path[1:]
            found += [(kind, _path(own))] * len(jax.tree.leaves(node))
        return found

    def result(out: Any) -> list[bool]:
        changed, kept, own = out
        state = [leaf for part in (changed, kept) for leaf in jax.tree.leaves(part)]
        # Results that are modules are states of variables.
        flags = [
            not is_variable(node)
            for node in jax.tree.leaves(own, is_leaf=is_variable)
            for _ in jax.tree.leaves(node)
        ]
        return [*(False for _ in state), *flags]

    return applied(pure, precision, _label(pure), roles, result, keep, is_module=True)
