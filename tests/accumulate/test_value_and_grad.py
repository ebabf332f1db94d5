"""`jaxmem.value_and_grad`: the gradient of the whole batch, whatever its microbatches are."""

import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updating
from helpers.grads import (
    BATCH,
    MASK,
    F,
    W,
    X,
    Y,
    errors,
    masked_loss,
    mean_loss,
    microbatches_of,
    near,
    normal,
    ours_of,
    terms_loss,
    whole,
)
from helpers.menagerie import assert_same, exact_jit
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem import Weighted
from jaxmem.accumulate.split import Split
from jaxmem.hlo import text as hlo
from jaxmem.hlo.flops import matmul_flops

TINY = settings(derandomize=True, max_examples=10)
COMPILED = settings(TINY, max_examples=5)  # where each example is a program of its own

# ---------------------------------------------------------------- any tree, any batch

LEAVES = st.sampled_from([(), (F,), (F, 1), (F, 5)])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])


@st.composite
def problems(draw: Any, dtypes: Any = None) -> Any:
    """Parameters, a batch, and how many microbatches to make of it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def leaf(shape: Any) -> jax.Array:
        dtype = draw(dtypes) if dtypes is not None else "float32"
        return jnp.asarray(rng.uniform(-1, 1, shape), dtype)

    is_shape = lambda node: isinstance(node, tuple) and all(isinstance(n, int) for n in node)  # noqa: E731
    params = jax.tree.map(leaf, draw(TREES), is_leaf=is_shape)
    rows = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 19, 20]))
    weights = draw(st.lists(st.sampled_from([0, 0, 1, 2, 0.5]), min_size=rows, max_size=rows))
    batch = {
        "x": [leaf((rows, F))],
        "weight": jnp.asarray(weights, jnp.float32),
        "shared": leaf(()),
        "nothing": None,
    }
    return params, batch, draw(st.integers(1, rows))


def row_losses(params: Any, batch: Any) -> jax.Array:
    """One number per row, of parameters of any tree."""
    (x,) = batch["x"]
    total = 0
    for number, leaf in enumerate(jax.tree.leaves(params), 1):
        value = leaf * x[:, 0] ** 2 if leaf.ndim == 0 else jnp.tanh(number * x @ leaf)
        value = value + batch["shared"].astype(value.dtype) * value**2
        total = total + value.reshape(len(x), -1).sum(-1).astype(jnp.float32)
    return jnp.asarray(total)


def mean_of_rows(params: Any, batch: Any) -> jax.Array:
    return row_losses(params, batch).mean()


def weighted_rows(params: Any, batch: Any) -> Weighted:
    """A mean that is 0 / 0 where a microbatch has no weight."""
    weight = batch["weight"].sum()
    mean = (row_losses(params, batch) * batch["weight"]).sum() / weight
    return Weighted(mean * weight, weight)


def two_of_rows(params: Any, batch: Any) -> Weighted:
    losses, weights = row_losses(params, batch), batch["weight"]
    return Weighted((losses * weights).sum(), weights.sum()) + 0.3 * Weighted(
        jnp.square(losses).sum(), losses.size
    )


LOSSES = [mean_of_rows, weighted_rows, two_of_rows]


@pytest.mark.parametrize("fun", LOSSES, ids=lambda fun: fun.__name__)
@COMPILED
@given(problem=problems())
def test_equals_the_whole_batch(fun: Callable[..., Any], problem: Any) -> None:
    params, batch, m = problem
    value, gradient = exact_jit(jaxmem.value_and_grad(fun, microbatches=m))(params, batch)
    assert value.dtype == jnp.float32
    chex.assert_tree_all_finite((value, gradient))
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, params)
    # Of numpy: jax would compile every operation for every shape.
    if fun is weighted_rows and not np.asarray(batch["weight"]).any():
        expected = np.zeros(()), jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    else:
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, batch))
            expected = exact_jit(whole(fun))(*wide)
    # Sums of at most 20 rows, each of them of order 1 to 10.
    near((value, gradient), expected, 1e-5)


@pytest.mark.parametrize("fun", [mean_of_rows, weighted_rows], ids=lambda fun: fun.__name__)
@COMPILED
@given(problem=problems(dtypes=DTYPES))
def test_in_low_precision_it_sums_what_jax_gives_in_float32(
    fun: Callable[..., Any], problem: Any
) -> None:
    params, batch, m = problem
    value, gradient = exact_jit(jaxmem.value_and_grad(fun, microbatches=m))(params, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves((value, gradient))} == {jnp.dtype("float32")}
    chex.assert_tree_all_finite((value, gradient))
    reference = exact_jit(whole(fun))
    total = np.zeros(())
    sums = sizes = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    weights = np.asarray(batch["weight"], np.float64) if fun is weighted_rows else None
    count = batch["weight"].size if weights is None else weights.sum()
    x, row_weights = np.asarray(batch["x"][0]), np.asarray(batch["weight"])
    for rows in microbatches_of(batch["weight"].size, m):
        weight = len(rows) if weights is None else weights[rows].sum()
        if not weight:
            continue
        own = batch | {"x": [x[rows]], "weight": row_weights[rows]}
        mean, grads = reference(params, own)
        total = total + float(mean) * weight
        grads = jax.tree.map(lambda g, w=weight: np.asarray(g, np.float64) * w, grads)
        sums = jax.tree.map(np.add, sums, grads)
        sizes = jax.tree.map(lambda old, g: old + np.abs(g), sizes, grads)
    near(value, total / (count or 1), 1e-5)
    # The sum of a mean's gradient, or of a total's: they are rounded in other places, once each.
    unit = 1e-6 if weights is None else 2.0**-6

    def compare(ours: Any, theirs: Any, scale: Any) -> None:
        bound = unit * scale / (count or 1) + 1e-6
        assert (np.abs(np.asarray(ours) - theirs / (count or 1)) <= bound).all()

    jax.tree.map(compare, gradient, sums, sizes)


@TINY
@given(rows=st.integers(1, 40), data=st.data())
def test_each_row_is_in_one_microbatch(rows: int, data: Any) -> None:
    m = data.draw(st.integers(1, rows))
    split = Split.of(rows, m)
    assert split.rows == rows == sum(split.sizes)
    assert split.microbatches == m
    assert max(split.sizes) - min(split.sizes) <= 1
    dealt = jax.jit(lambda rows: [part for _, part in split.dealt(rows)])
    seen = [np.asarray(part) for part in dealt(np.arange(rows))]
    found = [part[:, j] for part in seen for j in range(part.shape[1])]
    for ours, expected in zip(found, microbatches_of(rows, m), strict=True):
        np.testing.assert_array_equal(ours, expected)
    back = jax.jit(split.collected)([np.swapaxes(part, 0, 1) for part in seen])
    np.testing.assert_array_equal(back, np.arange(rows))


# ---------------------------------------------------------------- what other tools got wrong


def test_microbatches_of_4_and_16_tokens() -> None:
    x = normal(2, 2, 16, F)
    mask = jnp.asarray(np.arange(16) < np.array([[4], [16]]), jnp.float32)

    def loss(w: jax.Array, batch: Any) -> Weighted:
        error = jnp.square(jnp.tanh(batch["x"] @ w) - 0.5) * batch["mask"]
        return Weighted(error.sum(), batch["mask"].sum())

    w, batch = jnp.ones(F), {"x": x, "mask": mask}
    expected = whole(loss)(w, batch)
    near(ours_of(loss, microbatches=2)(w, batch), expected)
    naive = [
        whole(loss)(w, jax.tree.map(lambda leaf, k=k: leaf[k : k + 1], batch))[1] for k in (0, 1)
    ]
    wrong = (naive[0] + naive[1]) / 2
    assert np.linalg.norm(wrong - expected[1]) > 0.05 * np.linalg.norm(expected[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_4096_ones_are_4096(dtype: str) -> None:
    w, x = jnp.ones((), dtype), jnp.ones(4096, dtype)

    def of(fun: Callable[..., Any], **options: Any) -> Any:
        return jax.jit(jaxmem.value_and_grad(fun, microbatches=4096, **options))(w, x)[1]

    # Their mean is 1; added up in bfloat16 they would come to 256, in float16 to 2048.
    total = of(lambda w, x: Weighted((w * x).sum(), x.size))
    assert (float(total), total.dtype) == (1, jnp.float32)
    assert float(of(lambda w, x: (w * x).mean())) == 1
    low = of(lambda w, x: (w * x).mean(), gradient_dtype=dtype)
    assert (float(low), low.dtype) == (1, jnp.dtype(dtype))
    stuck = of(lambda w, x: (w * x).mean(), accumulator_dtype=dtype)
    assert float(stuck) in (256 / 4096, 2048 / 4096)


def division(w: jax.Array, batch: Any) -> Weighted:
    weight = batch["mask"].sum()
    return Weighted((batch["mask"] * (batch["x"] @ w) ** 2).sum() / weight * weight, weight)


def attention(w: jax.Array, batch: Any) -> Weighted:
    """Each row attends to the rows that are not masked: of none, the softmax is NaN."""
    scores = jnp.where(batch["mask"] > 0, batch["x"] @ w, -jnp.inf)
    mixed = jax.nn.softmax(scores) @ batch["x"]
    return Weighted(jnp.square(mixed).sum() * batch["mask"].sum(), batch["mask"].sum())


def logarithm(w: jax.Array, batch: Any) -> Weighted:
    value = jnp.log(batch["mask"].sum() * jnp.square(w).sum())
    return Weighted(jnp.where(batch["mask"].sum() > 0, value, jnp.inf), batch["mask"].sum())


@pytest.mark.parametrize(
    ("fun", "jit"),
    [
        pytest.param(division, False, id="division-eager"),
        *(pytest.param(fun, True, id=fun.__name__) for fun in (division, attention, logarithm)),
    ],
)
def test_a_masked_microbatch_does_no_harm(fun: Callable[..., Any], jit: bool) -> None:
    w, x = jnp.array([0.5, -1.0, 2.0]), normal(3, 12, F)
    mask = jnp.asarray(np.arange(12) % 4 != 1, jnp.float32)  # the second of four
    kept = np.arange(12)[np.asarray(mask) > 0]
    ours = jaxmem.value_and_grad(fun, argnums=(0, 1), microbatches=4)
    value, (gradient, rows) = (jax.jit(ours) if jit else ours)(w, {"x": x, "mask": mask})
    three = ours_of(fun, microbatches=3)(w, {"x": x[kept], "mask": mask[kept]})
    near((value, gradient), three)
    chex.assert_tree_all_finite(rows)
    assert not rows["x"][1::4].any()
    assert rows["x"][0::4].any() or fun is logarithm


def test_nan_of_the_inputs_is_not_hidden() -> None:
    bad = BATCH | {"x": X.at[4, 0].set(jnp.nan)}
    for fun in (mean_loss, masked_loss, terms_loss):
        value, gradient = ours_of(fun)(W, bad)
        assert np.isnan(value)
        assert np.isnan(gradient["kernel"]).any()


@pytest.mark.slow
def test_a_batch_without_weight_is_zeros_and_says_so() -> None:
    weighed = functools.cache(functools.partial(ours_of, return_weight=True))

    def both(fun: Callable[..., Any], batch: Any, jit: bool = True) -> Any:
        eager = jaxmem.value_and_grad(fun, microbatches=4, return_weight=True)
        return (weighed(fun) if jit else eager)(W, batch)

    for jit in (True, False):
        (value, aux), gradient = both(masked_loss, BATCH | {"mask": jnp.zeros(13)}, jit)
        assert float(value) == 0
        assert (bool(aux.empty), float(aux.weight), aux.aux) == (True, 0, None)
        assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
    (_, aux), _ = both(masked_loss, BATCH)
    assert (bool(aux.empty), float(aux.weight)) == (False, 8)
    (_, aux), _ = both(terms_loss, BATCH)
    assert [float(weight) for weight in aux.weight] == [8, 13, 4]
    assert not aux.empty
    (_, aux), gradient = both(terms_loss, BATCH | {"mask": jnp.zeros(13)})
    assert not aux.empty
    chex.assert_tree_all_finite(gradient)
    (_, aux), _ = both(mean_loss, BATCH)
    assert (bool(aux.empty), float(aux.weight)) == (False, 13)


def test_the_sum_of_a_narrow_dtype_does_not_overflow() -> None:
    """The gradient of the mean is 20, that of the sum is 327680: too much for float16."""
    w, x = jnp.ones(F, jnp.float16), jnp.full((2**14, F), 20, jnp.float16)

    def loss(w: jax.Array, x: jax.Array) -> Weighted:
        return Weighted((x @ w).astype(jnp.float32).sum(), len(x))

    near(ours_of(loss, microbatches=2)(w, x), whole(loss)(w, x))


# ---------------------------------------------------------------- weights first


def products(fun: Callable[..., Any], *args: Any) -> int:
    """Operations of matrix products in the compiled program."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    assert text is not None
    found, _, unknown = matmul_flops(hlo.parse(text))
    assert not unknown
    return found


