"""Plans that recompute layers whole: which there are, and what they need."""

import dataclasses
import functools
from typing import Any

import jax
import pytest
from helpers import encoder_decoder
from helpers.budgeted import problem, question
from helpers.xla_flags import QUICK_GPU

import jaxmem
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.regions import UnrolledRegion
from jaxmem.fitting.step_problem import StepProblem
from jaxmem.solve.stages import ChainPlan, Kept, Option, Recomputed, Stage, Steps, extra_seconds
from jaxmem.unrolled.plan import UnrolledPlan
from jaxmem.unrolled.runs import Run, find_runs
from jaxmem.unrolled.whole import whole_layers

TARGET = "h100-80g"

# ---------------------------------------------------------------- which plans there are


def whole_plans(turn: int = 0) -> list[tuple[ChainPlan, int]]:
    """Of a stage, three layers of two stages each, and a stage; with what they need."""
    stages = [Stage(1.0, 1, (Option(10, 0.0, result_seconds=0.25),), 1) for _ in range(8)]

    def held(steps: Steps) -> ChainPlan:
        kept = sum(isinstance(step, Kept) for step in steps)
        return ChainPlan(10 * kept, extra_seconds(steps, stages), steps)

    def needed(plan: ChainPlan) -> int:
        return max(plan.bytes + turn, 40)

    found = whole_layers(range(0, 18, 2), [Run(2, 4, 3)], stages, {}, held, needed)
    return [(plan, needed(plan)) for plan in found]


def test_each_layer_is_recomputed_whole_or_kept() -> None:
    layers = [(1, 3), (3, 5), (5, 7)]
    for plan, _ in whole_plans():
        whole = [(step.first, step.last) for step in plan.steps if isinstance(step, Recomputed)]
        kept = {step.stage for step in plan.steps if isinstance(step, Kept)}
        stages = sorted([*kept, *(k for first, last in whole for k in range(first, last))])
        assert stages == list(range(8))
        assert set(whole) <= {(0, 1), *layers, (7, 8)}
        # The last ones are kept.
        again = [layer in whole for layer in layers]
        assert again == sorted(again, reverse=True)


def test_from_all_recomputed_on_what_needs_no_more_is_kept_first() -> None:
    plans = whole_plans(turn=10)
    first = plans[0][0]
    # A layer's last stage, and each stage alone, are spared what only their results need.
    assert first.seconds == 8 - 5 * 0.25
    assert all(isinstance(step, Recomputed) for step in first.steps)
    free = [plan.seconds for plan, needed in plans if needed == 40]
    assert min(free) == first.seconds - 1.75 - 0.75  # the last layer, and a stage


def test_without_runs_there_are_none() -> None:
    plan = ChainPlan(0, 0.0, ())
    assert not list(whole_layers([0, 1, 2], [], [], {}, lambda _: plan, lambda _: 0))


def test_the_result_of_a_segment_is_computed_once() -> None:
    stages = [Stage(3.0, 1, (Option(4, 0.0, result_seconds=2.0),)) for _ in range(4)]
    kept = tuple(Kept(k, 0) for k in range(4))
    assert extra_seconds(kept, stages) == 0
    assert extra_seconds((Recomputed(0, 4, kept),), stages) == 12 - 2
    each = tuple(Recomputed(k, k + 1, (kept[k],)) for k in range(4))
    assert extra_seconds(each, stages) == 4 * (3 - 2)


def test_layers_end_where_their_last_product_is_the_largest() -> None:
    text = ["small", "add", "large", "add"] * 4
    live = [1, 2] * 8 + [1]  # the least behind each sum
    work = [0.0, *(1.0 if at % 4 < 2 else 9.0 for at in range(16))]
    found = find_runs(text, live, lambda first, last, _: last - first, work=work)
    assert found == [Run(0, 4, 4)]
    shifted = find_runs(text[2:], live[2:], lambda first, last, _: last - first, work=work[2:])
    assert shifted == [Run(2, 4, 3)]  # and not the first that is as small


# ---------------------------------------------------------------- compiled


@functools.cache
def planned() -> tuple[StepProblem, CompileRequest]:
    step = encoder_decoder.step(jaxmem.remat_auto)
    specs = encoder_decoder.specs()
    options = {"target": TARGET, "donate": (0,)}
    return problem(step, *specs, **options), question(step, *specs, **options)


@pytest.mark.slow
def test_what_layers_recomputed_whole_need_is_predicted() -> None:
    """With every layer recomputed, also where other plans are predicted to need less."""
    found, ask = planned()
    [region] = found.regions
    assert isinstance(region, UnrolledRegion)
    chain = region.chain
    stages = [chain.segments[k, k + 1].stage for k in range(len(chain))]
    plans = whole_layers(
        chain.cuts, chain.code.runs, stages, {}, chain.held, lambda plan: plan.bytes
    )
    plan, everything = next(plans), found.plan(0)
    [own] = everything.regions
    own = dataclasses.replace(own, plan=chain.plan(plan.steps))
    report = ask.begin(dataclasses.replace(everything, regions=(own,))).result()
    missed = abs(found.others + plan.bytes - report.required_bytes)
    assert missed < 0.06 * report.temp_bytes


def test_plans_by_layer_are_asked_for_though_others_are_predicted_to_need_less() -> None:
    found, _ = planned()
    least = found.by_layer[-1]
    assert any(one.bytes <= least.bytes and one.seconds < least.seconds for one in found.whole)
    place = found.in_full().front.index(least)
    [region] = found.in_full().plan(place).regions
    assert isinstance(region.plan, UnrolledPlan)
    # All of them recomputed whole, from what they read, is among these, as it keeps the least.
    assert all(piece.inner or piece.keep == () for piece in region.plan.pieces)
    assert {one.kind for one in found.by_layer} == {"by layer"}
    assert {one.kind for one in found.in_full().front} == {"", "by layer"}


@pytest.mark.slow
def test_no_more_is_needed_than_with_a_checkpoint_around_each_layer() -> None:
    """But for 1 %: gradients of what the first and the last layers share are summed up later."""
    specs = encoder_decoder.specs()
    by_hand = encoder_decoder.step(lambda f: f, jax.checkpoint)
    options: Any = {"target": TARGET, "donate_argnums": 0, "compiler_options": QUICK_GPU}
    own = jaxmem.memory_report(by_hand, *specs, **options)
    fitted = jaxmem.fit(
        encoder_decoder.step(jaxmem.remat_auto),
        *specs,
        budget=round(1.01 * own.required_bytes),
        progress=False,
        **options,
    )
    assert fitted.report.matmul_flops is not None
    assert own.matmul_flops is not None
    assert fitted.report.matmul_flops <= own.matmul_flops
