"""State on disk: the same numbers, none of them on the device, and a whole step at any moment."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.updating import PARAMS, TOKENS, assert_alike, language_loss, ordinary

import jaxmem
from jaxmem.state import rows, stored
from jaxmem.state.folder import StateFolder
from jaxmem.state.stored import Array, Layout

INNER: dict[str, Any] = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "8 bits": jaxmem.quantize_state(optax.adam(1e-2), min_size=16, block=8),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 5)),
    "masked": optax.masked(optax.sgd(0.1, momentum=0.9), lambda tree: jax.tree.map(jnp.ndim, tree)),
}
WAYS: dict[str, Callable[..., Any]] = {"ordinary": ordinary, "fused": jaxmem.value_and_update}


@pytest.fixture(autouse=True)
def closed() -> Iterator[list[Any]]:
    """Optimizers that are closed at the end, so that no thread writes to a folder that is gone."""
    with contextlib.ExitStack() as stack:
        found: list[Any] = []
        yield found
        for optimizer in found:
            with contextlib.suppress(jaxmem.StateOnDiskError):
                stack.callback(optimizer.close)


def on_disk(tree: Any) -> list[jaxmem.OnDisk]:
    return [leaf for leaf in stored.flatten(tree)[0] if isinstance(leaf, jaxmem.OnDisk)]


def read(tree: Any) -> Any:
    """The state with its arrays as they are on the disk."""
    return jax.tree.map(stored.whole, tree, is_leaf=stored.is_on_disk)


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def start(optimizer: Any) -> tuple[Any, Any]:
    return copied(PARAMS), optimizer.init(PARAMS)


def step_of(optimizer: Any, way: str = "ordinary") -> Any:
    return jax.jit(WAYS[way](language_loss, optimizer), donate_argnums=(0, 1))


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inner", INNER)
def test_the_numbers_are_those_of_the_optimizer_on_the_device(
    inner: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: list[Any]
) -> None:
    monkeypatch.setattr(rows, "CHUNK", 8)
    optimizer = INNER[inner]
    ours = jaxmem.disk_state(optimizer, tmp_path, min_size=16)
    closed.append(ours)
    params, state = start(ours)
    expected, held = start(optimizer)
    assert on_disk(state)
    chex.assert_trees_all_equal(read(state), held)
    step, theirs = step_of(ours, way), step_of(optimizer, way)
    for _ in range(3):
        value, params, state = step(params, state, TOKENS)
        loss, expected, held = theirs(expected, held, TOKENS)
        assert float(jnp.abs(value - loss)) < 1e-6
    # Codes may be one apart where sums are rounded otherwise.
    assert_alike(params, expected, 1e-4 if inner == "8 bits" else 1e-6)
    if inner != "8 bits":
        assert_alike(read(state), held)
    assert {int(leaf.step) for leaf in on_disk(state)} == {3}
    assert ours.steps() == (2, 3)


@pytest.mark.slow
def test_a_run_can_go_from_one_way_to_the_other_and_without_jit(
    tmp_path: Path, closed: list[Any]
) -> None:
    optimizer = jaxmem.disk_state(optax.adam(1e-2), tmp_path, min_size=16)
    closed.append(optimizer)
    params, state = start(optimizer)
    expected, held = start(optax.adam(1e-2))
    for step, theirs in (
        (step_of(optimizer), step_of(optax.adam(1e-2))),
        (step_of(optimizer, "fused"), step_of(optax.adam(1e-2), "fused")),
        (ordinary(language_loss, optimizer), ordinary(language_loss, optax.adam(1e-2))),
    ):
        _, params, state = step(params, state, TOKENS)
        _, expected, held = theirs(expected, held, TOKENS)
    assert_alike(params, expected)
    assert_alike(read(state), held)


def test_init_inside_of_jit_fills_the_folder_and_of_shapes_alone_touches_nothing(
    tmp_path: Path, closed: list[Any]
) -> None:
    folder = tmp_path / "state"
    optimizer = jaxmem.disk_state(optax.adam(1e-2), folder, min_size=16)
    closed.append(optimizer)
    shapes = jax.eval_shape(optimizer.init, PARAMS)
    assert not folder.exists()
    state = jax.jit(optimizer.init)(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    assert_alike(read(state), optax.adam(1e-2).init(PARAMS))
    assert optimizer.steps() == (0,)


def test_what_init_computes_of_parameters_is_there_and_kept_arrays_stay(
    tmp_path: Path, closed: list[Any]
) -> None:
    inner = optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
    optimizer = jaxmem.disk_state(inner, tmp_path, min_size=16, keep=lambda path: "norm" in path)
    closed.append(optimizer)
    state = optimizer.init(PARAMS)
    paths = {leaf.layout.arrays[leaf.number].path for leaf in on_disk(state)}
    assert paths
    assert not any("norm" in path for path in paths)
    chex.assert_trees_all_equal(read(state), inner.init(PARAMS))


def test_microbatches_in_one_step_and_in_several(tmp_path: Path, closed: list[Any]) -> None:
    inner = optax.adam(1e-2)
    optimizer = jaxmem.disk_state(inner, tmp_path / "a", min_size=16)
    several = jaxmem.disk_state(inner, tmp_path / "b", min_size=16)
    closed += [optimizer, several]
    ways = [jaxmem.value_and_update(language_loss, o, microbatches=2) for o in (optimizer, inner)]
    (params, state), (expected, held) = start(optimizer), start(inner)
    for _ in range(2):
        _, params, state = jax.jit(ways[0])(params, state, TOKENS)
        _, expected, held = jax.jit(ways[1])(expected, held, TOKENS)
    assert_alike(params, expected)
    gradient = jax.tree.map(jnp.ones_like, PARAMS)
    found = []
    for one in (several, inner):
        steps = optax.MultiSteps(one, 2)
        params, state = start(steps)
        for _ in range(4):
            updates, state = jax.jit(steps.update)(gradient, state, params)
            params = optax.apply_updates(params, updates)
        found.append(params)
    assert_alike(*found)
    assert several.steps()[-1] == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [8, 32])
def test_an_nnx_optimizer_is_updated_in_place(
    way: str, bits: int, tmp_path: Path, closed: list[Any]
) -> None:
    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    def by_hand(model: Any, optimizer: Any, x: Any) -> Any:
        value, gradient = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradient)
        return value

    def run(inner: Any) -> Any:
        model = Stack(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
        fused: Any = jaxmem.value_and_update(loss, inner)
        step = nnx.jit(by_hand if way == "ordinary" else fused)
        for _ in range(3):
            step(model, optimizer, jnp.ones((3, 8)))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    inner: Any = optax.adam(0.1)
    if bits == 8:
        inner = jaxmem.quantize_state(inner, min_size=16, block=8)
    on_disk = jaxmem.disk_state(inner, tmp_path, min_size=16)
    closed.append(on_disk)
    assert_alike(run(on_disk), run(inner))
    assert on_disk.steps() == (2, 3)


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.vmap(in_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = layers(rngs.split(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda h, layer: h + layer(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


@pytest.mark.parametrize("memory", [1, 2**30])
def test_rows_are_read_before_they_are_asked_for(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: list[Any]
) -> None:
    monkeypatch.setattr(rows, "CHUNK", 8)
    optimizer = jaxmem.disk_state(optax.adam(1e-2), tmp_path, min_size=16, memory=memory)
    closed.append(optimizer)
    params, state = start(optimizer)
    late: list[Any] = []
    monkeypatch.setattr(StateFolder, "_note", noting(StateFolder._note, late))
    step = step_of(optimizer, "fused")
    for _ in range(3):
        late.clear()
        _, params, state = step(params, state, TOKENS)
        optimizer.wait()
    # Of the first rows nobody knows before; one is read ahead however little memory there is.
    assert late.count(False) == (1 if memory > 1 else late.count(False))
    assert late.count(True) > 3


def noting(note: Any, late: list[Any]) -> Any:
    def noted(self: Any, key: Any) -> None:
        late.append((self._reading, key) in self._ahead)
        note(self, key)

    return noted


# ---------------------------------------------------------------- what is kept


def test_multiples_of_every_stay_for_checkpoints(tmp_path: Path, closed: list[Any]) -> None:
    def run(steps: int, params: Any, state: Any) -> tuple[Any, Any]:
        step = step_of(optimizer)
        for _ in range(steps):
            _, params, state = step(params, state, TOKENS)
        return params, state

    optimizer = jaxmem.disk_state(optax.adam(1e-2), tmp_path, min_size=16, every=3)
    closed.append(optimizer)
    params, state = run(6, *start(optimizer))
    checkpoint = copied((params, state))
    params, state = run(5, params, state)
    assert optimizer.steps() == (6, 9, 10, 11)
    with pytest.warns(jaxmem.JaxmemWarning, match="step 9 is removed, for the run goes on from st"):
        again, state = run(5, *checkpoint)
    chex.assert_trees_all_equal(again, params)
    optimizer.close()
    params, state = run(1, again, state)  # and a folder that was left is taken again
    assert optimizer.steps() == (6, 9, 11, 12)


@pytest.mark.slow
def test_killed_at_any_moment_it_gives_the_numbers_of_an_unbroken_run(tmp_path: Path) -> None:
    def popen(folder: Path) -> subprocess.Popen[str]:
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(folder)], env=env, text=True, stdout=subprocess.PIPE
        )

    unbroken = popen(tmp_path / "unbroken")
    expected = unbroken.communicate()[0].splitlines()[-1]
    assert unbroken.returncode == 0
    draw = random.Random(0)
    starts = []
    for wanted in (9, 17):
        broken = popen(tmp_path / "broken")
        assert broken.stdout is not None
        starts.append(broken.stdout.readline().split()[1])
        for line in broken.stdout:
            if int(line.split()[0]) >= wanted:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            broken.wait(draw.random() / 50)  # somewhere in the steps after it
        broken.send_signal(signal.SIGKILL)
        broken.communicate()
    last = popen(tmp_path / "broken")
    lines = last.communicate()[0].splitlines()
    assert last.returncode == 0
    assert lines[-1] == expected
    assert starts[0] == "0"
    assert int(lines[0].split()[1]) >= int(starts[1]) >= 4


RUN = """
import pickle, sys
from pathlib import Path
import jax, jax.numpy as jnp, optax, jaxmem
from jaxmem._util.files import write_whole

