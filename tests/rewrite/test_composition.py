"""Decorated functions inside jax's transformations, and jax's transformations inside them."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.menagerie import MODELS, assert_close, assert_same, differentiate, exact_jit
from helpers.transformed import DERIVATIVES, B, D, N, dot, layer, loss, make
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import Plan, policies

pytestmark = pytest.mark.usefixtures("strict")

# One of each executor: checkpointed layers, segments in two levels with a
# remainder, a table of actions.
POLICIES = {
    "full": policies.full(),
    "sqrt": policies.sqrt(segments=(3, 2)),
    "revolve": policies.revolve(slots=2),
}

each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())

# ---------------------------------------------------------------- the model


def agree(build: Callable[[Any], Any], fn: Any, *args: Any, under: Any = POLICIES) -> None:
    """What `build` makes of a function is the same when it is decorated, under each policy."""

    def each(*args: Any) -> Any:
        found = {}
        for name, policy in under.items():
            with noted(name):
                found[name] = build(jaxmem.remat(fn, policy))(*args)
        return build(fn)(*args), found

    # One program, since most of the time goes into making programs.
    expected, found = exact_jit(each)(*args)
    for name in under:
        with noted(name):
            assert_close(found[name], expected)


@contextlib.contextmanager
def noted(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"under the policy {name}")
        raise


def in_turn(*cases: Iterable[Any], policies: Any = POLICIES) -> Any:
    """Products of cases, each under one of the policies; under the others, it is slow."""
    params = []
    for numbered in itertools.product(*(enumerate(some) for some in cases)):
        turn = sum(k for k, _ in numbered) % len(policies)
        case = [one for _, one in numbered]
        first = list(policies)[turn]
        others = {name: policy for name, policy in policies.items() if name != first}
        params += [
            pytest.param(*case, {first: policies[first]}, id="-".join([*case, first])),
            pytest.param(*case, others, id="-".join([*case, "others"]), marks=pytest.mark.slow),
        ]
    return params


# ---------------------------------------------------------------- derivatives


@pytest.mark.parametrize(("derivative", "under"), in_turn(DERIVATIVES))
def test_derivatives(derivative: str, under: Any) -> None:
    agree(DERIVATIVES[derivative], loss, *make(), under=under)


ON_THE_HOST = {
    "carries": policies.offload(),
    "carries and names": policies.offload(names=["left"]),
    "names": policies.names(offload=["entered", "left"]),
}


# Of first and second order, and of a third.
@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")
@pytest.mark.parametrize(
    ("derivative", "under"), in_turn([*DERIVATIVES, "third"], policies=ON_THE_HOST)
)
def test_derivatives_with_values_on_the_host(derivative: str, under: Any) -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        def named(h: Any, p: Any) -> Any:
            h, y = layer(checkpoint_name(h, "entered"), p)
            return checkpoint_name(h, "left"), y

        h, means = lax.scan(named, x, params)
        return jnp.mean(h**2) + means @ means

    second = DERIVATIVES["reverse over reverse"]
    third = {
        "third": lambda f: jax.grad(lambda p, x: dot(second(f)(p, x)[0], jax.tree.map(jnp.cos, p)))
    }
    agree((DERIVATIVES | third)[derivative], loss, *make(), under=under)


@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")
def test_gradient_of_a_gradient_without_jit() -> None:
    def twice(f: Any) -> Any:
        return jax.grad(lambda p, x: dot(*[jax.grad(f)(p, x)] * 2))

    args = make()
    assert_close(twice(jaxmem.remat_offload(loss))(*args), jax.jit(twice(loss))(*args), 3e-6)


# ---------------------------------------------------------------- vmap

# What is mapped: axes of params and of x.
MAPPED: dict[str, tuple[int | None, int | None]] = {
    "x": (None, 0),
    "params": (0, None),
    "both": (0, 0),
    "inner axis": (2, 1),
}


@pytest.mark.parametrize(
    ("mapped", "build", "under"),
    in_turn(MAPPED, ["grad of vmap", "vmap of grad", "vmap of jvp"]),
)
def test_vmap(mapped: str, build: str, under: Any) -> None:
    axes = MAPPED[mapped]
    several, one = make(lead=(3,)), make()
    args = [
        one[i] if axis is None else jax.tree.map(lambda a, to=axis: jnp.moveaxis(a, 0, to), many)
        for i, (axis, many) in enumerate(zip(axes, several, strict=True))
    ]
    builds = {
        "vmap of grad": lambda f: jax.vmap(jax.value_and_grad(f, (0, 1)), axes),
        "grad of vmap": lambda f: jax.grad(
            lambda *args: dot(jnp.arange(1.0, 4.0), jax.vmap(f, axes)(*args)), (0, 1)
        ),
        "vmap of jvp": lambda f: jax.vmap(lambda p, x: jax.jvp(f, (p, x), (p, jnp.cos(x))), axes),
    }
    agree(builds[build], loss, *args, under=under)


def test_vmap_in_vmap() -> None:
    params, x = make(lead=(2, 3))

    def build(f: Any) -> Any:
        inner = jax.vmap(jax.grad(f, (0, 1)), (0, None))
        return jax.vmap(inner, (0, 1))

    agree(build, loss, params, jnp.moveaxis(x[:, 0], 0, 1))


# With the same layer as the model of these tests, in another scan.
AS_HERE = ("mlp", "sown", "equinox", "backwards", "tied", "large_y", "jit_inside")


# One policy for each model in turn; whatever is in a layer must survive vmap.
@pytest.mark.parametrize(
    ("k", "model"),
    [
        pytest.param(k, model, marks=pytest.mark.slow if model in AS_HERE else ())
        for k, model in enumerate(MODELS)
    ],
)
def test_vmap_of_every_model(k: int, model: str) -> None:
    problems = [MODELS[model].make(3, seed) for seed in range(2)]
    inputs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(p.inputs for p in problems))
    name = list(POLICIES)[k % len(POLICIES)]
    agree(
        lambda f: jax.vmap(differentiate(f), in_axes=(None, 0)),
        problems[0].loss,
        problems[0].params,
        inputs,
        under={name: POLICIES[name]},
    )


def test_vmap_with_a_collective_in_the_layer() -> None:
    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            h = jnp.sin(h @ p["w"] + p["b"])
            mean = lax.pmean(h, "batch")
            return h + mean - lax.psum(h * mean, "batch"), mean.sum()

        h, sums = lax.scan(layer, x, params)
        return (h**2).sum() + sums.sum()

    params, x = make()
    agree(
        lambda f: jax.vmap(jax.value_and_grad(f, (0, 1)), (None, 0), axis_name="batch"),
        loss,
        params,
        x,
    )
    agree(
        lambda f: jax.grad(
            lambda p, x: jax.vmap(f, (None, 0), axis_name="batch")(p, x).sum(), (0, 1)
        ),
        loss,
        params,
        x,
    )


# ---------------------------------------------------------------- control flow around


def _accumulated(f: Any) -> Any:
    def run(params: Any, xs: Any) -> Any:
        def step(total: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(f)(params, x)
            return jax.tree.map(jnp.add, total, grads), value

        return lax.scan(step, jax.tree.map(jnp.zeros_like, params), xs)

    return run


def _descent(f: Any) -> Any:
    def run(params: Any, xs: Any) -> Any:
        def step(_: Any, params: Any) -> Any:
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(f)(params, xs[0]))

        return lax.fori_loop(0, 3, step, params)

    return run


AROUND: dict[str, Callable[[Any], Any]] = {
    "scan over batches": _accumulated,
    "grad of scan": lambda f: jax.grad(
        lambda p, xs: lax.scan(lambda total, x: (total + f(p, x), None), jnp.float32(0), xs)[0]
    ),
    "map": lambda f: lambda p, xs: lax.map(jax.value_and_grad(functools.partial(f, p)), xs),
    "fori_loop": _descent,
    "cond": lambda f: jax.grad(
        lambda p, xs: lax.cond(xs[0, 0, 0] > 0, f, lambda p, x: -2 * f(p, x), p, xs[1])
    ),
    "checkpoint": lambda f: jax.grad(lambda p, xs: jax.checkpoint(f)(p, xs[0]) ** 2),
    "checkpoint with a policy": lambda f: jax.grad(
        lambda p, xs: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)(p, xs[0])
    ),
    "jit": lambda f: jax.grad(lambda p, xs: jax.jit(f)(p, xs[0]) + jax.jit(f)(p, xs[1])),
    "custom_vjp": lambda f: jax.grad(lambda p, xs: _doubled(f)(p, xs[0])),
}


def _doubled(f: Any) -> Any:
    """A function with a derivative rule in which `f` is differentiated."""
    run = jax.custom_vjp(f)
    run.defvjp(
        lambda p, x: jax.vjp(f, p, x),
        lambda vjp, ct: jax.tree.map(lambda leaf: 2 * leaf, vjp(ct)),
    )
    return run


@pytest.mark.parametrize(("around", "under"), in_turn(AROUND))
def test_inside(around: str, under: Any) -> None:
    xs = jnp.stack([make(seed)[1] for seed in range(2)])
    agree(AROUND[around], loss, make()[0], xs, under=under)


# ---------------------------------------------------------------- what is around the scan


def _mesh(explicit: bool = False) -> jax.sharding.Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


WITHIN: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda params, x: jax.jit(loss)(params, x),
    "jit in jit": lambda params, x: jax.jit(lambda p: jax.jit(loss)(p, x) * 2)(params),
    "checkpoint": lambda params, x: jax.checkpoint(loss)(params, x),
    "cond": lambda params, x: lax.cond(
        x[0, 0] > 0, loss, lambda p, x: 3 * loss(p, jnp.cos(x)), params, x
    ),
    "switch": lambda params, x: lax.switch(
        jnp.int32(2), [lambda p, x: jnp.float32(0), loss, lambda p, x: loss(p, 2 * x)], params, x
    ),
    "shard_map": lambda params, x: jax.shard_map(
        lambda p, x: lax.pmean(loss(p, x), "data"),
        mesh=_mesh(),
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )(params, x),
    "named_scope": lambda params, x: jax.named_scope("scope")(loss)(params, x),
    "jit of cond of checkpoint": lambda params, x: jax.jit(
        lambda p, x: lax.cond(x[0, 0] > 9, lambda p, x: 0 * x.sum(), jax.checkpoint(loss), p, x)
    )(params, x),
}


@pytest.mark.parametrize(("within", "under"), in_turn(WITHIN))
def test_stack_is_reached_through(within: str, under: Any) -> None:
    fn = WITHIN[within]
    agree(lambda f: jax.value_and_grad(f, (0, 1)), fn, *make(), under=under)
    for policy in under.values():
        found = jaxmem.stacks(jaxmem.remat(fn, policy), *make())
        assert found
        assert all(stack.plan.kind != "none" for stack in found)


@each_policy
def test_sharding_constraints_of_an_inner_jit_hold(policy: Any) -> None:
    mesh = _mesh()
    split = NamedSharding(mesh, P("data"))
    inner = jax.jit(
        lambda p, x: lax.scan(layer, x, p)[0],
        in_shardings=(NamedSharding(mesh, P()), split),
        out_shardings=split,
    )
    params, x = make()
    out = jax.jit(jaxmem.remat(lambda p, x: inner(p, x), policy))(params, x)
    assert out.sharding.is_equivalent_to(split, out.ndim)


# ---------------------------------------------------------------- several devices


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("grad", ["inside", "outside"])
def test_shard_map(grad: str, check_vma: bool) -> None:
    """Data parallel in one axis, tensor parallel in the other, a sum over devices in the layer."""
    rng = np.random.default_rng(0)
    up = jnp.asarray(0.5 * rng.standard_normal((N, D, 8)), jnp.float32)
    down = jnp.asarray(0.5 * rng.standard_normal((N, 8, D)), jnp.float32)
    specs = {"up": P(None, None, "model"), "down": P(None, "model", None)}

    def local(params: Any, x: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            h = h + lax.psum(jnp.sin(h @ p["up"]) @ p["down"], "model")
            return h, h.mean()

        h, means = lax.scan(layer, x, params)
        return lax.psum((h**2).sum() + means.sum(), "data")

    def build(f: Any) -> Any:
        mapped = functools.partial(
            jax.shard_map, mesh=_mesh(), in_specs=(specs, P("data")), check_vma=check_vma
        )
        if grad == "outside":
            return jax.value_and_grad(mapped(f, out_specs=P()), (0, 1))
        return mapped(jax.grad(f, (0, 1)), out_specs=(specs, P("data")))

    agree(build, local, {"up": up, "down": down}, make()[1])


SPECS = {
    "data parallel": ({"w": P(), "b": P()}, P("data")),
    "tensor parallel": ({"w": P(None, None, "model"), "b": P(None, "model")}, P("data")),
    "sharded layers": ({"w": P(None, "data"), "b": P()}, P("data")),
}


@functools.cache
def _of_sharded(specs: str, policy: Any) -> Any:
    mesh = _mesh()
    params, x = make()
    params = jax.tree.map(lambda a: jnp.concatenate([a, a], -1), params)  # 12 wide
    params["w"] = jnp.concatenate([params["w"], -params["w"]], 1)
    x = jnp.concatenate([x, x + 1], -1)
    args = jax.tree.map(
        lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), (params, x), SPECS[specs]
    )
    fn = jaxmem.remat(loss, policy) if policy else loss
    return jax.jit(jax.value_and_grad(fn, (0, 1)))(*args)


@each_policy
@pytest.mark.parametrize("specs", SPECS)
def test_sharded_arguments(specs: str, policy: Any) -> None:
    expected, actual = (_of_sharded(specs, chosen) for chosen in (None, policy))
    assert_close(actual, expected, tolerance=2e-6)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


@functools.cache
def _of_explicit(policy: Any) -> Any:
    mesh = _mesh(explicit=True)
    params, x = make()
    args = (
        jax.device_put(params, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("data"))),
    )

    def loss(params: Any, x: Any) -> Any:
        h, means = lax.scan(layer, x, params)
        return (h**2).sum() + means.sum()

    fn = jaxmem.remat(loss, policy) if policy else loss
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(fn, (0, 1)))(*args)


@each_policy
def test_explicit_sharding(policy: Any) -> None:
    expected, actual = (_of_explicit(chosen) for chosen in (None, policy))
    assert_close(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a).sharding == jax.typeof(b).sharding


def test_vmap_over_a_mesh_axis() -> None:
    mesh = _mesh()

    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            h = jnp.sin(h @ p["w"])
            return lax.with_sharding_constraint(h, NamedSharding(mesh, P(None, "model"))), None

        return (lax.scan(layer, x, params)[0] ** 2).sum()

    several, one = make(lead=(4,)), make()
    agree(
        lambda f: jax.vmap(jax.grad(f, (0, 1)), (None, 0), spmd_axis_name="data"),
        loss,
        one[0],
        several[1],
    )


# ---------------------------------------------------------------- training


@functools.cache
def _trained(policy: Any) -> Any:
    fn = jaxmem.remat(loss, policy) if policy else loss
    optimizer = optax.adamw(1e-2)

    @functools.partial(exact_jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, x = make()
    state, values = optimizer.init(params), []
    for _ in range(3):
        params, state, value = step(params, state, x)
        values.append(value)
    return params, state, values


@each_policy
def test_training_with_donated_arguments(policy: Any) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax's own
        assert_same(_trained(policy), _trained(None))


# ---------------------------------------------------------------- calling


@functools.cache
def _plain() -> Any:
    """The loss of `make()` and its gradients, without a decorator."""
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(*make())


@each_policy
def test_eager(policy: Any) -> None:
    params, x = make()
    run = jaxmem.remat(loss, policy)
    value, (gradient, _) = _plain()
    assert_close(run(params, x), value)
    assert_close(jax.grad(run)(params, x), gradient)


@each_policy
def test_shapes_and_jaxprs(policy: Any) -> None:
    params, x = make()
    run = jaxmem.remat(loss, policy)
    specs = jax.eval_shape(lambda *args: args, params, x)
    assert jax.eval_shape(jax.grad(run), *specs) == jax.eval_shape(jax.grad(loss), *specs)
    closed = jax.make_jaxpr(jax.grad(run))(params, x)
    assert [v.aval for v in closed.jaxpr.outvars] == [
        jax.typeof(leaf) for leaf in jax.tree.leaves(params)
    ]


@pytest.mark.filterwarnings("ignore::jaxmem.NoEffectWarning")
@pytest.mark.parametrize("inner", ["sqrt", "revolve"])
def test_a_stack_keeps_the_policy_of_the_innermost_decorator(inner: str) -> None:
    args = make()
    run = jaxmem.remat(loss, POLICIES[inner])
    planned = [stack.plan for stack in jaxmem.stacks(run, *args)]
    for outer in POLICIES.values():
        assert [s.plan for s in jaxmem.stacks(jaxmem.remat(run, outer), *args)] == planned
    agree(lambda f: jax.value_and_grad(f, (0, 1)), run, *args)


def test_layers_checkpointed_by_hand_can_be_decorated() -> None:
    def loss_by_hand(params: Any, x: Any) -> Any:
        return (lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).sum()

    agree(lambda f: jax.value_and_grad(f, (0, 1)), loss_by_hand, *make())
    decorated = jaxmem.remat_full(loss_by_hand)
    agree(lambda f: jax.value_and_grad(f, (0, 1)), decorated, *make(), under={"full": "full"})


def test_arguments_of_any_kind() -> None:
    class Settings:
        scale = 2.0

    def fn(
        params: Any, x: Any, train: Any, mode: Any, *rest: Any, settings: Any, **more: Any
    ) -> Any:
        assert train is True
        assert isinstance(mode, str)
        assert rest == (None, jnp.float32, {"depth": 3})
        value = loss(params, x) * settings.scale + more["bonus"] * more["gain"]
        return {"value": value, "mode": mode, "settings": settings, "none": None, "three": 3}

    params, x = make()
    settings = Settings()

    def call(fn: Any, params: Any, x: Any) -> Any:
        out = fn(
            params,
            x,
            True,
            "text",
            None,
            jnp.float32,
            {"depth": 3},
            settings=settings,
            bonus=x.sum(),
            gain=1.5,
        )
        assert out["mode"] == "text"
        assert out["settings"] is settings
        assert out["none"] is None
        assert out["three"] == 3
        return out["value"]

    agree(lambda f: jax.value_and_grad(functools.partial(call, f), (0, 1)), fn, params, x)


@each_policy
def test_numpy_arguments(policy: Any) -> None:
    params, x = jax.tree.map(np.asarray, make())
    assert_close(jaxmem.remat(loss, policy)(params, x), _plain()[0])


# ---------------------------------------------------------------- part of the derivative


def _shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of everything that a jaxpr computes, at any depth."""
    for eqn in jaxpr.eqns:
        yield from (var.aval.shape for var in eqn.outvars)
        for param in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _shapes(inner)


