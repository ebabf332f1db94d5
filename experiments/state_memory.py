"""What parameters, gradients and optimizer state need, of every optimizer and in every way.

    python experiments/state_memory.py              # a quarter of an hour, nearly all compilation
    python experiments/state_memory.py --width 4096 --layers 8 --vocabulary 128000
    python experiments/state_memory.py --small      # a quick trial, on the attached backend

Compiled is one step of training a stack of feed-forward layers in a `lax.scan` with a tied
embedding: float32 parameters, bfloat16 layers, every layer recomputed (`remat_full`), parameters
and state donated.  The optimizers are those that papers about their memory name.  The ways:

* ordinary: `jax.value_and_grad`, then `optimizer.update`;
* fused: `jaxmem.value_and_update`, which updates stacks in the backward pass; with SGD this is
  LOMO, with AdaLomo that.  Where a stack's update needs more than the two backward passes that are
  allowed by default, it is also compiled with three;
* host state: `jaxmem.offload_state`, after the backward pass, and fused;
* all on host: parameters are in the host's memory, too, and streamed through both passes; of
  AdamW also with twice the layers.

All is in P, the bytes of the parameters: what the optimizer's state holds, what must be allocated
on the device (arguments and temporaries), and on the host.  Where stacks cannot be updated in the
backward pass, the row says why.  AdamA has the batch in 4 microbatches.

It prints tables and writes `results/state_memory.csv` and `.png`; the same command resumes after an
interruption, and `--again` makes all rows anew (unchanged programs come from the cache).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import tyro
from tqdm import tqdm

import jaxmem
from common import picture, ways
from common.steps import KEY, Case, Row
from common.table import Table, markdown
from common.ways import (
    ADALOMO,
    ADAM,
    ADAM_A,
    ADAMW,
    ALL_HOST,
    COMPANDING,
    DYNAMIC,
    DYNAMIC_W,
    FUSED,
    FUSED_3,
    HOST,
    HOST_FUSED,
    ORDINARY,
    SGD,
    WAYS,
    Training,
    Way,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
ALL = (*(name for name in ways.OPTIMIZERS if name not in (DYNAMIC_W, ADALOMO)), ADAM_A, ADALOMO)

# Required of the reference program, in P, on a GPU and on a TPU.
GOALS: dict[tuple[str, Way], tuple[float, float]] = {
    (ADAM, FUSED): (3.34, 3.51),
    (DYNAMIC, ORDINARY): (2.58, 3.07),
    (DYNAMIC, FUSED): (1.79, 2.12),
    (SGD, FUSED): (1.28, 1.50),
    (ADAM, HOST): (2.22, 2.67),
    (ADAM, HOST_FUSED): (1.34, 1.72),
    (ADAM, ALL_HOST): (0.44, 0.88),
}
HOST_GOAL = 3.1  # P in the host's memory, at most

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile every optimizer in every way."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for; "local" is the attached backend."""
    optimizers: tuple[str, ...] = ALL
    """Which of them."""
    ways: tuple[Way, ...] = WAYS
    """Which of them."""
    layers: int = 16
    """Of the model."""
    width: int = 2048
    """Of the model; hidden layers are four times as wide."""
    vocabulary: int = 32_000
    """Rows of the embedding."""
    batch: int = 4
    """Sequences."""
    sequence: int = 512
    """Their length."""
    twice: bool = True
    """Whether AdamW with all on the host is also compiled with twice the layers."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where state_memory.csv and .png are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: a small model on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self,
            targets=("local",),
            optimizers=tuple(name for name in self.optimizers if name in (SGD, ADAMW, "LAMB")),
            layers=4,
            width=64,
            vocabulary=256,
            sequence=16,
        )

    @property
    def sizes(self) -> str:
        """As the rows have them."""
        names = ("layers", "width", "vocabulary", "batch", "sequence")
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows of all targets, completed, printed, drawn."""
    options = options.sized()
    known = Table(options.results / "state_memory.csv", Row, KEY)
    wanted = list(_wanted(options))
    found: list[Row] = []
    with tqdm(total=len(wanted) * len(options.targets), unit="program", disable=None) as bar:
        for target in options.targets:
            for optimizer, way, layers in wanted:
                bar.set_postfix_str(f"{target}, {optimizer}, {way}")
                deep = dataclasses.replace(options, layers=layers)
                case = Case(target, deep.sizes, optimizer, way, _model(deep))
                found.append(case.row(known, options.again, options.timeout, options.small))
                bar.update()
    for target in options.targets:
        rows = [row for row in found if row.target == target]
        print(f"{target}, in P\n\n{summary(rows)}\n\n{answer(rows)}\n")
    file = options.results / "state_memory.png"
    draw([row for row in found if row.sizes == options.sizes], file)
    print(f"written: {known.path}, {file}")
    return found


