"""The function on one microbatch, and what it may return."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.accumulate.call import Call, Path
from jaxmem.accumulate.combine import Spec
from jaxmem.accumulate.trees import described, difference, leaf_names
from jaxmem.accumulate.weighted import Weighted


@dataclasses.dataclass(frozen=True, eq=False)
class Micro:
    """A call of which some leaves are still open.

    Attributes:
      call: the function and its arguments.
      spec: how auxiliary outputs are combined.
      has_aux: whether the function returns any.
    """

    call: Call
    spec: Spec
    has_aux: bool

    def __call__(
        self, leaves: Mapping[Path, Any], carry: Sequence[Any], rows: int
    ) -> tuple[Any, Any]:
        """The loss, a scalar or a `Weighted`, and the auxiliary outputs (None without any).

        Args:
          leaves: those that are this microbatch's own.
          carry: the carried arguments.
          rows: of this microbatch.

        Raises:
          TypeError, ValueError: the function returns something else.
        """
        out = self.call(leaves, carry)
        loss, aux = self._parted(out)
        if self.has_aux:
            aux = jax.tree_util.tree_map_with_path(_array, aux)
            self.spec.check(aux, rows)
            self._check_carry(self.spec.carried(aux), carry)
        return loss, aux

    def _parted(self, out: Any) -> tuple[Any, Any]:
        name = getattr(self.call.fun, "__name__", "fun")
        if self.has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    f"has_aux=True wants {name} to return a pair (loss, aux), got "
                    f"{described(out) if not isinstance(out, tuple) else f'{len(out)} values'}"
                )
            loss, aux = out
        else:
            loss, aux = out, None
        if isinstance(loss, Weighted):
            loss = Weighted.of((real_loss(name, total), weight) for total, weight in loss.terms)
            return loss, aux
        if isinstance(loss, tuple):
            raise TypeError(
                f"{name} returned {len(loss)} values; pass has_aux=True if the first is the loss"
            )
        return real_loss(name, loss), aux

    def _check_carry(self, after: list[Any], before: Sequence[Any]) -> None:
        if len(after) != len(before):
            raise ValueError(
                f'carry_argnums names {len(before)} arguments, and aux= has "carry" '
                f"{len(after)} times; each carried argument wants its new value in the aux"
            )
        for number, new, old in zip(self.call.carried, after, before, strict=True):
            what = (f"what fun returns for argument {number}", "the argument")
            found = difference(new, old, what)
            if found is None:
                for name, one, other in zip(
                    leaf_names(old), jax.tree.leaves(new), jax.tree.leaves(old), strict=True
                ):
                    if one.dtype != other.dtype:
                        found = (
                            f"{what[0]} has {name} as {one.dtype} and {what[1]} as {other.dtype}"
                        )
            if found:
                raise ValueError(
                    f"a carried argument must keep its form from microbatch to microbatch: {found}"
                )


# ---------------------------------------------------------------- implementation


def real_loss(name: str, loss: Any) -> jax.Array:
    """The loss, if it is a real scalar.

    Raises:
      TypeError: it is not.
    """
    known = hasattr(loss, "dtype") or isinstance(loss, float)
    if not known or not jnp.issubdtype(jnp.result_type(loss), jnp.floating) or jnp.shape(loss):
        raise TypeError(
            f"{name} must return its mean loss as a real floating-point scalar, or a "
            f"jaxmem.Weighted(total, weight), got {described(loss)}"
        )
    return jnp.asarray(loss)


def _array(path: Any, leaf: Any) -> jax.Array:
    if not isinstance(leaf, jax.Array | int | float | complex) and not hasattr(leaf, "dtype"):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "aux"
        raise TypeError(
            f"an auxiliary output of several microbatches must be an array; {name} is "
            f"{described(leaf)}"
        )
    return jnp.asarray(leaf)
