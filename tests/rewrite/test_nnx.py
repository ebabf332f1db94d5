"""NNX modules under every policy: same graph, state, keys and gradients, bit for bit."""

import functools
import inspect
import pickle
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import errors, nnx

import jaxmem
import jaxmem.nnx as memory
from jaxmem import Plan, policies
from jaxmem.errors import NoStackWarning
from jaxmem.rewrite.apply import Choice
from jaxmem.rewrite.scope import declared_choice

pytestmark = pytest.mark.filterwarnings("ignore::jaxmem.errors.OffloadWarning")

POLICIES = {
    "full": policies.full(),
    "sqrt": policies.sqrt(),
    "dots": policies.dots(),
    "revolve": policies.revolve(slots=2),
    "offload": policies.offload(),
}
WIDTH, LAYERS, BATCH = 4, 7, 6

# ---------------------------------------------------------------- models


class Block(nnx.Module):
    """Batch norm, dropout, captured values, a static flag and a static string."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x, train=False, mode="plain"):
        assert isinstance(train, bool)
        assert isinstance(mode, str)
        h = self.norm(jnp.tanh(self.dense(x)), use_running_average=not train)
        h = self.dropout(h, deterministic=not train)
        if mode == "sow":
            self.sow(nnx.Intermediate, "h", h)
        return x + h


class Light(nnx.Module):
    """What a test of anything but state and random keys needs, quick to compile."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, train=False, mode="plain"):
        return x + jnp.tanh(self.dense(x))


def stacked(block, layers, rngs):
    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return block(rngs=rngs)

    return create(rngs)


class Encoder(nnx.Module):
    """A stack made by nnx.vmap behind another layer, and a counter of calls."""

    def __init__(self, *, rngs, layers=LAYERS, block=Light, scan=nnx.scan):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = stacked(block, layers, rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.scan = scan

    def encode(self, x, train=False, mode="plain", mask=None):
        assert mask is None

        @self.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            return block(x, train=train, mode=mode)

        self.calls[...] += 1
        return forward(self.first(x), self.blocks)

    def __call__(self, x, **options):
        return self.encode(x, **options)


def under(cls, policy: Any = "sqrt", **options) -> Any:
    return jaxmem.remat(cls, policy, **options)


def data():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def leaves(tree):
    return jax.tree.leaves(tree)


def make(cls, **options):
    return cls(rngs=nnx.Rngs(0, dropout=1), **options)


def trained(model, **options):
    """Two optimiser steps: losses, gradients, outputs, and all state at the end."""
    optimiser = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimiser, x):
        def loss(model, x):
            y = model(x, **options)
            return (y**2).sum(), y

        argnums = (nnx.DiffState(0, nnx.Param), 1)
        (value, y), (grads, grad_x) = nnx.value_and_grad(loss, argnums=argnums, has_aux=True)(
            model, x
        )
        optimiser.update(model, grads)
        return value, y, grads, grad_x

    return [step(model, optimiser, data()) for _ in range(2)], nnx.state(model)


@functools.cache
def reference(build, options):
    """What the undecorated model comes to; asked for by several tests."""
    return trained(build(), **dict(options))


def assert_same_model(plain, decorated, **options):
    """Both arguments are functions without arguments that make a model."""
    model = decorated()
    chex.assert_trees_all_equal(nnx.state(model), nnx.state(plain()))
    steps, state = trained(model, **options)
    expected_steps, expected_state = reference(plain, tuple(options.items()))
    chex.assert_trees_all_equal(leaves(steps), leaves(expected_steps))
    chex.assert_trees_all_equal(state, expected_state)


def plain():
    return make(Encoder)


def heavy():
    return make(Encoder, block=Block)


# ---------------------------------------------------------------- classes


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_decorated_class_trains_bitwise_equal(policy):
    cls = under(Encoder, policy)
    assert_same_model(heavy, lambda: make(cls, block=Block), train=True, mode="b", mask=None)


@pytest.mark.parametrize("layers", [1, 16])
def test_lengths(layers):
    cls = under(Encoder)
    assert_same_model(
        functools.partial(make, Encoder, layers=layers),
        functools.partial(make, cls, layers=layers),
    )


