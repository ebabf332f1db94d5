"""`jaxmem.fit`: the budget, the order of plans, errors, plans as files, and what a step may hold.

All for the attached CPU; `test_fit_models.py` has accelerators.
"""

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.budgeted import problem, question
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import BudgetError, JaxmemWarning, Plan
from jaxmem.fitting.compile_request import Begun, CompileRequest, rematerialised
from jaxmem.targets.pool import Worker, pool
from jaxmem.trace import context

MIB = 2**20

# ---------------------------------------------------------------- a step


def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
    inner = jax.nn.gelu(h @ p["up"])
    return h + jnp.tanh(inner @ p["down"]), None


def model(params: Any, h: jax.Array) -> jax.Array:
    return jnp.square(lax.scan(layer, h, params)[0]).mean()


def shapes(n: int = 8, width: int = 16, inner: int = 48) -> dict[str, tuple[int, ...]]:
    return {"up": (n, width, inner), "down": (n, inner, width)}


def specs(n: int = 8, rows: int = 2048, dtype: str = "float32") -> tuple[Any, Any]:
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes(n).items()}
    return params, jax.ShapeDtypeStruct((rows, 16), dtype)


def arrays(n: int = 8, rows: int = 2048) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

    return {name: normal(*shape) for name, shape in shapes(n).items()}, normal(rows, 16)


marked = jaxmem.remat_auto(model)
step = jax.value_and_grad(marked)
plain = jax.value_and_grad(model)


compiled = CompileRequest.begin  # without the memory of `remembered`


def fit(step: Callable[..., Any], *args: Any, budget: int | str, **options: Any) -> jaxmem.Fitted:
    options = {"compiler_options": QUICK, "progress": False, **options}
    return jaxmem.fit(step, *args, budget=budget, **options)


# Machine code that is not optimised; what is in memory is decided before.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}


@functools.cache
def front(n: int = 8) -> Any:
    """What of the step, with so many layers, can be planned."""
    return problem(step, *specs(n))


def least_and_most() -> tuple[int, int]:
    """What the last and the first candidate of the step's front need."""
    found, ask = front(), question(step, *specs(), options=QUICK)
    return tuple(found.report(ask, k).required_bytes for k in (len(found.front) - 1, 0))  # pyright: ignore[reportReturnType]


@pytest.fixture(scope="module", autouse=True)
def remembered() -> Iterator[None]:
    """Compiles of a plan that was compiled before, for the same step, are looked up."""
    known: dict[Any, Any] = {}

    def looked_up(self: CompileRequest, plan: jaxmem.StepPlan) -> Answered:
        others = (self.args, self.kwargs, self.donate_argnums, self.static_argnums)
        key = self.step, self.target, str((*others, self.compiler_options)), plan
        if key not in known:
            known[key] = compiled(self, plan).result()
        return Answered(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompileRequest, "begin", looked_up)
        yield


@dataclasses.dataclass
class Answered:
    """A report that is there."""

    report: jaxmem.MemoryReport

    def answered(self, seconds: float) -> bool:
        return True

    def result(self) -> jaxmem.MemoryReport:
        return self.report


def extra(fitted: jaxmem.Fitted) -> float:
    return fitted.explain().extra_seconds


# ---------------------------------------------------------------- what is guaranteed


