"""The loop over time in all the ways that are compared, and how often each runs the cell.

Every way is a function of parameters and inputs that returns the last hidden state.  Shapes:
S steps, B sequences, F features, D width; parameters are "in" (F, 4D), "recurrent" (D, 4D) and
"bias" (4D,), inputs (S, B, F).
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem

Run = Callable[[Any, jax.Array], jax.Array]
Cell = Callable[[Any, Any, jax.Array, jax.Array], Any]
Spec = jax.ShapeDtypeStruct

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run the loop.

    Attributes:
      kind: "none", "sqrt" (of one level), "levels" or "revolve" of jaxmem, or "equinox".
      number: of levels, or of the carries that may be held; 0 where there is none to choose.
    """

    kind: str
    number: int = 0

    def __str__(self) -> str:
        return {
            "none": "everything kept",
            "sqrt": "remat_sqrt",
            "levels": f"remat_sqrt, {self.number} levels",
            "revolve": f"remat_revolve, {self.number} slots",
            "equinox": f"equinox, {self.number} checkpoints",
        }[self.kind]

    @property
    def policy(self) -> jaxmem.Policy | None:
        """Of jaxmem; None where the loop is another library's."""
        policies = jaxmem.policies
        return {
            "none": policies.none,
            "sqrt": policies.sqrt,
            "levels": lambda: policies.sqrt(levels=self.number),
            "revolve": lambda: policies.revolve(self.number),
            "equinox": lambda: None,
        }[self.kind]()

    def run(self, cell: Cell, plan: jaxmem.Plan | None = None) -> Run:
        """The loop with this cell.

        Args:
          plan: to use instead of the one that the policy makes for these sizes.
        """
        if self.policy is None:
            return _equinox(cell, self.number)
        return jaxmem.remat(_scan(cell), plan or self.policy)


# ---------------------------------------------------------------- API


def lstm(params: Any, carry: Any, x: jax.Array, _: jax.Array) -> Any:
    """One step: the new (hidden, cell) state."""
    hidden, state = carry
    gates = x @ params["in"] + hidden @ params["recurrent"] + params["bias"]
    take, forget, new, show = jnp.split(gates, 4, axis=-1)
    state = jax.nn.sigmoid(forget) * state + jax.nn.sigmoid(take) * jnp.tanh(new)
    return jax.nn.sigmoid(show) * jnp.tanh(state), state


def shapes(steps: int, batch: int, features: int, width: int) -> tuple[Any, Spec]:
    """Parameters and inputs, described."""
    params = {"in": (features, 4 * width), "recurrent": (width, 4 * width), "bias": (4 * width,)}
    specs = {name: Spec(shape, "float32") for name, shape in params.items()}
    return specs, Spec((steps, batch, features), "float32")


def arrays(specs: tuple[Any, Spec]) -> tuple[Any, jax.Array]:
    """Numbers of these shapes, with which the first step still has a say in the last state."""
    rng = np.random.default_rng(0)
    params, inputs = jax.tree.map(
        lambda s: rng.normal(size=s.shape, scale=s.shape[0] ** -0.5), specs
    )
    width = params["recurrent"].shape[0]
    # Forget gates that remember for about as long as the sequence is (Tallec & Ollivier 2018).
    params["bias"] = np.zeros(4 * width)
    params["bias"][width : 2 * width] = np.log(len(inputs))
    return jax.tree.map(lambda a: jnp.asarray(a, "float32"), (params, inputs))


def gradient(run: Run) -> Callable[..., Any]:
    """Loss and gradient with respect to the parameters, of a loss on the last state."""

    def loss(params: Any, inputs: jax.Array) -> jax.Array:
        return jnp.square(run(params, inputs)).mean()

    return jax.value_and_grad(loss)


def counted(way: Way, plan: jaxmem.Plan | None, specs: tuple[Any, Spec]) -> tuple[int, Any]:
    """How often the cell really runs in one value_and_grad, and what comes of it."""
    runs, lock = 0, threading.Lock()

    def tick(_: jax.Array) -> None:
        nonlocal runs
        with lock:  # callbacks may come from several threads
            runs += 1

    def cell(params: Any, carry: Any, x: jax.Array, number: jax.Array) -> Any:
        # The number ties it to its step: a callback that is the same in all is run once.
        jax.debug.callback(tick, number)
        return lstm(params, carry, x, number)

    found = jax.jit(gradient(way.run(cell, plan)))(*arrays(specs))
    jax.block_until_ready(found)
    jax.effects_barrier()
    return runs, found


# ---------------------------------------------------------------- implementation


def _start(params: Any, inputs: jax.Array) -> Any:
    zeros = jnp.zeros((inputs.shape[1], params["recurrent"].shape[0]), inputs.dtype)
    return zeros, zeros


def _scan(cell: Cell) -> Run:
    def run(params: Any, inputs: jax.Array) -> jax.Array:
        def step(carry: Any, at: Any) -> tuple[Any, None]:
            return cell(params, carry, *at), None

        xs = inputs, jnp.arange(len(inputs))
        return jax.lax.scan(step, _start(params, inputs), xs)[0][0]

    return run


def _equinox(cell: Cell, checkpoints: int) -> Run:
    from equinox import internal as eqxi

    def run(params: Any, inputs: jax.Array) -> jax.Array:
        def step(carry: Any, at: Any) -> tuple[Any, None]:
            return cell(params, carry, *at), None

        xs = inputs, jnp.arange(len(inputs))
        start = _start(params, inputs)
        end, _ = eqxi.scan(step, start, xs, kind="checkpointed", checkpoints=checkpoints)
        return end[0]

    return run
