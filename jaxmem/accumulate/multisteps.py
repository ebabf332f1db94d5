"""Gradients accumulated over several calls of an optax optimizer.

optax has such a wrapper, `optax.MultiSteps`, and this one can stand in its
place: where that one is right, the updates are the same, bit for bit.  It
differs where the mean has weights, where numbers are not finite, in what the
wrapped optimizer is given (the mean as accumulated, not rounded to the
gradients' dtype), in when it runs (only where a window ends) and in memory.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxmem.accumulate import extra_args, shards
from jaxmem.accumulate.stepped import stepped
from jaxmem.accumulate.trees import at_least_float32, described, difference, floating, sum_dtype
from jaxmem.accumulate.weighted import checked_weight, ratio
from jaxmem.parallel.zero import Zero

# ---------------------------------------------------------------- types


class MultiStepsState(NamedTuple):
    """What `MultiSteps` remembers: the fields of optax's state of that name, and more.

    Attributes:
      mini_step: int32, microbatches in the window so far.
      gradient_step: int32, how often the wrapped optimizer has run.
      inner_opt_state: of the wrapped optimizer.
      acc_grads: the mean (or sum) over the window so far; zeros where a window begins.
      skip_state: what `should_skip_update_fn` returned with its verdict.
      weight: float32 (float64 with such an accumulator), the sum of the weights in the window
        so far.
      skipped: int32, microbatches skipped since the beginning.
      updated: bool, whether the wrapped optimizer ran in the last call.
      extra_args: for each accumulated extra argument, its weighted sum and the weight.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    skip_state: Any
    weight: jax.Array
    skipped: jax.Array
    updated: jax.Array
    extra_args: dict[str, Any]


# ---------------------------------------------------------------- API


