"""What holds while a function is traced: another policy than its decorators', a record of plans.

Both are part of the key of jax's own trace caches, so that a function already
traced under other circumstances is traced again.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxmem import policies
from jaxmem.errors import NoEffectWarning, warn
from jaxmem.plans.plan import Plan
from jaxmem.policies import Policy

# ---------------------------------------------------------------- types


@dataclasses.dataclass(eq=False)
class Record:
    """What was decided while it was open.

    Attributes:
      regions: the policy of each decorated region that was traced.
      plans: each differentiated stack's policy and plan, in the order of tracing.
      twice: lines of the stacks whose layers are under `jax.checkpoint` as well.
      updated_bytes: of parameters that are updated in the backward pass, and have no gradient.
    """

    regions: list[Policy | Plan] = dataclasses.field(default_factory=list)
    plans: list[tuple[Policy | Plan, Plan]] = dataclasses.field(default_factory=list)
    twice: list[str] = dataclasses.field(default_factory=list)
    updated_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class _Circumstances:
    policy: Policy | None = None
    inside_layer: bool = False
    inside_region: bool = False
    record: Record | None = None
    platform: str | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # jax asks for it with every operation that it traces, and the plan of a step is large.
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))


_circumstances = jax.make_user_context(default_value=_Circumstances())
# Policies in the place of the decorators' own under which anything was traced.  What jax has traced
# already it does not trace again, so that none is ever taken out.
_MET: set[Policy] = set()

# ---------------------------------------------------------------- API


@contextlib.contextmanager
def use_policy(policy: Any, **options: Any) -> Iterator[None]:
    """While open, every decorated stack is traced with this policy instead of its own.

    For sweeps and comparisons: the code stays as it is.  Which stacks a
    decorator means (``where=``, ``min_length=``) stays, too.  A function that
    jax has compiled before is compiled again.

    Args:
      policy: as `jaxmem.remat` takes it: a name or a policy of `jaxmem.policies`.
      **options: of a policy given by name.

    Raises:
      TypeError, ValueError: as `jaxmem.remat` does for the policy; a `Plan` is
        refused, as it fits one stack only.

    Warns:
      jaxmem.NoEffectWarning: nothing decorated was traced while it was open, nor ever before under
        the same: what jax has traced already it need not trace again.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat_sqrt
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> arrays = jnp.ones((64, 4, 4)), jnp.ones(4)
    >>> with jaxmem.use_policy("revolve", slots=4):
    ...     print(jaxmem.stacks(model, *arrays)[0].policy)
    Revolve(slots=4)
    """
    if isinstance(policy, Plan):
        raise TypeError(
            "use_policy takes a policy, which fits every stack; a Plan fits stacks of one length: "
            "pass it to the decorator of that stack"
        )
    policy = policies.parse(policy, **options)
    with instead(policy):
        yield
    warn_unmet(policy, f"use_policy({policy!r})")


@contextlib.contextmanager
def instead(policy: Policy) -> Iterator[None]:
    """While open, every decorated region has this policy."""
    if _circumstances.value.policy is not None:
        _MET.add(_circumstances.value.policy)  # to have been overruled is an effect
    with _circumstances(dataclasses.replace(_circumstances.value, policy=policy)):
        yield


def warn_unmet(policy: Policy, what: str) -> None:
    """Warns where a policy was in force, and nothing decorated was ever traced under it."""
    if policy not in _MET:
        warn(
            f"{what} changed nothing: no code under a decorator of jaxmem was traced while it was "
            "open.  Decorate the model (@jaxmem.remat_auto does nothing else to it), and call what "
            "is to be traced inside of the with statement: jax.jit alone traces nothing",
            NoEffectWarning,
        )


@contextlib.contextmanager
def inside_layer() -> Iterator[None]:
    """While open, what is traced is one layer of a stack that a plan is made for.

    Stacks in it are part of that layer then, and have no plan of their own.
    """
    with _circumstances(dataclasses.replace(_circumstances.value, inside_layer=True)):
        yield


def is_inside_layer() -> bool:
    """Whether `inside_layer` is open."""
    return _circumstances.value.inside_layer


@contextlib.contextmanager
def inside_region() -> Iterator[None]:
    """While open, what is traced is a decorated region that a plan is made for as a whole.

    Unrolled code of regions in it is part of that code then.
    """
    with _circumstances(dataclasses.replace(_circumstances.value, inside_region=True)):
        yield


def is_inside_region() -> bool:
    """Whether `inside_region` is open."""
    return _circumstances.value.inside_region


@contextlib.contextmanager
def recording(platform: str | None = None, record: Record | None = None) -> Iterator[Record]:
    """While open, what is decided about stacks is written into the record.

    Args:
      platform: "cpu", "gpu" or "tpu" if the program is for that and not for the default backend.
      record: one from before, under which jax finds again what it traced then; None for a new one.
    """
    record = Record() if record is None else record
    now = dataclasses.replace(_circumstances.value, record=record, platform=platform)
    with _circumstances(now):
        yield record


def is_recording() -> bool:
    """Whether `recording` is open."""
    return _circumstances.value.record is not None


def platform() -> str:
    """What the program that is traced will run on, as far as is known."""
    return _circumstances.value.platform or jax.default_backend()


def policy_instead(policy: Policy | Plan) -> Policy | Plan:
    """The policy to use for a stack that is decorated with this one."""
    instead = _circumstances.value.policy
    return policy if instead is None else instead


def when_differentiated(values: Sequence[Any], then: Callable[[], None]) -> list[Any]:
    """The values; `then` is called, once, when and if what made them is differentiated.

    What it raises is raised where that is asked for.
    """
    left = [then]

    def rule(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        if left:
            left[0]()
            left.clear()  # unless it raised
        return primals[0], tangents[0]

    same = jax.custom_jvp(lambda value: value)
    same.defjvp(rule)
    return [same(value) for value in values]


def note_region(policy: Policy | Plan) -> None:
    """A region decorated with this policy is traced."""
    if (instead := _circumstances.value.policy) is not None:
        _MET.add(instead)
    if (record := _circumstances.value.record) is not None:
        record.regions.append(policy)


def note_plan(policy: Policy | Plan, plan: Plan) -> None:
    """A stack under this policy got this plan."""
    if (record := _circumstances.value.record) is not None:
        record.plans.append((policy, plan))


def note_updated(size: int) -> None:
    """Parameters of so many bytes are updated in a backward pass."""
    if (record := _circumstances.value.record) is not None:
        record.updated_bytes = max(record.updated_bytes, size)  # a step may be traced again


def note_twice(line: str) -> None:
    """A stack that gets a policy has layers that are checkpointed already."""
    if (record := _circumstances.value.record) is not None:
        record.twice.append(line)
