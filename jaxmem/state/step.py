"""`value_and_update`: a step in which layers are updated as the backward pass leaves them.

Also known as optimizer-in-backward (PyTorch), fused update, and with SGD as LOMO (Lv et al. 2023,
arXiv 2306.09782).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _jax
from jaxmem._util.imported import nnx_is_used
from jaxmem._util.text import columns, size
from jaxmem.accumulate import modules, shards
from jaxmem.accumulate.call import positional, there
from jaxmem.accumulate.gradient import accumulate, outputs
from jaxmem.accumulate.micro import real_loss
from jaxmem.accumulate.parts import Parts
from jaxmem.accumulate.trees import (
    described,
    floating,
    leaf_names,
)
from jaxmem.accumulate.weighted import Weighted
from jaxmem.errors import JaxmemWarning, check_positive, warn
from jaxmem.parallel.zero import Zero
from jaxmem.state import created, in_backward, stored
from jaxmem.state.in_backward import Done, Task, Total
from jaxmem.state.on_leaves import OnLeaves, device_type, pure
from jaxmem.state.places import Places
from jaxmem.state.updating import Updating
from jaxmem.state.wrapping import check_optimizer
from jaxmem.trace.arguments import is_array

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class UpdatedLeaf:
    """How one parameter is updated.

    Attributes:
      path: in the tree of parameters, such as "layers/up".
      bytes: of the parameter.
      in_backward: whether in the backward pass, layer by layer; no gradient as large as the
        parameter exists then.
      reason: why not, if it is not.
    """

    path: str
    bytes: int
    in_backward: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """How a step of `value_and_update` updates its parameters, as its `explain` returns it.

    Attributes:
      leaves: of all parameters, in the order of the tree.
      passes: how many backward passes one step has.
    """

    leaves: tuple[UpdatedLeaf, ...]
    passes: int

    @property
    def gradient_bytes(self) -> int:
        """Of the parameters that have a gradient of their size."""
        return sum(leaf.bytes for leaf in self.leaves if not leaf.in_backward)

    def __str__(self) -> str:
        whole = sum(leaf.bytes for leaf in self.leaves)
        passes = "one backward pass" if self.passes == 1 else f"{self.passes} backward passes"
        head = (
            f"{passes}; gradients of {size(self.gradient_bytes)} exist at once, parameters have "
            f"{size(whole)}"
        )
        rows = [
            [
                leaf.path,
                size(leaf.bytes),
                "in the backward pass" if leaf.in_backward else f"after it: {leaf.reason}",
            ]
            for leaf in self.leaves
        ]
        return f"{head}\n{columns(rows, right=[1])}"


# ---------------------------------------------------------------- API


def value_and_update(
    fun: Callable[..., Any],
    optimizer: Any,
    has_aux: bool = False,
    *,
    microbatches: int | None = None,
    batch_argnums: int | Sequence[int] = (1,),
    rng_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    aux: Any = "stack",
    accumulator_dtype: Any = jnp.float32,
    return_weight: bool = False,
    passes: int = 2,
    zero: Zero | None = None,
) -> "Step":
    """A training step that updates each layer as soon as the backward pass has its gradient.

    Of the gradient of a layer stack only one layer's exists at a time, which saves as much
    memory as the parameters of the stack have:

        step = jax.jit(jaxmem.value_and_update(loss, optimizer), donate_argnums=(0, 1))
        value, params, state = step(params, optimizer.init(params), batch)

    It computes what the ordinary step does:

        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    up to the order of sums in norms; parameters and state have the same form, so that a run can go
    from one to the other.  Donate both, or they are there twice.

    A parameter is updated in the backward pass if it is stacked over the layers of one scan, read
    by that alone and as it is, and if each row of its new value, and of its state, follows from the
    same row of gradient, parameter and state, which is found by looking at what the optimizer
    computes.  SGD (with it this is LOMO), momentum, Adam, AdamW, Lion, RMSProp, Adan, with
    schedules, weight decay, masks and `inject_hyperparams`, are so.  All other parameters, such as
    embeddings, are updated after it in the ordinary way; `explain` says which, and why.

    Where an update needs sums over all rows or over all parameters first, as
    `optax.clip_by_global_norm` and `optax.apply_if_finite` do, the backward pass runs twice, and
    the first time keeps of each gradient nothing but its part of the sums: that costs one more
    backward pass, with what it recomputes, about half of a step's time.  LAMB, LARS and Adafactor
    take norms per parameter; of a stack, in optax, those over all of its layers, which would be a
    third pass (``passes=3``); without it their stacks are updated in the ordinary way.

    Args:
      fun: returns a real scalar or a `Weighted`, and with `has_aux` a pair of that and
        anything.  Its first argument are the parameters, or an NNX module.
      optimizer: an optax transformation.  One that takes `value=` is told the loss.
      has_aux: as in jax; the step then returns ((value, aux), params, state).
      microbatches: in how many parts the batch goes through `fun`, as for
        `jaxmem.value_and_grad`: all but the last one add to an accumulator of the parameters' size,
        and the last one's backward pass updates; all of them add where none is updated in it.  The
        accumulator is on the device, also of parameters on the host.  None for the batch as it is,
        without one.
      batch_argnums, rng_argnums, carry_argnums, aux, accumulator_dtype, return_weight: for
        microbatches, as for `jaxmem.value_and_grad`; positions are those of fun's arguments.
      passes: how many backward passes there may be.
      zero: the `jaxmem.Zero` by which parameters and state are split over devices: each row of a
        layer's parameters is updated in shards, and gathered where they are whole.

    Returns:
      The step: (params, state, *arguments of fun) -> (value, params, state), and
      `step.explain` of the same arguments.  With an NNX module and its `nnx.Optimizer`

          step = nnx.jit(jaxmem.value_and_update(loss, optimizer))
          value = step(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param), batch)

      both are updated in place, and the value alone is returned.

    Raises:
      TypeError, ValueError: an option cannot be; at the call: the state is not of this
        optimizer and these parameters, parameters are not floating-point arrays, or the optimizer
        changes their form.  The text says which and what to pass instead.

    Warns:
      jaxmem.JaxmemWarning: no parameter at all is updated in the backward pass.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> def loss(params, x):
    ...     h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    ...     return ((h @ params["head"]) ** 2).mean()
    >>> params = {"head": jnp.ones((4, 2)), "layers": jnp.ones((6, 4, 4))}
    >>> optimizer, x = optax.adam(0.1), jnp.ones((3, 4))
    >>> step = jaxmem.value_and_update(loss, optimizer)
    >>> print(step.explain(params, optimizer.init(params), x))
    one backward pass; gradients of 32 B exist at once, parameters have 416 B
      head     32 B  after it: it is not stacked over the layers of one scan that alone reads it
      layers  384 B  in the backward pass
    >>> value, params, state = jax.jit(step)(params, optimizer.init(params), x)
    >>> round(float(value), 2), int(state[0].count)
    (15.98, 1)
    """
    if not callable(fun):
        raise TypeError(
            f"value_and_update takes a function, got an object of type {type(fun).__name__}"
        )
    check_optimizer("value_and_update", optimizer)
    parts = None
    if microbatches is None:
        if return_weight:
            raise ValueError(
                "return_weight=True is for a batch in microbatches; pass microbatches=1, or leave "
                "it out"
            )
    else:
        parts = Parts.checked(
            argnums=0,
            has_aux=has_aux,
            microbatches=microbatches,
            aux=aux,
            batch_argnums=batch_argnums,
            rng_argnums=rng_argnums,
            carry_argnums=carry_argnums,
            batch_sharding=None,
            return_weight=return_weight,
        )
        if 0 in parts.batch_argnums:
            raise ValueError(_BATCH_IS_PARAMS)
    dtype = floating("accumulator_dtype", accumulator_dtype)
    zero = shards.checked("value_and_update", zero)
    return Step(fun, optimizer, has_aux, parts, dtype, check_positive("passes", passes), zero)


class Step:
    """What `value_and_update` returns."""

    def __init__(
        self,
        fun: Callable[..., Any],
        optimizer: Any,
        has_aux: bool,
        parts: Parts | None,
        dtype: np.dtype | None,
        passes: int,
        zero: Zero | None,
    ) -> None:
        self._fun, self._optimizer, self._has_aux = fun, optimizer, has_aux
        self._parts, self._dtype, self._passes, self._zero = parts, dtype, passes, zero
        functools.update_wrapper(self, fun)
        vars(self).pop("__wrapped__")  # whose signature has no state

    def __call__(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """One step; see `value_and_update`."""
        if nnx_is_used():
            from flax import nnx

            if isinstance(params, nnx.Module):
                return self._of_module(params, state, args, kwargs)
        value, params, state, _ = self._run(params, state, args, kwargs)
        return value, params, state

    def explain(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> UpdatePlan:
        """Which parameters are updated in the backward pass, and why others are not.

        Nothing is computed; arrays may be `jax.ShapeDtypeStruct`s.

        Args: those of the step.
        """
        found: list[UpdatePlan] = []
        if nnx_is_used():
            from flax import nnx

            if isinstance(params, nnx.Module):
                graph, held = nnx.split((params, state))

                def run_module(held: Any, args: Any, kwargs: Any) -> None:
                    model, optimizer = nnx.merge(graph, held)
                    self._of_module(model, optimizer, args, kwargs, found.append)

                jax.eval_shape(run_module, held, args, kwargs)
                return found[0]

        def run(params: Any, state: Any, args: Any, kwargs: Any) -> None:
            found.append(self._run(params, state, args, kwargs)[-1])

        _abstract(run, params, state, args, kwargs)
        return found[0]

    # ------------------------------------------------------------ implementation

    def _of_module(
        self, model: Any, optimizer: Any, args: Any, kwargs: Any, tell: Any = None
    ) -> Any:
        from flax import nnx

        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                "an NNX module is followed by its nnx.Optimizer, got "
                f"{described(optimizer)}; pass nnx.Optimizer(model, optimizer, wrt=nnx.Param)"
            )
        if optimizer.tx is not self._optimizer:
            raise ValueError(
                "the nnx.Optimizer was made with another optimizer than this step, of type "
                f"{type(optimizer.tx).__name__}; pass the same one to both"
            )
        filters = {0: optimizer.wrt}
        given, named = positional(self._fun, (model, *args), kwargs)
        state = created.in_its_form(
            nnx.as_pure(optimizer.opt_state),
            self._optimizer.init,
            nnx.as_pure(nnx.state(model, optimizer.wrt)),
        )
        if self._parts is None:
            call, own, positions = modules.pure(self._fun, given, (0,), filters, self._has_aux)
            (value, (after, aux)), params, state, plan = self._whole(
                call, True, own[0], state, own[1:], named
            )
            modules.write_back(given, positions, after)
            value = (value, aux) if self._has_aux else value
        else:
            value, params, state, plan = self._in_parts(given, named, state, filters)
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(nnx.as_pure(state)))
        optimizer.step[...] += 1
        if tell is not None:
            tell(plan)
        return value

    def _run(self, params: Any, state: Any, args: Any, kwargs: Any) -> Any:
        """Value, parameters and state after the step, and how it was done."""
        if self._parts is None:
            return self._whole(self._fun, self._has_aux, params, state, args, kwargs)
        leaves, tree = jax.tree.flatten(params)
        names = leaf_names(params, "params")
        leaves = list(map(_param, names, leaves))
        params = tree.unflatten(leaves)
        return self._in_parts((params, *args), kwargs, state, {})

    def _whole(
        self, fun: Any, has_aux: bool, params: Any, state: Any, args: Any, kwargs: Any
    ) -> Any:
        """The batch as it is."""
        leaves, tree = jax.tree.flatten(params)
        names = leaf_names(params, "params")
        leaves = [_param(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        rest, rest_tree = jax.tree.flatten((args, kwargs))
        is_traced = [isinstance(leaf, jax.Array) for leaf in rest]
        arrays = [leaf for leaf, flag in zip(rest, is_traced, strict=True) if flag]
        static: Any = None

        def flat(*given: Any) -> list[Any]:
            nonlocal static
            own = iter(given[len(leaves) :])
            full = [next(own) if flag else leaf for leaf, flag in zip(rest, is_traced, strict=True)]
            args, kwargs = rest_tree.unflatten(full)
            out = fun(tree.unflatten(given[: len(leaves)]), *args, **kwargs)
            value, aux = _parted(fun, out, has_aux)
            outs, out_tree = jax.tree.flatten(aux)
            is_array_out = [is_array(out) for out in outs]
            static = (
                out_tree,
                [None if flag else out for out, flag in zip(outs, is_array_out, strict=True)],
                is_array_out,
            )
            return [value, *(out for out, flag in zip(outs, is_array_out, strict=True) if flag)]

        # The function is written for arrays on the device; stacks on the host go there by layers.
        here = list(map(_jax.type_on_device, leaves))
        here = list(map(functools.partial(shards.as_read, self._zero), names, here))
        closed = jax.make_jaxpr(flat)(*here, *arrays)

        def seed(outs: Sequence[Any]) -> tuple[Any, Any, Total]:
            return jnp.ones((), outs[0].dtype), outs[0], lambda leaf, before, gradient: gradient

        trees = OnLeaves(self._optimizer, pure(tree, leaves), leaves, state)
        places = Places.of(self._zero, names, leaves, state)
        value = device_type(closed.out_avals[0], closed.out_avals[0].dtype)
        done = in_backward.run(
            Task(
                closed=closed,
                params=leaves,
                rest=arrays,
                state=trees.state_leaves,
                update=trees.update(value, places),
                before=[None] * len(leaves),
                seed=seed,
                gradient_types=places.types([device_type(leaf, leaf.dtype) for leaf in leaves]),
                passes=self._passes,
                places=places,
            )
        )
        value, *outs = done.outs
        out_tree, statics, flags = static
        own = iter(outs)
        aux = out_tree.unflatten(
            [next(own) if flag else out for out, flag in zip(statics, flags, strict=True)]
        )
        plan = _plan(done, leaves, names)
        value = (value, aux) if has_aux else value
        return value, tree.unflatten(done.params), trees.state_tree.unflatten(done.state), plan

    def _in_parts(self, given: Any, kwargs: Any, state: Any, filters: Mapping[int, Any]) -> Any:
        """Microbatches, the last of which updates."""
        assert self._parts is not None
        given, kwargs = positional(self._fun, given, kwargs)
        if 0 in there(self._fun, given, "batch_argnums", self._parts.batch_argnums):
            raise ValueError(_BATCH_IS_PARAMS)
        sink = Updating(
            self._dtype,
            None,
            self._zero,
            self._optimizer,
            state,
            self._passes,
            self._parts.microbatches,
        )
        result, call = accumulate(self._fun, self._parts, sink, given, kwargs, filters)
        done = result.held
        params = call.trees[0].unflatten(done.params)
        leaves, names = ([of[path] for path in call.diff] for of in (call.leaves, call.names))
        plan = _plan(done, leaves, names)
        _, tree = stored.flatten(state)
        return outputs(self._parts, result), params, tree.unflatten(done.state), plan


# ---------------------------------------------------------------- implementation


def _param(name: str, leaf: Any) -> jax.Array:
    is_number = is_array(leaf) or isinstance(leaf, float | complex)
    if not is_number or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        raise TypeError(
            f"{name} is {described(leaf)}, which has no gradient; pass a tree of floating-point "
            "arrays as the parameters, and what else the function reads as another argument"
        )
    return jnp.asarray(leaf)


def _parted(fun: Any, out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """The value, and what the function returns next to it."""
    name = getattr(fun, "__name__", "fun")
    aux = None
    if has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"has_aux=True wants {name} to return a pair (loss, aux), got "
                f"{described(out) if not isinstance(out, tuple) else f'{len(out)} values'}"
            )
        out, aux = out
    elif isinstance(out, tuple):
        raise TypeError(
            f"{name} returned {len(out)} values; pass has_aux=True if the first is the loss"
        )
    return real_loss(name, out.mean if isinstance(out, Weighted) else out), aux


def _plan(done: Done, params: Sequence[Any], names: Sequence[str]) -> UpdatePlan:
    update = done.update
    leaves = []
    for number, (leaf, name) in enumerate(zip(params, names, strict=True)):
        inside = number in update.by_row
        reason = update.why_not.get(number) or done.elsewhere.get(number) or _NOT_STACKED
        path = name.partition("/")[2].removesuffix("/value") or name
        leaves.append(
            UpdatedLeaf(path, leaf.size * leaf.dtype.itemsize, inside, "" if inside else reason)
        )
    if not update.by_row:
        listed = "; ".join(f"{leaf.path}: {leaf.reason}" for leaf in leaves[:3])
        listed = listed or "there are no parameters"
        warn(
            "value_and_update: no parameter is updated in the backward pass, so that nothing is "
            f"saved ({listed}).  Parameters of layers are stacked where these run in a "
            "jax.lax.scan (nn.scan, nnx.scan, jaxmem.scan)",
            JaxmemWarning,
        )
    return UpdatePlan(tuple(leaves), update.passes)


_BATCH_IS_PARAMS = (
    "batch_argnums names argument 0, the parameters; pass the positions of the batch among fun's "
    "arguments, 1 for the one after the parameters"
)
_NOT_STACKED = "it is not stacked over the layers of one scan that alone reads it"


def _abstract(run: Any, *args: Any) -> None:
    """Trace a function of trees in which some leaves are arrays, or types of arrays."""
    leaves, tree = jax.tree.flatten(args)
    flags = [is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    arrays = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]

    def flat(*given: Any) -> None:
        own = iter(given)
        full = [next(own) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        run(*tree.unflatten(full))

    jax.eval_shape(flat, *arrays)
