"""The train step as a compiled program, and what the compiler says of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh

import jaxmem
from jaxmem import Plan
from jaxmem.policies import Policy
from lm import data, model, optimizers
from lm.config import Config
from lm.mesh import Layout

# ---------------------------------------------------------------- types


class State(NamedTuple):
    """What one step passes to the next."""

    params: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program, each as the compiler gives it."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def required(self) -> int:
        """What must be allocated to run it."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class Program:
    """The train step under one policy.

    Attributes:
      config: what the model and the optimizer are made from.
      plans: the plan of each layer stack that the policy found.
      step: compiled; takes a state (which it uses up), the sequences of one call and a key,
        and returns a state, the mean loss and the weight that this mean has.
    """

    config: Config
    plans: tuple[Plan, ...]
    step: jax.stages.Compiled

    @property
    def extra_forwards(self) -> int:
        """Layer evaluations in one microbatch beyond the first forward pass."""
        return sum(plan.extra_forwards() for plan in self.plans)

    @property
    def memory(self) -> Memory | None:
        """What the compiler says, or None where the backend says nothing."""
        found = self.step.memory_analysis()
        if found is None:
            return None
        return Memory(
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
        )

    def run(self, state: State, step: int) -> tuple[State, float]:
        """One step of the optimizer, over all its microbatches: the state and the mean loss."""
        c = self.config
        found = []
        for part in range(c.calls):
            rows, key = _rows(c, step, part), _dropout_key(c, step, part)
            state, *loss_and_weight = self.step(state, rows, key)
            found.append(loss_and_weight)
        losses, weights = np.array(jax.device_get(found), np.float64).T
        return state, float(np.average(losses, weights=weights))


# ---------------------------------------------------------------- API


def initial(config: Config) -> State:
    """The state before the first step; it is that of every policy."""
    if (layout := config.layout) is None:
        return _initial(config)
    return jax.jit(_initial, static_argnums=0, out_shardings=layout.of(shapes(config)))(config)


def optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """That of the options, over as many calls as they say; takes `weight=`."""
    warm_up = max(1, config.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / warm_up,
        peak_value=config.learning_rate,
        warmup_steps=warm_up,
        decay_steps=max(config.steps, warm_up + 1),
        end_value=config.learning_rate / 20,
    )
    inner = optimizers.make(
        config.optimizer,
        rate,
        config.state,
        config.weights,
        config.clip,
        config.folder() / "state",
        config.checkpoint_every,
        **config.signs,
    )
    if config.calls == 1:
        return optax.with_extra_args_support(inner)
    return jaxmem.MultiSteps(inner, config.calls).gradient_transformation()


