"""`jaxmem.value_and_grad`: the gradient of the whole batch, whatever its microbatches are.

Shapes: B rows, of F numbers each.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accumulating import on_each_stack
from compiled import compiled
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from menagerie import assert_same, exact_jit

import jaxmem
from jaxmem import Weighted
from jaxmem.accumulate.split import Split
from jaxmem.hlo import text as hlo
from jaxmem.hlo.flops import matmul_flops

TINY = settings(deadline=None, derandomize=True, max_examples=10)
F = 3
W = {"kernel": jnp.linspace(-0.9, 1.1, 12).reshape(F, 4), "scale": jnp.linspace(0.5, 1.5, 4)}


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, Y, MASK = normal(0, 13, F), normal(1, 13, 4), jnp.asarray(np.arange(13) % 3 > 0, jnp.float32)
BATCH = {"x": X, "y": Y, "mask": MASK}


def errors(w: Any, batch: Any) -> jax.Array:
    """One error per row."""
    return jnp.square(jnp.tanh(batch["x"] @ w["kernel"]) * w["scale"] - batch["y"]).sum(-1)


def mean_loss(w: Any, batch: Any) -> jax.Array:
    return errors(w, batch).mean()


def masked_loss(w: Any, batch: Any) -> Weighted:
    return Weighted((errors(w, batch) * batch["mask"]).sum(), batch["mask"].sum())


def terms_loss(w: Any, batch: Any) -> Weighted:
    """Per token, per example, and a penalty that every microbatch has alike."""
    penalty = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(w))
    return (
        masked_loss(w, batch)
        + 0.1 * Weighted(jnp.cos(batch["x"] @ w["kernel"]).sum(), batch["x"].shape[0])
        - Weighted(penalty, 1) / 50
    )


@functools.cache
def whole(fun: Callable[..., Any]) -> Callable[..., Any]:
    """What jax computes of the whole batch at once."""

    def mean(*args: Any, **kwargs: Any) -> Any:
        loss = fun(*args, **kwargs)
        return loss.mean if isinstance(loss, Weighted) else loss

    return jax.jit(jax.value_and_grad(mean))


def ours_of(fun: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Compiled as a whole: of each operation for itself, most of a test's time would be compiling.

    What follows is the same without `jit`, which some tests do without.
    """
    return jax.jit(jaxmem.value_and_grad(fun, *args, **{"microbatches": 4, **options}))


def microbatches_of(rows: int, m: int) -> list[np.ndarray]:
    """The rows of each microbatch, in the order in which they run."""
    size, larger = divmod(rows, m)
    first, rest = np.split(np.arange(rows), [larger * (size + 1)])
    return [first[j::larger] for j in range(larger)] + [
        rest[j :: m - larger] for j in range(m - larger)
    ]


def near(actual: Any, expected: Any, tolerance: float = 3e-6) -> None:
    chex.assert_trees_all_equal_structs(actual, expected)

    def wide(leaf: Any) -> np.ndarray:
        return np.asarray(leaf, np.complex128 if jnp.iscomplexobj(leaf) else np.float64)

    chex.assert_trees_all_close(
        jax.tree.map(wide, actual), jax.tree.map(wide, expected), rtol=tolerance, atol=tolerance
    )


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
@TINY
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
@TINY
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


def test_a_batch_without_weight_is_zeros_and_says_so() -> None:
    def both(fun: Callable[..., Any], batch: Any, jit: bool = True) -> Any:
        ours = jaxmem.value_and_grad(fun, microbatches=4, return_weight=True)
        return (jax.jit(ours) if jit else ours)(W, batch)

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


def test_argnums_are_as_in_jax() -> None:
    def loss(w: jax.Array, x: jax.Array, v: Any, shared: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ w) * v["v"] * shared).mean()

    args = jnp.ones(F), X, {"v": jnp.float32(2)}, jnp.float32(3)

    def total(*args: Any) -> Weighted:
        return Weighted(loss(*args) * len(args[1]), len(args[1]))

    for argnums in (0, 1, 2, -1, -3, (0,), (1, 0), (-2, -4), (3, 1, 0, 2)):
        expected = jax.jit(jax.value_and_grad(loss, argnums))(*args)
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


