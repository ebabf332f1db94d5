"""Pipeline stages: what schedules hold, and how deep a Transformer fits many small devices.

    python experiments/pipeline.py            # eight minutes, all compilation
    python experiments/pipeline.py --small    # a quick trial, on fewer layers

First, 32 feed-forward layers (width 2048, hidden 8192, bfloat16, gelu) over eight absent H100, with
microbatches of 2048 rows: the temporaries of value and gradient under several schedules.  Batch,
parameters and gradients are arguments and results, and not among them, unless gradients are summed
in another type than they are returned in.

Then the question of GPipe's Table 1 (Huang et al. 2019, arXiv 1811.06965): how many layers of a
Transformer (`mesh/gpipe.py`; batch 32 of 1024 words, Adam, 16 bytes a parameter with its gradient)
fit devices of 16 GB: on one device, and in 8, 32 and 128 stages with 32 microbatches.  It is
answered by bisection over compiled programs for the v5e, in steps of one layer a stage.

It prints two tables, and writes `results/pipeline.csv`, `results/pipeline_layers.csv`,
`results/pipeline.png` (temporaries) and `results/pipeline_schedules.png` (who does what when); the
same command resumes after an interruption.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import jaxmem
from common import picture
from common.table import Record, Table, markdown, versions
from jaxmem.show.schedule import draw_schedule, legend
from mesh import gpipe

RESULTS = Path(__file__).parent / "results"
STAGES, LAYERS, WIDTH, HIDDEN, ROWS = 8, 32, 2048, 8192, 2048

# Options of `jaxmem.pipeline`.  Sums in the parameters' own type are what jax makes by itself.
WAYS: dict[str, dict[str, Any]] = {
    "nothing recomputed": {"schedule": "gpipe", "recompute": False, "policy": "none"},
    "gpipe, stages recomputed": {"schedule": "gpipe", "policy": "none", "accumulator_dtype": None},
    "gpipe": {"schedule": "gpipe", "accumulator_dtype": None},
    "1f1b": {"schedule": "1f1b", "accumulator_dtype": None},
    "eager-1f1b": {"schedule": "eager-1f1b", "accumulator_dtype": None},
    "interleaved, 2 chunks": {"schedule": "interleaved", "chunks": 2, "accumulator_dtype": None},
    "gpipe, float32 sums": {"schedule": "gpipe"},
    "1f1b, float32 sums": {"schedule": "1f1b"},
    "1f1b, batch statistics": {"schedule": "1f1b", "accumulator_dtype": None},
    "eager-1f1b, float32 sums": {"schedule": "eager-1f1b"},
}

# Where each layer subtracts a running mean, which goes from microbatch to microbatch.
WITH_STATE = "1f1b, batch statistics"

# Temporaries in MiB that were asked for, at 8, 16, 32 and 64 microbatches.
GOALS: dict[str, tuple[int | None, ...]] = {
    "nothing recomputed": (13280, 19744, 32672, 58528),
    "gpipe": (672, 800, 1144, 2168),
    "1f1b": (None, None, None, 800),
}

# Layers by GPipe's Table 1, by whether anything is recomputed and the number of devices.
PUBLISHED = {(False, 1): 3, (True, 1): 13, (True, 8): 103, (True, 32): 415, (True, 128): 1663}

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile pipelines for absent accelerators."""

    microbatches: tuple[int, ...] = (8, 16, 32, 64)
    """Of the first table."""
    devices: tuple[int, ...] = (1, 8, 32, 128)
    """Of the second table."""
    schedule: str = "eager-1f1b"
    """Of the second table."""
    results: Path = RESULTS
    """Where tables and pictures are written."""
    small: bool = False
    """A quick trial: eight layers of width 256 in two ways, and no second table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """Value and gradient of the feed-forward layers; bytes are of one device.

    Attributes:
      ticks, bubble, held_bytes: as `explain` gives them before anything is compiled.
    """

    target: str
    layers: int
    width: int
    way: str
    microbatches: int
    ticks: int
    bubble: float
    held_bytes: int
    temp_bytes: int
    required_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depth(Record):
    """A Transformer that was compiled for so many devices."""

    target: str
    devices: int
    recomputed: bool
    schedule: str
    layers: int
    fits: bool
    required_bytes: int | None = None
    temp_bytes: int | None = None


KEY = ("target", "layers", "width", "way", "microbatches")
DEPTH_KEY = ("target", "devices", "recomputed", "schedule", "layers")

# ---------------------------------------------------------------- API


def main(options: Options) -> tuple[list[Row], dict[tuple[bool, int], Depth]]:
    """The rows of the first table, and the deepest models of the second."""
    rows = temporaries(options)
    print(summary(rows))
    deepest = {} if options.small else depths(options)
    if deepest:
        print(f"\n{depth_summary(deepest)}")
    draw(rows, options.results / "pipeline.png")
    draw_schedules(options.results / "pipeline_schedules.png")
    return rows, deepest


def temporaries(options: Options, target: str = "h100-80g") -> list[Row]:
    """The first table, completed."""
    table = Table(options.results / "pipeline.csv", Row, KEY)
    layers, width = (8, 256) if options.small else (LAYERS, WIDTH)
    ways = ("gpipe", "1f1b") if options.small else tuple(WAYS)
    microbatches = options.microbatches[:1] if options.small else options.microbatches
    found = []
    for way, m in tqdm([(way, m) for way in ways for m in microbatches], disable=None):
        own = versions(target)
        key = {"target": target, "layers": layers, "width": width, "way": way, "microbatches": m}
        row = table.find(own, **key)
        if row is None:
            row = measured(own, **key)
            table.add(row)
        found.append(row)
    return found


def measured(
    versions: str, target: str, layers: int, width: int, way: str, microbatches: int
) -> Row:
    """One row of the first table, compiled."""
    known = jaxmem.target(target, devices=STAGES)
    mesh = known.mesh({"stage": STAGES})

    def spec(shape: tuple[int, ...], *parts: Any, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, PartitionSpec(*parts))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, Any]:
        p, mean = own
        normed = x if mean is None else x - mean.astype(x.dtype)
        new = None if mean is None else 0.9 * mean + 0.1 * x.astype(jnp.float32).mean(0)
        return x + jax.nn.gelu(normed @ p["up"]) @ p["down"], new

    def loss(params: Any, x: jax.Array, means: Any = None) -> Any:
        x, means = jax.lax.scan(layer, x, (params, means))
        value = jnp.square(x.astype(jnp.float32)).mean()
        return value if means is None else (value, means)

    hidden = width * HIDDEN // WIDTH
    params = {
        "up": spec((layers, width, hidden), "stage"),
        "down": spec((layers, hidden, width), "stage"),
    }
    args: Any = params, spec((microbatches * ROWS, width))
    options = dict(WAYS[way])
    has_state = way == WITH_STATE
    if has_state:
        args += (spec((layers, width), "stage", dtype="float32"),)
        options |= {"has_aux": True, "aux": "carry", "carry_argnums": 2}
    pipelined = jaxmem.pipeline(loss, microbatches=microbatches, mesh=mesh, **options)
    plan = pipelined.explain(*args)
    step = jax.value_and_grad(pipelined, has_aux=has_state)
    report = jaxmem.memory_report(step, *args, target=known, suggest=False)
    return Row(
        versions=versions, target=target, layers=layers, width=width, way=way,
        microbatches=microbatches, ticks=plan.ticks, bubble=round(plan.bubble, 4),
        held_bytes=plan.held_bytes, temp_bytes=report.temp_bytes,
        required_bytes=report.required_bytes or 0,
    )  # fmt: skip


def depths(options: Options, target: str = "v5e-16g") -> dict[tuple[bool, int], Depth]:
    """The second table, completed: the deepest model that fits, for each way."""
    table = Table(options.results / "pipeline_layers.csv", Depth, DEPTH_KEY)
    own = versions(target)
    found: dict[tuple[bool, int], Depth] = {}
    cases = [(True, devices) for devices in options.devices]
    cases = [(False, 1), *cases] if 1 in options.devices else cases

    for recomputed, devices in cases:
        schedule = options.schedule if devices > 1 else ""

        def probe(each: int, *, recomputed: bool = recomputed, devices: int = devices,
                  schedule: str = schedule) -> Depth:  # fmt: skip
            key = {"target": target, "devices": devices, "recomputed": recomputed,
                   "schedule": schedule, "layers": each * devices}  # fmt: skip
            row = table.find(own, **key)
            if row is None:
                row = compiled(own, **key)
                table.add(row)
            print(f"{row.layers} layers, {devices} devices: {'fits' if row.fits else 'too much'}")
            return row

        deepest = bisected(probe)
        if deepest is not None:
            found[recomputed, devices] = deepest
    return found


def bisected(probe: Callable[[int], Depth], most: int = 24) -> Depth | None:
    """The largest that fits, from 1 to `most`; None if none does."""
    best, low, high = None, 1, most
    while low <= high:
        middle = (low + high + 1) // 2
        row = probe(middle)
        if row.fits:
            best, low = row, middle + 1
        else:
            high = middle - 1
    return best


def compiled(
    versions: str, target: str, devices: int, recomputed: bool, schedule: str, layers: int
) -> Depth:
    """One row of the second table."""
    known = jaxmem.target(target, devices=devices)
    mesh = known.mesh({"stage": devices}) if devices > 1 else None
    m = gpipe.BATCH
    if mesh is not None:
        pipelined = jaxmem.pipeline(gpipe.loss, microbatches=m, schedule=schedule, mesh=mesh)
        loss_and_grad: Any = jax.value_and_grad(pipelined)
    elif recomputed:
        loss_and_grad = jaxmem.value_and_grad(jaxmem.remat_full(gpipe.loss), microbatches=m)
    else:
        loss_and_grad = jax.value_and_grad(gpipe.loss)
    job = gpipe.train(loss_and_grad, layers, mesh)
    report = job.report(known, suggest=False)
    return Depth(
        versions=versions, target=target, devices=devices, recomputed=recomputed,
        schedule=schedule, layers=layers, fits=bool(report.fits),
        required_bytes=report.required_bytes, temp_bytes=report.temp_bytes,
    )  # fmt: skip


# ---------------------------------------------------------------- tables and pictures


def summary(rows: Sequence[Row]) -> str:
    """Temporaries in MiB, with what was asked for in brackets, as a Markdown table."""
    counts = list(dict.fromkeys(row.microbatches for row in rows))
    lines = [["MiB at m =", *map(str, counts), "ticks", "bubble"]]
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        cells = [f"{row.temp_bytes / 2**20:.0f}{_asked(row)}" for row in own]
        lines.append([way, *cells, str(own[-1].ticks), f"{own[-1].bubble:.1%}"])
    return markdown(lines)


def _asked(row: Row) -> str:
    goals = GOALS.get(row.way)
    places = {8: 0, 16: 1, 32: 2, 64: 3}
    if goals is None or row.layers != LAYERS or row.microbatches not in places:
        return ""
    goal = goals[places[row.microbatches]]
    return "" if goal is None else f" (≤ {goal})"


def depth_summary(found: dict[tuple[bool, int], Depth]) -> str:
    """Layers that fit beside the published ones, as a Markdown table."""
    lines = [["16 GB devices", "layers", "published", "required"]]
    for (recomputed, devices), row in found.items():
        words = f"{devices}{', recomputed' if recomputed else ', nothing recomputed'}"
        required = "" if row.required_bytes is None else f"{row.required_bytes / 2**30:.1f} GiB"
        lines.append([words, str(row.layers), str(PUBLISHED[recomputed, devices]), required])
    return markdown(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Temporaries against microbatches."""
    message = "1F1B holds no more for more microbatches; GPipe holds the input of each"
    with picture.drawn(path, message, width=7.4, height=4.4) as (axes,):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ways = [way for way in dict.fromkeys(row.way for row in rows) if way != WITH_STATE]
        ways = [way for way in ways if "float32" not in way]
        for way, colour in zip(ways, picture.COLOURS, strict=False):
            own = [row for row in rows if row.way == way]
            xs, ys = [row.microbatches for row in own], [row.temp_bytes / 2**20 for row in own]
            axes.plot(xs, ys, marker="o", color=colour, label=way)
        counts = sorted({row.microbatches for row in rows})
        axes.set_xticks(counts, map(str, counts))
        axes.set_yticks([250, 1000, 4000, 16000, 64000], ["250", "1000", "4000", "16000", "64000"])
        axes.minorticks_off()
        axes.set_xlabel("microbatches")
        axes.set_ylabel("temporaries of one H100, MiB")
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_schedules(path: Path) -> None:
    """Four schedules below each other."""
    message = "Pipeline schedules of 4 stages and 8 microbatches, stages recomputed"
    with picture.drawn(path, message, width=9.0, height=7.6, down=4) as several:
        shown = (("gpipe", 1), ("1f1b", 1), ("eager-1f1b", 1), ("interleaved", 2))
        for axes, (name, chunks) in zip(several, shown, strict=True):
            schedule = jaxmem.PipelineSchedule.of(name, 4, 8, chunks)
            axes.grid(False)
            draw_schedule(schedule, axes)
        figure = several[0].figure
        assert figure is not None
        figure.legend(
            handles=legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
        )


if __name__ == "__main__":
    main(tyro.cli(Options))
