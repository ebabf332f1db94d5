"""What one of eight devices needs by the stages of ZeRO, in every way to take a step.

    python experiments/zero_memory.py           # a quarter of an hour, nearly all compilation
    python experiments/zero_memory.py --small   # a quick trial, on eight devices of the CPU

Compiled for eight absent accelerators is one step of AdamW on the model of `state_memory.py`: a
stack of feed-forward layers with a tied embedding, float32 parameters, bfloat16 layers, every layer
recomputed (`remat_full`), parameters and state donated, the batch's rows over the devices.  Stage 0
is plain data parallelism.  The ways:

* ordinary: `jaxmem.value_and_grad`, then `jaxmem.apply_gradients`;
* fused: `jaxmem.value_and_update`, which updates stacks in the backward pass;
* 8 bits: the state by `jaxmem.quantize_state`;
* host state: the state by `jaxmem.offload_state`.

All is in P, the bytes of the parameters: what one device must allocate (arguments and temporaries),
what is in its host's memory, and how many numbers are gathered and reduce-scattered in a step: an
all-reduce is both.  The papers count so; bytes are fewer, as the layers compute in bfloat16.

It prints tables and writes `results/zero_memory.csv` and `.png`; the same command resumes after an
interruption, and `--again` makes all rows anew (unchanged programs come from the cache).
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import jax
import optax
import tyro
from jax.sharding import AxisType
from state_memory import training
from tqdm import tqdm

import jaxmem
from common import picture, ways
from common.compiling import compiling
from common.steps import InParameters
from common.table import Record, Table, markdown, versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
DEVICES = 8

Way = Literal["ordinary", "fused", "8 bits", "8 bits, fused", "host state", "host state, fused"]
ORDINARY: Final = "ordinary"
WAYS: tuple[Way, ...] = get_args(Way)

# In P: by theory with AdamW, and required of the ordinary way on a GPU and on a TPU.
THEORY = {0: 4.0, 1: 2.25, 2: 1.375, 3: 0.5}
GOALS = {1: (2.35, 2.50), 2: (1.50, 1.65), 3: (0.57, 0.61)}
SENT = {1: 2.0, 2: 2.0, 3: 3.0}

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile every stage in every way."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for; "local" are eight devices of the attached CPU."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """Which of them."""
    ways: tuple[Way, ...] = WAYS
    """Which of them."""
    layers: int = 16
    """Of the model."""
    width: int = 2048
    """Of the model; hidden layers are four times as wide."""
    vocabulary: int = 32_000
    """Rows of the embedding."""
    batch: int = 8
    """Sequences, of all devices together."""
    sequence: int = 512
    """Their length."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where zero_memory.csv and .png are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: a small model on eight devices of the CPU."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, targets=("local",), layers=4, width=64, vocabulary=256, sequence=16
        )

    @property
    def sizes(self) -> str:
        """As the rows have them."""
        names = ("layers", "width", "vocabulary", "batch", "sequence")
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


@dataclasses.dataclass(frozen=True)
class Row(InParameters, Record):
    """A compiled step; sizes in bytes, of one device.

    Attributes:
      sizes: of the model and its batch.
      parameter_bytes: of all parameters.
      required_bytes: on the device, of which `argument_bytes` and `temp_bytes`.
      gathered, scattered, reduced: how many numbers all-gathers give, and reduce-scatters and
        all-reduces take, in a step.
      error: what the compiler said, where it refused the program.
    """

    target: str
    sizes: str
    stage: int
    way: str
    parameter_bytes: int
    required_bytes: int | None = None
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    host_bytes: int | None = None
    gathered: int | None = None
    scattered: int | None = None
    reduced: int | None = None
    error: str = ""

    @property
    def sent(self) -> float | None:
        """Numbers sent, in those of the parameters; an all-reduce scatters and gathers."""
        if self.gathered is None or self.scattered is None or self.reduced is None:
            return None
        return 4 * (self.gathered + self.scattered + 2 * self.reduced) / self.parameter_bytes


KEY = ("target", "sizes", "stage", "way")

# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows of all targets, completed, printed, drawn."""
    options = options.sized()
    known = Table(options.results / "zero_memory.csv", Row, KEY)
    found: list[Row] = []
    count = len(options.targets) * len(options.stages) * len(options.ways)
    with tqdm(total=count, unit="program", disable=None) as bar:
        for target in options.targets:
            for stage in options.stages:
                for way in options.ways:
                    bar.set_postfix_str(f"{target}, stage {stage}, {way}")
                    found.append(_row(options, known, target, stage, way))
                    bar.update()
    for target in options.targets:
        rows = [row for row in found if row.target == target]
        print(f"{target}, in P\n\n{summary(rows)}\n\n{answer(rows)}\n")
    file = options.results / "zero_memory.png"
    draw(found, file)
    print(f"written: {known.path}, {file}")
    return found


def job(options: Options, mesh: Any, stage: int, way: Way) -> jaxmem.Job:
    """A step of AdamW by a stage of ZeRO, in one of the ways."""
    model = training(
        options.layers, options.width, options.vocabulary, options.batch, options.sequence
    )
    zero = jaxmem.Zero(stage, mesh=mesh, min_size=2**10 if options.small else 2**16)
    optimizer: Any = optax.adamw(1e-3)  # a rate changes no byte
    if "8 bits" in way:
        optimizer = jaxmem.quantize_state(optimizer)
    if "host" in way:
        optimizer = jaxmem.offload_state(optimizer)
    with warnings.catch_warnings():
        # Of the CPU, which traces, that its host memory is its device's.
        warnings.simplefilter("ignore", jaxmem.OffloadWarning)
        state = _placed(
            jax.eval_shape(optimizer.init, model.params), zero.state(optimizer, model.params)
        )
    params = _placed(model.params, zero.params(model.params))
    batch = _placed(model.batch, zero.batch)
    if "fused" in way:
        step = jaxmem.value_and_update(model.loss, optimizer, zero=zero)
    else:
        step = _ordinary(model.loss, optimizer, zero)
    return jaxmem.Job(step, (params, state, batch), donate_argnums=(0, 1), name=f"{stage}, {way}")


def summary(rows: Sequence[Row]) -> str:
    """The rows of one target as a Markdown table, in P; each way has device and, if any, host."""
    own = [way for way in WAYS if any(row.way == way for row in rows)]
    lines = [["stage", "theory", *own, "sent"]]
    for stage in dict.fromkeys(row.stage for row in rows):
        each = {row.way: row for row in rows if row.stage == stage}
        sent = next(iter(each.values())).sent
        cells = [_cell(each.get(way)) for way in own]
        last = "" if sent is None else f"{sent:.2f}"
        lines.append([str(stage), f"{THEORY[stage]:.3g}", *cells, last])
    return markdown(lines)


def answer(rows: Sequence[Row]) -> str:
    """What was to be reached in the ordinary way and is not."""
    lines = []
    reference = rows[0].sizes == Options().sizes and rows[0].target in Options().targets
    place = Options().targets.index(rows[0].target) if reference else 0
    for row in rows:
        if reference and row.way == ORDINARY and row.stage in GOALS:
            goal, sent = GOALS[row.stage][place], row.sent or 0.0
            reached = row.required is not None and row.required <= goal + 0.0005
            words = "" if reached else ", not reached"
            lines.append(
                f"stage {row.stage}: {row.required or math.nan:.3f}, goal {goal:.2f}{words}; "
                f"sent {sent:.2f}, in the papers {SENT[row.stage]:.0f}"
            )
        if row.error:
            lines.append(f"stage {row.stage}, {row.way}: refused: {row.error}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of what each stage requires in each way, a panel for each target."""
    targets = list(dict.fromkeys(row.target for row in rows))
    high = 1.5 + 0.16 * len(rows) / len(targets)
    with picture.drawn(path, _message(rows), 4.0 + 3.4 * len(targets), high, len(targets)) as axes:
        for target, one in zip(targets, axes, strict=True):
            _panel([row for row in rows if row.target == target], one)
            one.set_title(f"8 × {target}", loc="left", fontsize=10)
        for one in axes[1:]:
            one.set_yticklabels([])
        _legend(axes[0], [way for way in WAYS if any(row.way == way for row in rows)])


# ---------------------------------------------------------------- implementation

_COLOURS: dict[str, str] = dict(
    zip(
        WAYS,
        (picture.PLAIN, picture.OURS, "#E69F00", picture.HAND, "#56B4E9", picture.PEER),
        strict=True,
    )
)


def _row(options: Options, known: Table[Row], target: str, stage: int, way: Way) -> Row:
    own = versions(target, "optax")
    row = None
    if not options.again:
        row = known.find(own, target=target, sizes=options.sizes, stage=stage, way=way)
    if row is None:
        row = _made(options, target, stage, way, own)
        known.add(row)
    return row


def _made(options: Options, target: str, stage: int, way: Way, versions: str) -> Row:
    if target == "local":
        kind = (AxisType.Auto,)
        mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=kind)
    else:
        mesh = jaxmem.target(target, devices=DEVICES).mesh({"data": DEVICES})
    made = job(options, mesh, stage, way)
    row = Row(
        target, options.sizes, stage, way,
        parameter_bytes=ways.nbytes(made.args[0]),
        versions=versions,
    )  # fmt: skip
    try:
        report = made.report(suggest=False, **compiling(target, options.timeout, options.small))
    except jaxmem.CompileError as error:
        return dataclasses.replace(row, error=" ".join(str(error).split())[:300])
    return dataclasses.replace(
        row,
        required_bytes=report.required_bytes,
        argument_bytes=report.argument_bytes,
        temp_bytes=report.temp_bytes,
        host_bytes=report.host_bytes,
        gathered=_numbers(report, "all-gather"),
        scattered=_numbers(report, "reduce-scatter"),
        reduced=_numbers(report, "all-reduce"),
    )


