"""The training loop; a resumed run gives the numbers of an uninterrupted one."""

import json
import sys
from pathlib import Path
from typing import Any, TextIO

import jax
import orbax.checkpoint as ocp
from tqdm import tqdm

from lm import files, optimizers
from lm.config import Config, UserError
from lm.program import Program, State, held_out_loss, initial, shapes
from lm.stopping import Listener

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


def claim(config: Config, folder: Path) -> None:
    """Claim `folder` for this run, or check that it already belongs to it.

    Raises:
      UserError: it holds another run, or something else.
    """
    here = json.loads(json.dumps(config.identity()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = json.loads((folder / CONFIG).read_text())
    except FileNotFoundError:
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(
                f"{folder} is not empty and holds no {CONFIG}; pass a --workdir that is new"
            ) from None
        files.write(folder / CONFIG, json.dumps(here, indent=2) + "\n")
        return
    except (OSError, ValueError) as error:
        raise UserError(f"cannot use {folder} as --workdir: {error}") from None
    if not isinstance(there, dict):
        raise UserError(f"cannot use {folder} as --workdir: its {CONFIG} is not an object")
    different = [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if different:
        raise UserError(
            f"{folder} holds a run of another configuration: {'; '.join(different)}; pass the same "
            "options to resume that run, or another --workdir"
        )


def train(program: Program, folder: Path, listener: Listener) -> list[dict[str, Any]]:
    """Train to the last step, from the last checkpoint if there is one.

    Returns:
      The rows of the metrics file, from step 1 on.

    Raises:
      Stopped: a signal came; a checkpoint has been written.
      UserError: the metrics of a step before the checkpoint are gone.
    """
    config = program.config
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager((folder / CHECKPOINTS).absolute(), options=options) as checkpoints:
        done, state = _restored(config, checkpoints)
        rows = _rows_until(done, folder / METRICS)
        if done == config.steps:
            return rows
        if done:
            print(f"resuming after step {done}, from its checkpoint")
        files.write(folder / METRICS, "".join(map(_line, rows)))
        evaluate = held_out_loss(config)
        with (folder / METRICS).open("a") as metrics, _bar(config, done) as bar:
            for step in range(done + 1, config.steps + 1):
                state, loss = program.run(state, step)
                row: dict[str, Any] = {"step": step, "loss": loss}
                if step % config.eval_every == 0 or step == config.steps:
                    row["held_out_loss"] = evaluate(state.params)
                rows.append(row)
                _append(metrics, row)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                last = step == config.steps or listener.heard is not None
                if last or step % config.checkpoint_every == 0:
                    optimizers.hold(state)
                    checkpoints.save(step, args=ocp.args.StandardSave(state))
                listener.check()
    return rows


# ---------------------------------------------------------------- implementation


def _restored(config: Config, checkpoints: ocp.CheckpointManager) -> tuple[int, State]:
    done = checkpoints.latest_step()
    if done is None:
        return 0, initial(config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device),
        shapes(config),
    )
    state = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
    assert isinstance(state, State)
    return done, state


def _rows_until(step: int, path: Path) -> list[dict[str, Any]]:
    """The rows of the first `step` steps; what was written after the checkpoint is done again."""
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        rows = [json.loads(line) for line in lines[:step]]
        steps = [row["step"] for row in rows]
    except (ValueError, KeyError, TypeError):
        rows, steps = [], None
    if steps != list(range(1, step + 1)):
        raise UserError(
            f"{path} lacks some of the {step} steps before the last checkpoint; it was changed or "
            "removed, so pass a new --workdir"
        )
    return rows


def _append(metrics: TextIO, row: dict[str, Any]) -> None:
    metrics.write(_line(row))
    metrics.flush()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _bar(config: Config, done: int) -> tqdm:
    # A log that is not a terminal gets a line now and then, not a redrawn one.
    pause = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=config.steps, initial=done, desc="training", unit="step", mininterval=pause)