@pytest.mark.parametrize("m", [4, 5])
def test_weights_from_masks_are_summed_without_the_model(m: int) -> None:
    """Both passes are in the program; only one of them has products in it."""
    batch = {"x": normal(0, 20, 64), "y": normal(1, 20, 32), "mask": jnp.ones(20)}
    w = {"kernel": normal(2, 64, 32), "scale": jnp.ones(32)}
    each = 20 * 64 * 32 * 2
    plain = products(whole(masked_loss), w, batch)
    assert plain == 2 * each  # no gradient of x is wanted

    def penalised(w: Any, batch: Any) -> Weighted:
        return masked_loss(w, batch) + 0.1 * Weighted(jnp.square(w["kernel"]).sum(), 1)

    for fun in (mean_loss, masked_loss, penalised):
        assert products(jaxmem.value_and_grad(fun, microbatches=m), w, batch) == plain

    def of_the_model(w: Any, batch: Any) -> Weighted:
        found = errors(w, batch)
        return Weighted(found.sum(), (found > 1).sum()) + Weighted(jnp.square(w["scale"]).sum(), 1)

    twice = products(jaxmem.value_and_grad(of_the_model, microbatches=m), w, batch)
    assert twice == plain + each


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("m", [1, 2, 4, 5, 13])
def test_a_ragged_remainder_is_exact(m: int) -> None:
    for fun in (mean_loss, terms_loss):
        near(jax.jit(jaxmem.value_and_grad(fun, microbatches=m))(W, BATCH), whole(fun)(W, BATCH))