top = Path(sys.argv[1])
top.mkdir(exist_ok=True)
optimizer = jaxmem.disk_state(
    optax.adam(0.1), top / "state", min_size=16, every=4, overwrite=True
)
params = {"w": jnp.ones((64, 128, 128))}
saved = top / "checkpoint"
if saved.exists():
    done, leaves = pickle.loads(saved.read_bytes())
    tree = jax.tree.structure((params, jax.eval_shape(optimizer.init, params)))
    params, state = tree.unflatten(map(jnp.asarray, leaves))
else:
    done, state = 0, optimizer.init(params)
print("from", done, flush=True)

@jax.jit
def step(params, state, number):
    gradient = jax.tree.map(lambda p: p * jnp.sin(number), params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

for number in range(done + 1, 26):
    params, state = step(params, state, float(number))
    print(number, float(params["w"].sum()), flush=True)
    if number % 4 == 0:
        write_whole(saved, pickle.dumps((number, jax.device_get(jax.tree.leaves((params, state))))))
optimizer.close()
"""


# ---------------------------------------------------------------- what goes wrong

SMALL = {"w": jnp.ones((8, 64))}


def updated(optimizer: Any, state: Any, params: Any = SMALL) -> Any:
    return jax.block_until_ready(jax.jit(optimizer.update)(params, state, params)[1])


def a_run(tmp_path: Path, closed: list[Any], **options: Any) -> tuple[Any, Any]:
    optimizer = jaxmem.disk_state(optax.adam(0.1), tmp_path, min_size=16, **options)
    closed.append(optimizer)
    state = updated(optimizer, optimizer.init(SMALL))
    optimizer.wait()
    return optimizer, state


def fails(match: str) -> Any:
    return pytest.raises(jax.errors.JaxRuntimeError, match=rf"StateOnDiskError: .*{match}")


def test_a_folder_with_a_state_is_not_started_anew_unasked(
    tmp_path: Path, closed: list[Any]
) -> None:
    optimizer, _ = a_run(tmp_path, closed)
    with pytest.raises(
        jaxmem.StateOnDiskError, match="holds a state already, after steps 0 and 1; to go on"
    ):
        optimizer.init(SMALL)
    anew = jaxmem.disk_state(optax.adam(0.1), tmp_path, min_size=16, overwrite=True)
    updated(anew, anew.init(SMALL))
    assert anew.steps() == (0, 1)


def test_a_state_that_was_replaced_is_not_there(tmp_path: Path, closed: list[Any]) -> None:
    optimizer, first = a_run(tmp_path, closed)
    updated(optimizer, first)
    optimizer.wait()
    updated(optimizer, updated(optimizer, first))  # its state is there until the next one begins
    with fails(r"after step 1 is not in .*, which holds that after steps? .*2.*: .*every="):
        updated(optimizer, first)


def test_the_folder_of_other_parameters_or_another_optimizer(
    tmp_path: Path, closed: list[Any]
) -> None:
    optimizer, _ = a_run(tmp_path, closed)
    optimizer.close()
    wider = {"w": jnp.ones((8, 32))}
    state = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(optimizer.init, wider)
    )
    with fails(r"0/mu/w is float32\[8, 64\] there and float32\[8, 32\] here; pass another folder"):
        updated(optimizer, state, wider)
    lion = jaxmem.disk_state(optax.sgd(0.1, momentum=0.9), tmp_path, min_size=16)
    state = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(lion.init, SMALL)
    )
    with fails("another optimizer or other parameters: 0/trace/w is not there"):
        updated(lion, state)
    empty = jaxmem.disk_state(optax.adam(0.1), tmp_path / "empty", min_size=16)
    closed.append(empty)
    state = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(empty.init, SMALL)
    )
    with fails("holds no state .layout.json is missing.: start with the state that init returns"):
        updated(empty, state)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        pytest.param("cut", "has 1000 bytes in the place of 2052: it was cut off", id="cut"),
        pytest.param(
            "gone", r"0 files of 0/mu/w in the place of 1; go on from .*step 0", id="gone"
        ),
        pytest.param("bits", "0/mu/w after step 1 cannot be read: .*[Dd]igest", id="bits"),
    ],
)
def test_a_damaged_file_is_found_and_named(
    damage: str, match: str, tmp_path: Path, closed: list[Any]
) -> None:
    optimizer, state = a_run(tmp_path, closed)
    optimizer.close()
    (file,) = (path for path in (tmp_path / "step-00000001/0/c").rglob("*") if path.is_file())
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:1000] + (b"" if damage == "cut" else b"\x07" + data[1001:]))
    with fails(match):
        updated(optimizer, state)


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path, closed: list[Any]) -> None:
    program = (
        "import filelock, sys\n"
        "lock = filelock.FileLock(sys.argv[1])\n"
        "lock.acquire()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    optimizer, state = a_run(tmp_path, closed)
    optimizer.close()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with fails(rf"in use by another process .process {os.getpid()} on"):
            updated(optimizer, state)
        other.kill()
    updated(optimizer, state)


def test_a_disk_that_is_too_small_is_said_to_be_before_anything_is_written(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    huge = Layout(folder, (Array("mu", (2**30, 2**20), "float32", (1, 2**20)),))
    with pytest.raises(
        jaxmem.StateOnDiskError, match=r"after step 0 needs 4096\.0 TiB on the disk of .* are free"
    ):
        folder.start(huge)
    assert folder.steps() == ()
    folder.close()


def test_a_write_that_fails_ends_the_run_and_leaves_the_last_whole_step(tmp_path: Path) -> None:
    """The limit of a process on the size of its files stands for a full disk."""
    program = """
import resource, sys, jax, jax.numpy as jnp, optax, jaxmem
params = {"w": jnp.ones((8, 1024))}
optimizer = jaxmem.disk_state(optax.adam(0.1), sys.argv[1], min_size=16)
state = optimizer.init(params)
first = jax.device_get(state)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    for _ in range(3):
        _, state = jax.block_until_ready(jax.jit(optimizer.update)(params, state, params))
    optimizer.wait()
except jax.errors.JaxRuntimeError as error:
    print(str(error).splitlines()[-1])
except jaxmem.StateOnDiskError as error:
    print("StateOnDiskError:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
state = jax.tree.map(jnp.asarray, first)
_, state = jax.block_until_ready(jax.jit(optimizer.update)(params, state, params))
print(optimizer.steps())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
        capture_output=True,
        check=True,
        timeout=120,
    )
    told, steps = done.stdout.splitlines()
    assert "StateOnDiskError" in told
    assert "cannot be written: " in told
    assert "File too large" in told
    assert "whole step that is there, step 0" in told
    assert steps == "(0, 1)"  # done again when there is room


@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")  # of a CPU
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda inner: jaxmem.quantize_state(inner, min_size=16),
        lambda inner: jaxmem.offload_state(inner, min_size=16),
    ],
)
def test_it_goes_around_other_wrappers(wrapped: Any, tmp_path: Path, closed: list[Any]) -> None:
    inner = jaxmem.disk_state(optax.adam(0.1), tmp_path / "state", min_size=16)
    closed.append(inner)
    with pytest.raises(ValueError, match="the state is on disk already"):
        wrapped(inner).init(SMALL)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"optimizer": 3}, TypeError, "takes an optax transformation, .*got 3 of type int"),
        ({"folder": 3}, TypeError, "folder takes a path, got 3"),
        ({"keep": "mu"}, TypeError, "keep takes a function"),
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"memory": 1.5}, TypeError, "memory must be a whole number"),
        ({"overwrite": 1}, TypeError, "overwrite must be True or False"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, Any], error: Any, match: str, tmp_path: Path
) -> None:
    given = {"optimizer": optax.adam(0.1), "folder": tmp_path} | options
    with pytest.raises(error, match=match):
        jaxmem.disk_state(**given)


