"""The ResNet of a thousand layers: how much memory is saved, and for how many extra matmul FLOPs?

    python experiments/resnet1000.py            # minutes of compilation on two idle cores
    python experiments/resnet1000.py --small    # a small one, on the attached backend

Chen et al. 2016 brought the feature maps of a 1000-layer ResNet on ImageNet shapes from 48 to 7 GB
for 30 % more time.  This net has 1004 layers: the stages of ResNet-200, from the authors' example,
with five times the blocks, and its batch of 32.  Float32, batch norm over the batch; results are
the loss, its gradient and the new state of batch norm, so that temporaries are mainly feature
maps.  There is no optimizer.

Each stage is a stack of equal blocks.  Rows: everything kept; `jax.checkpoint` around each block
by hand; policies of jaxmem; and `jaxmem.fit`, asked for plans within budgets that are shares of
the memory with everything kept: once block by block, and then with the two long stages scanned in
groups of three and of five blocks.  Within a group a plan may drop the wide carry between two
blocks and keep the narrow results of convolutions, which costs less than recomputing segments.

Extra matmul FLOPs are those of the compiled program, loops times their trip counts, beyond a
forward and a backward pass, of which a forward pass is a third.
It prints a table and writes `results/resnet1000.csv` and `.png`; the same command resumes after
an interruption.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deep_models
import tyro
from tqdm import tqdm

from common import picture
from common.compiling import Planned, compiling, is_recomputed_by_compiler, planned
from common.table import Record, Table, markdown, versions
from jaxmem._util.text import size

RESULTS = Path(__file__).parent / "results"
KEPT, HAND, POLICY, FIT = "everything kept", "by hand", "jaxmem policy", "fit"

# Published (arXiv 1604.06174, abstract): GB of feature maps before and after, and more time.
PUBLISHED = (48.0, 7.0, 0.30)

# The goal: temporaries so many times smaller, for at most these extra matmul FLOPs.
GOAL_TIMES, GOAL_EXTRA = 10.0, 0.30

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Bring a ResNet of a thousand layers into a tenth of the memory."""

    target: str = "h100-80g"
    """What to compile for; "local" is the attached backend."""
    stages: tuple[int, ...] = (16, 121, 181, 16)
    """Blocks of each stage."""
    groups: tuple[int, ...] = (1, 3, 5, 1)
    """Blocks in an iteration of each stage's scan, where they are grouped."""
    batch: int = 32
    """Images."""
    image: int = 224
    """Their height and width."""
    width: int = 64
    """Channels of the first convolution."""
    policies: tuple[str, ...] = ("dots", "full", "sqrt")
    """Of jaxmem, for comparison."""
    times: tuple[float, ...] = (PUBLISHED[0] / PUBLISHED[1], GOAL_TIMES)
    """Reductions of temporaries that `fit` is asked for; the last also block by block."""
    whole_times: tuple[float, ...] = (GOAL_TIMES,)
    """Reductions of all bytes, including parameters and gradient."""
    compiles: int = 6
    """How often `fit` may ask the compiler for one budget."""
    timeout: float = 1800.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where resnet1000.csv and .png are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: a few small blocks on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, target="local", stages=(9,), groups=(1,), batch=16, image=32, width=8,
            policies=("sqrt",), times=(2.0,), whole_times=(), compiles=2,
        )  # fmt: skip

    @property
    def program(self) -> str:
        """The sizes, which identify the rows of one network."""
        stages = "-".join(map(str, self.stages))
        return f"stages={stages} batch={self.batch} image={self.image} width={self.width}"

    @property
    def compiling(self) -> dict[str, Any]:
        """Keywords for whatever compiles."""
        return compiling(self.target, self.timeout, self.small)


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A compiled program; sizes in bytes.

    Attributes:
      program: its sizes.
      layers: as they are usually counted.
      kind: `KEPT`, `HAND`, `POLICY` or `FIT`.
      name: of the policy, or what `fit` was asked for.
      groups: how many blocks make a round of each stage's scan.
      fits: whether it is within the budget, if there is one.
      predicted_bytes: required bytes, as `fit` predicted them.
      matmul_flops: of the compiled program; `model_matmul_flops` without recomputation.
      compiler_remat: whether the compiler recomputes by itself as well.
      compiles: how often `fit` asked the compiler.
    """

    target: str
    program: str
    layers: int
    kind: str
    name: str
    groups: str
    budget_bytes: int | None
    fits: bool
    required_bytes: int
    temp_bytes: int
    predicted_bytes: int | None
    matmul_flops: int
    model_matmul_flops: int
    compiler_remat: bool
    compiles: int | None

    @property
    def extra(self) -> float:
        """Matmul FLOPs over that of the model, less one."""
        return self.matmul_flops / self.model_matmul_flops - 1

    @property
    def is_grouped(self) -> bool:
        return set(self.groups.split()) != {"1"}


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed, printed, drawn."""
    options = options.sized()
    file = options.results / "resnet1000.csv"
    table = Table(file, Row, ("target", "program", "kind", "name", "groups"))
    if options.again:
        table.drop(table.of(versions(options.target), target=options.target))
    rows: list[Row] = []
    with tqdm(_asked(options), unit="program", disable=None) as bar:
        for kind, name, groups in bar:
            bar.set_postfix_str(f"{kind} {name}")
            key = {"target": options.target, "program": options.program, "kind": kind}
            key |= {"name": name, "groups": " ".join(map(str, groups))}
            row = table.find(versions(options.target), **key)
            if row is None:
                row = _row(options, key, groups, rows)
                table.add(row)
            rows.append(row)
    drawing = options.results / "resnet1000.png"
    draw(rows, drawing)
    print(f"{summary(rows)}\n\n{answer(rows)}\nwritten: {file}, {drawing}")
    return rows


