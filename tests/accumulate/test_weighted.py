"""`jaxmem.Weighted`: sums that carry their denominators, and what they refuse."""

import math
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem import Weighted

TINY = settings(derandomize=True, max_examples=60)

NUMBERS = st.floats(-100, 100, width=32)
TERM = st.tuples(NUMBERS, st.sampled_from([0.0, 0.5, 1.0, 3.0, 4096.0]))
FACTOR = st.floats(0.125, 8, width=32)
# An expression: a term, or one or two of them and what is done to them.
EXPRESSIONS = st.recursive(
    TERM.map(lambda term: ("term", term)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-"]), inner, inner),
        st.tuples(st.just("sum"), st.lists(inner, min_size=1, max_size=4)),
        st.tuples(st.sampled_from(["*", "r*", "/"]), inner, FACTOR),
        st.tuples(st.just("neg"), inner),
    ),
    max_leaves=6,
)
NESTED = Weighted(6.0, 3) + 0.5 * Weighted(8.0, 2)


def built(expression: Any) -> tuple[Weighted, float]:
    """What the library makes of an expression, and its mean in Python's own numbers."""
    kind, *rest = expression
    if kind == "term":
        total, weight = rest[0]
        return Weighted(total, weight), total / weight if weight else 0.0
    if kind == "sum":
        found = [built(one) for one in rest[0]]
        whole = sum(weighted for weighted, _ in found)
        assert isinstance(whole, Weighted)
        return whole, math.fsum(mean for _, mean in found)
    first, mean = built(rest[0])
    if kind == "neg":
        return -first, -mean
    if kind in ("+", "-"):
        second, other = built(rest[1])
        return (first + second, mean + other) if kind == "+" else (first - second, mean - other)
    factor = rest[1]
    if kind == "/":
        return first / factor, mean / factor
    return (first * factor if kind == "*" else factor * first), mean * factor


def size(expression: Any) -> float:
    """A bound of all that is added up, to which rounding is relative."""
    kind, *rest = expression
    if kind == "term":
        total, weight = rest[0]
        return abs(total) / weight if weight else 0.0
    if kind == "sum":
        return sum(map(size, rest[0]))
    if kind in ("+", "-"):
        return size(rest[0]) + size(rest[1])
    if kind == "neg":
        return size(rest[0])
    return size(rest[0]) * (1 / rest[1] if kind == "/" else rest[1])


# ---------------------------------------------------------------- arithmetic


@TINY
@given(expression=EXPRESSIONS)
def test_arithmetic_is_that_of_the_means(expression: Any) -> None:
    weighted, mean = built(expression)
    assert weighted.mean.dtype == jnp.float32
    assert abs(float(weighted.mean) - mean) <= 1e-5 * size(expression) + 1e-30


@TINY
@given(
    parts=st.lists(st.tuples(NUMBERS, st.integers(0, 50)), min_size=1, max_size=6),
    factor=FACTOR,
)
def test_sums_over_parts_are_the_whole(parts: Any, factor: float) -> None:
    """Leaf by leaf, as the loop over microbatches adds them."""
    terms = [Weighted(total, weight) * factor + Weighted(total**2, 1) for total, weight in parts]
    whole = jax.tree.map(lambda *leaves: sum(leaves), *terms)
    tokens = sum(weight for _, weight in parts)
    expected = np.mean([total**2 for total, _ in parts])
    if tokens:
        expected += factor * sum(total for total, _ in parts) / tokens
    scale = np.mean([total**2 for total, _ in parts]) + factor * sum(abs(t) for t, _ in parts)
    assert abs(float(whole.mean) - expected) <= 1e-5 * scale + 1e-30


@pytest.mark.parametrize(
    "two",
    [2, 2.0, True + 1, np.float32(2), np.asarray(2.0), jnp.float32(2), np.int64(2)],
    ids=lambda two: type(two).__name__,
)
def test_factors_are_numbers_of_any_kind(two: Any) -> None:
    weighted = Weighted(3.0, 4)
    for found in (weighted * two, two * weighted, weighted / (1 / two)):
        assert isinstance(found, Weighted)
        assert float(found.mean) == 1.5
    assert float((weighted / two).mean) == 0.375


def test_sum_begins_at_zero_and_keeps_each_denominator() -> None:
    whole = sum([Weighted(2.0, 4), Weighted(3.0, 2), Weighted(5.0, 0)])
    assert isinstance(whole, Weighted)
    assert [tuple(map(float, term)) for term in whole.terms] == [(2, 4), (3, 2), (5, 0)]
    assert float(whole.mean) == 2.0


