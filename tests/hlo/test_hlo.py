"""Texts of compiled programs: shapes, stack frames, trip counts, and the matmul FLOPs in them."""

import functools
import inspect
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from helpers.compiled import PLATFORMS, Texts, compiled
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxmem.hlo import flops as hlo_flops
from jaxmem.hlo import loops as hlo_loops
from jaxmem.hlo import naming
from jaxmem.hlo import text as hlo
from jaxmem.hlo.shapes import bits, shape


def spec(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# ---------------------------------------------------------------- shapes and instructions


@pytest.mark.parametrize(
    ("text", "dims", "space", "size"),
    [
        ("f32[]", (), 0, 4),
        ("bf16[24,8]{1,0:T(8,128)(2,1)S(1)}", (24, 8), 1, 384),
        ("s4[5]{0:E(4)}", (5,), 0, 3),
        ("pred[<=7]{0}", (7,), 0, 7),
        ("f32[2,3]{1,0:S(5)}", (2, 3), 5, 24),
        ("token[]", (), 0, 0),
    ],
)
def test_shapes_of_arrays(text: str, dims: tuple[int, ...], space: int, size: int):
    found = shape(text)
    assert (found.dims, found.space, found.bytes) == (dims, space, size)


def test_shapes_of_nested_tuples():
    found = shape("((f32[4]{0:T(128)}), /*index=5*/u8[2]{0:T(128)S(1)}, ())")
    assert found.elements is not None
    assert [len(e.elements or ()) for e in found.elements] == [1, 0, 0]
    assert found.at((0, 0)) == shape("f32[4]")
    assert found.at((1,)).space == 1
    assert found.bytes == 18


@pytest.mark.parametrize(("dtype", "count"), [("f8e5m2", 8), ("s64", 64), ("c128", 128)])
def test_bits(dtype: str, count: int):
    assert bits(dtype) == count


LINES = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8]) -> (f32[], f32[8]) {
  %p = f32[8]{0:T(128)} parameter(0), metadata={op_name="params[\\'a b\\'][\\"c\\"]"}
  %r = f32[] reduce(f32[8]{0:T(128)} %p, f32[] %z), dimensions={0}, to_apply=%add
  %z = f32[] constant(0)
  ROOT %t = (f32[], /*index=1*/f32[8]{0:T(128)}) tuple(%r, /*index=1*/%p)
}
"""


def test_instructions():
    module = hlo.parse(LINES)
    root = module.computations[module.entry].root
    assert (root.name, root.opcode, root.operands) == ("t", "tuple", ["r", "p"])
    assert module.instructions["p"].op_name == "params['a b'][\"c\"]"
    reduce = module.instructions["r"]
    assert reduce.operands == ["p", "z"], "shapes before operands are no operands"
    assert reduce.called("to_apply") == reduce.all_called() == ["add"]
    assert module.callers["add"] == [reduce]
    assert module.home["c"] == "add"
    assert module.tiled


ELEMENTS = """HloModule m

