"""What follows from a cut function and the options: layers of each chunk, and what they keep."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _jax, policies
from jaxmem.estimate.costs import costs
from jaxmem.pipeline.balance import balanced
from jaxmem.pipeline.cut import Cut
from jaxmem.pipeline.options import Options
from jaxmem.pipeline.stage import Stages
from jaxmem.plans.plan import Plan
from jaxmem.policies import NoRemat, Policy
from jaxmem.rewrite import check
from jaxmem.stacked import Form, applied
from jaxmem.stacked.stack import Stack
from jaxmem.trace import context

# ---------------------------------------------------------------- API


def chunk_sizes(options: Options, found: Cut, stages: int) -> tuple[int, ...]:
    """Layers of each chunk, in the order of the layers.

    Raises:
      ValueError: there are too few, or other ones than `Options.layers` says.
    """
    chunks, length = stages * options.chunks, found.length
    if not isinstance(length, int):
        raise ValueError(
            f"{found.info}: the number of layers is the symbol {length}, and stages need it as a "
            "number; export with a fixed length"
        )
    given = options.layers
    if length < chunks:
        what = f"{stages} stages"
        if options.chunks > 1:
            what += f" with {options.chunks} chunks each"
        raise ValueError(
            f"{found.info}: {length} layer{'' if length == 1 else 's'} cannot be split over "
            f"{what}; pass a mesh with at most {length} devices along {options.axis!r}"
            + (", or fewer chunks" if options.chunks > 1 else "")
        )
    if isinstance(given, tuple):
        if len(given) != chunks or sum(given) != length:
            raise ValueError(
                f"layers={given} has {len(given)} sizes with the sum {sum(given)}, and there are "
                f"{length} layers in {chunks} chunks; pass {chunks} sizes with the sum {length}, "
                'or layers="cost"'
            )
        return given
    if given is None and length % chunks == 0:
        return (length // chunks,) * chunks
    layer, begin, end = flops_of(found)
    others = [0.0] * chunks
    others[0] += begin
    others[-1] += end
    return balanced(length, layer, others)


def flops_of(found: Cut) -> tuple[float, float, float]:
    """Of a layer, of what is before the stack and of what is after, for one microbatch."""
    stages = Stages(found, (found.length,), NoRemat())
    layer = costs(found.body.jaxpr).flops
    begin = costs(found.part(lambda *operands: stages.begin(operands))).flops
    message = [jax.typeof(jnp.zeros(x.shape, x.dtype)) for x in stages.message_types]
    results = found.results
    count = 1 if results.is_mean else results.losses // 2

    def loss(*flat: Any) -> jax.Array:
        operands = flat[: len(found.closed.in_avals)]
        scales = [jnp.ones(())] * count
        return stages.loss(operands, list(flat[len(operands) :]), scales)

    end = costs(_jax.trace(loss, [*found.closed.in_avals, *message])).flops
    return layer, begin, end


def policy_of(options: Options, found: Cut) -> Policy | Plan:
    """What layers keep while their stage is recomputed.

    Raises:
      ValueError: a policy that no stage can have, or a name that nothing in the layers has.
    """
    policy = options.policy
    own = found.policy is not None or _jax.is_planned(found.eqn)
    if policy is None:
        if isinstance(found.policy, Plan):
            raise ValueError(
                f"{found.info} has a jaxmem.Plan, which is for all of its layers, and a stage has "
                "some of them; pass policy=, or give the stack a policy"
            )
        policy = found.policy or (NoRemat() if own else policies.full())
    policy = context.policy_instead(policy)
    context.note_region(policy)
    form = Form(found.body, found.length, found.reverse, found.unroll)
    check.names([Stack(form, policy, found.info)], found.closed, policy)
    return policy


def kept_by_layers(stages: Stages) -> Policy | Plan:
    """What layers keep: what a decorator said in the scan itself, if one did."""
    if isinstance(stages.policy, NoRemat) and _jax.is_scan(stages.cut.eqn):
        for eqn in stages.cut.body.jaxpr.jaxpr.eqns:
            if (found := _jax.checkpointed_by(eqn)) is not None:
                return applied(found[0])[0]
    return stages.policy
