"""linen modules under every policy: same variables, keys, state and gradients, bit for bit."""

import functools
import pickle
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization

import jaxmem
from jaxmem import Plan, linen, policies
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
IN_AXES: Any = (nn.broadcast, nn.broadcast)  # the carry is not counted

# ---------------------------------------------------------------- models


class Block(nn.Module):
    """Batch norm, dropout, sown values, a static flag and a static string."""

    rate: float = 0.3

    @nn.compact
    def __call__(self, x, train, mode):
        assert isinstance(train, bool)
        assert isinstance(mode, str)
        h = nn.Dense(x.shape[-1])(x)
        h = nn.BatchNorm(use_running_average=not train)(h)
        h = nn.Dropout(self.rate, deterministic=not train)(jnp.tanh(h))
        self.sow("intermediates", "h", h)
        return x + h, h.mean()


class Light(nn.Module):
    """What a test of anything but state and random keys needs, quick to compile."""

    @nn.compact
    def __call__(self, x, train, mode):
        assert isinstance(train, bool)
        assert isinstance(mode, str)
        h = jnp.tanh(nn.Dense(x.shape[-1])(x))
        return x + h, h.mean()


class Encoder(nn.Module):
    """A stack between two other layers."""

    layers: int = LAYERS
    block: Any = Light

    @nn.compact
    def __call__(self, x, train=False, mode="plain", mask=None):
        x = nn.Dense(x.shape[-1])(x)
        stack = nn.scan(
            self.block,
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=IN_AXES,
            length=self.layers,
        )
        x, means = stack()(x, train, mode)
        self.sow("intermediates", "means", means)
        return nn.Dense(3)(x)

    def double(self, x, train=False):
        return 2 * self(x, train=train)


class Twice(nn.Module):
    """Two encoders, named automatically."""

    encoder: Any = Encoder

    @nn.compact
    def __call__(self, x, train=False):
        return self.encoder()(x, train=train) + self.encoder(layers=3)(x, mode="b", train=train)


class Carry(nn.Module):
    """The layer shape of nn.scan without further arguments."""

    @nn.compact
    def __call__(self, x, _):
        h = nn.Dropout(0.2, deterministic=False)(jnp.tanh(nn.Dense(x.shape[-1])(x)))
        return x + h, h.sum()


class Setup(nn.Module):
    """Submodules from `setup`, methods other than `__call__`."""

    def setup(self):
        self.first = nn.Dense(WIDTH)
        self.stack = nn.scan(
            Carry,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )()

    def encode(self, x, scale=1.0):
        return self.stack(self.first(x) * scale, None)[0]

    def __call__(self, x):
        return self.encode(x, scale=2.0)


def under(cls, policy: Any = "sqrt", **options) -> Any:
    return jaxmem.remat(cls, policy, **options)


def data():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def keys():
    return {"params": jax.random.key(0), "dropout": jax.random.key(2)}


def filled(module):
    """Variables of the shapes that `init` gives, filled without running it: `init` is slow."""
    shapes = jax.eval_shape(module.init, keys(), data())
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(5)
    values = [jnp.asarray(rng.uniform(-0.1, 0.8, leaf.shape), leaf.dtype) for leaf in leaves]
    variables = jax.tree.unflatten(structure, values)
    if "batch_stats" in variables:  # variances are positive
        variables["batch_stats"] = jax.tree.map(jnp.abs, variables["batch_stats"])
    return variables


@functools.cache
def reference(plain, options):
    """What the undecorated model starts from and comes to; asked for by several tests."""
    variables = filled(plain)
    return variables, trained(plain, variables, data(), **dict(options))


def trained(module, variables, x, **options):
    """Loss, gradients and every collection that training touches."""

    def loss(params, state, x):
        y, updates = module.apply(
            {"params": params, **state},
            x,
            rngs={"dropout": jax.random.key(3)},
            mutable=["batch_stats", "intermediates"],
            **options,
        )
        return (y**2).sum(), (y, updates)

    state = {name: value for name, value in variables.items() if name == "batch_stats"}
    return jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True))(variables["params"], state, x)


