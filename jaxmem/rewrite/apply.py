"""Applies a policy to the layer stacks of any function: trace, find, replace, evaluate.

The function is traced to its jaxpr as it stands, whatever wrote it, and
evaluated with each stack bound to its policy.  Everything else is evaluated
equation by equation, so that values, random numbers and source lines are those
of the undecorated function.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax, policies, unrolled
from jaxmem.errors import JaxmemWarning, NoStackWarning, check_positive, noting, warn
from jaxmem.parallel.carries import Axes, SplitCarries, check_axes
from jaxmem.plans.choose import choose, needs_sizes
from jaxmem.plans.plan import Plan
from jaxmem.policies import Auto, ByLayer, LayerPolicy, NoRemat, Policy, Scans, Sqrt
from jaxmem.rewrite import around, check, streamed
from jaxmem.solve.problem import Problem
from jaxmem.stacked import Form
from jaxmem.stacked.stack import Stack, native
from jaxmem.trace import cache as traces
from jaxmem.trace import casts, context, find
from jaxmem.trace.cache import Call, Trace
from jaxmem.trace.find import LayerStack, Where
from jaxmem.trace.layer import Body, NoReverseMode

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a decorator was told.

    Attributes:
      policy: for the stacks.
      where: which of several stacks; a predicate on `LayerStack`, or an index.
      min_length: shorter scans are not taken for stacks.
      partition: mesh axes over which carries are stored split.
    """

    policy: Policy | Plan
    where: Where | None = None
    min_length: int = 1
    partition: Axes | None = None

    def __post_init__(self) -> None:
        check_positive("min_length", self.min_length)
        check_axes(self.partition)
        if not (self.where is None or callable(self.where) or _is_index(self.where)):
            raise TypeError(
                "where takes the index of a stack or a predicate on jaxmem.LayerStack, got "
                f"{self.where!r}"
            )


# ---------------------------------------------------------------- API


