"""What `jaxmem.value_and_update` refuses or warns of, and how it says so."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers.updating import PARAMS, TOKENS, D, assert_alike, language_loss, ordinary

import jaxmem

ADAM = optax.adam(0.01)


def raised(
    fun: Any = language_loss,
    optimizer: Any = ADAM,
    params: Any = PARAMS,
    state: Any = None,
    **options: Any,
) -> Callable[[], Any]:
    def call() -> Any:
        step = jaxmem.value_and_update(fun, optimizer, **options)
        return step(params, ADAM.init(PARAMS) if state is None else state, TOKENS)

    return call


def changing(
    of_gradients: Callable[[Any], Any], of_state: Callable[[Any], Any] = lambda state: state
) -> Any:
    """A transformation that returns this of gradients, and of a state like the parameters."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (of_gradients(updates), of_state(state)),
    )


def own(optimizer: Any, **options: Any) -> Callable[[], Any]:
    return raised(optimizer=optimizer, state=optimizer.init(PARAMS), **options)


def in_net(tx: Any, given: Any = None) -> Callable[[], Any]:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((3, D, D)))

    def call() -> Any:
        model = Net()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param) if given is None else given
        return jaxmem.value_and_update(lambda net: net.w[...].sum(), ADAM)(model, optimizer)

    return call