@pytest.mark.slow
@pytest.mark.parametrize("budgets", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_budgets_are_kept_and_larger_ones_are_never_slower(budgets: int) -> None:
    least, most = least_and_most()
    assert least < 0.5 * most
    found = []
    for budget in np.geomspace(least, 1.01 * most, budgets).astype(int):
        fitted = fit(step, *specs(), budget=int(budget))
        assert fitted.report.required_bytes <= budget
        assert fitted.compiles <= 8
        found.append((extra(fitted), fitted.report.required_bytes))
    seconds, sizes = zip(*found, strict=True)
    assert list(seconds) == sorted(seconds, reverse=True)
    assert list(sizes) == sorted(sizes)
    assert seconds[-1] == 0
    assert len(set(sizes)) > budgets / 2


def test_the_certificate_is_of_the_very_program_that_runs() -> None:
    """The step under its plan, compiled by hand, needs what the report says."""
    fitted = fit(step, *specs(), budget="4MiB")
    with jaxmem.use_plan(fitted.plan):
        analysis = jax.jit(step).lower(*specs()).compile().memory_analysis()
    assert analysis is not None
    assert fitted.report.temp_bytes == analysis.temp_size_in_bytes
    assert fitted.report.required_bytes <= fitted.budget == 4 * MIB


@pytest.mark.slow
def test_fitted_computes_what_the_step_computes() -> None:
    args = arrays()
    before = jax.tree.map(np.array, args)
    fitted = fit(step, *args, budget="3MiB", max_compiles=2)
    expected = jax.jit(plain)(*args)
    chex.assert_trees_all_close(fitted.step(*args), expected, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(fitted(*args), expected, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_equal(jax.tree.map(np.array, args), before)
    assert fitted.plan.regions


def test_few_compiles_and_one_line_for_each(capfd: pytest.CaptureFixture[str]) -> None:
    fitted = jaxmem.fit(step, *specs(), budget="5MiB", max_compiles=2)
    assert fitted.compiles <= 2
    lines = [line for line in capfd.readouterr().err.splitlines() if " needs " in line]
    assert len(lines) == fitted.compiles
    assert all(" of " in line and "predicted" in line for line in lines)
    if not fitted.explain().closed:
        assert "max_compiles=" in str(fitted.explain())


SCRIPT = """
from test_fit import fit, specs, step
print(fit(step, *specs(), budget="4MiB", max_compiles=1).plan.to_json())
"""


@pytest.mark.slow
def test_deterministic_in_this_process_and_in_a_fresh_one() -> None:
    first, again = (fit(step, *specs(), budget="4MiB").plan for _ in range(2))
    assert first == again
    here = Path(__file__).parents[1]
    path = [str(here / "fitting"), str(here), str(here.parent), str(here.parent / "experiments")]
    fresh = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = jaxmem.StepPlan.from_json(fresh.stdout)
    # The compilers of the two processes have other flags; the front they choose from is one.
    plans = [front().plan(candidate) for candidate in range(len(front().front))]
    assert theirs in plans
    assert first in plans


# ---------------------------------------------------------------- errors


def test_what_no_plan_fits_says_the_least_and_what_would_help() -> None:
    def train(params: Any, h: Any) -> Any:
        return jax.tree.map(jnp.subtract, params, jax.grad(marked)(params, h))

    with pytest.raises(BudgetError) as caught:
        fit(train, *specs(rows=512), budget="256KiB", max_compiles=3)
    error = caught.value
    assert error.budget == MIB // 4
    assert error.least_bytes == error.report.required_bytes > error.budget
    text = str(error)
    for part in (
        "no plan brings the step within 256.0 KiB",
        "too much",
        "arguments (",
        "temporaries: about",
        "working set",
        "gradients",
        "What would help:",
        "jaxmem.value_and_grad(loss, microbatches=",
        "donate_argnums",
    ):
        assert part in text
    assert "allow_offload" not in text  # of no use on a CPU


def test_hints_go_by_what_was_passed() -> None:
    def train(params: Any, h: Any) -> Any:
        return jax.tree.map(jnp.subtract, params, jax.grad(marked)(params, h))

    with pytest.raises(BudgetError) as caught:
        fit(train, *specs(), budget="0.5MiB", max_compiles=1, donate_argnums=0)
    assert "donate_argnums" not in str(caught.value)
    assert "a batch of about " in str(caught.value)
    assert "in place of 2048" in str(caught.value)
    with pytest.raises(BudgetError) as caught:
        fit(train, *specs(), budget="100kB", max_compiles=1, donate_argnums=0)
    assert "the arguments and results alone need" in str(caught.value)


def test_nothing_decorated() -> None:
    with pytest.raises(ValueError, match="nothing in the step is decorated") as caught:
        fit(plain, *specs(), budget="1GiB")
    assert "remat_auto" in str(caught.value)
    assert "test_fit.py" in str(caught.value)


def test_code_without_a_scan_need_not_be_scanned_to_be_planned() -> None:
    def loops(ws: Any, h: Any) -> Any:
        for w in ws:
            h = jnp.tanh(h @ w)
        return h.sum()

    with pytest.raises(ValueError, match="code without a scan is planned as well"):
        fit(jax.grad(loops), [jnp.ones((8, 8))] * 4, jnp.ones((64, 8)), budget="1GiB")


def test_gradients_of_stacks_that_share_a_layer_are_counted_for_each() -> None:
    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ w), None

    shared = jaxmem.remat_auto(lambda ws, h: lax.scan(layer, h, ws)[0])

    def norm(ws: Any, h: Any) -> Any:
        gradient = jax.grad(lambda ws: shared(ws[1], shared(ws[0], h)).sum())(ws)
        return sum(jnp.square(leaf).sum() for leaf in gradient)

    w, h = (jax.ShapeDtypeStruct(s, "float32") for s in ((8, 256, 256), (16, 256)))
    found = problem(norm, (w, w), h)
    assert [region.uses.times for region in found.regions] == [2]
    assert found.others >= 4 * 8 * 256 * 256 * 4  # two stacks of weights and two of gradients


def test_a_plan_of_another_version_says_so() -> None:
    with pytest.raises(ValueError, match="got 1: another version of jaxmem wrote it"):
        jaxmem.StepPlan.from_json('{"jaxmem_step_plan": 1, "regions": []}')


def test_a_plan_is_not_saved_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder") as caught:
        jaxmem.StepPlan().save(tmp_path / "none" / "plan.json")
    assert caught.value.filename == str(tmp_path / "none")


def _short_of_memory(
    monkeypatch: pytest.MonkeyPatch, work: float, candidates: int | None = None
) -> list[jaxmem.MemoryReport]:
    """Have the compiler say of the first plans that it recomputed more than was asked for."""
    begin, first = CompileRequest.begin, front()
    plans = [first.plan(candidate) for candidate in range(len(first.front))][:candidates]
    told: list[jaxmem.MemoryReport] = []

    def short(self: CompileRequest, plan: jaxmem.StepPlan) -> Answered:
        found = begin(self, plan).result()
        if plan in plans:
            lint = jaxmem.Lint("compiler-remat", "it is at the limit", "choose a policy")
            done = round((found.matmul_flops or 0) * work)
            found = dataclasses.replace(found, lints=(*found.lints, lint), matmul_flops=done)
        told.append(found)
        return Answered(found)

    monkeypatch.setattr(CompileRequest, "begin", short)
    return told


def test_a_plan_that_fits_since_the_compiler_recomputes_is_not_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = _short_of_memory(monkeypatch, 1.5, candidates=1)
    fitted = fit(step, *specs(), budget="1GiB")
    assert rematerialised(told[0])
    assert not rematerialised(fitted.report)
    assert (fitted.report.matmul_flops or 0) < (told[0].matmul_flops or 0)


def test_what_the_compiler_recomputes_is_taken_where_it_is_less_or_all_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        _short_of_memory(patch, 0.9, candidates=1)
        assert rematerialised(fit(step, *specs(), budget="1GiB").report)
    _short_of_memory(monkeypatch, 1.5)
    fitted = fit(step, *specs(), budget="1GiB")
    assert fitted.report.required_bytes <= fitted.budget


class _Refused(Answered):
    """A plan for which the compiler fails."""

    error: jaxmem.CompileError

    def result(self) -> jaxmem.MemoryReport:
        raise self.error

    def stop(self) -> None:
        pass


def _failing(
    monkeypatch: pytest.MonkeyPatch, is_failing: Callable[[jaxmem.StepPlan], bool], defect: bool
) -> list[jaxmem.StepPlan]:
    """Have the compiler fail for these plans, and note which are asked for."""
    begin, asked = CompileRequest.begin, []

    def begun(self: CompileRequest, plan: jaxmem.StepPlan) -> Answered | Begun:
        asked.append(plan)
        if not is_failing(plan):
            return begin(self, plan)
        refused = _Refused(None)  # pyright: ignore[reportArgumentType]
        refused.error = jaxmem.CompileError("it failed: INTERNAL: why", is_defect=defect)
        return refused

    monkeypatch.setattr(CompileRequest, "begin", begun)
    return asked


def test_plans_for_which_the_compiler_fails_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    least, most = least_and_most()
    budget = (least + most) // 2
    without = fit(step, *specs(), budget=budget)
    asked = _failing(monkeypatch, lambda plan: plan == without.plan, defect=True)
    with pytest.warns(JaxmemWarning, match="passed over 1 of . plans.*INTERNAL: why"):
        fitted = fit(step, *specs(), budget=budget, progress=True)
    assert fitted.plan != without.plan
    assert fitted.report.required_bytes <= budget
    assert without.plan in asked
    assert fitted.compiles == len(asked) <= 8
    assert "is passed over: it failed" in capfd.readouterr().err


def test_a_compiler_that_fails_for_all_plans_or_at_something_else_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        asked = _failing(patch, lambda plan: True, defect=True)
        with pytest.raises(jaxmem.CompileError, match="it failed"):
            fit(step, *specs(), budget="1GiB", max_compiles=3)
        assert 1 <= len(asked) <= 3
    asked = _failing(monkeypatch, lambda plan: True, defect=False)
    with pytest.raises(jaxmem.CompileError, match="it failed"):
        fit(step, *specs(), budget="1GiB", max_compiles=3)
    assert len(asked) == 1, "it will fail again"


def test_no_failure_loses_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = least_and_most()
    budget = (least + 3 * most) // 4
    with monkeypatch.context() as patch:
        asked = _failing(patch, lambda plan: False, defect=False)
        fit(step, *specs(), budget=budget)
    first = asked[0]
    assert len(asked) > 1
    _failing(monkeypatch, lambda plan: plan != first, defect=False)
    with pytest.warns(JaxmemWarning, match="passed over . of . plans"):
        fitted = fit(step, *specs(), budget=budget)
    assert fitted.plan == first


def test_nothing_differentiated() -> None:
    with pytest.raises(ValueError, match="differentiates none of them"):
        fit(marked, *specs(), budget="1GiB")


def test_nothing_is_planned_where_scans_are_python_loops() -> None:
    with jax.disable_jit(), pytest.raises(ValueError, match="switch it off around jaxmem.fit"):
        fit(step, *arrays(), budget="1GiB")


@pytest.mark.parametrize("budget", ["", "40 gallons", "GiB", 0, -1, float("nan"), "-3GiB"])
def test_a_budget_that_is_no_size(budget: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        fit(step, *specs(), budget=budget)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"target": "h900"}, "h900"),
        ({"max_compiles": 0}, "max_compiles"),
        ({"cost": "guess"}, "cost"),
    ],
)
def test_options_that_mean_nothing(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fit(step, *specs(), budget="1GiB", **options)


@pytest.mark.parametrize("flag", ["allow_offload", "cache", "progress"])
def test_flags_are_true_or_false(flag: str) -> None:
    options: Any = {flag: "no"}
    for found in (
        lambda: fit(step, *specs(), budget="1GiB", **options),
        lambda: jaxmem.frontier(step, *specs(), **options),
    ):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, got 'no' of type str"):
            found()


def test_a_budget_of_another_kind() -> None:
    with pytest.raises(TypeError, match="a size is a number of bytes or a text"):
        fit(step, *specs(), budget=None)  # pyright: ignore[reportArgumentType]


def test_unfilled_regions_warn_once() -> None:
    @jaxmem.remat_auto
    def lonely(params: Any, h: Any) -> Any:
        return model(params, h)

    with pytest.warns(JaxmemWarning, match="no plan is in force: everything is kept") as caught:
        jax.jit(jax.grad(lonely)).lower(*specs())
    assert "jaxmem.fit(step" in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(jax.grad(lonely)).lower(*specs(n=3))


# ---------------------------------------------------------------- plans applied


@functools.cache
def fitted_once() -> jaxmem.Fitted:
    return fit(step, *specs(), budget="4MiB", max_compiles=2)


def test_a_saved_plan_is_applied_with_no_solving(tmp_path: Path) -> None:
    plan = fitted_once().plan
    plan.save(tmp_path / "plan.json")
    assert jaxmem.StepPlan.load(tmp_path / "plan.json") == plan
    (region,) = plan.regions
    for source in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        with jaxmem.use_plan(source), context.recording() as record:
            jax.jit(step).trace(*specs())
        assert [known for _, known in record.plans] == [region.plan]
    with jaxmem.use_plan(tmp_path / "plan.json"):
        ours = jax.jit(step)(*arrays())
    chex.assert_trees_all_close(ours, jax.jit(plain)(*arrays()), rtol=1e-5, atol=1e-7)


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    fitted_once().plan.save(file)
    before = file.read_text()
    with pytest.raises(OSError, match="missing"):
        fitted_once().plan.save(tmp_path / "missing" / "plan.json")
    assert [file] == list(tmp_path.iterdir())
    assert file.read_text() == before


REFUSED: dict[str, tuple[Any, str]] = {
    "length": (specs(n=5), "it is for 8 layers, and there are 5"),
    "rows": (specs(rows=1024), "it takes float32[2048,16] where there is float32[1024,16]"),
    "dtype": (specs(dtype="bfloat16"), "where there is bfloat16[2048,16]"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_plan_for_something_else_is_refused(change: str) -> None:
    args, text = REFUSED[change]
    with jaxmem.use_plan(fitted_once().plan), pytest.raises(ValueError) as caught:
        jax.jit(step).lower(*args)
    assert text in str(caught.value)
    assert "is not in the plan" in str(caught.value)
    assert str(caught.value).endswith("Fit this step anew")


def test_a_plan_for_other_operations_is_refused() -> None:
    @jaxmem.remat_auto
    def other(params: Any, h: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            return h + jnp.sin(jax.nn.gelu(h @ p["up"]) @ p["down"]), None

        return lax.scan(layer, h, params)[0].sum()

    with jaxmem.use_plan(fitted_once().plan):
        with pytest.raises(ValueError, match="what the layer computes") as caught:
            jax.jit(jax.grad(other)).lower(*specs())
        assert f"jax {jax.__version__}" in str(caught.value)
    with (
        jaxmem.use_plan(jaxmem.StepPlan()),
        pytest.raises(ValueError, match="which is empty; fit this step anew"),
    ):
        jax.jit(step).lower(*specs())


def test_use_plan_takes_no_plan_of_one_stack() -> None:
    with pytest.raises(TypeError, match="goes to its decorator"), jaxmem.use_plan(Plan.none(3)):  # pyright: ignore[reportArgumentType]
        pass


def test_outside_of_use_plan_the_decorators_policy_holds() -> None:
    own = jaxmem.remat(model, "sqrt", segments=4)
    fitted = fit(jax.grad(own), *specs(), budget="5MiB", max_compiles=2)
    assert fitted.plan.regions[0].plan != Plan.periodic(8, segments=4)
    for plan, expected in [
        (None, Plan.periodic(8, segments=4)),
        (fitted.plan, fitted.plan.regions[0].plan),
    ]:
        with contextlib.ExitStack() as stack:
            if plan is not None:
                stack.enter_context(jaxmem.use_plan(plan))
            record = stack.enter_context(context.recording())
            jax.jit(jax.grad(own)).trace(*specs())
        assert {plan for _, plan in record.plans} == {expected}


# ---------------------------------------------------------------- damaged files

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def paths(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data if isinstance(data, list) else [])
    )
    for key, value in items:
        yield from paths(value, (*at, key))


def changed(data: Any, at: tuple[Any, ...], to: Any, how: str) -> Any:
    if not at:
        return to
    key, *rest = at
    new = dict(data) if isinstance(data, dict) else list(data)
    if rest or how == "replace":
        new[key] = changed(data[key], tuple(rest), to, how)
    elif how == "remove":
        del new[key]
    elif isinstance(new, dict):
        new[f"{key}x"] = to
    else:
        new.insert(key, to)
    return new


UNROLLED_PLAN = """{"jaxmem_step_plan": 2, "target": "", "versions": [["jax", "1"]], "regions": [
{"layer": "d", "inputs": ["float32[2]"], "where": "f", "plan": {"unrolled": {"length": 9, "pieces":
[{"first": 0, "last": 4, "inner": [{"first": 0, "last": 4, "keep": [2], "offload": [3]}]},
{"first": 4, "last": 9}]}}}]}"""


@pytest.mark.slow
@given(st.data())
@settings(derandomize=True, max_examples=150)
def test_damaged_plans_are_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([fitted_once().plan.to_json(), UNROLLED_PLAN]))
    whole = json.loads(text)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(list(paths(whole))))
        how = data.draw(st.sampled_from(["replace", "remove", "insert"]))
        whole = changed(whole, at, data.draw(JSON), how)
    damaged = json.dumps(whole)
    try:
        found = jaxmem.StepPlan.from_json(damaged)
    except ValueError:
        return
    # What is still a plan is one that can be used: hashed, shown, written again.
    assert jaxmem.StepPlan.from_json(found.to_json()) == found
    assert isinstance(str(found), str)
    hash(found)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"jaxmem_plan": 1}', '"x"', "1e400"])
