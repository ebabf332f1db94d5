"""Files that a command will write, looked at before it does anything that takes time."""

import os
from pathlib import Path

import click


def check_files(plot: Path | None = None, **others: Path | None) -> None:
    """Refuse before anything is compiled what could not be written afterwards.

    Args:
      plot: of a picture, by the option of that name.
      **others: by the names of their options.
    """
    if plot is not None:
        from jaxmem.show.figure import check_path, matplotlib_defaults

        check_path(plot)
        with matplotlib_defaults():  # it is installed
            pass
    for option, file in {**others, "plot": plot}.items():
        if file is None:
            continue
        if not file.parent.is_dir():
            raise click.UsageError(f"--{option} {file}: there is no folder {file.parent}; make it")
        if file.is_dir():
            raise click.UsageError(f"--{option} {file}: this is a folder; name a file")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise click.UsageError(f"--{option} {file}: nothing can be written to {file.parent}")
