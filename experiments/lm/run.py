"""One run: train, compare the policies, write; with what a person reads on the way."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
from tqdm import tqdm

from lm import comparison, data, files
from lm.config import Config
from lm.program import Program, initial
from lm.stopping import Listener
from lm.training import METRICS, claim, train

TABLE, PICTURE = "table.csv", "train_lm.png"


def run(
    config: Config, listener: Listener, saved: Callable[[int], None] = lambda step: None
) -> None:
    """Train, compare, write.

    Args:
      saved: is told of each checkpoint.

    Raises:
      UserError: the workdir is another run's.
      Stopped: a signal came.
    """
    folder = config.folder()
    claim(config, folder)
    _introduce(config)
    print(f"compiling the train step under {config.label} …", flush=True)
    program = comparison.build_quietly(config, config.remat)
    _show_plans(program)
    listener.check()
    metrics = train(program, folder, listener, saved)
    entropy = data.unigram_entropy()
    print(
        f"loss {metrics[-1]['held_out_loss']:.3f} nats per byte on held-out text after "
        f"{config.steps} steps; unigram entropy {entropy:.3f}, of the held-out text alone "
        f"{data.unigram_entropy(data.split()[1]):.3f}"
    )
    if jax.process_index() != 0:
        return
    from lm import picture  # and matplotlib, for which the other processes need not wait

    rows = []
    if config.compare and config.layout is None:
        rows = _compared(config, program, folder, listener)
    elif config.compare:
        print("the policies are compared on one device, without --mesh")
    files.write(folder / PICTURE, picture.draw(config, rows, metrics, entropy))
    written = [METRICS, *([TABLE] if rows else []), PICTURE]
    print(f"written to {folder}: config.json, {', '.join(written)}")


def _compared(
    config: Config, program: Program, folder: Path, listener: Listener
) -> list[comparison.Row]:
    path = folder / TABLE
    if path.exists():
        rows = comparison.from_csv(path.read_text())
        print(f"\n{path} is from an earlier run; remove it to measure again")
    else:
        compiled = {config.label: program}
        if config.state.endswith("disk"):  # one folder cannot hold the states of several
            bits = "8bit" if config.state == "8bit-disk" else "float32"
            config, compiled = dataclasses.replace(config, state=bits), {}
            print(f"\nthe policies are compared with the optimizer's state in memory ({bits})")
        found = comparison.programs(
            config, compiled, listener, lambda labels: tqdm(labels, "compiling")
        )
        rows = comparison.race(
            config, found, listener, lambda rounds: tqdm(rounds, "comparing", unit="round")
        )
        files.write(path, comparison.to_csv(rows))
    print(f"\n{comparison.to_text(rows)}\n")
    if note := comparison.note():
        print(note)
    return rows


def dry_run(config: Config, listener: Listener) -> None:
    """What would be trained, and what the compiler says of it under every policy."""
    _introduce(config)
    for name, value in config.identity().items():
        print(f"  {name}: {value}")
    print(f"  workdir: {config.folder()}")
    found = comparison.programs(config, {}, listener, lambda labels: tqdm(labels, "compiling"))
    for label, program in found.items():
        print(f"\n{label}")
        _show_plans(program)
    print(f"\n{comparison.to_text(comparison.sizes(found))}\n")
    if note := comparison.note():
        print(note)


def _introduce(config: Config) -> None:
    state = jax.eval_shape(lambda: initial(config))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(
        f"text: pydoc_data.topics, {len(data.text()):,} bytes, unigram entropy "
        f"{data.unigram_entropy():.3f} nats per byte\n"
        f"model: {config.framework}, {config.layers} layers of width {config.width}, "
        f"{count:,} parameters"
    )


def _show_plans(program: Program) -> None:
    for plan in program.plans:
        print(plan)