@pytest.mark.slow
def test_argnums_are_as_in_jax() -> None:
    def loss(w: jax.Array, x: jax.Array, v: Any, shared: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ w) * v["v"] * shared).mean()

    args = jnp.ones(F), X, {"v": jnp.float32(2)}, jnp.float32(3)

    def total(*args: Any) -> Weighted:
        return Weighted(loss(*args) * len(args[1]), len(args[1]))

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*args)
    for argnums in (0, 1, 2, -1, -3, (0,), (1, 0), (-2, -4), (3, 1, 0, 2)):
        several = isinstance(argnums, tuple)
        expected = value, tuple(gradients[k] for k in argnums) if several else gradients[argnums]
        near(ours_of(loss, argnums)(*args), expected)
        if argnums in (1, (3, 1, 0, 2)):
            near(ours_of(total, argnums)(*args), expected)


def test_several_batch_arguments_and_positions_from_the_end() -> None:
    def loss(x: jax.Array, w: Any, y: jax.Array) -> jax.Array:
        return mean_loss(w, {"x": x, "y": y})

    expected = whole(mean_loss)(W, BATCH)
    for batch_argnums in ((0, 2), (-3, -1), (2, -3)):
        near(ours_of(loss, 1, batch_argnums=batch_argnums)(X, W, Y), expected)
    near(ours_of(mean_loss, batch_argnums=-1)(W, BATCH), expected)


