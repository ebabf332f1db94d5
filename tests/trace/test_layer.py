"""A layer taken apart: what of it a derivative is about."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.trace.layer import Body, Wrt, differentiated


def test_what_takes_part_in_a_derivative_is_what_jax_differentiates() -> None:
    """Told by the operations where they are plain, and by a trace where a tangent may end."""

    def layer(h: jax.Array, c: jax.Array, w: jax.Array, n: jax.Array) -> Any:
        stopped = lax.stop_gradient(jnp.tanh(h @ w))
        return h + stopped, c * 2, stopped, (h > 0).astype("f4"), jnp.floor(w), n + 1

    args = [jnp.ones((4, 4))] * 3 + [jnp.int32(0)]
    body = Body(jax.make_jaxpr(layer)(*args), 0, 2)
    for c in (False, True):
        wrt = differentiated(body, [], [False, c], [True, False])
        assert wrt == Wrt((False, c, True, False), (False, c, False, False, False, False))
    wrt = differentiated(body, [], [True, False], [False, False])
    assert wrt == Wrt((True, False, False, False), (True, False, False, False, False, False))
    grows = Body(jax.make_jaxpr(lambda h, c, w: (h @ w, h + c))(*args[:3]), 0, 2)
    assert differentiated(grows, [], [False, False], [True]) == Wrt((True,) * 3, (True,) * 2)
