"""Time and memory on an attached NVIDIA GPU: jaxmem, hand-written jax.checkpoint, and PyTorch.

    python experiments/gpu_side_by_side.py                  # needs a GPU
    python experiments/gpu_side_by_side.py --nets CNN       # or transformer, "fused transformer"
    python experiments/gpu_side_by_side.py --device cpu     # a quick trial; no peaks

The same nets, with the same initial weights, are trained on the same batch: under jaxmem's policies
and under `jaxmem.fit` at several budgets, among them the peak of every Pareto-optimal rival;
with `jax.checkpoint` around each layer; and, where it is installed, by PyTorch: plain,
`torch.utils.checkpoint` around each layer, `checkpoint_sequential`, `torch.compile`, and that with
`activation_memory_budget`.  Each is measured in a separate process, with nothing else on the GPU:
the median time of a step, synchronised before and after, and the peak of the framework's
allocator.  Before that several may plan and compile at once (`--workers`).  One that runs out of
memory has a row that says so.  Losses of the first two steps must agree within the
tolerance of `side/rows.py`, or the row is not counted.

It writes `results/gpu_side_by_side.csv` and `.png`, and resumes after an interruption.  Without a
GPU it says what it needs, and writes nothing.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm
from verify_predictions import attached_gpu

from common.table import Table, read, versions
from side import children, methods, rows, scatter, shapes
from side.children import FINAL, OK
from side.methods import HAND, OURS, TORCH, Family, Method
from side.rows import Row

RESULTS = Path(__file__).parent / "results"
NEEDS = """\
This needs an attached NVIDIA GPU that jax sees: pip install "jax[cuda13]".  For the rows of PyTorch
also: pip install torch.  Nothing was measured and nothing written."""

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare jaxmem with hand-written jax.checkpoint and PyTorch on an attached GPU."""

    nets: tuple[shapes.Name, ...] = tuple(shapes.NETS)
    """Which to train."""
    families: tuple[Family, ...] = (HAND, *TORCH, OURS)
    """Whose methods."""
    only: str = ""
    """Only methods whose name has this in it."""
    budgets: tuple[float, ...] = (0.6, 0.4, 0.25)
    """Of `fit`, in parts of what the plain step is compiled to."""
    segments: tuple[int, ...] = (2, 4, 8)
    """Of checkpoint_sequential."""
    torch_budgets: tuple[float, ...] = (0.75, 0.5, 0.25, 0.1)
    """Of torch.compile, in parts of the activations."""
    warmup: int = 3
    """Steps that are not timed."""
    steps: int = 20
    """Steps that are."""
    timeout: float = 900.0
    """Seconds for one process."""
    workers: int = 1
    """Programs that are planned and compiled at once; they are measured one at a time."""
    device: Literal["gpu", "cpu"] = "gpu"
    """"cpu" only shows that it runs."""
    results: Path = RESULTS
    """Where gpu_side_by_side.csv and gpu_side_by_side.png are written."""
    again: bool = False
    """Measure all anew."""
    small: bool = False
    """Small nets, and few steps."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        nets = tuple(name for name in self.nets if name in shapes.SMALL)
        return dataclasses.replace(self, nets=nets, warmup=1, steps=3)

    def net(self, name: shapes.Name) -> shapes.Net:
        return (shapes.SMALL if self.small else shapes.NETS)[name]


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """All rows, measured, printed, drawn; none without a device."""
    options = options.sized()
    hardware = attached_gpu() if options.device == "gpu" else f"cpu ({platform.machine()})"
    if hardware is None:
        print(NEEDS)
        return []
    known = rows.table(options.results / "gpu_side_by_side.csv")
    if options.again:
        known.drop([row for row in read(known.path, Row) if row.hardware == hardware])
    first = measured(
        [(name, method) for name in options.nets for method in asked(options)],
        options, hardware, known,
    )  # fmt: skip
    fitted = measured(
        [
            (name, method)
            for name in options.nets
            for method in fits(options, [row for row in first if row.net == name])
        ],
        options, hardware, known,
    )  # fmt: skip
    found = [row for name in options.nets for row in (*first, *fitted) if row.net == name]
    for name in options.nets:
        own = [row for row in found if row.net == name]
        print(f"{rows.summary(own)}\n\n{rows.message(own)}\n", flush=True)
    file = options.results / "gpu_side_by_side.png"
    drawn = scatter.draw(found, file)
    print(f"written: {known.path}" + (f", {file}" if drawn else ""))
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed, so it has no rows: pip install torch")
    return found


def measured(
    wanted: Sequence[tuple[shapes.Name, Method]],
    options: Options,
    hardware: str,
    known: Table[Row],
) -> list[Row]:
    """The rows of nets and methods; each is on disk before the next is begun."""
    wanted = [(name, method) for name, method in wanted if options.only in method.name]
    entries = [Entry(name, method, options, hardware, known) for name, method in wanted]
    found = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        if options.workers > 1:
            # All, before the first is timed.
            futures = [pool.submit(entry.prepare) for entry in entries]
            done = concurrent.futures.as_completed(futures)
            for future in tqdm(done, "prepared", len(futures), disable=None):
                future.result()
        with tqdm(entries, "measured", disable=None) as bar:
            for entry in bar:
                bar.set_postfix_str(f"{entry.name}, {entry.method.family} {entry.method.name}")
                found.append(entry.row())
    return found


def asked(options: Options) -> list[Method]:
    """What does not depend on what came of others."""
    every = [*methods.by_hand(), *methods.ours()]
    if importlib.util.find_spec("torch") is not None:
        every += methods.torch(options.segments, options.torch_budgets)
    return [method for method in every if method.family in options.families]


def fits(options: Options, done: Sequence[Row]) -> list[Method]:
    """Budgets for `fit`: parts of the plain step, and the peaks of rivals that no rival beats."""
    if OURS not in options.families:
        return []
    plain = [row.compiled_bytes for row in done if (row.family, row.method) == (OURS, "none")]
    found = [
        methods.fit(f"{share:g} of plain", int(share * size))
        for size in plain
        for share in options.budgets
        if size
    ]
    rivals = {row.label: row.place for row in done if row.family != OURS and row.place}
    for label, place in rivals.items():
        others = [other for other in rivals.values() if other != place]
        if not any(peak <= place[0] and seconds <= place[1] for peak, seconds in others):
            # The allocator rounds up, and what is compiled is rounded nowhere.
            found.append(methods.fit(f"as {label}", int(0.99 * place[0])))
    return found


class Entry:
    """The row of one net and method; measured again where it came to no end."""

    def __init__(
        self,
        name: shapes.Name,
        method: Method,
        options: Options,
        hardware: str,
        known: Table[Row],
    ) -> None:
        self.name, self.method = name, method
        self._options, self._known = options, known
        self._net = net = options.net(name)
        size = " ".join(
            f"{key}={value}" for key, value in dataclasses.asdict(net).items() if key != "dtype"
        )
        self._versions = versions_of(method)
        self._key = {"hardware": hardware, "net": name, "size": size}
        self._key |= {"family": method.family, "method": method.name}
        before = known.find(self._versions, **self._key)
        done = before and before.status in FINAL and before.budget_bytes == method.budget
        self._before = before if done else None
        self._child = None if done else children.Child(net, method, options.device, options.timeout)

    def prepare(self) -> None:
        """Plan and compile, if it must be measured."""
        if self._child is not None:
            self._child.prepare()

    def row(self) -> Row:
        """Measured now, or before."""
        if self._child is None:
            assert self._before is not None
            return self._before
        answer = self._child.measured(self._options.warmup, self._options.steps)
        seconds = answer.found.get("seconds", [])
        first, second = answer.found.get("losses", (None, None))
        note = answer.note
        if answer.status == OK and answer.found["compiled"]:
            note = "compiled in the measured process, so trials of kernels may be in the peak"
        row = Row(
            **self._key,
            dtype=self._net.dtype,
            status=answer.status,
            budget_bytes=self.method.budget,
            compiled_bytes=answer.found.get("compiled_bytes"),
            peak_bytes=answer.found.get("peak_bytes"),
            seconds=statistics.median(seconds) if seconds else None,
            fastest=min(seconds, default=None),
            slowest=max(seconds, default=None),
            steps=len(seconds),
            loss=first,
            second_loss=second,
            note=note,
            versions=self._versions,
        )
        self._known.add(row)
        return row


def versions_of(method: Method) -> str:
    """By which versions."""
    if method.family in TORCH:
        return f"torch {importlib.metadata.version('torch')}"
    there = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    return versions("local", *(n for n in ("jax-cuda12-plugin", "jax-cuda13-plugin") if n in there))


if __name__ == "__main__":
    main(tyro.cli(Options))
