"""A pipeline over the mesh: `jax.shard_map` over the axis of the stages, and its derivative."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jaxmem.pipeline import kept, one_by_one
from jaxmem.pipeline.backward import Gradients
from jaxmem.pipeline.carried import Carried
from jaxmem.pipeline.device import Inputs, Program

# ---------------------------------------------------------------- API


def on_stages(program: Program, mesh: Any) -> Callable[[Inputs], tuple[jax.Array, Carried]]:
    """The program over the mesh, with a derivative that is made together with the value.

    What it makes beside the value comes with a leading axis of the stages, and has no derivative.
    """
    axis = program.axis
    own, whole = PartitionSpec(axis), PartitionSpec()
    specs: Any = own, whole, whole, whole, whole, whole, own, whole
    in_specs = Inputs(*specs)

    def over(local: Callable[..., Any], out_specs: Any) -> Callable[[Inputs], Any]:
        # Types that tell what varies over devices would ask the function to be written for them.
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, axis_names={axis},
            check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped)

    def of_stages(made: Carried) -> Carried:
        return jax.tree.map(lambda x: x[None], made)

    def value(inputs: Inputs) -> tuple[jax.Array, Carried]:
        executor = one_by_one if program.recompute else kept
        found, made = executor.value(program, inputs)
        return jax.lax.psum(found, axis), of_stages(made)

    def with_gradients(
        inputs: Inputs, wanted: Gradients
    ) -> tuple[tuple[jax.Array, Carried], Gradients]:
        if program.recompute:
            found, sums, made = one_by_one.value_and_gradients(program, inputs, wanted)
            sums = sums._replace(params=[None if x is None else x[None] for x in sums.params])
        else:
            found, sums, made = _differentiated(program, inputs, wanted)
        shared = jax.lax.psum(sums.shared, axis)
        outs = jax.lax.psum(found, axis), of_stages(made)
        return outs, Gradients(sums.params, shared)

    @jax.custom_vjp
    def call(inputs: Inputs) -> tuple[jax.Array, Carried]:
        return over(value, (whole, own))(inputs)

    def forward(boxes: Inputs) -> tuple[tuple[jax.Array, Carried], Any]:
        is_box = lambda leaf: hasattr(leaf, "perturbed")  # noqa: E731
        inputs = jax.tree.map(lambda box: box.value, boxes, is_leaf=is_box)
        _refuse_gradient([*boxes.rows, *boxes.scales, *boxes.layers, *boxes.after])

        def flags(boxes: Iterable[Any]) -> list[bool]:
            return list(map(_is_wanted, boxes))

        wanted = Gradients(flags(boxes.params), flags(boxes.shared))
        local = functools.partial(with_gradients, wanted=wanted)
        out_specs = ((whole, own), Gradients(own, whole))  # pyright: ignore[reportArgumentType]
        found, sums = over(local, out_specs)(inputs)
        types = [[jax.typeof(x).dtype for x in xs] for xs in (inputs.params, inputs.shared)]
        return found, (sums, _Types(types))

    def backward(kept: Any, cotangents: Any) -> tuple[Inputs]:
        sums, types = kept
        cotangent, _ = cotangents
        if isinstance(cotangent, SymbolicZero):
            sums = Gradients(*([None] * len(xs) for xs in sums))
        found = [
            [None if x is None else (x * cotangent.astype(x.dtype)).astype(dtype)
             for x, dtype in zip(xs, dtypes, strict=True)]
            for xs, dtypes in zip(sums, types.value, strict=True)
        ]  # fmt: skip
        nothing: Any = [None] * 6
        return (Inputs(found[0], found[1], *nothing),)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def without_gradient(outputs: Any, value: jax.Array) -> Any:
    """Auxiliary outputs, of which a gradient is refused where the value has one."""
    leaves, tree = jax.tree.flatten(outputs)  # variables of NNX look like what they hold
    return tree.unflatten(_beside(leaves, value)) if leaves else outputs


def constant(states: list[Any]) -> list[Any]:
    """States, of which a gradient is refused: what is made of them ahead would give none."""
    return jax.lax.stop_gradient(_constant(states)) if states else states


# ---------------------------------------------------------------- implementation


def _is_wanted(box: Any) -> bool:
    """Whether a gradient is asked for, of an array as a derivative rule gets it."""
    return box.perturbed and jnp.issubdtype(box.value.dtype, jnp.inexact)


def _refuse_gradient(boxes: Iterable[Any]) -> None:
    if any(map(_is_wanted, boxes)):
        raise ValueError(
            "the gradient of the batch or of state is asked for, and a pipeline has none; "
            "differentiate with respect to parameters alone (of an NNX module by "
            "nnx.value_and_grad)"
        )


@jax.custom_vjp
def _constant(states: list[Any]) -> list[Any]:
    return states


def _constant_forward(states: list[Any]) -> tuple[list[Any], None]:
    _refuse_gradient(states)
    return [box.value for box in states], None


def _constant_backward(_: None, cotangents: Any) -> tuple[None]:
    return (None,)


_constant.defvjp(_constant_forward, _constant_backward, symbolic_zeros=True)


@jax.custom_vjp
def _beside(outputs: list[Any], value: jax.Array) -> list[Any]:
    return outputs


def _beside_forward(outputs: list[Any], value: Any) -> tuple[list[Any], None]:
    return [box.value for box in outputs], None


def _beside_backward(_: None, cotangents: Any) -> Any:
    if not all(map(_is_zero, jax.tree.leaves(cotangents, is_leaf=_is_zero))):
        raise ValueError(
            "the gradient of auxiliary outputs is asked for, and those of a pipeline have none; "
            "add them to the loss inside of the function, or pass has_aux=True to "
            "jax.value_and_grad if they are not to be differentiated"
        )
    return None, None


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero) or (
        getattr(cotangent, "dtype", None) == jax.dtypes.float0
    )


_beside.defvjp(_beside_forward, _beside_backward, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """Something that is no array, next to arrays."""

    value: Any

    def __hash__(self) -> int:
        return hash(str(self.value))


def _differentiated(
    program: Program, inputs: Inputs, wanted: Gradients
) -> tuple[jax.Array, Gradients, Carried]:
    """Value and gradients of the loop over ticks, by jax; and what it made."""

    def flagged(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
        return [x if flag else None for x, flag in zip(values, flags, strict=True)]

    def loss(params: list[Any], shared: list[Any]) -> tuple[jax.Array, Carried]:
        own = inputs._replace(
            params=[a if b is None else b for a, b in zip(inputs.params, params, strict=True)],
            shared=[a if b is None else b for a, b in zip(inputs.shared, shared, strict=True)],
        )
        return kept.value(program, own)

    (found, made), sums = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        flagged(inputs.params, wanted.params), flagged(inputs.shared, wanted.shared)
    )
    return found, Gradients(*sums), made