def training(
    layers: int = 16,
    width: int = 2048,
    vocabulary: int = 32_000,
    batch: int = 4,
    sequence: int = 512,
) -> Training:
    """The model, by shapes alone."""
    half, spec = jnp.bfloat16, jax.ShapeDtypeStruct

    @jaxmem.remat_full
    def stack(layers: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            up = jax.nn.gelu(x * p["norm"].astype(half) @ p["up"].astype(half))
            return x + up @ p["down"].astype(half), None

        return jax.lax.scan(layer, x, layers)[0]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        embedding = params["embedding"]
        x = stack(params["layers"], embedding[tokens].astype(half))
        logits = (x @ embedding.astype(half).T).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -chosen.mean()

    shapes = {"up": (width, 4 * width), "down": (4 * width, width), "norm": (width,)}
    params = {
        "embedding": spec((vocabulary, width), "float32"),
        "layers": {name: spec((layers, *shape), "float32") for name, shape in shapes.items()},
    }
    return Training(loss, params, spec((batch, sequence), "int32"))


def summary(rows: Sequence[Row]) -> str:
    """The rows of one target as a Markdown table, in P; each way has device and, if any, host."""
    own = [way for way in WAYS if any(row.way == way for row in rows)]
    lines = [["", "state", *own]]
    for optimizer, sizes in dict.fromkeys((row.optimizer, row.sizes) for row in rows):
        each = {row.way: row for row in rows if (row.optimizer, row.sizes) == (optimizer, sizes)}
        state = next(iter(each.values()))
        name = optimizer if sizes == rows[0].sizes else f"{optimizer}, {sizes.split()[0]}"
        cells = [_cell(each.get(way)) for way in own]
        lines.append([name, f"{state.share(state.state_bytes):.2f}", *cells])
    return markdown(lines)


def answer(rows: Sequence[Row]) -> str:
    """What was to be reached and is not, what twice the depth needs, and why stacks wait."""
    lines = []
    reference = rows[0].sizes == Options().sizes and rows[0].target in Options().targets
    place = Options().targets.index(rows[0].target) if reference else 0
    for (optimizer, way), goals in GOALS.items() if reference else ():
        for row in rows:
            if (row.sizes, row.optimizer, row.way) == (Options().sizes, optimizer, way):
                reached = row.required is not None and row.required <= goals[place] + 0.005
                words = "" if reached else ", not reached"
                lines.append(f"{optimizer}, {way}: {_cell(row)}, goal {goals[place]:.2f}{words}")
    host = [host for row in rows if (host := row.share(row.host_bytes))]
    if host:
        lines.append(f"host: {max(host):.2f} at most, goal {HOST_GOAL}")
    deep = [row for row in rows if (row.optimizer, row.way) == (ADAMW, ALL_HOST)]
    if len(deep) == 2 and (few := deep[0].required_bytes) and (more := deep[1].required_bytes):
        more_carries = _carry_bytes(deep[1].sizes) - _carry_bytes(deep[0].sizes)
        lines.append(
            f"AdamW, {ALL_HOST}, twice the layers: {more / few - 1:+.1%} bytes, without the "
            f"carries that are kept of more layers {(more - more_carries) / few - 1:+.1%}"
        )
    for row in rows:
        if row.why and row.way in (FUSED, FUSED_3):
            lines.append(f"{row.optimizer}, {row.way}, stacks after the backward pass: {row.why}")
        if row.error:
            lines.append(f"{row.optimizer}, {row.way}: refused: {row.error}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of what each optimizer requires in each way, a panel for each target."""
    targets = list(dict.fromkeys(row.target for row in rows))
    names = list(dict.fromkeys(row.optimizer for row in rows))
    high = 1.3 + 0.135 * len(rows) / len(targets) + 0.12 * len(names)
    message = _message(rows)
    with picture.drawn(path, message, 4.0 + 3.6 * len(targets), high, len(targets)) as axes:
        for target, one in zip(targets, axes, strict=True):
            _panel([row for row in rows if row.target == target], names, one)
            one.set_title(target, loc="left", fontsize=10)
        for one in axes[1:]:
            one.set_yticklabels([])
        _legend(axes[0], [way for way in WAYS if any(row.way == way for row in rows)])


# ---------------------------------------------------------------- implementation

_ORDER: dict[str, int] = {way: place for place, way in enumerate(WAYS)}
_COLOURS: dict[str, str] = dict(
    zip(
        WAYS,
        (picture.PLAIN, picture.OURS, "#56B4E9", picture.HAND, "#E69F00", picture.PEER),
        strict=True,
    )
)


def _wanted(options: Options) -> Iterator[tuple[str, Way, int]]:
    """Optimizer, way and layers of each program that differs from the others."""
    model = _model(options)
    for optimizer in options.optimizers:
        for way in options.ways:
            if _differs(model, optimizer, way):
                yield optimizer, way, options.layers
        if options.twice and optimizer == ADAMW and ALL_HOST in options.ways:
            yield optimizer, ALL_HOST, 2 * options.layers


def _differs(model: Training, optimizer: str, way: Way) -> bool:
    if optimizer == ADAM_A:
        return way == ORDINARY
    if way in (HOST, HOST_FUSED):
        return any(map(ways.goes, jax.tree.leaves(model.state(optimizer))))
    if way == FUSED_3:  # if most of the stacks' bytes wait for the end otherwise
        after = sum(leaf.bytes for leaf in model.after(optimizer, FUSED))
        return after > ways.nbytes(model.params["layers"]) / 2
    return True


def _model(options: Options) -> Training:
    names = ("layers", "width", "vocabulary", "batch", "sequence")
    return training(**{name: getattr(options, name) for name in names})


def _cell(row: Row | None) -> str:
    """What is required on the device, and on the host if there is anything."""
    if row is None:
        return ""
    if row.required is None:
        return "refused"
    host = row.share(row.host_bytes) or 0.0
    return f"{row.required:.2f}" + (f" + {host:.2f}" if host > 0.005 else "")


def _carry_bytes(sizes: str) -> int:
    """What `remat_full` keeps, in bfloat16: each layer's input."""
    of = {name: int(value) for name, _, value in (word.partition("=") for word in sizes.split())}
    return 2 * of["layers"] * of["batch"] * of["sequence"] * of["width"]


def _message(rows: Sequence[Row]) -> str:
    """The least that Adam needs in each way, on the first target."""
    own = [row for row in rows if row.target == rows[0].target and row.required is not None]

    def of(optimizers: Sequence[str], way: Way) -> float | None:
        found = [row.required for row in own if row.optimizer in optimizers and row.way == way]
        return min((each for each in found if each is not None), default=None)

    figures = {
        "step of Adam": of((ADAM, ADAMW), ORDINARY),
        "fused in 8 bits": of((DYNAMIC, COMPANDING), FUSED),
        "all on the host": of((ADAM, ADAMW), ALL_HOST),
    }
    words = [f"{name} {value:.2f} P" for name, value in figures.items() if value is not None]
    return "Device memory: " + ", ".join(words)


def _panel(rows: Sequence[Row], names: Sequence[str], axes: "Axes") -> None:
    place, ticks = 0.0, []
    for name in names:
        own = sorted((row for row in rows if row.optimizer == name), key=lambda r: _ORDER[r.way])
        first = place
        for row in own:
            arguments, required = row.share(row.argument_bytes), row.required
            if arguments is not None and required is not None:
                colour = _COLOURS[row.way]
                rest = required - arguments
                axes.barh(place, arguments, 0.86, color=colour)
                axes.barh(place, rest, 0.86, left=arguments, color=colour, alpha=0.45)
                axes.text(required + 0.04, place, f"{required:.2f}", va="center", fontsize=7)
            else:
                words = f"{row.way}: refused by the compiler"
                axes.text(0.04, place, words, va="center", fontsize=7, color=picture.PLAIN)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.8
    axes.set_yticks(ticks, names)
    axes.set_ylim(place - 1, -0.8)
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1.12 * max([1.0, *(row.required or 0 for row in rows)]))
    axes.set_xlabel("required on the device, in P; arguments, and lighter all else")


def _legend(axes: "Axes", own: Sequence[Way]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOURS[way], label=way) for way in own]
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


if __name__ == "__main__":
    main(tyro.cli(Options))
