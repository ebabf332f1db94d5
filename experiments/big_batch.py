"""The largest batch and the largest model that fit one accelerator: undecorated, and with jaxmem.

python experiments/big_batch.py                              # an H100, which may be absent
python experiments/big_batch.py --targets rtx-4090-24g v5e-16g
python experiments/big_batch.py --small                      # a quick trial

An AdamW step of a byte-level GPT, float32 parameters and moments, bfloat16 layers, attention
without a fused kernel.  The questions are the largest batch of a model of 24 layers, and the
largest number of layers with 64 sequences a step; each undecorated, with every layer recomputed
(`remat_full`), in microbatches (`jaxmem.value_and_grad`), and all together, for which `jaxmem.fit`
plans the recomputation and the GPU compiler's rematerialisation is switched off.  With
microbatches any batch fits, so there the row is the compiled step of a very large one.

Sizes have at most five significant bits, and a size is the largest only if the next one was
compiled and did not fit.  A step fits if it needs at most 95 % of the memory.  Extra FLOPs are the
matmul FLOPs of the compiled program beyond the model's.  Where no policy recomputes, they are the
compiler's: near the limit it rematerialises, on GPUs without needing any less memory.

It writes `results/big_batch.csv`, a row per compiled program, and `.png`, and resumes after an
interruption.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

import jaxmem
from common.compiling import QUICK, planned
from common.table import Table, versions
from jaxmem._util.text import parse_size
from side import sizes
from side.jax_nets import loss, training
from side.largest import largest
from side.shapes import Gpt
from side.sizes import ALL, BATCH, FIT, MODEL, PARTS, PLAIN, REMAT, Question, Row, Way

RESULTS = Path(__file__).parent / "results"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Find the largest batch and the largest model that an accelerator takes."""

    targets: tuple[str, ...] = ("h100-80g",)
    """What to compile for; "local" is the attached backend. A TPU's compiler is much slower."""
    questions: tuple[Question, ...] = (BATCH, MODEL)
    """Which of the two."""
    ways: tuple[Way, ...] = (PLAIN, REMAT, PARTS, ALL)
    """Which of the four."""
    layers: int = 24
    """Of the model whose batch is asked for."""
    sequences: int = 64
    """In a step of the model whose layers are asked for."""
    at_once: int = 4
    """Sequences in a microbatch of that."""
    whole: int = 1024
    """Sequences in the step that is cut into microbatches when the batch is asked for."""
    width: int = 1024
    """Of the model."""
    length: int = 1024
    """Of a sequence."""
    memory: str = ""
    """Such as 40GiB, instead of the accelerator's own."""
    share: float = 0.95
    """Of the memory, how much the step may take."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where big_batch.csv and big_batch.png are written."""
    small: bool = False
    """Only see that it runs: a small model on the attached backend, in a few MiB."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self,
            targets=("local",),
            questions=(MODEL,),
            ways=(PLAIN, ALL),
            layers=2,
            sequences=8,
            at_once=2,
            whole=32,
            width=16,
            length=32,
            memory="3.2MiB",
        )

    def model(self, layers: int, sequences: int = 1) -> Gpt:
        return Gpt(layers, self.width, max(1, self.width // 64), self.length, sequences)

    def capacity(self, target: str) -> int:
        """Bytes that a step may take."""
        whole = parse_size(self.memory) if self.memory else jaxmem.target(target).memory
        return int(self.share * whole)


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The answers: for each target, question and way the largest that fits, or 1 if none does."""
    options = options.sized()
    known = sizes.table(options.results / "big_batch.csv")
    found = []
    with tqdm(unit="program", disable=None) as bar:
        for target in options.targets:
            find = Finder(options, target, known, bar.update)
            for question in options.questions:
                found += find.batches() if question == BATCH else find.models()
    file = options.results / "big_batch.png"
    sizes.draw(found, file)
    print(f"{sizes.summary(found)}\n\n{sizes.message(found)}\nwritten: {known.path}, {file}")
    return found


