"""The ways of training that are compared, and the result of one."""

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

Family = Literal["jaxmem", "jax.checkpoint", "PyTorch", "torch.compile"]
OURS: Final = "jaxmem"
HAND: Final = "jax.checkpoint"
EAGER: Final = "PyTorch"
COMPILED: Final = "torch.compile"
TORCH: Final = (EAGER, COMPILED)


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to train a net.

    Attributes:
      family: whose it is.
      name: as it is shown, and the only one of its family.
      how: what the process is told: a policy, or "fit"; a member of `jax.checkpoint_policies`;
        "plain", "each", "segments=4", "budget=0.5".
      budget: bytes, for "fit".
    """

    family: Family
    name: str
    how: str
    budget: int | None = None

    @property
    def framework(self) -> str:
        """Which runs it."""
        return "torch" if self.family in TORCH else "jax"


POLICIES = ("none", "dots", "dots_no_batch", "sqrt", "full", "offload")
BY_HAND = {
    "dots": "dots_saveable",
    "dots_no_batch": "dots_with_no_batch_dims_saveable",
    "full": "nothing_saveable",
}


def ours() -> list[Method]:
    """The policies; what `fit` is asked depends on what came of the others."""
    return [Method(OURS, policy, policy) for policy in POLICIES]


def by_hand() -> list[Method]:
    """The same policies, each layer under jax.checkpoint."""
    return [Method(HAND, name, policy) for name, policy in BY_HAND.items()]


def torch(segments: Sequence[int], budgets: Sequence[float]) -> list[Method]:
    """PyTorch's own: of each layer, of so many segments, compiled within so much of the memory."""
    found = [Method(EAGER, "plain", "plain"), Method(EAGER, "checkpoint each layer", "each")]
    found += [Method(EAGER, f"sequential, {k} segments", f"segments={k}") for k in segments]
    found += [Method(COMPILED, "plain", "plain"), Method(COMPILED, "checkpoint each layer", "each")]
    return found + [Method(COMPILED, f"memory budget {b:g}", f"budget={b:g}") for b in budgets]


def fit(name: str, budget: int) -> Method:
    """`jaxmem.fit` within so many bytes."""
    return Method(OURS, f"fit, {name}", "fit", budget)