@pytest.mark.parametrize("wanted", [("x",), ("w",), ("b",), ("context",), ("x", "context")])
def test_only_what_is_asked_for_is_differentiated(wanted: Any) -> None:
    params, x = make()
    args = {**params, "x": x, "context": jnp.cos(x)}

    def fn(wrt: Any, rest: Any) -> Any:
        args = wrt | rest
        scanned = {"w": args["w"], "b": args["b"]}
        h, _ = lax.scan(lambda h, p: (layer(h, p)[0] * args["context"], None), args["x"], scanned)
        return (h**2).sum()

    wrt = {name: args[name] for name in wanted}
    rest = {name: arg for name, arg in args.items() if name not in wanted}
    agree(jax.grad, fn, wrt, rest)
    for policy in POLICIES.values():
        run = jax.grad(jaxmem.remat(fn, policy))
        shapes = set(_shapes(jax.make_jaxpr(run)(wrt, rest).jaxpr))
        # A gradient of the stack would be written into an array of its shape.
        assert (args["w"].shape in shapes) == ("w" in wanted)


def test_integers_among_differentiated_arguments() -> None:
    problem = MODELS["int_carry"].make(5)

    def build(f: Any) -> Any:
        def run(params: Any, inputs: Any) -> Any:
            of_params, of_inputs = jax.grad(lambda p, i: f(p, i)[0], (0, 1), allow_int=True)(
                params, inputs
            )
            assert of_inputs["shift"].dtype == jax.dtypes.float0
            return of_params, of_inputs["x"]

        return run

    agree(build, problem.loss, problem.params, problem.inputs)