def test_a_term_without_weight_is_zero_whatever_its_total() -> None:
    for total in (jnp.nan, jnp.inf, -jnp.inf, 7.0):
        assert float(Weighted(total, 0).mean) == 0
        assert float((Weighted(total, 0) + Weighted(1.0, 2)).mean) == 0.5


# ---------------------------------------------------------------- totals without weight

ROWS = np.random.default_rng(0)
BATCH = {
    "x": jnp.asarray(ROWS.standard_normal((12, 3)), jnp.float32),
    "sure": jnp.asarray(ROWS.uniform(0.5, 1.5, 12), jnp.float32),
    # In 4 microbatches, which get every fourth row, the third and fourth have no positives.
    "positive": jnp.zeros(12).at[jnp.array([0, 1, 5])].set(1.0),
}
W = jnp.array([0.3, -0.2, 0.1])


def focal(w: jax.Array, batch: Any) -> Weighted:
    """Normalised by the positives; the negatives are in the total of every microbatch."""
    p = jax.nn.sigmoid(batch["x"] @ w)
    loss = jnp.where(
        batch["positive"] > 0, -jnp.log(p) * (1 - p) ** 2, -jnp.log1p(-p) * p**2
    )  # fmt: skip
    return Weighted(loss.sum(), batch["positive"].sum())


def linear(w: jax.Array, batch: Any) -> Weighted:
    """At w = 0 every total is 0, and no gradient is."""
    return Weighted((batch["x"] @ w).sum(), batch["positive"].sum())


def certain(w: jax.Array, batch: Any) -> Weighted:
    """Another denominator, which each microbatch has."""
    return Weighted((jnp.tanh(batch["x"] @ w) * batch["sure"]).sum(), batch["sure"].sum())


def stacked(layers: jax.Array, batch: Any) -> Weighted:
    """Layers whose gradients are added row by row."""
    h = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer) + h, None), batch["x"], layers)[0]
    return Weighted(jnp.square(h).sum(), batch["positive"].sum())


LOSSES: dict[str, tuple[Any, Any]] = {
    "focal": (focal, W),
    "linear at 0": (linear, 0 * W),
    "two of the same weight": (lambda w, b: focal(w, b) - 0.3 * linear(w, b), W),
    "two at 0": (lambda w, b: linear(w, b) + linear(-3 * w, b), 0 * W),
    "two of other weights": (lambda w, b: focal(w, b) + 0.5 * certain(w, b), W),
    "stacked": (stacked, jnp.linspace(-1, 1, 18).reshape(2, 3, 3)),
}


# 12 rows in 5 are microbatches of two sizes, of which three have no positives.
@pytest.mark.parametrize(("name", "m"), [*((name, 5) for name in LOSSES), ("focal", 12)])
def test_a_total_without_weight_counts_in_a_batch_that_has_some(name: str, m: int) -> None:
    fun, w = LOSSES[name]
    expected = jax.value_and_grad(lambda w: fun(w, BATCH).mean)(w)
    ours = jaxmem.value_and_grad(fun, microbatches=m)
    chex.assert_trees_all_close(jax.jit(ours)(w, BATCH), expected, rtol=3e-6, atol=3e-6)


