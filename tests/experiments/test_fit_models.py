"""`jaxmem.fit` on models of many shapes, for an accelerator that is not there.

Two budgets for each of some models; `experiments/fit_models.py` asks for eight, of all of them
and on more targets.
"""

import dataclasses
import functools
from pathlib import Path

import fit_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budgeted_models import MODELS, ONLY_FOR
from fit_models import Options, Row
from helpers.budgeted import kinds, problem

import jaxmem
from common.table import Table
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.ways import build_problem

TARGET = "h100-80g"

# Smaller than the experiment's, and of what kind their plans are.
SMALL = {
    "lstm": ({"steps": 48, "batch": 64}, {"none", "keep", "periodic", "revolve"}),
    "experts": ({"layers": 4, "batch": 4}, {"none", "keep", "periodic", "revolve"}),
    "matrix_chain": ({}, {"unrolled"}),
}


def small(model: str) -> jaxmem.Job:
    return MODELS[model](**SMALL[model][0])


@pytest.mark.slow  # more models; those below are compiled for a GPU and for a TPU, too
@pytest.mark.parametrize("model", SMALL)
def test_budgets_between_the_least_and_everything_kept(model: str) -> None:
    job = small(model)
    ask = CompileRequest(job.step, job.args, {}, TARGET, job.donate_argnums, (), None, 900.0, True)
    found = build_problem(ask, False, "flops")  # of which the fastest keeps everything
    least, most = (found.report(ask, k).required_bytes for k in (len(found.front) - 1, 0))
    assert least < 0.8 * most
    seconds, sizes = [], []
    for share in (0.3, 0.7):
        budget = round(least ** (1 - share) * most**share)
        fitted = jaxmem.fit(
            job.step,
            *job.args,
            budget=budget,
            target=TARGET,
            donate_argnums=job.donate_argnums,
            cost="flops",
            max_compiles=3,
            progress=False,
        )
        assert fitted.report.required_bytes <= budget
        assert fitted.report.target == TARGET
        assert fitted.compiles <= 3
        assert set(kinds(fitted.plan)) <= SMALL[model][1]
        seconds.append(fitted.explain().extra_seconds)
        sizes.append(fitted.report.required_bytes)
    assert seconds[0] >= seconds[1] >= 0
    assert least <= sizes[0] <= sizes[1] <= most


# Of those that are unrolled, what is planned quickly.
FEW = {"unet": {"levels": 1}, "towers": {"blocks": 1}}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_front_that_falls(model: str) -> None:
    """Traced for an accelerator and solved, not compiled."""
    job = MODELS[model](**FEW.get(model, {}))
    target = "v5e-16g" if ONLY_FOR.get(model) == "tpu" else TARGET
    ask = CompileRequest(job.step, job.args, {}, target, job.donate_argnums, (), None, 900.0, True)
    found = build_problem(ask, False, "roofline")
    seconds = [candidate.seconds for candidate in found.front]
    assert len(found.front) > 8
    assert list(found.predicted) == sorted(found.predicted, reverse=True)
    assert seconds == sorted(seconds)
    assert found.predicted[-1] < 0.8 * found.predicted[0]
    again = build_problem(ask, False, "roofline")
    assert [again.plan(k) for k in range(3)] == [found.plan(k) for k in range(3)]


@pytest.mark.slow
def test_the_gradient_of_each_model_is_the_same_under_a_plan() -> None:
    """On the CPU, with numbers: those models that are quick there."""
    for model, sizes in {
        "lstm": {"steps": 5, "batch": 3, "width": 8},
        "tied": {"batch": 4},
        "fused_gpu": {
            "batch": 1, "sequence": 128, "width": 64, "layers": 2, "heads": 2, "interpret": True
        },
    }.items():  # fmt: skip
        job = MODELS[model](**sizes)
        rng = np.random.default_rng(0)
        args = jax.tree.map(
            lambda s, rng=rng: rng.standard_normal(s.shape).astype(s.dtype) / 8, job.args
        )
        ask = CompileRequest(job.step, job.args, {}, "local", (), (), None, 900.0, True)
        found = build_problem(ask, False, "roofline")
        results = []
        for candidate in (0, len(found.front) - 1):
            with jaxmem.use_plan(found.plan(candidate)):
                results.append(jax.jit(job.step)(*args))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


