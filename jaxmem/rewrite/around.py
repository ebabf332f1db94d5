"""Scans that are no stacks of layers, but inside of layers: what stands around them is the model.

Attention over chunks of a sequence is such a scan, and a recurrent layer; a Python loop calls one
after the other.  Taken for stacks, nothing but these scans is planned.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.errors import NoStackWarning, warn
from jaxmem.estimate.costs import costs
from jaxmem.plans.plan import Plan
from jaxmem.policies import Policy, Scans
from jaxmem.rewrite import check
from jaxmem.trace.find import LayerStack


def ways(closed: ClosedJaxpr, stacks: Sequence[tuple[LayerStack, Any]]) -> tuple[Scans, ...]:
    """What scans can be taken for in a plan, other than for stacks of layers.

    For parts of the function's code where there are several, or most of its products are around
    them; and for such that are checkpointed, if they are not yet.
    """
    if len(stacks) == 1 and _share(closed, stacks) >= _MOST:
        return ()
    if any(check.has_checkpoint(_jax.scan_parts(eqn).body) for _, eqn in stacks):
        return ("parts",)
    return "parts", "checkpointed"


def own_way(wanted: Scans, possible: Sequence[Scans]) -> Scans:
    """What scans are taken for that can be these, next to stacks."""
    if wanted == "checkpointed" and "checkpointed" not in possible:
        wanted = "parts"
    return wanted if wanted in possible else "stacks"


def warn_of_layers(
    closed: ClosedJaxpr,
    stacks: Sequence[tuple[LayerStack, Any]],
    policy: Policy | Plan,
    label: str,
) -> None:
    """Tell of what a policy for stacks leaves as it is around equal scans, if that is the most."""
    if len(stacks) < 2 or len({_jax.digest(_jax.scan_parts(eqn).body) for _, eqn in stacks}) > 1:
        return
    if (share := _share(closed, stacks)) >= _MOST:
        return
    longest = max(info.length for info, _ in stacks)
    warn(
        f"{label}: {policy} is for its {len(stacks)} scans, equal ones, with {share:.0%} of its "
        f"matmul FLOPs ({stacks[0][0]}); all around them is kept.  If each is inside of a layer, "
        f"pass min_length={longest + 1}: then the policy is for the code of all layers; "
        "jaxmem.remat_auto and jaxmem.fit try both",
        NoStackWarning,
    )


# ---------------------------------------------------------------- implementation

# With less than this part of the products in scans these are not the model.
_MOST = 0.5


def _share(closed: ClosedJaxpr, stacks: Sequence[tuple[LayerStack, Any]]) -> float:
    """The part of the FLOPs of all products that is in these scans."""
    inside = 0.0
    for info, eqn in stacks:
        inside += info.length * costs(_jax.scan_parts(eqn).body).matmul_flops
    return inside / max(costs(closed).matmul_flops, 1)
