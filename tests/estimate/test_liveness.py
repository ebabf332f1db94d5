"""How many bytes of a traced program are live at once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compiled import compiled
from jax import lax

import jaxmem
from jaxmem import _jax
from jaxmem.estimate.arrays import (
    in_memory,
    layout_copies,
    read_rounded,
    read_turned,
    rounded_where_made,
)
from jaxmem.estimate.compiler import ANY, GPU, TPU, of_platform
from jaxmem.estimate.liveness import peak_live_bytes

X = jax.ShapeDtypeStruct((64, 64), "float32")
SIZE = 64 * 64 * 4


def live(fn, *specs, held=(), live_to_end=(), fuses=False):
    closed = jax.make_jaxpr(fn)(*specs)
    ins = closed.jaxpr.invars
    return (
        peak_live_bytes(
            closed,
            held=[ins[k] for k in held],
            live_to_end=[ins[k] for k in live_to_end],
            compiler=TPU if fuses else ANY,
        )
        / SIZE
    )


def test_products_are_in_memory_until_they_are_read():
    assert live(lambda x: x @ x, X) == 1
    assert live(lambda x: (x @ x) @ x, X) == 2
    assert live(lambda x: ((x @ x) @ x) @ x, X) == 2

    def both_ends(x):
        first = x @ x
        return ((first @ x) @ x) @ first

    assert live(both_ends, X) == 3


def test_elementwise_chains_are_computed_inside_of_what_reads_them():
    assert live(lambda x: jnp.exp(jnp.sin(x) + 1).sum(), X) == 4 / SIZE
    assert live(lambda x: jnp.exp(jnp.sin(x)) @ x, X) == 2


def test_what_is_elementwise_is_written_over_what_it_reads_last():
    assert live(lambda x: jnp.sin(x @ x), X) == 1
    assert live(lambda x: jnp.sin(x @ x) + x @ x.T, X) == 2

    def read_again(x):
        first = x @ x
        return jnp.sin(first) @ first

    assert live(read_again, X) == 3


def test_a_concatenation_is_not_written_over_what_it_is_made_of():
    def halves(x):
        made = x @ x
        first, second = jnp.split(made, 2, axis=-1)
        return jnp.concatenate([second, first], axis=-1) + 1

    assert live(halves, X) == 2


def test_what_went_through_a_barrier_is_not_written_over():
    assert live(lambda x: jnp.sin(lax.optimization_barrier(x @ x)), X) == 2

    def passed_once(x):
        first = x @ x
        return jnp.sin(lax.optimization_barrier(first)) * first

    assert live(passed_once, X) == 2


def on_gpu(fn, *specs):
    return peak_live_bytes(jax.make_jaxpr(fn)(*specs), compiler=GPU) / SIZE


def test_what_a_library_makes_is_not_written_over():
    """As all products where Triton makes none: XLA finds no tiles for heads of 197 rows."""
    closed = jax.make_jaxpr(lambda x: jnp.sin(x @ x))(X)
    assert peak_live_bytes(closed, compiler=GPU) == SIZE
    assert peak_live_bytes(closed, compiler=GPU, calls_for_products=True) == 2 * SIZE


def test_rows_that_are_reduced_in_the_same_kernel_are_not_written_over():
    def normal(x):
        y = x @ x
        return jnp.exp(y - y.max(-1, keepdims=True))

    assert live(normal, X) == 1 + 1 / 64
    assert on_gpu(normal, X) == 2 + 1 / 64
    # By what something else was reduced to, or along another axis, they are.
    assert on_gpu(lambda x: jnp.exp((x @ x) - (x @ x.T).max(-1, keepdims=True)), X) == 2 + 1 / 64
    assert on_gpu(lambda x: (y := x @ x) - y.sum(0), X) == 1 + 1 / 64


def test_what_a_softmaxs_derivative_reads_is_not_written_over():
    """Rows, gradient and result are there at once, in XLA for GPUs, too."""

    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bqd,bkd->bqk", q, k)

    def pull(q: jax.Array, k: jax.Array, gradient: jax.Array, v: jax.Array) -> jax.Array:
        shares = jax.nn.softmax(scores(q, k))
        late = scores(gradient, v)
        return scores(shares * (late - (shares * late).sum(-1, keepdims=True)), k.swapaxes(1, 2))

    of_head = jax.ShapeDtypeStruct((16, 1024, 64), "float32")
    size = 16 * 1024 * 1024 * 4
    closed = jax.make_jaxpr(pull)(*[of_head] * 4)
    live = peak_live_bytes(closed, compiler=GPU, reduces_pairs=True)
    report = jaxmem.memory_report(pull, *[of_head] * 4, target="h100-80g")
    assert 3 * size <= live < 3.1 * size
    assert 3 * size <= report.temp_bytes < 3.1 * size


def test_readers_of_one_array_are_one_kernel_unless_one_needs_the_other():
    def both(x):
        y = x @ x
        first, last = jnp.sin(y), jnp.cos(y)
        return first @ x[:, :1], last

    assert live(both, X) == on_gpu(both, X) == 2 + 1 / 64  # XLA does not look behind a product

    def scaled(x):
        y = x @ x
        least = y.min(-1, keepdims=True)
        first, last = jnp.sin(y - least), jnp.cos(y - least)
        return first @ x[:, :1], last

    assert live(scaled, X) == 2 + 1 / 64
    assert on_gpu(scaled, X) == 3 + 1 / 64

    def after(x):
        y = x @ x
        return y * (jnp.sin(y) @ x)

    assert live(after, X) == on_gpu(after, X) == 3


def test_what_is_held_is_there_until_it_is_read_and_can_be_written_over():
    assert live(lambda x, y: (x @ x) @ y, X, X, held=[1]) == 3
    assert live(lambda x, y: ((x * y) @ x) @ x, X, X, held=[1]) == 2
    assert live(lambda x, y: x * y, X, X, held=[1]) == 1


def test_what_others_hold_too_is_there_to_the_end():
    def thrice(x, y):
        return ((x @ y) @ y) @ y

    assert live(thrice, X, X, held=[0]) == 2
    assert live(thrice, X, X, held=[0], live_to_end=[0]) == 3


def test_parts_that_are_summed_up_are_copied_where_products_fuse_operands():
    def summed(x):
        first, second = jnp.split(x @ x, 2)
        return first.reshape(16, 2, 64).sum(1), second

    assert live(summed, X) == 1.25
    assert live(summed, X, fuses=True) == 1.75


def test_a_part_keeps_all_of_its_array_unless_it_is_behind_a_barrier():
    def parts(x, y, apart):
        left = (x @ x)[:, :16]  # a quarter of an array
        if apart:
            left = lax.optimization_barrier(left)
        return left @ ((y @ y) @ y)[:16]

    # While y @ y @ y is computed two arrays are there, and the part or all of a third one.
    assert live(lambda x, y: parts(x, y, False), X, X) == 3
    assert live(lambda x, y: parts(x, y, True), X, X) == 2.25


def test_what_only_products_read_takes_half_where_they_round_it():
    assert live(lambda x: (x @ x) @ x, X, fuses=True) == 1.5
    assert live(lambda x: jnp.sin(x @ x).T @ x, X, fuses=True) == 1.5
    assert live(lambda x: jnp.sin(x @ x), X, fuses=True) == 1

    def read_again(x):
        first = x @ x
        return (first @ x) + first

    assert live(read_again, X, fuses=True) == 2

    def exactly(x):
        return jnp.matmul(jnp.matmul(x, x), x, precision="highest")

    assert live(exactly, X, fuses=True) == 2


def test_what_is_elementwise_is_computed_inside_of_products_where_they_do_that():
    def twice(x):
        first = x @ x
        return jnp.sin(first) @ x + first

    assert live(twice, X) == 3
    assert live(twice, X, fuses=True) == 2  # the product alone is in memory, whole
    # Nothing but the sine is read: it takes the product's place, rounded, and not its own.
    assert live(lambda x: jnp.sin(x @ x) @ x, X, fuses=True) == 1.5
    # A sum over its rows is no matrix product.
    assert live(lambda x: jnp.sin(x @ x) @ x + jnp.sin(x @ x).cumsum(0), X, fuses=True) == 3


def test_what_is_also_summed_up_is_made_in_the_place_of_the_product_unless_it_needs_the_sum():
    def summed(x, divided):
        first = x @ x
        total = first.sum()
        return jnp.sin(first / total if divided else first) @ x, total

    assert live(lambda x: summed(x, False), X, fuses=True) == 1.5 + 4 / SIZE
    assert live(lambda x: summed(x, True), X, fuses=True) == 2 + 4 / SIZE


def test_a_cast_to_what_products_read_is_stored_in_its_place():
    closed = jax.make_jaxpr(lambda x, y: (x.astype(jnp.bfloat16) @ y, jnp.sin(y)))(X, X)
    x, y = closed.jaxpr.invars
    rounded = read_rounded(closed.jaxpr, TPU)
    assert not read_rounded(closed.jaxpr, GPU)
    assert x in rounded
    assert y not in rounded


def test_barriers_keep_products_from_computing_and_from_rounding():
    def barred(x):
        left, right = lax.optimization_barrier((jnp.sin(x @ x), jnp.cos(x @ x.T)))
        return left @ x, right @ x

    closed = jax.make_jaxpr(barred)(X)
    (barrier,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "optimization_barrier")
    assert not read_rounded(closed.jaxpr, TPU).intersection(barrier.invars)
    assert live(barred, X, fuses=True) == live(barred, X)


def test_gradients_that_products_make_and_read_are_rounded_where_they_are_made():
    def through_tanh(given, derivative, w):
        through = given * derivative
        return through @ w, w.T @ through

    closed = jax.make_jaxpr(through_tanh)(X, X, X)
    given, *_ = closed.jaxpr.invars
    assert rounded_where_made(closed.jaxpr, [given], TPU) == {given}

    def read_again(given, derivative, w):
        return through_tanh(given, derivative, w), given + 1

    closed = jax.make_jaxpr(read_again)(X, X, X)
    assert rounded_where_made(closed.jaxpr, closed.jaxpr.invars[:1], TPU) == set()


@pytest.mark.parametrize("compiler", [GPU, TPU])
def test_what_a_gather_reads_is_in_memory_on_tpus(compiler):
    def picked(x, at):
        return jnp.take_along_axis(jnp.exp(x), at, axis=1).sum()

    specs = X, jax.ShapeDtypeStruct((X.shape[0], 1), "int32")
    found = in_memory(_jax.inlined(jax.make_jaxpr(picked)(*specs)).jaxpr, compiler)
    large = [var for var in found if var.aval.size == X.size]
    assert len(large) == (2 if compiler is TPU else 1)


HEADS = jax.ShapeDtypeStruct((2, 8, 4, 16), "float32")


@pytest.mark.parametrize(
    ("scores", "turned"), [("bqhd,bkhd->bhqk", 2), ("bhqd,bkhd->bhqk", 1), ("bhqd,bhkd->bhqk", 0)]
)
def test_operands_whose_batch_axes_do_not_lead_are_copied(scores, turned):
    def layer(x, y):
        x, y = jnp.sin(x), jnp.cos(y)
        if scores.startswith("bhqd"):
            x = jnp.sin(x.reshape(2, 4, 8, 16))
        if "bhkd" in scores:
            y = jnp.cos(y.reshape(2, 4, 8, 16))
        return jnp.einsum(scores, x, y)

    found = read_turned(jax.make_jaxpr(layer)(HEADS, HEADS).jaxpr)
    assert len(found) == turned


def test_what_a_kernel_makes_or_reads_as_it_lies_is_in_memory_though_another_turns_it():
    def layer(x, w):
        made, read = (x @ w).reshape(2, 8, 4, 16), jnp.sin(x).reshape(2, 8, 4, 16)
        scores = jnp.einsum("bqhd,bkhd->bhqk", made, read)
        return scores, jnp.sin(x) @ w

    rows, weights = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 64), (64, 64)))
    closed = jax.make_jaxpr(layer)(rows, weights)
    product = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "dot_general")
    found = read_turned(closed.jaxpr)
    assert found
    assert not found & {*product.outvars, *closed.jaxpr.invars}


def test_what_products_read_transposed_is_laid_out_anew_with_all_that_it_follows_from():
    def scaled(tape, small, mask, w):
        through = jnp.where(mask, tape * small, 0.0)
        return lax.dot_general(through.T, w, (((1,), (0,)), ((), ())))

    column = jax.ShapeDtypeStruct((64, 1), "float32")
    mask = jax.ShapeDtypeStruct((64, 64), "bool")
    closed = jax.make_jaxpr(scaled)(X, column, mask, column)
    tape, _, mask, _ = closed.jaxpr.invars
    assert layout_copies(closed.jaxpr) == {tape, mask}
    for product in (lambda tape, w: jnp.sin(tape) @ w, lambda tape, w: tape.T @ w):
        assert layout_copies(jax.make_jaxpr(product)(X, X).jaxpr) == set()
    copies = {"copied": [tape, mask], "compiler": TPU}
    assert peak_live_bytes(closed, **copies) == SIZE + SIZE // 4 + 64 * 4
    # While the one is read, which is next to its slice then.
    assert peak_live_bytes(closed, **copies, layout_copies=[tape, mask]) == 2 * SIZE


# The TPU's compiler takes its time.
@pytest.mark.parametrize("where", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_it_is_what_a_compiler_allocates(where):
    """A chain of products of different widths, and its gradient, for devices that are not there."""
    widths = [512, 1024, 256, 2048, 512]
    sizes = list(itertools.pairwise(widths))
    params = [jax.ShapeDtypeStruct(size, "float32") for size in sizes]
    x = jax.ShapeDtypeStruct((131072, 512), "float32")

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    texts = compiled(where, jax.grad(loss), params, x)
    stats = texts.stats
    closed = _jax.inlined(jax.make_jaxpr(jax.grad(loss))(params, x))
    outputs = sum(4 * int(np.prod(size)) for size in sizes)
    assert stats["output_bytes"] >= outputs
    predicted = peak_live_bytes(closed, compiler=of_platform(where))
    assert abs(predicted / (stats["temp_bytes"] + outputs) - 1) < 0.05