def test_a_total_without_weight_counts_in_gradients_of_rows_and_in_outputs() -> None:
    def loss(w: jax.Array, batch: Any) -> Any:
        return certain(w, batch), focal(w, batch)

    ours = jaxmem.value_and_grad(loss, has_aux=True, microbatches=4)
    (_, found), _ = ours(W, BATCH)
    assert float(found) == pytest.approx(float(focal(W, BATCH).mean), rel=1e-6)

    batch = BATCH["x"], BATCH["positive"]

    def of(w: jax.Array, x: jax.Array, positive: jax.Array) -> Weighted:
        return focal(w, {"x": x, "positive": positive})

    rows = jaxmem.value_and_grad(of, argnums=1, microbatches=4, batch_argnums=(1, 2))
    expected = jax.grad(lambda x: of(W, x, batch[1]).mean)(batch[0])
    chex.assert_trees_all_close(rows(W, *batch)[1], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("total", [0.0, np.inf, np.nan])
def test_of_a_microbatch_without_weight_or_total_only_what_is_finite_counts(total: float) -> None:
    """The third and fourth microbatch add 0, inf or NaN, with a gradient of NaN."""

    def loss(w: jax.Array, batch: Any) -> Weighted:
        some = batch["positive"].sum()
        nothing = jnp.sqrt(some + (w[0] - w[0])) - jnp.sqrt(some)  # derivative at 0: 0 times inf
        counts = some > 0
        own = jnp.where(counts, focal(w, batch).terms[0][0], 0.0)
        return Weighted(own + nothing + jnp.where(counts, 0.0, total), some)

    value, gradient = jaxmem.value_and_grad(loss, microbatches=4)(W, BATCH)
    has = np.arange(12) % 4 < 2
    mine = jax.tree.map(lambda leaf: leaf[has], BATCH)
    expected = jax.value_and_grad(lambda w: focal(w, mine).mean)(W)
    chex.assert_trees_all_close((value, gradient), expected, rtol=3e-6, atol=3e-6)


def test_nan_next_to_a_total_that_counts_is_not_hidden() -> None:
    def loss(w: jax.Array, batch: Any) -> Weighted:
        total, some = focal(w, batch).terms[0]
        return Weighted(total + 0 * jnp.sqrt(w[0] - w[0]), some)

    value, gradient = jaxmem.value_and_grad(loss, microbatches=4)(W, BATCH)
    assert np.isfinite(value)
    assert np.isnan(gradient[0])
    assert np.isfinite(gradient[1:]).all()


@pytest.mark.parametrize("terms", [1, 2])
def test_weights_with_float64_are_summed_in_float64(terms: int) -> None:
    """In float32 2²⁴ + 1 is 2²⁴."""
    with jax.enable_x64(True):
        x = np.random.default_rng(1).standard_normal((12, 3))
        weights = 2.0**24 + np.arange(12) / 3
        batch = x, weights

        def loss(w: jax.Array, batch: Any) -> Weighted:
            x, weights = batch
            first = Weighted((jnp.square(x @ w) * weights).sum(), weights.sum())
            return first if terms == 1 else first + 0.1 * Weighted(jnp.sin(x @ w).sum(), x.shape[0])

        w = jnp.asarray(W, jnp.float64)
        ours = jaxmem.value_and_grad(loss, microbatches=4, return_weight=True)
        (value, aux), gradient = jax.jit(ours)(w, batch)
        expected = jax.value_and_grad(lambda w: loss(w, batch).mean)(w)
        chex.assert_trees_all_close((value, gradient), expected, rtol=1e-13, atol=1e-15)
        weight = aux.weight if terms == 1 else aux.weight[0]
        assert weight.dtype == jnp.float64
        assert float(weight) == pytest.approx(weights.sum(), rel=1e-15)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_means_are_float32_at_least(dtype: str) -> None:
    total = jnp.asarray(1001, dtype)
    found = Weighted(total, jnp.asarray(3, dtype)).mean
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(float(total) / 3, rel=1e-6)
    with jax.enable_x64(True):
        weighted = Weighted(jnp.float64(1), 3)
        assert weighted.mean.dtype == weighted.terms[0][1].dtype == jnp.float64


def test_terms_of_several_dtypes_add_up_without_promotion(strict: None) -> None:
    for dtype in (jnp.bfloat16, jnp.float16):
        found = Weighted(jnp.asarray(6, dtype), jnp.int32(3)) + Weighted(jnp.float32(1), 2)
        assert float(found.mean) == 2.5


# ---------------------------------------------------------------- as a tree


def test_it_is_a_tree_of_its_numbers() -> None:
    leaves, tree = jax.tree.flatten(NESTED)
    assert [float(leaf) for leaf in leaves] == [6, 3, 4, 2]
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, Weighted)
    assert float(again.mean) == 4
    assert tree == jax.tree.structure(Weighted(0.0, 0) + Weighted(0.0, 0))
    assert tree != jax.tree.structure(Weighted(0.0, 0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(NESTED)]
    assert len(set(paths)) == 4
    # Placeholders, as jax itself puts into trees.
    assert jax.tree.leaves(jax.tree.unflatten(tree, [None, "a", object(), 1]))[0] == "a"


def test_it_goes_through_jit_scan_vmap_and_cond() -> None:
    assert float(jax.jit(lambda w: w + w)(NESTED).mean) == 8
    assert float(jax.jit(lambda w: 0.5 * w - w / 4)(NESTED).mean) == 1

    def body(carry: Weighted, x: jax.Array) -> tuple[Weighted, Weighted]:
        new = Weighted(x, 2)
        return jax.tree.map(jnp.add, carry, new), new

    last, each = jax.lax.scan(body, Weighted(jnp.float32(0), 0), jnp.arange(4.0))
    assert float(last.mean) == 6 / 8
    assert isinstance(each, Weighted)
    assert jax.vmap(lambda w: w.mean)(each).tolist() == [0, 0.5, 1, 1.5]
    chosen = jax.lax.cond(True, lambda w: w * 2, lambda w: w, NESTED)
    assert float(chosen.mean) == 8
    shape = jax.eval_shape(lambda x: Weighted(x, x), jnp.float32(1))
    assert [leaf.shape for leaf in jax.tree.leaves(shape)] == [(), ()]


def test_weights_are_constants_of_its_gradient() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (Weighted(x * x, x) + 0.5 * Weighted(x, 2)).mean

    assert float(jax.grad(loss)(jnp.float32(3))) == 2.25
    assert float(jax.jit(jax.grad(loss))(jnp.float32(3))) == 2.25


@pytest.mark.parametrize("weight", [0, 0.0])
def test_nothing_comes_back_from_a_term_without_weight(weight: float) -> None:
    def loss(x: jax.Array, weight: Any) -> jax.Array:
        return (Weighted(jnp.exp(x), weight) + Weighted(3 * x, 1)).mean

    assert float(jax.grad(loss)(jnp.float32(1), weight)) == 3
    assert float(jax.jit(jax.grad(loss))(jnp.float32(1), weight)) == 3
    assert float(jax.jit(loss)(jnp.float32(1e4), weight)) == 3e4  # exp is inf there


# ---------------------------------------------------------------- errors


def test_a_negative_weight_is_nan_where_it_is_not_known() -> None:
    mean = jax.jit(lambda weight: Weighted(1.0, weight).mean)
    assert np.isnan(mean(-1.0))
    assert np.isnan(mean(jnp.nan))
    assert float(mean(0.0)) == 0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Weighted(1.0, -2),
            ValueError,
            "Weighted: weight must be at least 0 and finite, got -2.0; pass the number of "
            "tokens or examples that count",
        ),
        (lambda: Weighted(1.0, jnp.nan), ValueError, "must be at least 0 and finite, got nan"),
        (lambda: Weighted(1.0, np.inf), ValueError, "must be at least 0 and finite, got inf"),
        (
            lambda: Weighted(1.0, jnp.ones(3)),
            ValueError,
            "Weighted: weight must be a scalar, got float32[3]; pass the number of tokens or "
            "examples",
        ),
        (
            lambda: Weighted(jnp.ones((2, 3)), 1),
            ValueError,
            "Weighted: total must be a scalar, got float32[2, 3]; sum it first",
        ),
        (
            lambda: Weighted(1j, 1),
            TypeError,
            "Weighted: total must be a real number, got 1j of type complex",
        ),
        (
            lambda: Weighted(jnp.complex64(1), 1),
            TypeError,
            "total must be a real number, got complex64[]",
        ),
        (
            lambda: Weighted("a", 1),
            TypeError,
            "Weighted: total must be a real number, got 'a' of type str",
        ),
        (
            lambda: Weighted(1.0, None),
            TypeError,
            "Weighted: weight must be a real number, got None of type NoneType; pass the "
            "number of tokens or examples",
        ),
        (
            lambda: NESTED + 1.0,
            TypeError,
            "cannot add 1.0 of type float to a Weighted: over several microbatches it is not "
            "known what it would be divided by; add jaxmem.Weighted(x, 1) for a term that "
            "every microbatch has alike, or jaxmem.Weighted(x.sum(), x.size) for one per "
            "example",
        ),
        (lambda: jnp.ones(()) + NESTED, TypeError, "cannot add float32[] to a Weighted"),
        (
            lambda: NESTED * NESTED,
            TypeError,
            "a Weighted can be multiplied by a number, not by another Weighted",
        ),
        (
            lambda: NESTED * jnp.ones(2),
            ValueError,
            "the factor of a Weighted must be a scalar, got float32[2]",
        ),
        (
            lambda: NESTED * "2",
            TypeError,
            "the factor of a Weighted must be a real number, got '2' of type str",
        ),
        (
            lambda: NESTED / NESTED,
            TypeError,
            "a Weighted can be divided by a number, not by another Weighted",
        ),
        (lambda: 1.0 - NESTED, TypeError, "cannot add 1.0 of type float to a Weighted"),
    ],
)
def test_errors(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_what_jit_knows_of_a_weight_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match=re.escape("weight must be a scalar, got float32[3]")):
        jax.eval_shape(lambda weight: Weighted(1.0, weight), jnp.ones(3))
    with pytest.raises(TypeError, match="weight must be a real number, got complex64"):
        jax.eval_shape(lambda weight: Weighted(1.0, weight), jnp.complex64(1))
    assert jaxmem.Weighted is Weighted