# ---------------------------------------------------------------- batch statistics, modules


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(5)(x))
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(jnp.tanh(x)))


def test_batch_statistics_of_linen_are_those_of_a_loop() -> None:
    model, key = Normalised(), jax.random.key(7)
    variables = jax.jit(model.init)({"params": key, "dropout": key}, X)

    def loss(params: Any, batch: Any, stats: Any, rng: Any) -> Any:
        out, new = model.apply(
            {"params": params, "batch_stats": stats},
            batch["x"],
            mutable=["batch_stats"],
            rngs={"dropout": rng},
        )
        return jnp.square(out - batch["y"]).mean(), new["batch_stats"]

    args = variables["params"], BATCH, variables["batch_stats"], key
    ours = jaxmem.value_and_grad(
        loss, has_aux=True, microbatches=4, carry_argnums=2, rng_argnums=3, aux="carry"
    )
    (value, stats), gradient = jax.jit(ours)(*args)
    params, _, after, _ = args
    total, sums = 0.0, jax.tree.map(jnp.zeros_like, params)
    one_by_one = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for number, rows in enumerate(microbatches_of(13, 4)):
        own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH)
        rng = jax.random.fold_in(key, number)
        (one, after), grads = one_by_one(params, own, after, rng)
        part = len(rows) / 13
        total += float(one) * part
        sums = jax.tree.map(lambda a, b, part=part: a + b * part, sums, grads)
    near((value, stats, gradient), (jnp.float32(total), after, sums), 1e-5)
    assert np.abs(stats["BatchNorm_0"]["mean"] - args[2]["BatchNorm_0"]["mean"]).max() > 1e-3


class Net(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(F, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def net_loss(model: Net, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def state(model: Any) -> Any:
    """All of a module, its keys as words."""
    return jax.tree.map(
        lambda leaf: (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ),
        nnx.to_pure_dict(nnx.state(model)),
    )


def test_one_microbatch_of_a_module_is_that_of_nnx() -> None:
    mine, theirs = Net(), Net()
    ours = jaxmem.value_and_grad(net_loss, microbatches=1)(mine, BATCH)
    expected = nnx.value_and_grad(net_loss)(theirs, BATCH)
    near(ours, expected)
    assert type(ours[1]) is type(expected[1])
    near(state(mine), state(theirs))


@pytest.mark.parametrize("has_aux", [False, True], ids=["loss", "aux"])
def test_modules_are_those_of_a_loop(has_aux: bool) -> None:
    def loss(model: Net, batch: Any) -> Any:
        out = model(batch["x"])
        value = jnp.square(out - batch["y"]).mean()
        return (value, out) if has_aux else value

    mine, theirs = Net(), Net()
    ours = nnx.jit(jaxmem.value_and_grad(loss, has_aux=has_aux, microbatches=4, aux="concat"))
    value, gradient = ours(mine, BATCH)
    one_by_one = nnx.jit(nnx.value_and_grad(loss, has_aux=has_aux))
    total, sums, outs = 0.0, None, jnp.zeros((13, 4))
    for rows in microbatches_of(13, 4):
        own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH)
        one, grads = one_by_one(theirs, own)
        if has_aux:
            one, out = one
            outs = outs.at[rows].set(out)
        part = len(rows) / 13
        total += float(one) * part
        grads = jax.tree.map(lambda g, part=part: g * part, grads)
        sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
    if has_aux:
        value, aux = value
        near(aux, outs, 1e-5)
    near((value, gradient), (jnp.float32(total), sums), 1e-5)
    near(state(mine), state(theirs), 1e-5)


def test_a_module_trains_under_nnx_jit() -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.Param)
    x = normal(5, 26, F)
    batch = {"x": x, "y": jnp.sin(x @ jnp.ones((F, 4)))}

    @nnx.jit
    def step(model: Net, optimizer: Any, batch: Any) -> Any:
        loss, gradient = jaxmem.value_and_grad(net_loss, microbatches=4)(model, batch)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    counts = [
        int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state(model))
        if "count" in jax.tree_util.keystr(path) and "dropout" in jax.tree_util.keystr(path)
    ]
    assert counts == [30 * 4]


