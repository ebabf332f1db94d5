"""Models of various structures, each a train step for `jaxmem.fit` to bring within budgets.

    jaxmem fit experiments/budgeted_models.py:unet --budget 100MiB --target h100-80g

Nothing is allocated: arguments are described by shape.  The whole forward pass is decorated;
it is a layer stack where it has a scan, and unrolled code where it has none.

Shapes: B batch, D width, S positions, E experts, H height and width of an image.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import programs
from jax import lax

import jaxmem

Spec = jax.ShapeDtypeStruct

# ---------------------------------------------------------------- the models


def matrix_chain(batch: int = 65536) -> jaxmem.Job:
    """Matrix products of sizes that differ, one after another in a Python loop."""
    widths = (512, 1024, 256, 2048, 512, 512, 1536, 256, 1024, 128, 768, 512)
    params = [Spec(pair, "float32") for pair in itertools.pairwise(widths)]

    @jaxmem.remat_auto
    def forward(params: Any, h: jax.Array) -> jax.Array:
        for w in params:
            h = jnp.tanh(h @ w)
        return h

    return _step("matrix_chain", forward, params, Spec((batch, widths[0]), "float32"))


def unet(batch: int = 256, size: int = 64, width: int = 32, levels: int = 3) -> jaxmem.Job:
    """Two convolutions at each level, down and up again, what went down joined to what comes up."""

    def pair(name: str, given: int, made: int) -> dict[str, Spec]:
        shapes = {f"{name}_1": (3, 3, given, made), f"{name}_2": (3, 3, made, made)}
        return {key: Spec(shape, "float32") for key, shape in shapes.items()}

    wide = [width * 2**level for level in range(levels + 1)]
    params = pair("down_0", 8, wide[0])
    for level in range(1, levels + 1):
        params |= pair(f"down_{level}", wide[level - 1], wide[level])
        params |= pair(f"up_{level}", wide[level] + wide[level - 1], wide[level - 1])

    @jaxmem.remat_auto
    def forward(params: Any, h: jax.Array) -> jax.Array:
        def twice(h: jax.Array, name: str) -> jax.Array:
            for part in "12":
                h = jax.nn.gelu(_conv(h, params[f"{name}_{part}"]))
            return h

        passed = []
        for level in range(levels + 1):
            h = twice(h, f"down_{level}")
            if level < levels:
                passed.append(h)
                h = h.reshape(h.shape[0], h.shape[1] // 2, 2, h.shape[2] // 2, 2, -1).mean((2, 4))
        for level in range(levels, 0, -1):
            h = jnp.repeat(jnp.repeat(h, 2, 1), 2, 2)
            h = twice(jnp.concatenate([h, passed.pop()], -1), f"up_{level}")
        return h

    return _step("unet", forward, params, Spec((batch, size, size, 8), "float32"))


def towers(batch: int = 65536, width: int = 512, blocks: int = 5) -> jaxmem.Job:
    """Blocks in the style of Inception: towers of one to three products, joined by a sum."""
    depths = (1, 2, 3)
    names = [(b, t, k) for b in range(blocks) for t in depths for k in range(t)]
    params = {f"{b}_{t}_{k}": Spec((width, width), "float32") for b, t, k in names}

    @jaxmem.remat_auto
    def forward(params: Any, h: jax.Array) -> jax.Array:
        for block in range(blocks):
            joined = h
            for tower in depths:
                y = h
                for k in range(tower):
                    y = jax.nn.gelu(y @ params[f"{block}_{tower}_{k}"])
                joined = joined + y
            h = joined * lax.rsqrt(jnp.square(joined).mean(-1, keepdims=True) + 1e-6)
        return h

    return _step("towers", forward, params, Spec((batch, width), "float32"))


def tied(batch: int = 65536, width: int = 1024, layers: int = 5) -> jaxmem.Job:
    """An autoencoder whose way back is by the transposes of its way there."""
    widths = [width // (1 + k % 3) for k in range(layers + 1)]
    params = [Spec(pair, "float32") for pair in itertools.pairwise(widths)]

    @jaxmem.remat_auto
    def forward(params: Any, h: jax.Array) -> jax.Array:
        for w in params:
            h = jnp.tanh(h @ w)
        for w in reversed(params):
            h = jnp.tanh(h @ w.T)
        return h

    return _step("tied", forward, params, Spec((batch, widths[0]), "float32"))


def experts(
    batch: int = 32, sequence: int = 512, width: int = 512, layers: int = 8, number: int = 4
) -> jaxmem.Job:
    """Scanned layers of a mixture of experts: each token goes to one that has room."""
    room = 2 * sequence // number
    shapes = {
        "route": (width, number),
        "up": (number, width, 4 * width),
        "down": (number, 4 * width, width),
    }
    params = {name: Spec((layers, *shape), "float32") for name, shape in shapes.items()}

    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
        share = jax.nn.softmax(_normal(h) @ p["route"])
        chosen = jax.nn.one_hot(share.argmax(-1), number)
        place = jnp.where(chosen > 0, chosen.cumsum(1) - 1, room)  # from there on is no room
        sent = jax.nn.one_hot(place.astype(int), room)
        found = jnp.einsum("bsec,bsd->becd", sent, _normal(h))
        made = jax.nn.gelu(jnp.einsum("becd,edf->becf", found, p["up"]))
        made = jnp.einsum("becf,efd->becd", made, p["down"])
        back = jnp.einsum("bsec,bse->bsec", sent, share)
        balance = (share.mean((0, 1)) * chosen.mean((0, 1))).sum() * number
        return h + jnp.einsum("bsec,becd->bsd", back, made), balance

    @jaxmem.remat_auto
    def forward(params: Any, h: jax.Array) -> Any:
        return lax.scan(layer, h, params)

    def loss(params: Any, h: jax.Array) -> jax.Array:
        h, balance = forward(params, h)
        return jnp.square(h).mean() + 0.01 * balance.sum()

    return _gradient("experts", loss, params, Spec((batch, sequence, width), "float32"))


def lstm(batch: int = 1024, steps: int = 128, width: int = 512) -> jaxmem.Job:
    """An LSTM: the stack is its scan over time, and all layers have the same parameters."""
    shapes = {"in": (width, 4 * width), "recurrent": (width, 4 * width), "bias": (4 * width,)}
    params = {name: Spec(shape, "float32") for name, shape in shapes.items()}

    @jaxmem.remat_auto
    def forward(params: Any, xs: jax.Array) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> tuple[Any, None]:
            h, c = carry
            gates = x @ params["in"] + h @ params["recurrent"] + params["bias"]
            take, forget, new, show = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(take) * jnp.tanh(new)
            return (jax.nn.sigmoid(show) * jnp.tanh(c), c), None

        start = jnp.zeros_like(xs[0])
        return lax.scan(cell, (start, start), xs)[0][0]

    return _step("lstm", forward, params, Spec((steps, batch, width), "float32"))


def transformer(
    batch: int = 16, sequence: int = 512, width: int = 1024, layers: int = 8, heads: int = 16
) -> jaxmem.Job:
    """Scanned pre-norm layers with plain attention, in bfloat16."""
    return programs.transformer(batch, sequence, width, layers, heads)


def fused_gpu(
    batch: int = 16,
    sequence: int = 1024,
    width: int = 1024,
    layers: int = 8,
    heads: int = 16,
    interpret: bool = False,
) -> jaxmem.Job:
    """Scanned pre-norm layers with attention in one kernel, that of Pallas for NVIDIA's GPUs.

    Args:
      interpret: run the kernel without such a GPU, slowly.
    """
    from jax.experimental.pallas.ops.gpu.attention import mha

    def attend(q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array) -> jax.Array:
        return mha(q_BSHK, k_BSHK, v_BSHK, None, causal=True, interpret=interpret)

    return _fused("fused_gpu", attend, batch, sequence, width, layers, heads)


def fused_tpu(
    batch: int = 8, sequence: int = 1024, width: int = 1024, layers: int = 8, heads: int = 8
) -> jaxmem.Job:
    """The same with the kernel of Pallas for TPUs."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    def attend(*qkv_BSHK: jax.Array) -> jax.Array:
        q, k, v = (a.swapaxes(1, 2) for a in qkv_BSHK)
        return flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5).swapaxes(1, 2)

    return _fused("fused_tpu", attend, batch, sequence, width, layers, heads)


