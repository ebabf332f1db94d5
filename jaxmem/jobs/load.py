"""Finds the `job()` of a module or a file, and builds its job under settings and a policy.

"pkg.module:job" is imported with the current directory first on the path,
"path/to/file.py:job" is run with the file's folder there; ":job" is the default.
"""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem._util.text import size
from jaxmem.errors import JaxmemWarning, warn
from jaxmem.jobs.job import Job
from jaxmem.jobs.parse import PolicyText, a, parse, words

# Arrays smaller than this are not worth a warning.
_MANY_BYTES = 16 * 2**20

# ---------------------------------------------------------------- types


class JobError(ValueError):
    """A job cannot be found or built as asked; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A function that builds a `Job`, found but not yet called.

    Attributes:
      where: the text that it was found by, with ":job".
      build: the function.
    """

    where: str
    build: Callable[..., Any]

    def takes(self, keyword: str) -> bool:
        """Whether it takes this keyword."""
        return keyword in self._keywords or self._any_keyword

    def defaults(self, keyword: str) -> list[Any]:
        """The default of a keyword, [] if it has no default or there is no such keyword."""
        if keyword not in self._keywords:
            return []
        default = self._keywords[keyword].default
        return [] if default is inspect.Parameter.empty else [default]

    def parse(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Settings from a shell as values of the annotated types, or else those of the defaults.

        Raises:
          JobError: there is no such keyword, or the text is not of its type.

        >>> def job(batch: int = 8, layers=24, lr: float | None = None): ...
        >>> Entry("m:job", job).parse({"batch": "16", "layers": "1_000", "lr": "none"})
        {'batch': 16, 'layers': 1000, 'lr': None}
        """
        self._check(texts)
        hints = _hints(self.build)
        return {key: self._value(key, text, hints) for key, text in texts.items()}

    def make(self, settings: Mapping[str, Any], policy: PolicyText | None = None) -> Job:
        """The job with these settings, to be traced within `under(policy)`.

        Raises:
          JobError: a keyword is unknown or missing, the policy is given twice, or the
            function returned no `Job`.
            Exception: whatever the function raises.
        """
        if policy is not None and not policy.is_own and self.takes("policy"):
            if "policy" in settings:
                raise JobError("the policy is given twice, as a policy and as a setting")
            settings = {**settings, "policy": policy.value}
        self._check(settings)
        missing = [
            name
            for name, parameter in self._keywords.items()
            if parameter.default is parameter.empty and name not in settings
        ]
        if missing:
            raise JobError(
                f"{self.where} has no default for {', '.join(missing)}; pass "
                + " ".join(f"--set {name}=…" for name in missing)
            )
        job = self.build(**settings)
        if not isinstance(job, Job):
            raise JobError(
                f"{self.where} returned {a(type(job).__name__)}, not a jaxmem.Job; end it with "
                "return jaxmem.Job(step, args, donate_argnums=…)"
            )
        if (allocated := job.allocated_bytes) > _MANY_BYTES:
            warn(
                f"{self.where} made arrays of {size(allocated)}; a report needs only their shapes: "
                "build them under jax.eval_shape, or pass jax.ShapeDtypeStruct",
                JaxmemWarning,
            )
        return job

    def is_forced(self, policy: PolicyText | None) -> bool:
        """Whether the policy applies to the decorated stacks, not to the job's keyword policy."""
        return policy is not None and not policy.is_own and not self.takes("policy")

    def under(self, policy: PolicyText | None) -> contextlib.AbstractContextManager[None]:
        """The context in which the job must be traced, in the same thread.

        Raises:
          ValueError, TypeError: there is no such policy or option.
        """
        if policy is None or not self.is_forced(policy):
            return contextlib.nullcontext()
        from jaxmem import policies
        from jaxmem.trace import context

        return context.instead(policies.parse(policy.name, **dict(policy.options)))

    @property
    def _keywords(self) -> dict[str, inspect.Parameter]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p for p in parameters if p.kind in kinds}

    @property
    def _any_keyword(self) -> bool:
        parameters = inspect.signature(self.build).parameters.values()
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def _check(self, settings: Mapping[str, Any]) -> None:
        for key in settings:
            if not self.takes(key):
                known = list(self._keywords)
                takes = f"it takes {', '.join(known)}" if known else "it takes no keywords"
                raise JobError(f"{self.where} has no keyword {key!r}{_close(key, known)}; {takes}")

    def _value(self, key: str, text: str, hints: dict[str, Any]) -> Any:
        default = self._keywords[key].default if key in self._keywords else None
        kind = hints.get(key, _kind_of(default))
        try:
            return parse(text, kind)
        except ValueError:
            raise JobError(f"{self.where} takes {words(kind)} for {key}, got {text!r}") from None


# ---------------------------------------------------------------- API


def find(where: str) -> Entry:
    """The function that `where` names.

    Args:
      where: "pkg.module:job" or "path/to/file.py:job"; ":job" may be omitted.

    Raises:
      JobError: there is no such module, file or name, or it is not a function.
      Exception: whatever importing the module raises.

    >>> find("jaxmem.nowhere:job")
    Traceback (most recent call last):
      ...
    jaxmem.jobs.load.JobError: no module 'jaxmem.nowhere'; ...
    """
    place, name = _split(where)
    module = _import_file(place) if place.endswith(".py") else _import_module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            functions = [
                key
                for key, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == module.__name__
            ]
            known = f"; its functions are {', '.join(functions)}" if functions else ""
            raise JobError(f"{place} has no {name!r}{_close(name, functions)}{known}")
        found = getattr(found, part)
    where = f"{place}:{name}"
    if isinstance(found, Job):
        value = found
        return Entry(where, lambda: value)
    if not callable(found):
        raise JobError(
            f"{where} is {a(type(found).__name__)}, not a function; it must be a function that "
            "returns a jaxmem.Job"
        )
    try:
        inspect.signature(found)
    except ValueError:  # some functions of C have none
        raise JobError(f"{where} has no signature; it must be a Python function") from None
    return Entry(where, found)


# ---------------------------------------------------------------- implementation


def _split(where: str) -> tuple[str, str]:
    place, colon, name = where.rpartition(":")
    if not colon or name.endswith(".py"):  # the colon of "C:\file.py" separates nothing
        place, name = where, "job"
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise JobError(f"{where!r} names no job; write pkg.module:job or path/to/file.py:job")
    return place, name


def _import_module(name: str) -> types.ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        hint = f"; for the file write {name}.py" if os.path.isfile(f"{name}.py") else ""
        raise JobError(
            f"{name!r} is not a module{hint}; write pkg.module:job or path/to/file.py:job"
        )
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's module fails to import is shown as it is.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        missing = error.name
    inside = "" if missing == name else f" (no module {missing!r})"
    raise JobError(
        f"no module {name!r}{inside}; it must be installed or below the current directory, {here}, "
        "or be given as a file: path/to/file.py:job"
    )


def _import_file(path: str) -> types.ModuleType:
    full = os.path.abspath(path)
    if not os.path.isfile(full):
        raise JobError(f"no file {path!r}, seen from {os.getcwd()}")
    name = os.path.splitext(os.path.basename(full))[0]
    # Under another name, so that it never replaces a module that others import.
    name = f"_jaxmem_job_{name}" if name in sys.modules or not name.isidentifier() else name
    spec = importlib.util.spec_from_file_location(name, full)
    # A file that ends in .py has both.
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = os.path.dirname(full)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # annotations are the user's, and may name what is not there at run time
        return {}


def _kind_of(default: Any) -> Any:
    return Any if default is None or default is inspect.Parameter.empty else type(default)


def _close(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
