"""Schedules as data: the published formulas, and what makes a schedule one."""

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem import PipelineSchedule
from jaxmem.pipeline.balance import balanced
from jaxmem.pipeline.schedule import (
    NAMES,
    Work,
    cotangent_places,
    input_places,
    text_table,
)

STAGES = st.integers(2, 8)

# ---------------------------------------------------------------- formulas


@given(name=st.sampled_from(NAMES), stages=STAGES, groups=st.integers(1, 4), v=st.integers(2, 4))
@settings(max_examples=60)
def test_the_bubble_is_as_published(name: str, stages: int, groups: int, v: int) -> None:
    """(S − 1) / (m + S − 1); where stages are interleaved, with v m in the place of m."""
    m, v = (stages * groups, v) if name == "interleaved" else (groups * 3, 1)
    schedule = PipelineSchedule.of(name, stages, m, v)
    expected = Fraction(stages - 1, v * m + stages - 1)
    assert schedule.bubble == pytest.approx(float(expected))
    ticks = 2 * (v * m + stages - 1)
    if name in ("eager-1f1b", "interleaved"):
        ticks = v * m + (v + 1) * stages - 2
    assert schedule.ticks == ticks


@given(stages=STAGES, m=st.integers(1, 20))
@settings(max_examples=40)
def test_how_many_microbatches_are_in_flight(stages: int, m: int) -> None:
    def held(name: str) -> tuple[int, ...]:
        return PipelineSchedule.of(name, stages, m).in_flight

    assert held("gpipe") == (m,) * stages
    assert held("1f1b") == tuple(min(stages - s, m) for s in range(stages))
    assert held("eager-1f1b") == tuple(min(2 * (stages - s) - 1, m) for s in range(stages))


def test_in_lockstep_eager_stages_take_the_least_time() -> None:
    """Where a backward pass takes as long as three forward ones."""
    stages, m = 4, 16
    times = {name: PipelineSchedule.of(name, stages, m).span(1, 3) for name in NAMES[:3]}
    assert times["gpipe"] == times["eager-1f1b"] == (m + stages - 1) * 4
    assert times["1f1b"] > 1.3 * times["gpipe"]
    interleaved = PipelineSchedule.of("interleaved", stages, m, 2)
    assert interleaved.span(1, 3) == (2 * m + stages - 1) * 4


# ---------------------------------------------------------------- what makes it one


@given(name=st.sampled_from(NAMES), stages=STAGES, groups=st.integers(1, 3), v=st.integers(2, 3))
@settings(max_examples=60)
def test_all_work_is_done_once_and_after_what_it_needs(
    name: str, stages: int, groups: int, v: int
) -> None:
    m, v = (stages * groups, v) if name == "interleaved" else (groups * 2, 1)
    schedule = PipelineSchedule.of(name, stages, m, v)
    last = stages * v - 1
    done = {kind: {work: (tick, stage) for tick, stage, work in schedule.works(kind)}
            for kind in ("forward", "backward")}  # fmt: skip
    wanted = set(itertools.product(range(m), range(last + 1)))
    for kind in ("forward", "backward"):
        assert set(done[kind]) == wanted
        assert len(list(schedule.works(kind))) == len(wanted)
    for (j, chunk), (tick, stage) in done["forward"].items():
        assert stage == chunk % stages
        if chunk:
            assert done["forward"][Work(j, chunk - 1)][0] < tick
    for (j, chunk), (tick, stage) in done["backward"].items():
        assert stage == chunk % stages
        if chunk < last:
            assert done["backward"][Work(j, chunk + 1)][0] < tick
        else:
            assert done["forward"][Work(j, chunk)][0] <= tick


@given(name=st.sampled_from(NAMES), stages=STAGES, groups=st.integers(1, 3))
@settings(max_examples=40)
def test_what_is_held_is_there_when_it_is_used(name: str, stages: int, groups: int) -> None:
    """And in no more places than the schedule bounds: S for 1F1B."""
    m, v = stages * groups, 2 if name == "interleaved" else 1
    schedule = PipelineSchedule.of(name, stages, m, v)
    inputs, cotangents = input_places(schedule), cotangent_places(schedule)
    for places, step, kinds in (
        (inputs, 1, ("forward", "backward")), (cotangents, -1, ("backward",))
    ):  # fmt: skip
        held: dict[tuple[int, int], tuple[int, int]] = {}
        sent: dict[int, tuple[int, int]] = {}
        for tick in range(schedule.ticks):
            for stage in range(stages):
                if (place := places.received[tick][stage]) >= 0:
                    j, chunk = sent[(stage - step) % stages]
                    held[stage, place] = j, chunk + step
            rows = {"forward": schedule.forward[tick], "backward": schedule.backward[tick]}
            for stage in range(stages):
                for kind in kinds:
                    work = rows[kind][stage]
                    place = getattr(places, kind)[tick][stage]
                    if work is not None and place >= 0:
                        assert held[stage, place] == work
                    edge = 0 if step == 1 else stages * v - 1
                    assert (place >= 0) == (work is not None and work.chunk != edge)
            source = rows["forward" if step == 1 else "backward"]
            sent = {stage: work for stage, work in enumerate(source) if work is not None}
    bound = {"gpipe": m, "1f1b": stages, "eager-1f1b": 2 * stages - 1}.get(name, (v + 1) * stages)
    assert inputs.count <= min(bound, m * v)


def test_the_text_shows_a_line_for_each_stage() -> None:
    schedule = PipelineSchedule.of("interleaved", 2, 2, 2)
    lines = text_table(schedule).splitlines()
    assert lines[0].split()[2:] == ["F0a", "F1a", "F0b", "F1b", "B0b", "B1b", "B0a", "B1a"]
    assert lines[1].split()[2:] == [".", "F0a", "F1a", "F0bB0b", "F1bB1b", "B0a", "B1a", "."]
    assert text_table(schedule, width=30).splitlines()[0].endswith(" …")


def test_a_picture(tmp_path: Path) -> None:
    schedule = PipelineSchedule.of("interleaved", 2, 2, 2)
    figure = schedule.plot(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    # A line for each stage, and a bar for each forward pass, recomputation and backward pass.
    assert len(axes.patches) == 2 + 2 * 4 * 3
    assert axes.get_title(loc="left").startswith("interleaved: 2 microbatches, 8 ticks, idle 20%")
    with pytest.raises(ValueError, match="a picture is written as PNG or SVG"):
        schedule.plot(tmp_path / "schedule.pdf")


# ---------------------------------------------------------------- sizes by cost


@given(
    layers=st.integers(2, 12),
    others=st.lists(st.integers(0, 8), min_size=2, max_size=4),
)
@settings(max_examples=60)
def test_no_other_sizes_are_faster(layers: int, others: list[int]) -> None:
    layers = max(layers, len(others))
    sizes = balanced(layers, 2.0, others)

    def time(sizes: tuple[int, ...]) -> float:
        return max(other + 2.0 * size for other, size in zip(others, sizes, strict=True))

    cuts = itertools.combinations(range(1, layers), len(others) - 1)
    all_sizes = (tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts)
    assert sum(sizes) == layers
    assert min(sizes) >= 1
    assert time(sizes) == min(map(time, all_sizes))
