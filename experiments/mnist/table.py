"""The rows of the hundred convolutions, and what they say."""

import dataclasses
from collections.abc import Sequence

from common.table import Record, markdown
from mnist import published

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Need(Record):
    """What a step needs, compiled.

    Attributes:
      target, program: what it is compiled for, and its sizes.
      update: when parameters are moved; see `mnist.net.step`.
      kind: "none", "segments" cut by hand, "sqrt" or "fit".
      number: of segments; of fit, how far the budget is from the least that any plan needs to
        everything kept, in percent; else 0.
      budget_bytes, compiles: of fit.
      required_bytes, argument_bytes, temp_bytes: of the compiled program.
      matmul_flops: of its matrix products and convolutions.
    """

    target: str
    program: str
    update: str
    kind: str
    number: int
    budget_bytes: int | None
    required_bytes: int
    argument_bytes: int
    temp_bytes: int
    matmul_flops: int
    compiles: int | None

    @property
    def megabytes(self) -> float:
        """Required, in the unit of the published figures."""
        return self.required_bytes / 1e6

    @property
    def name(self) -> str:
        """As a reader knows it."""
        words = {
            "none": "everything kept",
            "segments": f"{self.number} segment{'s' * (self.number != 1)} by hand",
            "sqrt": "@jaxmem.remat_sqrt",
            "fit": f"jaxmem.fit in {(self.budget_bytes or 0) / 1e6:.0f} MB",
        }[self.kind]
        return words + ", update after" * (self.update == "after")


@dataclasses.dataclass(frozen=True)
class Trained(Record):
    """What came of training a net of this kind under a policy, on the attached backend.

    Attributes:
      data: which digits.
      program: the net's sizes and how it was trained.
      policy: "none", "segments", "sqrt" or "fit".
      loss: mean of the last epoch; `first_loss` of the first step.
      accuracy: the share of the held-out digits that are recognised.
      loss_off: the largest difference of a step's loss from that under "none"; 0 if they are
        equal bit for bit.
      seconds: with compiling.
    """

    data: str
    program: str
    policy: str
    first_loss: float
    loss: float
    accuracy: float
    loss_off: float
    seconds: float


# ---------------------------------------------------------------- API


def extra(row: Need, rows: Sequence[Need]) -> float:
    """Recomputed matmul FLOPs, as a share of the step's with everything kept."""
    plain = next(r for r in rows if r.kind == "none" and r.update == row.update)
    return row.matmul_flops / plain.matmul_flops - 1


def needs(rows: Sequence[Need], like_published: bool) -> str:
    """The rows as a Markdown table, with the published figures if they are of that net."""
    head = ["", "needs", "temporaries", "extra matmul FLOPs"]
    lines = [head + ["published", "trained there"] * like_published]
    for row in rows:
        line = [row.name, f"{row.megabytes:.0f} MB", f"{row.temp_bytes / 1e6:.0f} MB"]
        line.append(f"{extra(row, rows):.1%}")
        if like_published:
            given = published.MEGABYTES.get(row.number) if _is_published(row) else None
            line.append(f"{given} MB" if given else "")
            line.append(
                f"{published.trained(row.number)} of {published.DEPTH + 1}" if given else ""
            )
        lines.append(line)
    return markdown(lines)


def accuracies(rows: Sequence[Trained]) -> str:
    """What was trained, as a Markdown table."""
    head = ["net", "policy", "loss of the first step", "of the last epoch", "accuracy", "Δ loss"]
    lines = [
        [
            row.program,
            row.policy,
            f"{row.first_loss:.3f}",
            f"{row.loss:.3f}",
            f"{row.accuracy:.1%}",
            f"{row.loss_off:.0e}" if row.loss_off else "0",
        ]
        for row in rows
    ]
    return markdown([head, *lines])


def message(rows: Sequence[Need]) -> str:
    """The best size-aware plan and the best equal segments, in one line."""
    mine = [row for row in rows if row.update == "inside"]
    cut = min((row for row in mine if row.kind == "segments"), key=_megabytes)
    aware = [row for row in mine if row.kind in ("sqrt", "fit")]
    near = 1.01 * min(map(_megabytes, aware))
    # Of those within a percent of the least memory, the one that recomputes least.
    best = min((row for row in aware if row.megabytes < near), key=lambda row: row.matmul_flops)
    return (
        f"size-aware plan: {_cost(best, rows)} matmul FLOPs; "
        f"{cut.number} equal segments: {_cost(cut, rows)}"
    )


def answer(rows: Sequence[Need], trained: Sequence[Trained]) -> str:
    """All that is claimed, and whether it holds."""
    plain = next(row for row in rows if row.kind == "none" and row.update == "inside")
    lines = [f"A step needs {plain.megabytes:.0f} MB with everything kept; {message(rows)}."]
    after = {row.kind: row for row in rows if row.update == "after"}
    if after:
        saved = after["none"].required_bytes - after["sqrt"].required_bytes
        lines.append(
            f"Where parameters are updated after the whole backward pass, remat_sqrt saves "
            f"{saved / 1e6:.0f} MB."
        )
    for program in dict.fromkeys(row.program for row in trained):
        own = [row for row in trained if row.program == program]
        line = f"{own[0].data}, {program}: {own[0].accuracy:.1%} of the held-out digits recognised"
        if len(own) > 1:
            alike = len({row.accuracy for row in own}) == 1
            off = max(row.loss_off for row in own)
            line += f", {'the same' if alike else 'NOT THE SAME'} under {len(own)} policies, "
            line += f"losses {f'up to {off:.0e} apart' if off else 'equal bit for bit'}"
        lines.append(f"{line}.")
    return "\n".join(lines)


# ---------------------------------------------------------------- implementation


def _is_published(row: Need) -> bool:
    return row.kind in ("none", "segments") and row.update == "inside"


def _megabytes(row: Need) -> float:
    return row.megabytes


def _cost(row: Need, rows: Sequence[Need]) -> str:
    return f"{row.megabytes:.0f} MB at {extra(row, rows):+.1%}"