def test_what_is_no_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match="p.json: bad step plan"):
        jaxmem.StepPlan.load(tmp_path / "p.json")


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), jaxmem.use_plan(tmp_path / "none.json"):
        pass


# ---------------------------------------------------------------- what a step may hold


def check(step: Any, plain: Any, args: Any, budget: int | str, **options: Any) -> jaxmem.Fitted:
    """Within the budget, and with the numbers of the step without a decorator."""
    fitted = fit(step, *args, budget=budget, max_compiles=2, **options)
    assert fitted.report.required_bytes <= fitted.budget
    fresh = jax.tree.map(lambda a: jnp.array(a) if isinstance(a, jax.Array) else a, args)
    expected = plain(*args)
    chex.assert_trees_all_close(fitted.step(*fresh), expected, rtol=1e-4, atol=1e-6)
    return fitted


def test_several_stacks_of_different_layers() -> None:
    def two(mark: Any) -> Any:
        def encode(params: Any, h: Any) -> Any:
            return lax.scan(layer, h, params)[0]

        def decode(ws: Any, h: Any) -> Any:
            return lax.scan(lambda h, w: (jnp.sin(h @ w), None), h, ws)[0]

        first, second = mark(encode), mark(decode)

        def loss(params: Any, ws: Any, h: Any) -> Any:
            return jnp.square(second(ws, first(params, h))).mean()

        return jax.value_and_grad(loss, (0, 1))

    params, h = arrays()
    ws = jnp.asarray(np.random.default_rng(1).standard_normal((12, 16, 16)) / 4, jnp.float32)
    fitted = check(two(jaxmem.remat_auto), jax.jit(two(lambda f: f)), (params, ws, h), "4MiB")
    assert [region.plan.length for region in fitted.plan.regions] == [8, 12]
    text = str(fitted.explain())
    assert text.count("test_fit.py") >= 2


