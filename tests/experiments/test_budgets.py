"""`resnet50_budget.py`, `unet_budget.py`, `vgg16_budget.py`: smallest forms, nets, greedy cuts."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resnet50_budget
import unet_budget
import vgg16_budget

import jaxmem
from budgets import batches, nets, picture, study, table
from budgets.nets import Net
from budgets.published import RESNET_50, U_NET, VGG_16, VGG_19_BATCH, VGG_19_BYTES
from budgets.table import CONVS, FIT, GREEDY, HAND, KEPT, LEAST, PARTS, SQRT, TIME, WORK, Row

# ---------------------------------------------------------------- the smallest forms


def again(monkeypatch: pytest.MonkeyPatch, main: Callable[[Any], Any], options: Any) -> Any:
    """What a second call gives, in which nothing can be compiled."""

    def measured(*args: Any, **options: Any) -> None:
        raise AssertionError("this row was there")

    monkeypatch.setattr(nets, "job", measured)
    return main(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(resnet50_budget, "resnet50_budget", id="resnet50"),
        # The same study of another net.
        pytest.param(unet_budget, "unet_budget", id="unet", marks=pytest.mark.slow),
    ],
)
def test_the_smallest_form_and_that_it_goes_on(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = module.Options(
        target="local", small=True, results=tmp_path, compiles=1, costs=(WORK,)
    )
    rows = module.main(options)
    assert [row.kind for row in rows] == [KEPT, HAND, CONVS, SQRT, FIT]
    kept = rows[0]
    assert {row.model_matmul_flops for row in rows} == {kept.model_matmul_flops}
    share = {resnet50_budget: 10.01 / 15.06, unet_budget: 8.02 / 14.32}[module]
    assert rows[4].budget_bytes == pytest.approx(kept.required_bytes * share, abs=2)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert again(monkeypatch, module.main, options) == rows


@pytest.mark.slow  # what ResNet-50's form claims, of another net
def test_the_smallest_form_of_vgg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = vgg16_budget.Options(
        target="local", small=True, results=tmp_path, compiles=1, costs=(WORK,)
    )
    rows, most = vgg16_budget.main(options)
    assert [row.kind for row in rows] == [KEPT, HAND, CONVS, SQRT, FIT, PARTS]
    assert [row.kind for row in most] == [KEPT, SQRT, GREEDY, FIT]
    assert all(row.required_bytes <= options.sized().capacity for row in most)
    assert (tmp_path / "vgg16_budget.png").stat().st_size > 10_000
    assert again(monkeypatch, vgg16_budget.main, options) == (rows, most)


# ---------------------------------------------------------------- what rows say


def row(
    kind: str, size: int, extra: float, name: str = "", cost: str = "", fits: bool = True
) -> Row:
    return Row(
        target="local", program="net", images=10, kind=kind, name=name, cost=cost,
        budget_bytes=None, fits=fits, required_bytes=size, temp_bytes=size, predicted_bytes=None,
        matmul_flops=round(1000 * (1 + extra)), model_matmul_flops=1000,
        estimated_seconds=1 + extra / 2, compiler_remat=False, compiles=None, versions="1",
    )  # fmt: skip


def test_what_is_said_follows_the_rows(tmp_path: Path) -> None:
    rows = [
        row(KEPT, 10**10, 0.0),
        row(HAND, 4 * 10**9, 0.33),
        row(FIT, 6 * 10**9, 0.02, "10.01 of 15.06 GB", WORK),
        row(FIT, 39 * 10**8, 0.11, "6.00 of 15.06 GB", WORK),
        row(FIT, 39 * 10**8, 0.12, "6.00 of 15.06 GB", TIME),
        row(FIT, 35 * 10**8, 0.4, "4.99 of 15.06 GB", WORK, fits=False),
        row(FIT, 35 * 10**8, 0.4, LEAST, WORK),
        row(FIT, 6 * 10**9, 0.02, "6.00 GB", WORK),
        row(FIT, 6 * 10**9, 0.02, "6.00 GB", TIME),
        row(FIT, 5 * 10**9, 0.02, "4.99 GB", WORK, fits=False),
    ]
    assert table.answer(rows, RESNET_50, "ResNet-50") == (
        "ResNet-50: 66% of the memory: +2.0% matmul FLOPs (published +3.2% time); 40% of the "
        "memory: +11.0% matmul FLOPs or +6.0% roofline time (published +9.3% time); 33% not "
        "reached, the least is 35% (published +11.9% time); in 6.00 GB: +2.0% matmul FLOPs or "
        "+1.0% roofline time (published +9.3% time); in 4.99 GB: not reached (published +11.9% "
        "time)."
    )
    assert table.message(rows, RESNET_50, "ResNet-50") == (
        "ResNet-50 in 40% of its memory: +11% matmul FLOPs or +6% roofline time; "
        "MONeT +9% time; 1 smaller not reached"
    )
    missed = [rows[0], *rows[5:7]]
    assert table.message(missed, RESNET_50, "R") == (
        "R: least 35% of the memory, MONeT's 33% not reached"
    )
    lines = table.summary(rows, RESNET_50).splitlines()
    assert "over its budget" in lines[7]
    assert "33.1%" in lines[7]
    most = [row(kind, 10**9, 0.0) for kind in (KEPT, SQRT, GREEDY)] + [row(FIT, 10**9, 0.4)]
    assert "10 images (1.00 times everything kept, +40.0% matmul FLOPs" in batches.answer(most)
    assert batches.answer(most).endswith(f"More than one forward pass more: {FIT}.")
    assert "289 (ILP)" in batches.summary(most)
    assert table.batch_message(most) == "10 images of VGG-19 in 16 GB, Checkmate 289"
    for drawn in (rows, missed):
        picture.draw(drawn, RESNET_50, "ResNet-50", tmp_path / "picture.png", most)
        assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_published_figures_are_those_that_are_asked_for() -> None:
    for published, options in (
        (RESNET_50, resnet50_budget.Options()),
        (U_NET, unet_budget.Options()),
        (VGG_16, vgg16_budget.Options()),
    ):
        assert set(options.memories) <= published.plans.keys()
        assert options.batch == published.batch
    assert vgg16_budget.Options().capacity == VGG_19_BYTES
    assert list(VGG_19_BATCH.values()) == sorted(VGG_19_BATCH.values())


# ---------------------------------------------------------------- the nets

SMALL = {
    "resnet": lambda: nets.resnet(batch=2, image=32, width=4, stages=(1,)),
    "unet": lambda: nets.unet(batch=2, height=16, width=16, channels=2, levels=1),
    "vgg": lambda: nets.vgg((2,), 4, image=8, width=2, hidden=8),
}


def filled(net: Net) -> Any:
    rng = np.random.default_rng(0)

    def one(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        if spec.dtype == "int32":
            return jnp.arange(spec.shape[0], dtype=jnp.int32)
        about = "['scale']" in map(str, path)
        return jnp.asarray(rng.standard_normal(spec.shape) / 4 + about, spec.dtype)

    return jax.tree_util.tree_map_with_path(one, nets.job(net).args)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_values_and_gradients_are_the_same_however_it_is_cut(name: str) -> None:
    net = SMALL[name]()
    args = filled(net)
    jobs = [
        nets.job(net),
        nets.job(net, net.blocks),
        nets.job(net, decorate=jaxmem.remat_sqrt),
    ]
    if name == "vgg":
        jobs += [nets.job(net, study.cuts(net)[0]), nets.job(net, microbatches=2)]
    known, *others = (jax.jit(job.step)(*args) for job in jobs)
    assert np.isfinite(known[0])
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(known[1])) > 0
    for other in others:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), known, other
        )


def test_relu_is_that_of_jax_and_so_is_its_derivative() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 3.0])
    assert (nets._relu(x) == jax.nn.relu(x)).all()
    mine, known = (
        jax.grad(lambda x, f=f: (f(x) * x**2).sum())(x) for f in (nets._relu, jax.nn.relu)
    )
    assert (mine == known).all()


def test_the_nets_are_those_that_were_published() -> None:
    """Parameters as torchvision and Keras count them, but for biases in front of a norm."""

    def count(net: Net) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(net.params))

    assert count(nets.resnet()) == 25_557_032
    assert count(nets.vgg()) == 138_357_544
    assert count(nets.vgg(nets.VGG_19)) == 143_667_240
    assert nets.unet().made()[-1] == 11 * 416 * 608 * 4
    assert nets.resnet().blocks == [1] * 18
    assert nets.vgg().blocks == [3, 3, 4, 4, 4, 3]


def test_greedy_cuts_are_all_there_are_and_the_first_is_balanced() -> None:
    net = nets.vgg(nets.VGG_19, 1)
    made = net.made()
    found = study.cuts(net)
    assert len(found) == len({tuple(one) for one in found}) > 5
    for one in found:
        assert sum(one) <= len(made)
        ends = list(itertools.accumulate(one, initial=0))
        sums = [sum(made[a:b]) for a, b in itertools.pairwise(ends)]
        # Some b: each segment is beyond it, and would not be without its last layer.
        before = [sum(made[a : b - 1]) for a, b in itertools.pairwise(ends)]
        rest = sum(made[ends[-1] :])
        assert max([*before, rest]) < min([*sums, sum(made) + 1])
    assert [] in found


def test_a_net_of_other_rows_is_not_taken_for_this_one(tmp_path: Path) -> None:
    own = study.opened(study.Options(target="local", small=True, results=tmp_path), "rows")
    net = SMALL["vgg"]()
    first = own.row(net, KEPT)
    assert own.row(net, KEPT) == first
    other = dataclasses.replace(first, program=nets.vgg(nets.VGG_19, 4).program)
    assert table.KEY == ("target", "program", "kind", "name", "cost")
    own.known.add(other)
    assert len(own.known.of(first.versions)) == 2