def test_arguments_by_name() -> None:
    def loss(w: Any, batch: Any, power: int = 1, *, scale: Any = 1.0, words: Any = None) -> Any:
        assert words in (None, "words")
        return mean_loss(w, batch) * scale**power

    ours = jaxmem.value_and_grad(loss, microbatches=4)
    expected = whole(mean_loss)(W, BATCH)
    near(ours(W, batch=BATCH), expected)
    near(ours(batch=BATCH, w=W, words="words"), expected)
    value, gradient = ours(W, BATCH, 2, scale=jnp.float32(2))
    near((value / 4, jax.tree.map(lambda leaf: leaf / 4, gradient)), expected)


def test_what_is_no_batch_goes_through_untouched() -> None:
    seen: list[Any] = []
    x = np.asarray(X)  # numpy arrays are batches, too

    def loss(w: Any, batch: Any, options: Any) -> jax.Array:
        assert batch["name"] == "train"
        assert batch["nothing"] is None
        assert options["activation"] is jnp.tanh
        assert options["words"] == ["a", "b"]
        assert isinstance(options["number"], float)
        seen.append((batch["x"].shape, jnp.shape(batch["temperature"]), options["table"].shape))
        hidden = options["activation"](batch["x"] @ w["kernel"]) / batch["temperature"]
        return (hidden * options["table"].sum() * options["number"]).mean()

    batch = {"x": x, "name": "train", "nothing": None, "temperature": jnp.float32(2)}
    options = {
        "activation": jnp.tanh,
        "words": ["a", "b"],
        "number": 0.5,
        "table": jnp.ones((7, 2)),
    }
    ours = jaxmem.value_and_grad(loss, microbatches=4)(W, batch, options)
    assert set(seen) == {((4, F), (), (7, 2)), ((3, F), (), (7, 2))}
    near(ours, jax.value_and_grad(loss)(W, batch, options))


