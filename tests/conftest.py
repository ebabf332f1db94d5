"""What all tests share: eight devices, a compiler that rounds alike everywhere, random keys."""

import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import hypothesis
import jax
import pytest
from helpers.xla_flags import FLAGS

# Machines are slow now and then, and what is tested is not how long an example takes.
hypothesis.settings.register_profile("jaxmem", deadline=None)
hypothesis.settings.load_profile("jaxmem")


def pytest_configure(config: pytest.Config) -> None:
    # Compiled programs are shared by the processes of one run, and by nobody else.
    if "JAXMEM_CACHE_DIR" not in os.environ:
        folder = os.environ["JAXMEM_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxmem-cache-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # What the attached backend compiles, too: in a folder for each process, since jax writes these
    # files in place and another process would read half of one.  Not by a variable of the
    # environment: processes that a test starts have other flags, which are no part of the keys.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    own = f"{os.environ['JAXMEM_CACHE_DIR']}/jax-{worker}"
    jax.config.update("jax_compilation_cache_dir", own)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_num_cpu_devices", 8)
    # The compiler reads its flags once in a process.
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} {FLAGS}"
    jax.devices()
    # Processes that a test starts run as a user's do.
    if before is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of few and long tests first, lest one of two processes is left alone with the last.
    items.sort(key=lambda item: "experiments" not in item.path.parts)


def pytest_collection_finish() -> None:
    # What jax traces is many objects and little garbage, and what is imported stays.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def getkey() -> Callable[[], jax.Array]:
    """A function that returns another random key at each call, the same ones in each run."""
    seeds = itertools.count()
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def strict() -> Iterator[None]:
    """No implicit promotion, of dtypes or of ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
