"""Steps and layers as one device of a mesh runs them."""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _jax
from jaxmem.parallel.localised import Localiser
from jaxmem.parallel.messages import Spec
from jaxmem.trace.layer import Layer, nbytes

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A step, as jax's partitioner splits it over a mesh.

    Attributes:
      closed: the step as one device runs it.
      read: how the values are split that were read under each number, see `jaxmem._jax.read`.
      platform: that the step is for, see `jaxmem._jax.splits`.
    """

    mesh: Any
    closed: ClosedJaxpr
    read: Mapping[int, tuple[Spec | None, ...]]
    platform: str | None

    def bytes(self, var: Any, spec: Spec | None) -> int:
        """Of a value that is split so, on one device."""
        shape = getattr(var.aval, "shape", None)
        if shape is None:
            return nbytes(var.aval)
        return math.prod(_jax.local_shape(shape, spec, self.mesh.shape)) * var.aval.dtype.itemsize

    def layer(
        self, layer: Layer, operands: Sequence[Spec | None], results: Sequence[Spec | None]
    ) -> Layer:
        """A layer as one device runs it, for looking at: it cannot be run.

        Args:
          operands, results: how those of the layer are split, None where it is open.
        """
        reverse, both = layer.transposed, layer.both_ways
        cotangents = [spec for spec, wrt in zip(results, layer.wrt.outs, strict=True) if wrt]
        gradients = [spec for spec, wrt in zip(operands, layer.wrt.ins, strict=True) if wrt]
        given = self._shardings([*operands, *cotangents], both.jaxpr.invars)
        wanted = self._shardings(gradients, both.jaxpr.outvars)
        specs = dict(_jax.splits(both, given, wanted, self.platform))
        for var, atom in zip(reverse.jaxpr.invars, layer.residuals, strict=False):
            if _jax.is_var(atom) and atom in specs:
                specs.setdefault(var, specs[atom])
        return _localised(layer, Localiser(specs, self.mesh.shape))

    def _shardings(self, specs: Sequence[Spec | None], atoms: Sequence[Any]) -> list[Any]:
        return [self._sharding(spec, atom) for spec, atom in zip(specs, atoms, strict=True)]

    def _sharding(self, spec: Spec | None, atom: Any) -> Any:
        """None where it is open."""
        if spec is None or len(spec) != len(getattr(atom.aval, "shape", ())):
            return None
        # Of a part of an axis there is no sharding.
        known = [tuple(axis for axis in axes if axis in self.mesh.shape) for axes in spec]
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in known)))


# ---------------------------------------------------------------- API


def partition(
    closed: ClosedJaxpr, shardings: Sequence[Any], platform: str | None = None
) -> Partition | None:
    """A step as one device of its mesh runs it; None without a mesh of several devices.

    Args:
      closed: the step.
      shardings: of its operands; None, or one that names no mesh, where nothing is said.
      platform: see `jaxmem._jax.splits`.

    Raises:
      NotImplementedError, RuntimeError, ValueError: see there.
    """
    mesh = _jax.mesh_of(shardings)
    if mesh is None:
        return None
    specs = _jax.splits(closed, shardings, platform=platform)
    local = Localiser(specs, mesh.shape)(closed)
    read = {
        number: tuple(specs.get(atom) if _jax.is_var(atom) else None for atom in eqn.invars)
        for eqn in _jax.all_equations(closed.jaxpr)
        if (number := _jax.read_number(eqn)) is not None
    }
    return Partition(mesh, local, read, platform)


def devices(shardings: Sequence[Any]) -> int:
    """Over how many devices values of these shardings are spread."""
    mesh = _jax.mesh_of(shardings)
    return 1 if mesh is None else mesh.size


# ---------------------------------------------------------------- implementation


def _localised(layer: Layer, local: Localiser) -> Layer:
    other = copy.copy(layer)
    other.linearised = local(layer.linearised)
    other.values = list(map(local.var, layer.values))
    other.places = {var: place for place, var in enumerate(other.values)}
    other._makers = {var: eqn for eqn in other.linearised.jaxpr.eqns for var in eqn.outvars}
    other.__dict__["transposed"] = local(layer.transposed)
    other.__dict__["digest"] = layer.digest
    return other