def test_nothing_is_renamed():
    decorated = under(Encoder)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(decorated, name) == getattr(Encoder, name)
    assert issubclass(decorated, Encoder)
    assert declared_choice(decorated) == Choice(policies.sqrt())
    assert declared_choice(Encoder) is None
    assert inspect.signature(decorated) == inspect.signature(Encoder)
    assert jax.tree.structure(nnx.state(make(decorated))) == jax.tree.structure(
        nnx.state(make(Encoder))
    )


def test_nested_in_another_module():
    class Twice(nnx.Module):
        def __init__(self, *, rngs, encoder=Encoder):
            self.a = encoder(rngs=rngs)
            self.b = encoder(rngs=rngs, layers=3)

        def __call__(self, x):
            return self.a(x) + self.b(x)

    build = functools.partial(make, Twice)
    assert_same_model(build, functools.partial(make, Twice, encoder=under(Encoder)))
    outer, inner = under(Twice), under(Encoder, "full")
    with pytest.warns(jaxmem.NoEffectWarning, match="further in, test_nnx.py:.* another one"):
        assert_same_model(build, functools.partial(make, outer, encoder=inner))


def test_eager_calls_jit_and_grad():
    x = data()
    results = []
    for cls in (Encoder, under(Encoder)):
        model = make(cls, layers=3)
        out = [model(x), nnx.jit(lambda m, x: m(x))(model, x)]
        out.append(
            jax.jit(lambda graph, state, x: nnx.merge(graph, state)(x))(*nnx.split(model), x)
        )
        out.append(nnx.grad(lambda m, x: m(x).sum())(model, x))
        results.append((leaves(out), nnx.state(model)))
    chex.assert_trees_all_equal(*results)


class Reader(nnx.Module):
    """Changes nothing in a call, and scans without the help of NNX."""

    def __init__(self, *, rngs):
        self.blocks = stacked(Light, 3, rngs)

    def __call__(self, x, flag=None):
        graph, state = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, block: (nnx.merge(graph, block)(x), None), x, state)[0]


def test_a_module_of_an_outer_trace_can_be_read():
    x = data()

    def read(model):
        def call(x):
            return model(x, flag="static").sum()

        return jax.vmap(call)(x), jax.grad(call)(x), jax.jit(call)(x), jax.jit(jax.grad(call))(x)

    chex.assert_trees_all_equal(read(make(under(Reader))), read(make(Reader)))


def test_a_module_of_an_outer_trace_cannot_be_updated_as_without_a_policy():
    for cls in (Encoder, under(Encoder)):
        model = make(cls)
        with pytest.raises(errors.TraceContextError, match="Cannot mutate"):
            jax.vmap(lambda x, model=model: model(x))(data()[:, None])


def test_methods_other_than_call():
    cls = under(Encoder, methods="encode")
    assert_same_model(plain, lambda: make(cls))
    both = under(Encoder, methods=("encode", "__call__"))
    assert_same_model(plain, lambda: make(both))


def test_subclass_of_a_decorated_class():
    def louder(base):
        class Louder(base):
            def __call__(self, x, **options):
                return super().__call__(2 * x, **options)

            def encode(self, x, **options):
                # A power of two is exact, however the compiler fuses it.
                return 4 * super().encode(x, **options)

        return Louder

    build = functools.partial(make, louder(Encoder))
    cls = louder(under(Encoder))
    assert_same_model(build, lambda: make(cls))
    again = under(cls, "full")
    assert_same_model(build, lambda: make(again))


def test_captured_values():
    results = []
    for cls in (Encoder, under(Encoder)):
        model = make(cls, layers=3, block=Block)
        run = nnx.capture(model, nnx.Intermediate)
        everything = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
        found = [run(data(), train=True, mode="sow"), run(data(), mode="sow"), everything(data())]
        found.append(
            nnx.jit(lambda m, x: nnx.capture(m, nnx.Intermediate)(x, mode="sow"))(model, data())
        )
        results.append((found, nnx.state(model)))
    assert len(leaves(results[0][0])) > 8
    chex.assert_trees_all_equal(*results)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_that_make_new_variables():
    results = []
    for cls in (Encoder, under(Encoder)):
        model = make(cls, layers=3, block=Block)
        outs = [model(data(), mode="sow") for _ in range(2)]
        sown = nnx.pop(model, nnx.Intermediate)
        assert len(leaves(sown)) == 2
        results.append((outs, sown, nnx.state(model)))
    chex.assert_trees_all_equal(*results)


