"""The description of an accelerator: its memory, its speeds, and what a compiler needs to know.

A `Target` is plain data.  What only the compiler needs is in its `spec`, a
`GpuSpec` or a `TpuSpec`, which must be complete: an incomplete description of a GPU
gives other numbers, or crashes the compiler.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from jaxmem import _jax
from jaxmem.errors import check_positive
from jaxmem.targets import installed

Platform = Literal["gpu", "tpu"]
Source = Literal["xla", "datasheet", "user"]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class GpuSpec:
    """What XLA must know of a GPU to compile for it, beyond what a `Target` has.

    Attributes:
      compute_capability: as "9.0".
      cores: streaming multiprocessors.
      fpus_per_core: float32 units in each.
      threads_per_core: resident threads, at most.
      shared_memory_per_core, shared_memory_optin: bytes, in all and for a block that opts in.
      l2: bytes.
      clock_ghz: the boost clock.
    """

    compute_capability: str
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_optin: int
    l2: int
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class TpuSpec:
    """What libtpu must know to compile for a TPU.

    Attributes:
      generation: libtpu's name of it: "v5e".
      slices: the shapes, in chips, of this generation's topologies: "2x2".
      devices_per_chip: as jax counts them.
      chip_config: libtpu's name for how the cores of a chip are combined; "" for its default.
    """

    generation: str
    slices: tuple[str, ...]
    devices_per_chip: int = 1
    chip_config: str = ""

    def devices(self, shape: str) -> int:
        """How many devices jax sees in a slice."""
        return math.prod(chips(shape)) * self.devices_per_chip


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator, attached or not; figures are for one device.

    Attributes:
      name: by which it is selected: "h100-80g".
      device: the vendor's name, which is jax's device kind of an attached one.
      platform: "gpu" or "tpu".
      memory: bytes.
      bandwidth: of that memory, in bytes per second.
      matrix_peak: FLOP per second of dense bf16 matrix products.
      spec: what only the compiler needs.
      devices: how many of them a program is compiled for.
      source: where the facts are from: "xla" agrees with the compiler's own
        descriptions, "datasheet" is from the vendor's, "user" from a file.
      other_names: further kinds by which jax may know an attached one.
      link_bandwidth: bytes per second that a device sends, in one direction, to the others
        of its host (a GPU, over NVLink or PCIe) or slice (a TPU, over ICI), all its links
        together: a peak, None where it is not known.
      link_axes: the dimensions of the torus that these links make; a collective along one of
        them has `link_bandwidth / link_axes`.  1 where all of a host reach each other
        at the full bandwidth.
      link_latency: seconds for one step of a ring over these links; None if not known.
      network_bandwidth: bytes per second that a device sends to other hosts or slices; None
        if not known.

    >>> import jaxmem
    >>> h100 = jaxmem.target("h100-80g")
    >>> h100.platform, h100.memory > 79 * 2**30, h100.devices
    ('gpu', True, 1)
    >>> h100.link_bandwidth, h100.network_bandwidth
    (450000000000, 50000000000)
    """

    name: str
    device: str
    platform: Platform
    memory: int
    bandwidth: float
    matrix_peak: float
    spec: GpuSpec | TpuSpec
    devices: int = 1
    source: Source = "user"
    other_names: tuple[str, ...] = ()
    # Not in the repr, which tells the compilers' cached results apart: no compiler reads them.
    link_bandwidth: float | None = dataclasses.field(default=None, repr=False)
    link_axes: int = dataclasses.field(default=1, repr=False)
    link_latency: float | None = dataclasses.field(default=None, repr=False)
    network_bandwidth: float | None = dataclasses.field(default=None, repr=False)

    @property
    def default_bytes(self) -> int:
        """What jax takes of the memory by default: three quarters of a GPU's.

        >>> from jaxmem.targets import target
        >>> target("a100-40g").default_bytes, target("v5e-16g").default_bytes
        (31748259840, 16911433728)
        """
        return self.memory * 3 // 4 if self.platform == "gpu" else self.memory

    @property
    def link(self) -> tuple[float, float] | None:
        """Bytes per second along one axis of its links, and seconds for one step of a ring.

        None where no figure of the links is known.
        """
        if self.link_bandwidth is None:
            return None
        return self.link_bandwidth / self.link_axes, self.link_latency or 0.0

    def with_devices(self, devices: int) -> "Target":
        """This target with this number of devices.

        Raises:
          TypeError, ValueError: there is no slice of that many; the message says which there are.

        >>> from jaxmem.targets import target
        >>> target("h100-80g").with_devices(8).devices
        8
        """
        new = dataclasses.replace(self, devices=check_positive("devices", devices))
        new.topology  # noqa: B018  it raises where there is none
        return new

    def mesh(
        self,
        axes: Mapping[str, int],
        axis_types: Sequence[jax.sharding.AxisType] | None = None,
    ) -> jax.sharding.AbstractMesh:
        """A mesh of these devices, for the shardings of arguments; none of them needs to exist.

        Args:
          axes: names and sizes, slowest first; the product of the sizes is the number of devices.
          axis_types: of each axis, as for `jax.make_mesh`; None for Auto throughout, on which any
            function may be called.  What is traced on axes of type Explicit is traced under
            `jax.sharding.use_abstract_mesh`.

        Raises:
          TypeError, ValueError: the product is another number, `axes` is not such a mapping, or
            there is not one type for each of them.

        >>> import jax, jaxmem
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jaxmem.targets.target("v5e-16g", devices=8).mesh({"data": 4, "model": 2})
        >>> rows = NamedSharding(mesh, PartitionSpec("data"))
        >>> jax.ShapeDtypeStruct((64, 128), "float32", sharding=rows).shape
        (64, 128)
        """
        if not isinstance(axes, Mapping):
            raise TypeError(
                f"mesh takes names of axes with their sizes, got {axes!r}; "
                f'pass mesh({{"data": {self.devices}}})'
            )
        sizes = {axis: check_positive(f"the size of axis {axis!r}", n) for axis, n in axes.items()}
        if (product := math.prod(sizes.values())) != self.devices:
            given = " × ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(
                f"the axes {given} make {product} device(s), but this target has {self.devices}; "
                f"ask for target({self.name!r}, devices={product}), or change the axes"
            )
        # The default differs between releases.
        kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
        if axis_types is not None:
            kinds = _axis_types(axis_types, tuple(sizes))
        device = _jax.absent_gpu(self.device) if self.platform == "gpu" else None
        shape = tuple(sizes.values()), tuple(sizes), kinds
        return jax.sharding.AbstractMesh(*shape, abstract_device=device)

    def missing(self) -> tuple[str, ...]:
        """What must be installed to compile for it, each with the command; () if nothing."""
        capability = self.spec.compute_capability if isinstance(self.spec, GpuSpec) else ""
        return installed.missing(self.platform, capability)

    @property
    def unavailable(self) -> str:
        """Why the installed compiler cannot compile for it; "" where it can, or none is installed.

        >>> from jaxmem.targets import target
        >>> target("h100-80g").unavailable
        ''
        """
        if not isinstance(self.spec, GpuSpec):
            return ""
        return installed.dropped(self.spec.compute_capability)

    @property
    def topology(self) -> dict[str, Any]:
        """The arguments of `jax.experimental.topologies.get_topology_desc` for these devices.

        Raises:
          ValueError: there is no slice of that many devices.
        """
        if isinstance(self.spec, GpuSpec):
            return _gpu_topology(self, self.spec)
        return _tpu_topology(self, self.spec)


