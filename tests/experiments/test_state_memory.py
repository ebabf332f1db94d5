"""`experiments/state_memory.py` and `full_finetune.py`: their smallest forms, and what is said."""

import dataclasses
from pathlib import Path
from typing import Any

import full_finetune
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import state_memory
from state_memory import Options, answer, draw, main, summary, training

import jaxmem
from common import ways
from common.steps import Case, Row
from common.ways import (
    ADAM,
    ADAM_A,
    ADAMW,
    ALL_HOST,
    DYNAMIC,
    FUSED,
    FUSED_3,
    HOST,
    ORDINARY,
    SGD,
    WAYS,
    Way,
)

TINY: dict[str, Any] = {"layers": 3, "width": 16, "vocabulary": 32, "sequence": 8}


@pytest.mark.slow
def test_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(
        small=True, optimizers=(SGD, "LAMB"), ways=(ORDINARY, FUSED, FUSED_3), results=tmp_path
    )
    rows = main(options)
    assert [(row.optimizer, row.way) for row in rows] == [
        (SGD, ORDINARY), (SGD, FUSED), ("LAMB", ORDINARY), ("LAMB", FUSED), ("LAMB", FUSED_3),
    ]  # fmt: skip
    sgd, lomo, lamb, waiting, fused = rows
    assert sgd.state_bytes < 100 < 1.9 * lamb.parameter_bytes < lamb.state_bytes
    assert (sgd.required_bytes or 0) > (lomo.required_bytes or 0)
    assert waiting.why.count("layers/") == 3
    assert "3 backward passes" in waiting.why
    assert waiting.stacked_gradient_bytes
    assert (fused.why, fused.passes, fused.stacked_gradient_bytes) == ("", 3, 0)
    assert lamb.stacked_gradient_bytes is None
    assert (tmp_path / "state_memory.png").stat().st_size > 10_000
    assert "LAMB, fused, stacks after the backward pass: layers/down" in capsys.readouterr().out

    def made(*args: Any) -> None:
        raise AssertionError("this row was there")

    monkeypatch.setattr(Case, "_made", made)
    assert main(options) == rows


def row(optimizer: str, way: Way, required: float, host: float = 0.0, layers: int = 16) -> Row:
    sizes = dataclasses.replace(Options(), layers=layers).sizes
    return Row(
        "h100-80g", sizes, optimizer, way, parameter_bytes=1000, state_bytes=2000,
        required_bytes=round(1000 * required), argument_bytes=round(800 * required),
        temp_bytes=round(200 * required), host_bytes=round(1000 * host),
        capacity_bytes=3000, versions="1",
    )  # fmt: skip


def test_what_is_not_reached_is_said(tmp_path: Path) -> None:
    rows = [row(ADAM, ORDINARY, 4.17), row(ADAM, FUSED, 3.3), row(ADAM, HOST, 2.5, host=2.0)]
    refused = dataclasses.replace(rows[0], optimizer=SGD, required_bytes=None, error="too bad")
    said = answer([*rows, refused])
    assert "Adam, fused: 3.30, goal 3.34\n" in said
    assert "Adam, host state: 2.50 + 2.00, goal 2.22, not reached\n" in said
    assert "SGD, ordinary: refused: too bad" in said
    assert "|  refused |" in summary([*rows, refused])
    assert "| Adam |  2.00 |     4.17 |  3.30 | 2.50 + 2.00 |" in summary(rows)
    deep = [row(ADAMW, ALL_HOST, 10**6, 3.0), row(ADAMW, ALL_HOST, 1.2e6, 6.0, layers=32)]
    # 16 carries of 4 × 512 × 2048 numbers are 134 of the 200 MB.
    assert "twice the layers: +20.0% bytes, without the carries" in answer(deep)
    assert "of more layers +6.6%" in answer(deep)
    draw([*rows, refused], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_programs_are_those_that_differ() -> None:
    found = [
        (optimizer, way) for optimizer, way, _ in state_memory._wanted(
            Options(
                optimizers=(SGD, ADAMW, "LARS", ADAM_A), layers=2, width=1024, vocabulary=64,
            )
        )
    ]  # fmt: skip
    assert [way for optimizer, way in found if optimizer == ADAM_A] == [ORDINARY]
    assert [way for optimizer, way in found if optimizer == SGD] == [ORDINARY, FUSED, ALL_HOST]
    assert [optimizer for optimizer, way in found if way == FUSED_3] == ["LARS"]
    assert [way for optimizer, way in found if optimizer == ADAMW] == [
        *(way for way in WAYS if way != FUSED_3), ALL_HOST,
    ]  # fmt: skip


def arrays(shapes: Any) -> Any:
    rng = np.random.default_rng(0)

    def array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, 16, leaf.shape), jnp.int32)
        return jnp.asarray(rng.standard_normal(leaf.shape) / 4, leaf.dtype)

    return jax.tree.map(array, shapes)