def test_an_update_that_changes_the_form_of_its_state(tmp_path: Path, closed: list[Any]) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"m": jnp.zeros((4, 9))}

    changing = optax.GradientTransformation(lambda params: {"m": jnp.zeros((4, 8))}, update)
    optimizer = jaxmem.disk_state(changing, tmp_path, min_size=16)
    closed.append(optimizer)
    with pytest.raises(ValueError, match="the optimizer changes the form of its state"):
        optimizer.update(SMALL, optimizer.init(SMALL), SMALL)


def test_rows_of_any_size_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.memory = 64
    draw = np.random.default_rng(0)
    arrays = (
        Array("a", (7, 5), "float32", (3, 5)),
        Array("b", (4, 6, 2), "bfloat16", (1, 4, 2)),
        Array("c", (9,), "int8", (2,)),
    )
    layout = Layout(folder, arrays)
    folder.start(layout)
    mark: Any = (-1, 0, 0)
    for step in range(4):
        values = [(draw.normal(size=a.shape) * 9).astype(jnp.dtype(a.dtype)) for a in arrays]
        before = mark
        for number, value in enumerate(values):
            mark = before
            cuts = sorted({0, len(value), *draw.integers(0, len(value), 2)})
            for first, last in itertools.pairwise(cuts):
                mark = folder.write(layout, number, mark, int(first), value[first:last])
        mark = (step, mark[2], 0)
        for number, value in enumerate(values):
            first, last = sorted(draw.integers(0, len(value) + 1, 2))
            if first < last:
                found = folder.read(layout, number, mark, int(first), int(last - first))
                np.testing.assert_array_equal(found, value[first:last])
    assert folder.steps() == (2, 3)
    folder.close()


