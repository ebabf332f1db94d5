"""What is loaded, and when: each in a process of its own, since this one has long loaded all."""

import pathlib
import subprocess
import sys

import pytest

import jaxmem

COMMANDS = ["report", "fit", "sweep", "diff", "verify", "targets", "doctor", "cache", "completion"]


def python(code: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str, *words: str) -> set[str]:
    """The modules that are there after some lines."""
    said = python(f"{code}\nimport sys\nprint('loaded', *sys.modules, sep=chr(10))", *words)
    return set(said.partition("loaded\n")[2].split())


def test_the_package_loads_what_is_used():
    """`import jaxmem` loads nothing but the package and its version."""
    expected = {"jaxmem", "jaxmem._util", "jaxmem._util.version"}
    modules = loaded("import jaxmem")
    assert "jax" not in modules
    assert {name for name in modules if "jaxmem" in name} == expected


@pytest.mark.slow
def test_without_nnx_and_a_budget_neither_nnx_nor_scipy_is_loaded():
    code = """
import jax, jax.numpy as jnp, jaxmem

@jaxmem.remat_sqrt
def model(weights, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()

jaxmem.value_and_grad(model, microbatches=2)(jnp.ones((4, 2, 2)), jnp.ones((2, 2)))
jaxmem.fit, jaxmem.memory_report, jaxmem.AdamA
"""
    modules = loaded(code)
    assert "jaxmem.rewrite.apply" in modules
    assert not modules & {"flax.nnx", "scipy", "tqdm", "matplotlib"}


@pytest.mark.slow
def test_nnx_may_come_after_the_decorator():
    code = """
import jax.numpy as jnp, sys, jaxmem

@jaxmem.remat_full
def model(module, x):
    return module(x)

loss = jaxmem.value_and_grad(lambda module, x: (module(x) ** 2).mean(), microbatches=2)
assert "flax.nnx" not in sys.modules
from flax import nnx
import warnings
warnings.simplefilter("ignore", jaxmem.NoStackWarning)

module, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
assert (model(module, x) == module(x)).all()
print(type(loss(module, x)[1]) is type(nnx.grad(lambda m: (m(x) ** 2).mean())(module)))
"""
    assert python(code) == "True\n"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["nothing"], [], *([name, "--help"] for name in COMMANDS)],
    ids=" ".join,
)
def test_help_and_mistyped_commands_need_no_jax(words: list[str]):
    code = """
from jaxmem.cli import main
try:
    main()
except SystemExit:
    pass
"""
    modules = loaded(code, *words)
    assert "jaxmem.cli.report" in modules
    assert not modules & {"jax", "jaxlib", "numpy", "flax", "scipy", "rich", "tqdm", "matplotlib"}


@pytest.mark.slow
def test_an_export_is_never_replaced_by_the_module_of_its_name():
    """In either order: the modules first, and the names first."""
    root = pathlib.Path(jaxmem.__file__).parent
    files = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in files)
    modules = [name for name in names if name != "jaxmem._jax"]
    code = f"""
import importlib, types, jaxmem
if {{0}}:
    before = [getattr(jaxmem, name) for name in jaxmem.__all__]
for name in {modules}:
    importlib.import_module(name)
found = {{{{name: getattr(jaxmem, name) for name in jaxmem.__all__}}}}
print(*(name for name, value in found.items() if isinstance(value, types.ModuleType)))
"""
    for names_first in (False, True):
        modules = python(code.format(names_first)).split()
        assert modules == ["layers", "linen", "nnx", "policies", "targets"]


@pytest.mark.slow
def test_any_name_may_be_the_first():
    """Two files that import each other would work in one order alone."""
    code = """
import jax, flax, optax, os, jaxmem
for name in jaxmem.__all__:
    if not (child := os.fork()):
        getattr(jaxmem, name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""
    assert python(code) == ""


def test_the_names_of_the_package():
    names = set(vars(jaxmem)["__all__"])
    assert {"linen", "policies", "MultiSteps", "fit", "remat", "scan"} <= names <= set(dir(jaxmem))
    space: dict[str, object] = {}
    exec("from jaxmem import *", space)
    assert names <= set(space)
    assert all(value is getattr(jaxmem, name) for name, value in space.items() if name in names)
    assert not hasattr(jaxmem, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'jaxmem'"):
        exec("from jaxmem import nothing")
