"""`Job`: the program that a user's module gives to the command line.

A module has a function, by convention called `job`, that builds the step, describes
its arguments by shape, and returns both as one small value:

    def job(batch: int = 8, policy: str = "sqrt") -> jaxmem.Job:
        state = jax.eval_shape(init, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((batch, 1024), "int32")
        return jaxmem.Job(train_step, (state, tokens), donate_argnums=0)

`jaxmem.jobs.load` finds and calls it.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmem.report.report import MemoryReport
    from jaxmem.trace.training_state import Named


@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class Job:
    """A step with its arguments, to be compiled for a target; it is not executed.

    Attributes:
      step: a function of arrays, plain or already jitted.
      args: its positional arguments, pytrees of `jax.ShapeDtypeStruct` (from
        `jax.eval_shape`), with or without shardings.  Arrays are accepted, but take memory.
      kwargs: its keyword arguments, likewise.
      donate_argnums: as for `jax.jit`.
      static_argnums: as for `jax.jit`.
      name: shown in tables.
      optimizer_state: which of the arguments is the optimizer's state, or has it inside: a
        position in `args`, or a path as reports print it, such as "state/opt"; or several of those.
        Reports tell it apart by its fields; None finds the states of optax.
      parameters: likewise, which are the model's parameters; None finds those that are called so.

    >>> import jax, jaxmem
    >>> def double(x): return x * 2
    >>> job = jaxmem.Job(double, (jax.ShapeDtypeStruct((4, 256), "float32"),), donate_argnums=0)
    >>> job.name, job.donate_argnums, job.report().required_bytes
    ('double', (0,), 4096)

    A state that is no named tuple is named:

    >>> def step(weights, mine, x):
    ...     gradient = jax.grad(lambda w: (x @ w).sum())(weights)
    ...     momentum = 0.9 * mine["momentum"] + gradient
    ...     return weights - momentum, {"momentum": momentum}
    >>> weights, x = (jax.ShapeDtypeStruct((256, n), "float32") for n in (64, 256))
    >>> args = weights, {"momentum": weights}, x
    >>> job = jaxmem.Job(step, args, donate_argnums=(0, 1), optimizer_state=1, parameters=0)
    >>> parts = job.report().parts
    >>> parts["parameters"].device, parts["state/momentum"].device
    (65536, 65536)
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    name: str
    optimizer_state: tuple[int | str, ...] | None
    parameters: tuple[int | str, ...] | None

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        name: str | None = None,
        optimizer_state: "Named" = None,
        parameters: "Named" = None,
    ) -> None:
        """
        Raises:
          TypeError: `step` is not callable, `args` is not a tuple or `kwargs` not a dict of
            keywords, or a position is not a whole number.  That a path is one of an argument is
            checked by `report`.
          ValueError: a position is not one of `args`.
        """
        if not callable(step):
            raise TypeError(
                f"Job: step must be a function, got {step!r} of type {type(step).__name__}; pass "
                "the function itself and its arguments in args=, not what it returned"
            )
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"Job: args must be a tuple of arguments, got {type(args).__name__}; "
                "for a single argument write args=(x,)"
            )
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise TypeError(f"Job: kwargs must be a dict of arguments by name, got {kwargs!r}")
        values = {
            "step": step,
            "args": tuple(args),
            "kwargs": dict(kwargs),
            "donate_argnums": _positions("donate_argnums", donate_argnums, len(args)),
            "static_argnums": _positions("static_argnums", static_argnums, len(args)),
            "name": name or _name_of(step),
            "optimizer_state": _named("optimizer_state", optimizer_state, len(args)),
            "parameters": _named("parameters", parameters, len(args)),
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return f"<Job {self.name}, {len(self.args) + len(self.kwargs)} arguments>"

    def report(self, target: Any = "local", **options: Any) -> "MemoryReport":
        """The memory report of the step on a target.

        Args:
          target: as `jaxmem.memory_report` takes it.
          **options: of `jaxmem.memory_report`, such as ``timeout=``.

        Raises:
          ValueError: the step has a keyword argument with the name of an option.
          Exception: whatever `jaxmem.memory_report` raises.
        """
        import inspect

        from jaxmem.report.memory import memory_report

        reserved = inspect.signature(memory_report).parameters
        if clash := [key for key in self.kwargs if key in reserved]:
            raise ValueError(
                f"the step's keyword argument {clash[0]!r} is also an option of memory_report; "
                "pass it by position in args=, or bind it with functools.partial"
            )
        return memory_report(
            self.step,
            *self.args,
            target=target,
            donate_argnums=self.donate_argnums,
            static_argnums=self.static_argnums,
            **{
                "optimizer_state": self.optimizer_state,
                "parameters": self.parameters,
                **options,
            },
            **self.kwargs,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arguments that are arrays, not `jax.ShapeDtypeStruct`s."""
        import jax
        import numpy as np

        leaves = jax.tree.leaves((self.args, self.kwargs))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray))


def _positions(field: str, given: Any, count: int) -> tuple[int, ...]:
    several: Sequence[Any] = given if isinstance(given, tuple | list) else (given,)
    found = []
    for position in several:
        try:
            k = operator.index(position)
        except TypeError:
            raise TypeError(
                f"Job: {field} takes positions of args, whole numbers, got {position!r}"
            ) from None
        if not -count <= k < count:
            raise ValueError(f"Job: {field}={k}, but args has {count} entries, 0 to {count - 1}")
        found.append(k % count)
    return tuple(found)


def _named(field: str, given: "Named", count: int) -> tuple[int | str, ...] | None:
    """Positions, checked, and paths."""
    if given is None:
        return None
    several = given if isinstance(given, tuple | list) else (given,)
    return tuple(
        one if isinstance(one, str) else _positions(field, one, count)[0] for one in several
    )


def _name_of(step: Any) -> str:
    while not hasattr(step, "__name__") and hasattr(step, "func"):  # functools.partial
        step = step.func
    return getattr(step, "__name__", type(step).__name__)