def best(rows: Sequence[Row]) -> Row | None:
    """The answer of `fit` that reaches the goal with the least matmul FLOPs, if one does."""
    good = [
        row
        for row in rows
        if row.kind == FIT
        and rows[0].temp_bytes >= GOAL_TIMES * row.temp_bytes
        and row.extra <= GOAL_EXTRA
    ]
    return min(good, key=lambda row: row.extra, default=None)


def answer(rows: Sequence[Row]) -> str:
    """The result in words, from the rows alone."""
    kept, found = rows[0], best(rows)
    if found is None:
        return _missed()
    text = (
        f"temporaries {kept.temp_bytes / found.temp_bytes:.1f} times smaller "
        f"({size(kept.temp_bytes)} to {size(found.temp_bytes)}) for {found.extra:.1%} extra matmul "
        f"FLOPs, {3 * found.extra:.2f} of a forward pass; published: "
        f"{PUBLISHED[0] / PUBLISHED[1]:.1f} times smaller ({PUBLISHED[0]:g} to "
        f"{PUBLISHED[1]:g} GB) for {PUBLISHED[2]:.0%} more time."
    )
    ours = [row for row in rows if row.kind == FIT]
    whole = [row for row in ours if kept.required_bytes >= GOAL_TIMES * row.required_bytes]
    for row in sorted(whole, key=lambda row: row.extra)[:1]:
        text += (
            f" With parameters and gradient ({size(kept.required_bytes)}), "
            f"{kept.required_bytes / row.required_bytes:.1f} times less for {row.extra:.1%}."
        )
    return text