class MultiSteps:
    """An optax optimizer that steps once for several microbatches, on their exact mean gradient.

        tx = jaxmem.MultiSteps(optax.adamw(3e-4), every_k_schedule=8)
        state = tx.init(params)
        updates, state = tx.update(grads, state, params, weight=tokens)

    Until a window of k microbatches is full the updates are zeros and the
    wrapped optimizer does not run; with the last one it gets their mean.

    The end of an epoch rarely ends a window.  What has been accumulated goes
    out with `emit=`, a bool that may be traced:

        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            params, state = step(params, state, batch, last)    # update(..., emit=last)

    Args:
      opt: any optax optimizer.
      every_k_schedule: microbatches in a window: a whole number of at least 1,
        or a function from `gradient_step` to one, called in every update.
      use_grad_mean: the mean; False for the sum (of weight × gradient, with weights).
      should_skip_update_fn: as in optax, for instance `optax.skip_not_finite`: a
        function of (gradients, gradient_step, params) that returns whether to
        leave this microbatch out, and a tree to remember.  One left out changes
        nothing, and the window is as long as if it had never been.
      accumulator_dtype: what the gradients are summed in.  None takes each
        parameter's own.  Parameters of 64 bits keep theirs.
      accumulated_args: names of the extra arguments of `update` that the wrapped
        optimizer gets as their mean over the window, by the same weights: by
        default `value`, a scalar.  A mapping gives an example of each, if it is not
        a scalar, or None for one of which the last is meant.
      zero: the `jaxmem.Zero` by which training state is split over devices: the accumulator is in
        shards, and gradients are reduce-scattered into it.  Begin with ``zero.init(tx, params)``,
        and step with `jaxmem.apply_gradients`, which takes `zero=`, too.

    Raises:
      TypeError: `opt` is no optimizer, or a number is none.
      ValueError: k is less than 1, or the accumulator's dtype is not floating.

    Memory: one accumulator of the parameters' size in `accumulator_dtype`, and
    nothing else, where the state is donated.  Skipping needs all gradients of
    a microbatch at once before any may be added.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> tx = jaxmem.MultiSteps(optax.sgd(1.0), 2)
    >>> state = tx.init(jnp.zeros(()))
    >>> _, state = tx.update(jnp.float32(1.0), state, weight=4)
    >>> updates, state = tx.update(jnp.float32(6.0), state, weight=16)
    >>> float(updates), bool(tx.has_updated(state))
    (-5.0, True)
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[Any], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[..., tuple[Any, Any]] | None = None,
        accumulator_dtype: Any = jnp.float32,
        *,
        accumulated_args: Sequence[str] | Mapping[str, Any] = ("value",),
        zero: Zero | None = None,
    ) -> None:
        if not (callable(getattr(opt, "init", None)) and callable(getattr(opt, "update", None))):
            raise TypeError(
                f"MultiSteps wraps an optax optimizer, such as optax.adam(1e-3), got "
                f"{described(opt)}"
            )
        self._opt = optax.with_extra_args_support(opt)
        if callable(every_k_schedule):
            self._schedule = every_k_schedule
        else:
            every = _window("every_k_schedule", every_k_schedule)
            self._schedule = lambda gradient_step: every
        self._use_grad_mean = use_grad_mean
        self._should_skip = should_skip_update_fn
        self._dtype = floating("accumulator_dtype", accumulator_dtype)
        self._examples = extra_args.examples(accumulated_args)
        self._zero = shards.checked("MultiSteps", zero)

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped optimizer."""
        return self._opt

    def init(self, params: Any) -> MultiStepsState:
        """The state before the first microbatch."""

        def zero() -> jax.Array:  # another one each time: the state may be donated
            return jnp.zeros((), jnp.int32)

        skip_state: Any = ()
        if self._should_skip is not None:
            skip_state = self._verdict(jax.tree.map(jnp.zeros_like, params), zero(), params)[1]
        acc_grads = jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf, dtype=sum_dtype(leaf, self._dtype)), params
        )
        dtype = at_least_float32(*(leaf.dtype for leaf in jax.tree.leaves(acc_grads)))
        return MultiStepsState(
            mini_step=zero(),
            gradient_step=zero(),
            inner_opt_state=self._opt.init(params),
            acc_grads=shards.scattered(self._zero, acc_grads),
            skip_state=skip_state,
            weight=jnp.zeros((), jnp.finfo(dtype).dtype),
            skipped=zero(),
            updated=jnp.zeros((), jnp.bool_),
            extra_args=extra_args.zero_sums(self._examples),
        )

    def update(
        self,
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        weight: Any = None,
        emit: Any = None,
        **others: Any,
    ) -> tuple[Any, MultiStepsState]:
        """Take in the gradient of one microbatch; zeros, or the optimizer's updates.

        Args:
          updates: the gradient of the microbatch's mean loss.
          state: as `init` or the last `update` returned it; it may be donated.
          params: if the wrapped optimizer wants them.
          weight: how much the microbatch counts, for instance its number of
            tokens; None counts as 1.  One of weight 0 fills its place in the
            window and changes nothing, even if its gradient is NaN.  It is one
            number: across steps a loss of several `Weighted` terms, each with
            a denominator of its own, is exact only where these are in one proportion in all
            microbatches; else put the whole batch in one `jaxmem.value_and_grad`.
          emit: also end the window here, full or not.
          others: extra arguments for the wrapped optimizer.

        Returns:
          The updates, of the dtypes that the wrapped optimizer gives for these
          gradients, and the state.  A window without any weight ends without a
          step of the optimizer.

        Raises:
          TypeError, ValueError: weight, emit, gradients or extra arguments
            cannot be; the text says which and why.
        """
        _check_state("MultiSteps.update", state)
        if found := difference(updates, state.acc_grads, ("the gradient", "the state")):
            raise ValueError(
                f"MultiSteps.update: {found}; pass gradients of the parameters that init was given"
            )
        updates = shards.scattered(self._zero, updates)
        length = _window("every_k_schedule(gradient_step)", self._schedule(state.gradient_step))
        if weight is not None:
            weight = checked_weight("MultiSteps.update: weight", weight, state.weight.dtype)
        skip, skip_state = self._verdict(updates, state.gradient_step, params)
        # What is left out is left out by `where`: 0 × NaN would be NaN.
        counts = None if skip is None else ~skip
        if weight is not None:
            counts = weight != 0 if counts is None else counts & (weight != 0)

        total = _choose(counts, state.weight + (1 if weight is None else weight), state.weight)
        add = functools.partial(self._added, before=state.weight, weight=weight)
        mean = jax.tree.map(
            lambda acc, leaf: _choose(counts, add(acc, leaf), acc), state.acc_grads, updates
        )
        sums, passed = self._extra_args(others, state.extra_args, weight, counts)

        mini_step = optax.safe_increment(state.mini_step)
        if skip is not None:
            mini_step = jnp.where(skip, state.mini_step, mini_step)
        ends = mini_step >= length
        if emit is not None:
            ends = ends | _flag("MultiSteps.update: emit", emit)
        steps = ends & (total != 0)  # a NaN of a weight goes on to where it is seen
        changes, mean, inner = stepped(
            self._opt, steps, updates, mean, state.inner_opt_state, params, passed
        )

        return shards.scattered(self._zero, changes), MultiStepsState(
            mini_step=jnp.where(ends, 0, mini_step),
            gradient_step=jnp.where(
                steps, optax.safe_increment(state.gradient_step), state.gradient_step
            ),
            inner_opt_state=inner,
            acc_grads=shards.scattered(self._zero, mean),
            skip_state=skip_state,
            weight=jnp.where(ends, 0, total),
            skipped=(
                state.skipped
                if skip is None
                else jnp.where(skip, optax.safe_increment(state.skipped), state.skipped)
            ),
            updated=steps,
            extra_args=jax.tree.map(lambda leaf: jnp.where(ends, 0, leaf), sums),
        )

    def has_updated(self, state: MultiStepsState) -> jax.Array:
        """Whether the last call of `update` ran the wrapped optimizer: a bool array."""
        _check_state("MultiSteps.has_updated", state)
        return state.updated

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """The same as a pair of functions, for `optax.chain` and the like."""
        return optax.GradientTransformationExtraArgs(
            init=self.init,
            update=self.update,  # pyright: ignore[reportArgumentType]
        )

    def _verdict(self, updates: Any, gradient_step: Any, params: Any) -> tuple[Any, Any]:
        """Whether to skip, None where nobody asks, and what to remember of it."""
        if self._should_skip is None:
            return None, ()
        found = self._should_skip(updates, gradient_step, params)
        pair = isinstance(found, tuple | list) and len(found) == 2
        if not pair or not _is_flag(found[0]):
            raise ValueError(
                "should_skip_update_fn must return a bool without axes and a tree to remember, got "
                + (f"{described(found[0])} for the bool" if pair else described(found))
            )
        return jnp.asarray(found[0]), found[1]

    def _added(self, acc: jax.Array, leaf: Any, *, before: jax.Array, weight: Any) -> jax.Array:
        dtype = at_least_float32(acc.dtype, jnp.result_type(leaf))
        old, new = acc.astype(dtype), jnp.asarray(leaf, dtype)
        if weight is None:
            # A sum of its own for each leaf, as in optax: the compiler multiplies by the
            # reciprocal of a divisor that is used once, and that rounds otherwise.
            after = old + ((new - old) / (before + 1).astype(dtype) if self._use_grad_mean else new)
        elif self._use_grad_mean:
            weight = weight.astype(jnp.finfo(dtype).dtype)
            share = ratio(weight, before.astype(weight.dtype) + weight)
            after = old + (new - old) * share.astype(dtype)
        else:
            after = old + new * weight.astype(dtype)
        return after.astype(acc.dtype)

    def _extra_args(
        self, given: dict[str, Any], sums: extra_args.Sums, weight: Any, counts: Any
    ) -> tuple[extra_args.Sums, dict[str, Any]]:
        """The sums of the window so far, and what the wrapped optimizer gets."""
        sums, passed = dict(sums), dict(given)
        for name, value in given.items():
            if value is None:
                continue
            if name in sums:
                new = extra_args.added(name, sums[name], value, weight)
                sums[name] = jax.tree.map(functools.partial(_choose, counts), new, sums[name])
                passed[name] = extra_args.mean(sums[name])
            elif name not in self._examples:
                extra_args.check_no_mean(name, value)
        return sums, passed