def test_changes_of_the_graph_propagate():
    class Growing(Reader):
        def __call__(self, x, flag=None):
            y = super().__call__(x, flag)
            self.last = nnx.Variable(y)
            self.times = getattr(self, "times", 0) + 1
            self.alias = self.blocks
            return y, self.blocks

    plain, decorated = make(Growing), make(under(Growing))
    for model in (plain, decorated):
        blocks = model.blocks
        for times in (1, 2):
            _, returned = model(data())
            assert model.times == times
            assert returned is model.alias is model.blocks is blocks
    chex.assert_trees_all_equal(nnx.state(decorated), nnx.state(plain))


def test_weights_of_one_policy_load_under_another():
    saved = nnx.to_pure_dict(nnx.state(make(under(Encoder, "full")), nnx.Param))
    other = under(Encoder, "revolve")(rngs=nnx.Rngs(5))
    state = nnx.state(other, nnx.Param)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(other, state)
    chex.assert_trees_all_equal(other(data()), plain()(data()))


@functools.partial(under, policy="full")
class Picklable(nnx.Module):
    """At module level, as pickle needs it."""

    def __init__(self, *, rngs):
        self.inner = Reader(rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


def test_pickle_and_clone():
    model = make(Picklable)
    for copy in (pickle.loads(pickle.dumps(model)), nnx.clone(model)):
        assert type(copy) is Picklable
        chex.assert_trees_all_equal(copy(data()), model(data()))


def test_instance():
    model = plain()
    twin = jaxmem.remat(model, "sqrt")
    assert isinstance(twin, Encoder)
    assert twin.blocks is model.blocks
    chex.assert_trees_all_equal(twin(data()), model(data()))
    assert int(model.calls[...]) == 2


# ---------------------------------------------------------------- functions and methods


on_function: Any = jaxmem.remat_sqrt


def test_method_and_function():
    class Decorated(Encoder):
        encode = on_function(Encoder.encode)

    assert_same_model(plain, lambda: make(Decorated))

    @on_function
    def loss(batch, *, models, scale):
        return scale * sum(model(batch["x"]).sum() for model in models)

    def run(loss):
        model = plain()
        arguments = {"models": [model, model], "scale": 2}
        return loss({"x": data()}, **arguments), nnx.state(model)

    chex.assert_trees_all_equal(run(loss), run(loss.__wrapped__))


def test_bound_methods_modules_and_partials_are_taken():
    x, model, expected = data(), plain(), plain()(data())
    for fn in (model.encode, model, functools.partial(model.encode, train=False)):
        chex.assert_trees_all_equal(memory.call(fn, Choice(policies.sqrt()), (x,), {}), expected)
    assert int(model.calls[...]) == 3
    assert memory.is_bound_method(functools.partial(model.encode))
    assert not memory.is_bound_method(model.first.kernel.sum)


def test_has_modules():
    model = make(Reader)
    assert memory.has_modules((1, {"a": [model]}), {})
    assert memory.has_modules((), {"m": nnx.Param(jnp.ones(2))})
    assert memory.has_modules((nnx.Rngs(0),), {})
    assert not memory.has_modules((jnp.ones(2), "text", None), {"train": True})


def test_the_graph_may_be_off():
    def run(cls):
        model = make(cls)
        with nnx.set_graph_updates(False):
            return nnx.jit(lambda model, x: model(x))(model, data()), nnx.state(model)

    chex.assert_trees_all_equal(run(under(Encoder)), run(Encoder))


# ---------------------------------------------------------------- scan


@pytest.mark.parametrize("policy", ["sqrt", policies.revolve(slots=3)], ids=["sqrt", "revolve"])
def test_scan_of_a_decorated_layer(policy):
    block = under(Block, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoStackWarning)
        assert_same_model(
            heavy,
            lambda: make(Encoder, block=block, scan=memory.scan),
            train=True,
            mode="b",
            mask=None,
        )


@pytest.mark.parametrize("remat", ["dots", Plan.periodic(LAYERS, segments=2)], ids=["name", "plan"])
def test_scan_with_a_policy_of_its_own(remat):
    scan = functools.partial(memory.scan, remat=remat)
    assert_same_model(plain, lambda: make(Encoder, scan=scan))


def test_scan_of_a_method_with_ys_and_a_state_axis():
    def layer(scan, base, **remat):
        class Layer(base):
            @scan(
                in_axes=(nnx.StateAxes({nnx.Param: 0, ...: None}), nnx.Carry, 0, None),
                out_axes=(nnx.Carry, 0),
                reverse=True,
                **remat,
            )
            def run(self, x, y, flag):
                x = self(x) + y
                return x, x.sum()

        return stacked(Layer, 3, nnx.Rngs(0))

    ys = jax.random.normal(jax.random.key(2), (3, BATCH, WIDTH))
    expected = layer(nnx.scan, Light).run(data(), ys, None)
    for model in (layer(memory.scan, under(Light)), layer(memory.scan, Light, remat="full")):
        chex.assert_trees_all_equal(model.run(data(), y=ys, flag=None), expected)


def test_scan_of_a_decorated_function():
    def build(decorate, scan):
        @scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @decorate
        def forward(x, block):
            return block(x)

        return forward

    expected = build(lambda f: f, nnx.scan)(data(), make(Reader).blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoStackWarning)
        found = build(jaxmem.remat_sqrt, memory.scan)(data(), make(Reader).blocks)
    chex.assert_trees_all_equal(found, expected)


class Counted(nnx.Module):
    """Reports each evaluation."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, train=False, mode="plain"):
        jax.debug.callback(lambda _: EVALUATIONS.append(1), x[0, 0])
        return jnp.tanh(self.dense(x))


EVALUATIONS: list[int] = []


@pytest.mark.parametrize("where", ["encoder", "layer"])
def test_the_policy_is_applied_and_once(where):
    plan = Plan.revolve(LAYERS, slots=3)
    if where == "encoder":
        decorated = make(under(Encoder, plan), block=Counted)
    else:
        decorated = make(Encoder, block=under(Counted, plan), scan=memory.scan)
    for model, extra in ((make(Encoder, block=Counted), 0), (decorated, plan.extra_forwards())):
        EVALUATIONS.clear()
        nnx.grad(lambda model: model(data()).sum())(model)
        jax.effects_barrier()
        assert len(EVALUATIONS) == LAYERS + extra


def test_a_layer_on_its_own_is_no_stack():
    with pytest.warns(NoStackWarning, match="no layer stack in Light.__call__"):
        y = make(under(Light))(data())
    chex.assert_trees_all_equal(y, make(Light)(data()))


def test_scan_without_a_policy_is_nnx_scan():
    assert_same_model(plain, lambda: make(Encoder, scan=memory.scan))


# ---------------------------------------------------------------- what is said


def test_errors_by_their_text():
    with pytest.raises(TypeError, match="Encoder has no method 'encod'; methods= takes names"):
        under(Encoder, methods=("encod",))
    with pytest.raises(ValueError, match=r"two policies for Encoder.__call__: Full\(\) and Sqrt"):
        under(under(Encoder, "full"), "sqrt")
    with pytest.raises(ValueError, match="unknown remat policy 'sqr'"):
        memory.scan(lambda x, block: block(x), remat="sqr")

    def pair(x, a, b):
        return b(a(x))

    one, other = (stacked(under(Light, name), 3, nnx.Rngs(0)) for name in ("sqrt", "full"))
    axes = {"in_axes": (nnx.Carry, 0, 0), "out_axes": nnx.Carry}
    with pytest.raises(ValueError, match="layers of one stack carry different policies"):
        memory.scan(pair, **axes)(data(), one, other)
    with pytest.raises(ValueError, match="two policies for one stack: .* drop one of the two"):
        memory.scan(pair, remat="dots", **axes)(data(), one, one)

    @memory.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def keyword_only(x, block, *, flag):
        return block(x)

    with pytest.raises(TypeError, match="flag of keyword_only can only be given by keyword"):
        keyword_only(data(), one, flag=1)