%body (t: (s32[], (f32[8], f32[4]))) -> (s32[], (f32[8], f32[4])) {
  %t = (s32[], /*index=1*/(f32[8]{0}, f32[4]{0:T(128)S(1)})) parameter(0)
  %sum = s32[] add(%t#0, %t#0)
  %twice = f32[4]{0} add(%t#1#1, %t#1#1)
  %pair = (f32[8]{0}, f32[4]{0}) tuple(%t#1#0, %twice)
  ROOT %out = (s32[], (f32[8]{0}, f32[4]{0})) tuple(%sum, %pair)
}

ENTRY %main (p: (s32[], (f32[8], f32[4]))) -> s32[] {
  %p = (s32[], (f32[8]{0}, f32[4]{0})) parameter(0)
  %w = (s32[], (f32[8]{0}, f32[4]{0})) while(%p), condition=%body, body=%body
  ROOT %n = s32[] negate(%w#0)
}
"""


def test_elements_in_the_short_form_are_instructions():
    module = hlo.parse(ELEMENTS)
    body = module.computations["body"].instructions
    assert [i.name for i in body] == [
        "t",
        "t#0",
        "t#1",
        "t#1#1",
        "t#1#0",
        "sum",
        "twice",
        "pair",
        "out",
    ]
    element = module.instructions["t#1#1"]
    assert (element.opcode, element.operands, element.number) == ("get-tuple-element", ["t#1"], 1)
    assert element.shape == shape("f32[4]{0:S(1)}")
    assert module.instructions["twice"].operands == ["t#1#1", "t#1#1"]
    assert module.users["w"] == [(module.instructions["w#0"], 0)]
    same = re.sub(
        r"#(\d)", r".\1", ELEMENTS
    )  # no short form: names of instructions that are not there
    assert len(hlo.parse(same).instructions) == len(module.instructions) - 5


def test_a_text_that_is_no_module():
    with pytest.raises(ValueError, match="no entry computation in the compiler's program text"):
        hlo.parse("HloModule jit_f\n")


def test_a_megabyte_takes_seconds_at_most():
    copies = -(-(2**20) // len(LINES))
    body = LINES.split("\n\n", 1)[1]
    parts = [re.sub(r"%(\w)", rf"%\g<1>{k}", body).replace("ENTRY ", "") for k in range(copies)]
    text = LINES + "\n".join(parts)
    start = time.process_time()
    module = hlo.parse(text)
    assert hlo_flops.matmul_flops(module) == (0, 0, 0)
    assert len(module.instructions) == 7 * (copies + 1)
    assert time.process_time() - start < 10


# ---------------------------------------------------------------- source lines and names


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return optax.log_cosh(nn.Dense(64)(x))


def test_the_line_of_a_value_is_the_users_not_that_of_a_library():
    variables = jax.eval_shape(Layer().init, jax.random.key(0), spec(32, 64))
    module = hlo.parse(compiled("cpu", Layer().apply, variables, spec(32, 64)).hlo)
    files = {frame.file for frame in module.frames.values()}
    assert any("optax" in file for file in files), "else this tests nothing"
    first = inspect.unwrap(Layer.__call__).__code__.co_firstlineno  # that of the decorator
    line = f"test_hlo.py:{first + 2} (Layer.__call__)"
    made = {i.opcode: i for i in module.instructions.values()}
    for opcode, scopes in (("dot", "Layer/Dense_0"), ("log-plus-one", "Layer")):
        assert naming.source(module, made[opcode]) == line
        assert naming.scopes(made[opcode].op_name) == scopes


def test_frames_know_who_called_them():
    def inner(x: jax.Array) -> jax.Array:
        return jnp.cos(x)

    def outer(x: jax.Array) -> jax.Array:
        return inner(x)

    module = hlo.parse(compiled("cpu", outer, spec(64)).hlo)
    (cos,) = (i for i in module.instructions.values() if i.opcode == "cosine")
    number = int(cos.attributes.split("stack_frame_id=")[1].split("}")[0])
    names = []
    following: int | None = number
    while following is not None:
        names.append(module.frames[following].function.rsplit(".", 1)[-1])
        following = module.frames[following].parent
    assert [n for n in names if n in ("inner", "outer", "flat")] == ["inner", "outer", "flat"]


def test_lines_given_at_the_instruction():
    text = LINES.replace(
        "to_apply=%add", 'to_apply=%add, metadata={source_file="/home/me/net.py" source_line=7}'
    )
    module = hlo.parse(text)
    assert naming.source(module, module.instructions["r"]) == "net.py:7"


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (naming.__file__, True),
        (jax.__file__, True),
        (re.__file__, True),
        ("/opt/py/lib/python3.13/contextlib.py", True),
        ("<frozen importlib>", True),
        ("/x/site-packages/optax/_src/base.py", True),
        ("/x/site-packages/optaxlike/base.py", False),
        ("/home/me/flax/train.py", False),
        ("C:\\lib\\site-packages\\flax\\core.py", True),
    ],
)
def test_what_is_a_library(file: str, library: bool):
    assert naming.in_library(file) == library


@pytest.mark.parametrize(
    ("op_name", "name", "scopes"),
    [
        ("jit(f)/jvp()/while/body/closed_call/tanh", "tanh", ""),
        ("jit(call)/call_exported/jit(f)/jvp(Net)/Block_0/jit(gelu)/mul", "mul", "Net/Block_0"),
        ("jit(f)/transpose(jvp(vmap(Net)))/Net/checkpoint/mul", "mul (backward)", "Net"),
        ("jit(f)/cond/branch_1_fun/scope/rematted_computation/exp", "exp (recomputed)", "scope"),
        ("jit(f)/A/...hqk,...khd->...qhd/dot_general", "dot_general", "A"),
        ("", "", ""),
    ],
)
def test_readable_names(op_name: str, name: str, scopes: str):
    assert naming.operation(op_name) == name
    assert naming.scopes(op_name) == scopes


# ---------------------------------------------------------------- trip counts


def loops(x: jax.Array) -> jax.Array:
    x = lax.fori_loop(0, 10, lambda _, x: lax.fori_loop(3, 9, lambda _, x: jnp.sin(x @ x), x), x)
    x, _ = lax.scan(lambda x, _: (jnp.cos(x @ x), None), x, length=7, reverse=True)
    return lax.while_loop(lambda x: x.sum() < 5, lambda x: x @ x, x)


@functools.cache
def looping(where: str) -> Texts:
    return compiled(where, loops, spec(128, 128))


@pytest.mark.parametrize("where", PLATFORMS)
@pytest.mark.parametrize("noted", [True, False])
def test_trip_counts_with_and_without_the_compilers_note(where: str, noted: bool):
    text = looping(where).hlo
    if not noted:
        text = re.sub(r'"known_trip_count":\{[^}]*\},?', "", text)
    module = hlo.parse(text)
    found = [i for i in module.instructions.values() if i.opcode == "while"]
    counts = [hlo_loops.trip_count(module, loop) for loop in found]
    assert sorted(counts, key=lambda count: count or 0) == [None, 6, 7, 10]
    once = 2 * 128**3
    # The condition of the last loop is of no interest, its body counts once.
    assert hlo_flops.matmul_flops(module) == ((60 + 7 + 1) * once, 0, 1)


COMPARE = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
    "EQ": lambda a, b: a == b,
}

LOOP = """HloModule m
%condition (p: (s32[], s32[])) -> pred[] {{
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %go = pred[] compare({sides}), direction={direction}
}}
%body (q: (s32[], s32[])) -> (s32[], s32[]) {{
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%j, %step)
  ROOT %t = (s32[], s32[]) tuple(%next, %m)
}}
ENTRY %main () -> (s32[], s32[]) {{
  %start = s32[] constant({start})
  %copy = s32[] copy(%start)
  %stop = s32[] constant({stop})
  %init = (s32[], s32[]) tuple(%copy, %stop)
  ROOT %loop = (s32[], s32[]) while(%init), condition=%condition, body=%body
}}
"""


@given(
    direction=st.sampled_from(sorted(COMPARE)),
    start=st.integers(-9, 9),
    stop=st.integers(-9, 9),
    step=st.integers(-4, 4).filter(bool),
    turned=st.booleans(),
)
def test_a_count_that_is_given_is_right(
    direction: str, start: int, stop: int, step: int, turned: bool
):
    sides = "%n, %i" if turned else "%i, %n"
    module = hlo.parse(
        LOOP.format(direction=direction, start=start, stop=stop, step=step, sides=sides)
    )
    found = hlo_loops.trip_count(module, module.instructions["loop"])
    count, i = 0, start
    while COMPARE[direction](*((stop, i) if turned else (i, stop))) and count < 100:
        count, i = count + 1, i + step
    growing = (step > 0) == (direction in ("LT", "LE")) if not turned else None
    if found is not None:
        assert found == count
    elif growing and direction in ("LT", "LE", "GT", "GE"):
        pytest.fail("a plain loop has a count")


# ---------------------------------------------------------------- matmul FLOPs

LAYERS, WIDTH, BATCH = 6, 128, 256
FORWARD = 2 * 2 * LAYERS * WIDTH * WIDTH * BATCH
WEIGHTS = {key: spec(LAYERS, WIDTH, WIDTH) for key in "ab"}


def stack(weights: Any, x: jax.Array, remat: Any = None) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jnp.sin(jnp.tanh(x @ w["a"]) @ w["b"]), None

    layer = layer if remat is None else remat(layer, prevent_cse=False)
    return (lax.scan(layer, x, weights)[0] ** 2).sum()


def conv(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(
        x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def conv_gradients(x: jax.Array, kernel: jax.Array, **options: Any) -> Any:
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sin(conv(x, kernel, **options)).sum()

    return jax.grad(loss, argnums=(0, 1))(x, kernel)


def taps(size: int, kernel: int, out: int, stride: int, low: int, dilation: int, base: int) -> int:
    meet = (o * stride + k * dilation - low for o in range(out) for k in range(kernel))
    return sum(0 <= at <= (size - 1) * base and at % base == 0 for at in meet)


IMAGE, KERNEL = spec(8, 16, 16, 8), spec(3, 3, 8, 32)
PLAIN = 2 * 8 * 8 * 32 * taps(16, 3, 16, 1, 1, 1, 1) ** 2
STRIDED = 2 * 8 * 8 * 32 * taps(16, 3, 7, 2, 0, 1, 1) ** 2
HALVED = {"window_strides": (2, 2), "padding": "VALID"}

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, int]] = {
    "matmul": (lambda a, b: a @ b, (spec(128, 256), spec(256, 64)), 2 * 128 * 256 * 64, 0),
    "batched": (
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (spec(2, 64, 4, 32, dtype="bfloat16"),) * 2,
        2 * 2 * 4 * 64 * 64 * 32,
        0,
    ),
    "scan": (stack, (WEIGHTS, spec(BATCH, WIDTH)), FORWARD, 0),
    "scan gradient": (jax.grad(stack), (WEIGHTS, spec(BATCH, WIDTH)), 3 * FORWARD, 0),
    "scan recomputed": (
        lambda w, x: jax.grad(functools.partial(stack, remat=jax.checkpoint))(w, x),
        (WEIGHTS, spec(BATCH, WIDTH)),
        4 * FORWARD,
        FORWARD,
    ),
    "larger branch": (
        lambda x, y, p: lax.cond(p > 0, lambda: jnp.sin(x @ y) @ y, lambda: x + x @ y),
        (spec(256, 256), spec(256, 256), spec()),
        2 * 2 * 256**3,
        0,
    ),
    "conv": (conv, (IMAGE, KERNEL), PLAIN, 0),
    "conv gradients": (conv_gradients, (IMAGE, KERNEL), 3 * PLAIN, 0),
    "conv strided": (
        functools.partial(conv_gradients, **HALVED),
        (IMAGE, KERNEL),
        3 * STRIDED,
        0,
    ),
    "conv in groups": (
        functools.partial(conv_gradients, feature_group_count=2),
        (IMAGE, spec(3, 3, 4, 32)),
        3 * PLAIN // 2,
        0,
    ),
    "conv dilated": (
        functools.partial(conv, rhs_dilation=(2, 2)),
        (IMAGE, KERNEL),
        2 * 8 * 8 * 32 * taps(16, 3, 16, 1, 2, 2, 1) ** 2,
        0,
    ),
}


# The TPU's compiler takes its time: for a gradient without groups, strides and checkpoints alone.
LONGER = {"scan recomputed", "larger branch", "conv strided", "conv in groups"}


@pytest.mark.parametrize(
    ("program", "where"),
    [
        pytest.param(
            program, where, marks=[pytest.mark.slow] * (where == "tpu" and program in LONGER)
        )
        for program, where in itertools.product(PROGRAMS, PLATFORMS)
    ],
)
def test_matmul_flops_are_what_the_mathematics_says(program: str, where: str):
    fn, specs, total, recomputed = PROGRAMS[program]
    module = hlo.parse(compiled(where, fn, *specs).hlo)
    assert hlo_flops.matmul_flops(module) == (total, recomputed, 0)


def test_padding_that_a_library_cannot_leave_out_is_work():
    # cuDNN pads equally on both sides, and here one side wants a row more: XLA writes the
    # zeros out, and then nobody can tell them from the image.
    strided = functools.partial(conv, window_strides=(2, 2))
    module = hlo.parse(compiled("gpu", strided, IMAGE, KERNEL).hlo)
    written_out = 2 * 8 * 8 * 32 * (3 * 8) ** 2
    assert hlo_flops.matmul_flops(module)[0] == written_out
    module = hlo.parse(compiled("tpu", strided, IMAGE, KERNEL).hlo)
    left_out = 2 * 8 * 8 * 32 * taps(16, 3, 8, 2, 0, 1, 1) ** 2
    assert hlo_flops.matmul_flops(module)[0] == left_out < written_out


def test_work_that_a_compiler_adds_is_work():
    # Small batches leave most of a TPU idle: it cuts images into overlapping pieces.
    few = compiled("tpu", conv, spec(4, 16, 16, 8), KERNEL).hlo
    assert hlo_flops.matmul_flops(hlo.parse(few))[0] > 1.2 * PLAIN / 2


def test_complex_numbers():
    specs = (spec(16, 16, dtype="complex64"),) * 2
    of = {w: hlo.parse(compiled(w, jnp.matmul, *specs).hlo) for w in PLATFORMS}
    found = {where: hlo_flops.matmul_flops(module)[0] for where, module in of.items()}
    # A TPU makes three real products of a complex one (Gauss).
    assert found == {"cpu": 8 * 16**3, "gpu": 8 * 16**3, "tpu": 6 * 16**3}


@given(
    size=st.integers(1, 9),
    kernel=st.integers(1, 9),
    out=st.integers(1, 9),
    stride=st.integers(1, 4),
    low=st.integers(-3, 5),
    dilation=st.integers(1, 4),
    base=st.integers(1, 6),
)
def test_taps_are_counted_as_if_one_by_one(
    size: int, kernel: int, out: int, stride: int, low: int, dilation: int, base: int
):
    window = f"size={kernel} stride={stride} pad={low}_0 lhs_dilate={base} rhs_dilate={dilation}"
    module = hlo.parse(f"""HloModule m
ENTRY %main (x: f32[1,{size},1], k: f32[{kernel},1,1]) -> f32[1,{out},1] {{
  %x = f32[1,{size},1] parameter(0)
  %k = f32[{kernel},1,1] parameter(1)
  ROOT %c = f32[1,{out},1] convolution(%x, %k), window={{{window}}}, dim_labels=b0f_0io->b0f
}}
""")
    expected = taps(size, kernel, out, stride, low, dilation, base)
    assert hlo_flops.matmul_flops(module)[0] == 2 * expected


# XLA prints fused attention so; it compiles only where cuDNN is installed.
ATTENTION = """HloModule m
ENTRY %main (q: bf16[4,1024,8,64], k: bf16[4,512,8,64], v: bf16[4,512,8,64]) -> bf16[4,8,1024,64] {
  %q = bf16[4,1024,8,64] parameter(0)
  %k = bf16[4,512,8,64] parameter(1)
  %v = bf16[4,512,8,64] parameter(2)
  %a = (bf16[4,8,1024,64], u8[0]) custom-call(%q, %k, %v), custom_call_target="TARGET", \
backend_config={"operation_queue_id":"0","cudnn_fmha_backend_config":{"fmha_scale":0.125,\
"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["4","8","1024","512"]}}}
  ROOT %o = bf16[4,8,1024,64] get-tuple-element(%a), index=0
}
"""


@pytest.mark.parametrize(
    ("target", "products"),
    [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaScaleBiasSoftmaxBackward", 5), ("other", 0)],
)
def test_fused_attention(target: str, products: int):
    module = hlo.parse(ATTENTION.replace("TARGET", target))
    assert hlo_flops.matmul_flops(module)[0] == products * 2 * 4 * 8 * 1024 * 512 * 64
