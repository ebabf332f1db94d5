"""The 100-layer CNN for MNIST: how little memory does a step need, and what does that cost?

    python experiments/mnist_cnn.py                    # by the compiler for a GPU, then digits
    python experiments/mnist_cnn.py --data ~/mnist     # train on MNIST's own files instead
    python experiments/mnist_cnn.py --small            # see that it runs

One convolution 1 → 320, a hundred 320 → 320 with relu and pooling (3×3, padding 2: a 2×2 image
stays one), two linear maps.  Published is the memory of 1 to 32 equal segments under PyTorch's
`checkpoint_sequential`; `mnist/published.py` has the figures and why most of that net was not
trained.  Here the very same segments are cut by hand with `jax.checkpoint`, then come the
size-aware cut of `@jaxmem.remat_sqrt` and `jaxmem.fit` at budgets between the least that any
plan needs and everything kept, both on the Python loop over layers as it stands.  A program is
a train step with plain gradient descent, in which all layers are trained, compiled for a target
that need not be there.  The published figures agree with 19 to 50 images in a batch; 32 are taken.

Parameters are moved inside the backward pass (see `mnist.net`).  Two rows show what is to be
had where they are moved after it.

Then a shallower net of the same kind is trained on handwritten digits under each policy, on the
attached backend, and its accuracy on digits held out is compared.  (All hundred layers, plain as
they are, do not learn: --train-depth 100 --policies none shows it.)

It prints tables and writes `results/mnist_cnn.csv` and `.png` and `results/mnist_cnn_training.csv`.
The same command resumes after an interruption.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from tqdm import tqdm

import jaxmem
from common.table import Table, versions
from mnist import digits, net, picture, published, training
from mnist.table import Need, Trained, accuracies, answer, needs
from mnist.training import Recipe

RESULTS = Path(__file__).parent / "results"
Policy = Literal["none", "segments", "sqrt", "fit"]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Reproduce the published memory of a 100-layer CNN, do better, and train one."""

    target: str = "h100-80g"
    """What to compile for; "local" is the attached backend."""
    depth: int = published.DEPTH
    """Convolutions after the first."""
    width: int = published.WIDTH
    """Their channels."""
    batch: int = 32
    """Images."""
    segments: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Equal ones, cut by hand."""
    shares: tuple[int, ...] = (0, 40, 80)
    """Budgets of fit: from the least that any plan needs to everything kept, in percent."""
    data: Path | None = None
    """Folder of MNIST's files, gzipped or not; without it scikit-learn's digits."""
    policies: tuple[Policy, ...] = ("none", "segments", "sqrt", "fit")
    """To train under."""
    train_depth: int = 6
    """Of the net that is trained."""
    train_width: int = 16
    """Its channels."""
    train_batch: int = 32
    """Digits in a batch."""
    epochs: int = 6
    """Of training."""
    rate: float = 0.02
    """Of gradient descent."""
    seed: int = 0
    """Of the parameters and of the order of the digits."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where tables and picture are written."""
    small: bool = False
    """Only see that it runs: little nets, on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, target="local", depth=5, width=4, batch=2, segments=(2,), shares=(),
            policies=("none", "sqrt", "fit"), train_depth=5, train_width=4, epochs=1,
        )  # fmt: skip

    @property
    def program(self) -> str:
        """The sizes as a text, for the table."""
        return f"depth={self.depth} width={self.width} batch={self.batch}"

    @property
    def is_published(self) -> bool:
        """Whether it is the net that the published figures are of."""
        return (self.depth, self.width) == (published.DEPTH, published.WIDTH)


# ---------------------------------------------------------------- API


def main(options: Options) -> tuple[list[Need], list[Trained]]:
    """All rows of both tables, written as they come, printed and drawn."""
    options = options.sized()
    rows = _needs(options)
    low, high = published.images()
    print(f"\n{options.target}, {options.program} (published figures: {low:.0f} to {high:.0f})\n")
    print(needs(rows, options.is_published))
    file = options.results / "mnist_cnn.png"
    picture.draw(rows, file)
    trained = _trained(options)
    print(f"\n{accuracies(trained)}\n\n{answer(rows, trained)}\nwritten: {file} and its tables")
    return rows, trained


# ---------------------------------------------------------------- memory


def _needs(options: Options, updates: Sequence[str] = ("after", "inside")) -> list[Need]:
    made_by = versions(options.target)
    path = options.results / "mnist_cnn.csv"
    table = Table(path, Need, ("target", "program", "update", "kind", "number"))
    wanted = [] if options.small else [("after", "none", 0), ("after", "sqrt", 0)]
    wanted += [("inside", "none", 0)]
    wanted += [("inside", "segments", number) for number in options.segments]
    wanted += [("inside", "sqrt", 0)] + [("inside", "fit", share) for share in options.shares]
    wanted = [one for one in wanted if one[0] in updates]
    rows = []
    with tqdm(wanted, unit="program", disable=None) as bar:
        for update, kind, number in bar:
            bar.set_postfix_str(f"{kind} {number or ''}")
            key = {"update": update, "kind": kind, "number": number}
            row = table.find(made_by, target=options.target, program=options.program, **key)
            if row is None:
                report, more = _compiled(update, kind, number, options)
                row = Need(
                    options.target,
                    options.program,
                    **key,
                    required_bytes=report.required_bytes,
                    argument_bytes=report.argument_bytes,
                    temp_bytes=report.temp_bytes,
                    matmul_flops=report.matmul_flops or 0,
                    **more,
                    versions=made_by,
                )
                table.add(row)
            rows.append(row)
    return rows


def _compiled(update: Any, kind: str, number: int, options: Options) -> tuple[Any, dict[str, Any]]:
    """The report of a program, and what there is to say of fit's."""
    args = net.parameters(options.depth, options.width), *net.batch(options.batch)
    if kind == "fit":
        fitted = _fitted(net.step(update=update, decorate=jaxmem.remat_auto), args, number, options)
        return fitted.report, {"budget_bytes": fitted.budget, "compiles": fitted.compiles}
    step = net.step(update=update, **_options(kind, number))
    report = jaxmem.memory_report(
        step, *args, target=options.target, donate_argnums=0, timeout=options.timeout, suggest=False
    )
    return report, {"budget_bytes": None, "compiles": None}