def test_diff_state_chooses_variables() -> None:
    only: Any = nnx.DiffState(0, nnx.PathContains("last"))
    mine, theirs = Net(), Net()
    ours = jaxmem.value_and_grad(net_loss, argnums=only, microbatches=1)(mine, BATCH)
    expected = nnx.value_and_grad(net_loss, argnums=only)(theirs, BATCH)
    near(ours, expected)
    assert set(nnx.to_pure_dict(ours[1])) == {"last"}
    near(state(mine), state(theirs))


def two_nets(first: Any, batch: Any, second: Any, scale: Any) -> Any:
    both = first(batch["x"]) - scale * second(batch["x"])
    return jnp.square(both - batch["y"]).mean()


@pytest.mark.parametrize("argnums", [0, 2, (0, 2), (2, 3), 3], ids=str)
def test_two_modules(argnums: Any) -> None:
    mine, theirs = (Net(0), Net(1)), (Net(0), Net(1))
    scale = jnp.float32(0.5)
    ours = jaxmem.value_and_grad(two_nets, argnums, microbatches=1)
    expected = nnx.value_and_grad(two_nets, argnums=argnums)
    near(ours(mine[0], BATCH, mine[1], scale), expected(theirs[0], BATCH, theirs[1], scale))
    near([*map(state, mine)], [*map(state, theirs)])


def test_modules_that_share_a_variable_are_refused() -> None:
    first, second = Net(0), Net(1)
    second.last = first.last
    ours = jaxmem.value_and_grad(two_nets, (0, 2), microbatches=4)
    text = r"arguments 0 and 2 share the variable last/(bias|kernel); pass one module that holds"
    with pytest.raises(ValueError, match=text):
        ours(first, BATCH, second, 1.0)
    with pytest.raises(TypeError, match="model= is an NNX module, Net; pass modules by position"):
        jaxmem.value_and_grad(net_loss)(model=first, batch=BATCH)


def test_arguments_beside_a_module_by_name_and_from_the_end() -> None:
    expected = nnx.value_and_grad(net_loss)(Net(), BATCH)
    near(jaxmem.value_and_grad(net_loss, microbatches=1)(Net(), batch=BATCH), expected)
    ours = jaxmem.value_and_grad(net_loss, -2, microbatches=1, batch_argnums=-1)
    near(ours(Net(), BATCH), expected)
    text = re.escape("argnums names argument 2, and net_loss was called with 2 positional")
    with pytest.raises(TypeError, match=text):
        jaxmem.value_and_grad(net_loss, 2)(Net(), BATCH)


# ---------------------------------------------------------------- with everything else

LAYERS = 6
DEEP = {"layers": 0.5 * normal(11, LAYERS, F, F), "scale": jnp.ones(4), "kernel": W["kernel"]}
PLANS = {
    "none": None,
    "sqrt": jaxmem.remat_sqrt,
    "full": jaxmem.remat_full,
    "dots": jaxmem.remat_dots,
    "revolve": jaxmem.remat_revolve(slots=2),
}


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ w), None


def deep_loss(w: Any, batch: Any) -> Weighted:
    h, _ = jax.lax.scan(layer, batch["x"], w["layers"])
    return masked_loss(w, batch | {"x": h})


@pytest.mark.parametrize("plan", PLANS)
def test_remat_inside(plan: str) -> None:
    decorate = PLANS[plan]
    loss = decorate(deep_loss) if decorate else deep_loss
    near(
        jax.jit(jaxmem.value_and_grad(loss, microbatches=4))(DEEP, BATCH),
        whole(deep_loss)(DEEP, BATCH),
    )
    one = exact_jit(jaxmem.value_and_grad(loss, microbatches=1))(DEEP, BATCH)
    assert_same(one, exact_jit(jaxmem.value_and_grad(deep_loss, microbatches=1))(DEEP, BATCH))