def rewritten(
    fn: Callable[..., Any], choice: Choice, call: Call | None = None
) -> Callable[..., Any]:
    """`fn` with the policy applied to its outermost scans.

    Arguments that are jax arrays are traced; all others are static by
    themselves, as are outputs that are no arrays.  Arrays on the host are traced as
    if they were on the device, and go there layer by layer (`rewrite.streamed`).

    Args:
      call: how a call is known again that need not be traced; None to trace each.
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(jax.config, "jax_disable_jit", False):
            context.note_region(context.policy_instead(choice.policy))
            return fn(*args, **kwargs)  # scans are Python loops then, with nothing to find
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [isinstance(leaf, jax.Array) for leaf in leaves]
        static_out: Any = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal static_out
            given = iter(arrays)
            full = [next(given) if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, full)
            outs, out_tree = jax.tree.flatten(fn(*args, **kwargs))
            is_array = [isinstance(out, jax.Array | np.ndarray) for out in outs]
            static_out = (
                out_tree,
                [None if a else o for a, o in zip(is_array, outs, strict=True)],
                is_array,
            )
            return [out for a, out in zip(is_array, outs, strict=True) if a]

        arrays = [leaf for t, leaf in zip(traced, leaves, strict=True) if t]
        key = None if call is None else call.key(tree, leaves, traced)
        known = None if call is None or key is None else traces.known(call, key)
        if known is None:
            with noting() as warned:
                closed = _traced(flat, arrays, choice)
                label = _describe(fn)
                if call is None or key is None or not _is_for_all(closed, static_out[1]):
                    known = Trace(_each(closed, choice, label), static_out)
                else:
                    each = _alike(closed, arrays, choice, label)
                    known = Trace(each, static_out, call.look(), tuple(warned))
                    call.traces.put(key, known)
        found = known.run(arrays)
        out_tree, statics, is_array = known.rest
        outs = iter(found)
        return jax.tree.unflatten(
            out_tree, [next(outs) if a else s for a, s in zip(is_array, statics, strict=True)]
        )

    return run


def _is_for_all(closed: ClosedJaxpr, statics: Sequence[Any]) -> bool:
    """Whether what was traced for one call says what others of its kind do."""
    return not any(map(_jax.is_tracer, closed.consts)) and all(map(traces.is_value, statics))


def _each(closed: ClosedJaxpr, choice: Choice, label: str) -> Callable[[Sequence[Any]], list[Any]]:
    """From arrays to arrays, what the policy makes of it being decided at each call."""

    def run(arrays: Sequence[Any]) -> list[Any]:
        outs = evaluate(closed, arrays, choice, label)
        return list(map(_jax.as_array, outs, closed.out_avals))

    return run


def _alike(
    closed: ClosedJaxpr, arrays: Sequence[Any], choice: Choice, label: str
) -> Callable[[Sequence[Any]], list[Any]]:
    """The same, decided once where it can be; what jax makes of it is then found again as well."""
    each = _each(closed, choice, label)
    if isinstance(context.policy_instead(choice.policy), ByLayer):
        return each  # plans are looked up, and regions planned, where they are differentiated
    if not _jax.can_be_recomputed(closed):
        return each
    planned = jax.make_jaxpr(lambda *arrays: each(arrays))(*arrays)
    jitted: dict[int, Any] = {}

    def special(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if not _is_one(eqn):
            return None
        # A loop is compiled as a whole anyway; so its derivative is found again as well.
        if id(eqn) not in jitted:
            jitted[id(eqn)] = jax.jit(functools.partial(_jax.bound, eqn))
        return jitted[id(eqn)](*operands)

    def run(arrays: Sequence[Any]) -> list[Any]:
        outs = _jax.evaluate(planned, arrays, special)
        return list(map(_jax.as_array, outs, planned.out_avals))

    return run


def _is_one(eqn: Any) -> bool:
    """Whether an equation is compiled as a whole, and not operation by operation."""
    if _jax.checkpointed_by(eqn) is not None:
        # Where its operations run one by one jax.checkpoint is told to use keys twice.
        return _jax.keys_are_checked()
    return _jax.is_planned(eqn) and not (_jax.is_stack(eqn) and eqn.params["stack"].is_part)


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], choice: Choice, label: str) -> list[Any]:
    """Evaluate a jaxpr with the policy applied to its stacks.

    Args:
      closed: of arrays on the device.
      args: some of them may be on the host.
    """
    own = choice.policy
    choice = dataclasses.replace(choice, policy=context.policy_instead(own))
    proposed = choice.policy.partition if isinstance(choice.policy, ByLayer) else ""
    context.note_region(choice.policy)
    if isinstance(choice.policy, Auto):
        _warn_unfilled(label)
    keeps_all = isinstance(choice.policy, NoRemat | Auto)
    is_plain = keeps_all and choice.partition is None
    if is_plain and not any(map(_jax.is_on_host, args)):
        return _jax.evaluate(closed, args)
    found = find.find(closed)
    if is_plain:
        choice = dataclasses.replace(choice, policy=NoRemat())
        return _replaced(closed, args, _chosen(found, choice, label), NoRemat(), found)
    check.gradients(found, label)
    chosen = _chosen(found, choice, label)
    scans = _scans(closed, found, chosen, choice, label)
    if scans == "checkpointed":
        closed = _each_turn_again(closed, chosen)
    if scans != "stacks":
        chosen = []
    if choice.partition is not None and not chosen:
        check.partition(choice.partition, label)
    if keeps_all and not chosen:
        return _replaced(closed, args, [], NoRemat(), found)
    check.names([as_stack(eqn, choice.policy) for _, eqn in chosen], closed, choice.policy)
    if not chosen:
        if any(_jax.is_planned(eqn) for _, eqn in found.stacks):
            if choice.policy is own:
                check.spent(found.stacks, own, label)
            # Planned already, by a decorator further in.
            return _replaced(closed, args, [], own, found)
        whole = args
        args = list(map(_jax.on_device, args))
        if not _jax.can_be_recomputed(closed):
            outs = _jax.evaluate(closed, args)
            return context.when_differentiated(outs, lambda: check.code(label))
        if isinstance(choice.policy, ByLayer):
            code, given = unrolled.keys_outside(casts.opened(closed), args)
            outs = unrolled.run_region(code, _jax.used_by(code, given), choice.policy, label)
            return _jax.made_by(code, given, outs)
        why_uncut = ""
        if isinstance(choice.policy, Sqrt):
            code, given = unrolled.keys_outside(casts.opened(closed), args)
            try:
                cut = unrolled.by_sqrt(code, choice.policy)
            except NoReverseMode as error:
                cut, why_uncut = None, str(error).split(". ")[0]
            if cut is not None:
                outs = unrolled.run(*cut, _jax.used_by(code, given))
                return _jax.made_by(code, given, outs)
        return _checkpoint_whole(closed, whole, choice, found, label, why_uncut)
    check.effect(choice.policy)
    for info, eqn in () if keeps_all else chosen:
        check.stack(info, eqn, choice.policy)
    check.twice(chosen)
    return _replaced(closed, args, chosen, choice.policy, found, choice.partition, proposed)


def _scans(
    closed: ClosedJaxpr,
    found: find.Found,
    chosen: Sequence[tuple[LayerStack, Any]],
    choice: Choice,
    label: str,
) -> Scans:
    """What the scans in a function are that a policy is for."""
    if not chosen or choice.where is not None or choice.partition is not None:
        return "stacks"
    if any(_jax.is_planned(eqn) for _, eqn in found.stacks):
        return "stacks"
    if not isinstance(choice.policy, ByLayer):
        around.warn_of_layers(closed, chosen, choice.policy, label)
    elif _jax.can_be_recomputed(closed):
        return choice.policy.scans_are(closed, chosen)
    return "stacks"


def _each_turn_again(closed: ClosedJaxpr, chosen: Sequence[tuple[LayerStack, Any]]) -> ClosedJaxpr:
    """A function whose scans keep what each turn begins with, and compute the rest of it again."""
    again = policies.full()
    found = find.Found(list(chosen), 0, 0)
    return _jax.trace(lambda *args: _replaced(closed, args, chosen, again, found), closed.in_avals)


def _replaced(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    chosen: Sequence[tuple[LayerStack, Any]],
    policy: Policy | Plan,
    found: find.Found,
    partition: Axes | None = None,
    proposed: str = "",
) -> list[Any]:
    """Evaluate a jaxpr, these of its stacks under a policy.

    Args:
      partition: mesh axes over which their carries are split.
      proposed: where there are none, an axis for those that it can split.
    """
    targets = {id(eqn): info for info, eqn in chosen}
    given = args
    if any(map(_jax.is_on_host, args)):
        # Stacks that have their policy already read rows as well.
        targets |= {id(eqn): info for info, eqn in found.stacks if _jax.is_planned(eqn)}
        args = streamed.placed(closed, args, targets)

    def special(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if id(eqn) not in targets:
            return through(eqn, operands, targets, special)
        if not _jax.is_planned(eqn):
            stack = as_stack(eqn, policy, targets[id(eqn)], is_one=len(chosen) == 1)
            if partition is not None:
                return _run_partitioned(stack, partition, operands)
            if proposed and SplitCarries.can_split(stack.form.body, proposed):
                return _run_partitioned(stack, proposed, operands)
            return _run(stack, operands)
        if _jax.is_stack(eqn) or not any(map(_jax.is_on_host, operands)):
            return None
        return _run(as_stack(eqn, NoRemat(), targets[id(eqn)]), operands)

    outs = _jax.evaluate(closed, args, special)
    # What is returned as it was given is not moved.
    same = dict(zip(closed.jaxpr.invars, given, strict=True))
    return [
        same.get(atom, out) if _jax.is_var(atom) else out
        for atom, out in zip(closed.jaxpr.outvars, outs, strict=True)
    ]


def _traced(flat: Callable[..., Any], arrays: Sequence[Any], choice: Choice) -> ClosedJaxpr:
    """The jaxpr of a region; one that is planned has the code of regions further in for its own.

    Planned apart they would change what it computes, and with it what its own plan is for.
    """
    outermost = not context.is_inside_region()
    given = [_jax.type_on_device(a) if _jax.is_on_host(a) else a for a in arrays]
    if not (outermost and isinstance(context.policy_instead(choice.policy), ByLayer)):
        return jax.make_jaxpr(flat)(*given)
    with context.inside_region():
        closed = jax.make_jaxpr(flat)(*given)
    stacks = find.find(closed).stacks
    if stacks and all(_jax.is_planned(eqn) for _, eqn in stacks):
        return jax.make_jaxpr(flat)(*given)  # regions further in have all stacks; code as well
    return closed


_UNFILLED: set[str] = set()


def _warn_unfilled(label: str) -> None:
    if label not in _UNFILLED:
        _UNFILLED.add(label)
        warn(
            f"{label} is under remat_auto, and no plan is in force: everything is kept.  Find one "
            "with jaxmem.fit(step, ..., budget=...) and run its .step, or apply a saved one with "
            "jaxmem.use_plan(plan)",
            JaxmemWarning,
        )


# ---------------------------------------------------------------- choosing


def _chosen(found: find.Found, choice: Choice, label: str) -> list[tuple[LayerStack, Any]]:
    stacks = [
        (info, eqn)
        for info, eqn in found.stacks
        if info.length >= choice.min_length and not _jax.is_planned(eqn)
    ]
    where = choice.where
    if where is None or not stacks:
        return stacks
    if callable(where):
        picked = [(info, eqn) for info, eqn in stacks if where(info)]
    else:
        picked = [(info, eqn) for info, eqn in stacks if info.index == where]
    if not picked:
        listing = "\n".join(f"  {info}" for info, _ in stacks)
        raise ValueError(
            f"where={where!r} chooses none of the stacks of {label}; there are\n{listing}"
        )
    return picked


def as_stack(
    eqn: Any, policy: Policy | Plan, info: LayerStack | None = None, is_one: bool = True
) -> Stack:
    """A scan equation as a stack under this policy.

    Args:
      is_one: whether it is the only one in its function.
    """
    scan = _jax.scan_parts(eqn)
    body = Body(scan.body, scan.num_consts, scan.num_carry)
    form = Form(body, scan.length, scan.reverse, scan.unroll, own_arrays=not is_one)
    return Stack(form, policy, info)


def _run_partitioned(stack: Stack, axes: Axes, operands: list[Any]) -> list[Any]:
    """A stack whose carries are split over mesh axes between its layers."""
    split = SplitCarries.of(stack.form.body, axes, stack.called)
    form = dataclasses.replace(stack.form, body=split.body)
    consts, carry, xs = form.body.split_in(operands)
    stack = dataclasses.replace(stack, form=form, is_partitioned=True)
    outs = _run(stack, [*consts, *split.placed(carry), *xs])
    count = form.body.num_carry
    return [*split.gathered(outs[:count]), *outs[count:]]


def _run(stack: Stack, operands: list[Any]) -> list[Any]:
    """A stack as the scan that jax knows, if the policy alone says which; else bound to it."""
    on_host = any(map(_jax.is_on_host, operands))
    # Carries that jax's own scan keeps are gathered for it.
    if not (on_host or stack.is_partitioned or needs_sizes(stack.policy)):
        plan = choose(stack.policy, Problem(stack.form.length))
        if run := native(plan):
            context.note_plan(stack.policy, plan)
            return run(stack.form, operands)
    return _jax.bind_stack(stack, operands)


def _checkpoint_whole(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    choice: Choice,
    found: find.Found,
    label: str,
    why_uncut: str = "",
) -> list[Any]:
    short = [info for info, _ in found.stacks]
    met = f"{found.equations} equations were searched"
    if short:
        met += f", and only stacks shorter than min_length={choice.min_length} met: {short[0]}"
    elif found.skipped:
        met += f", and {found.skipped} scans without anything to differentiate met"
    if isinstance(choice.policy, Plan):
        raise ValueError(
            f"a plan for {choice.policy.length} layers was given for {label}, which has no layer "
            f"stack ({met}); a stack is a jax.lax.scan over layers (nn.scan, nnx.scan, jaxmem.scan)"
        )
    cut = "" if isinstance(choice.policy, Sqrt) else "; jaxmem.remat_sqrt cuts code without a scan"
    if why_uncut:
        cut = f".  It is not cut, as part of it has no reverse mode in jax: {why_uncut}"
    if not found.takes_gradients:  # a reader has been told that by itself
        warn(
            f"no layer stack in {label}: {met}.  A stack is a jax.lax.scan over layers (nn.scan, "
            "nnx.scan, jaxmem.scan); a Python loop over layers is none.  The whole call is "
            "checkpointed once instead.  If this is one layer of a stack, scan it with "
            f"jaxmem.scan, jaxmem.linen.scan or jaxmem.nnx.scan{cut}",
            NoStackWarning,
        )
    layer = choice.policy if isinstance(choice.policy, LayerPolicy) else None
    policy = layer.jax_policy if layer is not None else None

    def run(*args: Any) -> list[Any]:
        return _jax.evaluate(closed, list(map(_jax.on_device, args)))

    return jax.checkpoint(run, policy=policy)(*args)


def _is_index(where: Any) -> bool:
    return isinstance(where, int | np.integer) and not isinstance(where, bool)


def _describe(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    # Never a repr, which may have an address in it: saved plans have this name.
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if inspect.ismethod(fn) and fn.__module__.startswith("flax."):  # a module's `apply`
        fn, name = type(fn.__self__), f"{type(fn.__self__).__name__}.{fn.__name__}"
    try:
        fn = inspect.unwrap(fn) if hasattr(fn, "__qualname__") else type(fn)
        line = inspect.getsourcelines(fn)[1]
        return f"{name} ({inspect.getsourcefile(fn)}:{line})"
    except (TypeError, OSError):
        return name


# ---------------------------------------------------------------- replacing


def _holds(closed: ClosedJaxpr, targets: Collection[int]) -> bool:
    return any(
        id(eqn) in targets or any(_holds(sub, targets) for sub in find.subjaxprs(eqn))
        for eqn in closed.jaxpr.eqns
    )


def through(
    eqn: Any, operands: list[Any], targets: Collection[int], special: Any
) -> list[Any] | None:
    """Evaluate a call that has stacks in it, rebuilt around the rewritten function.

    Args:
      eqn, operands: any equation, what it is applied to.
      targets: ids of the equations that are stacks.
      special: for `evaluate`, inside the call.

    Returns:
      The results; None if the equation is no such call.
    """
    inner = find.subjaxprs(eqn)
    if not any(_holds(sub, targets) for sub in inner):
        return None
    params = eqn.params
    calls = [functools.partial(_call, sub, special) for sub in inner]
    if eqn.primitive.name == "cond":
        index, *rest = operands
        return lax.switch(index, calls, *rest)
    if eqn.primitive.name == "shard_map":
        return jax.shard_map(
            calls[0],
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )(*operands)
    if (checkpointed := _jax.checkpointed_by(eqn)) is not None:
        barrier = params.get("prevent_cse", True)
        return jax.checkpoint(calls[0], prevent_cse=barrier, policy=checkpointed[0])(*operands)
    # A jit inside a trace is only a name, unless it constrains shardings.
    operands = _constrained(operands, params.get("in_shardings"))
    return _constrained(calls[0](*operands), params.get("out_shardings"))


def _call(closed: ClosedJaxpr, special: Any, *args: Any) -> list[Any]:
    return _jax.evaluate(closed, args, special)


def _constrained(values: list[Any], shardings: Any) -> list[Any]:
    if shardings is None:
        return values
    return [
        lax.with_sharding_constraint(value, sharding)
        if isinstance(sharding, jax.sharding.Sharding)
        else value
        for value, sharding in zip(values, shardings, strict=True)
    ]
