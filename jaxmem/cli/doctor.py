"""`jaxmem doctor`: what is installed, what is missing, and how to install it."""

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import click

from jaxmem.cli.options import json_option
from jaxmem.cli.streams import emit_json, results_only
from jaxmem.jobs.failure import one_line


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that a report may need.

    Attributes:
      name: of the part checked.
      ok: whether it is installed and works.
      found: its version, or what is wrong.
      use: what needs it.
      remedy: a shell command, or what to do.
    """

    name: str
    ok: bool
    found: str
    use: str
    remedy: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this installation; exit code 0 if reports for the attached backend work."""
    # Looking at a GPU must not allocate three quarters of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with results_only():
        checks = list(_checks())
    works = next(check.ok for check in checks if check.name == _LOCAL)
    if as_json:
        emit_json({"works": works, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        click.echo(_table(checks))
    return 0 if works else 1


_LOCAL = "local report"

_PACKAGES = (
    ("jax", "everything", 'pip install "jax>=0.10"'),
    ("jaxlib", "everything", 'pip install "jaxlib>=0.10"'),
    ("flax", "Flax modules", "pip install flax"),
    ("optax", "gradient accumulation", "pip install optax"),
    ("flatbuffers", "absent accelerators", 'pip install "jaxmem[targets]"'),
    ("matplotlib", "pictures", 'pip install "jaxmem[plot]"'),
)


def _checks() -> Iterator[Check]:
    python = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield Check(
        "Python", fine, python, "everything", "" if fine else "install Python 3.11 or newer"
    )
    yield Check("jaxmem", True, _version("jaxmem") or "not installed, run from its source", "")
    for name, use, remedy in _PACKAGES:
        version = _version(name)
        yield Check(name, version is not None, version or "missing", use, "" if version else remedy)
    yield from _compilers()
    yield _backend()
    yield _local_report()
    yield _cache()


def _compilers() -> Iterator[Check]:
    from jaxmem.targets import installed

    for kind, use in (("gpu", "absent GPUs"), ("tpu", "absent TPUs")):
        name = installed.cuda_plugin() if kind == "gpu" else "libtpu"
        version = _version(name) or "missing"
        missing = [text for text in installed.missing(kind) if not text.startswith("flatbuffers")]
        found = "; ".join(text.partition(": ")[0] for text in missing) or version
        remedy = " && ".join(text.partition(": ")[2] for text in missing)
        yield Check(name, not missing, found, use, remedy)


def _backend() -> Check:
    import jax

    use = "target local, jaxmem verify"
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return Check(
            "attached backend",
            False,
            one_line(error),
            use,
            "JAX_PLATFORMS=cpu jaxmem doctor tells whether the CPU works",
        )
    kinds = sorted({device.device_kind for device in devices})
    return Check("attached backend", True, f"{len(devices)} × {', '.join(kinds)}", use)


def _local_report() -> Check:
    import jax

    from jaxmem.report.memory import memory_report

    use = "jaxmem report JOB"
    try:
        report = memory_report(lambda x: x + 1, jax.ShapeDtypeStruct((256,), "float32"))
    except Exception as error:  # any error means that reports do not work here
        return Check(_LOCAL, False, one_line(error), use, "see the lines above")
    return Check(_LOCAL, True, f"compiled in {report.compile_seconds:.1f} s", use)


def _cache() -> Check:
    from jaxmem._util.text import size
    from jaxmem.targets import Cache

    store = Cache()
    count, total = store.usage()
    folder = store.root
    while not folder.exists():
        folder = folder.parent
    fine = os.access(folder, os.W_OK)
    remedy = "" if fine else "set JAXMEM_CACHE_DIR to a folder that can be written"
    found = f"{store.root}, {count} results, {size(total)}"
    return Check("cache", fine, found, "a second report in no time", remedy)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _table(checks: list[Check]) -> str:
    from jaxmem._util.text import columns

    lines = [
        ("OK" if check.ok else "--", check.name, check.found, f"for {check.use}" * bool(check.use))
        for check in checks
    ]
    todo = [check for check in checks if not check.ok]
    remedies = [f"  {check.remedy}  # {check.name}, for {check.use}" for check in todo]
    # One command may remedy several checks.
    remedies = list(dict.fromkeys(remedies))
    what = ["", "what to do:", *remedies] if todo else []
    return "\n".join([columns(lines, indent=""), *what])