def _ordinary(loss: Any, optimizer: Any, zero: jaxmem.Zero) -> Callable[..., Any]:
    value_and_grad = jaxmem.value_and_grad(loss, microbatches=1, zero=zero)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(params, batch)
        return value, *jaxmem.apply_gradients(optimizer, grads, state, params, zero=zero)

    return step


def _numbers(report: jaxmem.MemoryReport, kind: str) -> int:
    return sum(
        math.prod(found.shape) * found.times for found in report.collectives if found.kind == kind
    )


def _placed(tree: Any, shardings: Any) -> Any:
    def one(leaf: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(one, tree, shardings)


def _cell(row: Row | None) -> str:
    """What is required on the device, and on the host if there is anything."""
    if row is None:
        return ""
    if row.required is None:
        return "refused"
    host = row.share(row.host_bytes) or 0.0
    return f"{row.required:.3f}" + (f" + {host:.2f}" if host > 0.005 else "")


def _message(rows: Sequence[Row]) -> str:
    """What the stages need in the ordinary way, and the least, on the first target."""
    own = [row for row in rows if row.target == rows[0].target and row.required is not None]
    plain = [f"{row.required:.2f}" for row in own if row.way == ORDINARY]
    least = min((row.required or math.inf for row in own), default=math.nan)
    return (
        f"AdamW by ZeRO's stages 0 to 3: {', '.join(plain)} P on each of 8 devices, "
        f"{least:.2f} in the best way"
    )


def _panel(rows: Sequence[Row], axes: "Axes") -> None:
    place, ticks, names = 0.0, [], []
    for stage in dict.fromkeys(row.stage for row in rows):
        own, first = [row for row in rows if row.stage == stage], place
        for row in own:
            arguments, required = row.share(row.argument_bytes), row.required
            if arguments is not None and required is not None:
                colour = _COLOURS[row.way]
                axes.barh(place, arguments, 0.86, color=colour)
                axes.barh(
                    place, required - arguments, 0.86, left=arguments, color=colour, alpha=0.45
                )
                axes.text(required + 0.04, place, f"{required:.2f}", va="center", fontsize=7)
            else:
                words = f"{row.way}: refused by the compiler"
                axes.text(0.04, place, words, va="center", fontsize=7, color=picture.PLAIN)
            place += 1
        # Of the first bar, which is that of the ordinary way.
        axes.plot([THEORY[stage]] * 2, [first - 0.48, first + 0.48], color="black", linewidth=1.5)
        ticks.append((first + place - 1) / 2)
        names.append(f"stage {stage}")
        place += 0.8
    axes.set_yticks(ticks, names)
    axes.set_ylim(place - 1, -0.8)
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1.12 * max([1.0, *(row.required or 0 for row in rows)]))
    axes.set_xlabel("required on a device, in P; arguments, and lighter all else")


def _legend(axes: "Axes", own: Sequence[Way]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=_COLOURS[way], label=way) for way in own]
    handles.append(Line2D([], [], color="black", linewidth=1, label="theory, ordinary"))
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


if __name__ == "__main__":
    if tyro.cli(Options).small:
        jax.config.update("jax_num_cpu_devices", DEVICES)
    main(tyro.cli(Options))