@pytest.mark.slow
def test_one_stack_called_twice_is_one_plan() -> None:
    def twice(mark: Any) -> Any:
        stack = mark(lambda params, h: lax.scan(layer, h, params)[0])
        return jax.value_and_grad(lambda params, h: stack(params, stack(params, h)).sum())

    fitted = check(twice(jaxmem.remat_auto), jax.jit(twice(lambda f: f)), arrays(), "6MiB")
    assert len(fitted.plan.regions) == 1
    assert "2 such stacks" in str(fitted.explain())


@pytest.mark.slow
def test_a_stack_in_a_stack() -> None:
    def nested(mark: Any) -> Any:
        def block(h: Any, p: Any) -> Any:
            return lax.scan(layer, h, p)[0], None

        return jax.value_and_grad(mark(lambda p, h: lax.scan(block, h, p)[0].sum()))

    params, h = arrays(16)
    params = jax.tree.map(lambda a: a.reshape(8, 2, *a.shape[1:]), params)
    fitted = check(nested(jaxmem.remat_auto), jax.jit(nested(lambda f: f)), (params, h), "8MiB")
    assert [region.plan.length for region in fitted.plan.regions] == [8]


def test_static_arguments_and_keywords() -> None:
    def loss(mark: Any) -> Any:
        stack = mark(lambda params, h: lax.scan(layer, h, params)[0])

        def run(params: Any, power: int, *, h: Any, scale: Any) -> Any:
            assert power == 2
            return (scale * stack(params, h) ** power).mean()

        return lambda params, power, h, scale: jax.value_and_grad(run)(
            params, power, h=h, scale=scale
        )

    params, h = arrays()
    fitted = fit(
        loss(jaxmem.remat_auto),
        *(params, 2),
        h=h,
        scale=3.0,
        budget="4MiB",
        static_argnums=1,
        max_compiles=2,
    )
    assert fitted.report.required_bytes <= 4 * MIB
    expected = loss(lambda f: f)(params, 2, h, 3.0)
    ours = fitted.step(params, 2, h=h, scale=3.0)
    chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-6)


