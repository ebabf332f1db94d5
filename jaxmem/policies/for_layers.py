"""Policies that say which values of one layer are kept."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxmem.policies.base import Policy

# ---------------------------------------------------------------- types


class LayerPolicy(Policy):
    """Base of the policies that say what one layer keeps."""

    @property
    def names(self) -> frozenset[str]:
        """The `checkpoint_name`s that this policy speaks of."""
        return frozenset()

    @property
    def offloads(self) -> bool:
        """Whether anything goes to the host."""
        return False

    @property
    def jax_policy(self) -> Callable[..., Any]:
        """The policy for `jax.checkpoint`, one of jax's own objects wherever it has one.

        jax tells its policies apart by class in places; a wrapper of ours would
        silently mean "recompute everything" there.
        """
        raise NotImplementedError

    def __or__(self, other: "LayerPolicy") -> "LayerPolicy":
        """Keep what either policy keeps."""
        if not isinstance(other, LayerPolicy):
            return NotImplemented
        return Either(self, other)


@dataclasses.dataclass(frozen=True)
class Full(LayerPolicy):
    """Keep nothing inside a layer; the layer is recomputed from its carry."""

    kind = "full"

    @property
    def jax_policy(self) -> Callable[..., Any]:
        return jax.checkpoint_policies.nothing_saveable


@dataclasses.dataclass(frozen=True)
class Dots(LayerPolicy):
    """Keep the results of matrix products (and convolutions).

    Attributes:
      batch: whether products with batch dimensions (attention scores, anything
        under `vmap`) are kept too.
    """

    kind = "dots"

    batch: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.batch, bool):
            raise TypeError(f"batch must be True or False, got {self.batch!r}")

    @property
    def jax_policy(self) -> Callable[..., Any]:
        if self.batch:
            return jax.checkpoint_policies.dots_saveable
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@dataclasses.dataclass(frozen=True)
class Names(LayerPolicy):
    """Keep the values that `jax.ad_checkpoint.checkpoint_name` named, on the device or the host.

    Attributes:
      save: names kept on the device.
      offload: names sent to the host and brought back.
    """

    kind = "names"

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("save", "offload"):
            value = getattr(self, field)
            if isinstance(value, str):
                value = (value,)
            value = tuple(value)
            if bad := [name for name in value if not isinstance(name, str)]:
                raise TypeError(f"{field}= takes names (str), got {bad[0]!r}")
            # Sorted and without repeats, so that equal sets are equal values.
            object.__setattr__(self, field, tuple(sorted(set(value))))
        if both := sorted(set(self.save) & set(self.offload)):
            raise ValueError(
                f"contradictory policy: {', '.join(map(repr, both))} both saved on the device and "
                "offloaded to the host; give each name to save= or to offload=, not to both"
            )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.save) | frozenset(self.offload)

    @property
    def offloads(self) -> bool:
        return bool(self.offload)

    @property
    def jax_policy(self) -> Callable[..., Any]:
        if not self.offload:
            return jax.checkpoint_policies.save_only_these_names(*self.save)
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.save),
            names_which_can_be_offloaded=list(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )


@dataclasses.dataclass(frozen=True)
class Keep(LayerPolicy):
    """Keep single values of a layer, by their places among all that it computes.

    `jaxmem.fit` makes these; they are for the very layer that they were made for, and
    stand in plans alone.

    Attributes:
      values: places of the values kept on the device; `jaxmem.Fitted.explain` says what they are.
      offload: places of those sent to the host and brought back.
      bytes: what `values` take in one layer.
      layer: a digest of the layer.
    """

    kind = "keep"

    values: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()
    bytes: int = 0
    layer: str = ""

    def __post_init__(self) -> None:
        for field in ("values", "offload"):
            places = tuple(getattr(self, field))
            if bad := [p for p in places if not _is_count(p)]:
                raise TypeError(f"{field}= takes places, whole numbers from 0 on, got {bad[0]!r}")
            object.__setattr__(self, field, tuple(sorted(set(places))))
        if not _is_count(self.bytes):
            raise TypeError(f"bytes= takes a whole number from 0 on, got {self.bytes!r}")
        if not isinstance(self.layer, str):
            raise TypeError(f"layer= takes the digest of a layer, a text, got {self.layer!r}")

    @property
    def offloads(self) -> bool:
        return bool(self.offload)

    @property
    def jax_policy(self) -> Callable[..., Any]:
        raise TypeError(
            "policies.Keep is for the one layer that jaxmem.fit made it for, and applies with its "
            "plan: with jaxmem.use_plan(plan): ..."
        )

    def __str__(self) -> str:
        count = len(self.values) + len(self.offload)
        return f"{count} value{'' if count == 1 else 's'}" + (
            f" ({len(self.offload)} on the host)" * bool(self.offload)
        )


@dataclasses.dataclass(frozen=True)
class FromJax(LayerPolicy):
    """Any policy of `jax.checkpoint_policies`, or a function of the same kind.

    Attributes:
      policy: what `jax.checkpoint(policy=...)` takes.
    """

    kind = "from_jax"

    policy: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.policy):
            raise TypeError(
                f"from_jax takes a policy of jax.checkpoint_policies, got {self.policy!r} of type "
                f"{type(self.policy).__name__}"
            )
        name = getattr(self.policy, "__name__", "")
        if name.startswith("remat_") and self.policy.__module__ == "jaxmem.remat":
            raise TypeError(
                f"jaxmem.{name} is a decorator, not a policy; give the policy's name, "
                f"{name.removeprefix('remat_')!r}, or a policy from jaxmem.policies"
            )
        known = jax.checkpoint_policies
        if self.policy is known.save_anything_except_these_names:
            raise ValueError(
                "jax.checkpoint_policies.save_anything_except_these_names saves the names, too: it "
                "is broken in jax; use save_any_names_but_these or jaxmem.policies.names"
            )
        for name in _FACTORIES:
            if self.policy is getattr(known, name, None):
                raise ValueError(
                    f"jax.checkpoint_policies.{name} makes a policy and is none itself; call it "
                    "with its arguments and pass what it returns"
                )
        if not _takes_anything(self.policy):
            raise TypeError(
                f"{self.policy!r} is no policy: jax calls one with a primitive, any number of "
                "arguments and the primitive's parameters, as in def policy(primitive, *args, "
                "**params); give the name of a policy, one from jaxmem.policies or one of "
                "jax.checkpoint_policies"
            )

    @property
    def names(self) -> frozenset[str]:
        held = {**getattr(self.policy, "__dict__", {})}
        if inspect.isfunction(self.policy):
            held |= inspect.getclosurevars(self.policy).nonlocals
        found = [value for key, value in held.items() if key in _KEEPERS_OF_NAMES]
        return frozenset(name for names in found for name in names)

    @property
    def jax_policy(self) -> Callable[..., Any]:
        return self.policy

    def to_json(self) -> dict[str, Any]:
        for name, known in vars(jax.checkpoint_policies).items():
            if known is self.policy:
                return {"policy": "from_jax", "name": name}
        raise ValueError(
            f"{self.policy!r} is code, which a plan's JSON cannot hold; use jaxmem.policies.names, "
            ".dots or a plain member of jax.checkpoint_policies in plans that are saved"
        )


@dataclasses.dataclass(frozen=True)
class Either(LayerPolicy):
    """Keep what `first` or `second` keeps; written ``first | second``."""

    kind = "either"

    first: LayerPolicy
    second: LayerPolicy

    def __post_init__(self) -> None:
        Names(
            save=self._collect("save"), offload=self._collect("offload")
        )  # raises where they contradict each other

    def _collect(self, field: str) -> tuple[str, ...]:
        found: tuple[str, ...] = ()
        for part in (self.first, self.second):
            if isinstance(part, Either):
                found += part._collect(field)
            elif isinstance(part, Names):
                found += getattr(part, field)
        return found

    @property
    def names(self) -> frozenset[str]:
        return self.first.names | self.second.names

    @property
    def offloads(self) -> bool:
        return self.first.offloads or self.second.offloads

    @property
    def jax_policy(self) -> Callable[..., Any]:
        first, second = self.first.jax_policy, self.second.jax_policy

        def either(prim: Any, *args: Any, **params: Any) -> Any:
            # jax's own save_from_both_policies refuses offloading policies.
            kept = first(prim, *args, **params)
            return kept if _keeps(kept) else second(prim, *args, **params)

        return either

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": "either",
            "first": self.first.to_json(),
            "second": self.second.to_json(),
        }


# ---------------------------------------------------------------- implementation


# Of jax.checkpoint_policies: what makes policies, and what these hold their names in.
_FACTORIES = (
    "offload_dot_with_no_batch_dims",
    "save_any_names_but_these",
    "save_only_these_names",
    "save_from_both_policies",
    "save_and_offload_only_these_names",
)
_KEEPERS_OF_NAMES = (
    "names",
    "names_not_to_save",
    "names_which_can_be_offloaded",
    "names_which_can_be_saved",
    "saveable_names",
)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _keeps(verdict: Any) -> bool:
    """Whether a jax policy's answer, a bool or a marker, means anything but recompute."""
    if isinstance(verdict, bool):
        return verdict
    return type(verdict).__name__ != "RecomputeType"


def _takes_anything(policy: Callable[..., Any]) -> bool:
    """Whether it can be called as jax calls policies, as far as its signature says."""
    try:
        kinds = {
            p.kind for p in inspect.signature(policy, follow_wrapped=False).parameters.values()
        }
    except (TypeError, ValueError):  # some callables of C have none
        return True
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