# ---------------------------------------------------------------- implementation


def _choose(flag: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` where `flag` is true, or is None."""
    return new if flag is None else jnp.where(flag, new, old)


def _check_state(where: str, state: Any) -> None:
    """Raises `TypeError` if it is not a state of ours."""
    if isinstance(state, MultiStepsState):
        return
    if isinstance(state, optax.MultiStepsState):
        raise TypeError(
            f"{where}: the state is optax's own MultiStepsState, in which the weights of the "
            "window are missing; go on from it with tx.init(params)._replace(**state._asdict(), "
            "weight=jax.numpy.float32(state.mini_step)), or begin anew with tx.init(params)"
        )
    raise TypeError(
        f"{where}: the state must be what MultiSteps.init or the last update returned, got a "
        f"{type(state).__name__}"
    )


def _window(what: str, length: Any) -> Any:
    """The number of microbatches, checked as far as it is known.

    Raises:
      TypeError: it is not a number, or has axes.
      ValueError: it is known, and less than 1 or not whole.
    """
    whole = f"{what} must be a whole number of at least 1"
    real = not isinstance(length, bool | np.bool_) and isinstance(
        length, int | float | np.number | np.ndarray | jax.Array
    )
    if not real or jnp.shape(length) or not jnp.issubdtype(jnp.result_type(length), np.number):
        raise TypeError(f"{whole}, got {described(length)}")
    if isinstance(length, Tracer):
        # Schedules of optax give whole numbers as floats.
        if jnp.issubdtype(length.dtype, jnp.floating):
            length = jnp.ceil(length)
        return length.astype(jnp.int32)
    if not np.isfinite(length) or length != int(length) or length < 1:
        raise ValueError(f"{whole}, got {length}")
    return int(length)


def _flag(what: str, flag: Any) -> Any:
    if not _is_flag(flag):
        raise TypeError(f"{what} must be a bool without axes, or None, got {described(flag)}")
    return flag


def _is_flag(value: Any) -> bool:
    array = isinstance(value, jax.Array | np.ndarray) and not value.shape
    return isinstance(value, bool | np.bool_) or (array and value.dtype == jnp.bool_)
