"""The training script in its smallest form: run as a person runs it where processes die.

Elsewhere it is called in this process, which shares what it has compiled with those."""

import csv
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
import train_lm
from accumulation_curves import curve
from helpers.xla_flags import FLAGS
from matplotlib import image

import jaxmem
from jaxmem import policies
from lm import comparison, data, linen_model, model
from lm.config import Config, UserError
from lm.program import Program, State, build, initial, optimizer

SCRIPT = Path(__file__).parents[2] / "experiments" / "train_lm.py"
SMALL: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 2, "sequence": 16, "batch": 4, "eval_every": 10,
}  # fmt: skip


def command(**options: Any) -> list[str]:
    words = [sys.executable, str(SCRIPT)]
    for name, value in (SMALL | options).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return words


def environment() -> dict[str, str]:
    """What makes the programs of another process those of this one, so that one cache serves."""
    return os.environ | {
        "PYTHONPATH": str(SCRIPT.parent.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}",
        "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAXMEM_CACHE_DIR"] + "/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has compiled is not compiled again, from one run of a test to the next."""
    known: dict[Any, Program] = {}
    build_quietly = comparison.build_quietly

    def built(config: Config, policy: policies.Policy) -> Program:
        if (key := (json.dumps(config.identity()), policy)) not in known:
            known[key] = build_quietly(config, policy)
        return known[key]

    monkeypatch.setattr(comparison, "build_quietly", built)