def assert_same_init(plain, decorated):
    expected = plain.init(keys(), data())
    chex.assert_trees_all_equal(decorated.init(keys(), data()), expected)
    # Variables may also be made outside `init`, and then under the policy.
    made = decorated.apply({}, data(), rngs=keys(), mutable=["params", "batch_stats"])[1]
    chex.assert_trees_all_equal(made, {name: expected[name] for name in made})


def assert_same_model(plain, decorated, **options):
    variables, expected = reference(plain, tuple(options.items()))
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.eval_shape(decorated.init, keys(), data()), variables
    )
    chex.assert_trees_all_equal(trained(decorated, variables, data(), **options), expected)


# ---------------------------------------------------------------- classes


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_decorated_class_trains_bitwise_equal(policy):
    decorated = under(Encoder, policy)(block=Block)
    assert_same_model(Encoder(block=Block), decorated, train=True, mode="b", mask=None)


@pytest.mark.slow
def test_initial_values_are_the_same():
    assert_same_init(Encoder(block=Block), under(Encoder)(block=Block))
    assert_same_init(Setup(), under(Setup, "revolve")())
    assert_same_init(Stacked(nn.scan, Block), Stacked(linen.scan, under(Block)))


@pytest.mark.parametrize("layers", [1, 2, 16])
def test_lengths(layers):
    assert_same_model(Encoder(layers), under(Encoder)(layers), train=True)


def test_nothing_is_renamed():
    decorated = under(Encoder)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(decorated, name) == getattr(Encoder, name)
    assert issubclass(decorated, Encoder)
    assert repr(decorated(layers=2)) == repr(Encoder(layers=2))
    assert declared_choice(decorated) == Choice(policies.sqrt())
    assert declared_choice(Encoder) is None


def test_nested_in_another_module_and_named_automatically():
    decorated = Twice(under(Encoder))
    assert sorted(filled(decorated)["params"]) == ["Encoder_0", "Encoder_1"]
    assert_same_model(Twice(), decorated, train=True)


def test_decorated_around_decorated():
    inner = under(Encoder, "full")
    with pytest.warns(jaxmem.NoEffectWarning, match="further in, test_linen.py:.* another one"):
        assert_same_model(Twice(), under(Twice, "sqrt")(inner), train=True)


@pytest.mark.slow
def test_captured_intermediates_are_the_same():
    assert_same_model(Twice(), Twice(under(Encoder)), train=True, capture_intermediates=True)


def test_tabulate_is_the_same():
    options: Any = {"console_kwargs": {"width": 240}, "column_kwargs": {"max_width": 120}}
    expected = Encoder().tabulate(keys(), data(), **options)
    assert under(Encoder)().tabulate(keys(), data(), **options) == expected


@pytest.mark.slow
def test_eager_calls_and_vmap():
    x, plain, decorated = data(), Encoder(), under(Encoder)()
    variables = filled(plain)
    chex.assert_trees_all_equal(decorated.apply(variables, x), plain.apply(variables, x))

    def mapped(module):
        return jax.vmap(lambda x: module.apply(variables, x))(jnp.stack([x, 2 * x]))

    chex.assert_trees_all_equal(mapped(decorated), mapped(plain))
    chex.assert_trees_all_equal(
        jax.jit(decorated.apply)(variables, x), jax.jit(plain.apply)(variables, x)
    )


@pytest.mark.slow
def test_methods_other_than_call():
    decorated = under(Setup, methods=("encode", "__call__"))
    assert_same_model(Setup(), decorated())
    x = data()
    variables = filled(Setup())

    def loss(module, method):
        def run(variables):
            rngs = {"dropout": jax.random.key(3)}
            return module.apply(variables, x, scale=3.0, method=method, rngs=rngs).sum()

        return jax.value_and_grad(run)(variables)

    expected = loss(Setup(), Setup.encode)
    chex.assert_trees_all_equal(loss(decorated(), decorated.encode), expected)
    chex.assert_trees_all_equal(loss(decorated(), "encode"), expected)
    chex.assert_trees_all_equal(loss(under(Setup, methods="encode")(), "encode"), expected)


