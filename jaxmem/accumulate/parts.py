"""What is asked of a function: which arguments are what, and what becomes of its outputs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmem.accumulate.combine import Spec
from jaxmem.errors import check_positive


@dataclasses.dataclass(frozen=True)
class Parts:
    """The options of `jaxmem.value_and_grad`, checked."""

    argnums: tuple[int, ...]
    has_aux: bool
    microbatches: int
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    carry_argnums: tuple[int, ...]
    aux: Spec
    batch_sharding: Any
    return_weight: bool

    @classmethod
    def checked(
        cls,
        *,
        argnums: Any,
        has_aux: bool,
        microbatches: Any,
        aux: Any,
        return_weight: bool,
        **parts: Any,
    ) -> "Parts":
        """Raises `TypeError` or `ValueError` for options that cannot be."""
        spec = Spec.of(aux)
        found = cls(
            argnums=_numbers("argnums", argnums),
            has_aux=has_aux,
            microbatches=check_positive("microbatches", microbatches),
            aux=spec,
            return_weight=return_weight,
            **{
                name: _numbers(name, value) if name.endswith("argnums") else value
                for name, value in parts.items()
            },
        )
        carries = spec.modes.count("carry")
        if carries != len(found.carry_argnums) or (carries and not has_aux):
            raise ValueError(
                f'carry_argnums={found.carry_argnums} wants as many "carry" in aux=, and '
                "has_aux=True: each microbatch returns, after the loss, what the next one gets; "
                f"got aux={aux!r} and has_aux={has_aux}"
            )
        if found.batch_sharding is not None and "last" in spec.modes:
            raise ValueError(
                'aux="last" has no meaning where every device has a last microbatch; pass "stack", '
                "or leave batch_sharding= out"
            )
        return found


# ---------------------------------------------------------------- implementation


def _numbers(what: str, numbers: Any) -> tuple[int, ...]:
    given = (numbers,) if isinstance(numbers, int) else numbers
    if not isinstance(given, Sequence) or not all(
        isinstance(number, int) and not isinstance(number, bool) for number in given
    ):
        raise TypeError(
            f"{what} must be positions of arguments, such as 1 or (1, 2), got {numbers!r}"
        )
    return tuple(given)
