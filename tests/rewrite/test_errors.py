"""What a user is told: each error by its text, each warning with its line."""

import functools
import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import jaxmem
from jaxmem import Plan, policies
from jaxmem.trace.arguments import OPTIONS

WEIGHTS, H = jnp.ones((5, 4, 4)), jnp.ones(4)


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(checkpoint_name(h @ w, "product")), None


def model(weights: jax.Array, h: jax.Array) -> jax.Array:
    return jax.lax.scan(layer, h, weights)[0].sum()


def two_stacks(weights: jax.Array, h: jax.Array) -> jax.Array:
    h, _ = jax.lax.scan(layer, h, weights)
    return jax.lax.scan(layer, h, jnp.concatenate([weights, weights]))[0].sum()


def says(error: pytest.ExceptionInfo, *parts: str) -> None:
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in {error.value}"


# ---------------------------------------------------------------- policies and plans


def test_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ValueError) as error:
        jaxmem.scan(layer, H, WEIGHTS, remat="sqrtt")
    says(
        error, "unknown remat policy 'sqrtt'", "'none', 'full', 'dots'", "'revolve'", "jaxmem.Plan"
    )


def test_what_is_no_policy() -> None:
    with pytest.raises(TypeError) as error:
        jaxmem.remat(model, 3)  # pyright: ignore[reportArgumentType]
    says(error, "got 3 of type int", "'sqrt'", "jaxmem.Plan")


@pytest.mark.parametrize("make", [lambda: policies.revolve(0), lambda: Plan.revolve(5, slots=0)])
def test_slots(make) -> None:
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        make()


@pytest.mark.parametrize(
    "make", [lambda: policies.sqrt(levels=0), lambda: Plan.periodic(5, levels=0)]
)
def test_levels(make) -> None:
    with pytest.raises(ValueError, match="levels must be at least 1, got 0"):
        make()


def test_decorator_checks_when_it_decorates() -> None:
    with pytest.raises(ValueError, match="slots must be at least 1"):
        jaxmem.remat_revolve(slots=-2)(model)
    with pytest.raises(TypeError, match="has no option 'slotz'; it takes slots"):
        jaxmem.remat_revolve(slotz=2)(model)
    with pytest.raises(ValueError, match="min_length must be at least 1"):
        jaxmem.remat_full(min_length=0)(model)


def test_options_go_with_names() -> None:
    with pytest.raises(TypeError, match="options levels go with the name of a policy"):
        jaxmem.remat(model, Plan.full(5), levels=2)
    with pytest.raises(TypeError, match="options levels go with the name of a policy"):
        jaxmem.remat(model, policies.full(), levels=2)


def test_plan_for_another_length_names_the_stack() -> None:
    with pytest.raises(ValueError) as error:
        jaxmem.remat(model, Plan.periodic(6))(WEIGHTS, H)
    says(error, "a plan for 6 layers", "a stack of 5", "test_errors.py", "pass a policy")
    with pytest.raises(ValueError, match="a plan for 6 layers cannot be used on a stack of 5"):
        jaxmem.scan(layer, H, WEIGHTS, remat=Plan.full(6))


def test_contradictory_names() -> None:
    with pytest.raises(ValueError) as error:
        policies.names(save=["a", "b"], offload=["b"])
    says(error, "contradictory", "'b'", "save=", "offload=")


@pytest.mark.parametrize(
    "policy",
    [
        policies.names(save="produkt"),
        policies.names(save="produkt") | policies.dots(),
        policies.offload("produkt"),
        jax.checkpoint_policies.save_only_these_names("produkt"),
        Plan.full(5, policies.names(save="produkt")),
    ],
)
def test_a_name_that_is_nowhere_lists_those_that_are(policy) -> None:
    with pytest.raises(ValueError) as error:
        jaxmem.remat(model, policy)(WEIGHTS, H)
    says(error, "'produkt'", "the names in them are: 'product'", "checkpoint_name")


# ---------------------------------------------------------------- stacks


def test_policy_on_what_is_no_code() -> None:
    with pytest.raises(TypeError) as error:
        jaxmem.remat(WEIGHTS, "sqrt")
    says(error, "takes a function, a Flax module class", "policies apply to code")


def test_policy_on_another_class() -> None:
    class Model:
        pass

    with pytest.raises(TypeError, match="Model is a class of another kind; decorate its method"):
        jaxmem.remat_sqrt(Model)


@pytest.mark.parametrize("base", [nn.Module, nnx.Module])
def test_method_that_is_not_there(base: type) -> None:
    class Model(base):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x

    with pytest.raises(TypeError, match="Model has no method 'encode'"):
        jaxmem.remat(Model, "sqrt", methods="encode")
    with pytest.raises(TypeError, match="methods= goes with a Flax module class"):
        jaxmem.remat(model, "sqrt", methods="encode")