def _options(kind: str, number: int) -> dict[str, Any]:
    """Of `mnist.net.step`."""
    return {
        "none": {},
        "segments": {"segments": number},
        "sqrt": {"decorate": jaxmem.remat_sqrt},
    }[kind]


def _fitted(step: Any, args: Any, share: int, options: Options, **more: Any) -> jaxmem.Fitted:
    """Of a budget so far from the least that is reached to everything kept, in percent."""
    ask = functools.partial(
        jaxmem.fit, step, *args, target=options.target, timeout=options.timeout, progress=False,
        **{"donate_argnums": 0} | more,
    )  # fmt: skip
    try:
        return ask(budget="1KiB")
    except jaxmem.BudgetError as error:
        least = error.least_bytes
    if share == 0:
        return ask(budget=least)
    most = ask(budget="1TiB").report.required_bytes
    return ask(budget=round(least + (most - least) * share / 100))


# ---------------------------------------------------------------- training


def _trained(options: Options) -> list[Trained]:
    made_by = versions("local", "scikit-learn")
    path = options.results / "mnist_cnn_training.csv"
    table = Table(path, Trained, ("data", "program", "policy"))
    recipe = Recipe(
        options.train_depth, options.train_width, options.train_batch, options.epochs,
        options.rate, options.seed,
    )  # fmt: skip
    found = digits.load(options.data)
    if options.small:
        found = found.first(192)

    @functools.cache
    def outcome(policy: Policy) -> training.Outcome:
        return training.train(recipe, found, _step(policy, recipe, options))

    with tqdm(options.policies, unit="policy", disable=None) as bar:
        for policy in bar:
            bar.set_postfix_str(policy)
            key = {"data": found.source, "program": str(recipe), "policy": policy}
            if table.find(made_by, **key) is None:
                mine, plain = outcome(policy), outcome("none")
                table.add(
                    Trained(
                        **key,
                        first_loss=float(mine.losses[0]),
                        loss=mine.last_epoch,
                        accuracy=mine.accuracy,
                        loss_off=float(np.abs(mine.losses - plain.losses).max()),
                        seconds=round(mine.seconds, 1),
                        versions=made_by,
                    )
                )
    return table.of(made_by, data=found.source)


def _step(policy: Policy, recipe: Recipe, options: Options) -> Callable[..., Any]:
    """The step under a policy; that of fit as it was planned for the target."""
    if policy != "fit":
        return jax.jit(net.step(recipe.rate, **_options(policy, 4)))
    args = net.parameters(recipe.depth, recipe.width), *net.batch(recipe.batch)
    step = net.step(recipe.rate, decorate=jaxmem.remat_auto)
    return _fitted(step, args, 0, options, donate_argnums=()).step


if __name__ == "__main__":
    main(tyro.cli(Options))
