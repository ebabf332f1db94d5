"""The accelerators known by name, and those that a user describes in a file.

Both are TOML of one form, described at the head of `accelerators.toml`; an error in
a file raises a `ValueError` that says where.
"""

import difflib
import functools
import importlib.resources
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.targets.spec import GpuSpec, Target, TpuSpec, chips

# ---------------------------------------------------------------- API


def catalog() -> dict[str, Target]:
    """Every accelerator that comes with the package, by name.

    >>> from jaxmem.targets import catalog
    >>> catalog()["h100-80g"].device
    'NVIDIA H100 80GB HBM3'
    """
    return dict(_catalog())


def target(which: str | os.PathLike[str] | Target, devices: int | None = None) -> Target:
    """An accelerator by name, or from a file: "mine.toml", or "mine.toml:name" if it has several.

    Args:
      which: a name or a file; a `Target` is returned as it is.
      devices: how many of it; figures remain per device.  None for one, or for
      as many as a `Target` has.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: `which` is none of these.
      ValueError: no accelerator has this name, the file is invalid, or there is no slice of this
      many devices.

    >>> from jaxmem.targets import target
    >>> target("v5e-16g", devices=4).mesh({"data": 4}).shape_tuple
    (('data', 4),)
    """
    if isinstance(which, Target):
        return which if devices is None else which.with_devices(devices)
    if isinstance(which, os.PathLike):
        which = os.fspath(which)
    if not isinstance(which, str):
        raise TypeError(
            f"a target is a name, a file or a Target, got {which!r} of type "
            f'{type(which).__name__}; pass for example "h100-80g"'
        )
    found = _from_file(which) if _FILE.search(which) else _known(which, catalog(), "target")
    return found if devices is None else found.with_devices(devices)