# ---------------------------------------------------------------- implementation


def chips(shape: str) -> tuple[int, ...]:
    """The chips along each side of a slice: (2, 4) of "2x4".

    Raises:
      ValueError: `shape` is not of this form.
    """
    sides = tuple(int(side) if side.isdecimal() else 0 for side in shape.split("x"))
    if len(sides) not in (2, 3) or min(sides) < 1:
        raise ValueError(f'expected the sides of a slice, as "2x4" or "2x2x1", got {shape!r}')
    return sides


_HOST = 8  # GPUs in one machine


def _gpu_topology(target: Target, spec: GpuSpec) -> dict[str, Any]:
    hosts, rest = divmod(target.devices, _HOST)
    if target.devices < _HOST:
        hosts, each = 1, target.devices
    elif rest:
        raise ValueError(
            f"there are {_HOST} GPUs in a host, so {target.devices} of them do not make whole "
            f"hosts; ask for {hosts * _HOST} or {(hosts + 1) * _HOST} devices"
        )
    else:
        each = _HOST
    shape = f"1x{hosts}x{each}"
    return {
        "platform": "cuda",
        "topology_name": shape,
        "topology": shape,
        "target_config": _gpu_text(target, spec),
    }


# Blocks have no limits of their own on these, in all architectures that are still compiled for.
_COMMON = """\
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
"""
# Architectures for whose specific instructions (the "a" of sm_90a) XLA compiles.
_ACCELERATED = ("9.0", "10.0")


def _gpu_text(target: Target, spec: GpuSpec) -> str:
    """A GpuTargetConfigProto in text form, with every field that the compiler reads."""
    major, minor = spec.compute_capability.split(".")
    extension = "ACCELERATED_FEATURES" if spec.compute_capability in _ACCELERATED else "NONE"
    name = target.device.replace("\\", "\\\\").replace('"', '\\"')
    return f"""gpu_device_info {{
{_COMMON}\
  shared_memory_per_core: {spec.shared_memory_per_core}
  shared_memory_per_block_optin: {spec.shared_memory_optin}
  threads_per_core_limit: {spec.threads_per_core}
  core_count: {spec.cores}
  fpus_per_core: {spec.fpus_per_core}
  memory_bandwidth: {round(target.bandwidth)}
  l2_cache_size: {spec.l2}
  clock_rate_ghz: {spec.clock_ghz}
  device_memory_size: {target.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  name: "{name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def _tpu_topology(target: Target, spec: TpuSpec) -> dict[str, Any]:
    sizes = {spec.devices(shape): shape for shape in reversed(spec.slices)}
    # One device of a chip that has two still is one device.
    wanted = min(sizes) if target.devices == 1 else target.devices
    if wanted not in sizes:
        known = ", ".join(map(str, sorted({1, *sizes})))
        raise ValueError(
            f"there is no slice of {target.devices} devices of {target.name}; "
            f"it has slices of {known} devices"
        )
    sides = (*chips(sizes[wanted]), 1)[:3]
    found: dict[str, Any] = {
        "platform": "tpu",
        "topology_name": f"{spec.generation}:{sizes[wanted]}",
        "chips_per_host_bounds": [min(sides[0], 2), min(sides[1], 2), 1],
    }
    if spec.chip_config:
        found["chip_config_name"] = spec.chip_config
    return found


def _axis_types(
    given: Sequence[jax.sharding.AxisType], axes: Sequence[str]
) -> tuple[jax.sharding.AxisType, ...]:
    kind = jax.sharding.AxisType
    one = f"({', '.join(['AxisType.Explicit'] * len(axes))}{',' * (len(axes) == 1)})"
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise TypeError(
            f"axis_types takes a jax.sharding.AxisType for each axis, got {given!r}; pass {one}"
        )
    if len(given) != len(axes):
        raise ValueError(
            f"there are {len(given)} axis_types for the {len(axes)} axes {', '.join(axes)}; "
            f"pass one for each, as {one}"
        )
    return tuple(given)