def trained(mark: Any) -> Any:
    optimizer = optax.adam(1e-2)
    loss = mark(model)

    def train(params: Any, state: Any, h: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, h)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return train


@pytest.mark.slow
def test_a_train_step_that_donates() -> None:
    params, h = arrays()
    args = params, optax.adam(1e-2).init(params), h
    expected = jax.jit(trained(lambda f: f))(*args)
    fitted = fit(
        trained(jaxmem.remat_auto), *args, budget="4MiB", donate_argnums=(0, 1), max_compiles=3
    )
    assert fitted.report.alias_bytes > 0
    ours = fitted.step(*args)
    chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[:2]) if leaf.ndim)
    # And on with what came out of it.
    fitted.step(*ours[:2], h)


def test_a_step_that_is_jitted_already() -> None:
    jitted = jax.jit(step)
    fitted = check(jitted, jax.jit(plain), arrays(), "4MiB")
    assert fitted.plan == fit(step, *specs(), budget="4MiB", max_compiles=2).plan


@pytest.mark.slow
def test_gradients_of_microbatches() -> None:
    def accumulated(mark: Any) -> Any:
        return jaxmem.value_and_grad(mark(model), microbatches=4)

    args = arrays(rows=4096)
    fitted = check(accumulated(jaxmem.remat_auto), jax.jit(plain), args, "2MiB")
    assert fitted.plan.regions[0].inputs[-1] != "float32[4096,16]"


