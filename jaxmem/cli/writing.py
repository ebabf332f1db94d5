"""Check the files that a command will write, before it does anything that takes time."""

import os
from pathlib import Path

import click

_PICTURES = ("plot", "plot-fusions", "heatmap")


def check_files(**files: Path | None) -> None:
    """Raise before compilation if a file could not be written after it.

    Args:
      **files: by the names of their options; those for plots and heatmaps are pictures.
    """
    for name, file in files.items():
        option = name.replace("_", "-")
        if file is None:
            continue
        if option in _PICTURES:
            _check_picture(file)
        if not file.parent.is_dir():
            raise click.UsageError(f"--{option} {file}: there is no folder {file.parent}; make it")
        if file.is_dir():
            raise click.UsageError(f"--{option} {file}: this is a folder; name a file")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise click.UsageError(f"--{option} {file}: {file.parent} is not writable")


def _check_picture(file: Path) -> None:
    from jaxmem.show.figure import check_path, matplotlib_defaults

    check_path(file)
    with matplotlib_defaults():  # it is installed
        pass
