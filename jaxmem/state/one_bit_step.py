"""A data-parallel step in which an optimizer averages, and not the gradient: `one_bit_step`.

Around it: how such an optimizer's state lies over the devices, and how it goes to other ones.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _jax
from jaxmem._util.text import columns, size
from jaxmem.accumulate import devices
from jaxmem.accumulate.gradient import value_and_grad
from jaxmem.accumulate.trees import described, leaf_names
from jaxmem.errors import check_positive
from jaxmem.parallel.rings import ring_bytes
from jaxmem.state.one_bit import OneBitAdamState
from jaxmem.state.one_bit_lamb import OneBitLambState
from jaxmem.state.signs import part_size, wire_bytes
from jaxmem.state.wrapping import check_optimizer

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class OneBitStep:
    """A training step, as `one_bit_step` returns it.

    Attributes:
      fun: the loss.
      optimizer: one of `one_bit_adam` or `one_bit_lamb`, alone or in an optax chain.
      mesh, axis: over which the batch lies.
      microbatches, batch_argnums, rng_argnums, accumulator_dtype: as in `jaxmem.value_and_grad`.
    """

    fun: Callable[..., Any]
    optimizer: Any
    mesh: Any
    axis: str | tuple[str, ...]
    microbatches: int = 1
    batch_argnums: tuple[int, ...] = (1,)
    rng_argnums: tuple[int, ...] = ()
    accumulator_dtype: Any = jnp.float32

    @property
    def devices(self) -> int:
        """Over how many the batch lies."""
        return math.prod(self.mesh.shape[axis] for axis in _axes(self.axis))

    @property
    def batch(self) -> NamedSharding:
        """Where the batch belongs: its rows over the devices."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    def state(self, params: Any) -> Any:
        """A tree of shardings for what the optimizer's `init` returns for such parameters."""
        specs = one_bit_specs(self._types(params), self.axis)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def init(self, params: Any) -> tuple[Any, Any]:
        """Parameters, whole on each device, and the state that the optimizer makes of them."""
        params = jax.device_put(params, NamedSharding(self.mesh, PartitionSpec()))
        return params, jax.jit(self._init(self._specs(params)))(params)

    def explain(self, params: Any, state: Any = None) -> "OneBitPlan":
        """What each device holds of the optimizer's state, and sends in a step of either phase.

        Args:
          params: arrays, or types of such.
          state: with arrays, numbers that have no variance, and so do not move, are counted.
        """
        types = self._types(params)
        whole = jax.tree.leaves(jax.tree.map(lambda p: p.size, params))
        fields: dict[str, int] = {}
        for own in _states(types):
            for name, value in own._asdict().items():
                own_devices = self.devices if name in _SPLIT else 1
                size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
                fields[name] = fields.get(name, 0) + size // own_devices
        still = {} if state is None else dict(_without_variance(state))
        return OneBitPlan(
            self.devices,
            fields,
            sum(ring_bytes("all-reduce", 4 * size, self.devices) for size in whole),
            wire_bytes(whole, self.devices),
            still,
        )

    def __call__(self, params: Any, state: Any, *args: Any) -> tuple[jax.Array, Any, Any]:
        batch = self._positions(self.batch_argnums, args)
        own = [
            jax.tree.map(lambda leaf, split=k in batch: self._spec(leaf, split), argument)
            for k, argument in enumerate(args)
        ]
        self._check_rows(args, batch)
        specs = (PartitionSpec(), one_bit_specs(state, self.axis))
        placed = (params, state, *args)
        if _jax.types_tell(self.mesh):
            placed = tuple(map(self._resharded, placed, (*specs, *own)))
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(*specs, *own),
            out_specs=(PartitionSpec(), *specs),
            check_vma=False,
        )(*placed)

    # ------------------------------------------------------------ implementation

    def _local(self, params: Any, state: Any, *args: Any) -> Any:
        """The step as one device runs it."""
        keys = self._positions(self.rng_argnums, args)
        axes = _axes(self.axis)
        args = tuple(
            devices.own_keys(arg, axes) if k in keys else arg for k, arg in enumerate(args)
        )
        (value, aux), gradient = value_and_grad(
            self.fun,
            microbatches=self.microbatches,
            batch_argnums=self.batch_argnums,
            rng_argnums=self.rng_argnums,
            accumulator_dtype=self.accumulator_dtype,
            return_weight=True,
        )(params, *args)
        weight = jnp.asarray(aux.weight)
        if weight.ndim:
            raise ValueError(
                "one_bit_step: the loss is a sum of several jaxmem.Weighted, which are divided by "
                "weights of all devices each, and a device's gradient has one weight only; return "
                "one Weighted"
            )
        # Rows of other devices may count more: the mean of means is weighted as the batch is.
        total = jax.lax.psum(weight, axes)
        share = jnp.where(total == 0, 0.0, weight / jnp.where(total == 0, 1, total))
        value = jax.lax.psum(value * share.astype(value.dtype), axes)
        factor = share * self.devices
        gradient = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradient)
        updates, state = self.optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    def _init(self, specs: Any) -> Callable[[Any], Any]:
        return jax.shard_map(
            self.optimizer.init,
            mesh=self.mesh,
            in_specs=PartitionSpec(),
            out_specs=specs,
            check_vma=False,
        )

    def _types(self, params: Any) -> Any:
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        return jax.eval_shape(self._init(self._specs(shapes)), shapes)

    def _specs(self, params: Any) -> Any:
        """Of the state; its form does not depend on the devices."""
        found: list[Any] = []

        def init(params: Any) -> Any:
            found.append(jax.eval_shape(self.optimizer.init, params))
            return ()

        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        whole = jax.shard_map(
            init, mesh=self.mesh, in_specs=PartitionSpec(), out_specs=(), check_vma=False
        )
        jax.eval_shape(whole, shapes)
        return one_bit_specs(found[0], self.axis)

    def _positions(self, numbers: Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
        """Which of what follows the parameters these numbers of arguments mean."""
        return tuple((n + len(args) + 1 if n < 0 else n) - 1 for n in numbers)

    def _spec(self, leaf: Any, is_split: bool) -> PartitionSpec:
        return PartitionSpec(self.axis) if is_split and jnp.ndim(leaf) else PartitionSpec()

    def _resharded(self, tree: Any, specs: Any) -> Any:
        if isinstance(specs, PartitionSpec):
            specs = jax.tree.map(lambda _: specs, tree)
        return jax.tree.map(
            lambda leaf, spec: jax.reshard(leaf, NamedSharding(self.mesh, spec)), tree, specs
        )

    def _check_rows(self, args: Sequence[Any], batch: Sequence[int]) -> None:
        for k in batch:
            if k >= len(args):
                continue
            for name, leaf in zip(leaf_names(args[k]), jax.tree.leaves(args[k]), strict=True):
                if jnp.ndim(leaf) and jnp.shape(leaf)[0] % self.devices:
                    raise ValueError(
                        f"one_bit_step: {name} of argument {k + 1} is {described(leaf)}, and its "
                        f"{jnp.shape(leaf)[0]} rows cannot lie evenly over the {self.devices} "
                        f"devices of {self.axis!r}; pass a batch that they divide"
                    )


@dataclasses.dataclass(frozen=True)
class OneBitPlan:
    """What a device holds and sends, as `OneBitStep.explain` returns it.

    Attributes:
      devices: how many there are.
      state_bytes: of the optimizer's state on one device, by field.
      warmup_bytes, compressed_bytes: what one device sends in a step of the warm-up and of those
        after it, by ring algorithms; scales included, the loss and its weight not.
      still: paths of parameters, and how many of their numbers have no variance.
    """

    devices: int
    state_bytes: dict[str, int]
    warmup_bytes: int
    compressed_bytes: int
    still: dict[str, int]

    def __str__(self) -> str:
        times = self.warmup_bytes / max(self.compressed_bytes, 1)
        lines = [
            f"each of {self.devices} devices holds {size(sum(self.state_bytes.values()))} of "
            f"optimizer state, and sends a step {size(self.warmup_bytes)} in the warm-up, then "
            f"{size(self.compressed_bytes)} ({times:.1f} times less)",
            columns([[name, size(bytes)] for name, bytes in self.state_bytes.items()], right=[1]),
        ]
        for path, count in self.still.items():
            lines.append(f"  {path}: {count} numbers have no variance, and do not move")
        return "\n".join(lines)


# ---------------------------------------------------------------- API


def one_bit_step(
    fun: Callable[..., Any],
    optimizer: Any,
    *,
    mesh: Any = None,
    axis: str | tuple[str, ...] = "data",
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] = (1,),
    rng_argnums: int | Sequence[int] = (),
    accumulator_dtype: Any = jnp.float32,
) -> OneBitStep:
    """A step that leaves the average over devices to `one_bit_adam` or `one_bit_lamb`.

        optimizer = jaxmem.one_bit_adam(3e-4, warmup_steps=1000)
        step = jaxmem.one_bit_step(loss, optimizer, mesh=mesh)
        params, state = step.init(params)
        print(step.explain(params))
        train = jax.jit(step, donate_argnums=(0, 1))
        value, params, state = train(params, state, jax.device_put(batch, step.batch))

    Each device computes the gradient of its own rows (`jaxmem.value_and_grad` inside of
    `jax.shard_map`), the optimizer averages, and all make the same update.  Means are weighted as
    those of `value_and_grad` are: by rows, or by what a `jaxmem.Weighted` says.

    Known gaps: parameters are whole on each device, so other axes of the mesh have one device; the
    loss has no auxiliary outputs.  Both phases are in one program: a `jaxmem.memory_report` needs
    what the larger needs, and lists the collectives of the phase that sends more, the warm-up.

    Args:
      fun: the loss, of parameters and then of what the step is called with.
      optimizer: one of these two, alone or in `optax.chain`.  What stands before it in a chain sees
        the gradient of one device, such as a clipping by the norm of that.
      mesh: of several devices; None for the one that is set by `jax.set_mesh`.
      axis: as in the optimizer.
      microbatches, batch_argnums, rng_argnums, accumulator_dtype: as in `jaxmem.value_and_grad`;
        positions are those of the arguments of `fun`.  Each device has random keys of its own.

    Returns:
      A function from parameters, state and other arguments to the loss, parameters and state.

    Raises:
      TypeError, ValueError: an option cannot be, the axis has one device, or at a call the rows do
        not divide by the devices.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, batch):
    ...     return ((batch["x"] @ w - batch["y"]) ** 2).mean()
    >>> batch = {"x": jax.random.normal(jax.random.key(0), (64, 256)), "y": jnp.ones(64)}
    >>> if len(jax.devices()) > 3:
    ...     mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    ...     optimizer = jaxmem.one_bit_adam(1e-2, warmup_steps=10)
    ...     step = jaxmem.one_bit_step(loss, optimizer, mesh=mesh)
    ...     params, state = step.init(jnp.zeros(256))
    ...     train = jax.jit(step, donate_argnums=(0, 1))
    ...     for _ in range(30):
    ...         value, params, state = train(params, state, jax.device_put(batch, step.batch))
    ...     assert value < 0.1 and int(state.frozen) == 10
    """
    check_optimizer("one_bit_step", optimizer)
    check_positive("microbatches", microbatches)
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if not mesh.axis_names:
            raise ValueError(
                "one_bit_step has no mesh, and none is set; pass mesh=, or set one with "
                "jax.set_mesh"
            )
    found = OneBitStep(
        fun, optimizer, mesh, axis, microbatches, _numbers(batch_argnums), _numbers(rng_argnums),
        accumulator_dtype,
    )  # fmt: skip
    _check_mesh(found)
    return found