# ---------------------------------------------------------------- jax's own switches


@pytest.fixture
def new_checkpoint() -> Iterator[None]:
    before = jax.config.jax_remat3  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_remat3", not before)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.slow
@pytest.mark.usefixtures("new_checkpoint")
@pytest.mark.parametrize("model", ["mlp", "sown", "checkpoint_inside"])
def test_the_other_implementation_of_checkpoint(model: str) -> None:
    problem = MODELS[model].make(N)
    under = POLICIES | {
        "dots": policies.dots(),
        "names": policies.names(save="kept"),
        "levels": Plan.periodic(N, levels=2),
    }
    agree(differentiate, problem.loss, problem.params, problem.inputs, under=under)


@pytest.mark.usefixtures("new_checkpoint")
def test_stack_is_reached_through_the_other_checkpoint() -> None:
    test_stack_is_reached_through("checkpoint", POLICIES)


@each_policy
def test_without_jit(policy: Any) -> None:
    params, x = make()
    expected = _plain()[1][0]
    # lax.scan is a Python loop then.
    with jax.disable_jit():
        assert_close(jax.grad(jaxmem.remat(loss, policy))(params, x), expected)


@each_policy
def test_debug_nans(policy: Any) -> None:
    params, x = make()
    with jax.debug_nans(True):
        assert_close(jax.jit(jax.grad(jaxmem.remat(loss, policy)))(params, x), _plain()[1][0])


