"""`experiments/state_convergence.py` and `state_speed.py`: their smallest forms, what is said."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import state_convergence
import state_speed
from state_convergence import ADAMW, LOMO, NUDGED, SGD, Options, Row, answer, main, summary


@pytest.mark.slow
def test_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(small=True, results=tmp_path)
    few = {
        name: config for name, config in options.ways().items()
        if name in (ADAMW, SGD, LOMO)
    }  # fmt: skip
    tiny = options.sized().model
    few = {
        name: dataclasses.replace(
            tiny,
            optimizer=config.optimizer,
            state=config.state,
            fused=config.fused,
            learning_rate=config.learning_rate,
        )
        for name, config in few.items()
    }
    monkeypatch.setattr(Options, "ways", lambda self: few)
    rows = main(options)
    assert [(row.name, row.seed) for row in rows] == [(name, n) for name in few for n in (0, 1)]
    assert all(4 < row.loss < 6 for row in rows)
    out = capsys.readouterr().out
    assert "LOMO equals SGD" in out

    def trained(*args: Any) -> None:
        raise AssertionError("this row was there")

    monkeypatch.setattr(state_convergence._Trained, "loss", trained)
    assert main(options) == rows


def test_what_is_not_reached_is_said() -> None:
    def row(name: str, seed: int, loss: float) -> Row:
        return Row("", name, seed, 1e-3, loss, versions="1")

    rows = [
        row(name, seed, loss + seed)
        for name, loss in {ADAMW: 2.0, NUDGED: 2.001, "8-bit": 2.02, SGD: 3.0, LOMO: 3.1}.items()
        for seed in (0, 1)
    ]
    assert answer(rows) == (
        "8-bit: +0.0200 nats, NOT within 0.01\nLOMO does NOT equal SGD: 1.0e-01 nats at most"
    )
    assert "2.5200 |          +0.0200 |              +0.0200 |" in summary(rows)


@pytest.mark.slow
def test_the_smallest_form_of_the_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = state_speed.Options.ways
    few = (state_speed.ORDINARY, state_speed.FUSED)
    monkeypatch.setattr(
        state_speed.Options, "ways", lambda self: {name: made(self)[name] for name in few}
    )
    rows = state_speed.main(state_speed.Options(small=True, results=tmp_path))
    assert [row.name for row in rows] == list(few)
    assert rows[0].speed == 1
    assert rows[1].seconds > 0
    assert "of the ordinary step's speed, goal 0.95" in capsys.readouterr().out
    slow = [rows[0], dataclasses.replace(rows[1], speed=0.9)]
    assert state_speed.answer(slow).endswith(
        "0.900 of the ordinary step's speed, goal 0.95, NOT reached"
    )
