"""What a value is to a gradient's computation, in programs made up for it."""

import pytest

from jaxmem.hlo.naming import origin, phase
from jaxmem.hlo.roles import read_in_backward, role
from jaxmem.hlo.text import Module, parse

FORWARD, BACKWARD = "jit(f)/jvp()", "jit(f)/transpose(jvp())"

# A loop fills a stack in the forward pass and passes another on; the backward pass reads the first.
STACKS = f"""HloModule jit_f
%body (p: (s32[], f32[4,8], f32[4,8], f32[8])) -> (s32[], f32[4,8], f32[4,8], f32[8]) {{
  %p = (s32[], f32[4,8], f32[4,8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %kept = f32[4,8] get-tuple-element(%p), index=1
  %idle = f32[4,8] get-tuple-element(%p), index=2
  %h = f32[8] get-tuple-element(%p), index=3
  %tanh.1 = f32[8] tanh(%h), metadata={{op_name="{FORWARD}/while/body/tanh"}}
  %row = f32[1,8] bitcast(%tanh.1)
  %zero = s32[] constant(0)
  %dus = f32[4,8] dynamic-update-slice(%kept, %row, %i, %zero), metadata={{op_name="{FORWARD}/w"}}
  %dus.2 = f32[4,8] dynamic-update-slice(%idle, %row, %i, %zero), metadata={{op_name="{FORWARD}/w"}}
  ROOT %out = (s32[], f32[4,8], f32[4,8], f32[8]) tuple(%i, %dus, %dus.2, %tanh.1)
}}
%condition (c: (s32[], f32[4,8], f32[4,8], f32[8])) -> pred[] {{
  %c = (s32[], f32[4,8], f32[4,8], f32[8]) parameter(0)
  ROOT %go = pred[] constant(true)
}}
%fused (a: f32[4,8], b: f32[8]) -> f32[8] {{
  %a = f32[4,8] parameter(0)
  %b = f32[8] parameter(1)
  %start = s32[] constant(0)
  %slice.1 = f32[1,8] dynamic-slice(%a, %start, %start), dynamic_slice_sizes={{1,8}}
  %flat = f32[8] bitcast(%slice.1)
  ROOT %mul.1 = f32[8] multiply(%flat, %b), metadata={{op_name="{BACKWARD}/mul"}}
}}
ENTRY %main (x: f32[8], w: f32[8,8]) -> (f32[8,8], f32[8,8], f32[4,8]) {{
  %x = f32[8] parameter(0), metadata={{op_name="x"}}
  %w = f32[8,8] parameter(1), metadata={{op_name="w"}}
  %room = f32[4,8] broadcast(%x)
  %n = s32[] constant(0)
  %init = (s32[], f32[4,8], f32[4,8], f32[8]) tuple(%n, %room, %room, %x)
  %loop = (s32[], f32[4,8], f32[4,8], f32[8]) while(%init), condition=%condition, body=%body
  %stack = f32[4,8] get-tuple-element(%loop), index=1
  %other = f32[4,8] get-tuple-element(%loop), index=2
  %copied = f32[4,8] copy(%stack)
  %fusion = f32[8] fusion(%copied, %x), kind=kLoop, calls=%fused
  %again = f32[8] tanh(%x), metadata={{op_name="{BACKWARD}/rematted_computation/tanh"}}
  %split = f32[2,8,8] dot(%fusion, %again), metadata={{op_name="{BACKWARD}/dot_general"}}
  %from = f32[] constant(0)
  %dot.1 = f32[8,8] reduce(%split, %from), metadata={{op_name="{BACKWARD}/transpose"}}
  %scaled = f32[8,8] multiply(%dot.1, %w), metadata={{op_name="{BACKWARD}/mul"}}
  ROOT %all = (f32[8,8], f32[8,8], f32[4,8]) tuple(%dot.1, %scaled, %other)
}}"""


@pytest.fixture(scope="module")
def module() -> Module:
    return parse(STACKS)


