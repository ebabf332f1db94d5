"""`jaxmem.fit` over meshes, and every policy by names: what Llama-3-8B's step takes of one device.

    python experiments/frontier_mesh.py                  # all 128 subsets: hours, not timed yet
    python experiments/frontier_mesh.py --subsets some   # a few minutes a mesh, all compilation
    python experiments/frontier_mesh.py --small      # a quick trial with a small model

The step of `mesh/llama.py` (AdamW, float32 parameters, bfloat16 compute, 8 sequences of 4096) is
compiled for absent accelerators: 8 H100, 16 v5p, 8 v5e, over meshes of a fully sharded and a
tensor axis.  Each subset of {q, k, v, attention, out, gate, up} is kept by `policies.names` in one
program.  `fit` is asked for a plan in the memory of each subset that no other one beats in memory
and matmul FLOPs, once for the fewest FLOPs and once for the fewest seconds; it should have no more
of either.

All figures are of one device.  Matmul FLOPs and collectives are counted in the compiled program;
seconds are those of a roofline of it, and of its collectives over the links one after the other.

It prints tables and writes `results/frontier_mesh.csv` and `.png`; the same command resumes after
an interruption.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro
from full_finetune import Sizes
from tqdm import tqdm

import jaxmem
from common import picture
from common.table import Record, Table, markdown, versions
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.ways import build_problem
from mesh import llama

RESULTS = Path(__file__).parent / "results"
MESHES = ("h100-80g 8x1", "h100-80g 2x4", "h100-80g 1x8", "v5p-95g 4x4", "v5e-16g 2x4")
NAMES, FLOPS, SECONDS, PLAN = "names", "fit, flops", "fit, roofline", "plan"
PLANS = 7  # of which predictions are compared, along the front
# Subsets that people keep by hand, for `--subsets some`.
SOME = ("", "attention", "q k v", "gate", "out", "gate up", "q k v gate up", "q k v attention out")

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare jaxmem.fit over meshes with policies by names."""

    meshes: tuple[str, ...] = MESHES
    """Targets with the sizes of the axes fsdp and tensor."""
    subsets: str = "all"
    """Which subsets of the names: all 128 of them, or some."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    compiles: int = 4
    """Plans that `fit` may have compiled for a budget; rows that are there are not made again."""
    results: Path = RESULTS
    """Where frontier_mesh.csv and .png are written."""
    small: bool = False
    """Only see that it runs: a small model over one mesh."""

    @property
    def sizes(self) -> Sizes:
        """Of the model."""
        if not self.small:
            return llama.SIZES
        return dataclasses.replace(
            llama.SIZES, layers=4, width=256, hidden=512, heads=8, vocabulary=1024, sequence=256
        )

    @property
    def wanted(self) -> Sequence[str]:
        """The subsets, names with blanks between."""
        if self.small or self.subsets != "all":
            return SOME
        counts = range(len(llama.NAMES) + 1)
        chosen = itertools.chain.from_iterable(
            itertools.combinations(llama.NAMES, count) for count in counts
        )
        return [" ".join(names) for names in chosen]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A compiled program, or why there is none.

    Attributes:
      mesh: target and sizes of the axes.
      sizes: of the model.
      kind, name: a subset of names, or `fit` for what, and in the memory of which subset.
      budget: of `fit`, in bytes.
      required_bytes, matmul_flops: of one device.
      seconds: by the roofline, and for the collectives.
      sent_bytes: by one device in collectives.
      predicted_bytes: of a plan before anything was compiled, of `fit` after other plans were.
      compiles: of `fit`, how many plans were compiled.
    """

    mesh: str
    sizes: str
    kind: str
    name: str
    budget: int | None = None
    required_bytes: int | None = None
    matmul_flops: float | None = None
    seconds: float | None = None
    sent_bytes: int | None = None
    predicted_bytes: int | None = None
    compiles: int | None = None
    error: str = ""


KEY = ("mesh", "sizes", "kind", "name", "budget")

# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows of all meshes, completed, printed, drawn."""
    table = Table(options.results / "frontier_mesh.csv", Row, KEY)
    meshes = ("h100-80g 2x4",) if options.small else options.meshes
    found: list[Row] = []
    for mesh in meshes:
        own = list(_rows(options, table, mesh))
        print(f"{mesh}\n\n{summary(own)}\n")
        found += own
    file = options.results / "frontier_mesh.png"
    draw(found, file)
    print(f"written: {table.path}, {file}")
    return found