@pytest.mark.parametrize("remat", ["none", "sqrt", "full"])
def test_a_planned_scan_inside(remat: str) -> None:
    def loss(w: Any, batch: Any) -> Weighted:
        h, _ = jaxmem.scan(layer, batch["x"], w["layers"], remat=remat)
        return terms_loss({"kernel": w["kernel"], "scale": w["scale"]}, batch | {"x": h})

    near(
        jax.jit(jaxmem.value_and_grad(loss, microbatches=4))(DEEP, BATCH),
        whole(loss)(DEEP, BATCH),
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        x = x + jnp.tanh(nn.Dense(F)(x))
        return nn.Dropout(0.3, deterministic=False)(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        return blocks()(x, None)[0]


@pytest.mark.parametrize("plan", ["sqrt", "full"])
def test_a_linen_stack_with_a_plan_inside(plan: str) -> None:
    model, key = Stack(), jax.random.key(0)
    params = jax.jit(model.init)({"params": key, "dropout": key}, X)["params"]

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        out: Any = model.apply({"params": params}, batch["x"], rngs={"dropout": rng})
        return jnp.square(out - 1).mean()

    planned = PLANS[plan]
    assert planned is not None
    ours, plain = (
        jax.jit(jaxmem.value_and_grad(fun, microbatches=4, rng_argnums=2))(params, BATCH, key)
        for fun in (planned(loss), loss)
    )
    near(ours, plain)


def test_jax_checkpoint_inside() -> None:
    loss = jax.checkpoint(lambda w, batch: terms_loss(w, batch).mean)
    near(ours_of(loss, microbatches=1)(W, BATCH), whole(terms_loss)(W, BATCH))
    inner = jax.checkpoint(errors)

    def masked(w: Any, batch: Any) -> Weighted:
        return Weighted((inner(w, batch) * batch["mask"]).sum(), batch["mask"].sum())

    near(ours_of(masked)(W, BATCH), whole(masked_loss)(W, BATCH))


@pytest.mark.parametrize("fun", [mean_loss, terms_loss], ids=lambda fun: fun.__name__)
def test_it_can_be_differentiated_again(fun: Callable[..., Any]) -> None:
    """Through the loss, and through the gradient: a product with the Hessian."""

    def through(of: Callable[..., Any]) -> Callable[..., Any]:
        def both(w: Any, batch: Any) -> jax.Array:
            value, gradient = of(w, batch)
            return value + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(gradient))

        return jax.jit(jax.grad(both))

    ours = through(jaxmem.value_and_grad(fun, microbatches=4))(W, BATCH)
    theirs = through(whole(fun))(W, BATCH)
    near(ours, theirs, 2e-5)

    def forward(of: Callable[..., Any]) -> Any:
        return jax.jit(lambda w, t: jax.jvp(lambda w: of(w, BATCH), (w,), (t,)))(W, W)

    near(forward(jaxmem.value_and_grad(fun, microbatches=4)), forward(whole(fun)), 2e-5)


def test_vmap_over_the_whole() -> None:
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, leaf - 1]), W)
    batches = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1] + 1, leaf]), BATCH)
    for fun, axes, args in (
        (mean_loss, (0, None), (many, BATCH)),
        (terms_loss, (0, 0), (many, batches)),
    ):
        ours = jax.jit(jax.vmap(jaxmem.value_and_grad(fun, microbatches=4), axes))
        near(ours(*args), jax.jit(jax.vmap(whole(fun), axes))(*args))


def test_with_multi_steps_outside_and_donated_states() -> None:
    """Two steps of 13 rows, 8 and 4 of them counting, are one of the 26 rows."""
    second = BATCH | {"x": X[::-1] * 2, "mask": MASK * (jnp.arange(13) < 7)}
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), BATCH, second)
    tx = jaxmem.MultiSteps(optax.adam(0.1), 2)
    ours = jaxmem.value_and_grad(masked_loss, microbatches=4, return_weight=True)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (_, aux), gradient = ours(params, batch)
        updates, state = tx.update(gradient, state, params, weight=aux.weight)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, W)
    held = tx.init(params)
    for batch in (BATCH, second):
        params, held = step(params, held, batch)
    _, gradient = whole(masked_loss)(W, both)
    updates, _ = optax.adam(0.1).update(gradient, optax.adam(0.1).init(W), W)
    near(params, optax.apply_updates(W, updates), 1e-5)


def test_value_beside_aux_and_a_bfloat16_model() -> None:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (W, BATCH))

    def loss(w: Any, batch: Any) -> Any:
        found = errors(w, batch)
        assert found.dtype == jnp.bfloat16
        return found.mean(), found

    ours = jaxmem.value_and_grad(loss, has_aux=True, microbatches=4, aux="concat")
    (value, rows), gradient = jax.jit(ours)(*low)
    assert (value.dtype, rows.dtype) == (jnp.float32, jnp.bfloat16)
    near((value, gradient), whole(mean_loss)(W, BATCH), 0.05)
    near(rows, errors(W, BATCH), 0.1)