# ---------------------------------------------------------------- explain


def test_explain_speaks_in_the_users_names_and_lines() -> None:
    def named(h: Any, p: Any) -> Any:
        up = checkpoint_name(h @ p["up"], "my_up")
        return h + jnp.tanh(jax.nn.gelu(up) @ p["down"]), None

    loss = jaxmem.remat_auto(lambda p, h: jnp.square(lax.scan(named, h, p)[0]).sum())
    found = problem(jax.grad(loss), *specs())
    kept = {
        decision.name
        for candidate in range(len(found.front))
        for planned in found.planned(candidate)
        for decision in planned.region.decisions(planned.candidate)
        if decision.decision == "keep"
    }
    assert "my_up" in kept
    fitted = fit(jax.grad(loss), *specs(), budget="5MiB", max_compiles=3)
    why = fitted.explain()
    assert why.compiled_bytes == fitted.report.required_bytes
    assert why.rows
    assert {row.decision for row in why.rows} <= {"keep", "offload", "recompute"}
    lines = {row.source for row in why.rows if row.source}
    assert all("test_fit.py:" in line for line in lines)
    assert all(row.bytes > 0 or row.seconds >= 0 for row in why.rows)
    text = str(why)
    assert "predicted" in text
    assert "compiled" in text
    assert "optimality gap" in text


