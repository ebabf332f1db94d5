"""The experiment on the hundred convolutions: the net, the digits, and that it resumes."""

import dataclasses
import gzip
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import mnist_cnn
import numpy as np
import pytest
from mnist_cnn import Options

from mnist import digits, net, published, training
from mnist.table import Need, Trained, accuracies, answer, extra, message, needs

# ---------------------------------------------------------------- the experiment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Need], list[Trained], Path]:
    folder = tmp_path_factory.mktemp("results")
    return *mnist_cnn.main(Options(small=True, results=folder)), folder


@pytest.mark.slow
def test_the_same_is_learnt_under_every_policy(made: tuple[list[Need], list[Trained], Path]):
    _, trained, _ = made
    assert [row.policy for row in trained] == ["none", "sqrt", "fit"]
    assert len({row.accuracy for row in trained}) == 1
    assert all(row.loss_off < 1e-5 for row in trained)
    assert trained[0].loss < trained[0].first_loss
    assert len(accuracies(trained).splitlines()) == len(trained) + 2


def test_a_second_call_measures_nothing_anew(
    made: tuple[list[Need], list[Trained], Path], monkeypatch: pytest.MonkeyPatch
):
    rows, trained, folder = made
    assert [row.kind for row in rows] == ["none", "segments", "sqrt"]
    assert (folder / "mnist_cnn.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.delattr(mnist_cnn, "_compiled")
    monkeypatch.delattr(training, "train")
    assert mnist_cnn.main(Options(small=True, results=folder)) == (rows, trained)


def test_what_is_said_follows_the_rows(made: tuple[list[Need], list[Trained], Path]):
    rows, trained, _ = made
    big = [dataclasses.replace(row, required_bytes=row.required_bytes + 10**9) for row in rows]
    plain = next(row for row in big if row.kind == "none" and row.update == "inside")
    cut = next(row for row in big if row.kind == "segments")
    least = dataclasses.replace(
        plain, kind="fit", required_bytes=123 * 10**6, matmul_flops=plain.matmul_flops * 3 // 2
    )
    assert message([*big, least]) == (
        "size-aware plan: 123 MB at +50.0% matmul FLOPs; "
        f"2 equal segments: {cut.megabytes:.0f} MB at {extra(cut, big):+.1%}"
    )
    assert "1139 MB" in needs(big, like_published=True)
    assert "1139" not in needs(big, like_published=False)
    other = dataclasses.replace(trained[1], accuracy=1.0, loss_off=0.25)
    assert "NOT THE SAME under 3 policies, losses up to 2e-01 apart" in answer(
        big, [trained[0], other, *trained[2:]]
    )


@pytest.mark.slow  # the experiment at greater size, for a GPU
def test_a_size_aware_cut_needs_less_than_equal_segments(tmp_path: Path):
    """Compiled for a GPU that is not there; the net is shallower and narrower."""
    options = Options(depth=16, width=64, segments=(4,), shares=(0,), results=tmp_path)
    found = {row.kind: row for row in mnist_cnn._needs(options, updates=["inside"])}
    none, segments = found["none"], found["segments"]
    for aware in (found["sqrt"], found["fit"]):
        assert aware.required_bytes < min(segments.required_bytes, none.required_bytes)
        assert none.matmul_flops <= aware.matmul_flops < segments.matmul_flops
    fit = found["fit"]
    assert fit.budget_bytes is not None
    assert fit.required_bytes <= fit.budget_bytes
    assert fit.matmul_flops <= found["sqrt"].matmul_flops
    assert fit.required_bytes < 0.85 * none.required_bytes


# ---------------------------------------------------------------- the net


def arrays(depth: int = 5, width: int = 3, count: int = 2):
    images = jax.random.uniform(jax.random.key(1), (count, 28, 28, 1))
    return net.start(depth, width, images, 0), images, jnp.arange(count) % 10


def test_the_image_becomes_two_by_two_and_stays_so():
    for depth in (5, 100):
        params = net.parameters(depth, 320)
        made = jax.eval_shape(net.logits, params, net.batch(7)[0])
        assert made.shape == (7, 10)
        assert params["hidden"]["kernel"].shape == (1280, 10)
    with pytest.raises(ValueError, match="depth must be at least 5, for 2×2 in the end; got 4"):
        net.parameters(4, 320)


@pytest.mark.parametrize(
    "options",
    [{"update": "after"}, {"segments": 5}],
    ids=str,
)
def test_a_step_is_the_same_however_it_is_made(options: dict):
    args = arrays()
    plain, other = (jax.jit(net.step(0.1, **more))(*args) for more in ({}, options))
    assert plain[1] == other[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, other)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), plain[0], args[0])
    assert min(jax.tree.leaves(moved["convs"])) > 0