@each_policy
def test_export(policy: Any) -> None:
    args = make()
    exported = jax.export.export(jax.jit(jaxmem.remat(loss, policy)))(*args)
    assert_close(jax.jit(jax.value_and_grad(exported.call, (0, 1)))(*args), _plain())


def _checked(w: jax.Array, h: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> Any:
        checkify.check(h.sum() < 30, "large: {}", h.sum())
        return jnp.log(h @ w), None

    return lax.scan(layer, h, w)[0].sum()


@functools.cache
def _said(fn: Callable[..., Any]) -> list[str | None]:
    """What is said of a NaN, and of a check of the user's."""
    run = jax.jit(checkify.checkify(fn, checkify.user_checks | checkify.nan_checks))
    ws = jnp.stack([jnp.eye(D)] * N)
    return [run(ws * scale, jnp.ones((B, D)))[0].get() for scale in (1.0, 8.0)]


@each_policy
def test_checkify(policy: Any) -> None:
    decorated = jaxmem.remat(_checked, policy)
    assert _said(decorated) == _said(_checked)
    assert None not in _said(_checked)
    assert "nan" in str(_said(jax.grad(decorated))[0])


def test_gradients_of_what_checkify_has_rewritten_say_that_all_is_kept() -> None:
    checked = checkify.checkify(jaxmem.remat(lambda w, h: loss(w, h), "sqrt", segments=3))
    with pytest.warns(jaxmem.NoEffectWarning, match="put checkify around the gradient"):
        jax.grad(lambda *args: checked(*args)[1])(*make())


def test_linear_transpose() -> None:
    params, x = make()

    def linear(x: Any) -> Any:
        return lax.scan(lambda h, w: (h @ w, h.sum()), x, params["w"])

    def build(f: Any) -> Any:
        return lambda x: jax.linear_transpose(f, x)((x, jnp.ones(N)))

    agree(build, linear, x)


def dropped(h, w_and_key):
    w, key = w_and_key
    return jnp.tanh(jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h @ w, 0.0)), None


