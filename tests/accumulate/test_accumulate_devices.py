"""`jaxmem.value_and_grad` over eight devices: the same numbers, and one sum of gradients a step.

What the compiler made of it is read from its text, for the CPU's eight devices, eight absent
H100 and eight absent v5e.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compiled import NAMES, PLATFORMS, compiled
from helpers.releases import SINCE_0_11
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import Weighted
from jaxmem.hlo import text as hlo

WIDTH, LAYERS, ROWS = 64, 3, 256
PARAMETERS = LAYERS * WIDTH * WIDTH
DATA = {"data": 8}
DATA_MODEL = {"data": 4, "model": 2}


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def near(actual: Any, expected: Any, tolerance: float = 3e-6) -> None:
    chex.assert_trees_all_close(
        jax.tree.map(np.asarray, actual),
        jax.tree.map(np.asarray, expected),
        rtol=tolerance,
        atol=tolerance,
    )


# ---------------------------------------------------------------- compiled programs


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of a compiled program: how many numbers it sends, and whether in a loop."""

    kind: str
    size: int
    in_loop: bool


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def messages(text: str | None) -> list[Message]:
    assert text is not None
    module = hlo.parse(text)

    def in_loop(computation: str) -> bool:
        return any(
            call.opcode == "while" or in_loop(module.home[call.name])
            for call in module.callers.get(computation, ())
        )

    found = []
    for instruction in module.instructions.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind.startswith(KINDS) and not kind.endswith("-done"):
            size = sum(module.instructions[name].shape.size for name in instruction.operands)
            found.append(Message(kind, size, in_loop(module.home[instruction.name])))
    return found


def mean_loss(w: Any, batch: Any) -> jax.Array:
    return jnp.square(forward(w, batch["x"])).mean()


def masked_loss(w: Any, batch: Any) -> Weighted:
    rows = jnp.square(forward(w, batch["x"])).sum(-1) * batch["mask"]
    return Weighted(rows.sum(), batch["mask"].sum())


def terms_loss(w: Any, batch: Any) -> Weighted:
    h = forward(w, batch["x"])
    return masked_loss(w, batch) + 0.1 * Weighted(jnp.cos(h).sum(), h.shape[0])


def forward(w: Any, x: jax.Array) -> jax.Array:
    """Unrolled for a list of layers, scanned for a stack of them."""
    if isinstance(w, list):
        return functools.reduce(lambda h, one: jnp.tanh(h @ one), w, x)
    return jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0]


_FOUND: dict[Any, list[Message]] = {}


def program(where: str, fun: Callable[..., Any], **options: Any) -> list[Message]:
    """The collectives of `value_and_grad` of a batch of rows along "data", found once."""
    options = {"axes": DATA, "kind": AxisType.Auto, **options}
    key = where, fun, repr(sorted(options.items()))
    if key not in _FOUND:
        _FOUND[key] = _program(where, fun, **options)
    return _FOUND[key]


