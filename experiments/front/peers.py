"""Other libraries' ways to run a stack of layers: flax, haliax, equinox.

All run the transformer of `programs.py`: the same layer, and the same stacked parameters, nested
as the library wants them.  A `Stack` is what they have in common: a function of the layer, of
x, (batch, sequence, width), and of parameters with the layers first, that returns the last x.

- flax: a linen module whose variables are a layer's parameters, under `nn.scan` and `nn.remat`,
  or under `nn.remat_scan`, which wants them cut into lengths and recomputes each level but the
  innermost.
- haliax: its `ScanCheckpointPolicy` in the documented form, by hand.  The newest release, 1.3, has
  no policies yet, and cannot be imported with jax 0.10.  The forms are those of its pre-releases:
  carries and inputs have names, and a policy says which of them are kept; nested, blocks of such
  layers are recomputed, and the loop over the blocks is unrolled.  Compiled for an H100 next to
  1.4.dev453 itself, each of the five had the very same bytes and matmul FLOPs.
- equinox: `equinox.internal.scan` of the checkpointed kind, which holds so many carries, and places
  them without asking how long the loop is.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
from equinox import internal as eqxi
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from common.compiling import QUICK
from jaxmem.estimate.costs import costs

Params = Any
Layer = Callable[[jax.Array, Params], tuple[jax.Array, None]]
Stack = Callable[[Layer, jax.Array, Params], jax.Array]

# ---------------------------------------------------------------- the libraries


class Block(nn.Module):
    """One layer of a stack, its parameters the module's own.

    Attributes:
      layer: what it does.
      shapes: of its parameters, by name.
      dtype: of all of them.
    """

    layer: Layer
    shapes: Mapping[str, tuple[int, ...]]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        given = {
            name: self.param(name, nn.initializers.zeros, shape, self.dtype)
            for name, shape in self.shapes.items()
        }
        return self.layer(x, given)[0]


def linen(policy: Any = None) -> Stack:
    """Each layer under `nn.remat`, in an `nn.scan`."""

    def stack(layer: Layer, x: jax.Array, params: Params) -> jax.Array:
        def step(block: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x), None

        class Scanned(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                rematted: Any = nn.remat(Block, prevent_cse=False, policy=policy)
                scanned = nn.scan(
                    step,
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=_length(params),
                )
                return scanned(rematted(*_block(layer, params), name="layers"), x, None)[0]

        out: Any = Scanned().apply({"params": {"layers": params}}, x)
        return out

    return stack


def linen_scan(*lengths: int, each: bool = False) -> Stack:
    """`nn.remat_scan` of loops in loops.

    Args:
      lengths: of the loops, the outermost first.
      each: whether layers are under `nn.remat`, too.
    """

    def stack(layer: Layer, x: jax.Array, params: Params) -> jax.Array:
        block: Any = nn.remat(Block, prevent_cse=False) if each else Block
        nested = nn.remat_scan(block, lengths=lengths)(*_block(layer, params))
        variables = jax.tree.map(lambda a: a.reshape(*lengths, *a.shape[1:]), params)
        out: Any = nested.apply({"params": variables}, x)
        return out

    return stack


def haliax(
    carries: bool | str = True, inputs: bool | str = False, blocks: int | None = None
) -> Stack:
    """haliax's `fold` under a `ScanCheckpointPolicy`, by hand.

    Args:
      carries, inputs: `save_carries` and `save_inputs`, of layers: True, False or "offload".
      blocks: `nested`, the number of blocks; None for no nesting.
    """
    kinds = {"carry": carries, "input": inputs}
    saved = [name for name, kind in kinds.items() if kind is True]
    if sent := [name for name, kind in kinds.items() if kind == "offload"]:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=sent,
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = jax.checkpoint_policies.save_only_these_names(*saved) if saved else None

    def stack(layer: Layer, x: jax.Array, params: Params) -> jax.Array:
        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def step(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
            p = jax.tree.map(lambda a: checkpoint_name(a, "input"), p)
            return layer(checkpoint_name(x, "carry"), p)

        if blocks is None:
            return jax.lax.scan(step, x, params)[0]
        cut = jax.tree.map(lambda a: a.reshape(blocks, -1, *a.shape[1:]), params)
        return jax.lax.scan(
            jax.checkpoint(functools.partial(jax.lax.scan, step)), x, cut, unroll=True
        )[0]

    return stack


def equinox(checkpoints: int) -> Stack:
    """equinox's checkpointed loop, which slices a layer's parameters out in its body."""

    def stack(layer: Layer, x: jax.Array, params: Params) -> jax.Array:
        return eqxi.scan(layer, x, params, kind="checkpointed", checkpoints=checkpoints)[0]

    return stack


# ---------------------------------------------------------------- what is asked of them


def job(size: Mapping[str, Any], stack: Stack) -> jaxmem.Job:
    """The value_and_grad of `programs.transformer(**size)`, its layers run by a stack."""
    heads, described = size["heads"], programs.transformer(**size)
    layer = functools.partial(programs.transformer_layer, heads=heads, fused=False)

    def value_and_grad(params: Params, x: jax.Array) -> Any:
        def loss(params: Params) -> jax.Array:
            return (stack(layer, x, params).astype(jnp.float32) ** 2).mean()

        return jax.value_and_grad(loss)(params)

    return jaxmem.Job(value_and_grad, described.args, name="transformer")


def model_flops(size: Mapping[str, Any]) -> int:
    """The matmul FLOPs of the transformer, without recomputation."""
    bare = programs.transformer(**size, checkpoint="none")
    return int(costs(jax.make_jaxpr(bare.step)(*bare.args)).matmul_flops)


def off(stack: Stack, layers: int) -> float:
    """By how much its loss and gradients differ from those of everything kept.

    Of a transformer of float32 with so many layers, small in all else, on the attached backend:
    the largest difference in any entry, over the largest entry of that parameter's gradient.
    """
    found, plain = jax.tree.leaves(_run(job(_small(layers), stack))), jax.tree.leaves(_kept(layers))
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, plain, strict=True))


def loop_flops(compiled: int, model: int, stack: Stack, layers: int) -> int:
    """The matmul FLOPs of equinox's loops, whose lengths a compiler may not see.

    Args:
      compiled: matmul FLOPs of the compiled program, a loop of unknown length as if it ran once.
        The loop forward evaluates all layers.  The one backward evaluates a layer, and
        differentiates it in a branch that is taken once for each layer; how often it goes round
        is counted where a loop of as many steps runs.
      model: the same without recomputation.

    Raises:
      ValueError: the compiled program has other matmul FLOPs than that.
    """
    if compiled >= model:
        return compiled  # all lengths were seen
    one, rest = divmod(model, 3 * layers)
    derivative = 2 * one
    once = compiled - (layers * one if compiled > layers * one else one)
    rounds = evaluations(stack, layers) - layers
    # Where each round differentiates, what the derivative does not need is not evaluated.
    least = derivative if rounds == layers else derivative + one
    if rest or not least <= once <= derivative + one:
        raise ValueError(
            f"{compiled} operations are not a loop over {layers} evaluations of {one}, "
            "and once an evaluation and a derivative"
        )
    return layers * one + rounds * (once - derivative) + layers * derivative


@functools.cache
def evaluations(stack: Stack, layers: int) -> int:
    """How often layers really run in one value_and_grad of a stack of so many."""
    runs, lock = 0, threading.Lock()

    def tick(_: jax.Array) -> None:
        nonlocal runs
        with lock:  # callbacks may come from several threads
            runs += 1

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        # The number ties it to its layer: a callback that is the same in all is run once.
        jax.debug.callback(tick, p["number"])
        return jnp.sin(x * p["scale"]), None

    def loss(scale: jax.Array, x: jax.Array) -> jax.Array:
        return stack(layer, x, {"scale": scale, "number": jnp.arange(layers)}).sum()

    jax.block_until_ready(_quickly(jax.grad(loss))(jnp.ones(layers), jnp.ones(3)))
    jax.effects_barrier()
    return runs


# ---------------------------------------------------------------- implementation


def _length(params: Params) -> int:
    return len(jax.tree.leaves(params)[0])


def _block(layer: Layer, params: Params) -> tuple[Any, ...]:
    """The fields of a `Block` of such layers."""
    shapes = {name: a.shape[1:] for name, a in params.items()}
    return layer, shapes, jax.tree.leaves(params)[0].dtype


def _small(layers: int) -> dict[str, Any]:
    return {"batch": 2, "sequence": 8, "width": 8, "heads": 2, "dtype": "float32", "layers": layers}


@functools.cache
def _kept(layers: int) -> Any:
    return _run(programs.transformer(**_small(layers), checkpoint="none"))


def _run(job: jaxmem.Job) -> Any:
    """With the same numbers for the same shapes."""
    rng = np.random.default_rng(0)
    args = jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(size=spec.shape, scale=0.3), spec.dtype), job.args
    )
    return _quickly(job.step)(*args)


def _quickly(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled in half the time, for what runs once, in no time; on a CPU."""
    quick = QUICK if jax.default_backend() == "cpu" else None
    return jax.jit(step, compiler_options=quick)
