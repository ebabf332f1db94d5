"""The catalogue of accelerators, a user's files, meshes of absent devices, and the cache."""

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import targets
from jaxmem.errors import JaxmemWarning
from jaxmem.targets import Cache, installed
from jaxmem.targets import cache as cache_module

GPU = """
[gpu.mine]
name = "A GPU of mine"
compute_capability = "8.0"
cores = 108
fpus_per_core = 64
threads_per_core = 2048
shared_memory_per_core = 167936
shared_memory_optin = 166912
memory = 1000000000
bandwidth = 1.5e12
l2 = 41943040
clock_ghz = 1.41
bf16 = 312e12
"""
TPU = """
[tpu.slice]
name = "A TPU of mine"
generation = "v5e"
slices = ["2x2", "2x4"]
memory = 1000000000
bandwidth = 819e9
bf16 = 197e12
"""

# ---------------------------------------------------------------- the catalogue


def test_rows_are_values():
    h100 = targets.target("h100-80g")
    assert h100 == targets.catalog()["h100-80g"]
    assert hash(h100) == hash(targets.target("h100-80g"))
    assert (h100.memory, h100.devices, h100.platform) == (84942979072, 1, "gpu")
    assert h100.default_bytes == h100.memory * 3 // 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        h100.memory = 1  # type: ignore[misc]


def test_catalog_is_a_copy():
    targets.catalog().clear()
    assert "h100-80g" in targets.catalog()


@pytest.mark.parametrize("name", list(targets.catalog()))
def test_row_is_plausible(name):
    row = targets.target(name)
    assert 2**33 < row.memory < 2**38
    assert 1e11 < row.bandwidth < 1e13
    # FLOPs for each byte: a factor of 100 off is a unit gone wrong
    assert 30 < row.matrix_peak / row.bandwidth < 1000
    assert row.source in ("xla", "datasheet")
    assert targets.by_device_kind(row.device) == row


@pytest.mark.parametrize("name", list(targets.catalog()))
def test_links_are_plausible(name):
    row = targets.target(name)
    assert row.link_bandwidth is not None
    assert row.link_latency is not None
    # Slower than the memory, faster than the network; a unit gone wrong is a factor of 8 or 1000.
    assert row.bandwidth / 50 < row.link_bandwidth < row.bandwidth
    if row.network_bandwidth is not None:
        assert row.link_bandwidth / 100 < row.network_bandwidth < row.link_bandwidth
    assert 1e-7 < row.link_latency < 1e-5
    slices = getattr(row.spec, "slices", None)
    assert row.link_axes == (len(slices[0].split("x")) if slices else 1)


def test_links_as_published():
    def links(name):
        row = targets.target(name)
        return row.link_bandwidth, row.link_axes, row.network_bandwidth

    assert links("h100-80g") == (900e9 / 2, 1, 400e9 / 8)
    assert links("v5e-16g") == (400e9 / 2, 2, 200e9 / 8 / 8)  # eight chips share two of 100 Gb/s
    assert links("v5p-95g") == (1200e9 / 2, 3, 50e9 / 8)
    assert links("tpu7x-95g") == (1200e9 / 2 / 2, 3, 100e9 / 8 / 2)  # two devices in a chip


def test_links_are_no_part_of_what_compilers_are_told():
    """Cached results are told apart by the repr: a better figure of a link keeps them."""
    row = targets.target("h100-80g")
    assert repr(dataclasses.replace(row, link_bandwidth=1.0)) == repr(row)
    assert dataclasses.replace(row, link_bandwidth=1.0) != row


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA L4", "l4-24g"),
        ("Tesla T4", "t4-16g"),
        ("TPU v4", "v4-32g"),
        ("TPU v5 lite", "v5e-16g"),
        ("TPU v5", "v5p-95g"),
        ("TPU v5p", "v5p-95g"),
        ("TPU v6 lite", "v6e-32g"),
        ("TPU7x", "tpu7x-95g"),
    ],
)
def test_by_device_kind(kind, name):
    found = targets.by_device_kind(kind)
    assert found is not None
    assert found.name == name


