"""What each rule of the estimate is worth: `fit` without it, in budgets that are known.

    python experiments/ablation.py                        # two hours per target
    python experiments/ablation.py --rules writes_in_place --models matrix_chain --places 3 --nets

`jaxmem.estimate.compiler.Compiler` holds what a compiler does to live bytes.  Each of these rules
spares compilations, or finds better plans, or goes.  `fit` is asked with all rules and without
each, for models and budgets of `results/fit_models.csv`, and in shares of their plain temporaries
for models of the package `transformers`, with fewer layers than they have, for one of these with
checkpoints of its own, and for an autoencoder of convolutions.  "Changed"
counts the models of which any plan or prediction is another without the rule, the others are not
asked again; "worse" and "better" count the budgets where the plan recomputes more or less by over
0.2 % of the model's matmul FLOPs, "lost" is the mean of that, "compiles" how many more compilations
were asked for in all, and "off" what the plans' temporaries were predicted wrong by before anything
was compiled, in the median and at most.  A budget that is no longer met is told of.

It prints a table for each target and writes `results/ablation.csv`; the same command resumes after
an interruption.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro
from budgeted_models import MODELS
from fit_models import Row as Known
from fit_models import predicted_bytes
from tqdm import tqdm

import jaxmem
from common.compiling import compiling, request
from common.table import Record, Table, markdown, read, versions
from foreign.nets import NETS
from foreign.training import Decorator
from foreign.training import job as train_step
from jaxmem.estimate import compiler
from jaxmem.fitting.step_problem import Cost, StepProblem
from jaxmem.fitting.ways import build_problem

RESULTS = Path(__file__).parent / "results"
ALL = "all rules"
CHECKPOINTED = "BERT, own checkpoints"
AUTOENCODER = "autoencoder"
COST: Cost = "flops"  # what is compared

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Plan models of fit_models.py without one rule at a time."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for."""
    models: tuple[str, ...] = tuple(model for model in MODELS if "fused" not in model)
    """Which of budgeted_models.py."""
    places: tuple[int, ...] = (1, 3, 5)
    """Which of the eight budgets."""
    nets: tuple[str, ...] = ("GPT-2", "BERT", "T5", "ViT", "ResNet-50", CHECKPOINTED, AUTOENCODER)
    """Which other models: those of transformers by their names."""
    layers: int = 3
    """How many layers these have, in encoder and decoder each."""
    percent: tuple[int, ...] = (75, 50)
    """Of their plain temporaries: the budgets."""
    rules: tuple[str, ...] | None = None
    """Which rules; by default all that the target's compiler has."""
    compiles: int = 6
    """How often `fit` may ask the compiler for one budget."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where fit_models.csv is read, and ablation.csv written."""


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """The plan for one budget without a rule; sizes in bytes.

    Attributes:
      place: which of the budgets of fit_models.csv; of other models, per cent of their plain
        temporaries.
      predicted: the temporaries of the plan, before anything was compiled.
      compiles: how often the compiler was asked.
      required, matmul_flops: of the compiled program; None where no plan was found to fit.
      changed: whether any plan or prediction for the model is another than with all rules.
    """

    rule: str
    target: str
    model: str
    place: int
    budget: int
    compiles: int = 0
    required: int | None = None
    temporaries: int | None = None
    predicted: int | None = None
    matmul_flops: int | None = None
    changed: bool = False

    @property
    def off(self) -> float | None:
        """The relative error of `predicted`."""
        if self.predicted is None or self.temporaries is None:
            return None
        return self.predicted / self.temporaries - 1


@dataclasses.dataclass(frozen=True)
class Asked:
    """A budget of a model."""

    target: str
    model: str
    place: int
    budget: int


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """All rows, made where they are not there, and printed."""
    table = Table(options.results / "ablation.csv", Row, ("rule", "target", "model", "place"))
    asked = list(_asked(options))
    rows = []
    for rule, one in tqdm(asked, unit="plan", disable=None):
        own = versions(one.target)
        key = {"rule": rule, "target": one.target, "model": one.model, "place": one.place}
        row = table.find(own, **key)
        if row is None or row.budget != one.budget:
            row = Row(rule, one.target, one.model, one.place, one.budget, versions=own)
            whole = table.find(own, **{**key, "rule": ALL})
            if rule == ALL or whole is None:
                row = _planned(row, options)
            elif _is_changed(rule, one, options):
                row = dataclasses.replace(row, changed=True)
                # What no plan is found for with all rules says nothing of one of them.
                row = row if whole.required is None else _planned(row, options)
            else:
                row = dataclasses.replace(whole, rule=rule)
            table.add(row)
        rows.append(row)
    for target in options.targets:
        print(f"\n{target}\n\n{summary([row for row in rows if row.target == target])}")
    return rows


def rules_of(target: str) -> list[str]:
    """The rules that the target's compiler has, of those about bytes."""
    own = compiler.of_platform(jaxmem.target(target).platform)
    return [field.name for field in dataclasses.fields(own) if getattr(own, field.name) is True]


def summary(rows: Sequence[Row]) -> str:
    """A Markdown table: what changes without each rule."""
    whole = {(row.model, row.place): row for row in rows if row.rule == ALL}
    lines: list[Sequence[str]] = [_HEADING]
    for rule, group in itertools.groupby(rows, lambda row: row.rule):
        own = list(group)
        changes = [_change(row, whole[row.model, row.place]) for row in own]
        met = [change for change in changes if change is not None]
        lost = sum(whole[row.model, row.place].required is not None for row in own) - len(met)
        off = [abs(row.off) for row in own if row.off is not None]
        more = sum(row.compiles - whole[row.model, row.place].compiles for row in own)
        lines.append(
            [
                rule,
                f"{len({row.model for row in own if row.changed})}",
                f"{len(met) + lost}" + (f", {lost} not met" if lost else ""),
                str(sum(change > _SMALL for change in met)),
                str(sum(change < -_SMALL for change in met)),
                f"{statistics.mean(met):+.2%}" if met else "",
                f"{sum(row.compiles for row in own)}" if rule == ALL else f"{more:+d}",
                f"{statistics.median(off):.1%}" if off else "",
                f"{max(off):.1%}" if off else "",
            ]
        )
    return markdown(lines)