def summary(rows: Sequence[Row]) -> str:
    """Each subset that no other beats, and `fit` in its memory, as a Markdown table."""
    lines = [["kept by name", "GiB", "TFLOP", "ms", "fit: GiB", "TFLOP", "ms", "compiled"]]
    for rival in unbeaten(rows):
        cells = [rival.name or "nothing", *_cells(rival)]
        for own in (_of(rows, rival, kind) for kind in (FLOPS, SECONDS)):
            if own is not None:
                lines.append([*cells, *_cells(own), f"{own.compiles}, {own.kind}"])
                cells = [""] * 4
    worse = beaten(rows)
    told = "no subset is better" if not worse else f"better than fit: {', '.join(worse)}"
    for kinds, when in (((PLAN,), "before any compilation"), ((FLOPS, SECONDS), "after others")):
        errors = sorted(_error(row) for row in rows if row.kind in kinds and _error(row) >= 0)
        if errors:
            middle, most = errors[len(errors) // 2], errors[-1]
            told += f"; predicted {when}: {middle:.1%} off in the median, {most:.1%} at most"
    return f"{markdown(lines)}\n\n{told}"


def beaten(rows: Sequence[Row]) -> list[str]:
    """What in the memory of which subset has more of what it was to have the least of."""
    found = []
    for rival in unbeaten(rows):
        for kind, what in ((FLOPS, "matmul_flops"), (SECONDS, "seconds")):
            if (own := _of(rows, rival, kind)) is None:
                continue
            ours, theirs = getattr(own, what), getattr(rival, what)
            if ours is None or ours > theirs * _SAME:
                found.append(f"{rival.name or 'nothing'} ({what})")
    return found


def unbeaten(rows: Sequence[Row]) -> list[Row]:
    """The subsets to which no other one is equal or better in both, fewest bytes first."""
    rivals = [row for row in rows if row.kind == NAMES and row.required_bytes is not None]
    rivals.sort(key=lambda row: (row.required_bytes or 0, row.matmul_flops or 0))
    found: list[Row] = []
    for row in rivals:
        if not found or (row.matmul_flops or 0) < (found[-1].matmul_flops or 0):
            found.append(row)
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Matmul FLOPs over memory, a panel for each mesh."""
    meshes = list(dict.fromkeys(row.mesh for row in rows))
    message = "In the memory of any set of names, fit has fewer matmul FLOPs a device"
    if any(beaten([row for row in rows if row.mesh == mesh]) for mesh in meshes):
        message = "Matmul FLOPs a device over its memory: every set of names, and fit"
    with picture.drawn(path, message, 3.4 * max(len(meshes), 2), 3.6, len(meshes)) as axes:
        for mesh, one in zip(meshes, axes, strict=True):
            for kind, colour, label in (
                (NAMES, picture.HAND, "a set of names each"),
                (FLOPS, picture.OURS, "jaxmem.fit"),
            ):
                own = [row for row in rows if (row.mesh, row.kind) == (mesh, kind)]
                own = [row for row in own if row.required_bytes is not None]
                one.scatter(
                    [(row.required_bytes or 0) / 2**30 for row in own],
                    [(row.matmul_flops or 0) / 1e12 for row in own],
                    s=14, color=colour, label=label, zorder=3 if kind == FLOPS else 2,
                )  # fmt: skip
            one.set_title(mesh.replace("x", " × "), loc="left", fontsize=10)
            one.set_xlabel("GiB required")
        axes[0].set_ylabel("matmul TFLOP")
        axes[0].legend(frameon=False, fontsize=8.5, loc="lower left")


# ---------------------------------------------------------------- implementation

_SAME = 1.0005  # what is rounded differently


def _rows(options: Options, table: Table[Row], mesh: str) -> Iterator[Row]:
    """Of one mesh: the subsets, then `fit` in the memory of those that no other one beats."""
    name, axes = mesh.split()
    fsdp, tensor = map(int, axes.split("x"))
    target = jaxmem.target(name, devices=fsdp * tensor)
    devices = target.mesh({"fsdp": fsdp, "tensor": tensor})
    sizes = str(options.sizes)
    compiling = {"timeout": options.timeout}
    made: dict[str, Any] = {"versions": versions(name), "mesh": mesh, "sizes": sizes}

    def known(kind: str, subset: str, budget: int | None) -> Row | None:
        key = {"mesh": mesh, "sizes": sizes, "kind": kind, "name": subset, "budget": budget}
        return table.find(made["versions"], **key)

    rivals: list[Row] = []
    for subset in tqdm(options.wanted, desc=f"{mesh}, names", unit="program", disable=None):
        row = known(NAMES, subset, None)
        if row is None:
            policy = jaxmem.policies.names(subset.split()) if subset else jaxmem.policies.full()
            job = llama.train(devices, options.sizes, policy)
            row = _compiled(Row(**made, kind=NAMES, name=subset), target, job, **compiling)
            table.add(row)
        rivals.append(row)
        yield row
    job = llama.train(devices, options.sizes)
    if not all(known(PLAN, str(k), None) for k in range(PLANS)):
        table.add(*_plans(target, job, made, options.timeout))
    yield from filter(None, (known(PLAN, str(k), None) for k in range(PLANS)))
    for rival in tqdm(unbeaten(rivals), desc=f"{mesh}, fit", unit="budget", disable=None):
        for kind, cost in ((FLOPS, "flops"), (SECONDS, "roofline")):
            row = known(kind, rival.name, rival.required_bytes)
            if row is None:
                row = Row(**made, kind=kind, name=rival.name, budget=rival.required_bytes)
                most = options.compiles
                row = _fitted(row, target, job, cost, max_compiles=most, **compiling)
                table.add(row)
            yield row


def _plans(target: Any, job: jaxmem.Job, made: dict[str, Any], timeout: float) -> Iterator[Row]:
    """Plans along the front, of which none needs much more than the device is predicted to have."""
    ask = CompileRequest(
        job.step, job.args, {}, target, job.donate_argnums, (), None, timeout, True
    )
    problem = build_problem(ask, False, "roofline")
    most = max(1.1 * target.memory, min(problem.predicted))
    near = [k for k, size in enumerate(problem.predicted) if size <= most]
    for number in range(PLANS):
        place = near[round(number * (len(near) - 1) / (PLANS - 1))]
        row = Row(**made, kind=PLAN, name=str(number), predicted_bytes=problem.predicted[place])
        try:
            yield _told(row, problem.report(ask, place))
        except jaxmem.CompileError as error:
            yield dataclasses.replace(row, error=_first(error))


def _compiled(row: Row, target: Any, job: jaxmem.Job, **compiling: Any) -> Row:
    try:
        report = jaxmem.memory_report(
            job.step, *job.args, target=target, donate_argnums=job.donate_argnums, **compiling
        )
    except jaxmem.CompileError as error:
        return dataclasses.replace(row, error=_first(error))
    return _told(row, report)


def _fitted(row: Row, target: Any, job: jaxmem.Job, cost: Any, **compiling: Any) -> Row:
    assert row.budget is not None
    try:
        fitted = jaxmem.fit(
            job.step, *job.args, budget=row.budget, target=target, cost=cost, progress=False,
            donate_argnums=job.donate_argnums, **compiling,
        )  # fmt: skip
    except (jaxmem.BudgetError, jaxmem.CompileError) as error:
        return dataclasses.replace(row, error=_first(error))
    row = _told(row, fitted.report)
    return dataclasses.replace(
        row, predicted_bytes=fitted.explain().predicted_bytes, compiles=fitted.compiles
    )


def _told(row: Row, report: jaxmem.MemoryReport) -> Row:
    return dataclasses.replace(
        row,
        required_bytes=report.required_bytes,
        matmul_flops=report.matmul_flops,
        seconds=(report.estimated_seconds or 0.0) + (report.communication_seconds or 0.0),
        sent_bytes=report.collective_bytes,
    )


def _first(error: Exception) -> str:
    """Its first line."""
    return str(error).splitlines()[0][:200]


def _of(rows: Sequence[Row], rival: Row, kind: str) -> Row | None:
    return next((row for row in rows if (row.kind, row.name) == (kind, rival.name)), None)


def _error(row: Row) -> float:
    """Of a prediction; -1 where there is none."""
    if row.predicted_bytes is None or row.required_bytes is None:
        return -1.0
    return abs(row.predicted_bytes / row.required_bytes - 1)


def _cells(row: Row) -> list[str]:
    if row.required_bytes is None:
        return ["refused", "", ""]
    return [
        f"{row.required_bytes / 2**30:.2f}",
        f"{(row.matmul_flops or 0) / 1e12:.1f}",
        f"{1e3 * (row.seconds or 0):.0f}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Options))