MODELS: dict[str, Callable[..., jaxmem.Job]] = {
    model.__name__: model
    for model in (
        matrix_chain, unet, towers, tied, experts, lstm, transformer, fused_gpu, fused_tpu,
    )
}  # fmt: skip

# Kernels are of a platform; all other models are compiled for any.
ONLY_FOR = {"fused_gpu": "gpu", "fused_tpu": "tpu"}

# ---------------------------------------------------------------- what they are made of


def _step(name: str, forward: Callable[..., jax.Array], params: Any, x: Any) -> jaxmem.Job:
    return _gradient(name, lambda params, x: jnp.square(forward(params, x)).mean(), params, x)


def _gradient(name: str, loss: Callable[..., jax.Array], params: Any, x: Any) -> jaxmem.Job:
    """A step of plain gradient descent, which takes the place of the parameters."""

    def step(params: Any, x: Any) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return jaxmem.Job(step, (params, x), donate_argnums=0, name=name)


def _fused(
    name: str,
    attend: Callable[..., jax.Array],
    batch: int,
    sequence: int,
    width: int,
    layers: int,
    heads: int,
) -> jaxmem.Job:
    """Layers in bfloat16, of parameters in float32."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    params = {name: Spec((layers, *shape), "float32") for name, shape in shapes.items()}

    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda w: w.astype(h.dtype), p)
        qkv = (_normal(h) @ p["qkv"]).reshape(*h.shape[:2], 3, heads, -1)
        found = attend(*(qkv[:, :, k] for k in range(3)))
        h = h + found.reshape(h.shape) @ p["out"]
        return h + jax.nn.gelu(_normal(h) @ p["up"]) @ p["down"], None

    @jaxmem.remat_auto
    def forward(params: Any, h: jax.Array) -> jax.Array:
        return lax.scan(layer, h, params)[0]

    def loss(params: Any, h: jax.Array) -> jax.Array:
        return jnp.square(forward(params, h).astype(jnp.float32)).mean()

    return _gradient(name, loss, params, Spec((batch, sequence, width), "bfloat16"))


def _conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _normal(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