def test_no_promotion_that_was_not_asked_for(strict: None) -> None:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), W)

    def loss(w: Any, batch: Any) -> Any:
        out = (batch["x"].astype(jnp.bfloat16) @ w["kernel"]).astype(jnp.float32)
        rows = jnp.square(out).sum(-1)
        total = Weighted((rows * batch["mask"]).sum(), batch["mask"].sum())
        return total + 0.5 * Weighted(rows.sum(), jnp.int32(rows.size)), rows

    for m in (1, 4):
        for word in ("concat", "stack") if m == 1 else ("concat",):
            ours = jaxmem.value_and_grad(loss, has_aux=True, microbatches=m, aux=word)
            (value, _), gradient = jax.jit(ours)(low, BATCH)
            chex.assert_tree_all_finite((value, gradient))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_loss_is_not_promoted_either(dtype: str, strict: None) -> None:
    def mean(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(x @ w).mean()

    def weighted(w: jax.Array, x: jax.Array) -> Weighted:
        total = Weighted(jnp.square(x @ w).sum(), x.shape[0])
        return total + Weighted(jnp.square(w).sum().astype(jnp.float32), 1)

    w, x = jnp.linspace(-1, 1, F).astype(dtype), X.astype(dtype)
    for fun in (mean, weighted):
        value, gradient = jax.jit(jaxmem.value_and_grad(fun, microbatches=5))(w, x)
        assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.float32)
        expected = whole(fun)(w.astype(jnp.float32), x.astype(jnp.float32))
        near((value, gradient), expected, 0.05)


@pytest.mark.parametrize("empty", [{}, [], None], ids=str)
def test_no_parameters_have_no_gradients(empty: Any) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.square(batch["y"]).mean()

    expected = whole(loss)(empty, BATCH)
    near(ours_of(loss)(empty, BATCH), expected)
    both = ours_of(lambda a, b, batch: loss(a, batch), (1, 0), batch_argnums=2)
    value, (second, first) = both(empty, jnp.ones(2), BATCH)
    near((value, first), expected)
    near(second, jnp.zeros(2))


def test_leaves_that_nothing_depends_on_have_zeros() -> None:
    w = W | {"unused": jnp.ones(7)}
    for fun in (mean_loss, terms_loss):
        _, gradient = ours_of(fun)(w, BATCH)
        near(gradient, whole(fun)(w, BATCH)[1])
    constant = ours_of(lambda w, batch: jnp.float32(3))
    near(constant(W, BATCH), (jnp.float32(3), jax.tree.map(jnp.zeros_like, W)))


def test_it_is_traced_as_often_for_any_number_of_microbatches() -> None:
    def traced(m: int, fun: Callable[..., Any]) -> int:
        count = 0

        def counted(w: Any, batch: Any) -> Any:
            nonlocal count
            count += 1
            return fun(w, batch)

        jax.make_jaxpr(jaxmem.value_and_grad(counted, microbatches=m))(W, BATCH)
        return count

    # Once for each size of microbatch: 13 in 4 are of two sizes.
    for fun in (mean_loss, masked_loss, terms_loss):
        assert [traced(m, fun) for m in (1, 4, 5, 13)] == [1, 2, 2, 1]


# ---------------------------------------------------------------- memory

WIDE, DEPTH, ROWS = 2048, 8, 2048
P = DEPTH * WIDE * WIDE * 4


def wide_loss(scanned: bool, weighted: bool) -> Callable[..., Any]:
    def loss(w: Any, x: jax.Array) -> Any:
        h = x
        if scanned:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)
        else:
            for one in w:
                h = jnp.tanh(h @ one)
        return Weighted(jnp.square(h).sum(), h.size) if weighted else jnp.square(h).mean()

    return loss


