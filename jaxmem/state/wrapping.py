"""What all functions that take an optimizer check of it."""

from typing import Any

from jaxmem.accumulate.trees import described


def check_optimizer(name: str, optimizer: Any) -> None:
    """That what the function of that name is given is an optax transformation.

    Raises:
      TypeError: it is not.
    """
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            f"{name} takes an optax transformation, such as optax.adamw(1e-3), got "
            f"{described(optimizer)}"
        )


def check_keep(keep: Any, stays: str) -> None:
    """That `keep` chooses arrays by their paths; it says which of them do what `stays` says.

    Raises:
      TypeError: it is no function.
    """
    if not (keep is None or callable(keep)):
        raise TypeError(
            f"keep takes a function from the path of an array in the state to whether it {stays}, "
            f"got {described(keep)}"
        )
