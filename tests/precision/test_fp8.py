"""Products in 8 bits by flax's own operations: policies, reports and `fit` count their bytes.

All three operations of `flax.linen.fp8_ops` run on jax 0.10, forward and backward, in a scan and
under every policy.  NNX has none of its own.
"""

import collections
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jaxmem

N, D, F, B = 8, 64, 256, 128
X = jnp.linspace(-1, 1, B * D).reshape(B, D)
# Scales and histories of the largest numbers; their "gradients" are their new values.
FP8 = "_overwrite_with_gradient"
DIRECT: Any = nn.fp8_ops.Fp8DirectDotGeneralOp
OPERATIONS = [nn.fp8_ops.Fp8DotGeneralOp, DIRECT, nn.fp8_ops.NANOOFp8DotGeneralOp]
Operations = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.__name__)


class Block(nn.Module):
    operation: Any
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        dense = functools.partial(nn.Dense, dot_general_cls=self.operation, dtype=self.dtype)
        return x + dense(D)(nn.relu(dense(F)(x))), None


class Model(nn.Module):
    operation: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan = nn.scan(
            Block, variable_axes={"params": 0, FP8: 0}, split_rngs={"params": True}, length=N
        )
        return scan(self.operation)(x, None)[0]


def problem(operation: Any, *decorators: Any) -> tuple[Any, Any]:
    cls: Any = Model
    for decorator in decorators:
        cls = decorator(cls)
    model = cls(operation)
    variables = jax.jit(Model(operation).init)(jax.random.key(0), X)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return (model.apply(variables, x).astype(jnp.float32) ** 2).mean()

    return loss, variables


# flax warns of the operation that casts to 8 bits and back, which it has replaced.
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")
@Operations
def test_all_three_run_and_hand_back_their_scales(operation: Any):
    loss, variables = problem(operation, jaxmem.mixed_precision)
    value, gradients = jax.jit(jax.value_and_grad(loss))(variables, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}
    assert any(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(gradients[FP8]))
    if operation is not DIRECT:
        return
    loss, _ = problem(operation, jaxmem.mixed_precision, jaxmem.remat_dots)
    found = jax.jit(jax.value_and_grad(loss))(variables, X)
    chex.assert_trees_all_close(found, (value, gradients), rtol=2e-2, atol=1e-3)


def kept(operation: Any, *decorators: Any) -> collections.Counter[str]:
    """Bytes that are saved for the backward pass, by type."""
    loss, variables = problem(operation, jaxmem.mixed_precision, *decorators)
    found: collections.Counter[str] = collections.Counter()
    for residual in jaxmem.saved_residuals(loss, variables, X).rows:
        found[residual.dtype] += residual.bytes
    return found


def test_what_a_product_in_8_bits_keeps_is_counted_in_bytes_of_8_bits():
    everything = kept(DIRECT)
    # Of each layer the inputs of both products, at one byte a number, and the weights.
    assert everything["float8_e4m3fn"] >= N * (B * D + B * F)
    assert kept(DIRECT, jaxmem.remat_full)["float8_e4m3fn"] == 0
    assert kept(nn.fp8_ops.NANOOFp8DotGeneralOp)["float8_e4m3fn"] == 0  # casts forth and back


@pytest.mark.slow
def test_reports_and_fit_on_an_absent_h100():
    """`fit` finds a plan that needs less than everything kept, and says what it needs."""
    loss, variables = problem(DIRECT, jaxmem.mixed_precision, jaxmem.remat_auto)
    step = jax.grad(loss)
    needed = {}
    for policy in ("none", "full"):
        with jaxmem.use_policy(policy):
            report = jaxmem.memory_report(step, variables, X, target="h100-80g")
        needed[policy] = report.required_bytes
    budget = (needed["none"] + needed["full"]) // 2
    fitted = jaxmem.fit(step, variables, X, budget=budget, target="h100-80g", progress=False)
    assert fitted.report.required_bytes <= budget < needed["none"]
