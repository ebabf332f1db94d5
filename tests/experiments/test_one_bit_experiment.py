"""`experiments/one_bit.py`: its smallest form, what is said; options of `train_lm.py` for it."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import one_bit
import pytest
from one_bit import ADAM, PAPER, SCALED, WITHOUT, Bytes, Options, Row, answer, main, summary

from lm.config import Config, UserError


def row(name: str, seed: int, step: int, loss: float) -> Row:
    return Row("", name, seed, step, loss, versions="")


def test_losses_are_compared_with_those_of_the_same_seed() -> None:
    rows = [row(name, seed, step, 2.0 + seed + off / step) for seed in range(2) for step in (1, 2)
            for name, off in ((ADAM, 0.0), (PAPER, 0.02), (WITHOUT, 1.0))]  # fmt: skip
    sent = [Bytes("", PAPER, 100, 1300, 3200, 124, 24, versions="")]
    assert answer(rows, sent).splitlines() == [
        "1-bit Adam: +0.0100 nats, within 0.02",
        "1-bit Adam, no errors: +0.5000 nats, NOT within 0.02",
        "1-bit Adam: 32.0 times fewer bytes beside scales, at least 30",
    ]
    assert "| 1-bit Adam            |              2.5100 |              +0.0100 |" in summary(rows)


@pytest.mark.slow
def test_the_table_is_written_and_a_second_run_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eight devices, as this process has; nothing is trained, one program is compiled."""
    asked = []

    def trained(self: Any, seed: int) -> dict[int, float]:
        asked.append((self.name, seed))
        return {step: 3.0 - step / 10 for step in (4, 8)}

    monkeypatch.setattr(one_bit, "DEVICES", 8)
    monkeypatch.setattr(one_bit._Trained, "losses", trained)
    model = dataclasses.replace(Options().model, mesh="data=8")
    options = Options(small=True, model=model, results=tmp_path)
    rows = main(options)
    assert main(options) == rows
    assert asked == [(name, seed) for seed in (0, 1) for name in (ADAM, PAPER, SCALED, WITHOUT)]
    with (tmp_path / "one_bit_bytes.csv").open() as file:
        (found,) = csv.DictReader(file)
    sent = int(found["signs_bytes"]) - int(found["scale_bytes"])
    assert int(found["averaging_bytes"]) >= 30 * sent
    # 12 bytes of moments and of what is sent, an eighth of 4 of what is owned, with padding.
    assert 12.5 <= int(found["state_bytes"]) / int(found["numbers"]) < 12.7
    assert (tmp_path / "one_bit.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--optimizer one-bit-adam sends signs between devices, and this run has one; pass"),
        ({"mesh": "fsdp=4"}, "parameters whole on each of several devices, and --mesh data=1,fsdp"),
        ({"mesh": "data=4", "fused": True}, "averages once a step, in moments of float32; leave"),
        ({"mesh": "data=4", "averaged_steps": 0}, "--averaged-steps must be at least 1, got 0"),
        (
            {"mesh": "data=4", "optimizer": "adamw", "scaled": True},
            "--averaged-steps, --scaled and --no-error-feedback go with --optimizer one-bit",
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_told_with_the_remedy(
    options: dict[str, Any], said: str
) -> None:
    given: dict[str, Any] = {"optimizer": "one-bit-adam", **options}
    with pytest.raises(UserError) as caught:
        Config(**given).check()
    assert said in str(caught.value)