def _program(
    where: str,
    fun: Callable[..., Any],
    *,
    axes: dict[str, int],
    kind: AxisType,
    scanned: bool = False,
    sharded: bool = True,
    rows: int = ROWS,
    **options: Any,
) -> list[Message]:
    types = {"axis_types": (kind, *[AxisType.Auto] * (len(axes) - 1))}
    target = None
    if where == "cpu":
        mesh: Any = jax.make_mesh(tuple(axes.values()), tuple(axes), **types)
    else:
        target = jaxmem.target(NAMES[where], devices=8)
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), **types)
    whole, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def spec(sharding: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    one = (WIDTH, WIDTH)
    w = spec(whole, LAYERS, *one) if scanned else [spec(whole, *one)] * LAYERS
    batch = {"x": spec(by_rows, rows, WIDTH), "mask": spec(by_rows, rows)}
    given = {"batch_sharding": by_rows} if sharded else {}
    ours = jaxmem.value_and_grad(fun, microbatches=4, **given, **options)
    return messages(compiled(where, ours, w, batch, target=target, mesh=axes).hlo)


def reduced_once(found: list[Message]) -> None:
    """Gradients are summed by one message after the loop; nothing of their size is in it."""
    assert {message.kind for message in found} == {"all-reduce"}, found
    assert not [message for message in found if message.in_loop], found
    # The loss and the weights go with the gradients; other weights may be wanted before.
    (large,) = [message for message in found if message.size >= WIDTH * WIDTH]
    assert PARAMETERS <= large.size <= PARAMETERS + 8, found
    assert len(found) <= 2, found


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("fun", [mean_loss, masked_loss], ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("where", PLATFORMS)
def test_gradients_are_summed_once_a_step(
    where: str, fun: Callable[..., Any], scanned: bool
) -> None:
    reduced_once(program(where, fun, scanned=scanned))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("axes", [DATA, DATA_MODEL], ids=["8", "4x2"])
@pytest.mark.parametrize("where", PLATFORMS)
def test_once_a_step_on_any_mesh(where: str, axes: dict[str, int], kind: AxisType) -> None:
    """The axis of the rows is of this kind; another one, as of tensor parallelism, is `Auto`."""
    reduced_once(program(where, masked_loss, axes=axes, kind=kind, scanned=True))


@pytest.mark.parametrize("where", PLATFORMS)
def test_the_weights_of_several_terms_are_a_message_of_their_own(where: str) -> None:
    found = program(where, terms_loss, scanned=True)
    reduced_once(found)
    assert sorted(message.size for message in found)[0] == 2


def test_once_a_step_whatever_the_rows_and_the_outputs() -> None:
    """Rows that no microbatch divides, gradients of the rows, auxiliary outputs."""
    reduced_once(program("cpu", masked_loss, rows=8 * 31))

    def loss(w: Any, batch: Any) -> Any:
        rows = jnp.square(forward(w, batch["x"])).sum(-1)
        return rows.mean(), {"rows": rows, "mean": rows.mean(), "stack": rows.sum()}

    words = {"rows": "concat", "mean": "mean", "stack": "stack"}
    found = program("cpu", loss, argnums=(0, 1), has_aux=True, aux=words)
    assert {(message.kind, message.in_loop) for message in found} == {("all-reduce", False)}
    assert sum(message.size for message in found) <= PARAMETERS + 8


@pytest.mark.parametrize("fun", [mean_loss, masked_loss], ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("where", PLATFORMS)
def test_what_the_compiler_does_by_itself(
    where: str, scanned: bool, fun: Callable[..., Any]
) -> None:
    """Without `batch_sharding`: gradients are summed over devices in each microbatch.

    The GPU's and the TPU's compilers move the sum behind the loop where every microbatch counts
    alike; those of jax 0.10 not that of a scanned layer.  Rows stay where they are.
    """
    found = program(where, fun, scanned=scanned, sharded=False)
    assert {message.kind for message in found} == {"all-reduce"}, found
    large = [message for message in found if message.size >= WIDTH * WIDTH]
    if where != "cpu" and (SINCE_0_11 or not scanned) and fun is mean_loss:
        assert not any(message.in_loop for message in large)
        assert scanned or len(large) == 1
        assert sum(message.size for message in large) == PARAMETERS
    else:
        assert any(message.in_loop for message in large)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_rows_are_not_gathered_in_the_default_form(kind: AxisType) -> None:
    for axes in (DATA, DATA_MODEL):
        found = program("cpu", masked_loss, axes=axes, kind=kind, sharded=False)
        assert {message.kind for message in found} == {"all-reduce"}


# ---------------------------------------------------------------- numbers

F = 3
W = {"kernel": normal(0, F, 4), "scale": jnp.linspace(0.5, 1.5, 4)}
BATCH = {
    "x": normal(1, 40, F),
    "y": normal(2, 40, 4),
    "mask": jnp.asarray(np.arange(40) % 7 > 3, jnp.float32),
    "temperature": jnp.float32(1.5),
}
WORDS = {"rows": "concat", "sum": "sum", "mean": "mean", "each": "stack", "weighted": "sum"}


def rows_of(w: Any, batch: Any) -> jax.Array:
    out = jnp.tanh(batch["x"] @ w["kernel"]) * w["scale"]
    return jnp.square(out - batch["y"]).sum(-1) * batch["temperature"]


def outputs(w: Any, batch: Any) -> Any:
    rows, mask = rows_of(w, batch), batch["mask"]
    loss = Weighted((rows * mask).sum(), mask.sum())
    loss += 0.5 * Weighted(jnp.cos(rows).sum(), rows.size)
    mean = (rows * mask).sum() / jnp.maximum(mask.sum(), 1)
    aux = {"rows": rows, "sum": rows.sum(), "mean": mean, "each": rows.size, "weighted": loss}
    return loss, aux | {"each": jnp.float32(rows.size)}


def mean_of_rows(w: Any, batch: Any) -> Any:
    rows = rows_of(w, batch)
    return rows.mean(), {"rows": rows}


@functools.cache
def expected() -> Any:
    def whole(w: Any, batch: Any) -> Any:
        loss, aux = outputs(w, batch)
        return loss.mean, aux | {"weighted": loss.mean}

    return jax.jit(jax.value_and_grad(whole, has_aux=True))(W, BATCH)


mean_and_gradient = jax.jit(jax.value_and_grad(lambda w, batch: rows_of(w, batch).mean()))


def mesh_of(axes: dict[str, int], kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def placed(mesh: Any, batch: Any = BATCH, axes: Any = "data") -> Any:
    def put(leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, P(axes) if leaf.ndim else P()))

    return jax.device_put(W, NamedSharding(mesh, P())), jax.tree.map(put, batch)


# In three microbatches, 5 rows of each device are 2 + 2 + 1.
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("axes", [DATA, DATA_MODEL], ids=["8", "4x2"])
@pytest.mark.parametrize(
    ("given", "m"),
    [
        ("nothing", 5),
        ("spec", 5),
        ("sharding", 3),
        pytest.param("spec", 3, marks=pytest.mark.slow),
        pytest.param("sharding", 5, marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_one_device(
    given: str, m: int, axes: dict[str, int], kind: AxisType
) -> None:
    mesh = mesh_of(axes, kind)
    sharding = {"nothing": None, "spec": P("data"), "sharding": NamedSharding(mesh, P("data"))}
    (value, aux), gradient = expected()
    w, batch = placed(mesh)
    ours = jaxmem.value_and_grad(
        outputs, has_aux=True, microbatches=m, aux=WORDS, batch_sharding=sharding[given]
    )
    with jax.set_mesh(mesh):
        (found, out), grads = jax.jit(ours)(w, batch)
    near((found, grads), (value, gradient))
    assert np.asarray(out["each"]).sum() == 40
    near({**out, "each": 0}, {**aux, "each": 0})
    assert out["rows"].sharding.spec[0] == "data"
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(grads))


def test_the_mesh_of_the_arrays_need_not_be_set() -> None:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(DATA, kind)
        for sharding in (None, NamedSharding(mesh, P("data"))):
            ours = jaxmem.value_and_grad(
                outputs, has_aux=True, microbatches=5, aux=WORDS, batch_sharding=sharding
            )
            # Outside of `jit`, jax makes arrays for explicit axes only where their mesh is set.
            eager = () if kind == AxisType.Explicit or sharding else (ours,)
            for both in (jax.jit(ours), *eager):
                (value, _), gradient = both(*placed(mesh))
                near((value, gradient), (expected()[0][0], expected()[1]))


def test_rows_over_two_axes_and_gradients_of_rows() -> None:
    mesh = mesh_of(DATA_MODEL)
    spec = P(("data", "model"))

    def loss(w: Any, x: jax.Array, mask: jax.Array) -> Weighted:
        return Weighted((jnp.square(x @ w["kernel"]).sum(-1) * mask).sum(), mask.sum())

    args = W, BATCH["x"], BATCH["mask"]
    theirs = jax.value_and_grad(lambda *args: loss(*args).mean, (1, 0))(*args)
    w, batch = placed(mesh, axes=("data", "model"))
    ours = jaxmem.value_and_grad(
        loss,
        (1, 0),
        microbatches=2,
        batch_argnums=(1, 2),
        batch_sharding=NamedSharding(mesh, spec),
        return_weight=True,
    )
    (value, aux), gradient = jax.jit(ours)(w, batch["x"], batch["mask"])
    near((value, gradient), theirs)
    assert float(aux.weight) == float(BATCH["mask"].sum())
    assert gradient[0].sharding.spec[0] == ("data", "model")


def test_devices_and_microbatches_without_weight() -> None:
    """Three devices have none at all; then all of them."""
    mesh = mesh_of(DATA)

    def loss(w: Any, batch: Any) -> Weighted:
        weight = batch["mask"].sum()
        mean = (rows_of(w, batch) * batch["mask"]).sum() / weight  # 0 / 0
        return Weighted(mean * weight, weight)

    ours = jax.jit(
        jaxmem.value_and_grad(
            loss, microbatches=5, return_weight=True, batch_sharding=NamedSharding(mesh, P("data"))
        )
    )
    mask = np.asarray(BATCH["mask"]) * (np.arange(40) < 25)
    kept = {k: np.asarray(leaf)[mask > 0] if leaf.ndim else leaf for k, leaf in BATCH.items()}
    theirs = jax.jit(jax.value_and_grad(lambda w, b: loss(w, b).mean))(W, kept)
    for given in (mask, np.zeros(40, np.float32)):
        batch = BATCH | {"mask": jnp.asarray(given)}
        (value, aux), gradient = ours(*placed(mesh, batch))
        near((value, gradient), theirs if given.any() else jax.tree.map(np.zeros_like, theirs))
        assert bool(aux.empty) == (not given.any())


KEYS = {"new": jax.random.key, "legacy": jax.random.PRNGKey}


@pytest.mark.parametrize("kind", KEYS)
def test_random_keys_differ_between_devices_and_microbatches(kind: str) -> None:
    mesh = mesh_of(DATA)

    def loss(w: Any, batch: Any, key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.5, (len(batch["x"]), 16))
        dropped = batch | {"x": batch["x"] * mask[:, :F]}
        return rows_of(w, dropped).mean(), mask

    ours = jaxmem.value_and_grad(
        loss,
        has_aux=True,
        microbatches=5,
        rng_argnums=2,
        aux="concat",
        batch_sharding=NamedSharding(mesh, P("data")),
    )
    (value, mask), gradient = jax.jit(ours)(*placed(mesh), KEYS[kind](0))
    assert len({row.tobytes() for row in np.asarray(mask)}) == 40
    near((value, gradient), mean_and_gradient(W, BATCH | {"x": BATCH["x"] * mask[:, :F]}))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(F, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(F, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(self.norm(x)))


def running_mean() -> np.ndarray:
    """Of the rows of each device, a row a microbatch; the mean over the devices."""
    mean = np.zeros((8, F), np.float32)
    for rows in np.asarray(BATCH["x"]).reshape(8, 5, F).swapaxes(0, 1):
        mean = 0.99 * mean + 0.01 * rows
    return mean.mean(0)


@pytest.mark.slow
def test_a_module_over_devices() -> None:
    """Batch statistics are the mean over the devices, each of which saw its own rows."""
    mesh = mesh_of(DATA)

    def loss(model: Net, batch: Any) -> Any:
        out = model(batch["x"])
        return jnp.square(out - batch["y"]).mean(), out

    model = Net()
    before: Any = nnx.state(model.dropout.rngs)
    ours = jaxmem.value_and_grad(
        loss,
        has_aux=True,
        microbatches=5,
        aux="concat",
        batch_sharding=NamedSharding(mesh, P("data")),
    )
    (value, out), gradient = ours(model, placed(mesh)[1])
    error = np.asarray(out) - np.asarray(BATCH["y"])
    near(value, np.square(error).mean())
    near(gradient["last"]["bias"].get_value(), error.sum(0) / 80)
    near(model.norm.mean.get_value(), running_mean())
    after: Any = nnx.state(model.dropout.rngs)
    words = [jax.random.key_data(state["key"].get_value()) for state in (before, after)]
    assert (words[0] == words[1]).all()
    assert int(after["count"].get_value()) == 5


# ---------------------------------------------------------------- inside a user's shard_map


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("fun", [outputs, mean_of_rows], ids=["terms", "mean"])
def test_inside_shard_map_it_sums_over_the_named_axes(
    fun: Callable[..., Any], check_vma: bool
) -> None:
    mesh = mesh_of(DATA_MODEL)
    words = WORDS if fun is outputs else {"rows": "concat"}
    ours = jaxmem.value_and_grad(
        fun, has_aux=True, microbatches=5, aux=words, batch_sharding=P("data")
    )

    def local(w: Any, batch: Any) -> Any:
        (value, aux), gradient = ours(w, batch)
        return (value, gradient), aux["rows"]

    specs = {name: P("data") if leaf.ndim else P() for name, leaf in BATCH.items()}
    mapped = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), specs),
            out_specs=(P(), P("data")),
            check_vma=check_vma,
        )
    )
    found, rows = mapped(*placed(mesh))
    mean = mean_and_gradient(W, BATCH)
    near(found, mean if fun is not outputs else (expected()[0][0], expected()[1]))
    near(rows, rows_of(W, BATCH))
    text = mapped.lower(*placed(mesh)).compile().as_text()
    assert {(message.kind, message.in_loop) for message in messages(text)} == {
        ("all-reduce", False)
    }


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own parameters"])
@pytest.mark.parametrize("fun", [outputs, mean_of_rows], ids=["terms", "mean"])
def test_inside_shard_map_it_is_jax_value_and_grad(
    fun: Callable[..., Any], own: bool, check_vma: bool
) -> None:
    """Without `batch_sharding`: what jax gives there, sums of shared parameters and all."""
    mesh = mesh_of(DATA)

    def whole(w: Any, batch: Any) -> jax.Array:
        loss, _ = fun(w, batch)
        return loss.mean if isinstance(loss, Weighted) else loss

    def mapped(of: Callable[..., Any]) -> Any:
        def local(w: Any, batch: Any) -> Any:
            if own:
                w = jax.tree.map(lambda leaf: leaf[0], w)
            return jax.tree.map(lambda leaf: leaf[None], of(w, batch))

        specs = {name: P("data") if leaf.ndim else P() for name, leaf in BATCH.items()}
        inner = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("data") if own else P(), specs),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        w = jax.tree.map(lambda leaf: jnp.stack([leaf + k for k in range(8)]), W) if own else W
        return jax.jit(inner)(w, BATCH)

    ours = jaxmem.value_and_grad(lambda w, b: fun(w, b)[0], microbatches=3)
    near(mapped(ours), mapped(jax.value_and_grad(whole)), 1e-5)


# ---------------------------------------------------------------- errors


def test_errors() -> None:
    mesh = mesh_of(DATA)
    by_rows = NamedSharding(mesh, P("data"))

    def raises(text: str, **options: Any) -> None:
        given: Any = {"microbatches": 5, "batch_sharding": by_rows, **options}
        batch = given.pop("batch", BATCH)
        with pytest.raises(ValueError) as caught:
            jaxmem.value_and_grad(lambda w, b: rows_of(w, b).mean(), **given)(W, batch)
        assert text in str(caught.value)

    raises(
        "batch_sharding=P() does not say which mesh axes the rows lie on; its first entry must be "
        'one or several, as in PartitionSpec("data")',
        batch_sharding=NamedSharding(mesh, P()),
    )
    raises("does not say which mesh axes", batch_sharding=P(None, "data"))
    raises(
        "batch_sharding names the axis 'data', and the mesh has (); pass a NamedSharding, or set "
        "the mesh with jax.set_mesh",
        batch_sharding=P("data"),
    )
    with jax.set_mesh(mesh):
        raises("names the axis 'rows', and the mesh has ('data',)", batch_sharding=P("rows"))
    raises(
        "the 39 rows of the batch cannot lie evenly over the 8 devices of batch_sharding; pass a "
        "batch that they divide",
        batch=jax.tree.map(lambda leaf: leaf[:39] if leaf.ndim else leaf, BATCH),
    )
    raises(
        "microbatches=6 is more than the 5 rows of the batch on each of 8 devices (b/mask is "
        "float32[40]); pass at most 5, or a larger batch",
        microbatches=6,
    )
    raises(
        'aux="last" has no meaning where every device has a last microbatch; pass "stack", or '
        "leave batch_sharding= out",
        has_aux=True,
        aux="last",
    )


# ---------------------------------------------------------------- AdamA


def adam_messages(where: str, fun: Callable[..., Any], sharded: bool) -> list[Message]:
    """The collectives of a step of `jaxmem.AdamA` on scanned layers."""
    target = None
    types = {"axis_types": (AxisType.Auto,)}
    if where == "cpu":
        mesh: Any = jax.make_mesh((8,), ("data",), **types)
    else:
        target = jaxmem.target(NAMES[where], devices=8)
        mesh = jax.sharding.AbstractMesh((8,), ("data",), **types)
    whole, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def spec(sharding: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    w = spec(whole, LAYERS, WIDTH, WIDTH)
    batch = {"x": spec(by_rows, ROWS, WIDTH), "mask": spec(by_rows, ROWS)}
    adam = jaxmem.AdamA(0.1)
    state = jax.eval_shape(adam.init, w)
    state = jax.tree.map(lambda leaf: spec(whole, *leaf.shape).update(dtype=leaf.dtype), state)
    given = by_rows if sharded else None
    step = adam.value_and_update(fun, microbatches=4, batch_sharding=given)
    return messages(compiled(where, step, state, w, batch, target=target, mesh=DATA).hlo)


@pytest.mark.parametrize("fun", [mean_loss, masked_loss], ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("where", PLATFORMS)
def test_moments_are_summed_once_a_step(where: str, fun: Callable[..., Any]) -> None:
    """Both of them after the loop, and nothing of their size in it."""
    found = adam_messages(where, fun, True)
    assert {(message.kind, message.in_loop) for message in found} == {("all-reduce", False)}
    large = [message.size for message in found if message.size >= WIDTH * WIDTH]
    assert 2 * PARAMETERS <= sum(large) <= 2 * PARAMETERS + 8, found


def test_without_a_sharding_gradients_are_summed_in_each_microbatch() -> None:
    found = adam_messages("cpu", mean_loss, False)
    assert any(message.in_loop and message.size >= WIDTH * WIDTH for message in found)


def adam_by_hand(fun: Callable[..., Any], parts: Any) -> Any:
    """Moments after a step from moments of ones, of microbatches with these rows."""
    value, of_rows = of_each_row(fun)
    mu = jax.tree.map(lambda g: 0.9 + 0.1 * g.sum(0), of_rows)
    squares = jax.tree.map(lambda g: sum(g[rows].sum(0) ** 2 for rows in parts), of_rows)
    return value, mu, jax.tree.map(lambda v: 0.999 + 0.001 * v, squares)


@functools.cache
def of_each_row(fun: Callable[..., Any]) -> Any:
    """The loss, and the share of each row in its gradient, in float64."""

    def shares(w: Any) -> jax.Array:
        rows = rows_of(w, BATCH)
        counted = rows * BATCH["mask"] if fun is masked_rows else rows
        weight = BATCH["mask"].sum() if fun is masked_rows else len(rows)
        return counted / weight

    value = jax.jit(shares)(W).sum()
    return value, jax.tree.map(lambda g: np.asarray(g, np.float64), jax.jit(jax.jacrev(shares))(W))


def mean_rows(w: Any, batch: Any) -> jax.Array:
    return rows_of(w, batch).mean()


def masked_rows(w: Any, batch: Any) -> Weighted:
    rows, mask = rows_of(w, batch), batch["mask"]
    return Weighted((rows * mask).sum(), mask.sum())


def after_ones(adam: jaxmem.AdamA) -> Any:
    """A state as in the middle of a training: what was before must be in the moments once."""
    state = adam.init(W)
    ones = jax.tree.map(jnp.ones_like, W)
    return state._replace(mu=ones, nu=ones)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("axes", [DATA, DATA_MODEL], ids=["8", "4x2"])
@pytest.mark.parametrize("fun", [mean_rows, masked_rows], ids=lambda fun: fun.__name__)
def test_adam_a_over_devices_is_that_of_as_many_microbatches(
    fun: Callable[..., Any], axes: dict[str, int], kind: AxisType
) -> None:
    """Of those of each device with `batch_sharding`, and of those of all without."""
    mesh, adam = mesh_of(axes, kind), jaxmem.AdamA(0.1)
    devices = axes["data"]
    w, batch = placed(mesh)
    state = jax.device_put(after_ones(adam), NamedSharding(mesh, P()))
    blocks = np.arange(40).reshape(devices, -1)
    for m in (5, 3):  # in three microbatches, 5 rows are 2 + 2 + 1
        own = [part for block in blocks for part in dealt(block, m)]
        for sharding, parts in (
            (NamedSharding(mesh, P("data")), own),
            *([(None, dealt(np.arange(40), m))] if m == 5 and devices == 8 else []),
        ):
            step = adam.value_and_update(fun, microbatches=m, batch_sharding=sharding)
            with jax.set_mesh(mesh):
                value, updates, after = jax.jit(step)(state, w, batch)
            near((value, after.mu, after.nu), adam_by_hand(fun, parts))
            for leaf in jax.tree.leaves((value, updates, after)):
                assert leaf.sharding.is_fully_replicated
            assert int(after.count) == 1


def dealt(rows: np.ndarray, m: int) -> list[np.ndarray]:
    """As `Split` does: the larger microbatches first, each group dealt like cards."""
    size, larger = divmod(len(rows), m)
    first, rest = rows[: larger * (size + 1)], rows[larger * (size + 1) :]
    return [
        *(first[k::larger] for k in range(larger)),
        *(rest[k :: m - larger] for k in range(m - larger)),
    ]


def test_adam_a_on_devices_is_that_of_one_with_their_microbatches() -> None:
    """Where each row is a microbatch of its own, in a sharded form as in the plain one."""
    mesh, adam = mesh_of(DATA), jaxmem.AdamA(0.1, weight_decay=0.1)
    sharding = NamedSharding(mesh, P("data"))
    ours = jax.jit(adam.value_and_update(masked_rows, microbatches=5, batch_sharding=sharding))
    plain = jax.jit(adam.value_and_update(masked_rows, microbatches=40))
    (w, batch), state, theirs = placed(mesh), adam.init(W), adam.init(W)
    params = W
    for _ in range(4):
        value, updates, state = ours(state, w, batch)
        expected, their_updates, theirs = plain(theirs, params, BATCH)
        near((value, state), (expected, theirs))
        w, params = optax.apply_updates(w, updates), optax.apply_updates(params, their_updates)
        near(w, params, 1e-5)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_adam_a_inside_shard_map_sums_over_the_named_axes(check_vma: bool) -> None:
    mesh, adam = mesh_of(DATA), jaxmem.AdamA(0.1)
    step = adam.value_and_update(masked_rows, microbatches=5, batch_sharding=P("data"))
    specs = {name: P("data") if leaf.ndim else P() for name, leaf in BATCH.items()}
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), specs),
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    args = after_ones(adam), *placed(mesh)
    value, _, after = mapped(*args)
    parts = [part for block in np.split(np.arange(40), 8) for part in dealt(block, 5)]
    near((value, after.mu, after.nu), adam_by_hand(masked_rows, parts))
    found = messages(mapped.lower(*args).compile().as_text())
    assert {(message.kind, message.in_loop) for message in found} == {("all-reduce", False)}


def test_adam_a_with_a_module_and_its_optimizer_over_devices() -> None:
    mesh, adam = mesh_of(DATA), jaxmem.AdamA(0.1)
    given: Any = adam  # no `optax.GradientTransformation`
    sharding = NamedSharding(mesh, P("data"))

    def loss(model: Net, batch: Any) -> Any:
        out = model(batch["x"])
        return jnp.square(out - batch["y"]).mean(), out

    model = Net()
    optimizer = nnx.Optimizer(model, given, wrt=nnx.Param)
    step = adam.value_and_update(
        loss, has_aux=True, microbatches=5, aux="concat", batch_sharding=sharding
    )
    bias: Any = model.last.bias
    before = bias.get_value()
    value, out = nnx.jit(step)(optimizer, model, placed(mesh)[1])
    error = np.asarray(out) - np.asarray(BATCH["y"])
    near(value, np.square(error).mean())
    assert out.sharding.spec[0] == "data"
    gradient = error.sum(0) / 80
    state = nnx.as_pure(optimizer.opt_state)
    near(state.mu["last"]["bias"], 0.1 * gradient)
    squares = np.square(error / 80).sum(0)  # a row a microbatch
    near(state.nu["last"]["bias"], 0.001 * squares)
    step_length = -0.1 * gradient / (np.sqrt(squares) + 1e-8)
    near(np.asarray(bias.get_value()) - np.asarray(before), step_length, 1e-5)
    near(model.norm.mean.get_value(), running_mean())
    assert int(nnx.state(model.dropout.rngs)["count"].get_value()) == 5  # pyright: ignore
