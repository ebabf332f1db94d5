"""Collectives of compiled programs: groups in every syntax, and kinds, bytes, counts and axes.

The expected numbers are derived by hand from the sizes below.
"""

import dataclasses
import itertools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from helpers.compiled import NAMES, compiled
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import targets
from jaxmem.hlo import text
from jaxmem.hlo.collectives import Collective, collectives
from jaxmem.hlo.replica_groups import axes_along, axes_of, pairs, replica_groups

# ---------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("{{0}, {1}}", ((0,), (1,))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
    ],
)
def test_groups_in_every_syntax(written: str, groups: Any):
    attributes = f"channel_id=1, replica_groups={written}, use_global_device_ids=true, x=%y"
    assert {frozenset(group) for group in replica_groups(attributes, 8)} == set(
        map(frozenset, groups)
    )


def test_pairs_of_a_permutation():
    assert pairs("source_target_pairs={{0,1},{1,2}}, metadata={}") == ((0, 1), (1, 2))
    assert pairs("source_target_pairs={}") == ()


MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 8}]


@hypothesis.given(mesh=st.sampled_from(MESHES), data=st.data())
def test_whole_axes_are_found_again(mesh: dict[str, int], data: st.DataObject):
    axes = data.draw(st.sets(st.sampled_from(sorted(mesh))))
    places = list(itertools.product(*(range(size) for size in mesh.values())))
    groups: dict[Any, list[int]] = {}
    for device, place in enumerate(places):
        outside = tuple(k for k, axis in zip(place, mesh, strict=True) if axis not in axes)
        groups.setdefault(outside, []).append(device)
    expected = tuple(axis for axis in mesh if axis in axes and mesh[axis] > 1)
    assert axes_of(tuple(map(tuple, groups.values())), tuple(mesh.items())) == expected


def test_groups_of_no_whole_axes_have_none():
    mesh = (("data", 8),)
    assert axes_of(((0, 1, 2, 3), (4, 5, 6, 7)), mesh) == ()
    assert axes_of(((0, 1), (2, 3, 4)), mesh) == ()
    assert axes_along(((0, 1), (4, 5)), (("data", 2), ("model", 4))) == ("model",)


# ---------------------------------------------------------------- texts


def read(lines: str, mesh: Any = (("data", 4),), head: str = "num_partitions=4") -> list[Any]:
    found = collectives(text.parse(f"HloModule f, is_scheduled=true, {head}\n{lines}"), mesh)
    return [(c.kind, c.times, c.bytes, c.wire_bytes, c.axes) for c in found]


THREE, FIVE = (f'backend_config={{"known_trip_count":{{"n":"{n}"}}}}' for n in (3, 5))
GROUPS = "channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true"


def test_each_kind_has_its_bytes():
    assert sorted(
        read(f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %g = f32[32]{{0}} all-gather(%x), dimensions={{0}}, {GROUPS}
  %r = f32[8]{{0}} all-reduce(%x), to_apply=%add, {GROUPS}
  %s = f32[2]{{0}} reduce-scatter(%x), dimensions={{0}}, to_apply=%add, {GROUPS}
  %a = f32[8]{{0}} all-to-all(%x), dimensions={{0}}, {GROUPS}
  %o = s64[4]{{0}} constant({{0,2,4,6}})
  %q = f32[8]{{0}} ragged-all-to-all(%x, %g, %o, %o, %o, %o), {GROUPS}
  %p = f32[8]{{0}} collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %b = f32[8]{{0}} collective-broadcast(%x), {GROUPS}
}}""")
    ) == [
        ("all-gather", 1, 128, 96, ("data",)),
        ("all-reduce", 1, 32, 48, ("data",)),
        ("all-to-all", 1, 32, 24, ("data",)),
        ("collective-broadcast", 1, 32, 32, ("data",)),
        ("collective-permute", 1, 32, 32, ("data",)),
        ("ragged-all-to-all", 1, 32, 24, ("data",)),
        ("reduce-scatter", 1, 32, 24, ("data",)),
    ]


def test_two_halves_count_once_and_arrays_that_are_sent_together_one_by_one():
    assert read(f"""