def test_unknown_device_kind():
    assert targets.by_device_kind("cpu") is None
    assert targets.by_device_kind("NVIDIA L40") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "unknown target 'h100': did you mean 'h100-80g'?"),
        ("V5E-16G", "did you mean 'v5e-16g'?"),
        ("zzz", "unknown target 'zzz'. The known ones are h100-80g, "),
    ],
)
def test_unknown_name(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        targets.target(name)


def test_not_a_name():
    with pytest.raises(TypeError, match="a target is a name, a file or a Target, got 80"):
        targets.target(80)  # type: ignore[arg-type]


# ---------------------------------------------------------------- several devices


def test_mesh_of_absent_devices():
    target = targets.target("h100-80g", devices=8)
    mesh = target.mesh({"data": 4, "model": 2})
    assert mesh.shape_tuple == (("data", 4), ("model", 2))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    spec = jax.ShapeDtypeStruct((64, 128), "float32", sharding=rows)
    assert spec.sharding.shard_shape(spec.shape) == (16, 128)  # type: ignore[union-attr]


def test_mesh_whose_axes_types_tell_of():
    kinds = (AxisType.Explicit, AxisType.Auto)
    target = targets.target("h100-80g", devices=8)
    mesh = target.mesh({"data": 4, "model": 2}, kinds)
    assert mesh.axis_types == kinds
    x = jax.ShapeDtypeStruct(
        (64, 128), "float32", sharding=NamedSharding(mesh, PartitionSpec("data"))
    )

    def step(x):
        assert jax.typeof(x).sharding.spec == PartitionSpec("data", None)
        return jnp.dot(x.T, x, out_sharding=PartitionSpec(None, None))

    with jax.sharding.use_abstract_mesh(mesh):
        report = jaxmem.memory_report(step, x, target=target)
    assert report.argument_bytes == 64 * 128 * 4 / 4
    assert [(one.kind, one.axes) for one in report.collectives] == [("all-reduce", ("data",))]


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        ([AxisType.Explicit], ValueError, "there are 1 axis_types for the 2 axes data, model; "),
        ("explicit", TypeError, "for each axis, got 'explicit'; pass (AxisType.Explicit, AxisT"),
        (AxisType.Explicit, TypeError, "for each axis, got Explicit; pass ("),
    ],
)
def test_mesh_wants_a_type_for_each_axis(kinds, error, message):
    with pytest.raises(error, match=re.escape(message)):
        targets.target("h100-80g", 8).mesh({"data": 4, "model": 2}, kinds)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 4}, "the axes data=4 make 4 device(s), but this target has 8; ask for "),
        ({"a": 4, "b": 4}, "the axes a=4 × b=4 make 16 device(s)"),
        ({"data": 0}, "the size of axis 'data' must be at least 1, got 0"),
        ({}, "make 1 device(s)"),
    ],
)
def test_mesh_of_another_size(axes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        targets.target("h100-80g", 8).mesh(axes)


def test_mesh_wants_names():
    with pytest.raises(TypeError, match=re.escape('pass mesh({"data": 8})')):
        targets.target("h100-80g", 8).mesh([8])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "devices", "topology"),
    [
        ("h100-80g", 1, "1x1x1"),
        ("h100-80g", 8, "1x1x8"),
        ("h100-80g", 32, "1x4x8"),
        ("v5e-16g", 1, "v5e:1x1"),
        ("v5e-16g", 8, "v5e:2x4"),
        ("v4-32g", 4, "v4:2x2x1"),
        ("v5p-95g", 16, "v5p:2x2x4"),
        ("tpu7x-95g", 1, "tpu7x:1x1x1"),
        ("tpu7x-95g", 8, "tpu7x:2x2x1"),
    ],
)
def test_topology(name, devices, topology):
    assert targets.target(name, devices).topology["topology_name"] == topology


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("v5e-16g", 3, "there is no slice of 3 devices of v5e-16g; it has slices of 1, 2, 4, 8"),
        ("h100-80g", 12, "do not make whole hosts; ask for 8 or 16 devices"),
        ("h100-80g", 0, "devices must be at least 1, got 0"),
    ],
)
def test_no_such_number(name, devices, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        targets.target(name, devices)


def test_target_of_a_target():
    four = targets.target("v5e-16g", devices=4)
    assert targets.target(four) == four
    assert targets.target(four, devices=8).devices == 8


# ---------------------------------------------------------------- files


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_own_file(tmp_path):
    path = written(tmp_path, GPU)
    mine = targets.target(path)
    assert (mine.name, mine.source, mine.bandwidth) == ("mine", "user", 1.5e12)
    assert targets.target(f"{path}:mine", devices=8).devices == 8
    assert targets.target(Path(path)) == mine
    assert (mine.link_bandwidth, mine.link_axes, mine.network_bandwidth) == (None, 1, None)
    assert 'name: "A GPU of mine"' in mine.topology["target_config"]


def test_own_file_with_links(tmp_path):
    text = TPU + "link_bandwidth = 2e11\nlink_axes = 2\nlink_latency = 1e-6\n"
    mine = targets.target(written(tmp_path, text))
    assert (mine.link_bandwidth, mine.link_axes, mine.link_latency) == (2e11, 2, 1e-6)


def test_own_file_with_several(tmp_path):
    path = written(tmp_path, GPU + TPU)
    assert list(targets.load(path)) == ["mine", "slice"]
    small = targets.target(f"{path}:slice")
    assert small.topology["topology_name"] == "v5e:2x2"  # its first device
    with pytest.raises(ValueError, match="has 2 targets: mine, slice; say which, as "):
        targets.target(path)
    with pytest.raises(ValueError, match=re.escape("mine.toml 'slices': did you mean 'slice'?")):
        targets.target(f"{path}:slices")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gpu.mine\n", "not TOML: .*line 1"),
        ("", "no table"),
        ("[npu.mine]\nname = 'x'\n", "npu: unknown platform; tables are"),
        ("gpu = 3\n", "gpu: expected tables"),
        ("[gpu]\nmine = 3\n", "gpu.mine: expected a table, got 3"),
        (GPU.replace("cores = 108\n", ""), "gpu.mine: cores: missing"),
        (GPU + "corse = 3\n", "gpu.mine: corse: unknown key; did you mean 'cores'?"),
        (GPU + "slices = ['1x1']\n", "gpu.mine: slices: unknown key"),
        (GPU.replace("cores = 108", "cores = '108'"), "cores: expected a whole number above 0"),
        (GPU.replace("cores = 108", "cores = true"), "cores: .*got True"),
        (GPU.replace("cores = 108", "cores = 0"), "cores: .*got 0"),
        (GPU.replace("l2 = 41943040", "l2 = -1"), "l2: .*got -1"),
        (GPU.replace("1.5e12", "inf"), "bandwidth: expected a number above 0, got inf"),
        (GPU.replace("1.5e12", "nan"), "bandwidth: expected a number above 0, got nan"),
        (GPU.replace('"8.0"', '"8"'), "compute_capability: expected text as"),
        (GPU.replace('"8.0"', "8.0"), "compute_capability: expected text as"),
        (GPU.replace('"A GPU of mine"', '""'), "name: expected text, got ''"),
        (GPU.replace('"A GPU of mine"', '"a\\nb"'), "name: expected text"),
        (GPU + "source = 'guess'\n", "source: expected"),
        (GPU + "link_bandwidth = 0\n", "link_bandwidth: expected a number above 0, got 0"),
        (GPU + "link_axes = 2\n", "gpu.mine: link_axes: unknown key"),
        (TPU + "link_axes = 1.5\n", "link_axes: expected a whole number above 0, got 1.5"),
        (TPU.replace('"2x2"', '"2by2"'), "tpu.slice: slices: expected the sides of a slice"),
        (TPU.replace('["2x2", "2x4"]', "[]"), "slices: expected a list of texts"),
        (GPU + TPU.replace("tpu.slice", "tpu.mine"), "'mine' is defined twice"),
    ],
)
def test_broken_file(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        targets.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_file_that_is_no_text(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        targets.load(tmp_path / "mine.toml")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        targets.target(str(tmp_path / "none.toml"))


KEYS = sorted(tomllib.loads(GPU)["gpu"]["mine"])


@hypothesis.given(
    key=st.sampled_from([*KEYS, "other"]),
    value=st.one_of(
        st.integers(-2, 2), st.floats(), st.text(max_size=3), st.booleans(), st.lists(st.integers())
    ),
)
@hypothesis.settings(max_examples=60)
def test_any_value_gives_a_row_or_a_value_error(tmp_path_factory, key, value):
    row = {**tomllib.loads(GPU)["gpu"]["mine"], key: value}
    lines = [f"{name} = {_toml(item)}" for name, item in row.items()]
    path = tmp_path_factory.mktemp("any") / "mine.toml"
    path.write_text("\n".join(["[gpu.mine]", *lines]), encoding="utf-8")
    said = ""
    try:
        assert targets.load(path)["mine"].topology["target_config"]
    except ValueError as error:
        said = str(error)
    assert not said or said.startswith(str(path))


def _toml(value):
    if isinstance(value, bool | str | list):
        return json.dumps(value).replace("\\u007f", "\\u007F")
    return repr(value).replace("e+", "e")


# ---------------------------------------------------------------- what is installed


def without(monkeypatch, **versions):
    real = installed._version
    monkeypatch.setattr(installed, "_version", lambda name: versions.get(name, real(name)))


def test_missing_says_what_to_type(monkeypatch):
    gone = {"jax-cuda13-plugin": None, "jax-cuda12-plugin": None, "libtpu": None}
    without(monkeypatch, **gone)
    (line,) = targets.target("h100-80g").missing()
    assert re.fullmatch(
        r'jax-cuda13-plugin is not installed: pip install "jax-cuda13-plugin==[\d.]+"', line
    )
    (line,) = targets.target("v5e-16g").missing()
    assert re.fullmatch(r'libtpu is not installed: pip install "libtpu==[\d.]+\.\*"', line)
    without(monkeypatch, **gone, flatbuffers=None)
    assert targets.target("h100-80g").missing()[0] == (
        'flatbuffers is not installed: pip install "flatbuffers"'
    )


@pytest.mark.parametrize("said", ["flatbuffers is not installed: pip install", "Please install"])
def test_a_report_without_the_compilers_says_what_to_type(monkeypatch, said):
    """The package that serialises programs is installed with them, and is checked first."""
    if said.startswith("flatbuffers"):
        without(monkeypatch, flatbuffers=None)
    serialization = "jax._src.export.serialization"
    monkeypatch.delitem(sys.modules, serialization, raising=False)
    monkeypatch.delattr(sys.modules["jax._src.export"], "serialization", raising=False)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(jaxmem.CompileError, match=said):
        jaxmem.memory_report(jnp.sin, jnp.ones(3), target="h100-80g")


def test_versions_that_do_not_fit(monkeypatch):
    without(monkeypatch, **{"jax-cuda13-plugin": "0.1.2", "libtpu": "0.0.1"})
    assert "jax-cuda13-plugin 0.1.2 does not fit jaxlib" in targets.target("h100-80g").missing()[0]
    assert "libtpu 0.0.1 does not fit jax" in targets.target("v5e-16g").missing()[0]


def test_cuda_13_has_dropped_some(monkeypatch):
    v100 = targets.target("v100-16g")
    without(monkeypatch, **{"jax-cuda13-plugin": "0.1.2", "jax-cuda12-plugin": None})
    assert "CUDA 13 has dropped compute capability 7.0" in v100.unavailable
    assert v100.missing() == (v100.unavailable,)
    without(monkeypatch, **{"jax-cuda13-plugin": None, "jax-cuda12-plugin": "0.1.2"})
    assert v100.unavailable == ""
    assert targets.target("v4-32g").unavailable == ""


# ---------------------------------------------------------------- the cache


def test_cache_keeps(tmp_path):
    cache, key = Cache(tmp_path), Cache.key(a=1)
    assert cache.get(key) is None
    cache.put(key, {"text": "é", "none": None, "list": [1, 2.5]})
    assert Cache(tmp_path).get(key) == {"text": "é", "none": None, "list": [1, 2.5]}
    cache.put(key, {"text": "new"})
    assert cache.get(key) == {"text": "new"}
    assert cache.usage()[0] == 1
    cache.clear()
    assert cache.get(key) is None
    assert cache.usage() == (0, 0)


def test_cache_key():
    assert Cache.key(a=1, b=b"x") == Cache.key(b=b"x", a=1)
    different = [
        Cache.key(),
        Cache.key(a=1),
        Cache.key(a="1"),
        Cache.key(a=None),
        Cache.key(a=b"1"),
        Cache.key(b=1),
        Cache.key(a="x", b="y"),
        Cache.key(a="x,b:y"),
        Cache.key(a={"b": 1}),
    ]
    assert len(set(different)) == len(different)
    with pytest.raises(TypeError, match="a key is made of plain data, got <object"):
        Cache.key(a=object())


@pytest.mark.parametrize("how", ["empty", "garbage", "truncated", "not json", "list", "other key"])
def test_unreadable_entry_is_absent_and_replaced(tmp_path, how):
    cache, key = Cache(tmp_path), Cache.key(a=1)
    cache.put(key, {"value": 1})
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "garbage": os.urandom(100),
            "truncated": whole[:-5],
            "not json": gzip.compress(b"\xff{"),
            "list": gzip.compress(b"[1]"),
            "other key": gzip.compress(json.dumps({"key": "b", "value": {}}).encode()),
        }[how]
    )
    assert cache.get(key) is None
    cache.put(key, {"value": 2})
    assert cache.get(key) == {"value": 2}