@pytest.mark.slow
def test_the_dtypes_of_gradients() -> None:
    w = {
        "low": jnp.ones(F, jnp.bfloat16),
        "half": jnp.ones(F, jnp.float16),
        "full": jnp.ones(F),
        "complex": jnp.ones(F, jnp.complex64),
    }

    def loss(w: Any, x: jax.Array) -> jax.Array:
        found = [x @ leaf.astype(jnp.result_type(leaf, jnp.float32)) for leaf in w.values()]
        return jnp.stack([jnp.square(jnp.abs(one)) for one in found]).sum(0).mean()

    def dtypes(**options: Any) -> list[str]:
        _, found = ours_of(loss, **options)(w, X)
        near(found, whole(loss)(w, X)[1], 0.02)
        return [found[name].dtype.name for name in w]

    f32, bf16, c64 = "float32", "bfloat16", "complex64"
    assert dtypes() == [f32, f32, f32, c64]
    assert dtypes(gradient_dtype=jnp.bfloat16) == [bf16, bf16, bf16, c64]
    assert dtypes(accumulator_dtype=None) == [bf16, "float16", f32, c64]
    assert dtypes(accumulator_dtype=jnp.bfloat16) == [bf16, bf16, bf16, c64]
    assert dtypes(accumulator_dtype="bfloat16", gradient_dtype="float32") == [f32, f32, f32, c64]
    with jax.enable_x64(True):
        w = {"wide": jnp.ones(F, jnp.float64), "full": jnp.ones(F, jnp.float32)}
        assert dtypes() == ["float64", f32]
        assert dtypes(accumulator_dtype=jnp.float64) == ["float64", "float64"]


@pytest.mark.parametrize("fun", [mean_loss, masked_loss], ids=lambda fun: fun.__name__)
def test_gradients_of_rows_have_the_dtype_asked_for(fun: Callable[..., Any]) -> None:
    batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), BATCH)

    def dtype(**options: Any) -> str:
        _, found = jax.eval_shape(ours_of(fun, 1, **options), W, batch)
        return found["x"].dtype.name

    assert dtype() == "float32"
    assert dtype(gradient_dtype=jnp.bfloat16) == "bfloat16"
    assert dtype(accumulator_dtype=None) == "bfloat16"


# ---------------------------------------------------------------- auxiliary outputs


def outputs(w: Any, batch: Any) -> Any:
    found = errors(w, batch)
    weight = batch["mask"].sum()
    return Weighted((found * batch["mask"]).sum(), weight), {
        "rows": found,
        "total": found.sum(),
        "count": batch["mask"].astype(jnp.int32).sum(),
        "mean": (found * batch["mask"]).sum() / weight,
        "first": batch["x"][0],
        "pair": (found.max(), batch["mask"] > 0),
        "by row": Weighted(found.sum(), found.size) + Weighted(weight, 1),
    }


@pytest.mark.parametrize("m", [1, 4, 13])
def test_each_word_of_aux(m: int) -> None:
    words = {
        "rows": "concat",
        "total": "sum",
        "count": "sum",
        "mean": "mean",
        "first": "last",
        "pair": ("stack", "concat"),
        "by row": "last",
    }
    ours = jaxmem.value_and_grad(outputs, has_aux=True, microbatches=m, aux=words)
    (value, aux), gradient = jax.jit(ours)(W, BATCH)
    expected = whole(masked_loss)(W, BATCH)
    near((value, gradient), expected)
    found = errors(W, BATCH)
    each = microbatches_of(13, m)
    # A microbatch's mean is 0 / 0 where nothing counts in it: it is not in the mean.
    near(
        aux,
        {
            "rows": found,
            "total": found.sum(),
            "count": jnp.int32(8),
            "mean": expected[0],
            "first": X[each[-1][0]],
            "pair": (jnp.stack([found[rows].max() for rows in each]), MASK > 0),
            "by row": found.mean() + 8 / m,
        },
    )
    assert aux["count"].dtype == jnp.int32
    assert aux["pair"][1].dtype == jnp.bool_