def role_of(module: Module, name: str, index: tuple[int, ...] = ()) -> str:
    return role(module, (module.instructions[name], index), origin(module, name, index))


def test_a_stack_that_the_backward_pass_reads_is_saved(module: Module) -> None:
    assert role_of(module, "loop", (1,)) == "saved"
    # Under each of its names: in the loop, in the condition, after it.
    for name, index in (("p", (1,)), ("c", (1,)), ("dus", ()), ("stack", ()), ("copied", ())):
        assert role_of(module, name, index) == "saved", name
    assert read_in_backward(module, (module.instructions["loop"], (1,)))


def test_one_that_it_does_not_read_is_not(module: Module) -> None:
    assert role_of(module, "loop", (2,)) == ""
    assert not read_in_backward(module, (module.instructions["loop"], (2,)))


def test_a_row_on_its_way_into_a_stack_is_another_piece_of_memory(module: Module) -> None:
    assert role_of(module, "tanh.1") == ""


def test_a_working_copy_of_a_row_is_not_saved(module: Module) -> None:
    assert origin(module, "slice.1").is_slice
    assert role_of(module, "slice.1") == ""


def test_recomputed_values_and_sums_of_the_backward_pass(module: Module) -> None:
    assert role_of(module, "again") == "recomputed"
    assert role_of(module, "dot.1") == "sum"
    # Partial sums of it, and what is elementwise.
    assert role_of(module, "split") == ""
    assert role_of(module, "scaled") == ""


def test_arguments_have_no_role(module: Module) -> None:
    assert role_of(module, "x") == role_of(module, "w") == ""


ADDED = """HloModule jit_f
%body (p: (s32[], f32[8,8], f32[8,8])) -> (s32[], f32[8,8], f32[8,8]) {{
  %p = (s32[], f32[8,8], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %sum = f32[8,8] get-tuple-element(%p), index=1
  %x = f32[8,8] get-tuple-element(%p), index=2
  %dot.1 = f32[8,8] dot(%x, %x), metadata={{op_name="jit(f)/transpose(jvp())/dot_general"}}
  %decayed = f32[8,8] multiply(%sum, %x), metadata={{op_name="jit(f)/while/body/mul"}}
  %add.1 = f32[8,8] add({before}, %dot.1), metadata={{op_name="jit(f)/while/body/add"}}
  ROOT %out = (s32[], f32[8,8], f32[8,8]) tuple(%i, %add.1, %x)
}}
%condition (c: (s32[], f32[8,8], f32[8,8])) -> pred[] {{
  %c = (s32[], f32[8,8], f32[8,8]) parameter(0)
  ROOT %go = pred[] constant(true)
}}
ENTRY %main (x0: f32[8,8]) -> f32[8,8] {{
  %x0 = f32[8,8] parameter(0), metadata={{op_name="x"}}
  %n = s32[] constant(0)
  %none = f32[] constant(0)
  %room = f32[8,8] broadcast(%none), dimensions={{}}
  %init = (s32[], f32[8,8], f32[8,8]) tuple(%n, %room, %x0)
  %loop = (s32[], f32[8,8], f32[8,8]) while(%init), condition=%condition, body=%body
  ROOT %result = f32[8,8] get-tuple-element(%loop), index=1
}}"""


@pytest.mark.parametrize(("before", "expected"), [("%sum", "sum"), ("%decayed", "")])
def test_an_accumulator_is_a_sum_and_a_momentum_is_not(before: str, expected: str) -> None:
    assert role_of(parse(ADDED.format(before=before)), "loop", (1,)) == expected


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/jvp(Encoder)/while/body/tanh", "forward"),
        ("jit(step)/transpose(jvp(Encoder))/while/body/dot_general", "backward"),
        ("jit(step)/transpose(jvp())/while/body/rematted_computation/jvp()/tanh", "recomputed"),
        ("jit(step)/mul", ""),
        ("", ""),
    ],
)
def test_phases(op_name: str, expected: str) -> None:
    assert phase(op_name) == expected
