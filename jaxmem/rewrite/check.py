"""What is wrong with a policy on the stacks at hand, or without effect: said before it runs."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.errors import NoEffectWarning, OffloadWarning, warn
from jaxmem.plans.choose import choose, needs_sizes
from jaxmem.plans.plan import Plan
from jaxmem.policies import Either, FromJax, LayerPolicy, Offload, Policy
from jaxmem.solve.problem import Problem
from jaxmem.stacked import applied
from jaxmem.stacked.stack import Stack
from jaxmem.trace import casts, context, find
from jaxmem.trace.find import Found, LayerStack
from jaxmem.trace.layer import NoReverseMode

_EFFECTS = "io_callback, ordered callbacks, a Ref that is read or written"


def stack(info: LayerStack, eqn: Any, policy: Policy | Plan) -> None:
    """That the policy can be applied to this stack.

    Raises:
      ValueError: a plan for another length, or a layer that must not run twice.
    """
    if not isinstance(info.length, int):
        raise ValueError(
            f"{info}: the number of layers is the symbol {info.length}, and a plan needs it as a "
            "number; export with a fixed length (other dimensions may be symbols)"
        )
    if isinstance(policy, Plan):
        try:
            choose(policy, Problem(info.length))
        except ValueError as error:
            raise ValueError(f"{info}: {error}") from None
    if not _jax.can_be_recomputed(_jax.scan_parts(eqn).body):
        raise ValueError(
            f"{info}: the layer has side effects ({_EFFECTS}) that must not happen twice, so it "
            "cannot be recomputed; move them out of the layer, use jax.debug.callback or "
            "jax.pure_callback, or leave the stack out with where="
        )


def partition(axes: Any, label: str) -> None:
    """That carries can be split; called where there is no stack."""
    warn(
        f"partition={axes!r} does nothing in {label}: it splits what one layer of a stack passes "
        "to the next, and no stack is there.  A stack is a jax.lax.scan over layers (nn.scan, "
        "nnx.scan, jaxmem.scan)",
        NoEffectWarning,
    )


def code(label: str) -> None:
    """That code without a stack can be recomputed; called where it cannot.

    Raises:
      ValueError: always.
    """
    raise ValueError(
        f"{label} has side effects ({_EFFECTS}) that must not happen twice, so nothing in it can "
        "be recomputed; move them out, or use jax.debug.callback or jax.pure_callback"
    )


def names(stacks: Sequence[Stack], whole: ClosedJaxpr, policy: Policy | Plan) -> None:
    """That every name that the policy speaks of is given in one of the stacks.

    Where there is no stack the policy is for the whole function, and so are the names.

    Raises:
      ValueError: one is not; the message lists those that are.
    """
    layer = _of_layer(policy)
    if not isinstance(layer, Offload | LayerPolicy) or not layer.names:
        return
    bodies = [stack.form.body.jaxpr for stack in stacks] or [whole]
    there = set().union(*map(find.names_in, bodies))
    if set(layer.names) - there:
        # The forward rule of a custom_vjp gives its names only once it is differentiated.
        for stack in stacks:
            operands = [_jax.has_tangent(aval) for aval in stack.form.body.jaxpr.in_avals]
            with contextlib.suppress(NoReverseMode):
                there |= find.names_in(stack.layer(operands).linearised)
    if missing := sorted(set(layer.names) - there):
        known = ", ".join(map(repr, sorted(there))) or "none at all"
        raise ValueError(
            f"the policy speaks of {', '.join(map(repr, missing))}, but nothing in the layers has "
            f"that name; the names in them are: {known}.  Names are given with "
            "jax.ad_checkpoint.checkpoint_name(value, name)"
        )


def effect(policy: Policy | Plan) -> None:
    """Warns where the policy will do nothing, or another thing than it says."""
    layer = _of_layer(policy)
    to_host = isinstance(layer, Offload) or (isinstance(policy, Plan) and policy.carries == "host")
    to_host |= isinstance(layer, LayerPolicy) and layer.offloads
    if to_host and context.platform() == "cpu":
        warn(
            "offload: on the cpu backend, the default here, device and host memory are one, so "
            "nothing is saved; the numbers are the same",
            OffloadWarning,
        )
    if getattr(jax.config, "jax_remat3", False) and _is_lost_on_new_checkpoint(layer, to_host):
        warn(
            f'under the flag jax_remat3, jax {jax.__version__} takes {layer} for "recompute '
            'everything"; switch the flag off or use a newer jax',
            NoEffectWarning,
        )


def twice(found: Sequence[tuple[LayerStack, Any]]) -> None:
    """Notes the stacks whose layers are checkpointed as they stand."""
    for info, eqn in found:
        if has_checkpoint(_jax.scan_parts(eqn).body):
            context.note_twice(info.source)


def spent(stacks: Sequence[tuple[LayerStack, Any]], policy: Policy | Plan, label: str) -> None:
    """Warns where decorators further in have other policies for all stacks of a region."""
    others = [
        info for info, eqn in stacks if _jax.is_planned(eqn) and not _is_under(info, eqn, policy)
    ]
    if others:
        warn(
            f"{policy!r} around {label} does nothing: each stack that it could be for has a policy "
            f"from a decorator further in, {others[0].source} another one; drop one of the two "
            "decorators",
            NoEffectWarning,
        )


def _is_under(info: LayerStack, eqn: Any, policy: Policy | Plan) -> bool:
    """Whether a stack that has its policy already has this one."""
    if _jax.is_stack(eqn):
        return eqn.params["stack"].policy == policy
    if needs_sizes(policy) or (isinstance(policy, Plan) and policy.length != info.length):
        return False
    plan = choose(policy, Problem(info.length))
    inside = map(_jax.checkpointed_by, _jax.scan_parts(eqn).body.jaxpr.eqns)
    found = next(kept for kept in inside if kept is not None)
    return plan.kind == "full" and applied(*found) == (plan.layer, plan.carries == "host")


def has_checkpoint(body: ClosedJaxpr) -> bool:
    """Whether anything in a layer is under `jax.checkpoint`."""
    return any(
        (_jax.checkpointed_by(eqn) is not None and not casts.is_recast(eqn))
        or (_jax.is_jit(eqn) and has_checkpoint(eqn.params["jaxpr"]))
        for eqn in body.jaxpr.eqns
    )


def gradients(found: Found, label: str) -> None:
    """Warns where a function differentiates what is in it itself, before the policy gets there."""
    if found.takes_gradients:
        warn(
            f"{label} takes gradients itself (a backward pass is part of it), and a policy around "
            "it comes too late to change them; unless it is differentiated once more outside, "
            "decorate the model or the loss function in it instead",
            NoEffectWarning,
        )


def _of_layer(policy: Policy | Plan) -> Policy:
    return policy.layer if isinstance(policy, Plan) else policy


def _is_lost_on_new_checkpoint(layer: Policy, to_host: bool) -> bool:
    """Whether this version's new checkpoint drops a policy that is a plain function, as seen."""
    version = jax.__version_info__[:2]
    if isinstance(layer, FromJax):
        known = (jax.checkpoint_policies.everything_saveable,)
        return inspect.isfunction(layer.policy) and layer.policy not in known and version < (0, 12)
    return (isinstance(layer, Either) or to_host) and version < (0, 11)
