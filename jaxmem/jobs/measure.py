"""Runs steps of a job and reads the allocator: the process that `jaxmem.verify` starts.

An allocator's peak cannot be reset, so everything but the step must stay below it.
Hence two processes run this file: the first compiles, for the prediction and into a
cache of executables; the second takes the executable from there, so that no trial
kernel of an autotuner allocates anything, copies the arguments to the device one by
one, and runs.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmem.compile.program import Program
from jaxmem.jobs.job import Job
from jaxmem.jobs.load import find
from jaxmem.jobs.parse import PolicyText
from jaxmem.trace.arguments import named_leaves

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurements of running a job.

    Attributes:
      device: the kind of device.
      devices: how many it ran on; bytes are for the one that used most.
      before_bytes: in use before anything of the job was allocated.
      argument_bytes: in use beyond that with the arguments on the device.
      start_peak_bytes: the peak until then, beyond `before_bytes`.
      peak_bytes: the overall peak, beyond `before_bytes`; None where the backend gives none.
      executable_bytes: what the executable states that it needs; None where it does not.
      seconds: of each step.
      compiled: whether the step was compiled in this process, not read from the cache.
    """

    device: str
    devices: int
    before_bytes: int | None
    argument_bytes: int | None
    start_peak_bytes: int | None
    peak_bytes: int | None
    executable_bytes: int | None
    seconds: tuple[float, ...]
    compiled: bool


# ---------------------------------------------------------------- API


def predict(job: Job) -> dict[str, Any]:
    """The report of the attached backend, and the executable in the cache.

    Returns:
      "report", as JSON; "unread", the paths of arguments that the program never reads.
    """
    report = job.report("local")
    _compiled(job)
    unread = [name for name, size in report.arguments.items() if size == 0]
    return {"report": report.to_json(), "unread": unread}


def run(job: Job, steps: int, unread: Sequence[str] = ()) -> Measurement:
    """Run steps; results of a step replace the arguments that it donated.

    Args:
      job: what to run.
      steps: how many.
      unread: paths of arguments that stay on the host, as the program never reads them.
    """
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    step = _compiled(job)
    compiled = "/jax/compilation_cache/cache_hits" not in hits
    used = _devices(job)
    before = _statistics(used, "bytes_in_use")
    arguments = Arguments(job, unread)
    jax.block_until_ready(arguments.leaves)
    placed = _statistics(used, "bytes_in_use")
    start = _statistics(used, "peak_bytes_in_use")
    seconds = [_step(step, arguments) for _ in range(steps)]
    peak = _statistics(used, "peak_bytes_in_use")
    return Measurement(
        device=used[0].device_kind,
        devices=len(used),
        before_bytes=_most(before),
        argument_bytes=_increase(placed, before),
        start_peak_bytes=_increase(start, before),
        peak_bytes=_increase(peak, before),
        executable_bytes=_needs(step),
        seconds=tuple(seconds),
        compiled=compiled,
    )