@pytest.mark.parametrize("optimizer", [ADAM, DYNAMIC])
def test_ways_compute_the_same(optimizer: str) -> None:
    model = training(**TINY)
    params, batch = arrays(model.params), arrays(model.batch)
    results = {}
    for way in (ORDINARY, FUSED):
        job = model.job(optimizer, way)
        state = ways.OPTIMIZERS[optimizer]().init(params)
        assert jax.tree.structure(job.args[1]) == jax.tree.structure(state)
        results[way] = jax.jit(job.step)(params, state, batch)
    for one, other in zip(*map(jax.tree.leaves, results.values()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_adam_in_microbatches_goes_the_ordinary_way_alone() -> None:
    model = training(**TINY)
    params, batch = arrays(model.params), arrays(model.batch)
    job = model.job(ADAM_A, ORDINARY)
    state = jaxmem.AdamA(1e-3).init(params)
    value, *_ = job.step(params, state, batch)
    assert float(value) == pytest.approx(float(model.loss(params, batch)), rel=1e-3)
    with pytest.raises(ValueError, match="AdamA is no optax transformation"):
        model.job(ADAM_A, FUSED)


def test_host_arrays_are_declared() -> None:
    job = training(**TINY | {"width": 1024}).job(ADAM, ALL_HOST)
    params, state, _ = job.args
    assert params["layers"]["up"].sharding.memory_kind == "pinned_host"
    assert state[0].nu["layers"]["up"].sharding.memory_kind == "pinned_host"
    assert params["layers"]["norm"].sharding is None


# ---------------------------------------------------------------- full_finetune.py


@pytest.mark.slow
def test_the_smallest_form_of_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = full_finetune.main(full_finetune.Options(small=True, results=tmp_path))
    assert [(row.optimizer, row.way) for row in rows] == [
        (ADAMW, ORDINARY), (SGD, FUSED), (ADAMW, ALL_HOST),
    ]  # fmt: skip
    assert "LOMO needs" in capsys.readouterr().out
    assert (tmp_path / "full_finetune.png").stat().st_size > 10_000


def test_llama_has_its_sizes() -> None:
    job = full_finetune.llama()
    count = sum(leaf.size for leaf in jax.tree.leaves(job.args[0]))
    assert count == 8_030_261_248  # as published
    assert job.args[2].shape == (1, 2049)
    assert job.name == "8-bit AdamW, fused"


@pytest.mark.slow
def test_llama_learns() -> None:
    model = full_finetune.training(full_finetune.SMALL)
    params = jax.tree.map(lambda leaf: 0.3 * leaf, arrays(model.params))
    batch = arrays(model.batch)
    # Of what comes later nothing is seen.
    later = batch.at[:, -2:].set(3)
    early = jax.jit(jax.grad(lambda p, b: model.loss(p, b)))
    assert bool(jnp.isfinite(jax.tree.leaves(early(params, later))[0]).all())
    optimizer = optax.adam(3e-2)
    state, step = optimizer.init(params), jax.jit(ways.ordinary(model.loss, optimizer))
    losses = []
    for _ in range(8):
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 1


def test_the_smallest_accelerator_that_suffices() -> None:
    rows = [
        dataclasses.replace(
            row(ADAMW, FUSED, required), target=target,
            capacity_bytes=jaxmem.target(target).memory // 10**7,
        )
        for target, required in (("h100-80g", 3.5), ("a100-40g", 3.5), ("rtx-4090-24g", 3.5))
    ]  # fmt: skip
    assert [one.fits for one in rows] == [True, True, False]
    assert full_finetune.smallest(rows, "gpu") == "a100-40g"
    assert full_finetune.smallest(rows, "tpu") == "none"
    large = [
        dataclasses.replace(one, required_bytes=one.required_bytes and one.required_bytes * 10**7)
        for one in rows[:1]
    ]
    assert list(full_finetune._candidates(large))[:2] == ["a100-40g", "l40s-48g"]
    said = full_finetune.summary(rows, ("h100-80g", "rtx-4090-24g"))
    assert "(3.4 KiB)" in said
    assert "a100-40g" in said