def summary(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [["", "temporaries", "less", "in all", "less", "extra FLOPs", "forwards", "predicted"]]
    for row in rows:
        off = None if row.predicted_bytes is None else row.predicted_bytes / row.required_bytes - 1
        name = row.kind if row.kind == KEPT else f"{row.kind}: {row.name}"
        name += f", groups of {row.groups.replace(' ', ', ')}" * row.is_grouped
        name += " (the compiler recomputes, too)" * row.compiler_remat
        lines.append(
            [
                name + " (does not fit; the least)" * (not row.fits),
                size(row.temp_bytes),
                f"{rows[0].temp_bytes / row.temp_bytes:.1f} ×",
                size(row.required_bytes),
                f"{rows[0].required_bytes / row.required_bytes:.1f} ×",
                f"{row.extra:+.1%}",
                f"{3 * row.extra:.2f}",
                "" if off is None else f"{off:+.1%}",
            ]
        )
    return markdown(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Extra matmul FLOPs against the reduction of temporaries."""
    found = best(rows)
    message = _missed()
    if found is not None:
        message = (
            f"{found.layers} layers with {rows[0].temp_bytes / found.temp_bytes:.1f} times smaller "
            f"temporaries for {found.extra:.0%} extra matmul FLOPs"
        )
    styles = {
        (KEPT, False): ("D", picture.PLAIN, picture.PLAIN, "everything kept"),
        (HAND, False): ("s", picture.HAND, picture.HAND, "jax.checkpoint by hand"),
        (POLICY, False): ("^", picture.PEER, picture.PEER, "policies of jaxmem"),
        (FIT, False): ("o", picture.OURS, "white", "jaxmem.fit, block by block"),
        (FIT, True): ("o", picture.OURS, picture.OURS, "jaxmem.fit, blocks in groups"),
    }
    with picture.drawn(path, message, width=7.4, height=4.4) as (axes,):
        at = {
            row: (rows[0].temp_bytes / row.temp_bytes, 100 * row.extra) for row in rows if row.fits
        }
        most = 1.2 * max(GOAL_TIMES, *(x for x, _ in at.values()))
        top = 1.3 * max(100 * GOAL_EXTRA, *(y for _, y in at.values()))
        axes.fill_between([GOAL_TIMES, most], 0, 100 * GOAL_EXTRA, color="#E3F2EC", lw=0)
        axes.text(most / 1.02, 99 * GOAL_EXTRA, "goal", ha="right", va="top")
        for (kind, grouped), (marker, edge, face, label) in styles.items():
            if own := [at[row] for row in at if (row.kind, row.is_grouped) == (kind, grouped)]:
                xs, ys = zip(*own, strict=True)
                axes.plot(xs, ys, marker, ls="", mec=edge, mfc=face, ms=7, label=label)
        x, y = PUBLISHED[0] / PUBLISHED[1], 100 * PUBLISHED[2]
        axes.plot([x], [y], "*", color="black", ms=12, label="published (more time)", zorder=4)
        for row, place in at.items():
            if row.kind == POLICY:
                axes.annotate(row.name, place, (0, 8), textcoords="offset points", ha="center")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g} ×")
        axes.set(xlim=(0.85, most), ylim=(-0.04 * top, top))
        axes.set_xlabel(f"reduction of the {size(rows[0].temp_bytes)} of temporaries, as a factor")
        axes.set_ylabel("extra matmul FLOPs, %")
        axes.legend(loc="upper left", frameon=False)


# ---------------------------------------------------------------- implementation


def _asked(options: Options) -> list[tuple[str, str, tuple[int, ...]]]:
    """Kind, name and groups of the rows that there are to be, everything kept first."""
    single = (1,) * len(options.stages)
    asked: list[tuple[str, str, tuple[int, ...]]]
    asked = [(KEPT, "none", single), (HAND, "jax.checkpoint", single)]
    asked += [(POLICY, name, single) for name in options.policies]
    if options.groups != single:
        asked += [(FIT, name, single) for name in list(_shares(options))[-1:]]
    return asked + [(FIT, name, options.groups) for name in _shares(options)]


def _shares(options: Options) -> dict[str, tuple[float, bool]]:
    """What `fit` is asked for: by which factor less, and whether of all bytes."""
    shares = {f"{times:.2g} × less in all": (times, True) for times in options.whole_times}
    return shares | {f"{times:.2g} × less": (times, False) for times in options.times}


def _row(
    options: Options, key: dict[str, Any], groups: tuple[int, ...], rows: Sequence[Row]
) -> Row:
    remat: str = {KEPT: "none", HAND: "hand", FIT: "none"}.get(key["kind"]) or key["name"]
    sizes = (options.batch, options.image, options.width)
    job = deep_models.imagenet_resnet(options.stages, groups, remat, *sizes)
    budget = None
    if key["kind"] != FIT:
        found = Planned(job.report(**options.compiling), fits=True)
    else:
        times, whole = _shares(options)[key["name"]]
        fixed = 0 if whole else rows[0].required_bytes - rows[0].temp_bytes
        budget = int(fixed + (rows[0].required_bytes - fixed) / times)
        found = planned(
            job, budget, cost="flops", max_compiles=options.compiles, **options.compiling
        )
    report = found.report
    assert report.matmul_flops is not None
    assert report.model_matmul_flops is not None
    return Row(
        **key,
        layers=deep_models.bottleneck_layers(options.stages),
        budget_bytes=budget,
        fits=found.fits,
        required_bytes=report.required_bytes,
        temp_bytes=report.temp_bytes,
        predicted_bytes=found.predicted_bytes,
        matmul_flops=report.matmul_flops,
        model_matmul_flops=report.model_matmul_flops,
        compiler_remat=is_recomputed_by_compiler(report),
        compiles=found.compiles,
        versions=versions(options.target),
    )


def _missed() -> str:
    goal = f"{GOAL_TIMES:g} times smaller temporaries for {GOAL_EXTRA:.0%} extra matmul FLOPs"
    return f"No plan has {goal}"


if __name__ == "__main__":
    main(tyro.cli(Options))