def test_folder_in_place_of_an_entry(tmp_path):
    cache, key = Cache(tmp_path), Cache.key(a=1)
    (tmp_path / f"{key}.json.gz").mkdir()
    assert cache.get(key) is None
    cache.put(key, {"value": 2})
    assert cache.get(key) == {"value": 2}


def test_cache_is_bounded_and_forgets_the_oldest(tmp_path):
    cache = Cache(tmp_path, max_bytes=5000)
    keys = [Cache.key(k=k) for k in range(8)]
    for age, key in enumerate(keys):
        cache.put(key, {"text": os.urandom(400).hex()})  # some 600 bytes each
        os.utime(tmp_path / f"{key}.json.gz", (age, age))
    assert cache.get(keys[0]) is not None  # used last, from here on
    for k in range(8, 12):
        cache.put(Cache.key(k=k), {"text": os.urandom(400).hex()})
    assert cache.usage()[1] <= 5000
    assert cache.get(keys[0]) is not None
    assert cache.get(keys[1]) is None


def test_cache_turned_off(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE", "0")
    cache = Cache(tmp_path / "none")
    cache.put(Cache.key(a=1), {"value": 1})
    assert cache.get(Cache.key(a=1)) is None
    assert not cache.root.exists()


def test_cache_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "deep" / "there"))
    Cache().put(Cache.key(a=1), {"value": 1})
    assert len(list((tmp_path / "deep" / "there").iterdir())) == 1


