"""Carries of tensor-parallel layers, stored whole on each device or split over the devices.

    python experiments/split_carries.py            # two minutes, all compilation
    python experiments/split_carries.py --small    # a quick trial, on fewer layers

The gradient of 24 feed-forward layers (width 1024, 8 sequences of 1024, bfloat16, every matrix
split over 8 devices) is compiled for absent accelerators under several policies, with and without
`partition="tensor"`.  Each device holds the carries of all layers whole without it, 384 MiB, and an
eighth of them with it.

It prints a table and writes `results/split_carries.csv`; the same command resumes after an
interruption.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import jaxmem
from common.table import Record, Table, markdown, versions

RESULTS = Path(__file__).parent / "results"
DEVICES = 8
POLICIES = ("full", "dots", "sqrt", "revolve", "offload")
KEY = ("target", "layers", "policy", "split")

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile tensor-parallel layers with whole and with split carries."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for."""
    results: Path = RESULTS
    """Where split_carries.csv is written."""
    small: bool = False
    """A quick trial: eight layers, one target, one policy."""

    @property
    def layers(self) -> int:
        """How many."""
        return 8 if self.small else 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A compiled gradient; all bytes are of one device.

    Attributes:
      saved_bytes: kept for the backward pass, in the device's memory at the peak.
      sent_bytes: in collectives.
    """

    target: str
    layers: int
    policy: str
    split: bool
    temp_bytes: int
    on_chip_bytes: int
    host_bytes: int
    saved_bytes: int
    sent_bytes: int
    matmul_flops: float


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed and printed."""
    table = Table(options.results / "split_carries.csv", Row, KEY)
    targets = options.targets[:1] if options.small else options.targets
    policies = POLICIES[:1] if options.small else POLICIES
    wanted = [(t, p, split) for t in targets for p in policies for split in (False, True)]
    found: list[Row] = []
    for target, policy, split in tqdm(wanted, unit="program", disable=None):
        own = versions(target)
        key = {"target": target, "layers": options.layers, "policy": policy, "split": split}
        row = table.find(own, **key)
        if row is None:
            row = measured(own, **key)
            table.add(row)
        found.append(row)
    print(f"{summary(found)}\n\nwritten: {table.path}")
    return found


def measured(versions: str, target: str, layers: int, policy: str, split: bool) -> Row:
    """One of the rows, compiled."""
    known = jaxmem.target(target, devices=DEVICES)
    step, args = gradient(known.mesh({"tensor": DEVICES}), layers, policy, split)
    report = jaxmem.memory_report(step, *args, target=known, suggest=False)
    saved = report.parts.get("saved")
    return Row(
        versions=versions, target=target, layers=layers, policy=policy, split=split,
        temp_bytes=report.temp_bytes, on_chip_bytes=report.on_chip_bytes,
        host_bytes=report.host_bytes, saved_bytes=0 if saved is None else saved.device,
        sent_bytes=report.collective_bytes, matmul_flops=report.matmul_flops or 0.0,
    )  # fmt: skip


def gradient(mesh: Any, layers: int, policy: str, split: bool) -> tuple[Any, tuple[Any, Any]]:
    """The gradient of feed-forward layers, and its arguments by shape."""

    def spec(shape: tuple[int, ...], *parts: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*parts))
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def stack(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, params)[0]

    planned = jaxmem.remat(stack, policy, partition="tensor" if split else None)
    params = {
        "up": spec((layers, 1024, 4096), None, None, "tensor"),
        "down": spec((layers, 4096, 1024), None, "tensor"),
    }
    step = jax.grad(lambda params, x: planned(params, x).astype(jnp.float32).mean())
    return step, (params, spec((8, 1024, 1024)))


def summary(rows: Sequence[Row]) -> str:
    """Temporaries and what is sent, whole and split, as a Markdown table in MiB."""
    lines = [["", "whole", "split", "saved, whole", "split", "sent, whole", "split"]]
    for target, policy in dict.fromkeys((row.target, row.policy) for row in rows):
        pair = [row for row in rows if (row.target, row.policy) == (target, policy)]
        cells = [
            f"{getattr(row, name) / 2**20:.0f}"
            for name in ("temp_bytes", "saved_bytes", "sent_bytes")
            for row in sorted(pair, key=lambda row: row.split)
        ]
        lines.append([f"{target}, {policy}", *cells])
    return markdown(lines)


if __name__ == "__main__":
    main(tyro.cli(Options))
