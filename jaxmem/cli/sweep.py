"""`jaxmem sweep`: policies × batch sizes × accumulation × targets, one row each.

A row is skipped if the file already has it for the same program (as traced and
lowered, not its source text) and the same versions.  So an interrupted sweep
resumes, and one of a changed model is compiled anew.
"""

import itertools
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import click

from jaxmem.cli.options import (
    Names,
    cache_option,
    complete_policies,
    complete_targets,
    job_argument,
    json_option,
    set_option,
    timeout_option,
)
from jaxmem.cli.streams import emit_json, results_only, say
from jaxmem.jobs.parse import PolicyText

_Picture = click.Path(dir_okay=False, path_type=Path)


@click.command()
@job_argument
@click.option(
    "--targets",
    "--target",
    type=Names(),
    default="local",
    show_default=True,
    metavar="NAMES",
    shell_complete=complete_targets,
    help="Comma-separated accelerators, as jaxmem targets lists them.",
)
@click.option(
    "--policies",
    type=Names(),
    default="own",
    show_default=True,
    metavar="NAMES",
    shell_complete=complete_policies,
    help="For the decorated code, as in none,sqrt,revolve:slots=4; own is what the job does.",
)
@click.option("--batch", type=Names(), metavar="NUMBERS", help="Values of the job's keyword batch.")
@click.option("--accum", type=Names(), metavar="NUMBERS", help="Values of the job's keyword accum.")
@set_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="The CSV to write or to resume.",
)
@click.option(
    "--heatmap", type=_Picture, metavar="FILE", help="Draw which policies fit at which batch sizes."
)
@click.option("--plot", type=_Picture, metavar="FILE", help="Draw memory against recomputation.")
@json_option
@timeout_option
@cache_option
def sweep(
    where: str,
    targets: tuple[str, ...],
    policies: tuple[str, ...],
    batch: tuple[str, ...] | None,
    accum: tuple[str, ...] | None,
    settings: tuple[tuple[str, str], ...],
    out: Path,
    heatmap: Path | None,
    plot: Path | None,
    as_json: bool,
    timeout: float,
    no_cache: bool,
) -> int:
    """Compile JOB under every combination of the options and write a CSV.

    Run it again to resume after an interruption; failed rows are retried.
    Exit code: 0 all rows are complete, 1 a row failed, or another error.
    """
    from jaxmem.cli.combinations import Combination, check_targets, combinations
    from jaxmem.cli.drawing import draw_heatmaps, draw_plots
    from jaxmem.cli.rows import Rows, lines_of, values_of
    from jaxmem.cli.writing import check_files

    check_files(heatmap=heatmap, plot=plot)
    options = {"timeout": timeout, "cache": not no_cache, "suggest": False}
    with results_only():
        chosen = tuple(PolicyText.parse(text) for text in policies)
        wanted: list[Combination] = combinations(where, chosen, batch, accum, settings)
        check_targets(targets)
        out.parent.mkdir(parents=True, exist_ok=True)
        with Rows(out) as rows:
            try:
                _fill(rows, wanted, targets, options)
            except KeyboardInterrupt:
                say(f"stopped; the same command resumes {out}")
                raise
            keys = [one.key(target) for target, one in itertools.product(targets, wanted)]
            found = [values_of(row) for row in lines_of(rows.by_key, keys)]
    if as_json:
        emit_json(found)
    else:
        click.echo(_table(found))
    if heatmap is not None:
        draw_heatmaps(found, heatmap)
    if plot is not None:
        draw_plots(found, plot)
    return 1 if any(row["error"] for row in found) else 0


def _fill(rows: Any, wanted: list[Any], targets: tuple[str, ...], options: dict[str, Any]) -> None:
    from tqdm import tqdm

    from jaxmem.cli.building import NO_STACKS
    from jaxmem.cli.compilers import compiling

    undecorated = False
    with (
        # Only in a terminal: in a log each step of the bar would be a new line.
        tqdm(total=len(wanted) * len(targets), unit="row", disable=None) as bar,
        compiling(len(targets)) as threads,
    ):
        for one in wanted:
            bar.set_postfix_str(one.text)
            one.trace(targets)
            undecorated |= one.undecorated
            todo = [target for target in targets if not one.is_done(rows.by_key, target)]
            bar.update(len(targets) - len(todo))
            results = [threads.submit(one.row, target, options) for target in todo]
            for result in as_completed(results):
                rows.append(result.result())
                bar.update()
            one.forget()
    if undecorated:
        say(NO_STACKS)


_SHOWN = 5


def _table(rows: list[dict[str, Any]]) -> str:
    from jaxmem._util.text import columns, size
    from jaxmem.cli.rows import KEY
    from jaxmem.show.words import seconds, signed_share

    head = ("target", "policy", "batch", "accum", "needs", "of", "fits", "recompute", "at least")
    # Empty columns are not shown.
    shown = [k for k, name in enumerate(head) if k not in (2, 3) or any(r[name] for r in rows)]

    def line(row: dict[str, Any]) -> list[str]:
        first = [str(row[name] or "") for name in head[:4]]
        if row["error"]:
            return [*first, "failed", "", "", "", ""]
        capacity, overhead = row["capacity_bytes"], row["recompute_overhead"]
        least = row["estimated_seconds"]
        return [
            *first,
            size(row["required_bytes"]),
            "unknown" if capacity is None else size(capacity),
            {True: "yes", False: "no", None: "?"}[row["fits"]],
            "" if overhead is None else signed_share(overhead),
            "" if least is None else seconds(least),
        ]

    lines = [list(head), *map(line, rows)]
    table = columns([[line[k] for k in shown] for line in lines], range(len(shown) - 5, len(shown)))
    fit = sum(row["fits"] is True for row in rows)
    unknown = sum(row["fits"] is None and not row["error"] for row in rows)
    failed = [row for row in rows if row["error"]]
    parts = [f"{fit} of {len(rows)} fit"]
    parts += [f"{unknown} of unknown capacity"] if unknown else []
    parts += [f"{len(failed)} failed"] if failed else []
    errors = [
        f"  {', '.join(str(row[name]) for name in KEY if row[name])}: {row['error']}"
        for row in failed[:_SHOWN]
    ]
    return "\n".join([table, "", ", ".join(parts), *errors])
