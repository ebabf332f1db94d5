"""What a pipeline says of what it is told and cannot do: the fact, the cause, the remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxmem

MESH = AbstractMesh((2, 4), ("stage", "data"))
W, X = jnp.ones((4, 3, 3)), jnp.ones((8, 3))


def loss(w: Any, x: Any) -> Any:
    return jnp.square(stack(w, x)).mean()


def stack(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def explained(fun: Any = loss, w: Any = W, x: Any = X, **options: Any) -> Any:
    return jaxmem.pipeline(fun, **{"mesh": MESH, "microbatches": 4, **options}).explain(w, x)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"axis": "pipe"},
            ValueError,
            "the stages of a pipeline lie along the axis 'pipe', and the mesh has 'stage', 'data'; "
            "pass one of these as axis=, or a mesh that has it",
        ),
        (
            {"axis": ("stage", "data")},
            TypeError,
            "axis must be the name of one mesh axis, got ('stage', 'data'); pass axis=\"stage\", "
            "or the name that it has in your mesh",
        ),
        (
            {"mesh": AbstractMesh((1, 8), ("stage", "data"))},
            ValueError,
            "the mesh {'stage': 1, 'data': 8} has one device along 'stage', and a pipeline needs "
            "two stages at least; pass a larger mesh, or use jaxmem.value_and_grad(loss, "
            "microbatches=...)",
        ),
        (
            {"mesh": 4},
            TypeError,
            "mesh must be a jax.sharding.Mesh or AbstractMesh, got 4; make one with "
            "jax.make_mesh((4,), ('stage',))",
        ),
        ({"microbatches": 0}, ValueError, "microbatches must be at least 1, got 0"),
        (
            {"schedule": "1b1f"},
            ValueError,
            "schedule='1b1f' is not known; pass one of 'gpipe', '1f1b', 'eager-1f1b', "
            "'interleaved', or \"auto\"",
        ),
        (
            {"schedule": "1f1b", "recompute": False},
            ValueError,
            'recompute=False keeps what all microbatches leave behind, which only "gpipe" can, and '
            "schedule='1f1b'; pass schedule=\"gpipe\", or a policy that keeps more",
        ),
        (
            {"layers": "size"},
            TypeError,
            "layers must be sizes, such as (3, 4, 4, 3), or \"cost\", got 'size'",
        ),
        (
            {"policy": jaxmem.Plan.full(4)},
            TypeError,
            "policy takes a policy, which fits stages of every length, and a jaxmem.Plan fits one; "
            'pass policy="full" or another',
        ),
        (
            {"batch_argnums": "x"},
            TypeError,
            "batch_argnums must be positions of arguments, such as 1 or (1, 2), got 'x'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        jaxmem.pipeline(loss, **{"mesh": MESH, **options})
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"chunks": 2},
            "chunks=2 is for schedule=\"interleaved\", and 'eager-1f1b' has one chunk on each "
            'device; pass schedule="interleaved", or leave chunks= out',
        ),
        (
            {"schedule": "interleaved"},
            'schedule="interleaved" gives each device several chunks of layers, got chunks=1; pass '
            'chunks=2 or more, or schedule="1f1b"',
        ),
        (
            {"schedule": "interleaved", "chunks": 2, "microbatches": 5},
            'schedule="interleaved" takes microbatches in groups of 2, one for each stage, and 2 '
            'do not divide 3; pass microbatches=2 or 4, or schedule="1f1b"',
        ),
        (
            {"schedule": "interleaved", "chunks": 3},
            "stack 0: 4 layers, from test_pipeline_errors.py:LINE (stack): 4 layers cannot be "
            "split over 2 stages with 3 chunks each; pass a mesh with at most 4 devices along "
            "'stage', or fewer chunks",
        ),
        (
            {"schedule": "gpipe", "recompute": False},
            "recompute=False is for a mesh of stages alone, and this one is {'stage': 2, 'data': "
            "4}; leave recompute= out, or pass a mesh whose axes but 'stage' have one device",
        ),
        (
            {"layers": (1, 2)},
            "layers=(1, 2) has 2 sizes with the sum 3, and there are 4 layers in 2 chunks; pass 2 "
            'sizes with the sum 4, or layers="cost"',
        ),
        (
            {"microbatches": 9},
            "microbatches=9 is more than the 8 rows of the batch (x is float32[8, 3]); pass at "
            "most 8, or a larger batch",
        ),
        (
            {"w": jnp.ones((1, 3, 3))},
            "stack 0: 1 layers, from test_pipeline_errors.py:LINE (stack): 1 layer cannot be split "
            "over 2 stages; pass a mesh with at most 1 devices along 'stage'",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_calls(options: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        explained(**options)
    line = stack.__code__.co_firstlineno + 1
    assert str(error.value) == text.replace("LINE", str(line))


def no_stack(w: Any, x: Any) -> Any:
    return jnp.square(x @ w[0]).mean()


def two_stacks(w: Any, x: Any) -> Any:
    return jnp.square(stack(w, stack(w, x))).mean()


def inside(w: Any, x: Any) -> Any:
    return jnp.square(jax.checkpoint(stack)(w, x)).mean()


def no_scalar(w: Any, x: Any) -> Any:
    return stack(w, x).mean(-1)


def with_aux(w: Any, x: Any) -> Any:
    return stack(w, x).mean(), x


def own_weight(w: Any, x: Any) -> Any:
    h = stack(w, x)
    return jaxmem.Weighted(h.sum(), jnp.square(h).sum())


@pytest.mark.parametrize(
    ("fun", "kind", "text"),
    [
        (
            no_stack,
            ValueError,
            "no layer stack in no_stack: a pipeline is made of a jax.lax.scan over layers, and "
            "there is none; scan the layers with jax.lax.scan, nn.scan, nnx.scan or jaxmem.scan",
        ),
        (
            two_stacks,
            ValueError,
            "two_stacks has 2 layer stacks, and one is split over the stages; pass where=, the "
            "index of one of them:\n  stack 0: 4 layers, from test_pipeline_errors.py:LINE (stack)"
            "\n  stack 1: 4 layers, from test_pipeline_errors.py:LINE (stack)",
        ),
        (
            inside,
            ValueError,
            "stack 0: 4 layers in SCOPE, from test_pipeline_errors.py:LINE (stack) is inside "
            "another call, such as jax.checkpoint or lax.cond, and cannot be split over stages "
            "there; call it outside (a pipeline recomputes its stages by itself, and layers by "
            "policy=)",
        ),
        (
            no_scalar,
            TypeError,
            "no_scalar must return its mean loss as a real floating-point scalar, or a "
            "jaxmem.Weighted(total, weight), got float32[2]",
        ),
        (
            with_aux,
            TypeError,
            "with_aux returned 2 values; pass has_aux=True if the first is the loss",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions(fun: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        explained(fun)
    line = str(stack.__code__.co_firstlineno + 1)
    found = str(error.value).replace(" in checkpoint,", " in SCOPE,")
    expected = text.replace("LINE", line)
    assert found == expected or found == expected.replace(" in SCOPE,", ",")


def test_one_of_several_stacks_is_chosen() -> None:
    for where in (1, lambda info: info.index == 1):
        assert explained(two_stacks, where=where).stages[0].layers == (2,)
    with pytest.raises(ValueError, match="where=2 chooses 0 of the stacks of two_stacks"):
        explained(two_stacks, where=2)


def test_weights_that_layers_compute() -> None:
    pipelined = jaxmem.pipeline(own_weight, mesh=MESH)
    with pytest.raises(ValueError, match="depends on what the layers compute, and a pipeline has"):
        jax.eval_shape(pipelined, W, X)


def test_gradients_of_the_batch() -> None:
    pipelined = jaxmem.pipeline(loss, mesh=MESH)
    with pytest.raises(ValueError, match="the gradient of the batch or of state is asked for, and"):
        jax.eval_shape(jax.grad(pipelined, 1), W, X)


def test_no_mesh_and_no_function() -> None:
    with pytest.raises(ValueError) as error:
        jaxmem.pipeline(loss)(W, X)
    assert str(error.value) == (
        "a pipeline has no mesh, and none is set; set one with jax.set_mesh, or pass mesh=, such "
        'as jax.make_mesh((4,), ("stage",))'
    )
    with pytest.raises(TypeError, match="pipeline takes a loss function, got an object of type in"):
        jaxmem.pipeline(3)  # pyright: ignore[reportArgumentType]


def test_a_mesh_without_devices_that_is_to_run() -> None:
    pipelined = jaxmem.pipeline(loss, mesh=MESH, microbatches=4)
    for run in (pipelined, jax.grad(pipelined)):
        with pytest.raises(ValueError) as error:
            run(W, X)
        assert str(error.value) == (
            "mesh= is abstract, {'stage': 2, 'data': 4} without devices, and the pipeline is to "
            "run; pass a mesh of devices, such as one of jax.make_mesh, or compile it alone, as "
            "jax.jit(...).lower and jaxmem.memory_report do"
        )
    assert "collective_permute" in jax.jit(jax.grad(pipelined)).lower(W, X).as_text()


def test_a_decorator_with_arguments_and_without() -> None:
    @jaxmem.pipeline(mesh=MESH, microbatches=2, schedule="1f1b")
    def first(w: Any, x: Any) -> Any:
        """A loss."""
        return loss(w, x)

    assert first.__doc__ == "A loss."
    assert str(first.explain(W, X)).startswith("1f1b, 2 stages, microbatches: 2 of 4 rows")
    assert jaxmem.pipeline(loss).__name__ == "loss"


def test_what_is_explained() -> None:
    """Without compiling, from types alone: ragged batches have two schedules."""
    types = jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct((10, 3), X.dtype)
    plan = jaxmem.pipeline(loss, mesh=MESH, microbatches=4).explain(*types)
    assert plan.rows == (3, 2)
    assert [schedule.microbatches for schedule in plan.schedules] == [2, 2]
    assert plan.message_bytes == 3 * 3 * 4
    assert plan.held_bytes == plan.message_bytes
    assert [stage.layers for stage in plan.stages] == [(2,), (2,)]
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert plan.ticks == 2 * (2 + 2)
    assert plan.bubble == pytest.approx(1 / 3)