%wrapped (a: f32[8], b: f32[16]) -> (f32[2], f32[4]) {{
  %a = f32[8]{{0}} parameter(0)
  %b = f32[16]{{0}} parameter(1)
  ROOT %s = (f32[2]{{0}}, f32[4]{{0}}) reduce-scatter(%a, %b), to_apply=%add, {GROUPS}
}}
ENTRY %main (x: f32[8], y: f32[16]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %y = f32[16]{{0}} parameter(1)
  %g = ((f32[8], f32[16]), (f32[32], f32[64])) all-gather-start(%x, %y), {GROUPS}
  %h = (f32[32]{{0}}, f32[64]{{0}}) all-gather-done(%g)
  %r = ((f32[8], f32[16]), (f32[2], f32[4])) async-start(%x, %y), calls=%wrapped
  ROOT %d = (f32[2]{{0}}, f32[4]{{0}}) async-done(%r), calls=%wrapped
}}""") == [
        ("all-gather", 1, 256, 192, ("data",)),
        ("all-gather", 1, 128, 96, ("data",)),
        ("reduce-scatter", 1, 64, 48, ("data",)),
        ("reduce-scatter", 1, 32, 24, ("data",)),
    ]


def test_loops_multiply_and_a_conditional_counts_as_its_heavier_branch():
    assert read(f"""
%light (p: f32[8]) -> f32[8] {{
  ROOT %p = f32[8]{{0}} parameter(0)
}}
%heavy (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%q), to_apply=%add, {GROUPS}
}}
%body (s: f32[8]) -> f32[8] {{
  %s = f32[8]{{0}} parameter(0)
  %k = s32[] constant(0)
  ROOT %c = f32[8]{{0}} conditional(%k, %s, %s), branch_computations={{%light, %heavy}}
}}
%outer (t: f32[8]) -> f32[8] {{
  %t = f32[8]{{0}} parameter(0)
  ROOT %v = f32[8]{{0}} while(%t), condition=%cond, body=%body, {THREE}
}}
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %w = f32[8]{{0}} while(%x), condition=%cond, body=%outer, {FIVE}
}}""") == [("all-reduce", 15, 32, 48, ("data",))]


@pytest.mark.parametrize(("taken", "of_stack"), [("1,8", True), ("3,8", False)])
def test_a_loop_takes_layers_of_a_gathered_stack_one_by_one(taken: str, of_stack: bool):
    """A slice of several rows is what a device keeps of a value, and no layer of a stack."""
    (one,) = collectives(
        text.parse(f"""HloModule f, num_partitions=4
%body (t: (s32[], f32[12,8])) -> (s32[], f32[12,8]) {{
  %t = (s32[], f32[12,8]{{1,0}}) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %w = f32[12,8]{{1,0}} get-tuple-element(%t), index=1
  %l = f32[{taken}]{{1,0}} dynamic-slice(%w, %k, %k), dynamic_slice_sizes={{{taken}}}
  ROOT %n = (s32[], f32[12,8]{{1,0}}) tuple(%k, %w)
}}
ENTRY %main (x: f32[12,2]) -> (s32[], f32[12,8]) {{
  %x = f32[12,2]{{1,0}} parameter(0), metadata={{op_name="params"}}
  %g = f32[12,8]{{1,0}} all-gather(%x), dimensions={{1}}, {GROUPS}
  %z = s32[] constant(0)
  %s = (s32[], f32[12,8]{{1,0}}) tuple(%z, %g)
  ROOT %v = (s32[], f32[12,8]{{1,0}}) while(%s), condition=%cond, body=%body, {THREE}
}}"""),
        (("data", 4),),
    )
    assert (one.name, one.shape, one.times, one.in_loop) == ("params", (12, 8), 1, False)
    assert one.of_stack == of_stack


def test_groups_of_one_and_copies_without_a_channel_send_nothing():
    entry = """
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%x), to_apply=%add, {}
}}"""
    assert read(entry.format("channel_id=1, replica_groups=[4,1]<=[4]")) != []
    alone = "replica_groups=[4,1]<=[4], use_global_device_ids=true, channel_id=1"
    assert read(entry.format(alone)) == []
    # Groups of copies of the program, of which there is one; with a channel, of its partitions.
    assert read(entry.format("replica_groups={{0}}")) == []
    every = [("all-reduce", 1, 32, 48, ("data",))]
    assert read(entry.format("replica_groups={{0}}, channel_id=1")) == every
    # pmap's program is copied, not partitioned.
    copies = "replica_groups={{0,1},{2,3}}"
    assert read(entry.format(copies), (), "replica_count=4") == [("all-reduce", 1, 32, 32, ())]


def test_a_mesh_of_another_size_names_no_axes():
    assert read(
        f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%x), to_apply=%add, {GROUPS}
}}""",
        (("data", 2),),
    ) == [("all-reduce", 1, 32, 48, ())]


# ---------------------------------------------------------------- programs

LAYERS, WIDTH, HIDDEN, BATCH = 6, 512, 2048, 256
ACCELERATORS = ("gpu", "tpu")
# TPUs gather weights in bfloat16, in which they multiply.
GATHERED = {"gpu": 4, "tpu": 2}


def layer(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return jnp.tanh(h @ w["a"]) @ w["b"] + h


def step(params: Any, x: jax.Array, layer: Any = layer) -> Any:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (jax.lax.scan(lambda h, w: (layer(h, w), None), x, params)[0] ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))