# ---------------------------------------------------------------- what is left is spent


def at_work() -> list[Worker]:
    resting = [worker for workers in pool._resting.values() for worker in workers]
    return [worker for worker in pool._all if worker not in resting]


def test_an_interrupt_while_waiting_ends_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Begun):
        def answered(self, seconds: float) -> bool:
            raise KeyboardInterrupt

    def begin(self: CompileRequest, plan: jaxmem.StepPlan) -> Begun:
        return Interrupted(plan, compiled(self, plan).pending)

    monkeypatch.setattr(CompileRequest, "begin", begin)
    options: dict[str, Any] = {"target": "h100-80g", "cache": False, "progress": False}
    with pytest.raises(KeyboardInterrupt) as caught:
        jaxmem.fit(step, *specs(), budget="1GiB", **options)
    assert not at_work()
    assert caught.traceback  # a debugger holds what was under way


@pytest.mark.slow
def test_what_will_be_asked_next_is_compiled_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = (front().predicted[k] for k in (-1, 0))
    options: dict[str, Any] = {"target": "h100-80g", "cost": "flops"}
    options["budget"] = (2 * least + most) // 3
    alone = jaxmem.fit(step, *specs(), workers=1, progress=False, **options)
    begun = []

    class Slow(Begun):
        def answered(self, seconds: float) -> bool:
            return False

    def slow(self: CompileRequest, plan: jaxmem.StepPlan) -> Begun:
        begun.append(plan)
        return Slow(plan, compiled(self, plan).pending)

    monkeypatch.setattr(CompileRequest, "begin", slow)
    together = jaxmem.fit(step, *specs(), workers=3, progress=False, **options)
    assert together.plan == alone.plan
    assert together.compiles == alone.compiles > 1
    assert len(begun) == len(set(begun)) > together.compiles  # the last question had a next one
    assert not at_work()


