"""The command `jaxmem`: its commands, its exit codes, and how it fails.

Exit codes: 0 everything fits, 2 something does not, 1 any error.  click's own
code for a mistyped command line is 2, so it is changed here.
"""

import sys
from typing import Any

import click

from jaxmem import __version__
from jaxmem.cli.cache import cache
from jaxmem.cli.completion import completion
from jaxmem.cli.diff import diff
from jaxmem.cli.doctor import doctor
from jaxmem.cli.failure import explained
from jaxmem.cli.fit import fit
from jaxmem.cli.report import report
from jaxmem.cli.sweep import sweep
from jaxmem.cli.targets import targets
from jaxmem.cli.verify import verify


class _Commands(click.Group):
    """A group that ends with 1 on every error, whoever found it."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except click.ClickException as error:
            error.show()
            code = 1
        except click.Abort:
            click.echo("stopped", err=True)
            code = 1
        except Exception as error:
            click.echo(explained(error), err=True)
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Will it fit?  The compiled memory of a JAX program on any GPU or TPU, present or absent.

    JOB is pkg.module:function or path/to/file.py:function; the function returns
    jaxmem.Job(step, args, donate_argnums=...) and is called job unless it is named.
    """


for command in (report, fit, sweep, diff, verify, targets, doctor, cache, completion):
    app.add_command(command)


def main() -> None:
    """Run the command line of this process."""
    app.main(prog_name="jaxmem")
