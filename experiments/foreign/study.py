"""Makes the rows of a model: plain, with its own option, under `remat_sqrt`, and as `fit` plans."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxmem
from common.compiling import Planned, compiling, is_recomputed_by_compiler, planned, request
from common.table import Table, versions
from foreign.nets import Net
from foreign.table import FIT, OWN, PLAIN, SQRT, Cost, Row
from foreign.training import job
from jaxmem.fitting.ways import build_problem

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Study:
    """Makes the rows of a target that are not there; each is on disk before the next is begun.

    Attributes:
      shares: of the plain program's temporaries, for which `fit` is asked.
      cost: what `fit` makes least.
      compiles: how often it may ask the compiler for one budget.
      timeout: seconds for compiling one program.
      small: whether the programs are only to be seen to work.
      tell: called after each row.
    """

    known: Table[Row]
    target: str
    shares: tuple[float, ...]
    cost: Cost
    compiles: int
    timeout: float
    small: bool
    tell: Callable[[], Any]

    def rows(self, model: str, net: Net) -> list[Row]:
        """All rows of a model, plain first."""

        def row(kind: str, make: Callable[[Row], Row], asked: str = "") -> Row:
            return self._row(model, net, kind, make, asked)

        plain = row(PLAIN, lambda row: self._plain(row, net))
        rows = [plain, row(SQRT, lambda row: self._compiled(row, job(net, jaxmem.remat_sqrt)))]
        required, temporaries = _baseline(plain, net)
        for share in self.shares:
            budget = required - round((1 - share) * temporaries)
            rows.append(row(FIT, lambda row, b=budget: self._fitted(row, net, b), f"{share:g}"))
        if net.has_option:
            own = row(OWN, lambda row: self._compiled(row, job(net.checkpointed())))
            rows.append(own)
            if (budget := own.required_bytes) is not None:
                rows.append(row(FIT, lambda row: self._fitted(row, net, budget), OWN))
        return rows

    # ------------------------------------------------------------ implementation

    def _row(self, model: str, net: Net, kind: str, make: Callable[[Row], Row], asked: str) -> Row:
        """The row, made if it is not there; a refused program is a row as well."""
        own = made_by(self.target)
        key: dict[str, Any] = {
            "target": self.target,
            "model": model,
            "sizes": net.sizes,
            "kind": kind,
            "asked": asked,
            "cost": self.cost if kind == FIT else "",
        }
        if (found := self.known.find(own, **key)) is not None:
            return found
        row = make(Row(**key, versions=own))
        self.known.add(row)
        self.tell()
        return row

    def _plain(self, row: Row, net: Net) -> Row:
        """The undecorated step; with it, how long planning takes and what it predicts."""
        step = job(net, jaxmem.remat_auto)
        ask = request(step, self.target, self.timeout)
        start = time.perf_counter()
        problem = build_problem(ask, False, self.cost)
        row = dataclasses.replace(
            row,
            planning_seconds=time.perf_counter() - start,
            predicted_bytes=problem.predicted[0],
        )
        return self._compiled(row, job(net))

    def _compiled(self, row: Row, step: jaxmem.Job) -> Row:
        def compiled() -> Planned:
            return Planned(step.report(suggest=False, **self._compiling), fits=True)

        return _completed(row, compiled)

    def _fitted(self, row: Row, net: Net, budget: int) -> Row:
        step = job(net, jaxmem.remat_auto)
        options = {"cost": self.cost, "max_compiles": self.compiles, **self._compiling}
        start = time.perf_counter()
        row = _completed(row, lambda: planned(step, budget, **options))
        return dataclasses.replace(
            row, budget_bytes=budget, fit_seconds=time.perf_counter() - start
        )

    @property
    def _compiling(self) -> dict[str, Any]:
        return compiling(self.target, self.timeout, self.small)


# ---------------------------------------------------------------- API


def made_by(target: str) -> str:
    """The versions that determine the rows of a target."""
    return versions(target, "flax", "optax", "transformers")


# ---------------------------------------------------------------- implementation


def _baseline(plain: Row, net: Net) -> tuple[int, int]:
    """Bytes that the plain step needs, and those of its temporaries; as predicted, if refused."""
    if plain.required_bytes is not None and plain.temp_bytes is not None:
        return plain.required_bytes, plain.temp_bytes
    assert plain.predicted_bytes is not None
    leaves = jax.tree.leaves(job(net).args)
    arguments = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return plain.predicted_bytes, plain.predicted_bytes - arguments


def _completed(row: Row, compile: Callable[[], Planned]) -> Row:
    """The row with what the compiler says."""
    try:
        made = compile()
    except jaxmem.CompileError as error:
        return dataclasses.replace(row, error=_first(error))
    report = made.report
    return dataclasses.replace(
        row,
        fits=made.fits,
        required_bytes=report.required_bytes,
        temp_bytes=report.temp_bytes,
        predicted_bytes=row.predicted_bytes or made.predicted_bytes,
        matmul_flops=report.matmul_flops,
        model_matmul_flops=report.model_matmul_flops,
        estimated_seconds=report.estimated_seconds,
        compiler_remat=is_recomputed_by_compiler(report),
        compiles=made.compiles,
    )


def _first(error: Exception) -> str:
    """The beginning of an error's text."""
    return " ".join(str(error).split())[:300]