def build(config: Config, policy: Policy) -> Program:
    """Plan, trace and compile the train step under `policy`."""
    loss = _loss(config, policy)
    state = shapes(config)
    rows = config.batch // config.calls
    tokens = jax.ShapeDtypeStruct((rows, config.sequence + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    options: dict[str, Any] = {}
    if (layout := config.layout) is not None:
        places, everywhere = layout.of(state), layout.replicated
        options["in_shardings"] = (places, layout.batch, everywhere)
        options["out_shardings"] = (places, everywhere, everywhere)
    step = jax.jit(_step(config, loss), donate_argnums=0, **options)
    return Program(
        config,
        tuple(stack.plan for stack in jaxmem.stacks(loss, state.params, tokens, key)),
        step.lower(state, tokens, key).compile(),
    )


def shapes(config: Config, devices: int | None = None) -> State:
    """Those of `initial`; of a state on the host the arrays themselves, which say where they are.

    A `jax.ShapeDtypeStruct` with the sharding of such an array is taken for one on the device.

    Args:
      devices: for an optimizer that sends signs, how many it is for; by default those of the mesh.
    """
    if config.state.endswith("host"):
        return initial(config)
    return jax.eval_shape(lambda: _initial(config, devices))


def held_out_loss(config: Config) -> Any:
    """A compiled function from parameters to the loss on held-out text, dropout off."""
    tokens = data.held_out(size=4 * config.batch, sequence=config.sequence)
    loss = functools.partial(model.loss, config, jaxmem.policies.none(), key=None)
    if (layout := config.layout) is None:
        evaluate = jax.jit(loss)
        return lambda params: float(evaluate(optimizers.in_float32(params), tokens))
    batch = layout.rows(tokens.shape, lambda rows: tokens[rows])
    over = jax.jit(
        lambda params, tokens: loss(optimizers.in_float32(params), tokens),
        out_shardings=layout.replicated,
    )
    return lambda params: float(over(params, batch))


# ---------------------------------------------------------------- implementation

_params = jax.jit(model.init, static_argnums=0)


def _initial(config: Config, devices: int | None = None) -> State:
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    params = optimizers.stored(_params(_architecture(config), key), config.weights)
    if config.sends_signs and (layout := config.layout) is not None:
        mesh = AbstractMesh((devices or layout.mesh.shape["data"],), ("data",))
        with jax.sharding.use_abstract_mesh(mesh):
            return State(params, optimizer(config).init(params))
    return State(params, optimizer(config).init(params))


def _rows(config: Config, step: int, part: int) -> Any:
    """The sequences of one call; with a mesh, those of this process' devices are read alone."""
    draw = data.ragged_batch if config.ragged else data.batch
    size = config.batch // config.calls

    def cut(rows: slice) -> np.ndarray:
        wanted = slice(part * size + rows.start, part * size + rows.stop)
        return draw(
            step, seed=config.seed, size=config.batch, sequence=config.sequence, rows=wanted
        )

    if (layout := config.layout) is None:
        return cut(slice(0, size))
    return layout.rows((size, config.sequence + 1), cut)


def _loss(config: Config, policy: Policy) -> Callable[..., Any]:
    loss = functools.partial(model.ragged_loss if config.ragged else model.loss, config, policy)
    if config.weights == "float32":
        return loss
    return lambda params, *args: loss(optimizers.in_float32(params), *args)


def _step(config: Config, loss: Callable[..., Any]) -> Callable[..., Any]:
    """From state, sequences and a key to state, mean loss and its weight."""
    options: dict[str, Any] = {
        "microbatches": config.accum // config.calls, "rng_argnums": 2, "return_weight": True,
    }  # fmt: skip
    if config.weights == "bfloat16":  # as its moments are then
        options["accumulator_dtype"] = None
    inner = optimizer(config)
    if config.fused:
        value_and_update = jaxmem.value_and_update(loss, inner, **options)

        def fused(state: State, tokens: jax.Array, key: jax.Array) -> Any:
            (value, aux), *after = value_and_update(*state, tokens, key)
            return State(*after), value, aux.weight

        return fused
    if config.sends_signs and (layout := config.layout) is not None:
        parts = config.accum
        one_bit = jaxmem.one_bit_step(
            loss, inner, mesh=layout.mesh, microbatches=parts, rng_argnums=2
        )

        def sending_signs(state: State, tokens: jax.Array, key: jax.Array) -> Any:
            value, *after = one_bit(*state, tokens, key)
            return State(*after), value, jnp.ones(())

        return sending_signs
    value_and_grad = jaxmem.value_and_grad(loss, **options)
    if (layout := config.layout) is not None and layout.stages > 1:
        value_and_grad = _in_stages(config, loss, layout, options)

    def step(state: State, tokens: jax.Array, key: jax.Array) -> Any:
        (value, aux), gradient = value_and_grad(state.params, tokens, key)
        change, held = inner.update(gradient, state.optimizer, state.params, weight=aux.weight)
        return State(optax.apply_updates(state.params, change), held), value, aux.weight

    return step


def _in_stages(
    config: Config, loss: Callable[..., Any], layout: Layout, options: dict[str, Any]
) -> Callable[..., Any]:
    """As `jaxmem.value_and_grad` with these options, the layers on several devices."""
    names = ("microbatches", "rng_argnums", "accumulator_dtype")
    own = {name: options[name] for name in names if name in options}
    value_and_grad = jax.value_and_grad(jaxmem.pipeline(loss, mesh=layout.mesh, **own))

    def run(params: Any, tokens: jax.Array, key: jax.Array) -> Any:
        value, gradient = value_and_grad(params, tokens, key)
        weight: Any = len(tokens)
        if config.ragged:
            weight = (tokens[:, 1:] != data.PADDING).sum()
        return (value, jaxmem.BatchAux(None, jnp.asarray(weight, value.dtype))), gradient

    return run


def _architecture(config: Config) -> Config:
    """What the first parameters depend on, so that runs that share it compile them once."""
    names = ("framework", "layers", "width", "heads", "sequence", "dropout")
    return Config(**{name: getattr(config, name) for name in names})


def _dropout_key(config: Config, step: int, part: int) -> jax.Array:
    """A function of seed, step and microbatch: a resumed run draws the same masks."""
    if (layout := config.layout) is not None:
        # An array of this process alone is no argument of a program of several processes.
        return _key_over(layout)(np.uint32(config.seed), step, part)
    return _key(config.seed, step, part)


@functools.cache
def _key_over(layout: Layout) -> Any:
    return jax.jit(_key, out_shardings=layout.replicated)


def _key(seed: Any, step: Any, part: Any) -> jax.Array:
    root = jax.random.fold_in(jax.random.key(seed), 1)
    return jax.random.fold_in(jax.random.fold_in(root, step), part)
