"""The training loop; a resumed run gives the numbers of an uninterrupted one."""

import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from tqdm import tqdm

import jaxmem
from lm import files, optimizers
from lm.config import Config, UserError
from lm.mesh import Layout
from lm.processes import of_another
from lm.program import Program, State, held_out_loss, initial, shapes
from lm.stopping import Listener, Stopped

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


def claim(config: Config, folder: Path) -> None:
    """Claim `folder` for this run, or check that it already belongs to it.

    Of several processes the first claims it, and the others check.

    Raises:
      UserError: it holds another run, or something else.
    """
    if jax.process_index() == 0:
        _claim(config, folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the folder is claimed")
    if jax.process_index() != 0:
        _claim(config, folder)


def _claim(config: Config, folder: Path) -> None:
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


def train(
    program: Program,
    folder: Path,
    listener: Listener,
    saved: Callable[[int], None] = lambda step: None,
) -> list[dict[str, Any]]:
    """Train to the last step, from the last checkpoint if there is one.

    Args:
      saved: is told the step of each checkpoint that is whole, 0 if there is none yet.

    Returns:
      The rows of the metrics file, from step 1 on.

    Raises:
      Stopped: a signal came; a checkpoint has been written.
      UserError: the metrics of a step before the checkpoint are gone, or one cannot be written.
    """
    config = program.config
    first = jax.process_index() == 0  # of several processes one writes the metrics
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    handler = ocp.StandardCheckpointHandler()  # without it, shapes of a checkpoint are not told
    with ocp.CheckpointManager(
        (folder / CHECKPOINTS).absolute(), options=options, item_handlers=handler
    ) as checkpoints:
        done, state = _restored(config, checkpoints)
        rows = _rows_until(done, folder / METRICS)
        if done == config.steps:
            return rows
        if done:
            print(f"resuming after step {done}, from its checkpoint")
        saved(done)
        if first:
            with _writing("the metrics"):
                files.write(folder / METRICS, "".join(map(_line, rows)))
        evaluate = held_out_loss(config)
        with _bar(config, done) as bar:
            for step in range(done + 1, config.steps + 1):
                state, loss = program.run(state, step)
                row: dict[str, Any] = {"step": step, "loss": loss}
                if step % config.eval_every == 0 or step == config.steps:
                    row["held_out_loss"] = evaluate(state.params)
                rows.append(row)
                if first:
                    _append(folder / METRICS, row)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                heard = listener.ask()
                last = step == config.steps or heard is not None
                if last or step % config.checkpoint_every == 0:
                    optimizers.hold(state)
                    with _writing(f"the checkpoint of step {step}"):
                        # Each process writes its part; one that is not whole is not restored.
                        checkpoints.save(step, args=ocp.args.StandardSave(state))
                    saved(step)
                if heard is not None:
                    raise Stopped(heard)
    return rows


# ---------------------------------------------------------------- implementation


def _restored(config: Config, checkpoints: ocp.CheckpointManager) -> tuple[int, State]:
    done = checkpoints.latest_step()
    if done is None:
        return 0, initial(config)
    layout = config.layout
    before = None  # of how many other devices a checkpoint is, where that matters
    if config.sends_signs and layout is not None:
        before = _other_devices(checkpoints, done, layout.mesh.shape["data"])
    state = shapes(config, before)
    if layout is not None:
        places = layout.of(state, None if before is None else layout.replicated)
    else:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda leaf: leaf.sharding or device, state)
    like = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        places,
    )
    state = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
    assert isinstance(state, State)
    if layout is not None and before is not None:
        return done, _dealt_anew(config, layout, state, before)
    return done, state


def _other_devices(checkpoints: ocp.CheckpointManager, step: int, devices: int) -> int | None:
    """Of how many devices the errors in a checkpoint are, if not of so many."""
    saved = checkpoints.item_metadata(step)
    for path, leaf in jax.tree_util.tree_leaves_with_path(saved):
        if "worker_error" in jax.tree_util.keystr(path):
            return leaf.shape[0] if leaf.shape[0] != devices else None
    return None


def _dealt_anew(config: Config, layout: Layout, state: State, before: int) -> State:
    after = layout.mesh.shape["data"]
    print(
        f"what the signs of {before} devices were wrong by is dealt to {after}: each sends the "
        "mean of it, so that all is made good, and the run goes on with other numbers"
    )
    places = layout.of(shapes(config))
    deal = functools.partial(jaxmem.redistribute_errors, devices=after)
    return jax.jit(deal, out_shardings=places)(state)


@contextlib.contextmanager
def _writing(what: str) -> Iterator[None]:
    """What is raised by a disk that is full, as an error for the person at the shell."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if of_another(error):
            raise
        raise UserError(
            f"{what} cannot be written: {_reason(error)}; make room where --workdir is, and the "
            "same command goes on from the last checkpoint"
        ) from error


def _reason(error: BaseException) -> str:
    """What the operating system said, where that can be found; tensorstore has it in its text."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    return text.strip().split("\n")[0][:200] or type(error).__name__


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


def _append(path: Path, row: dict[str, Any]) -> None:
    # Opened for each row, as a file that is closed after a failed write fails once more.
    with _writing(f"the metrics of step {row['step']}"), path.open("a") as metrics:
        metrics.write(_line(row))


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _bar(config: Config, done: int) -> tqdm:
    # A log that is not a terminal gets a line now and then, not a redrawn one.
    pause = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=config.steps, initial=done, desc="training", unit="step", mininterval=pause,
        disable=jax.process_index() != 0,
    )  # fmt: skip