@dataclasses.dataclass(frozen=True)
class Finder:
    """Compiles what has not been compiled for a target."""

    options: Options
    target: str
    known: Table[Row]
    tell: Callable[[], Any]

    @property
    def capacity(self) -> int:
        return self.options.capacity(self.target)

    def batches(self) -> list[Row]:
        """The answers about the batch."""
        options = self.options
        fixed = options.model(options.layers).count * 16  # parameters, moments, gradients

        def at(way: str, policy: str) -> Callable[[int], Row]:
            return lambda n: self.row(BATCH, way, options.layers, n, 1, policy)

        def parts(way: str, at_once: int, policy: str) -> Row:
            cut = options.whole // max(1, min(at_once, options.whole))
            return self.row(BATCH, way, options.layers, options.whole, cut, policy)

        plain = self.search(at(PLAIN, "none"), 8, fixed)
        most = max(plain.largest, 1)
        remat = self.search(at(REMAT, "full"), 8 * most, fixed)
        # At its very limit the GPU's compiler recomputes on its own; half of that leaves it alone.
        return self.those(
            {
                PLAIN: lambda: plain,
                REMAT: lambda: remat,
                PARTS: lambda: parts(PARTS, most // 2, "none"),
                ALL: lambda: parts(ALL, min(4 * most, max(remat.largest, 1)), FIT),
            }
        )

    def models(self) -> list[Row]:
        """The answers about the model."""
        options = self.options
        cut = options.sequences // options.at_once
        fixed = options.model(0).count * 16
        # Parameters, moments and gradients alone allow no more layers than this.
        limit = (self.capacity - fixed) // (options.model(1).count * 16 - fixed)

        def deepest(way: str, microbatches: int, policy: str, start: int) -> Row:
            def at(layers: int) -> Row:
                return self.row(MODEL, way, layers, options.sequences, microbatches, policy)

            return self.search(at, start, fixed)

        def planned() -> Row:
            layers = deepest(ALL, cut, "full", 9 * limit // 10).layers
            return self.row(MODEL, ALL, layers, options.sequences, cut, FIT)

        return self.those(
            {
                PLAIN: lambda: deepest(PLAIN, 1, "none", 4),
                REMAT: lambda: deepest(REMAT, 1, "full", limit // 2),
                PARTS: lambda: deepest(PARTS, cut, "none", limit // 5),
                ALL: planned,
            }
        )

    def those(self, ways: Mapping[str, Callable[[], Row]]) -> list[Row]:
        """The answers that are asked for."""
        return [find() for way, find in ways.items() if way in self.options.ways]

    def search(self, at: Callable[[int], Row], start: int, fixed: int) -> Row:
        """The row of the largest size that fits; if none does, that of 1."""
        return at(largest(lambda n: at(n).required_bytes, self.capacity, start, fixed) or 1)

    def row(
        self, question: str, way: str, layers: int, sequences: int, microbatches: int, policy: str
    ) -> Row:
        """A program's row, compiled if it is not there."""
        options, made_by = self.options, versions(self.target)
        key = {
            "target": self.target,
            "question": question,
            "way": way,
            "program": f"width={options.width} length={options.length}",
            "layers": layers,
            "sequences": sequences,
            "microbatches": microbatches,
            "policy": policy,
            "capacity": self.capacity,
        }
        if (found := self.known.find(made_by, **key)) is not None:
            return found
        net = options.model(layers, sequences)
        job = training(net, jaxmem.value_and_grad(loss(net), microbatches=microbatches))
        report = self.report(way, job, policy)
        row = Row(
            **key,
            required_bytes=report.required_bytes,
            temp_bytes=report.temp_bytes,
            parameters=net.count,
            matmul_flops=report.matmul_flops,
            model_matmul_flops=report.model_matmul_flops,
            versions=made_by,
        )
        self.known.add(row)
        self.tell()
        return row

    def report(self, way: str, job: jaxmem.Job, policy: str) -> jaxmem.MemoryReport:
        """What the compiler says."""
        settings = {"compiler_options": self.settings(way), "timeout": self.options.timeout}
        if policy != FIT:
            with jaxmem.use_policy(policy):
                return job.report(self.target, suggest=False, **settings)
        compiles = 2 if self.options.small else 6
        found = planned(job, self.capacity, target=self.target, max_compiles=compiles, **settings)
        return found.report

    def settings(self, way: str) -> dict[str, Any] | None:
        """Options of the compiler."""
        if self.options.small:
            return QUICK
        gpu = self.target != "local" and jaxmem.target(self.target).platform == "gpu"
        return {"xla_disable_hlo_passes": "rematerialization"} if gpu and way == ALL else None


if __name__ == "__main__":
    main(tyro.cli(Options))