def test_one_word_for_all_and_words_for_branches() -> None:
    def loss(w: Any, batch: Any) -> Any:
        found = errors(w, batch)
        return found.mean(), ({"a": found, "b": {"c": found}}, [found.sum()], None)

    def aux(spec: Any, m: int = 4) -> Any:
        return ours_of(loss, has_aux=True, microbatches=m, aux=spec)(W, BATCH)[0][1]

    found = errors(W, BATCH)
    mean = sum(len(rows) * found[rows].sum() for rows in microbatches_of(13, 4)) / 13
    near(aux(("concat", "sum", "last")), ({"a": found, "b": {"c": found}}, [found.sum()], None))
    near(
        aux(({"a": "concat", "b": "concat"}, ["mean"], "stack")),
        ({"a": found, "b": {"c": found}}, [mean], None),
    )
    stacked = aux("stack", m=1)
    near(stacked[0]["a"], found[None])
    assert stacked[2] is None


def test_a_narrow_sum_is_float32_and_small_integers_do_not_wrap() -> None:
    def loss(w: Any, batch: Any) -> Any:
        ones = jnp.ones((), jnp.bfloat16)
        return mean_loss(w, batch), (ones, jnp.int8(100), ones, jnp.asarray(True))

    ours = ours_of(loss, has_aux=True, microbatches=13, aux=("sum", "sum", "mean", "sum"))
    aux = ours(W, BATCH)[0][1]
    assert [float(leaf) for leaf in aux] == [13, 1300, 1, 13]
    assert [leaf.dtype.name for leaf in aux] == ["float32", "int32", "float32", "int32"]


def test_a_carry_goes_from_microbatch_to_microbatch() -> None:
    def loss(w: Any, batch: Any, carry: Any, counter: jax.Array) -> Any:
        found = errors(w, batch)
        new = {"mean": 0.9 * carry["mean"] + 0.1 * found.mean(), "key": carry["key"]}
        new["key"], _ = jax.random.split(carry["key"])
        value = found.mean() * (1 + carry["mean"])
        return value, {"counter": counter * 2 + 1, "state": new, "seen": counter}

    start = {"mean": jnp.float32(0.5), "key": jax.random.key(3)}
    words = {"counter": "carry", "seen": "stack", "state": "carry"}
    ours = jaxmem.value_and_grad(
        loss, has_aux=True, microbatches=4, carry_argnums=(3, 2), aux=words
    )
    (value, aux), gradient = jax.jit(ours)(W, BATCH, start, jnp.int32(0))
    carry, counter, total, sums = start, jnp.int32(0), 0.0, jax.tree.map(jnp.zeros_like, W)
    one_by_one = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for rows in microbatches_of(13, 4):
        own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH)
        (one, out), grads = one_by_one(W, own, carry, counter)
        carry, counter = out["state"], out["counter"]
        part = len(rows) / 13
        total += float(one) * part
        sums = jax.tree.map(lambda a, b, part=part: a + b * part, sums, grads)
    near((value, gradient), (jnp.float32(total), sums))
    assert aux["seen"].tolist() == [0, 1, 3, 7]
    assert int(aux["counter"]) == 15
    near(aux["state"]["mean"], carry["mean"])
    assert (jax.random.key_data(aux["state"]["key"]) == jax.random.key_data(carry["key"])).all()


# ---------------------------------------------------------------- random keys


def dropped(w: Any, batch: Any, rng: Any) -> Any:
    key = jax.tree.leaves(rng)[0]
    while key.shape not in ((), (2,)):
        key = key[0]
    mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return mean_loss(w, batch | {"x": batch["x"] * mask}), mask