def one_bit_specs(state: Any, axis: str | tuple[str, ...] = "data") -> Any:
    """A tree of `PartitionSpec` for a state with 1-bit moments, such as `jax.shard_map` takes.

    Errors are split over the devices along their first axis, all else is whole.

    Args:
      state: arrays or types, of an optimizer alone or in an optax chain.
    """

    def specs(node: Any) -> Any:
        if not _is_one_bit(node):
            return PartitionSpec()
        whole = jax.tree.map(lambda _: PartitionSpec(), node)
        split = {
            name: jax.tree.map(lambda _: PartitionSpec(axis), getattr(node, name))
            for name in _SPLIT
        }
        return whole._replace(**split)

    return jax.tree.map(specs, state, is_leaf=_is_one_bit)


def redistribute_errors(state: Any, devices: int) -> Any:
    """The same state for another number of devices, such as one from a checkpoint.

        state = restored                            # arrays of numpy or jax, whole
        state = jaxmem.redistribute_errors(state, 8)
        state = jax.device_put(state, step.state(params))

    What signs were wrong by is still owed to the parameters, and stays so.  The errors of what the
    devices sent are owed to their *average*: each of the new devices gets the mean of all, so that
    the average over them is the same, and what distinguished the devices is gone.  (With the sum
    kept, the average would owe more or less than before.)  The errors of what they owned are cut
    into other parts, and no number changes.  For as many devices as before the state is returned
    as it is.

    The run goes on as well as before, but not bit for bit: each device has other rows of the batch,
    and parts of another size have scales of their own.

    Args:
      state: of an optimizer alone or in an optax chain.

    Raises:
      TypeError, ValueError: `devices` is none, or one, or there is no such state.

    >>> import jax.numpy as jnp
    >>> zero, w = jnp.zeros((), jnp.int32), {"w": jnp.zeros(20)}
    >>> errors = {"w": jnp.arange(40.0).reshape(2, 20)}, {"w": jnp.zeros((2, 16))}
    >>> state = OneBitAdamState(zero, zero, zero, zero, jnp.zeros(0), w, w, *errors)
    >>> state = redistribute_errors(state, 4)
    >>> state.worker_error["w"][:, 0].tolist(), state.server_error["w"].shape
    ([10.0, 10.0, 10.0, 10.0], (4, 8))
    """
    devices = check_positive("devices", devices)
    if devices == 1:
        raise ValueError(
            "devices must be at least 2: on one device nothing is sent, and errors are owed to "
            "nobody; go on with optax.adam and the moments of the state, mu and nu"
        )
    if not list(_states(state)):
        raise ValueError(
            "redistribute_errors takes the state of one_bit_adam or one_bit_lamb, or a tree that "
            f"holds one, got {jax.tree.structure(state)}"
        )

    def one(node: Any) -> Any:
        if not _is_one_bit(node):
            return node
        worker = jax.tree.map(lambda e: _averaged(e, devices), node.worker_error)
        server = jax.tree.map(
            lambda e, m: _cut_anew(e, m.size, devices), node.server_error, node.mu
        )
        return node._replace(worker_error=worker, server_error=server)

    return jax.tree.map(one, state, is_leaf=_is_one_bit)