def test_no_stack_warns_at_the_users_line_and_checkpoints_once() -> None:
    def unrolled(weights: jax.Array, h: jax.Array) -> jax.Array:
        for w in weights:
            h, _ = layer(h, w)
        return h.sum()

    decorated = jaxmem.remat_full(unrolled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grads = jax.grad(decorated)(WEIGHTS, H)
    (warning,) = caught
    assert warning.category is jaxmem.NoStackWarning
    assert warning.filename == __file__
    text = str(warning.message)
    for part in ("unrolled", "test_errors.py", "equations were searched", "checkpointed once"):
        assert part in text
    assert jnp.array_equal(grads, jax.grad(unrolled)(WEIGHTS, H))
    with pytest.warns(jaxmem.NoStackWarning):
        kept = jaxmem.saved_residuals(decorated, WEIGHTS, H)
    assert kept.total_bytes < jaxmem.saved_residuals(unrolled, WEIGHTS, H).total_bytes


def test_gradients_taken_inside_come_before_the_policy() -> None:
    def step(weights: jax.Array, h: jax.Array) -> jax.Array:
        return weights - jax.grad(model)(weights, h)

    with pytest.warns(jaxmem.NoEffectWarning, match="step .* takes gradients itself"):
        changed = jaxmem.remat_sqrt(step)(WEIGHTS, H)
    assert jnp.array_equal(changed, step(WEIGHTS, H))
    for inner in (jaxmem.remat_full, jaxmem.remat_sqrt):
        outer = jaxmem.remat_dots(jax.grad(inner(model)))
        with pytest.warns(jaxmem.NoEffectWarning, match="model .* takes gradients itself"):
            outer(WEIGHTS, H)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(jax.grad(jax.grad(lambda s: jaxmem.remat_sqrt(model)(s * WEIGHTS, H))))(1.0)


def test_plan_without_a_stack() -> None:
    with pytest.raises(ValueError, match="a plan for 5 layers was given for .*has no layer stack"):
        jaxmem.remat(lambda h: h * 2, Plan.full(5))(H)


def test_results_that_are_constant_are_arrays_of_their_types() -> None:
    def with_constants(ws: jax.Array, h: jax.Array) -> Any:
        return model(ws, h), jnp.array(0.0), jnp.int32(3), jnp.ones(2), 4.0

    for decorate in (jaxmem.remat_sqrt, jaxmem.remat_full):
        _, *found = decorate(with_constants)(WEIGHTS, H)
        _, *expected = with_constants(WEIGHTS, H)
        for one, other in zip(found[:3], expected[:3], strict=True):
            assert isinstance(one, jax.Array)
            assert one.aval == other.aval
        assert found[3] == 4.0
        assert isinstance(found[3], float)
        assert jax.jit(decorate(with_constants))(WEIGHTS, H)[1].mean() == 0


def test_names_of_what_is_decorated_have_a_line_and_no_address() -> None:
    class Layer:
        def __call__(self, h: jax.Array) -> jax.Array:
            return h * 2

    def scaled(by: float, h: jax.Array) -> jax.Array:
        return h * by

    for fn, name in (
        (Layer(), "Layer"),
        (functools.partial(Layer()), "Layer"),
        (functools.partial(functools.partial(scaled), 2.0), "scaled"),
    ):
        with pytest.raises(ValueError, match="has no layer stack") as error:
            jaxmem.remat(fn, Plan.full(7))(H)
        says(error, name, "test_errors.py:")
        assert " at 0x" not in str(error.value)


def test_min_length_says_what_it_left_out() -> None:
    with pytest.warns(
        jaxmem.NoStackWarning, match="shorter than min_length=6 met: stack 0: 5 layers"
    ):
        jaxmem.remat_full(model, min_length=6)(WEIGHTS, H)


def test_where_that_chooses_nothing_lists_the_stacks() -> None:
    with pytest.raises(ValueError) as error:
        jaxmem.remat_full(two_stacks, where=lambda stack: stack.length == 7)(WEIGHTS, H)
    says(error, "chooses none", "stack 0: 5 layers", "stack 1: 10 layers", "test_errors.py")
    with pytest.raises(ValueError, match="where=2 chooses none"):
        jaxmem.remat_full(two_stacks, where=2)(WEIGHTS, H)


def test_where_and_min_length_choose() -> None:
    def plans(**options) -> list[str]:
        decorated = jaxmem.remat_full(two_stacks, **options)
        return [found.plan.kind for found in jaxmem.stacks(decorated, WEIGHTS, H)]

    assert plans() == ["full", "full"]
    assert plans(where=1) == ["none", "full"]
    assert plans(where=lambda stack: stack.length == 5) == ["full", "none"]
    assert plans(min_length=6) == ["none", "full"]


def test_effects_that_must_not_happen_twice() -> None:
    def noisy(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        io_callback(lambda _: None, None, h, ordered=True)
        return h * w, None

    with pytest.raises(ValueError) as error:
        jaxmem.scan(noisy, H, jnp.ones((5, 4)), remat="full")
    says(error, "side effects", "cannot be recomputed", "stack 0: 5 layers")


@pytest.mark.parametrize(
    "decorator",
    [jaxmem.remat_full, jaxmem.remat_sqrt, jaxmem.remat_dots, lambda f: jaxmem.remat(f, "revolve")],
)
def test_side_effects_in_code_without_a_stack(decorator: Any) -> None:
    seen = []

    @decorator
    def noisy(h: jax.Array) -> jax.Array:
        for _ in range(6):
            h = jnp.tanh(jnp.sin(h) @ jnp.ones((4, 4)))
        io_callback(seen.append, None, jax.lax.stop_gradient(h))
        return h.sum()

    noisy(jnp.ones((3, 4)))  # evaluated it is what it is
    jax.effects_barrier()
    assert len(seen) == 1
    with pytest.raises(ValueError) as error:
        jax.grad(noisy)(jnp.ones((3, 4)))
    says(error, "noisy (", "has side effects", "nothing in it can be recomputed", "io_callback")


# ---------------------------------------------------------------- scan


def test_carry_errors_name_the_leaf() -> None:
    init = {"h": H, "steps": {"count": jnp.int32(0)}}

    def lost(carry, w):
        return {"h": carry["h"]}, None

    def added(carry, w):
        return {**carry, "extra": H}, None

    def cast(carry, w):
        return {"h": carry["h"], "steps": {"count": jnp.float32(1)}}, None

    def reshaped(carry, w):
        return {"h": jnp.ones((2, 2)), "steps": carry["steps"]}, None

    for wrong, part in (
        (lost, "carry['steps']['count'] was given and not returned"),
        (added, "carry['extra']"),
        (cast, "carry['steps']['count'] came in as int32[] and went out as float32[]"),
        (reshaped, "carry['h'] came in as float32[4] and went out as float32[2,2]"),
    ):
        for remat in ("none", "sqrt"):
            with pytest.raises(TypeError) as error:
                jaxmem.scan(wrong, init, WEIGHTS, remat=remat)
            says(error, part)


def test_layer_must_return_a_pair() -> None:
    with pytest.raises(TypeError, match="must return a pair .carry, y.; it returned"):
        jaxmem.scan(lambda h, w: h @ w, H, WEIGHTS, remat="full")


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"xs\['a'\] has 5 layers, xs\['b'\] has 4"):
        jaxmem.scan(layer, H, {"a": WEIGHTS, "b": WEIGHTS[:4]}, remat="full")
    with pytest.raises(ValueError, match="length= has 7|has 5 layers, length= has 7"):
        jaxmem.scan(layer, H, WEIGHTS, length=7, remat="full")
    with pytest.raises(ValueError, match="needs xs with at least one array, or length="):
        jaxmem.scan(layer, H, remat="full")
    with pytest.raises(ValueError, match=r"xs\[1\] has no leading axis"):
        jaxmem.scan(layer, H, (WEIGHTS, 3.0), remat="full")


def test_two_policies_for_one_scan() -> None:
    with pytest.raises(ValueError, match="two policies for one stack"):
        jaxmem.scan(jaxmem.remat_full(layer), H, WEIGHTS, remat="sqrt")


def test_the_scan_takes_the_policy_of_its_layer() -> None:
    def decorated(weights: jax.Array, h: jax.Array) -> jax.Array:
        return jaxmem.scan(jaxmem.remat_revolve(slots=2)(layer), h, weights)[0].sum()

    (found,) = jaxmem.stacks(decorated, WEIGHTS, H)
    assert found.plan == Plan.revolve(5, slots=2)


def test_offload_on_cpu_warns_at_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.grad(lambda w: jaxmem.scan(layer, H, w, remat="offload")[0].sum())(WEIGHTS)
    assert {warning.category for warning in caught} == {jaxmem.OffloadWarning}
    assert {warning.filename for warning in caught} == {__file__}
    assert "nothing is saved" in str(caught[0].message)


# ---------------------------------------------------------------- things of another kind


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (jaxmem.remat_sqrt, "jaxmem.remat_sqrt is a decorator, not a policy; give the policy's na"),
        (jaxmem.remat_auto, "is a decorator, not a policy; give the policy's name, 'auto'"),
        (jnp.sin, "is no policy: jax calls one with a primitive, any number of arguments"),
        (lambda primitive: True, "is no policy"),
    ],
)
def test_what_is_no_policy_is_refused_where_it_is_given(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        jaxmem.remat(two_stacks, given)
    with pytest.raises(TypeError, match=text), jaxmem.use_policy(given):
        pass


def test_policies_of_jax_and_of_users_are_taken() -> None:
    known = jax.checkpoint_policies
    both = known.save_from_both_policies(known.dots_saveable, known.save_only_these_names("a"))
    some: list[Any] = [known.everything_saveable, both, lambda primitive, *_, **__: True]
    for policy in some:
        jaxmem.remat(two_stacks, policy)
    with pytest.raises(ValueError, match="makes a policy and is none itself"):
        policies.from_jax(known.save_only_these_names)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: jaxmem.remat_full(two_stacks, where="a"), "where takes the index of a stack or"),
        (lambda: jaxmem.value_and_grad(3), "value_and_grad takes a function, got an object of"),  # pyright: ignore[reportArgumentType]
        (lambda: jaxmem.AdamA("a"), "AdamA: learning_rate is a number or a schedule"),  # pyright: ignore[reportArgumentType]
        (lambda: jaxmem.stacks(3), "stacks takes a function and its arguments, got an object of"),  # pyright: ignore[reportArgumentType]
        (
            lambda: jaxmem.fit(two_stacks, WEIGHTS, H, budget=None),  # pyright: ignore[reportArgumentType]
            "budget: a size is a number of bytes or a text",
        ),
        (
            lambda: jaxmem.memory_report(two_stacks, WEIGHTS, H, compiler_options={"a": []}),
            "compiler_options: a is a text, a number, True or False, got an object of type list",
        ),
        (
            lambda: jaxmem.memory_report(two_stacks, WEIGHTS, H, donate_argnums="x"),  # pyright: ignore[reportArgumentType]
            "donate_argnums takes positions of arguments, whole numbers, got 'x'",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused_at_once(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


@pytest.mark.parametrize("target", ["local", "h100-80g"])
def test_options_that_a_compiler_does_not_know(target: str) -> None:
    with pytest.raises(ValueError, match="compiler_options: No such compile option: 'xla_gpuu'"):
        jaxmem.memory_report(
            two_stacks, WEIGHTS, H, target=target, compiler_options={"xla_gpuu": True}
        )


def test_a_batch_without_rows() -> None:
    step = jaxmem.value_and_grad(lambda p, b: (p * b).mean(), microbatches=2)
    with pytest.raises(ValueError, match=r"the batch has no rows \(b is float32\[0, 3\]\)"):
        step(jnp.ones(3), jnp.ones((0, 3)))


def test_misspelt_options_are_not_blamed_on_the_function() -> None:
    for call in (jaxmem.fit, jaxmem.memory_report, jaxmem.frontier):
        some: dict[str, Any] = {"budget": "1GiB"} if call is jaxmem.fit else {}
        with pytest.raises(
            TypeError, match=r"two_stacks takes no argument 'timeou', .* did you mean timeout=\?"
        ):
            call(jaxmem.remat_auto(two_stacks), WEIGHTS, H, timeou=3, **some)


def test_keywords_that_a_wrapper_takes_reach_it() -> None:
    @functools.wraps(two_stacks)
    def wrapper(*args: Any, **rest: Any) -> Any:
        assert rest.keys() == {"targets"}
        return two_stacks(*args)

    both: list[Any] = [wrapper, functools.partial(wrapper)]
    for call in both:
        jaxmem.memory_report(call, WEIGHTS, H, targets=jnp.ones(3), suggest=False)


def test_positions_are_any_whole_numbers() -> None:
    some: list[Any] = [0, [0], range(1), np.array([0]), np.int64(0), frozenset([0])]
    for donate in some:
        report = jaxmem.memory_report(lambda h: h + 1, H, donate_argnums=donate, suggest=False)
        assert report.alias_bytes == report.output_bytes


def test_all_options_are_known() -> None:
    found: set[str] = set()
    for call in (jaxmem.fit, jaxmem.memory_report, jaxmem.frontier):
        parameters = inspect.signature(call).parameters.values()
        found.update(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
    assert set(OPTIONS) == found


def test_code_without_a_scan_has_no_stacks() -> None:
    def loop(ws: Any, h: Any) -> Any:
        for w in ws:
            h = jnp.tanh(h @ w)
        return h.sum()

    assert jaxmem.stacks(jaxmem.remat_sqrt(loop), list(jnp.ones((8, 4, 4))), jnp.ones((2, 4))) == []