def keys_split(weights, h, key):
    keys = jax.random.split(key, len(weights))
    return jax.lax.scan(dropped, h, (weights, keys))[0].sum()


def keys_carried(weights, h, key):
    def layer(carry, w):
        h, key = carry
        key, own = jax.random.split(key)
        return (dropped(h, (w, own))[0], key), None

    return jax.lax.scan(layer, (h, key), weights)[0][0].sum()


def keys_folded(weights, h, key):
    def layer(h, step):
        own = jax.random.fold_in(key, step[1])
        return dropped(h, (step[0], own))

    two = (weights, jnp.arange(len(weights))), (weights, jnp.arange(len(weights)) + 9)
    return jax.lax.scan(layer, jax.lax.scan(layer, h, two[0])[0], two[1])[0].sum()


def keys_unrolled(weights, h, key):
    for w, own in zip(weights, jax.random.split(key, len(weights)), strict=True):
        h = dropped(h, (w, own))[0]
    return h.sum()


def key_used_again(weights, h, key):
    return jax.lax.scan(lambda h, w: dropped(h, (w, key)), h, weights)[0].sum()


def keys_used_by_two(weights, h, key):
    return keys_split(weights, h, key) + keys_split(weights, h, key)


KEYED = jnp.full((4, 4, 4), 0.3), jnp.ones((2, 4))


