"""What kernels read and write, counted by hand on texts of which each shows one thing."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem._util.records import from_data, to_data
from jaxmem.hlo import text as hlo
from jaxmem.hlo.fusions import Fusions, Kernel
from jaxmem.hlo.kernels import fusions

MIB = 2**20


def op(name: str) -> str:
    return f', metadata={{op_name="jit(f)/{name}"}}'


def read(*computations: str) -> Fusions:
    return fusions(hlo.parse("HloModule f\n\n" + "\n\n".join(computations)))


def one(*computations: str) -> Kernel:
    (kernel,) = read(*computations).kernels
    return kernel


def figures(kernel: Kernel) -> tuple[int, int, int]:
    return kernel.read_bytes, kernel.written_bytes, kernel.separate_bytes


# ---------------------------------------------------------------- one fusion


def test_a_chain_reads_its_input_and_writes_its_result():
    kernel = one(
        f"""%fused (p: f32[1024]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  %two = f32[] constant(2)
  %all = f32[1024]{{0}} broadcast(%two), dimensions={{}}{op("mul")}
  %m = f32[1024]{{0}} multiply(%p, %all){op("mul")}
  %t = f32[1024]{{0}} tanh(%m){op("tanh")}
  ROOT %s = f32[1024]{{0}} multiply(%t, %t){op("integer_pow")}
}}""",
        f"""ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  ROOT %fusion = f32[1024]{{0}} fusion(%x), kind=kLoop, calls=%fused{op("integer_pow")}
}}""",
    )
    # One by one: each of the three reads 4 KiB and writes 4; the square reads its operand once.
    assert figures(kernel) == (4096, 4096, 3 * 8192)
    assert [(o.name, o.count) for o in kernel.operations] == [
        ("mul", 1),
        ("tanh", 1),
        ("integer_pow", 1),
    ]
    assert (kernel.work, kernel.name, kernel.fused) == ("elementwise", "integer_pow", 3)


SLICED = f"""%fused (stack: f32[12,1024], k: s32[], row: f32[1024]) -> f32[12,1024] {{
  %stack = f32[12,1024]{{1,0}} parameter(0)
  %k = s32[] parameter(1)
  %row = f32[1024]{{0}} parameter(2)
  %zero = s32[] constant(0)
  %part = f32[1,1024]{{1,0}} dynamic-slice(%stack, %k, %zero){op("dynamic_slice")}
  %flat = f32[1024]{{0}} bitcast(%part)
  %sum = f32[1024]{{0}} add(%flat, %row){op("add")}
  %back = f32[1,1024]{{1,0}} bitcast(%sum)
  ROOT %new = f32[12,1024]{{1,0}} dynamic-update-slice(%stack, %back, %k, %zero){op("update")}
}}"""


def test_a_stack_is_read_and_written_by_the_slice():
    kernel = one(
        SLICED,
        """ENTRY %main (s: f32[12,1024], k: s32[], r: f32[1024]) -> f32[12,1024] {
  %s = f32[12,1024]{1,0} parameter(0)
  %k.1 = s32[] parameter(1)
  %r = f32[1024]{0} parameter(2)
  ROOT %fusion = f32[12,1024]{1,0} fusion(%s, %k.1, %r), kind=kLoop, calls=%fused
}""",
    )
    # The index is not counted.  One by one: slice 4 + 4 KiB, sum 8 + 4, update 4 + 4.
    assert figures(kernel) == (2 * 4096, 4096, (2 + 3 + 2) * 4096)


def test_equal_slices_are_read_once_and_others_each():
    text = """%fused (s: f32[12,1024], k: s32[], j: s32[]) -> f32[1,1024] {{
  %s = f32[12,1024]{{1,0}} parameter(0)
  %k = s32[] parameter(1)
  %j = s32[] parameter(2)
  %zero = s32[] constant(0)
  %a = f32[1,1024]{{1,0}} dynamic-slice(%s, %k, %zero), dynamic_slice_sizes={{1,1024}}
  %b = f32[1,1024]{{1,0}} dynamic-slice(%s, %{second}, %zero), dynamic_slice_sizes={{1,1024}}
  ROOT %r = f32[1,1024]{{1,0}} add(%a, %b)
}}"""
    entry = """ENTRY %main (x: f32[12,1024], y: s32[], z: s32[]) -> f32[1,1024] {
  %x = f32[12,1024]{1,0} parameter(0)
  %y = s32[] parameter(1)
  %z = s32[] parameter(2)
  ROOT %fusion = f32[1,1024]{1,0} fusion(%x, %y, %z), kind=kLoop, calls=%fused
}"""
    assert one(text.format(second="k"), entry).read_bytes == 4096
    assert one(text.format(second="j"), entry).read_bytes == 2 * 4096


def test_a_table_is_read_by_the_rows_that_are_gathered_and_scattered():
    entry = """ENTRY %main (t: f32[5000,128], i: s32[64,1], u: f32[64,128]) -> f32[{rows},128] {{
  %t = f32[5000,128]{{1,0}} parameter(0)
  %i = s32[64,1]{{1,0}} parameter(1)
  %u = f32[64,128]{{1,0}} parameter(2)
  ROOT %r = f32[{rows},128]{{1,0}} {call}
}}"""
    rows, indices = 64 * 128 * 4, 64 * 4
    gathered = one(entry.format(rows=64, call="gather(%t, %i), slice_sizes={1,128}"))
    assert figures(gathered) == (rows + indices, rows, 2 * rows + indices)
    # A scatter reads what it changes, and writes it.
    scattered = one(entry.format(rows=5000, call="scatter(%t, %i, %u), to_apply=%add"))
    assert figures(scattered) == (2 * rows + indices, rows, 3 * rows + indices)


def test_several_results_are_written_each_and_an_operand_given_twice_is_read_once():
    kernel = one(
        f"""%fused (p: f32[1024], q: f32[1024]) -> (f32[1024], f32[]) {{
  %p = f32[1024]{{0}} parameter(0)
  %q = f32[1024]{{0}} parameter(1)
  %m = f32[1024]{{0}} multiply(%p, %q){op("mul")}
  %zero = f32[] constant(0)
  %r = f32[] reduce(%m, %zero), dimensions={{0}}, to_apply=%add{op("reduce_sum")}
  ROOT %t = (f32[1024]{{0}}, f32[]) tuple(%m, %r)
}}""",
        """ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %both = f32[1024]{0} bitcast(%x)
  %fusion = (f32[1024]{0}, f32[]) fusion(%x, %both), kind=kInput, calls=%fused
  ROOT %first = f32[1024]{0} get-tuple-element(%fusion), index=0
}""",
    )
    assert figures(kernel) == (4096, 4096 + 4, 2 * 4096 + 4096 + 4)
    assert (kernel.work, kernel.name) == ("reduction", "reduce_sum")


BEFORE = ', backend_config={"float_type_correction_info":{"original_type":"BF16"}}'


@pytest.mark.parametrize("said", ["", BEFORE], ids=["GPU", "TPU"])
def test_what_only_the_compiler_adds_is_no_operation(said: str):
    """The conversions to the type that a unit computes in, and what is left out between two."""
    text = """%fused (p: bf16[1024]) -> bf16[1024] {{
  %p = bf16[1024]{{0}} parameter(0)
  %wide = f32[1024]{{0}} convert(%p){asked}
  %t = f32[1024]{{0}} tanh(%wide){tanh}
  %s = f32[1024]{{0}} sine(%t){sine}
  ROOT %narrow = bf16[1024]{{0}} convert(%s){asked}
}}"""
    entry = """ENTRY %main (x: bf16[1024]) -> bf16[1024] {
  %x = bf16[1024]{0} parameter(0)
  ROOT %fusion = bf16[1024]{0} fusion(%x), kind=kLoop, calls=%fused
}"""
    tanh, sine = op("tanh"), op("sin")
    kernel = one(text.format(asked="", tanh=tanh + said, sine=sine + said), entry)
    assert figures(kernel) == (2048, 2048, 2 * 4096), "of bfloat16, not of float32"
    assert [o.name for o in kernel.operations] == ["tanh", "sin"]
    kernel = one(text.format(asked=op("convert_element_type"), tanh=tanh, sine=sine), entry)
    assert figures(kernel) == (2048, 2048, 2 * (2048 + 4096) + 2 * 8192), "asked for"


NESTED = f"""%bit (i: f32[64,64]) -> f32[64,64] {{
  %i = f32[64,64]{{1,0:T(8,128)S(1)}} parameter(0)
  ROOT %b = f32[64,64]{{1,0:T(8,128)}} bitcast(%i)
}}