KEYS = {
    "new": lambda: jax.random.key(0),
    "legacy": lambda: jax.random.PRNGKey(0),
    "rbg": lambda: jax.random.key(0, impl="rbg"),
    "dict": lambda: {"dropout": jax.random.key(0), "noise": jax.random.key(1)},
    "legacy dict": lambda: {"dropout": jax.random.PRNGKey(0), "noise": jax.random.PRNGKey(1)},
    "array": lambda: jax.random.split(jax.random.key(0), (3, 1)),
    "legacy array": lambda: jax.random.split(jax.random.PRNGKey(0), (3, 1)),
}


@pytest.mark.parametrize("kind", KEYS)
def test_masks_differ_between_microbatches(kind: str) -> None:
    ours = ours_of(dropped, has_aux=True, microbatches=6, rng_argnums=2, aux="concat")
    batch = {"x": normal(0, 24, F), "y": normal(1, 24, 4)}
    (value, mask), gradient = ours(W, batch, KEYS[kind]())
    parts = {mask[rows].tobytes() for rows in map(np.asarray, microbatches_of(24, 6))}
    assert len(parts) == 6
    # The gradient is that of the masks that were drawn.
    near((value, gradient), whole(mean_loss)(W, batch | {"x": batch["x"] * mask}))
    (_, again), _ = ours(W, batch, KEYS[kind]())
    assert (mask == again).all()


@pytest.mark.parametrize("kind", KEYS)
def test_one_microbatch_is_jax_bit_by_bit(kind: str) -> None:
    ours = jaxmem.value_and_grad(dropped, has_aux=True, microbatches=1, rng_argnums=2, aux="concat")
    theirs = jax.value_and_grad(dropped, has_aux=True)
    key = KEYS[kind]()
    assert_same(exact_jit(ours)(W, BATCH, key), exact_jit(theirs)(W, BATCH, key))


def test_a_key_outside_of_rng_argnums_is_the_same_for_all_and_that_is_said() -> None:
    batch = {"x": normal(0, 24, F), "y": normal(1, 24, 4)}
    ours = ours_of(dropped, has_aux=True, microbatches=6, aux="concat")
    said = re.escape(
        "rng is a random key, and not in rng_argnums: every microbatch draws the same numbers; "
        "name the argument in rng_argnums=, or let the function close over the key if that is what "
        "is meant"
    )
    with pytest.warns(jaxmem.JaxmemWarning, match=said) as caught:
        (_, mask), _ = ours(W, batch, jax.random.key(0))
    assert [warning.filename for warning in caught] == [__file__]
    parts = {mask[rows].tobytes() for rows in map(np.asarray, microbatches_of(24, 6))}
    assert len(parts) == 1


def test_keys_are_found_wherever_all_microbatches_get_them() -> None:
    key = jax.random.key(0)

    def loss(w: Any, batch: Any, others: Any = None, *, more: Any = None) -> jax.Array:
        return jnp.square(batch["x"] @ w).mean()

    def carried(w: Any, batch: Any, key: Any) -> Any:
        return loss(w, batch), jax.random.split(key)[0]

    w, x = jnp.ones(F), X[:12]
    ours = ours_of(loss)
    said = re.escape("batch/key, others/0, more/a are random keys, and not in rng_argnums")
    with pytest.warns(jaxmem.JaxmemWarning, match=said):
        jax.eval_shape(ours, w, {"x": x, "key": key}, [key, 3], more={"a": key})
    # One for each row, one carried on, and one for the only microbatch there is.
    jax.eval_shape(ours, w, {"x": x, "key": jax.random.split(key, 12)})
    states = ours_of(carried, has_aux=True, carry_argnums=2, aux="carry")
    jax.eval_shape(states, w, {"x": x}, key)
    jax.eval_shape(ours_of(loss, microbatches=1), w, {"x": x}, key)


@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")
@pytest.mark.parametrize("policy", ["none", "full", "sqrt", None])
def test_parameters_on_the_host_go_to_the_device_layer_by_layer(policy: str | None) -> None:
    loss = updating.language_loss
    ours = loss if policy is None else jaxmem.remat(loss, policy)
    params = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), updating.PARAMS)
    for microbatches in (1, 4):
        step = jax.jit(jaxmem.value_and_grad(ours, microbatches=microbatches))
        found = step(params, updating.TOKENS)
        # Sums are on the device: one accumulator, of the parameters' size.
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found[1])} == {"device"}
        near(found, jax.value_and_grad(loss)(updating.PARAMS, updating.TOKENS))