@functools.cache
def _of_keys(fn: Callable[..., Any]) -> Any:
    return jax.jit(jax.value_and_grad(fn))(*KEYED, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("decorate", [jaxmem.remat_sqrt, jaxmem.remat_revolve, jaxmem.remat_full])
@pytest.mark.filterwarnings("ignore::jaxmem.NoStackWarning")
def test_random_keys_are_not_used_twice_by_recomputation(decorate):
    (weights, h), key = KEYED, jax.random.key
    ways = [lambda f: f, lambda f: jax.jit(jax.grad(f))]
    fns = [keys_split, keys_carried]
    if decorate is jaxmem.remat_sqrt:
        ways.append(jax.grad)
        fns += [keys_folded, keys_unrolled]
    for fn in fns:
        with jax.debug_key_reuse(True):
            found = [way(decorate(fn))(weights, h, key(0)) for way in ways]
        value, gradient = _of_keys(fn)
        chex.assert_trees_all_close(found, [value, gradient, gradient][: len(ways)], rtol=1e-5)
    for fn in (key_used_again, keys_used_by_two):
        for way in ways:
            with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
                way(decorate(fn))(weights, h, key(0))
    for fn in (keys_split, keys_carried):
        used = key(0)
        with jax.debug_key_reuse(True):
            decorate(fn)(weights, h, used)
            with pytest.raises(jax.errors.KeyReuseError):
                decorate(fn)(weights, h, used)
