"""From a policy and the sizes of a stack to its plan."""

import functools

from jaxmem import policies
from jaxmem.plans.plan import Plan
from jaxmem.policies import ByLayer, LayerPolicy, NoRemat, Offload, Policy, Revolve, Sqrt
from jaxmem.solve import periodic_bytes, segment_lengths
from jaxmem.solve.problem import Problem


def needs_sizes(policy: Policy | Plan) -> bool:
    """Whether a plan depends on the stack's bytes, not only on its length."""
    return isinstance(policy, ByLayer) or (isinstance(policy, Sqrt) and policy.segments is None)


@functools.singledispatch
def choose(policy: Policy | Plan, problem: Problem) -> Plan:
    """The plan that `policy` means for a stack of these sizes.

    Raises:
      ValueError: `policy` is a plan for another length.
    """
    raise TypeError(f"no plan can be made from {policy!r}")


@choose.register
def _(plan: Plan, problem: Problem) -> Plan:
    if plan.length != problem.length:
        raise ValueError(
            f"a plan for {plan.length} layers cannot be used on a stack of {problem.length}; make "
            "it for that length, or pass a policy, which fits every length"
        )
    return plan


@choose.register
def _(policy: NoRemat, problem: Problem) -> Plan:
    return Plan.none(problem.length)


@choose.register
def _(policy: LayerPolicy, problem: Problem) -> Plan:
    return Plan.full(problem.length, layer=policy)


@choose.register
def _(policy: Sqrt, problem: Problem) -> Plan:
    n = problem.length
    sizes = problem.carry_bytes, problem.residual_bytes, problem.alone_bytes
    if policy.segments is not None or n < 1:
        return Plan.periodic(n, policy.segments, policy.levels)
    levels = min(policy.levels, n.bit_length())
    # No cut at all (everything kept, no extra forward) is the first candidate and
    # wins a tie, so that on a short stack this is never above "none".
    cuts = [()] + [segment_lengths(n, k, *sizes) for k in range(1, levels + 1)]
    return Plan.cut(n, min(cuts, key=lambda cut: periodic_bytes(n, cut, *sizes)))


@choose.register
def _(policy: Revolve, problem: Problem) -> Plan:
    return Plan.revolve(problem.length, policy.slots)


@choose.register
def _(policy: Offload, problem: Problem) -> Plan:
    layer = policies.names(offload=policy.names) if policy.names else policies.full()
    return Plan.full(problem.length, layer=layer, carries="host")