ALONE: Any = lambda gradients, state, params=None: gradients  # noqa: E731
NUMBERS = PARAMS | {"table": {"ids": jnp.arange(3)}}
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no function": (
        raised(fun=3),
        TypeError,
        "value_and_update takes a function, got an object of type int",
    ),
    "no transformation": (
        raised(optimizer=optax.adam),
        TypeError,
        "value_and_update takes an optax transformation, such as optax.adamw(1e-3), got <function",
    ),
    "AdamA": (
        raised(optimizer=jaxmem.AdamA(1e-3)),
        TypeError,
        "value_and_update takes an optax transformation, such as optax.adamw(1e-3), got ",
    ),
    "no passes": (raised(passes=0), ValueError, "passes must be at least 1, got 0"),
    "half a pass": (raised(passes=1.5), TypeError, "passes must be a whole number"),
    "no microbatches": (raised(microbatches=0), ValueError, "microbatches must be at least 1"),
    "too many microbatches": (
        raised(microbatches=7),
        ValueError,
        "microbatches=7 is more than the 6 rows of the batch",
    ),
    "accumulator of integers": (
        raised(accumulator_dtype=int),
        ValueError,
        "accumulator_dtype must be a floating-point dtype",
    ),
    "weight of a batch as it is": (
        raised(return_weight=True),
        ValueError,
        "return_weight=True is for a batch in microbatches; pass microbatches=1, or leave it out",
    ),
    "parameters as batch": (
        raised(microbatches=2, batch_argnums=0),
        ValueError,
        "batch_argnums names argument 0, the parameters; pass the positions of the batch among "
        "fun's arguments, 1 for the one after the parameters",
    ),
    "parameters as batch, counted from the end": (
        raised(microbatches=2, batch_argnums=(-1, -2)),
        ValueError,
        "batch_argnums names argument 0, the parameters",
    ),
    "state of other parameters": (
        raised(state=ADAM.init(PARAMS["layers"])),
        ValueError,
        "the state is not of this optimizer and these parameters: the state has 0/mu/b, which what "
        "optimizer.init(params) returns lacks; pass what optimizer.init(params) returned, or what "
        "a step before did",
    ),
    "state of other shapes": (
        raised(state=ADAM.init(PARAMS | {"embed": jnp.ones((3, D))})),
        ValueError,
        "the state has 0/mu/embed as float32[3, 5] and what optimizer.init(params) returns as "
        "float32[7, 5]",
    ),
    "state of another optimizer": (
        raised(optimizer=optax.sgd(0.1, 0.9)),
        ValueError,
        "the state is not of this optimizer and these parameters: the state has 0/count, which",
    ),
    "no state": (
        lambda: jaxmem.value_and_update(language_loss, ADAM)(PARAMS, None, TOKENS),
        ValueError,
        "what optimizer.init(params) returns has 0/count, which the state lacks",
    ),
    "integer parameters": (
        raised(params=NUMBERS),
        TypeError,
        "params/table/ids is int32[3], which has no gradient; pass a tree of floating-point arrays "
        "as the parameters, and what else the function reads as another argument",
    ),
    "integer parameters, in microbatches": (
        raised(params=NUMBERS, microbatches=2),
        TypeError,
        "params/table/ids is int32[3], which has no gradient; pass a tree",
    ),
    "words among parameters": (
        raised(params=PARAMS | {"name": "net"}),
        TypeError,
        "params/name is 'net' of type str, which has no gradient",
    ),
    "another tree of updates": (
        own(changing(lambda g: {"a": g})),
        ValueError,
        "the optimizer changes the form of what it is given: the tree of updates has a/embed, "
        "which that of the parameters lacks; value_and_update updates arrays in their places, and "
        "needs a transformation that keeps their form",
    ),
    "other shapes of updates": (
        own(changing(lambda g: jax.tree.map(lambda x: x[:1], g))),
        ValueError,
        "the tree of updates has embed as float32[1, 5] and that of the parameters as float32[7, 5",
    ),
    "other shapes of state": (
        own(changing(lambda g: g, lambda own: jax.tree.map(lambda x: x[None], own))),
        ValueError,
        "the state after a step has embed as float32[1, 7, 5] and that before it as float32[7, 5]",
    ),
    "no pair": (
        own(optax.GradientTransformation(lambda params: (), ALONE)),
        TypeError,
        "the optimizer's update has to return a pair of updates and state, got an object of type "
        "dict",
    ),
    "a line search": (
        own(optax.lbfgs()),
        TypeError,
        "the optimizer's update fails when called as value_and_update does, with gradients, state, "
        "parameters and value=: ",
    ),
    "a function to be evaluated": (
        own(optax.contrib.sophia(0.01)),
        TypeError,
        "obj_fn must be provided to hutchinson update function.  One that evaluates the loss "
        "itself, such as optax.lbfgs with its line search, needs the ordinary step",
    ),
    "two values": (
        raised(fun=lambda params, tokens: (language_loss(params, tokens), 1)),
        TypeError,
        "<lambda> returned 2 values; pass has_aux=True if the first is the loss",
    ),
    "no aux": (
        raised(has_aux=True),
        TypeError,
        "has_aux=True wants language_loss to return a pair (loss, aux), got float32[]",
    ),
    "a vector": (
        raised(fun=lambda params, tokens: jnp.ones(3)),
        TypeError,
        "<lambda> must return its mean loss as a real floating-point scalar, or a "
        "jaxmem.Weighted(total, weight), got float32[3]",
    ),
    "an integer": (raised(fun=lambda params, tokens: jnp.int32(1)), TypeError, "got int32[]"),
    "no loss": (raised(fun=lambda params, tokens: None), TypeError, "got None of type NoneType"),
    "an nnx.Optimizer of another": (
        in_net(optax.adam(0.01)),
        ValueError,
        "the nnx.Optimizer was made with another optimizer than this step, of type "
        "GradientTransformationExtraArgs; pass the same one to both",
    ),
    "a module with a plain state": (
        in_net(ADAM, given=()),
        TypeError,
        "an NNX module is followed by its nnx.Optimizer, got () of type tuple; pass "
        "nnx.Optimizer(model, optimizer, wrt=nnx.Param)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_pass(case: str) -> None:
    call, kind, text = ERRORS[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_errors_of_the_function_and_of_the_optimizer_come_through() -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("mine")

    for call in (raised(fun=broken), own(changing(broken))):
        with pytest.raises(ZeroDivisionError, match="mine"):
            call()
    number = changing(lambda g: jax.tree.map(lambda x: x if float(x.sum()) > 0 else -x, g))
    with pytest.raises(jax.errors.ConcretizationTypeError):
        own(number)()


def test_a_step_that_saves_nothing_is_warned_of_at_the_users_line() -> None:
    def loss(params: Any) -> jax.Array:
        return jnp.square(params["w"]).sum()

    params = {"w": jnp.ones((3, 4))}
    step = jaxmem.value_and_update(loss, ADAM)
    said = re.escape(
        "value_and_update: no parameter is updated in the backward pass, so that nothing is saved "
        "(w: it is not stacked over the layers of one scan that alone reads it).  Parameters of "
        "layers are stacked where these run in a jax.lax.scan (nn.scan, nnx.scan, jaxmem.scan)"
    )
    with pytest.warns(jaxmem.JaxmemWarning, match=said) as caught:
        ours = step(params, ADAM.init(params))
    assert [warning.filename for warning in caught] == [__file__]
    assert_alike(ours, ordinary(loss, ADAM)(params, ADAM.init(params)))
    with pytest.warns(jaxmem.JaxmemWarning, match="there are no parameters"):
        value, params, _ = jaxmem.value_and_update(lambda params: jnp.float32(2), ADAM)(
            {}, ADAM.init({})
        )
    assert (float(value), params) == (2, {})


def test_multisteps_of_jaxmem_and_narrow_state_go_the_ordinary_way() -> None:
    several = jaxmem.MultiSteps(ADAM, 2)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, ADAM.init(PARAMS))
    for optimizer, state in ((several, several.init(PARAMS)), (ADAM, narrow)):
        step = jaxmem.value_and_update(language_loss, optimizer)
        with pytest.warns(jaxmem.JaxmemWarning, match="no parameter is updated"):
            ours = jax.jit(step)(PARAMS, state, TOKENS)
        theirs = jax.jit(ordinary(language_loss, optimizer))(PARAMS, state, TOKENS)
        assert_alike(ours, theirs)