def load(path: str | os.PathLike[str]) -> dict[str, Target]:
    """The accelerators of a TOML file, by name.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not TOML, or not of the form that `accelerators.toml` describes.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError:
        raise ValueError(f"{os.fspath(path)}: not UTF-8 text; is this a TOML file?") from None
    return _parse(text, os.fspath(path), "user")


def by_device_kind(kind: str) -> Target | None:
    """The accelerator with this device kind in jax, None if it is not in the catalogue.

    >>> from jaxmem.targets import by_device_kind
    >>> by_device_kind("TPU v5 lite").name, by_device_kind("cpu")
    ('v5e-16g', None)
    """
    wanted = _plain(kind)
    for row in _catalog().values():
        if wanted in map(_plain, (row.device, *row.other_names)):
            return row
    return None


# ---------------------------------------------------------------- implementation

_FILE = re.compile(r"\.toml(?::|$)|[/\\]")


@functools.cache
def _catalog() -> dict[str, Target]:
    file = importlib.resources.files("jaxmem.targets") / "accelerators.toml"
    return _parse(file.read_text(encoding="utf-8"), "accelerators.toml", None)


def _plain(kind: str) -> str:
    return kind.casefold().removeprefix("nvidia ")


def _from_file(which: str) -> Target:
    path, _, name = which.partition(".toml:")
    if name:
        path += ".toml"
        return _known(name, load(path), f"target in {path}")
    found = load(which)
    if len(found) != 1:
        raise ValueError(
            f"{which} has {len(found)} targets: {', '.join(found)}; "
            f'say which, as "{which}:{next(iter(found), "name")}"'
        )
    return next(iter(found.values()))


def _known(name: str, among: Mapping[str, Target], what: str) -> Target:
    if name in among:
        return among[name]
    close = difflib.get_close_matches(name.casefold(), among, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else "."
    raise ValueError(
        f"unknown {what} {name!r}{hint} The known ones are {', '.join(among)}; "
        'for one of your own, pass "path.toml" or "path.toml:name"'
    )


def _parse(text: str, where: str, source: str | None) -> dict[str, Target]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: not TOML: {error}") from None
    if not data:
        raise ValueError(f"{where}: no table [gpu.NAME] or [tpu.NAME] in it")
    found: dict[str, Target] = {}
    for platform, rows in data.items():
        if platform not in _FIELDS:
            raise ValueError(
                f"{where}: {platform}: unknown platform; tables are [gpu.NAME] or [tpu.NAME]"
            )
        if not isinstance(rows, dict):
            raise ValueError(
                f"{where}: {platform}: expected tables [{platform}.NAME], got {rows!r}"
            )
        for name, row in rows.items():
            at = f"{where}: {platform}.{name}"
            if name in found:
                raise ValueError(f"{at}: {name!r} is defined twice, as a GPU and as a TPU")
            found[name] = _row(platform, name, _checked(platform, row, at), at, source)
    return found


def _checked(platform: str, row: Any, at: str) -> dict[str, Any]:
    """The row, if every key is known, none is missing and all are of their types."""
    fields = _FIELDS[platform]
    if not isinstance(row, dict):
        raise ValueError(f"{at}: expected a table, got {row!r}")
    for key, value in row.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(fields)}"
            raise ValueError(f"{at}: {key}: unknown key; {hint}")
        words, fine = fields[key]
        if not fine(value):
            raise ValueError(f"{at}: {key}: expected {words}, got {value!r}")
    for key in fields:
        if key not in row and key not in _OPTIONAL:
            raise ValueError(f"{at}: {key}: missing")
    return row


def _row(platform: str, name: str, row: dict[str, Any], at: str, source: str | None) -> Target:
    if platform == "gpu":
        kind: type[GpuSpec | TpuSpec] = GpuSpec
        given = {key: row[key] for key in _GPU if key in row}
    else:
        kind = TpuSpec
        given = {key: row[key] for key in _TPU if key in row and key not in _LINKS}
        given["slices"] = tuple(_slices(row["slices"], at))
    return Target(
        name=name,
        device=row["name"],
        platform="gpu" if platform == "gpu" else "tpu",
        memory=row["memory"],
        bandwidth=row["bandwidth"],
        matrix_peak=row["bf16"],
        spec=kind(**given),
        source=row.get("source", source or "datasheet"),
        other_names=tuple(row.get("other_names", ())),
        **{key: row[key] for key in _LINKS if key in row},
    )


def _slices(shapes: list[str], at: str) -> list[str]:
    for shape in shapes:
        try:
            chips(shape)
        except ValueError as error:
            raise ValueError(f"{at}: slices: {error}") from None
    return shapes


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_rate(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, float) and value > 0 and math.isfinite(value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_capability(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d+\.\d+", value) is not None


_Field = tuple[str, Callable[[Any], bool]]
_TEXT: _Field = ("text", _is_text)
_TEXTS: _Field = ("a list of texts", _is_texts)
_COUNT: _Field = ("a whole number above 0", _is_count)
_RATE: _Field = ("a number above 0", _is_rate)
_ALL: dict[str, _Field] = {
    "name": _TEXT,
    "memory": _COUNT,
    "bandwidth": _RATE,
    "bf16": _RATE,
    "source": (
        '"xla", "datasheet" or "user"',
        lambda value: isinstance(value, str) and value in ("xla", "datasheet", "user"),
    ),
    "other_names": _TEXTS,
    "link_bandwidth": _RATE,
    "link_latency": _RATE,
    "network_bandwidth": _RATE,
}
_GPU: dict[str, _Field] = {
    "compute_capability": ('text as "9.0"', _is_capability),
    "cores": _COUNT,
    "fpus_per_core": _COUNT,
    "threads_per_core": _COUNT,
    "shared_memory_per_core": _COUNT,
    "shared_memory_optin": _COUNT,
    "l2": _COUNT,
    "clock_ghz": _RATE,
}
_TPU: dict[str, _Field] = {
    "generation": _TEXT,
    "slices": _TEXTS,
    "devices_per_chip": _COUNT,
    "chip_config": _TEXT,
    "link_axes": _COUNT,
}
_LINKS = ("link_bandwidth", "link_axes", "link_latency", "network_bandwidth")
_FIELDS = {"gpu": {**_ALL, **_GPU}, "tpu": {**_ALL, **_TPU}}
_OPTIONAL = ("source", "other_names", "devices_per_chip", "chip_config", *_LINKS)