def test_undecorated_method_may_call_a_decorated_one():
    assert_same_model(Encoder(), under(Encoder)(), method="double", train=True)


def test_clone_copy_and_bind():
    decorated, x = under(Encoder)(), data()
    variables = filled(Encoder())
    expected = Encoder().apply(variables, x)
    for module in (decorated.clone(), decorated.copy(), decorated.clone(layers=LAYERS)):
        assert type(module) is type(decorated)
        chex.assert_trees_all_equal(module.apply(variables, x), expected)
    chex.assert_trees_all_equal(decorated.bind(variables)(x), expected)


def test_subclass_of_a_decorated_class():
    class Wider(Encoder):
        bias: float = 1.0

        @nn.compact
        def __call__(self, x, train=False, mode="plain", mask=None):
            return super().__call__(x + self.bias, train=train)

    class WiderDecorated(under(Encoder)):
        bias: float = 1.0

        @nn.compact
        def __call__(self, x, **options):
            return super().__call__(x + self.bias, **options)

    assert_same_model(Wider(bias=2.0), WiderDecorated(bias=2.0), train=True)
    assert_same_model(Wider(bias=2.0), under(WiderDecorated, "full")(bias=2.0), train=True)


def test_a_hook_overridden_in_a_subclass_is_the_one_that_runs():
    class Base(nn.Module):
        def finish(self, x):
            return x

        @nn.compact
        def __call__(self, x):
            stack = nn.scan(
                Carry,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return self.finish(stack()(x, None)[0])

    class Hooked(under(Base)):
        def finish(self, x):
            return 4 * x

    class Plain(Base):
        def finish(self, x):
            return 4 * x

    assert_same_model(Plain(), Hooked())


def test_a_module_passed_from_outside_and_shared():
    class Shared(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            stack = nn.scan(
                Carry,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=4,
            )
            return self.inner(stack()(self.inner(x), None)[0])

    assert_same_model(Shared(nn.Dense(WIDTH)), under(Shared)(nn.Dense(WIDTH)))


def test_init_from_shapes_alone():
    shape = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    for decorated in (under(Encoder)(), Stacked(linen.scan, under(Light))):
        chex.assert_trees_all_equal(
            decorated.lazy_init(keys(), shape), decorated.init(keys(), data())
        )


def test_weights_saved_under_one_policy_load_under_another():
    x = data()
    saved = filled(under(Encoder, "full")())
    other = under(Encoder, "revolve")()
    shapes = jax.tree.map(jnp.zeros_like, filled(other))
    loaded = serialization.from_bytes(shapes, serialization.to_bytes(saved))
    chex.assert_trees_all_equal(other.apply(loaded, x), Encoder().apply(saved, x))


@functools.partial(under, policy="full")
class Picklable(nn.Module):
    """At module level, as pickle needs it."""

    layers: int = 3

    @nn.compact
    def __call__(self, x):
        return Encoder(self.layers)(x)


def test_pickle():
    module = pickle.loads(pickle.dumps(Picklable(layers=2)))
    assert module == Picklable(layers=2)
    assert type(module) is Picklable


def test_optax_steps():
    x, transform = data(), optax.adam(1e-2)

    def run(module):
        variables = filled(module)
        params, state = variables["params"], {"batch_stats": variables["batch_stats"]}
        optimiser = transform.init(params)

        def loss(params, state, key):
            y, state = module.apply(
                {"params": params, **state},
                x,
                train=True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return (y**2).mean(), state

        @jax.jit
        def step(params, state, optimiser, key):
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, key)
            updates, optimiser = transform.update(grads, optimiser, params)
            return optax.apply_updates(params, updates), state, optimiser, value

        for number in range(3):
            params, state, optimiser, _ = step(params, state, optimiser, jax.random.key(number))
        return params, state, optimiser

    chex.assert_trees_all_equal(run(under(Encoder)(block=Block)), run(Encoder(block=Block)))


# ---------------------------------------------------------------- instances


def test_instance_unbound_bound_and_inside_modules():
    x = data()
    instance = jaxmem.remat(Encoder(layers=5), "sqrt")
    assert instance.layers == 5
    assert isinstance(instance, Encoder)
    variables = filled(instance)
    bound = jaxmem.remat(Encoder(layers=5).bind(variables), "sqrt")
    chex.assert_trees_all_equal(bound(x), instance.apply(variables, x))

    class Parent(nn.Module):
        remat: bool

        def setup(self):
            encoder = Encoder(2)
            self.encoder = jaxmem.remat(encoder, "sqrt") if self.remat else encoder

        @nn.compact
        def __call__(self, x, train=False):
            named, auto = Encoder(2, name="enc"), Encoder(3)
            if self.remat:
                named, auto = (jaxmem.remat(m, "sqrt") for m in (named, auto))
            return named(x, train=train) + auto(x, train=train) + self.encoder(x)

    assert_same_model(Parent(False), Parent(True), train=True)


# ---------------------------------------------------------------- methods


on_method: Any = jaxmem.remat_sqrt


class OutsideCompact(Encoder):
    @on_method
    @nn.compact
    def __call__(self, x, **options):
        return Encoder.__call__(self, x, **options)


class InsideCompact(Encoder):
    @nn.compact
    @on_method
    def __call__(self, x, **options):
        return Encoder.__call__(self, x, **options)


class Plainly(Encoder):
    @nn.compact
    def __call__(self, x, train=False, mode="plain", mask=None):
        return Encoder.__call__(self, x, train=train)


class SetupMethod(Setup):
    encode = on_method(Setup.encode)

    @on_method
    def __call__(self, x):
        return self.encode(x, scale=2.0)


@pytest.mark.parametrize("cls", [OutsideCompact, InsideCompact])
def test_decorated_method_in_either_order(cls):
    assert_same_model(Plainly(), cls(), train=True, capture_intermediates=True)


def test_decorated_method_with_setup():
    assert_same_model(Setup(), SetupMethod())


def test_function_of_a_module():
    def run(module, x, train=False):
        return module(x, train=train)

    plain, x = Encoder(), data()
    variables = filled(plain)
    chex.assert_trees_all_equal(
        plain.apply(variables, x, method=on_method(run)), plain.apply(variables, x)
    )


# ---------------------------------------------------------------- scan

SCAN: Any = {
    "variable_axes": {"params": 0, "batch_stats": 0, "intermediates": 0},
    "split_rngs": {"params": True, "dropout": True},
}


class Stacked(nn.Module):
    """A layer class stacked by a scan given as a field."""

    scan: Any
    block: Any
    static: bool = True

    @nn.compact
    def __call__(self, x, train=False):
        if not self.static:
            return self.scan(self.block, length=LAYERS, **SCAN)()(x, None)[0]
        stack = self.scan(self.block, in_axes=IN_AXES, length=LAYERS, **SCAN)
        return stack()(x, train, "mode")[0]


@pytest.mark.parametrize("policy", ["sqrt", policies.revolve(slots=3)], ids=["sqrt", "revolve"])
def test_scan_of_a_decorated_layer(policy):
    decorated = under(Block, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoStackWarning)
        assert_same_model(Stacked(nn.scan, Block), Stacked(linen.scan, decorated), train=True)


def test_scan_with_a_policy_of_its_own():
    for remat in ("dots", Plan.periodic(LAYERS, segments=2)):
        scan = functools.partial(linen.scan, remat=remat)
        assert_same_model(Stacked(nn.scan, Light), Stacked(scan, Light), train=True)


def test_scan_names_and_types():
    stack = linen.scan(under(Block), length=2, **SCAN)
    assert stack.__name__ == nn.scan(Block, length=2, **SCAN).__name__ == "ScanBlock"
    assert isinstance(stack(), Block)
    plain = linen.scan(Block, length=2, **SCAN)
    assert declared_choice(plain) is None


def test_scan_of_a_subclass_whose_base_is_decorated():
    class Loud(Light):
        @nn.compact
        def __call__(self, x, train, mode):
            return super().__call__(2 * x, train, mode)

    class LoudDecorated(under(Light)):
        @nn.compact
        def __call__(self, x, train, mode):
            return super().__call__(2 * x, train, mode)

    LoudDecorated.__name__ = "Loud"
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoStackWarning)
        assert_same_model(Stacked(nn.scan, Loud), Stacked(linen.scan, LoudDecorated), train=True)


def test_scan_of_a_layer_whose_method_is_decorated():
    class Layer(Carry):
        __call__ = on_method(nn.compact(Carry.__call__))

    assert_same_model(
        Stacked(nn.scan, Carry, static=False),
        Stacked(functools.partial(linen.scan, remat="sqrt"), named(Layer, "Carry"), static=False),
    )


def named(cls, name):
    cls.__name__ = name
    return cls


def test_scan_of_a_function_and_of_a_partial():
    class ByFunction(nn.Module):
        scan: Any

        @nn.compact
        def __call__(self, x):
            block = Carry()
            return self.scan(lambda block, x, y: block(x, y), length=4, **SCAN)(block, x, None)[0]

    assert_same_model(ByFunction(nn.scan), ByFunction(functools.partial(linen.scan, remat="sqrt")))
    part = functools.partial(under(Block), rate=0.5)
    assert_same_model(
        Stacked(nn.scan, functools.partial(Block, rate=0.5)), Stacked(linen.scan, part), train=True
    )


def test_scan_reversed_over_inputs_with_carried_and_broadcast_variables():
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            seen = self.variable("state", "seen", lambda: jnp.zeros((), jnp.int32))
            seen.value += 1
            carry = jnp.tanh(nn.Dense(WIDTH)(carry) + x)
            return carry, carry.sum(axis=-1)

    def build(scan, cell):
        return scan(
            cell,
            variable_broadcast="params",
            variable_carry="state",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
            reverse=True,
        )()

    x = jax.random.normal(jax.random.key(4), (BATCH, 9, WIDTH))

    variables = Cell().init(keys(), data(), x[:, 0])  # params are shared, the state is carried

    def run(module):
        def loss(params):
            (carry, ys), state = module.apply(
                {"params": params, "state": variables["state"]}, data(), x, mutable=["state"]
            )
            return carry.sum() + ys.sum(), (ys, state)

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    (loss, aux), grads = run(build(linen.scan, under(Cell)))
    (expected_loss, expected_aux), expected_grads = run(build(nn.scan, Cell))
    chex.assert_trees_all_equal((loss, aux), (expected_loss, expected_aux))
    # jax hoists the broadcast of the shared bias out of its own scan and sums over the batch once,
    # after the loop; under a plan each layer's gradient is summed in its own pullback.
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-6)