# ---------------------------------------------------------------- implementation

_SPLIT = ("worker_error", "server_error")


def _averaged(error: Any, devices: int) -> Any:
    if error.shape[0] == devices:
        return error
    np_or_jnp = np if isinstance(error, np.ndarray) else jnp
    return np_or_jnp.broadcast_to(error.mean(0), (devices, *error.shape[1:]))


def _cut_anew(error: Any, numbers: int, devices: int) -> Any:
    if error.shape[0] == devices:
        return error
    np_or_jnp = np if isinstance(error, np.ndarray) else jnp
    part = part_size(numbers, devices)
    flat = error.reshape(-1)[:numbers]
    return np_or_jnp.pad(flat, (0, devices * part - numbers)).reshape(devices, part)


def _axes(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _numbers(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _is_one_bit(node: Any) -> bool:
    return isinstance(node, OneBitAdamState | OneBitLambState)


def _states(tree: Any) -> Iterator[Any]:
    return filter(_is_one_bit, jax.tree.leaves(tree, is_leaf=_is_one_bit))


def _without_variance(state: Any) -> Iterator[tuple[str, int]]:
    for own in _states(state):
        if int(own.frozen):
            for path, v in zip(leaf_names(own.nu), jax.tree.leaves(own.nu), strict=True):
                if count := int((v == 0).sum()):
                    yield path, count


def _check_mesh(step: OneBitStep) -> None:
    sizes = dict(step.mesh.shape)
    for axis in _axes(step.axis):
        if axis not in sizes:
            raise ValueError(
                f"one_bit_step: the batch lies over the axis {axis!r}, and the mesh has "
                f"{', '.join(map(repr, sizes))}; pass the axis over which it lies as axis= to the "
                "optimizer and here, or a mesh that has it"
            )
    if step.devices == 1:
        raise ValueError(
            f"one_bit_step sends signs between the devices of {step.axis!r}, and there is one; the "
            f"mesh is {sizes}.  Pass a mesh in which it has several, or train with optax.adamw, "
            "which needs no errors in its state"
        )
    others = {name: n for name, n in sizes.items() if name not in _axes(step.axis) and n > 1}
    if others:
        raise ValueError(
            f"one_bit_step: parameters are whole on each device, and the mesh has {others} as well;"
            " name all axes in axis= over which the batch lies, or pass a mesh without the others"
        )
