"""`memory_report`: trace a function, compile it for a target, and report its memory.

For a named target the program is exported in portable form and compiled by a
worker process, so that a crash of the compiler does not harm this process;
results are cached on disk.  For the attached backend ("local") it is compiled here,
since only the process that has initialised a GPU can use it.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import targets
from jaxmem.compile.compiling import Elsewhere, Here
from jaxmem.compile.options import checked
from jaxmem.compile.program import Program
from jaxmem.report.advice import advise
from jaxmem.report.figures import report_of
from jaxmem.report.report import MemoryReport
from jaxmem.trace.context import use_policy
from jaxmem.trace.training_state import Named

# ---------------------------------------------------------------- API


def memory_report(
    fn: Callable[..., Any],
    *args: Any,
    target: "str | targets.Target" = "local",
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    generate_code: bool = False,
    timeout: float = 900.0,
    cache: bool = True,
    suggest: bool = True,
    optimizer_state: Named = None,
    parameters: Named = None,
    **kwargs: Any,
) -> MemoryReport:
    """Compile `fn` for an accelerator, present or absent, and report the memory that it needs.

    Nothing is executed, and nothing of the size of the arguments is allocated.

    Args:
      fn: a function of arrays, plain or already jitted.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees, with or without
        shardings.  Figures of a sharded program are per device; a mesh of absent
        devices is ``jaxmem.target(name, devices=8).mesh(...)``.
      target: "local", the attached backend; or the name of an accelerator
        (`jaxmem.targets.catalog()`, or ``jaxmem targets`` in a shell), which need not be
        present; or a `jaxmem.Target`; or "file.toml:name" for one described in a file.
        donate_argnums: as for `jax.jit`, in addition to what a jitted `fn` itself donates.
      static_argnums: as for `jax.jit`.
      compiler_options: passed to the compiler.
      generate_code: whether the compiler of a named target goes on to machine code when buffers are
        assigned.  No figure changes then, and it may take a hundred times as long; but `peak_bytes`
        is known, and what is too large for the chip's own memory is refused.  Programs with
        hand-written kernels, which may be, and those that send data from a TPU to its host are
        compiled so in any case.
      timeout: seconds after which the compiler of a named target is stopped.
      cache: whether to read and write the results on disk (for named targets).
      suggest: when the program does not fit and has decorated stacks, whether to
        compile it under other policies until one fits.
      optimizer_state: which argument is the optimizer's state, or has it inside: its position, or
        its path as reports print it, such as "state/opt"; or several of those.  Its fields are
        named tuples', as optax has them, or else the first parts of the paths within.  None: all
        named tuples are states, and nothing else is.
      parameters: likewise, which are the model's parameters.  None: those under the name "params"
        or "parameters", or else those whose paths the fields of the optimizer's state repeat.
      **kwargs: arrays, passed on to `fn` by name.  Arguments of `fn` with the name of an
        option above must be passed by position.

    Raises:
      TypeError: `fn` is not callable, an argument is not an array (the message names its
        path), or an option has the wrong type.
      ValueError: unknown target, unknown compiler option, arguments sharded over another number
        of devices, or an `optimizer_state` or `parameters` that is no argument.
      jaxmem.CompileError: the compiler refused the program, crashed, ran out of time or is not
        installed; the message says which and what to do.
      RuntimeError: the attached backend gives no memory analysis.

    >>> import jax, jaxmem
    >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> report = jaxmem.memory_report(lambda x: x + 1, x, donate_argnums=0)
    >>> report.required_bytes, report.arguments
    (4194304, {'x': 4194304})
    """
    return PendingReport(
        fn=fn,
        args=args,
        kwargs=kwargs,
        target=target,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        compiler_options=compiler_options,
        generate_code=generate_code,
        timeout=timeout,
        cache=cache,
        suggest=suggest,
        optimizer_state=optimizer_state,
        parameters=parameters,
    ).result()


@dataclasses.dataclass(eq=False, kw_only=True)
class PendingReport:
    """A report whose program is traced, and is being compiled if that is for a named target.

    Attributes: the arguments of `memory_report`.

    Raises: what `memory_report` does before the compiler has an answer.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: "str | targets.Target"
    donate_argnums: int | Sequence[int]
    static_argnums: int | Sequence[int]
    compiler_options: dict[str, Any] | None
    timeout: float
    cache: bool
    generate_code: bool = False
    suggest: bool = False
    optimizer_state: Named = None
    parameters: Named = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(
                f"memory_report takes a function and its arguments, got {self.fn!r} of type "
                f"{type(self.fn).__name__} as the function; pass memory_report(fn, *args), not "
                "fn(*args)"
            )
        _check_options(
            target=(self.target, str | targets.Target | os.PathLike, "the name of a target"),
            compiler_options=(self.compiler_options, dict | None, "a dict"),
            generate_code=(self.generate_code, bool, "True or False"),
            timeout=(self.timeout, int | float, "a number of seconds"),
            cache=(self.cache, bool, "True or False"),
            suggest=(self.suggest, bool, "True or False"),
        )
        options = checked(self.compiler_options)
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout}")
        absent = None if self.target == "local" else targets.target(self.target)
        if absent is None:
            _check_present((self.args, self.kwargs))
        else:
            targets.warm_up(absent)  # while this process traces
        platform = None if absent is None else absent.platform
        self._program = Program(
            self.fn,
            self.args,
            self.kwargs,
            self.donate_argnums,
            self.static_argnums,
            platform,
            self.optimizer_state,
            self.parameters,
        )
        self._compiling = (
            Here(self._program, options)
            if absent is None
            else Elsewhere(
                self._program, absent, options, self.timeout, self.cache, self.generate_code
            )
        )

    def answered(self, seconds: float) -> bool:
        """Whether `result` need not wait for a worker, after waiting for at most so long."""
        return self._compiling.answered(seconds)

    def stop(self) -> None:
        """End the compiler: nobody wants the report."""
        self._compiling.stop()

    def result(self) -> MemoryReport:
        """The report; asked for once."""
        report = report_of(self._program, self._compiling.result())
        if report.fits is not False:
            return report

        def under(policy: str, policy_options: dict[str, Any]) -> MemoryReport:
            with use_policy(policy, **policy_options):
                return dataclasses.replace(self, suggest=False).result()

        return advise(report, self._program, under if self.suggest else None)


# ---------------------------------------------------------------- implementation


def _check_options(**options: tuple[Any, Any, str]) -> None:
    for name, (value, kind, word) in options.items():
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(
                f"memory_report: {name}= takes {word}, got an object of type "
                f"{type(value).__name__}; an argument of the function of that name goes by position"
            )


def _check_present(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.AbstractMesh) and mesh.size > 1:
            raise ValueError(
                f"an argument is sharded over a mesh of {mesh.size} absent devices, "
                "and the target is the attached backend; name the accelerator, as in "
                'target="h100-80g"'
            )