class Arguments:
    """A job's arguments as arrays, copied to the device one at a time.

    Attributes:
      leaves: the arrays, in jax's order.
    """

    def __init__(self, job: Job, unread: Sequence[str] = ()) -> None:
        self._positions = [k for k in range(len(job.args)) if k not in job.static_argnums]
        dynamic = [job.args[k] for k in self._positions]
        self._specs, self._tree = jax.tree.flatten((dynamic, dict(job.kwargs)))
        named = named_leaves(job.step, dynamic, dict(job.kwargs), self._positions)
        self._names = [name for name, _ in named]
        self._unread = frozenset(unread)
        donated = [
            k in job.donate_argnums
            for k, arg in zip(self._positions, dynamic, strict=True)
            for _ in jax.tree.leaves(arg)
        ]
        self._donated = donated + [False] * (len(self._specs) - len(donated))
        self.leaves = [self._make(k) for k in range(len(self._specs))]

    def call(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, without static ones."""
        return jax.tree.unflatten(self._tree, self.leaves)

    def take(self, results: Any) -> None:
        """Replace donated arguments with matching results; create the rest anew."""
        left = [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)]
        for k, old in enumerate(self.leaves):
            if not (_is_gone(old) or (self._donated[k] and isinstance(old, jax.Array))):
                continue
            match = next((j for j, new in enumerate(left) if _same_type(old, new)), None)
            if match is not None:
                self.leaves[k] = left.pop(match)
            elif _is_gone(old):
                self.leaves[k] = self._make(k)

    def _make(self, k: int) -> Any:
        spec = self._specs[k]
        if _is_gone(spec):  # the job's own array, donated to an earlier step
            spec = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=spec.sharding)
        if isinstance(spec, np.ndarray):
            return jax.device_put(spec)
        if not isinstance(spec, jax.ShapeDtypeStruct):
            return spec
        # Arguments in host memory are placed there as jax does it.
        kind = getattr(spec.sharding, "memory_kind", None) or ""
        return made(spec, on_host=self._names[k] in self._unread and "host" not in kind)


def made(spec: jax.ShapeDtypeStruct, on_host: bool = False) -> Any:
    """An array of this shape: small positive numbers, zeros for whole numbers, a random key.

    Positive, since a square root may be taken of an optimizer's state; zeros, since they
    are valid indices.
    """
    sharding = _concrete(spec.sharding)
    if jax.numpy.issubdtype(spec.dtype, jax.dtypes.prng_key):
        # A few bytes each, in a format that only jax knows.
        key = jax.numpy.empty(spec.shape, spec.dtype)
        return key if sharding is None else jax.device_put(key, sharding)
    values = _values(spec.shape, np.dtype(spec.dtype))
    return values if on_host else jax.device_put(values, sharding)


# ---------------------------------------------------------------- implementation


def _compiled(job: Job) -> Any:
    program = Program(job.step, job.args, dict(job.kwargs), job.donate_argnums, job.static_argnums)
    return program.traced.lower().compile()


def _needs(compiled: Any) -> int | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return total - memory.alias_size_in_bytes


def _step(step: Callable[..., Any], arguments: Arguments) -> float:
    positional, keywords = arguments.call()
    start = time.perf_counter()
    results = jax.block_until_ready(step(*positional, **keywords))
    seconds = time.perf_counter() - start
    # Unused results are freed before the next step, as in a training loop.
    arguments.take(results)
    return seconds


def _values(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if not jax.numpy.issubdtype(dtype, np.inexact):
        return np.zeros(shape, dtype)
    fan_in = shape[-2] if len(shape) > 1 else 1
    block = np.random.default_rng(0).random(2**16, np.float32) / math.sqrt(fan_in)
    return np.resize(block.astype(dtype), shape)


def _concrete(sharding: Any) -> Any:
    """The sharding over attached devices, where it was made for absent ones."""
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return sharding
    if (there := len(jax.devices())) < mesh.size:
        raise RuntimeError(
            f"the arguments are sharded over a mesh of {mesh.size} devices, and {there} are "
            "attached; build the job for those"
        )
    real = jax.make_mesh(
        mesh.axis_sizes,
        mesh.axis_names,
        axis_types=mesh.axis_types,
        devices=jax.devices()[: mesh.size],
    )
    return jax.sharding.NamedSharding(real, sharding.spec, memory_kind=sharding.memory_kind)


def _devices(job: Job) -> list[Any]:
    """The devices on which the job runs."""
    for leaf in jax.tree.leaves((job.args, job.kwargs)):
        sharding = _concrete(getattr(leaf, "sharding", None))
        if sharding is not None:
            return sorted(sharding.device_set, key=lambda device: device.id)
    return jax.devices()[:1]


def _statistics(devices: Sequence[Any], name: str) -> list[int] | None:
    found = [(device.memory_stats() or {}).get(name) for device in devices]
    return None if None in found else [number for number in found if number is not None]


def _most(numbers: Iterable[int] | None) -> int | None:
    return None if numbers is None else max(numbers)


def _increase(numbers: list[int] | None, before: list[int] | None) -> int | None:
    if numbers is None or before is None:
        return None
    return max(now - then for now, then in zip(numbers, before, strict=True))


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _same_type(old: jax.Array, new: jax.Array) -> bool:
    return (
        old.shape == new.shape
        and old.dtype == new.dtype
        and old.sharding.is_equivalent_to(new.sharding, old.ndim)
    )


# ---------------------------------------------------------------- the process


def main(request: str, answer: str) -> None:
    """Execute the request in the file `request`, and write the result into the file `answer`."""
    from jaxmem.jobs.failure import explained

    asked = json.loads(Path(request).read_text())
    try:
        found = _asked(**asked)
    except Exception as error:  # it is reported to the process that asked
        found = {"error": explained(error)}
    Path(answer).write_text(json.dumps(found))


def _asked(
    what: str,
    where: str,
    settings: dict[str, Any],
    policy: str,
    steps: int = 0,
    unread: Sequence[str] = (),
) -> dict[str, Any]:
    device = jax.devices()[0]
    facts = {"platform": device.platform, "kind": device.device_kind}
    if device.platform == "cpu" and what == "predict":
        return facts  # nothing to verify, so nothing to wait for
    entry, chosen = find(where), PolicyText.parse(policy)
    texts = {key: value for key, value in settings.items() if isinstance(value, str)}
    job = entry.make({**settings, **entry.parse(texts)}, chosen)
    with entry.under(chosen):
        if what == "predict":
            return {**facts, **predict(job)}
        return {**facts, **dataclasses.asdict(run(job, steps, unread))}


def median(seconds: Sequence[float]) -> float:
    """The median of the steps, without the first one, which warms up, if there are others."""
    return statistics.median(seconds[1:] or seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