%fused (a: f32[64,64], b: f32[64,64]) -> f32[64,64] {{
  %a = f32[64,64]{{1,0:T(8,128)S(1)}} parameter(0)
  %f = f32[64,64]{{1,0:T(8,128)}} fusion(%a), kind=kLoop, calls=%bit
  %w = f32[64,64]{{1,0:T(8,128)}} parameter(1)
  %c = f32[64,64]{{1,0:T(8,128)}} convolution(%f, %w), dim_labels=bf_io->bf{op("dot_general")}
  ROOT %t = f32[64,64]{{1,0:T(8,128)}} tanh(%c){op("tanh")}
}}"""


def test_fusions_in_fusions_and_memory_on_the_chip():
    found = read(
        NESTED,
        """ENTRY %main (x: f32[64,64], w.1: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0:T(8,128)} parameter(0)
  %w.1 = f32[64,64]{1,0:T(8,128)} parameter(1)
  %start = (f32[64,64]{1,0:T(8,128)S(1)}, f32[64,64]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %done = f32[64,64]{1,0:T(8,128)S(1)} copy-done(%start)
  ROOT %fusion = f32[64,64]{1,0:T(8,128)} fusion(%done, %w.1), kind=kOutput, calls=%fused
}""",
    )
    block = 64 * 64 * 4
    product, copy = found.kernels
    assert (product.work, product.name, copy.work) == ("matmul", "dot_general", "copy")
    assert figures(product) == (block, block, 3 * block + 2 * block)
    assert product.on_chip_bytes == block, "the operand that was copied there"
    assert figures(copy) == (block, 0, 0)
    assert copy.on_chip_bytes == block
    assert found.on_chip_bytes == 2 * block


def test_calls_of_libraries_are_counted_without_workspace_and_marks_not_at_all():
    found = read(
        """ENTRY %main (x: bf16[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %room = bf16[64,64]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %call = (bf16[64,64]{1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  ROOT %first = bf16[64,64]{1,0} get-tuple-element(%call), index=0
}"""
    )
    (kernel,) = found.kernels
    assert kernel.work == "matmul"
    assert (kernel.read_bytes, kernel.written_bytes) == (8192, 8192)


def test_a_stated_cost_of_a_kernel_is_believed():
    said = '{"cost_estimate":{"flops":"8","bytes_accessed":"100"}}'
    kernel = one(
        f"""ENTRY %main (x: f32[64]) -> f32[64] {{
  %x = f32[64]{{0}} parameter(0)
  ROOT %c = f32[64]{{0}} custom-call(%x), custom_call_target="mine", backend_config={said}
}}"""
    )
    assert (kernel.work, kernel.separate_bytes) == ("custom call", 100)
    assert kernel.read_bytes + kernel.written_bytes == 100


# ---------------------------------------------------------------- how often


def test_a_loop_counts_times_its_length_and_a_conditional_its_heaviest_branch():
    loop = """%body (t: (s32[], f32[12,1024])) -> (s32[], f32[12,1024]) {
  %t = (s32[], f32[12,1024]{1,0}) parameter(0)
  %k.2 = s32[] get-tuple-element(%t), index=0
  %s.2 = f32[12,1024]{1,0} get-tuple-element(%t), index=1
  %row.2 = f32[1024]{0} constant({...})
  %fusion = f32[12,1024]{1,0} fusion(%s.2, %k.2, %row.2), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[12,1024]{1,0}) tuple(%k.2, %fusion)
}

%condition (t.1: (s32[], f32[12,1024])) -> pred[] {
  %t.1 = (s32[], f32[12,1024]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}"""
    entry = """ENTRY %main (start: (s32[], f32[12,1024])) -> (s32[], f32[12,1024]) {{
  %start = (s32[], f32[12,1024]{{1,0}}) parameter(0)
  ROOT %while = (s32[], f32[12,1024]{{1,0}}) while(%start), condition=%condition, body=%body{known}
}}"""
    known = ', backend_config={"known_trip_count":{"n":"12"}}'
    found = read(SLICED, loop, entry.format(known=known))
    (kernel,) = found.kernels
    assert (kernel.times, kernel.total_bytes, found.bytes) == (12, 12 * 3 * 4096, 12 * 3 * 4096)
    assert found.separate_bytes == 12 * 7 * 4096
    assert found.unknown_loops == 0
    found = read(SLICED, loop, entry.format(known=""))
    assert (found.bytes, found.unknown_loops) == (3 * 4096, 1)

    branch = """%{name} (p.{name}: f32[{size}]) -> f32[{size}] {{
  %p.{name} = f32[{size}]{{0}} parameter(0)
  ROOT %r.{name} = f32[{size}]{{0}} negate(%p.{name})
}}"""
    found = read(
        branch.format(name="a", size=8),
        branch.format(name="b", size=32),
        """ENTRY %main (c: s32[], x: f32[8], y: f32[32]) -> f32[8] {
  %c = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %y = f32[32]{0} parameter(2)
  ROOT %r = f32[8]{0} conditional(%c, %x, %y), branch_computations={%a, %b}
}""",
    )
    assert found.bytes == 2 * 32 * 4


def test_an_asynchronous_call_counts_once():
    found = read(
        """%wrapped (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %n = f32[1024]{0} negate(%p), metadata={op_name="jit(f)/neg"}
}""",
        """ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %start = ((f32[1024]{0}), f32[1024]{0}, u32[]) async-start(%x), calls=%wrapped
  ROOT %done = f32[1024]{0} async-done(%start)
}""",
    )
    (kernel,) = found.kernels
    assert (kernel.name, kernel.instruction, figures(kernel)) == (
        "neg",
        "start",
        (4096, 4096, 8192),
    )


def test_what_is_repeated_in_several_kernels_is_one_operation():
    found = read(
        *(
            f"""%fused.{k} (p.{k}: f32[1024]) -> f32[1024] {{
  %p.{k} = f32[1024]{{0}} parameter(0)
  %e.{k} = f32[1024]{{0}} exponential(%p.{k}){op("exp")}
  ROOT %r.{k} = f32[1024]{{0}} {last}(%e.{k}){op(last)}
}}"""
            for k, last in enumerate(("sine", "cosine"))
        ),
        """ENTRY %main (x: f32[1024]) -> (f32[1024], f32[1024]) {
  %x = f32[1024]{0} parameter(0)
  %a = f32[1024]{0} fusion(%x), kind=kLoop, calls=%fused.0
  %b = f32[1024]{0} fusion(%x), kind=kLoop, calls=%fused.1
  ROOT %t = (f32[1024]{0}, f32[1024]{0}) tuple(%a, %b)
}""",
    )
    assert found.bytes == 4 * 4096
    assert found.separate_bytes == 3 * 2 * 4096, "exp, sine and cosine"


def test_kernels_that_are_alike_are_one_row():
    found = read(
        f"""ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  %a = f32[1024]{{0}} tanh(%x){op("Net/h_0/tanh")}
  %b = f32[1024]{{0}} tanh(%a){op("Net/h_1/tanh")}
  ROOT %c = f32[1024]{{0}} tanh(%b){op("Net/h_2/tanh")}
}}"""
    )
    (kernel,) = found.kernels
    assert (kernel.times, kernel.module, kernel.instruction) == (3, "Net/*", "a")


# ---------------------------------------------------------------- any elementwise program


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[str, list[str]]], int]:
    """Elementwise operations, each of what stands before it, and how many arguments."""
    arguments = draw(st.integers(1, 3))
    names = [f"x{k}" for k in range(arguments)]
    found = []
    for k in range(draw(st.integers(1, 8))):
        count = draw(st.integers(1, 2))
        found.append((f"v{k}", [draw(st.sampled_from(names)) for _ in range(count)]))
        names.append(f"v{k}")
    return found, arguments


@given(programs())
@settings(max_examples=60)
def test_fused_an_elementwise_program_moves_what_crosses_its_border(
    program: tuple[list[tuple[str, list[str]]], int],
):
    """Unfused it moves what its operations move one by one; and those are the same in both."""
    operations, arguments = program
    shape = "f32[256]{0}"
    # All are results: none is removed, and which are needed is no question.
    results = [name for name, _ in operations]
    lines = [
        # Alike, but no two the same: a number in the attributes tells them apart.
        f"  %{name} = {shape} {'add' if len(given) == 2 else 'tanh'}"
        f"({', '.join(f'%{g}' for g in given)}), mark={k}{op('add')}"
        for k, (name, given) in enumerate(operations)
    ]
    given = [f"  %x{k} = {shape} parameter({k})" for k in range(arguments)]
    kind = f"({', '.join([shape] * len(results))})"
    root = f"  ROOT %t = {kind} tuple({', '.join(f'%{name}' for name in results)})"
    unfused = read("\n".join(["ENTRY %main () -> f32[] {", *given, *lines, root, "}"]))
    entry = [f"  %y{k} = {shape} parameter({k})" for k in range(arguments)]
    passed = ", ".join(f"%y{k}" for k in range(arguments))
    fused = read(
        "\n".join(["%fused () -> f32[] {", *given, *lines, root, "}"]),
        "\n".join(
            [
                "ENTRY %main () -> f32[] {",
                *entry,
                f"  ROOT %f = {kind} fusion({passed}), kind=kLoop, calls=%fused",
                "}",
            ]
        ),
    )
    used = {g for _, given in operations for g in given if g.startswith("x")}
    assert unfused.bytes == unfused.separate_bytes == fused.separate_bytes
    assert fused.bytes == 1024 * (len(used) + len(results))
    for found in (fused, unfused):
        assert_sums(found)
        assert from_data(Fusions, to_data(found)) == found


def assert_sums(found: Fusions) -> None:
    """Totals are the sums of the kernels, theirs of their operations, and of the lines."""
    operations = [(k.times, o) for k in found.kernels for o in k.operations]
    assert found.read_bytes == sum(n * o.read_bytes for n, o in operations)
    assert found.written_bytes == sum(n * o.written_bytes for n, o in operations)
    assert found.bytes == sum(kernel.total_bytes for kernel in found.kernels)
    assert found.separate_bytes == sum(n * o.separate_bytes for n, o in operations)
    assert found.bytes == sum(line.bytes for line in found.lines)
    assert found.separate_bytes == sum(line.separate_bytes for line in found.lines)
    totals = [kernel.total_bytes for kernel in found.kernels]
    assert all(a >= b for a, b in itertools.pairwise(totals))


# ---------------------------------------------------------------- what is not fused

CALL = """ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  %a = f32[1024]{{0}} {first}(%x), metadata={{op_name="jit(f)/before"}}
  %b = f32[1024]{{0}} custom-call(%a), custom_call_target="{target}"{named}
  ROOT %c = f32[1024]{{0}} {last}(%b{more}), metadata={{op_name="jit(f)/after"}}
}}"""


@pytest.mark.parametrize(
    ("first", "target", "last", "more", "broken"),
    [
        ("tanh", "tpu_custom_call", "tanh", "", True),
        ("tanh", "my_ffi", "add", ", %x", True),
        ("tanh", "__cublas$gemm", "tanh", "", False),
        ("sort", "tpu_custom_call", "tanh", "", False),
        ("tanh", "tpu_custom_call", "sort", "", False),
        ("tanh", "tpu_custom_call", "add", ", %a", False),
    ],
)
def test_a_call_breaks_a_chain_of_elementwise_operations(
    first: str, target: str, last: str, more: str, broken: bool
):
    text = CALL.format(first=first, target=target, last=last, more=more, named=op("middle"))
    found = read(text).unfused
    assert len(found) == broken
    for call in found:
        assert (call.kind, call.name) == ("custom call", "middle")
        assert (call.before, call.after, call.bytes) == ("before", "after", 4 * 4096)


def test_a_copy_into_another_layout_and_one_into_the_same():
    text = """ENTRY %main (x: f32[32,64]) -> f32[32,64] {{
  %x = f32[32,64]{{1,0}} parameter(0), metadata={{op_name="x"}}
  ROOT %c = f32[32,64]{{{order}}} copy(%x)
}}"""
    (copy,) = read(text.format(order="0,1")).unfused
    assert (copy.kind, copy.bytes, copy.value, copy.parameter) == ("layout copy", 16384, "x", 0)
    assert not copy.asked_for
    assert read(text.format(order="1,0")).unfused == ()


def test_a_conversion_counts_unless_the_program_returns_it():
    text = """ENTRY %main (x: f32[1024]) -> {kind} {{
  %x = f32[1024]{{0}} parameter(0), metadata={{op_name="x"}}
  {root}%c = bf16[1024]{{0}} convert(%x), metadata={{op_name="jit(f)/convert_element_type"}}
{rest}}}"""
    assert read(text.format(kind="bf16[1024]", root="ROOT ", rest="")).unfused == ()
    rest = "  ROOT %s = bf16[1024]{0} sort(%c)\n"
    (found,) = read(text.format(kind="bf16[1024]", root="", rest=rest)).unfused
    assert (found.kind, found.from_dtype, found.dtype) == ("convert", "f32", "bf16")
    assert (found.bytes, found.value) == (4096 + 2048, "x")