def test_pooling_is_that_of_a_window():
    x = jax.random.normal(jax.random.key(0), (2, 5, 4, 3))

    def window(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def square(x, pool):
        return (pool(jax.nn.relu(x)) ** 2).sum()

    for mine, wanted in zip(
        *(jax.jit(jax.value_and_grad(square), static_argnums=1)(x, p) for p in (net._pool, window)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)
    assert (net._pool(x) == window(x)).all()


def test_parameters_begin_at_a_size_that_neither_grows_nor_falls():
    params, images, _ = arrays(depth=8)
    params["hidden"]["kernel"] = jnp.ones_like(params["hidden"]["kernel"])
    made = net.logits(params, images)
    assert 0.1 < float(jnp.abs(made).max()) < 100


# ---------------------------------------------------------------- what was published


def test_what_was_trained_when_the_figures_were_made():
    """As PyTorch 2.13 gave gradients for the call that was published."""
    found = {segments: published.trained(segments) for segments in published.MEGABYTES}
    assert found == {0: 101, 1: 101, 2: 50, 4: 25, 8: 14, 16: 10, 32: 7}


def test_segments_are_equal_but_for_the_last():
    parts = net.cut(net.modules(100), 32)
    assert [len(part) for part in parts] == [9] * 31 + [301 - 9 * 31]
    assert [module for part in parts for module in part] == net.modules(100)
    with pytest.raises(ValueError, match="16 modules cannot be cut into 17 segments"):
        net.cut(net.modules(5), 17)


def test_the_batch_that_figures_agree_with():
    least, most = published.images()
    assert least < Options().batch < most
    # Of the last, 2×2 made 4×4: its argument, the result of relu, and where maxima were.
    assert published.kept(published.DEPTH) == 320 * (4 * 4 + 4 * 16 + 8 * 4)


# ---------------------------------------------------------------- the digits


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def folder_of(path: Path, gzipped: bool = False, **other: bytes) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("t10k", 4)):
        files = {
            f"{part}-images-idx3-ubyte": idx(rng.integers(0, 256, (count, 28, 28))),
            f"{part}-labels-idx1-ubyte": idx(rng.integers(0, 10, count)),
        }
        for name, data in files.items():
            data = other.get(name.partition("-idx")[0].replace("-", "_"), data)
            file = path / (name + ".gz" * gzipped)
            file.write_bytes(gzip.compress(data) if gzipped else data)
    return path


def test_files_of_mnist_gzipped_or_not(tmp_path: Path):
    (tmp_path / "gz").mkdir()
    plain = digits.load(folder_of(tmp_path))
    packed = digits.load(folder_of(tmp_path / "gz", gzipped=True))
    assert plain.source == packed.source == "MNIST"
    assert plain.images.shape == (6, 28, 28, 1)
    assert plain.held_out_labels.shape == (4,)
    assert plain.images.dtype == np.float32
    assert 0.9 < plain.images.max() <= 1
    for field in ("images", "labels", "held_out_images", "held_out_labels"):
        assert (getattr(plain, field) == getattr(packed, field)).all()


IMAGES, LABELS = np.zeros((6, 28, 28)), np.arange(6)


@pytest.mark.parametrize(
    ("part", "data", "says"),
    [
        ("train_images", b"", "found nothing"),
        ("train_images", idx(LABELS), "expected 00 00 08 03, found 00 00 08 01"),
        ("train_images", gzip.compress(idx(IMAGES)), "it is gzipped, so its name must end in .gz"),
        ("train_images", idx(IMAGES)[:9], "ends after 9 bytes, in the middle of its sizes"),
        ("train_images", idx(IMAGES)[:-1], "6×28×28, make 4704 bytes, and 4703 follow"),
        ("train_images", idx(IMAGES[:5]), "5 images of train but 6 labels"),
        (
            "train_images",
            idx(np.zeros((6, 8, 8))),
            "images of train are 8×8, and MNIST",
        ),
        ("t10k_labels", idx(LABELS[:4] + 9), "a label of t10k is 12, and digits are 0 to 9"),
    ],
    ids=["empty", "kind", "packed", "sizes", "short", "count", "shape", "label"],
)
def test_files_that_are_not_mnist(tmp_path: Path, part: str, data: bytes, says: str):
    with pytest.raises(ValueError, match=says):
        digits.load(folder_of(tmp_path, False, **{part: data}))


def test_a_folder_without_the_files(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="neither train-images-idx3-ubyte nor train-images"):
        digits.load(tmp_path)
    folder_of(tmp_path, gzipped=True)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES))[:-9])
    with pytest.raises(ValueError, match="is not a whole gzip file"):
        digits.load(tmp_path)


def test_the_digits_of_scikit_learn(monkeypatch: pytest.MonkeyPatch):
    found = digits.load(None)
    assert len(found.images) == 1437
    assert len(found.held_out_images) == 360
    assert found.images.shape[1:] == (28, 28, 1)
    assert (found.images.min(), found.images.max()) == (0, 1)
    assert set(found.labels) == set(found.held_out_labels) == set(range(10))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn, or give --data"):
        digits.load(None)
