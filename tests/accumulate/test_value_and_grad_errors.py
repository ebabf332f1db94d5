"""What `jaxmem.value_and_grad` refuses, and how it says so."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.grads import BATCH, F, W, X, Y, errors, masked_loss, mean_loss

import jaxmem
from jaxmem import Weighted


def raised(fun: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: jaxmem.value_and_grad(fun, **{"microbatches": 4, **options})(
        *(args or (W, BATCH))
    )


def with_aux(aux: Any) -> Callable[..., Any]:
    return lambda w, batch: (mean_loss(w, batch), aux(w, batch))


def carrying(new: Any) -> Callable[..., Any]:
    def fun(w: Any, batch: Any, state: Any) -> Any:
        return mean_loss(w, batch), new(state)

    return fun


STATE = {"a": jnp.zeros(3), "b": jnp.int32(0)}
CARRY: dict[str, Any] = {"has_aux": True, "carry_argnums": 2, "aux": "carry"}
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rows differ": (
        raised(mean_loss, W, {"x": X, "y": Y[:12]}),
        ValueError,
        "the batch has 13 rows in batch/x, float32[13, 3], and 12 in batch/y, float32[12, 4]; its "
        "leading axes must be equal (a value that all rows share can have no axes, or be another "
        "argument)",
    ),
    "rows of two arguments differ": (
        raised(lambda w, x, y: (x @ w).mean(), jnp.ones(F), X, Y[:5], batch_argnums=(1, 2)),
        ValueError,
        "the batch has 13 rows in x, float32[13, 3], and 5 in y, float32[5, 4]",
    ),
    "too many microbatches": (
        raised(mean_loss, microbatches=14),
        ValueError,
        "microbatches=14 is more than the 13 rows of the batch (batch/mask is float32[13]); pass "
        "at most 13, or a larger batch",
    ),
    "no batch": (
        raised(lambda w, x: w.sum(), jnp.ones(F), jnp.float32(1)),
        ValueError,
        "no array with axes is in the arguments (1,) that batch_argnums names, so there is nothing "
        "to split; pass batch_argnums= of the batch",
    ),
    "no microbatches": (
        raised(mean_loss, microbatches=0),
        ValueError,
        "microbatches must be at least 1, got 0",
    ),
    "half a microbatch": (raised(mean_loss, microbatches=2.5), TypeError, "microbatches must be"),
    "accumulator of integers": (
        raised(mean_loss, accumulator_dtype=jnp.int32),
        ValueError,
        "accumulator_dtype must be a floating-point dtype, such as jax.numpy.float32, got int32: "
        "sums of gradients cannot be held in it",
    ),
    "accumulator of nothing": (
        raised(mean_loss, accumulator_dtype="wide"),
        TypeError,
        "accumulator_dtype must be a floating-point dtype, such as jax.numpy.float32, got 'wide' "
        "of type str",
    ),
    "gradients of integers": (
        raised(mean_loss, gradient_dtype=bool),
        ValueError,
        "gradient_dtype must be a floating-point dtype",
    ),
    "argnums out of range": (
        raised(mean_loss, argnums=2),
        TypeError,
        "argnums names argument 2, and mean_loss was called with 2 positional arguments; pass it "
        "by position, or name the right one in argnums=",
    ),
    "batch out of range": (
        raised(mean_loss, batch_argnums=-3),
        TypeError,
        "batch_argnums names argument -3, and mean_loss was called with 2 positional arguments",
    ),
    "argnums of words": (
        raised(mean_loss, argnums="w"),
        TypeError,
        "argnums must be positions of arguments, such as 1 or (1, 2), got ",
    ),
    "two roles": (
        raised(mean_loss, rng_argnums=1),
        ValueError,
        "argument 1 is in batch_argnums and in rng_argnums; it can be only one of them",
    ),
    "parameters carried": (
        raised(mean_loss, W, BATCH, has_aux=True, aux="carry", carry_argnums=0),
        ValueError,
        "argument 0 is in argnums and in carry_argnums; it can be only one of them",
    ),
    "text carried": (
        raised(mean_loss, W, BATCH, {"step": "first"}, **CARRY),
        TypeError,
        "'first' of type str, and a carried argument is made of arrays; pass it in another",
    ),
    "integer parameters": (
        raised(mean_loss, {"kernel": jnp.ones((F, 4), int), "scale": jnp.ones(4)}, BATCH),
        TypeError,
        "w/kernel is int32[3, 4], which has no gradient; pass argnums= of floating-point arguments "
        "only. Where an argument holds others as well, partition it (as equinox.partition "
        "does), pass the rest as an argument of its own, and combine both in the function",
    ),
    "words among parameters": (
        raised(mean_loss, W | {"name": "net"}, BATCH),
        TypeError,
        "w/name is 'net' of type str, which has no gradient",
    ),
    "no key": (
        raised(lambda w, x, key: (x @ w).mean(), jnp.ones(F), X, 42, rng_argnums=2),
        TypeError,
        "key is 42 of type int, and rng_argnums names random keys; pass one of jax.random.key",
    ),
    "a vector loss": (
        raised(lambda w, batch: errors(w, batch)),
        TypeError,
        "<lambda> must return its mean loss as a real floating-point scalar, or a "
        "jaxmem.Weighted(total, weight), got float32[4]",
    ),
    "a complex loss": (
        raised(lambda w, batch: mean_loss(w, batch) * 1j),
        TypeError,
        "must return its mean loss as a real floating-point scalar, or a jaxmem.Weighted(total, "
        "weight), got complex64[]",
    ),
    "an integer loss": (raised(lambda w, batch: jnp.int32(1)), TypeError, "got int32[]"),
    "no loss": (raised(lambda w, batch: None), TypeError, "got None of type NoneType"),
    "an integer total": (
        raised(lambda w, batch: Weighted(jnp.int32(1), 1)),
        TypeError,
        "must return its mean loss as a real floating-point scalar",
    ),
    "aux unasked for": (
        raised(with_aux(lambda w, batch: 1)),
        TypeError,
        "<lambda> returned 2 values; pass has_aux=True if the first is the loss",
    ),
    "aux asked for": (
        raised(mean_loss, has_aux=True),
        TypeError,
        "has_aux=True wants mean_loss to return a pair (loss, aux), got float32[]",
    ),
    "three values": (
        raised(lambda w, batch: (1.0, 2, 3), has_aux=True),
        TypeError,
        "to return a pair (loss, aux), got 3 values",
    ),
    "a weight of NaN": (
        raised(lambda w, batch: Weighted(mean_loss(w, batch), batch["mask"].sum() - jnp.nan)),
        ValueError,
        "the weight of a microbatch is negative or NaN; jaxmem.Weighted(total, weight) wants the "
        "number of tokens or examples that count, which is at least 0",
    ),
    "one negative weight": (
        raised(lambda w, batch: Weighted(mean_loss(w, batch), batch["x"][0, 0])),
        ValueError,
        "the weight of a microbatch is negative or NaN",
    ),
    "a negative weight of several": (
        raised(lambda w, batch: masked_loss(w, batch) + Weighted(1.0, -batch["mask"].sum())),
        ValueError,
        "the weight of a microbatch is negative or NaN",
    ),
    "a known negative weight": (
        raised(lambda w, batch: Weighted(mean_loss(w, batch), -4)),
        ValueError,
        "Weighted: weight must be at least 0 and finite, got -4.0",
    ),
    "a weight per row": (
        raised(lambda w, batch: Weighted(mean_loss(w, batch), batch["mask"])),
        ValueError,
        "Weighted: weight must be a scalar, got float32[4]; pass the number of tokens or examples",
    ),
    "a string in the aux": (
        raised(with_aux(lambda w, batch: {"acc": 1.0, "name": "a"}), has_aux=True),
        TypeError,
        "an auxiliary output of several microbatches must be an array; name is 'a' of type str",
    ),
    "an unknown word": (
        raised(mean_loss, has_aux=True, aux={"acc": "average"}),
        ValueError,
        "aux must be made of 'stack', 'concat', 'sum', 'mean', 'last', 'carry', in a tree that "
        "begins as fun's auxiliary outputs do; got 'average'",
    ),
    "words of another tree": (
        raised(with_aux(lambda w, batch: {"loss": 1.0}), has_aux=True, aux={"acc": "mean"}),
        ValueError,
        "aux={'acc': 'mean'} does not fit what fun returns next to the loss",
    ),
    "concat of something else": (
        raised(with_aux(lambda w, batch: {"a": w["scale"][:2]}), has_aux=True, aux="concat"),
        ValueError,
        '"concat" wants one entry per example, and aux/a is float32[2] for a microbatch of 4; pass '
        "another word for it in aux=",
    ),
    "concat of scalars": (
        raised(with_aux(lambda w, batch: jnp.float32(1)), has_aux=True, aux="concat"),
        ValueError,
        '"concat" wants one entry per example, and aux is float32[] for a microbatch of 4',
    ),
    "mean of keys": (
        raised(with_aux(lambda w, batch: jax.random.key(0)), has_aux=True, aux="mean"),
        TypeError,
        '"mean" wants numbers, and aux is key<fry>[]',
    ),
    "sum of keys": (
        raised(with_aux(lambda w, batch: jax.random.key(0)), has_aux=True, aux="sum"),
        TypeError,
        '"sum" wants numbers, and aux is key<fry>[]',
    ),
    "carry without aux": (
        raised(mean_loss, W, BATCH, STATE, carry_argnums=2),
        ValueError,
        'carry_argnums=(2,) wants as many "carry" in aux=, and has_aux=True: each microbatch '
        "returns, after the loss, what the next one gets; got aux='stack' and has_aux=False",
    ),
    "carry of another dtype": (
        raised(carrying(lambda s: s | {"a": s["a"].astype(jnp.float16)}), W, BATCH, STATE, **CARRY),
        ValueError,
        "a carried argument must keep its form from microbatch to microbatch: what fun returns for "
        "argument 2 has a as float16 and the argument as float32",
    ),
    "carry of another shape": (
        raised(carrying(lambda s: s | {"a": s["a"][:2]}), W, BATCH, STATE, **CARRY),
        ValueError,
        "what fun returns for argument 2 has a as float32[2] and the argument as float32[3]",
    ),
    "carry of another structure": (
        raised(carrying(lambda s: {"a": s["a"]}), W, BATCH, STATE, **CARRY),
        ValueError,
        "the argument has b, which what fun returns for argument 2 lacks",
    ),
    "a sharding of words": (
        raised(mean_loss, batch_sharding="data"),
        TypeError,
        "batch_sharding must be a jax.sharding.NamedSharding or PartitionSpec, got 'data'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_a_negative_weight_is_nan_under_jit() -> None:
    def loss(w: Any, batch: Any) -> Weighted:
        return Weighted(mean_loss(w, batch), batch["mask"].sum() - 2)

    value, gradient = jax.jit(jaxmem.value_and_grad(loss, microbatches=4))(W, BATCH)
    assert np.isnan(value)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_the_functions_own_errors_come_through() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
        jaxmem.value_and_grad(mean_loss, batch_argnums=0)(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        jaxmem.value_and_grad(mean_loss, microbatches=4)(W, BATCH, mask=1)
