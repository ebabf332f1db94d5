"""The combinations of a sweep: each a job under a policy, traced once for all targets."""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
from typing import Any

import click

from jaxmem.cli.building import check_policies, settings_of, trace
from jaxmem.cli.rows import FRACTIONS, NUMBERS, Key, Row, key_of
from jaxmem.jobs.failure import one_line
from jaxmem.jobs.job import Job
from jaxmem.jobs.load import Entry, find
from jaxmem.jobs.parse import PolicyText

# ---------------------------------------------------------------- types


@dataclasses.dataclass
class Combination:
    """One job under one policy, for every target.

    Attributes:
      entry: what builds the job.
      policy: that it is built and traced under.
      settings: keywords of the job, batch and accum among them.
      undecorated: whether the policy has nothing to act on, as seen by `trace`.
    """

    entry: Entry
    policy: PolicyText
    settings: dict[str, Any]
    undecorated: bool = False
    _job: Job | None = None
    _error: str = ""
    _programs: dict[str | None, str] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """For a progress bar."""
        known = [f"{key}={self.settings[key]}" for key in _AXES if key in self.settings]
        return " ".join([self.policy.text, *known])

    def trace(self, targets: tuple[str, ...]) -> None:
        """Trace the program, for `is_done` to compare; keep an error for the row."""
        try:
            self._job = self.entry.make(self.settings, self.policy)
            with self.entry.under(self.policy):
                for platform in {_platform(target) for target in targets}:
                    self._programs[platform] = self._program(self._job, platform)
        except Exception as error:
            self._error = one_line(error)

    def _program(self, job: Job, platform: str | None) -> str:
        from jaxmem.trace.context import recording

        program = trace(job, platform)
        self.undecorated = self.entry.is_forced(self.policy) and not program.record.regions
        names = {None: None, "gpu": ("cuda",), "tpu": ("tpu",)}  # as jax's lowering calls them
        with recording(platform):  # some things are decided when it is lowered
            text = program.traced.lower(lowering_platforms=names[platform]).as_text()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def forget(self) -> None:
        """Release the job, and the arrays that it may hold."""
        self._job = None

    def key(self, target: str) -> Key:
        """The key of its row for a target."""
        return key_of(self._first(target))

    def is_done(self, rows: dict[Key, Row], target: str) -> bool:
        """Whether the file has its row, for this program and these versions, without an error."""
        row = rows.get(self.key(target))
        if row is None or row["error"] or self._error:
            return False
        same = self._last(target)
        return all(row[column] == text for column, text in same.items())

    def row(self, target: str, options: dict[str, Any]) -> dict[str, Any]:
        """Compile it for a target; an error becomes part of the row."""
        row = {**self._first(target), **self._last(target)}
        if self._job is None or self._error:
            return {**row, "error": self._error}
        try:
            with self.entry.under(self.policy):
                report = self._job.report(target, **options)
        except Exception as error:
            return {**row, "error": one_line(error)}
        names = ("fits", *NUMBERS, *FRACTIONS, "device", "platform", "devices")
        return {**row, **{name: getattr(report, name) for name in names}}

    def _first(self, target: str) -> dict[str, Any]:
        rest = {key: value for key, value in self.settings.items() if key not in _AXES}
        axes = {key: self.settings.get(key) for key in _AXES}
        settings = json.dumps(rest, sort_keys=True, default=str) if rest else None
        return {"target": target, "policy": self.policy.text, **axes, "settings": settings}

    def _last(self, target: str) -> dict[str, str]:
        import jax

        from jaxmem._util.version import __version__

        return {
            "jaxmem": __version__,
            "jax": jax.__version__,
            "compiler": _compiler(target),
            "program": self._programs.get(_platform(target), ""),
        }


_AXES = ("batch", "accum")

# ---------------------------------------------------------------- API


def combinations(
    where: str,
    policies: tuple[PolicyText, ...],
    batch: tuple[str, ...] | None,
    accum: tuple[str, ...] | None,
    settings: tuple[tuple[str, str], ...],
) -> list[Combination]:
    """The product of all axes, policies outermost; nothing is built yet.

    Raises:
      click.UsageError: the job has no such keyword, or one is given twice.
      JobError, ValueError: as `find`, `Entry.parse` and `policies.parse` do.
    """
    entry = find(where)
    check_policies(entry, policies)
    common = settings_of(entry, settings)
    axes = {"batch": batch, "accum": accum}
    values = {name: _values(entry, name, texts, common) for name, texts in axes.items()}
    # A keyword that the job does not have is no axis.
    names = [name for name in axes if values[name]]
    return [
        Combination(entry, policy, {**common, **dict(zip(names, point, strict=True))})
        for policy in policies
        for point in itertools.product(*(values[name] for name in names))
    ]


def check_targets(targets: tuple[str, ...]) -> None:
    """Refuse a mistyped target before anything is compiled.

    Raises:
      ValueError, FileNotFoundError: there is none of this name.
    """
    for target in targets:
        _platform(target)


# ---------------------------------------------------------------- implementation


def _values(
    entry: Entry, name: str, texts: tuple[str, ...] | None, common: dict[str, Any]
) -> list[Any]:
    if texts is None:
        # The default is written down, so that a row says which it was.
        return [common[name]] if name in common else entry.defaults(name)
    if not entry.takes(name):
        raise click.UsageError(
            f"--{name} fills the job's keyword {name}, and {entry.where} has none; add {name}= to "
            f"it, or leave --{name} out"
        )
    if name in common:
        raise click.UsageError(f"{name} is given twice: by --{name} and by --set {name}=…")
    return [entry.parse({name: text})[name] for text in texts]


def _platform(target: str) -> str | None:
    """The platform of a named target; None for the attached backend."""
    if target == "local":
        return None
    from jaxmem import targets

    return targets.target(target).platform


def _compiler(target: str) -> str:
    """What a compiled result depends on: versions, and a digest of flags and target."""
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    if target == "local":
        return f"jaxlib {importlib.metadata.version('jaxlib')}{_short(flags if any(flags) else '')}"
    from jaxmem import targets

    found = targets.target(target)
    versions = sorted(targets.versions(found).items())
    text = ", ".join(f"{name} {version}" for name, version in versions)
    # The facts of a target from a user's file may have changed.
    return text + _short([repr(found), *flags])


def _short(facts: Any) -> str:
    if not facts:
        return ""
    return f", settings {hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