# ---------------------------------------------------------------- implementation

_HEADING = (
    "without",
    "changed",
    "budgets",
    "worse",
    "better",
    "lost",
    "compiles",
    "off",
    "at most",
)
# Less than this part of the FLOPs is no change.
_SMALL = 0.002


def _asked(options: Options) -> Iterator[tuple[str, Asked]]:
    """Rules and budgets, all rules first."""
    known = read(options.results / "fit_models.csv", Known)
    for target in options.targets:
        budgets = [
            Asked(target, row.model, row.place, row.budget)
            for row in known
            if row.target == target and row.model in options.models and row.place in options.places
        ]
        budgets += (one for net in options.nets for one in _shares(target, net, options))
        for rule in (ALL, *(options.rules or rules_of(target))):
            yield from ((rule, one) for one in budgets)


def _shares(target: str, net: str, options: Options) -> list[Asked]:
    """The budgets of a model that is not one of fit_models.csv."""
    plain = _other(net, options).report(suggest=False, **compiling(target, options.timeout, False))
    fixed = plain.required_bytes - plain.temp_bytes
    return [
        Asked(target, net, percent, fixed + plain.temp_bytes * percent // 100)
        for percent in options.percent
    ]


def _step(model: str, options: Options) -> jaxmem.Job:
    if model in MODELS:
        return MODELS[model]()
    return _other(model, options, jaxmem.remat_auto)


def _other(net: str, options: Options, decorate: Decorator | None = None) -> jaxmem.Job:
    if net == AUTOENCODER:
        return _autoencoder(decorate)
    if net == CHECKPOINTED:
        return train_step(NETS["BERT"](layers=options.layers).checkpointed(), decorate)
    return train_step(NETS[net](layers=options.layers), decorate)


class _Autoencoder(nn.Module):
    """Down by poolings and up by transposed convolutions, with ReLUs between."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        h = images
        for width in (32, 64, 128):
            h = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(h)), (2, 2), (2, 2))
        for width in (64, 32):
            h = nn.relu(nn.ConvTranspose(width, (3, 3), (2, 2))(h))
        return nn.ConvTranspose(images.shape[-1], (3, 3), (2, 2))(h)


def _autoencoder(decorate: Decorator | None, batch: int = 256, size: int = 64) -> jaxmem.Job:
    net, images = _Autoencoder(), jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    apply: Any = decorate(net.apply) if decorate else net.apply

    def step(params: Any, images: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.square(apply(params, images) - images).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = jax.eval_shape(net.init, jax.random.key(0), images)
    return jaxmem.Job(step, (params, images), donate_argnums=0)


@contextlib.contextmanager
def _without(rule: str, target: str) -> Iterator[None]:
    """While open, the rule is not there."""
    platform = jaxmem.target(target).platform
    own = compiler.of_platform(platform)
    less = own if rule == ALL else dataclasses.replace(own, **{rule: False})
    with mock.patch.object(compiler, platform.upper(), less):
        yield


def _problem(rule: str, one: Asked, options: Options) -> StepProblem:
    with _without(rule, one.target):
        return build_problem(
            request(_step(one.model, options), one.target, options.timeout), False, COST
        )


def _is_changed(rule: str, one: Asked, options: Options) -> bool:
    """Whether any plan or prediction is another without the rule."""
    return _plans(rule, one.target, one.model, options) != _plans(
        ALL, one.target, one.model, options
    )


@functools.lru_cache(maxsize=16)
def _plans(rule: str, target: str, model: str, options: Options) -> list[Any]:
    """All that `fit` chooses from."""
    problem = _problem(rule, Asked(target, model, 0, 0), options)
    front = [problem.plan(number) for number in range(len(problem.front))]
    return [problem.candidates, problem.whole, problem.by_layer, problem.others, front]


def _planned(row: Row, options: Options) -> Row:
    job = _step(row.model, options)
    with _without(row.rule, row.target):
        try:
            fitted = jaxmem.fit(
                job.step,
                *job.args,
                target=row.target,
                donate_argnums=job.donate_argnums,
                budget=row.budget,
                cost=COST,
                max_compiles=options.compiles,
                timeout=options.timeout,
                progress=False,
            )
        except jaxmem.BudgetError:
            return dataclasses.replace(row, compiles=options.compiles)
        problem = build_problem(request(job, row.target, options.timeout), False, COST)
    report = fitted.report
    fixed = report.required_bytes - report.temp_bytes
    return dataclasses.replace(
        row,
        compiles=fitted.compiles,
        required=report.required_bytes,
        temporaries=report.temp_bytes,
        predicted=predicted_bytes(problem, fitted.plan) - fixed,
        matmul_flops=report.matmul_flops,
    )


def _change(row: Row, whole: Row) -> float | None:
    """How much more is recomputed, in parts of all matmul FLOPs; None where no plan fits."""
    if row.matmul_flops is None or whole.matmul_flops is None:
        return None
    return row.matmul_flops / whole.matmul_flops - 1


if __name__ == "__main__":
    main(tyro.cli(Options))