def test_disk_that_cannot_be_written_warns_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_warned", False)
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(JaxmemWarning, match="cannot be written .*; set JAXMEM_CACHE_DIR"):
        cache.put(Cache.key(a=1), {"value": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(Cache.key(a=1), {"value": 1})
    assert cache.get(Cache.key(a=1)) is None
    assert cache.usage() == (0, 0)


FULL_DISK = """
import resource, sys, warnings
from jaxmem.targets import Cache
cache, key = Cache(sys.argv[1]), Cache.key(a=1)
cache.put(key, {"value": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # what a full disk does, to this process alone
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for k in range(3):
        cache.put(Cache.key(k=k), {"text": "".join(map(str, range(1000)))})
print(len(caught), caught[0].message)
print(cache.get(key), cache.usage()[0])
"""


def test_full_disk(tmp_path):
    out = run(FULL_DISK, tmp_path).stdout
    assert re.search(r"^1 the cache in .* cannot be written \(File too large\)", out, re.MULTILINE)
    assert "clear it, or set JAXMEM_CACHE_DIR" in out
    assert out.splitlines()[-1] == "{'value': 1} 1"  # and nothing unfinished is left


MANY = """
import sys
from jaxmem.targets import Cache
cache = Cache(sys.argv[1], max_bytes=20000)
for k in range(60):
    key = Cache.key(k=k % 7)
    cache.put(key, {"text": str(k % 7) * 5000})
    found = cache.get(Cache.key(k=(k + 3) % 7))
    assert found is None or found == {"text": str((k + 3) % 7) * 5000}, found
"""


def test_two_processes_on_one_cache(tmp_path):
    both = [
        subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path)], env=environment())
        for _ in range(2)
    ]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    cache = Cache(tmp_path)
    assert {cache.get(Cache.key(k=k))["text"][0] for k in range(7)} == set("0123456")  # type: ignore[index]
    assert cache.usage()[0] == 7


def environment() -> dict[str, str]:
    paths = [str(Path(targets.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