# ---------------------------------------------------------------- what is said


def test_a_layer_on_its_own_is_no_stack():
    variables = nn.Dense(2).init(keys(), data())
    with pytest.warns(NoStackWarning, match="no layer stack in Dense.__call__"):
        y = under(nn.Dense)(2).apply(variables, data())
    chex.assert_trees_all_equal(y, nn.Dense(2).apply(variables, data()))


class Counted(nn.Module):
    """Reports each evaluation."""

    @nn.compact
    def __call__(self, x, train, mode):
        jax.debug.callback(lambda _: EVALUATIONS.append(1), x[0, 0])
        return jnp.tanh(nn.Dense(x.shape[-1])(x)), None


EVALUATIONS: list[int] = []


@pytest.mark.parametrize("where", ["encoder", "layer"])
def test_the_policy_is_applied_and_once(where):
    plan = Plan.revolve(LAYERS, slots=3)
    # flax's check of broadcast variables runs the layer as well, and takes no callbacks.
    unchecked = {"check_constancy_invariants": False}
    scan, stack = (functools.partial(s, **unchecked) for s in (nn.scan, linen.scan))
    plain = Stacked(scan, Counted)
    if where == "encoder":
        decorated = under(Stacked, plan)(scan, Counted)
    else:
        decorated = Stacked(stack, under(Counted, plan))
    variables = filled(plain)
    for module, extra in ((plain, 0), (decorated, plan.extra_forwards())):
        EVALUATIONS.clear()
        trained(module, variables, data())
        jax.effects_barrier()
        assert len(EVALUATIONS) == LAYERS + extra