def by_hand(loss: Callable[..., Any], m: int) -> Callable[..., Any]:
    def both(w: Any, x: jax.Array) -> Any:
        def body(carry: Any, x: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(w, x)
            return (carry[0] + value, jax.tree.map(jnp.add, carry[1], gradient)), None

        start = jnp.float32(0), jax.tree.map(jnp.zeros_like, w)
        found, _ = jax.lax.scan(body, start, x.reshape(m, -1, *x.shape[1:]))
        return jax.tree.map(lambda leaf: leaf / m, found)

    return both


def by_optax(loss: Callable[..., Any], m: int) -> Callable[..., Any]:
    return optax.microbatching.microbatch(
        jax.value_and_grad(loss),
        argnums=1,
        microbatch_size=ROWS // m,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )


def adam_step(both: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, state: Any, x: jax.Array) -> Any:
        value, gradient = both(w, x)
        updates, state = optax.adam(1e-3).update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    return step


def required(where: str, both: Callable[..., Any], scanned: bool, rows: int = ROWS) -> float:
    """Device memory of a step of Adam in units of P, all of its state donated."""
    one = jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32)
    w = jax.ShapeDtypeStruct((DEPTH, WIDE, WIDE), jnp.float32) if scanned else [one] * DEPTH
    state = jax.eval_shape(optax.adam(1e-3).init, w)
    x = jax.ShapeDtypeStruct((rows, WIDE), jnp.float32)
    leaves = len(jax.tree.leaves((w, state)))
    return compiled(where, adam_step(both), w, state, x, donate=range(leaves)).required / P


@pytest.mark.parametrize("where", ["cpu", "gpu"])  # the TPU's copies activations in loops
def test_memory_is_one_microbatch_and_one_accumulator(where: str) -> None:
    """Activations fall as 1 / microbatches: to those of a plain step on so many rows."""
    rows = 2**15
    batch = rows * WIDE * 4 / P
    loss = wide_loss(scanned=True, weighted=True)
    found = []
    for m in (1, 8):
        plain = required(where, whole(loss), True, rows // m)
        found.append(required(where, jaxmem.value_and_grad(loss, microbatches=m), True, rows))
        # The batch is there as a whole; of the rows of a microbatch there is a copy.
        bound = plain + batch + 1.05
        assert found[-1] <= bound
        activations = found[0] - 3 - batch - 1  # and a gradient
        assert activations > 10  # of the parameters' size
        assert found[-1] - 3 - batch <= activations / m + batch / m + 2.05
    assert found[-1] < 0.3 * found[0]


@on_each_stack
def test_memory_is_that_of_a_scan_by_hand_or_less(
    where: str, scanned: bool, weighted: bool
) -> None:
    ours = jaxmem.value_and_grad(wide_loss(scanned, weighted), microbatches=8)
    mean = wide_loss(scanned, weighted=False)
    found = required(where, ours, scanned)
    small = 2**16 / P  # scalars, which on TPUs are tiles
    hand = required(where, by_hand(mean, 8), scanned)
    # Stacked parameters have no gradient beside the accumulator.
    assert found <= (hand - 0.85 if scanned else hand + small)
    assert found <= required(where, by_optax(mean, 8), scanned) + small


# ---------------------------------------------------------------- errors


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
    "integer parameters": (
        raised(mean_loss, {"kernel": jnp.ones((F, 4), int), "scale": jnp.ones(4)}, BATCH),
        TypeError,
        "w/kernel is int32[3, 4], which has no gradient; pass argnums= of floating-point arguments "
        "only. Where an argument holds others beside them, partition it (as equinox.partition "
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
        "aux={'acc': 'mean'} does not fit what fun returns beside the loss",
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
        "returns, beside the loss, what the next one gets; got aux='stack' and has_aux=False",
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


def test_a_jitted_stack_that_is_called_twice() -> None:
    """Both calls are the same equations; each has parameters of its own."""
    stack = jax.jit(lambda w, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w) + c, None), x, w)[0])
    keys = jax.random.split(jax.random.key(0), 3)
    params = [0.4 * jax.random.normal(key, (3, 4, 4)) for key in keys[:2]]
    x = jax.random.normal(keys[2], (8, 4))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (stack(params[1], stack(params[0], x)) ** 2).mean()

    found = jax.jit(jaxmem.value_and_grad(loss, microbatches=2))(params, x)
    chex.assert_trees_all_close(found, whole(loss)(params, x), rtol=1e-4, atol=1e-5)
