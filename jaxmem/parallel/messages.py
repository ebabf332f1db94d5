"""What operations send between devices, from how their operands and results are split.

A partitioner splits each operation as its result is split.  Operands that are split otherwise are
gathered; sums over split axes are partial on each device, and reduced over the devices: an
all-reduce, or a reduce-scatter where the result is split along the same mesh axis.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxmem import _jax
from jaxmem.parallel.rings import ring_bytes

Kind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]
Spec = _jax.Spec

# Under this name an equation's parameters hold its `Message`s, in jaxprs that are looked at.
PER_DEVICE = "jaxmem_per_device"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective that an operation needs.

    Attributes:
      bytes: on one device: of the gathered result of an all-gather, of the operand of all others.
      devices: over how many it goes.
      operand, dims: of an all-gather, which operand of the operation it is of, and along which of
        its dimensions.
    """

    kind: Kind
    bytes: int
    axes: tuple[str, ...]
    devices: int
    operand: int = 0
    dims: tuple[int, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """What one device sends."""
        return ring_bytes(self.kind, self.bytes, self.devices)


@dataclasses.dataclass(frozen=True)
class PerDevice:
    """What one device does of an operation, where its operands and results do not tell.

    Attributes:
      matmul_flops: None for what the shapes of one device come to.
      messages: what it sends.
    """

    matmul_flops: int | None = None
    messages: tuple[Message, ...] = ()


# ---------------------------------------------------------------- API


def per_device(eqn: Any) -> PerDevice:
    """What `localised` noted of an equation."""
    return eqn.params.get(PER_DEVICE, _NOTHING)


def of_operation(
    eqn: Any, ins: Sequence[Spec | None], outs: Sequence[Spec | None], sizes: Mapping[str, int]
) -> PerDevice:
    """What one device does of an operation.

    Args:
      eqn: with the types of whole arrays.
      ins, outs: how operands and results are split; None for whole.
      sizes: of the mesh axes.
    """
    if not any(map(_split, (*ins, *outs))):
        return _NOTHING
    name = eqn.primitive.name
    if name == "dot_general":
        return _product(eqn, ins, outs[0], sizes)
    if name in ("shard_map", "jit", "pjit", "scan", "while", "cond") or len(eqn.outvars) != 1:
        return _NOTHING
    out = _known(outs[0], eqn.outvars[0])
    found: list[Message] = []
    kept = _axes(out)
    summed = _summed(eqn, ins) - kept
    for at, (atom, spec) in enumerate(zip(eqn.invars, ins, strict=True)):
        if spec is None or not _jax.is_var(atom):
            continue
        if lost := _axes(spec) - kept - summed:
            found.append(_gather(at, atom.aval, spec, lost, sizes))
        elif name != "transpose" and atom.aval.shape == eqn.outvars[0].aval.shape:
            moved, own = tuple(sorted(_moved(spec, out))), _bytes(atom.aval, spec, sizes)
            if moved:
                found.append(Message("all-to-all", own, moved, _jax.devices_along(moved, sizes)))
    if summed:
        reduced = _bytes(eqn.outvars[0].aval, out, sizes)
        found.append(
            Message("all-reduce", reduced, tuple(sorted(summed)), _jax.devices_along(summed, sizes))
        )
    return PerDevice(None, tuple(found))


# ---------------------------------------------------------------- implementation

_NOTHING = PerDevice()


def _product(
    eqn: Any, ins: Sequence[Spec | None], out: Spec | None, sizes: Mapping[str, int]
) -> PerDevice:
    """A matrix product: its contraction stays split where both operands are split alike in it."""
    (contracted, batch) = eqn.params["dimension_numbers"]
    aval = eqn.outvars[0].aval
    lhs, rhs = (_known(spec, atom) for spec, atom in zip(ins, eqn.invars, strict=True))
    out = _known(out, eqn.outvars[0])
    in_out = _axes(out)
    over: set[str] = set()
    for a, b in zip(*contracted, strict=True):
        both = set(lhs[a]) & set(rhs[b])
        # What one operand alone is split by is cut out of the other, if the result is not split by
        # it.
        over |= both | ((set(lhs[a]) ^ set(rhs[b])) - in_out)
    kept = tuple(tuple(axis for axis in axes if axis not in over) for axes in out)
    places = _places(contracted, batch, (len(lhs), len(rhs)))
    found: list[Message] = []
    for at, (spec, own) in enumerate(zip((lhs, rhs), places, strict=True)):
        lost: set[str] = set()
        for axes, place in zip(spec, own, strict=True):
            lost.update(set(axes) - (over if place is None else set(kept[place])))
        if lost:
            found.append(_gather(at, eqn.invars[at].aval, spec, lost, sizes))
    size = _elements(aval.shape, kept, sizes)
    partial = size * aval.dtype.itemsize
    if scattered := over & in_out:
        count = _jax.devices_along(scattered, sizes)
        found.append(Message("reduce-scatter", partial, tuple(sorted(scattered)), count))
        partial //= count
    if summed := over - in_out:
        count = _jax.devices_along(summed, sizes)
        found.append(Message("all-reduce", partial, tuple(sorted(summed)), count))
    depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted[0])
    return PerDevice(2 * size * depth // _jax.devices_along(over, sizes), tuple(found))


def _places(contracted: Any, batch: Any, ranks: tuple[int, int]) -> list[list[int | None]]:
    """For each operand's dimensions, which one of the result they are; None if contracted."""
    found: list[list[int | None]] = []
    free = len(batch[0])
    for side in (0, 1):
        own: list[int | None] = []
        for dim in range(ranks[side]):
            if dim in contracted[side]:
                own.append(None)
            elif dim in batch[side]:
                own.append(tuple(batch[side]).index(dim))
            else:
                own.append(free)
                free += 1
        found.append(own)
    return found


def _summed(eqn: Any, ins: Sequence[Spec | None]) -> set[str]:
    """Mesh axes over which a reduction sums, or over which a table is spread that is looked up."""
    spec = ins[0] if ins else None
    if spec is None:
        return set()
    name = eqn.primitive.name
    if name.startswith(("reduce_", "arg")) and isinstance(eqn.params.get("axes"), tuple):
        dims: Iterable[int] = eqn.params["axes"]
    elif name == "gather":
        numbers = eqn.params["dimension_numbers"]
        dims = numbers.start_index_map
    else:
        return set()
    return {axis for dim in dims for axis in spec[dim]}


def _gather(
    operand: int, aval: Any, spec: Spec, lost: Iterable[str], sizes: Mapping[str, int]
) -> Message:
    lost = set(lost)
    dims = tuple(dim for dim, axes in enumerate(spec) if lost.intersection(axes))
    left = tuple(tuple(axis for axis in axes if axis not in lost) for axes in spec)
    whole = _bytes(aval, left, sizes)
    return Message(
        "all-gather", whole, tuple(sorted(lost)), _jax.devices_along(lost, sizes), operand, dims
    )


def _moved(old: Spec, new: Spec) -> set[str]:
    """Axes that split another dimension than before."""
    pairs = zip(old, new, strict=True) if len(old) == len(new) else ()
    lost = {axis for a, b in pairs for axis in set(a) - set(b)}
    return lost & _axes(new)


def _known(spec: Spec | None, atom: Any) -> Spec:
    whole: Spec = ((),) * len(atom.aval.shape)
    return whole if spec is None else spec


def _axes(spec: Spec) -> set[str]:
    return {axis for axes in spec for axis in axes}


def _split(spec: Spec | None) -> bool:
    return spec is not None and any(spec)


def _elements(shape: Sequence[int], spec: Spec | None, sizes: Mapping[str, int]) -> int:
    return math.prod(_jax.local_shape(shape, spec, sizes))


def _bytes(aval: Any, spec: Spec | None, sizes: Mapping[str, int]) -> int:
    return _elements(aval.shape, spec, sizes) * aval.dtype.itemsize