def test_errors_by_their_text():
    with pytest.raises(TypeError, match="Encoder has no method 'encod'; methods= takes names"):
        under(Encoder, methods=("encod",))
    with pytest.raises(ValueError, match=r"two policies for Encoder.__call__: Full\(\) and Sqrt"):
        under(under(Encoder, "full"), "sqrt")
    with pytest.raises(ValueError, match="two policies for one stack: .* drop one of the two"):
        linen.scan(under(Block), remat="full", length=2)
    with pytest.raises(ValueError, match="unknown remat policy 'sqr'"):
        linen.scan(Block, remat="sqr", length=2)
    with pytest.raises(TypeError, match="takes a linen class or a function .* pass its class"):
        linen.scan(Block(), remat="sqrt", length=2)

    class Odd(nn.Module):
        @property
        def size(self):
            return 1

    with pytest.raises(TypeError, match="Odd.size is a property; a policy applies to plain"):
        under(Odd, methods="size")


def test_an_unbound_module_fails_as_linen_has_it():
    with pytest.raises(Exception, match="compact methods on unbound modules"):
        under(Encoder)()(data())


def test_equal_policies_do_not_conflict():
    assert_same_model(Encoder(), under(under(Encoder))(), train=True)
    assert linen.scan(under(Block), remat="sqrt", length=2, **SCAN).__name__ == "ScanBlock"


