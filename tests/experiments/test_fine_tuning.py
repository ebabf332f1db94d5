"""`fine_tuning_memory.py` and `fine_tuning_loss.py`: their smallest forms, and what is said."""

from pathlib import Path
from typing import Any

import chex
import fine_tuning_loss
import fine_tuning_memory
import jax
import jax.numpy as jnp
import pytest

from tuning import models


@pytest.mark.slow
def test_memory_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    options = fine_tuning_memory.Options(results=tmp_path, small=True)
    rows = fine_tuning_memory.main(options)
    plain, norms, low, merged = (row.required_bytes for row in rows)
    assert merged <= low < norms < plain
    # Without the two bits there are the inputs of GELU in two layers, more than once.
    hidden = 2 * 64 * 197 * 3072
    assert norms - low > 2 * hidden
    assert "| ViT-B, adapters (h100-80g) |" in fine_tuning_memory.summary(rows)
    assert fine_tuning_memory.main(options) == rows


SMALL = {
    "classes": models.Model(2, 16, 32, 2, 10, 3, 5, 2, causal=False, stream="float32"),
    "words": models.Model(2, 16, 32, 2, 50, 3, 6, 2, causal=True, stream="bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tuned"),
    [
        ("classes", "query, value"),
        pytest.param("words", "adapters", marks=pytest.mark.slow),
        pytest.param("classes", "all", marks=pytest.mark.slow),
    ],
)
def test_a_step_trains_what_is_to_be_trained_and_its_loss_is_that_of_the_plain_one(
    name: str, tuned: models.Tuned
) -> None:
    """Norms' scales are one and their biases zero here, so that merging them changes nothing."""
    losses = []
    for form in ("plain", "norms", "low memory", "merged"):
        job = models.train(SMALL[name], tuned, form)
        leaves, tree = jax.tree.flatten_with_path(job.args)

        def value(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
            words = jax.tree_util.keystr(path)
            if path[0].idx == 1:
                return jnp.zeros(spec.shape, spec.dtype)
            if "norm" in words:
                return jnp.full(spec.shape, 0.0 if "bias" in words else 1.0, spec.dtype)
            if not jnp.issubdtype(spec.dtype, jnp.floating):
                return jnp.arange(spec.size).reshape(spec.shape).astype(spec.dtype) % 10
            # The same numbers for the same weight, whatever else there is.
            key = jax.random.key(sum(words.encode()))
            return 0.3 * jax.random.normal(key, spec.shape).astype(spec.dtype)

        args = tree.unflatten([value(path, spec) for path, spec in leaves])
        loss, trained, _ = jax.jit(job.step)(*args)
        losses.append(loss)
        chex.assert_tree_all_finite((loss, trained))
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), args[0], trained)
        assert any(jax.tree.leaves(moved))
    chex.assert_trees_all_equal(*losses[:3])
    chex.assert_trees_all_close(*losses, rtol=1e-2)


@pytest.mark.slow
def test_loss_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    options = fine_tuning_loss.Options(results=tmp_path, small=True)
    rows = fine_tuning_loss.main(options)
    plain, low = rows
    assert low.residual_bytes < 0.6 * plain.residual_bytes
    assert plain.before == low.before > plain.loss
    assert abs(low.loss - plain.loss) < 0.1
    assert "mean difference" in fine_tuning_loss.summary(rows)
    assert fine_tuning_loss.main(options) == rows
