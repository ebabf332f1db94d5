"""The memory of the compiled train step: parameters, Adam, and what accumulation adds.

Nothing is allocated.  Everything that can be donated is; the step with microbatches inside is given
the whole batch, the one across steps a microbatch, and the batch is not counted for either.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from acc.forms import (
    ADAM_A,
    AT_ONCE,
    BY_HAND,
    FORMS,
    MULTI_STEPS,
    ONE_MICROBATCH,
    OPTAX_MULTI_STEPS,
    WEIGHTED,
    Form,
    Losses,
)
from acc.table import NOT_COMPILED, Row
from lm import data, model
from lm.config import Config

MEMORY = "memory"
_FEW = (ONE_MICROBATCH, AT_ONCE, WEIGHTED, ADAM_A, BY_HAND, MULTI_STEPS, OPTAX_MULTI_STEPS)

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model to train, by shapes alone.

    Attributes:
      params, batch: shapes.
      forms: what is tried on it.
    """

    name: str
    losses: Losses
    params: Any
    batch: Any
    microbatches: int
    forms: tuple[Form, ...] = (ONE_MICROBATCH, *FORMS)

    def rows(self, form: Form) -> Any:
        """What one call of the step is given."""
        if form.takes == "batch":
            return self.batch
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (leaf.shape[0] // self.microbatches, *leaf.shape[1:]), leaf.dtype
            ),
            self.batch,
        )


# ---------------------------------------------------------------- the programs


def problems(width: int, layers: int, microbatches: int) -> tuple[Problem, ...]:
    """A stack of square matrices in three forms, and a transformer."""
    rows = microbatches * max(1, width // 8)
    # A TPU's compiler takes half a minute for some of these; the last two are tried on fewer.
    decorated = mlp("scanned, remat_full", recomputed, width, layers, rows, microbatches)
    return (
        mlp("unrolled", unrolled, width, layers, rows, microbatches),
        mlp("scanned", scanned, width, layers, rows, microbatches),
        dataclasses.replace(decorated, forms=_FEW),
        dataclasses.replace(transformer(width // 4, layers, microbatches), forms=_FEW),
    )


def mlp(
    name: str,
    stack: Callable[[Any, jax.Array], jax.Array],
    width: int,
    layers: int,
    rows: int,
    microbatches: int,
) -> Problem:
    """`layers` square matrices with tanh between them."""
    shape = (width, width)
    params: Any = jax.ShapeDtypeStruct((layers, *shape), jnp.float32)
    if stack is unrolled:
        params = [jax.ShapeDtypeStruct(shape, jnp.float32)] * layers
    losses = Losses(
        mean=lambda params, x: (stack(params, x) ** 2).mean(),
        weighted=lambda params, x: jaxmem.Weighted((stack(params, x) ** 2).sum(), x.size),
        weight=lambda x: x.shape[0],
    )
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return Problem(f"MLP, {name}", losses, params, batch, microbatches)


def unrolled(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]


recomputed = jaxmem.remat_full(scanned)


def transformer(width: int, layers: int, microbatches: int) -> Problem:
    """That of `train_lm.py`, its layers recomputed, on ragged sequences."""
    config = Config(layers=layers, width=width, heads=max(1, width // 64), sequence=width // 2)
    policy = jaxmem.policies.full()

    def mean(params: Any, tokens: jax.Array) -> jax.Array:
        return model.ragged_loss(config, policy, params, tokens, None).mean

    losses = Losses(
        mean=mean,
        weighted=lambda params, tokens: model.ragged_loss(config, policy, params, tokens, None),
        weight=lambda tokens: (tokens[:, 1:] != data.PADDING).sum(),
    )
    params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((4 * microbatches, config.sequence + 1), jnp.int32)
    return Problem("transformer, remat_full", losses, params, batch, microbatches)


# ---------------------------------------------------------------- API


def rows(problem: Problem, form: Form, device: str, timeout: float = 900.0) -> Iterator[Row]:
    """Bytes required, and the same without the batch in units of the parameters' own bytes."""
    step = form.make(problem.losses, optax.adam(1e-3), problem.microbatches)
    state, given = jax.eval_shape(step.init, problem.params), problem.rows(form)
    try:
        report = jaxmem.memory_report(
            step.update,
            problem.params,
            state,
            given,
            target=device,
            donate_argnums=(0, 1),
            timeout=timeout,
            suggest=False,
        )
    except jaxmem.CompileError as error:
        yield Row(
            MEMORY, problem.name, form.name, NOT_COMPILED, "", device, str(error).split("\n")[0]
        )
        return
    where = jax.default_backend() if device == "local" else device
    value = (report.required_bytes - size(given)) / size(problem.params)
    yield Row(MEMORY, problem.name, form.name, value, "P", where)
    yield Row(MEMORY, problem.name, form.name, report.required_bytes, "bytes", where)


def size(tree: Any) -> int:
    """Bytes of arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