def run(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """What the script says, called in this process."""
    capsys.readouterr()
    train_lm.main(Config(**SMALL | options))
    return capsys.readouterr().out


def metrics(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def stop(workdir: Path, rows: int, number: int, **options: Any) -> int:
    """Send a signal once the metrics have so many rows, and give the exit status."""
    with subprocess.Popen(
        command(**options, workdir=workdir), env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        path, limit = workdir / "metrics.jsonl", time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < rows:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < limit
            time.sleep(0.005)
        process.send_signal(number)
        _, said = process.communicate()
        if number != signal.SIGKILL:
            assert "the same command resumes the run" in said
            assert "Traceback" not in said
        return process.returncode


@pytest.mark.slow
def test_compares_all_policies_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    options = {"steps": 6, "compare_steps": 3}
    said = run(capsys, **options, workdir=workdir)
    assert "unigram entropy 3.2" in said

    with (workdir / "table.csv").open() as file:
        table = {row["policy"]: row for row in csv.DictReader(file)}
    assert list(table) == [
        "none", "full", "dots", "sqrt", "sqrt levels=2", "revolve", "offload",
    ]  # fmt: skip
    # Forwards of equal parameters are bitwise equal; the gradient of a recomputing backward
    # pass may differ in the last bits, as XLA compiles it on its own (jax.checkpoint does too),
    # which an update carries into the next loss: 1e-6 of it at most.
    assert float(table["none"]["loss_difference"]) == 0
    bound = 1e-6 * metrics(workdir)[0]["loss"]
    assert all(float(row["loss_difference"]) <= bound for row in table.values())
    assert all(float(row["step_seconds"]) > 0 for row in table.values())
    assert float(table["none"]["step_time_ratio"]) == 1
    assert int(table["none"]["extra_forwards"]) == 0
    assert int(table["full"]["extra_forwards"]) == 2
    assert int(table["none"]["temporary_bytes"]) >= int(table["sqrt"]["temporary_bytes"]) > 0

    assert [row["step"] for row in metrics(workdir)] == [1, 2, 3, 4, 5, 6]
    assert metrics(workdir)[-1].keys() == {"step", "loss", "held_out_loss"}
    assert json.loads((workdir / "config.json").read_text())["layers"] == 2
    assert image.imread(workdir / "train_lm.png").shape[2] >= 3
    assert not [path for path in workdir.iterdir() if path.name.startswith(".")]

    dry = tmp_path / "dry"
    said = run(capsys, steps=6, dry_run=True, workdir=dry)
    assert "parameters" in said
    assert "Plan of 2 layers: carries kept, 2 extra forward evaluations" in said
    assert "| revolve " in said
    assert "step time" not in said
    assert not dry.exists()

    before = (workdir / "table.csv").read_bytes()
    said = run(capsys, **options, workdir=workdir)
    assert "is from an earlier run" in said
    assert (workdir / "table.csv").read_bytes() == before


ACROSS = {"ragged": True, "accum": 2, "accum_form": "across"}
BITS = {"state": "8bit", "fused": True, "width": 32}  # whose stacks have 4096 numbers and more
KILL, INTERRUPT = signal.SIGKILL, signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "more", "signals"),
    [
        pytest.param("linen", {}, [INTERRUPT], id="linen"),
        pytest.param(
            "linen", BITS, [KILL], id="8 bits, in the backward pass", marks=pytest.mark.slow
        ),
        pytest.param("nnx", ACROSS, [KILL], id="nnx, across", marks=pytest.mark.slow),
        pytest.param("linen", {}, [KILL, INTERRUPT], id="both", marks=pytest.mark.slow),
    ],
)
def test_killed_and_interrupted_it_gives_the_numbers_of_an_unbroken_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    framework: str,
    more: dict[str, Any],
    signals: list[signal.Signals],
) -> None:
    options = more | {
        "framework": framework, "steps": 100, "checkpoint_every": 20, "compare": False,
    }  # fmt: skip
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    run(capsys, **options, workdir=unbroken)

    if KILL in signals:
        # One row more than the first checkpoint: it is written.
        assert stop(broken, 21, KILL, **options) == -KILL
        assert 21 <= len(metrics(broken)) < 90
    if INTERRUPT in signals:
        assert stop(broken, 30, INTERRUPT, **options) == 128 + INTERRUPT
        assert 30 <= len(metrics(broken)) < 100
    assert "resuming after step" in run(capsys, **options, workdir=broken)

    assert metrics(broken) == metrics(unbroken)
    first, last = metrics(unbroken)[0], metrics(unbroken)[-1]
    assert last["loss"] < first["loss"] - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"optimizer": "adalomo", "fused": True}, id="adalomo"),
        pytest.param({"state": "8bit-host", "fused": True}, id="8 bits on the host"),
        pytest.param({"state": "disk", "fused": True}, id="on disk"),
        pytest.param(
            {"state": "8bit-disk", "accum": 2, "accum_form": "across"}, id="8 bits on disk"
        ),
    ],
)
def test_a_run_that_died_gives_the_numbers_of_an_unbroken_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
) -> None:
    options = more | {"width": 32, "steps": 10, "checkpoint_every": 4, "compare": False}
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    run(capsys, **options, workdir=unbroken)
    alive = Program.run

    def dies(self: Program, state: State, step: int) -> tuple[State, float]:
        if step == 7:
            raise KeyboardInterrupt
        return alive(self, state, step)

    monkeypatch.setattr(Program, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        run(capsys, **options, workdir=broken)
    monkeypatch.setattr(Program, "run", alive)
    assert "resuming after step 4" in run(capsys, **options, workdir=broken)
    assert metrics(broken) == metrics(unbroken)


def test_gradients_are_those_of_a_checkpoint_written_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(layers=2, width=16, heads=2, sequence=16, batch=4)
    state = initial(config)
    tokens = data.batch(1, seed=0, size=config.batch, sequence=config.sequence)
    key = jax.random.key(3)

    def gradient(policy: policies.Policy) -> Any:
        loss = functools.partial(model.loss, config, policy)
        return jax.jit(jax.value_and_grad(loss))(state.params, tokens, key)

    ours = gradient(policies.full())
    by_hand = nn.remat(linen_model.Block, prevent_cse=False, static_argnums=(2,))
    monkeypatch.setattr(linen_model, "Block", by_hand)
    monkeypatch.setattr(jaxmem, "remat", lambda target, policy: target)
    for one, other in zip(
        jax.tree.leaves(ours), jax.tree.leaves(gradient(policies.none())), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    theirs = Config(steps=9, workdir=tmp_path).identity()
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    done = subprocess.run(
        command(steps=8, workdir=tmp_path),
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "layers is 24 there and 2 here" in done.stderr
    assert "steps is 9 there and 8 here" in done.stderr
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": -3}, "--steps must be at least 1, got -3"),
        ({"layers": 0}, "--layers must be at least 1, got 0"),
        ({"width": 60, "heads": 4}, "--width must be a multiple of twice --heads (8"),
        ({"batch": 8, "accum": 9}, "--accum must be at most --batch (8), so that every"),
        (
            {"batch": 8, "accum": 3, "accum_form": "across"},
            "--accum must divide --batch (8) with --accum-form across, which",
        ),
        ({"dropout": 1.0}, "--dropout must be at least 0 and below 1, got 1.0"),
        ({"learning_rate": float("nan")}, "--learning-rate must be positive, got nan"),
        ({"clip": 0.0}, "--clip must be positive, got 0.0"),
        (
            {"fused": True, "accum": 2, "accum_form": "across"},
            "--fused goes with --accum-form inside",
        ),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"policy": "full", "levels": 2}, "--levels goes with --policy sqrt, not with"),
        ({"slots": 4}, "--slots goes with --policy revolve, not with --policy sqrt"),
        ({"policy": "revolve", "slots": 0}, "--slots must be at least 1, got 0"),
        ({"sequence": 100_000}, "--sequence must be at most 4096"),
        ({"compare_steps": 1}, "--compare-steps must be at least 2, as"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Config(**options).check()  # pyright: ignore[reportArgumentType]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_is_a_function_of_step_and_seed_and_stays_off_the_held_out_text() -> None:
    one = data.batch(3, seed=1, size=4, sequence=16)
    assert one.shape == (4, 17)
    np.testing.assert_array_equal(one, data.batch(3, seed=1, size=4, sequence=16))
    assert (one != data.batch(4, seed=1, size=4, sequence=16)).any()
    assert (one != data.batch(3, seed=2, size=4, sequence=16)).any()
    train, held_out = (part.tobytes() for part in data.split())
    assert all(row.astype(np.uint8).tobytes() in train for row in one)
    # Topics repeat one another: what is held out must be new, not only elsewhere.
    paragraphs = {part.strip() for part in held_out.split(b"\n\n")}
    assert len(paragraphs) > 20
    assert not paragraphs & {part.strip() for part in train.split(b"\n\n")}
    assert data.unigram_entropy(data.split()[1]) > 3.1


def test_pieces_of_paragraphs_are_padded_and_cover_the_text_once() -> None:
    assert bytes([data.PADDING]) not in data.text()
    one = data.ragged_batch(3, seed=1, size=64, sequence=16)
    assert one.shape == (64, 17)
    np.testing.assert_array_equal(one, data.ragged_batch(3, seed=1, size=64, sequence=16))
    assert (one != data.ragged_batch(4, seed=1, size=64, sequence=16)).any()
    train = data.split()[0].tobytes()
    lengths = set()
    for row in one.astype(np.uint8):
        piece = row.tobytes().rstrip(bytes([data.PADDING]))
        assert data.PADDING not in piece
        assert piece in train
        lengths.add(len(piece))
    assert min(lengths) >= 2  # there is something to guess in every one
    assert len(lengths) > 3

    for sequence in (1, 16, 500):
        pieces = data._pieces(sequence)
        guesses = (pieces[:, 1:] != data.PADDING).sum()
        paragraphs = [part for part in train.split(b"\n\n") if part]
        assert guesses == sum(len(part) - 1 for part in paragraphs)


# ---------------------------------------------------------------- accumulation

RAGGED = Config(
    layers=2, width=16, heads=2, sequence=48, batch=8, ragged=True, dropout=0.0, steps=50
)


@pytest.mark.slow  # test_accumulation.py has the curves of a smaller model
def test_the_loss_curve_is_the_same_whatever_the_microbatches() -> None:
    """8 rows in microbatches of 3, 3 and 2 inside a step, and of 2 across steps."""
    whole = curve(RAGGED.learning_rate, "", RAGGED).losses
    assert whole[-1] < whole[0] - 1.5
    mean, mean_of_means = means_of_the_first_batch()
    assert abs(mean - mean_of_means) > 1e-5
    for accum, form in ((3, "inside"), (4, "across")):
        config = dataclasses.replace(RAGGED, accum=accum, accum_form=form)
        found = curve(config.learning_rate, "", config).losses
        np.testing.assert_allclose(found, whole, rtol=1e-5, err_msg=f"{accum} {form}")
        assert found[0] == pytest.approx(mean, rel=1e-6)


def means_of_the_first_batch() -> tuple[float, float]:
    """The loss of its tokens, and the mean of the losses of its rows, which is another number."""
    params = initial(RAGGED).params
    tokens = data.ragged_batch(1, seed=0, size=8, sequence=RAGGED.sequence)
    loss = functools.partial(model.ragged_loss, RAGGED, policies.none())
    one = jax.jit(lambda params, row: loss(params, row[None], None).terms[0])
    totals, weights = np.array([one(params, row) for row in tokens], np.float64).T
    return totals.sum() / weights.sum(), (totals / weights).mean()


@pytest.mark.slow
def test_without_accumulation_the_step_is_the_plain_one_bit_for_bit() -> None:
    config = Config(layers=2, width=16, heads=2, sequence=16, batch=4, steps=4)
    loss = functools.partial(model.loss, config, config.remat)

    @jax.jit
    def plain(state: State, tokens: jax.Array, key: jax.Array) -> tuple[State, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(state.params, tokens, key)
        change, inner = optimizer(config).update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, change), inner), value

    program, state, other = build(config, config.remat), initial(config), initial(config)
    root = jax.random.fold_in(jax.random.key(config.seed), 1)
    for step in range(1, 5):
        state, found = program.run(state, step)
        tokens = data.batch(step, seed=0, size=4, sequence=16)
        key = jax.random.fold_in(jax.random.fold_in(root, step), 0)
        other, wanted = plain(other, tokens, key)
        assert found == float(wanted)
    for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(one, two)


# ---------------------------------------------------------------- optimizers and their state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "close"),
    [
        pytest.param({"fused": True}, 1e-5, id="fused"),
        pytest.param({"state": "8bit-companding"}, 0.02, id="8 bits"),
        pytest.param({"state": "host", "clip": None}, 1e-6, id="host"),
        pytest.param(
            {"state": "8bit-host", "fused": True, "accum": 2}, 0.02,
            id="8 bits on the host, fused, in microbatches", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_state_is_stored_as_asked_and_the_losses_are_close(
    options: dict[str, Any], close: float
) -> None:
    plain = Config(
        layers=2, width=32, heads=2, sequence=16, batch=4, steps=4, accum=options.get("accum", 1),
        clip=options.get("clip", 1.0),
    )  # fmt: skip
    found = []
    for config in (plain, dataclasses.replace(plain, **options)):
        program, state = comparison.build_quietly(config, config.remat), initial(config)
        losses = []
        for step in range(1, 5):
            state, loss = program.run(state, step)
            losses.append(loss)
        found.append(losses)
        leaves = jax.tree.leaves(state.optimizer)
        assert any(leaf.dtype == np.int8 for leaf in leaves) == config.state.startswith("8bit")
        kinds = {leaf.sharding.memory_kind for leaf in leaves}
        assert ("pinned_host" in kinds) == config.state.endswith("host")
    np.testing.assert_allclose(*found, rtol=close)


@pytest.mark.parametrize("name", ["adam", "sgd", "momentum", "lion", "adafactor", "adalomo"])
def test_optimizers_by_name(name: str) -> None:
    config = Config(optimizer=name, layers=2, width=16, heads=2, steps=2)  # pyright: ignore[reportArgumentType]
    params = initial(Config(layers=2, width=16, heads=2)).params
    state = optimizer(config).init(params)
    updates, _ = optimizer(config).update(params, state, params)
    for update, leaf in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        # Against the gradient, which is the parameter itself here.
        assert update.shape == leaf.shape
        assert float((update * leaf).sum()) <= 0


def test_unigram_entropy_is_that_of_the_text() -> None:
    assert 3.2 < data.unigram_entropy() < 3.35