@pytest.mark.slow
def test_a_budget_on_a_tpu() -> None:
    """One program, and a small one, since its compiler takes its time."""

    @jaxmem.remat_auto
    def stack(weights: jax.Array, h: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.sin(h @ w)), None

        return jnp.square(jax.lax.scan(layer, h, weights)[0]).mean()

    step, budget = jax.grad(stack), 2_800_000
    args = (
        jax.ShapeDtypeStruct((4, 128, 128), "float32"),
        jax.ShapeDtypeStruct((512, 128), "float32"),
    )
    predicted = problem(step, *args, target="v5e-16g").predicted
    assert predicted[-1] < budget < predicted[0]
    fitted = jaxmem.fit(
        step, *args, budget=budget, target="v5e-16g", max_compiles=1, progress=False
    )
    assert fitted.report.required_bytes <= budget
    assert (fitted.report.target, fitted.report.platform) == ("v5e-16g", "tpu")
    assert fitted.compiles == 1
    assert fitted.explain().extra_seconds > 0


@pytest.mark.slow  # programs with hand-written kernels are compiled to machine code
@pytest.mark.parametrize("model", ONLY_FOR)
def test_attention_in_one_kernel_is_kept_rather_than_recomputed(model: str) -> None:
    """Its result and the row sums that its gradient needs, at a budget that has room for them."""
    small = {"batch": 8, "sequence": 1024, "width": 512, "layers": 4, "heads": 4}
    target, compiles = TARGET, 5
    if ONLY_FOR[model] == "tpu":
        target, compiles, small = "v5e-16g", 2, small | {"sequence": 512, "width": 256, "heads": 2}
    job = MODELS[model](**small)
    ask = CompileRequest(job.step, job.args, {}, target, job.donate_argnums, (), None, 900.0, True)
    most = build_problem(ask, False, "flops").report(ask, 0)
    fitted = jaxmem.fit(
        job.step,
        *job.args,
        budget=most.required_bytes - most.temp_bytes // 3,
        target=target,
        donate_argnums=job.donate_argnums,
        cost="flops",
        max_compiles=compiles,
        progress=False,
    )
    kernel = "custom_vjp_call" if ONLY_FOR[model] == "tpu" else "pallas_call"
    assert kernel in str(fitted.explain())
    assert fitted.report.matmul_flops == most.matmul_flops  # elementwise work alone is repeated


def test_models_with_kernels_are_asked_for_on_their_platform_alone(tmp_path: Path) -> None:
    options = Options(models=tuple(ONLY_FOR), targets=("local",), results=tmp_path)
    assert fit_models.main(options) == []


# ---------------------------------------------------------------- the experiment


@pytest.mark.slow
def test_the_experiment_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"lstm": functools.partial(MODELS["lstm"], steps=12, batch=64, width=32)}
    monkeypatch.setattr(fit_models, "MODELS", tiny)
    options = Options(models=("lstm",), targets=("local",), budgets=2, results=tmp_path)
    rows = fit_models.main(options)
    assert [row.place for row in rows] == [0, 1]
    assert all(row.required <= row.budget for row in rows)
    assert rows[-1].seconds == 0
    table = Table(tmp_path / "fit_models.csv", Row, ("model", "target", "place"))
    assert table.of(rows[0].versions) == rows
    table.drop(rows[1:])
    asked = []
    known = fit_models.jaxmem.fit

    def fit(*args: object, **options: object) -> jaxmem.Fitted:
        asked.append(options["budget"])
        return known(*args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(fit_models.jaxmem, "fit", fit)
    assert fit_models.main(options) == rows
    assert asked == [rows[1].budget]


def test_the_report_says_what_does_not_hold() -> None:
    low = Row("lstm", "local", 0, 1000, 990, 800, 840, 808, 0.5, 30, 2, versions="1")
    high = dataclasses.replace(low, place=1, budget=2000, required=1990, seconds=0.0)
    text = fit_models.report([low, high])
    assert "2 of 2 budgets kept, time falls" in text
    assert "off by 5.0% in the median, 5.0% at most (1.0% and 1.0% when compiled)" in text
    slower = dataclasses.replace(high, seconds=0.9, required=2001)
    text = fit_models.report([low, slower])
    assert "1 of 2 budgets kept, time DOES NOT FALL" in text
