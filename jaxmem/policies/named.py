"""Policies by their names: what makes each, from options or from JSON."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxmem.policies.base import Policy
from jaxmem.policies.for_layers import Dots, Either, FromJax, Full, Keep, LayerPolicy, Names
from jaxmem.policies.for_stacks import Auto, NoRemat, Offload, Revolve, Sqrt

# ---------------------------------------------------------------- API


def none() -> NoRemat:
    """Keep everything, as jax does by itself."""
    return NoRemat()


def auto() -> Auto:
    """What `jaxmem.fit` finds for the memory at hand; until then keep everything."""
    return Auto()


def full() -> Full:
    """Keep each layer's carry and nothing inside a layer."""
    return Full()


def dots() -> Dots:
    """Keep carries and the results of all matrix products."""
    return Dots()


def dots_no_batch() -> Dots:
    """Keep carries and the results of matrix products without batch dimensions."""
    return Dots(batch=False)


def names(save: Iterable[str] | str = (), offload: Iterable[str] | str = ()) -> Names:
    """Keep carries and the named values: `save` on the device, `offload` on the host.

    Raises:
      ValueError: a name is in both.
    """
    return Names(save, offload)  # pyright: ignore[reportArgumentType]


def from_jax(policy: Callable[..., Any]) -> FromJax:
    """Keep carries and what a policy of `jax.checkpoint_policies` keeps."""
    return FromJax(policy)


def sqrt(segments: int | Sequence[int] | None = None, levels: int = 1) -> Sqrt:
    """Keep every c-th carry, c chosen for the layer's own sizes; see `Sqrt`."""
    return Sqrt(segments, levels)  # pyright: ignore[reportArgumentType]


def revolve(slots: int = 8) -> Revolve:
    """Keep `slots` carries, scheduled optimally; see `Revolve`."""
    return Revolve(slots)


def offload(names: Iterable[str] | str = ()) -> Offload:
    """Keep carries, and values of these names, in host memory."""
    return Offload(names)  # pyright: ignore[reportArgumentType]


def parse(policy: "str | Policy | Callable[..., Any]", **options: Any) -> Policy:
    """The policy meant by a name, a policy, or a policy of `jax.checkpoint_policies`.

    Options (``slots=8``, ``levels=2``) go with a name.

    Raises:
      ValueError: the name is unknown; the text lists the known ones.
      TypeError: it is nothing of the kind, or the options do not belong to it.

    >>> import jaxmem
    >>> jaxmem.policies.parse("revolve", slots=4)
    Revolve(slots=4)
    """
    if isinstance(policy, str):
        if policy not in _BY_NAME:
            raise ValueError(
                f"unknown remat policy {policy!r}; known are {', '.join(map(repr, _BY_NAME))}, or "
                "pass a policy from jaxmem.policies or a jaxmem.Plan"
            )
        make = _BY_NAME[policy]
        accepted = inspect.signature(make).parameters
        if wrong := [name for name in options if name not in accepted]:
            takes = f"takes {', '.join(accepted)}" if accepted else "takes no options"
            raise TypeError(f"policy {policy!r} has no option {wrong[0]!r}; it {takes}")
        return make(**options)
    if options:
        raise TypeError(
            f"options {', '.join(options)} go with the name of a policy, and {policy!r} is "
            "complete in itself"
        )
    if isinstance(policy, Policy):
        return policy
    if policy in _BY_NAME.values():
        raise TypeError(
            f"jaxmem.policies.{policy.__name__} makes a policy and is none itself; call it, as in "
            f"jaxmem.policies.{policy.__name__}()"
        )
    if callable(policy) and not isinstance(policy, type):
        return FromJax(policy)
    raise TypeError(
        f"remat takes the name of a policy ({', '.join(map(repr, _BY_NAME))}), a policy from "
        f"jaxmem.policies or a jaxmem.Plan, got {policy!r} of type {type(policy).__name__}"
    )


def from_json(data: Any) -> Policy:
    """The policy that `Policy.to_json` wrote.

    Raises:
      ValueError: it is not one; the text names the key.
    """
    if not isinstance(data, dict) or "policy" not in data:
        raise ValueError(f'expected an object with the key "policy", got {data!r}')
    fields = {key: value for key, value in data.items() if key != "policy"}
    name = data["policy"]
    if name == "from_jax":
        known = vars(jax.checkpoint_policies).get(str(fields.get("name")))
        if known is None:
            raise ValueError(f"name: jax.checkpoint_policies has no {fields.get('name')!r}")
        return FromJax(known)
    if name == "either":
        parts = [from_json(fields.get(key)) for key in ("first", "second")]
        if bad := [part for part in parts if not isinstance(part, LayerPolicy)]:
            raise ValueError(f"either: {bad[0]!r} says how to cut a stack, not what a layer keeps")
        return Either(*parts)  # pyright: ignore[reportArgumentType]
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"policy: unknown {name!r}; known are {', '.join(map(repr, _KINDS))}")
    try:
        return _KINDS[name](**fields)
    except TypeError as error:
        raise ValueError(f"policy {name!r}: {error}") from None


# ---------------------------------------------------------------- implementation

_BY_NAME: dict[str, Callable[..., Policy]] = {
    "none": none,
    "full": full,
    "dots": dots,
    "dots_no_batch": dots_no_batch,
    "sqrt": sqrt,
    "revolve": revolve,
    "offload": offload,
    "names": names,
    "auto": auto,
}

_KINDS: dict[str, type[Policy]] = {
    one.kind: one
    for one in (NoRemat, Auto, Full, Dots, Names, Keep, FromJax, Either, Sqrt, Revolve, Offload)
}