def mesh_of(where: str, axes: dict[str, int]) -> AbstractMesh:
    return targets.target(NAMES[where], devices=math.prod(axes.values())).mesh(axes)


def spec(
    mesh: Any, shape: tuple[int, ...], *axes: str | tuple[str, ...] | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*axes)))


def found(where: str, fn: Any, *args: Any, mesh: dict[str, int]) -> tuple[Collective, ...]:
    texts = compiled(where, fn, *args, mesh=mesh)
    return collectives(text.parse(texts.hlo), tuple(mesh.items()))


def summed(found: Any) -> dict[tuple[str, str], int]:
    """Executions times bytes, by kind and axes."""
    sums: dict[tuple[str, str], int] = {}
    for one in found:
        key = one.kind, one.over
        sums[key] = sums.get(key, 0) + one.times * one.bytes
    return sums


WEIGHTS = WIDTH * HIDDEN  # of one of the two products of a layer


@pytest.mark.parametrize("where", ACCELERATORS)
def test_data_parallel_gradients_are_summed_layer_by_layer(where: str):
    mesh = mesh_of(where, {"data": 8})
    params = {
        "a": spec(mesh, (LAYERS, WIDTH, HIDDEN)),
        "b": spec(mesh, (LAYERS, HIDDEN, WIDTH)),
    }
    result = found(where, step, params, spec(mesh, (BATCH, WIDTH), "data"), mesh={"data": 8})
    assert {(c.kind, c.times, c.bytes, c.wire_bytes, c.axes) for c in result} == {
        ("all-reduce", LAYERS, 4 * WEIGHTS, 2 * 7 * 4 * WEIGHTS // 8, ("data",))
    }
    assert {c.shape for c in result} == {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    for one in result:
        assert (one.name, one.parameter) == ("dot_general (backward)", None)
        assert one.source.startswith("test_collectives.py:")
        assert one.source.endswith("(layer)")
        assert one.in_loop
        assert not one.recomputed


@pytest.mark.parametrize("where", ACCELERATORS)
def test_fully_sharded_weights_are_gathered_twice_and_gradients_scattered(where: str):
    mesh = mesh_of(where, {"fsdp": 8})
    params = {
        "a": spec(mesh, (LAYERS, WIDTH, HIDDEN), None, "fsdp"),
        "b": spec(mesh, (LAYERS, HIDDEN, WIDTH), None, None, "fsdp"),
    }
    x = spec(mesh, (BATCH, WIDTH), "fsdp")
    result = found(where, step, params, x, mesh={"fsdp": 8})
    assert summed(result) == {
        # Each weight in the forward pass and once more in the backward pass.
        ("all-gather", "fsdp"): 2 * LAYERS * 2 * WEIGHTS * GATHERED[where],
        ("reduce-scatter", "fsdp"): LAYERS * 2 * WEIGHTS * 4,
    }
    gathers = [c for c in result if c.kind == "all-gather"]
    assert {c.parameter for c in gathers} == {0, 1}
    assert all(c.wire_bytes == c.bytes * 7 // 8 for c in result)
    assert sum(c.times for c in gathers) == 4 * LAYERS
    # Recomputation of a layer shares what the backward pass gathers in any case.
    again = found(
        where, lambda p, x: step(p, x, jax.checkpoint(layer)), params, x, mesh={"fsdp": 8}
    )
    assert summed(again) == summed(result)
    assert not any(c.recomputed for c in again)


def two_blocks(mesh: Any) -> Any:
    """A layer of two blocks with a sum over the model's axis after each."""

    def whole(h: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", None)))

    def layer(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        h = h + whole(jnp.tanh(h @ w["a"]) @ w["b"])
        return h + whole(jnp.sin(h @ w["a"]) @ w["b"])

    return layer


@pytest.mark.parametrize("where", ACCELERATORS)
def test_tensor_parallel_activations_are_summed_over_the_models_axis(where: str):
    axes = {"data": 2, "model": 4}
    mesh = mesh_of(where, axes)
    params = {
        "a": spec(mesh, (LAYERS, WIDTH, HIDDEN), None, None, "model"),
        "b": spec(mesh, (LAYERS, HIDDEN, WIDTH), None, "model"),
    }
    x = spec(mesh, (BATCH, WIDTH), "data")
    plain = two_blocks(mesh)
    result = found(where, lambda p, x: step(p, x, plain), params, x, mesh=axes)
    carry = BATCH // 2 * WIDTH * 4
    assert summed(result) == {
        # After each block, and before each in the backward pass.
        ("all-reduce", "model"): LAYERS * 4 * carry,
        ("all-reduce", "data"): LAYERS * 2 * WEIGHTS // 4 * 4,
    }
    over_model = [c for c in result if c.axes == ("model",)]
    assert {(c.group_size, c.wire_bytes) for c in over_model} == {(4, 2 * 3 * carry // 4)}
    assert {(c.group_size) for c in result if c.axes == ("data",)} == {2}
    # The second block's input, which recomputation needs, is a sum that it has to form again.
    full = jax.checkpoint(plain)
    again = found(where, lambda p, x: step(p, x, full), params, x, mesh=axes)
    assert summed(again)["all-reduce", "model"] == LAYERS * 5 * carry
    repeated = [c for c in again if c.recomputed]
    assert [(c.times, c.bytes, c.axes) for c in repeated] == [(LAYERS, carry, ("model",))]


@pytest.mark.parametrize("where", ACCELERATORS)
def test_experts_exchange_tokens_under_shard_map(where: str):
    mesh = mesh_of(where, {"expert": 8})

    def experts(x: jax.Array, w: jax.Array) -> jax.Array:
        def one(x: jax.Array, w: jax.Array) -> jax.Array:
            sent = jax.lax.all_to_all(x, "expert", 0, 1, tiled=True)
            return jax.lax.all_to_all(jnp.tanh(sent @ w[0]), "expert", 1, 0, tiled=True)

        axes = P("expert")
        return jax.shard_map(one, mesh=mesh, in_specs=(axes, axes), out_specs=axes)(x, w)

    tokens = spec(mesh, (64, BATCH, WIDTH), "expert")
    weights = spec(mesh, (8, WIDTH, WIDTH), "expert")
    result = found(where, experts, tokens, weights, mesh={"expert": 8})
    count = 64 // 8 * BATCH * WIDTH
    assert [(c.kind, c.times, c.axes) for c in result] == [("all-to-all", 1, ("expert",))] * 2
    # On a TPU the tokens go to the product in bfloat16.
    assert sorted(c.bytes for c in result) == [count * GATHERED[where], count * 4]
    assert all(c.wire_bytes == c.bytes * 7 // 8 for c in result)
    assert {c.parameter for c in result} == {0, None}


@pytest.mark.parametrize("where", ACCELERATORS)
def test_a_ring_of_neighbours_sends_along_its_axis(where: str):
    axes = {"data": 2, "stage": 4}
    mesh = mesh_of(where, axes)

    def shifted(x: jax.Array) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            ring = [(k, (k + 1) % 4) for k in range(4)]

            def tick(h: jax.Array, _: None) -> tuple[jax.Array, None]:
                return jax.lax.ppermute(jnp.sin(h), "stage", ring), None

            return jax.lax.scan(tick, x, None, length=5)[0]

        rows = P(("data", "stage"))
        return jax.shard_map(one, mesh=mesh, in_specs=rows, out_specs=rows)(x)

    (one,) = found(where, shifted, spec(mesh, (BATCH, WIDTH), ("data", "stage")), mesh=axes)
    part = BATCH // 8 * WIDTH * 4
    assert (one.kind, one.times, one.bytes, one.wire_bytes) == (
        "collective-permute",
        5,
        part,
        part,
    )
    assert (one.axes, one.group_size, one.in_loop) == (("stage",), 4, True)


def test_the_attached_backend_has_the_same():
    mesh = jax.make_mesh((2, 4), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    params = {
        "a": spec(mesh, (LAYERS, WIDTH, HIDDEN), None, None, "model"),
        "b": spec(mesh, (LAYERS, HIDDEN, WIDTH), None, "model"),
    }
    plain = two_blocks(mesh)
    x = spec(mesh, (BATCH, WIDTH), "data")
    axes = {"data": 2, "model": 4}
    result = found("cpu", lambda p, x: step(p, x, plain), params, x, mesh=axes)
    assert summed(result)["all-reduce", "model"] == LAYERS * 4 * (BATCH // 2 * WIDTH * 4)
    # This compiler sums the gradient of each use of a weight by itself, and adds them afterwards.
    assert summed(result)["all-reduce", "data"] == LAYERS * 4 * WEIGHTS // 4 * 4


def test_one_device_sends_nothing():
    x = jax.ShapeDtypeStruct((8,), "float32")
    assert collectives(text.parse(compiled("cpu", lambda x: x + 1, x).hlo)) == ()


def test_collectives_are_values():
    one = Collective(
        kind="all-gather",
        bytes=8,
        wire_bytes=6,
        times=3,
        group_size=4,
        axes=("data", "model"),
        dtype="f32",
        shape=(2,),
        name="w",
        source="",
        module="",
        parameter=0,
        recomputed=False,
        in_loop=True,
    )
    assert (one.total_bytes, one.over) == (18, "data × model")
    assert hash(one) == hash(dataclasses.replace(one))
