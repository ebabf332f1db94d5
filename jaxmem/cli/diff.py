"""`jaxmem diff`: the difference of two reports."""

import json
from pathlib import Path

import click

from jaxmem.cli.options import json_option
from jaxmem.cli.streams import emit, emit_json

_File = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("before", type=_File, metavar="A.json")
@click.argument("after", type=_File, metavar="B.json")
@json_option
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Explain B - A: what the second report needs more or less than the first, part by part.

    The files are written by jaxmem report --json.
    """
    difference = _read(after) - _read(before)
    if as_json:
        emit_json(json.loads(difference.to_json()))
    else:
        emit(difference)


def _read(path: Path):
    from jaxmem.report.report import MemoryReport

    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            raise ValueError(
                "a list, as report --json writes for several targets; give it one target"
            )
        return MemoryReport.from_json(text)
    except ValueError as error:
        raise click.ClickException(f"{path}: {error}") from None