@pytest.mark.parametrize("form", ["a method of the module", "a function of the class"])
@pytest.mark.parametrize("by", ["low_memory", "mixed_precision", *POLICIES])
def test_apply_is_a_function_of_variables_like_others(by: str, form: str) -> None:
    """It binds the module by itself, so that nothing of it can be lifted around it."""
    decorate = (
        functools.partial(jaxmem.remat, policy=POLICIES[by])
        if by in POLICIES
        else getattr(jaxmem, by)
    )
    model, x = Encoder(block=Block), data()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def gradient(apply: Any, variables: Any) -> Any:
        def loss(variables: Any) -> Any:
            rngs = {"dropout": jax.random.key(2)}
            out, changed = apply(variables, x, True, rngs=rngs, mutable=["batch_stats"])
            return jnp.square(out[0]).mean(), changed

        return jax.grad(loss, has_aux=True)(variables)

    def plain(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return model.apply(variables, *args, **kwargs)

    if form == "a method of the module":
        apply = decorate(model.apply)
    else:
        apply = functools.partial(decorate(Encoder.apply), model)
    ours, other, undecorated = (
        functools.partial(gradient, each) for each in (apply, decorate(plain), model.apply)
    )
    lengths = [len(str(jax.make_jaxpr(each)(variables))) for each in (ours, other, undecorated)]
    assert abs(lengths[0] - lengths[1]) < 0.02 * lengths[1]
    assert abs(lengths[0] - lengths[2]) > 0.02 * lengths[2]
    chex.assert_trees_all_equal(jax.jit(ours)(variables), jax.jit(other)(variables))