@pytest.mark.parametrize("share", [0.8, pytest.param(0.5, marks=pytest.mark.slow), 0.3])
def test_what_is_left_of_the_compiles_is_spent_on_finer_plans(
    share: float,
) -> None:
    """Less than 2 % of what a budget leaves for temporaries is unused, or the next plan fails."""
    ask = question(step, *specs(n=24), options=QUICK)
    everything = front(24).report(ask, 0)
    fixed = everything.required_bytes - everything.temp_bytes
    budget = fixed + int(share * everything.temp_bytes)
    fitted = fit(step, *specs(n=24), budget=budget, max_compiles=10)
    unused = budget - fitted.report.required_bytes
    assert unused >= 0
    assert unused < 0.02 * (budget - fixed) or "compiles allowed" not in str(fitted.explain())


@pytest.mark.slow
def test_the_search_ends_when_its_time_is_over_and_a_plan_fits() -> None:
    least, most = least_and_most()
    shares = (place / 8 for place in range(1, 8))
    budgets = [round(least ** (1 - share) * most**share) for share in shares]
    whole = [fit(step, *specs(), budget=budget, max_compiles=6) for budget in budgets]
    longest = max(whole, key=lambda fitted: fitted.compiles)
    found = fit(step, *specs(), budget=longest.budget, max_seconds=1e-6, max_compiles=6)
    assert found.report.required_bytes <= found.budget
    assert found.compiles < longest.compiles
    assert "the compiles allowed did not suffice" in str(found.explain())


@pytest.mark.parametrize(
    ("seconds", "error"), [(0, ValueError), (-1.0, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_seconds_that_are_none(seconds: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_seconds must be"):
        fit(step, *specs(), budget="1GiB", max_seconds=seconds)


def test_what_takes_long_is_told_of(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxmem.fitting.progress._PATIENCE", 0.0)
    fit(step, *specs(), budget="1GiB", max_compiles=1, progress=True)
    said = capfd.readouterr().err
    assert "fit: tracing the step, and planning what is decorated in it ..." in said
    assert "fit: compiling plan " in said
