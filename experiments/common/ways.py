"""Optimizers by name, and the ways to take a step with one: what is where, updated when."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import jax
import optax

import jaxmem

Way = Literal[
    "ordinary", "fused", "fused, 3 passes", "host state", "host state, fused", "all on host, fused"
]
ORDINARY: Final = "ordinary"
FUSED: Final = "fused"
FUSED_3: Final = "fused, 3 passes"
HOST: Final = "host state"
HOST_FUSED: Final = "host state, fused"
ALL_HOST: Final = "all on host, fused"
WAYS: tuple[Way, ...] = get_args(Way)

ADAM_A: Final = "AdamA"
MICROBATCHES = 4  # of AdamA, which is for them

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Training:
    """A model to train, by shapes alone.

    Attributes:
      loss: of parameters and batch.
      params, batch: shapes.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any

    def job(self, optimizer: str, way: Way) -> jaxmem.Job:
        """A step of an optimizer of `OPTIMIZERS`, or of AdamA, in one of the ways.

        Raises:
          ValueError: AdamA has no other way than the ordinary one.
        """
        params, state = self.params, self.state(optimizer)
        if way in (HOST, HOST_FUSED, ALL_HOST):
            state = on_host(state)
        if way == ALL_HOST:
            params = on_host(params)
        name = f"{optimizer}, {way}"
        step = self._step(optimizer, way)
        return jaxmem.Job(step, (params, state, self.batch), donate_argnums=(0, 1), name=name)

    def state(self, optimizer: str) -> Any:
        """Shapes of the optimizer's state."""
        init = jaxmem.AdamA(_RATE).init if optimizer == ADAM_A else OPTIMIZERS[optimizer]().init
        return jax.eval_shape(init, self.params)

    def plan(self, optimizer: str, way: Way) -> jaxmem.UpdatePlan | None:
        """How a step of `value_and_update` goes about it; None of others."""
        if way in (ORDINARY, HOST) or optimizer == ADAM_A:
            return None
        job = self.job(optimizer, way)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jaxmem.JaxmemWarning)  # the plan says the same
            return job.step.explain(*job.args)  # pyright: ignore[reportFunctionMemberAccess]

    def after(self, optimizer: str, way: Way) -> list[jaxmem.UpdatedLeaf]:
        """The stacks that such a step updates after the backward pass, of trees with "layers"."""
        plan = self.plan(optimizer, way)
        leaves = () if plan is None else plan.leaves
        return [leaf for leaf in leaves if "layers" in leaf.path and not leaf.in_backward]

    # ------------------------------------------------------------ implementation

    def _step(self, name: str, way: Way) -> Callable[..., Any]:
        if name == ADAM_A:
            if way != ORDINARY:
                raise ValueError(f"AdamA is no optax transformation, and cannot go {way!r}")
            return _adam_a(self.loss)
        optimizer = OPTIMIZERS[name]()
        if way in (HOST, HOST_FUSED, ALL_HOST):
            optimizer = jaxmem.offload_state(optimizer)
        if way in (ORDINARY, HOST):
            return ordinary(self.loss, optimizer)
        return jaxmem.value_and_update(self.loss, optimizer, passes=3 if way == FUSED_3 else 2)


# ---------------------------------------------------------------- API


def ordinary(loss: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """The step as everybody writes it: the whole gradient, then the update."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    return step


def goes(leaf: jax.ShapeDtypeStruct, least: int = 2**20) -> bool:
    """Whether `offload_state` has an array on the host, as it does for a TPU."""
    return leaf.size >= least and leaf.shape[-1] >= 128


def on_host(tree: Any, least: int = 2**20) -> Any:
    """Shapes of arrays in the host's memory, of those that go there."""
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("one",), devices=jax.devices()[:1], axis_types=axes)
    spec = jax.sharding.PartitionSpec()
    host = jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host")

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not goes(leaf, least):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)

    return jax.tree.map(placed, tree)


def nbytes(tree: Any) -> int:
    """Bytes of arrays, or of shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# ---------------------------------------------------------------- implementation

_RATE = 1e-3  # changes no byte


def _adam_a(loss: Callable[..., Any]) -> Callable[..., Any]:
    value_and_update = jaxmem.AdamA(_RATE).value_and_update(loss, microbatches=MICROBATCHES)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, updates, state = value_and_update(state, params, batch)
        return value, optax.apply_updates(params, updates), state

    return step


# ---------------------------------------------------------------- the list

SGD, ADAM, ADAMW, ADALOMO = "SGD", "Adam", "AdamW", "AdaLomo"
DYNAMIC, COMPANDING = "8-bit Adam, dynamic", "8-bit Adam, companding"
DYNAMIC_W = "8-bit AdamW"

OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    SGD: lambda: optax.sgd(_RATE),
    "momentum": lambda: optax.sgd(_RATE, momentum=0.9),
    ADAM: lambda: optax.adam(_RATE),
    ADAMW: lambda: optax.adamw(_RATE),
    "Lion": lambda: optax.lion(_RATE),
    "Adafactor": lambda: optax.adafactor(_RATE),
    "SM3": lambda: optax.sm3(_RATE),
    "LARS": lambda: optax.lars(_RATE),
    "LAMB": lambda: optax.lamb(_RATE),
    DYNAMIC: lambda: jaxmem.quantize_state(optax.adam(_RATE)),
    COMPANDING: lambda: jaxmem.quantize_state(optax.adam(_RATE), "companding"),
    DYNAMIC_W: lambda: jaxmem.quantize_state(optax.adamw(_RATE)),
    ADALOMO: lambda: jaxmem.adalomo(_RATE),
}
"""What the literature on their memory names; AdamA, which is no transformation, beside it."""
