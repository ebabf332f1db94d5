"""The command `jaxmem`: its commands, its exit codes, and how it fails.

Exit codes: 0 everything fits, 2 something does not, 1 any error.  click exits
with 2 on a mistyped command line, so that code is changed here.

With --json the result is one JSON document on standard output, and so is a failure:
an object with the key "error".
"""

import sys
from collections.abc import Sequence
from typing import Any

import click

from jaxmem._util.version import __version__
from jaxmem.cli.cache import cache
from jaxmem.cli.completion import completion
from jaxmem.cli.diff import diff
from jaxmem.cli.doctor import doctor
from jaxmem.cli.fit import fit
from jaxmem.cli.report import report
from jaxmem.cli.streams import Document
from jaxmem.cli.sweep import sweep
from jaxmem.cli.targets import targets
from jaxmem.cli.verify import verify
from jaxmem.jobs.failure import explained, is_users, one_line


class _Commands(click.Group):
    """A group that exits with 1 on every error, wherever it was raised."""

    def main(
        self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **kwargs
    ) -> Any:
        if not standalone_mode:
            return super().main(args, *rest, standalone_mode=False, **kwargs)
        document, code, failure = Document(), 1, ""
        try:
            code = super().main(args, *rest, standalone_mode=False, obj=document, **kwargs)
        except click.ClickException as error:
            error.show()
            failure = one_line(error)
        except click.Abort:
            failure = "stopped"
            click.echo(failure, err=True)
        except SystemExit as error:
            if not is_users(error):  # click exits so after completion
                raise
            click.echo(explained(error), err=True)
            failure = one_line(error)
        except Exception as error:
            click.echo(explained(error), err=True)
            failure = one_line(error)
        # As typed: a command line that cannot be read has no options yet.
        if failure and "--json" in (sys.argv[1:] if args is None else args):
            document.write({"error": failure})
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Will it fit?  The compiled memory of a JAX program on any GPU or TPU, present or absent.

    JOB is pkg.module:function or path/to/file.py:function; the function returns
    jaxmem.Job(step, args, donate_argnums=...) and is called job unless it is named.
    An optimizer's state that is no named tuple is named by it: optimizer_state=1.
    """


for command in (report, fit, sweep, diff, verify, targets, doctor, cache, completion):
    app.add_command(command)


def main() -> None:
    """Run the command line of this process."""
    app.main(prog_name="jaxmem")