@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")  # of a CPU
def test_with_parameters_on_the_host(tmp_path: Path, closed: list[Any]) -> None:
    optimizer = jaxmem.disk_state(optax.adam(1e-2), tmp_path, min_size=16)
    closed.append(optimizer)
    host = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), PARAMS)
    state = optimizer.init(host)
    step = jax.jit(jaxmem.value_and_update(language_loss, optimizer))
    theirs = step_of(optax.adam(1e-2), "fused")
    expected, held = start(optax.adam(1e-2))
    for _ in range(2):
        _, host, state = step(host, state, TOKENS)
        _, expected, held = theirs(expected, held, TOKENS)
    assert host["layers"]["w"].sharding.memory_kind == "pinned_host"
    assert_alike(jax.tree.map(np.asarray, host), jax.tree.map(np.asarray, expected))


@pytest.mark.parametrize("target", ["local", "h100-80g"])
def test_reports_know_the_disk_and_absent_accelerators_get_the_rows_of_the_host(
    target: str, tmp_path: Path
) -> None:
    width = 256
    weights = jax.ShapeDtypeStruct((8, width, width), jnp.float32)
    optimizer = jaxmem.disk_state(optax.adam(0.1), tmp_path / "state", min_size=1000)

    def loss(weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0].mean()

    def reported(optimizer: Any) -> jaxmem.MemoryReport:
        return jaxmem.memory_report(
            jaxmem.value_and_update(loss, optimizer),
            weights,
            jax.eval_shape(optimizer.init, weights),
            jax.ShapeDtypeStruct((16, width), jnp.float32),
            donate_argnums=(0, 1),
            target=target,
        )

    report = reported(optimizer)
    size = weights.size * 4
    assert report.parts["state/mu"].disk == report.parts["state/nu"].disk == size
    assert report.host_bytes < size / 4
    assert report.required_bytes < reported(optax.adam(0.1)).required_bytes - 1.5 * size
    assert any("as if it were in host memory" in n for n in report.notes) == (target != "local")
    assert not (tmp_path / "state").exists()


def write(folder: StateFolder, layout: Layout, mark: Any, values: Any, number: int = 0) -> Any:
    for first, value in enumerate(values):
        mark = folder.write(layout, number, mark, first, np.full((1, 3), float(value), np.float32))
    return mark


def test_an_update_that_was_broken_off_is_no_whole_step_and_begins_anew(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    arrays = (Array("a", (4, 3), "float32", (1, 3)), Array("b", (2, 3), "float32", (1, 3)))
    layout = Layout(folder, arrays)
    none = (-1, 0, 0)
    ticket = write(folder, layout, none, range(4))[2]
    assert write(folder, layout, none, range(2), 1)[2] == ticket
    start = (0, ticket, 0)
    write(folder, layout, start, range(3))
    first = folder._steps[1].ticket
    with pytest.raises(jaxmem.StateOnDiskError, match="was broken off; go on from .*step 0"):
        folder.read(layout, 0, (1, first, 0), 0, 1)
    second = write(folder, layout, start, [10, 11, 12])
    assert second[2] != first
    assert folder.steps() == (0,)
    second = folder.write(layout, 0, second, 3, np.full((1, 3), 13.0, np.float32))
    write(folder, layout, start, range(2), 1)
    assert folder.steps() == (0, 1)
    after = (1, second[2], 0)
    np.testing.assert_array_equal(folder.read(layout, 0, after, 0, 4)[:, 0], [10, 11, 12, 13])
    # One that begins with another array, and so cannot know at first that another was broken off.
    write(folder, layout, after, range(3))
    other = write(folder, layout, after, range(1), 1)
    write(folder, layout, after, range(1))
    with pytest.raises(jaxmem.StateOnDiskError, match="two updates wrote .* do the step again"):
        folder.write(layout, 1, other, 1, np.zeros((1, 3), np.float32))
    third = write(folder, layout, after, range(2), 1)
    assert write(folder, layout, after, range(4))[2] == third[2]
    assert folder.steps() == (1, 2)
    folder.close()


def test_a_step_is_whole_when_all_of_the_update_is_there_that_wrote_it_last(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    layout = Layout(folder, (Array("a", (4, 3), "float32", (1, 3)),))
    start = (0, write(folder, layout, (-1, 0, 0), range(4))[2], 0)
    folder._worker.submit(time.sleep, 0.3)  # as on a slow disk
    write(folder, layout, start, range(4))
    write(folder, layout, start, range(1))
    folder._worker.submit(int).result()
    assert folder.steps() == (0,)
    folder.close()


def test_states_are_those_of_the_update_that_returned_them(
    tmp_path: Path, closed: list[Any]
) -> None:
    optimizer = jaxmem.disk_state(optax.adam(0.1), tmp_path, min_size=16, overwrite=True)
    closed.append(optimizer)
    state = optimizer.init(SMALL)
    one, other = updated(optimizer, state), updated(optimizer, state)
    with fails("was written by another update than the one whose result is given"):
        updated(optimizer, one)
    updated(optimizer, other)
    anew = optimizer.init(SMALL)
    updated(optimizer, anew)
    optimizer.wait()
    with fails("was written by another update"):
        updated(optimizer, updated(optimizer, other))


def test_a_step_that_is_held_for_a_checkpoint_stays(tmp_path: Path, closed: list[Any]) -> None:
    optimizer = jaxmem.disk_state(optax.adam(0.1), tmp_path, min_size=16)
    closed.append(optimizer)
    state = checkpoint = optimizer.init(SMALL)
    for step in range(1, 12):
        state = updated(optimizer, state)
        if step in (2, 3, 5):
            state[0].mu["w"].hold()
            checkpoint = state
    assert optimizer.steps() == (3, 5, 10, 11)
    updated(optimizer, checkpoint)
    with pytest.raises(ValueError, match="in use in this process with every=None, got every=3"):
        jaxmem.disk_state(optax.adam(0.1), tmp_path, every=3)


def test_an_optimizer_around_it_may_write_a_step_several_times(
    tmp_path: Path, closed: list[Any]
) -> None:
    params = {"w": jnp.ones((16, 64, 64))}
    optimizer = jaxmem.disk_state(optax.adam(0.1), tmp_path, min_size=16)
    closed.append(optimizer)
    found = []
    for inner in (optimizer, optax.adam(0.1)):
        steps = optax.MultiSteps(inner, 3)
        weights, state = params, steps.init(params)
        update = jax.jit(steps.update)
        for _ in range(9):
            updates, state = update(params, state, weights)
            weights = optax.apply_updates(weights, updates)
        found.append(weights)
    assert_alike(*found)
    assert optimizer.steps()[-1] == 3


def test_a_state_on_disk_cannot_be_mapped(tmp_path: Path, closed: list[Any]) -> None:
    optimizer = jaxmem.disk_state(optax.adam(0.1), tmp_path, min_size=16)
    closed.append(optimizer)
    state = optimizer.init(SMALL)
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]) if leaf.ndim else leaf, state)
    with pytest.raises(ValueError, match="cannot go through jax.vmap"):
        optimizer.update(SMALL, two, SMALL)


def test_folders_of_others_are_left_alone(tmp_path: Path, closed: list[Any]) -> None:
    other = tmp_path / "step-00000100" / "file"
    other.parent.mkdir()
    other.write_text("mine")
    optimizer = jaxmem.disk_state(optax.adam(0.1), tmp_path, min_size=16, overwrite=True)
    closed.append(optimizer)
    with pytest.raises(
        jaxmem.StateOnDiskError, match="step-00000100 is there, and is not of a state"
    ):
        optimizer.init(SMALL)
    assert other.read_text() == "mine"
