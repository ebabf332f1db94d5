"""What the rules of the estimate are worth: what is asked, and what is said of it."""

import csv
import dataclasses
from pathlib import Path

import ablation
import pytest
from ablation import ALL, Options, Row

import jaxmem
from jaxmem.estimate import compiler


def row(rule: str, place: int, flops: int | None, compiles: int = 2, off: float = 0.1) -> Row:
    found = Row(rule, "v5e-16g", "net", place, 1000, 6, changed=rule != ALL, versions="1")
    if flops is None:
        return found
    predicted = round(100 * (1 + off))
    return dataclasses.replace(
        found,
        compiles=compiles,
        required=900,
        temporaries=100,
        predicted=predicted,
        matmul_flops=flops,
    )


def test_changes_are_counted_against_all_rules() -> None:
    rows = [
        *(row(ALL, place, 1000) for place in range(4)),
        row(ALL, 4, None, compiles=6),
        row("this", 0, 1001),
        row("this", 1, 1010, compiles=4, off=-0.5),
        row("this", 2, 990),
        row("this", 3, None),
        row("this", 4, None),
        row("that", 0, None),
    ]
    heading, _, *lines = ablation.summary(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (heading, *lines)]
    assert dict(zip(cells[0], cells[1], strict=True)) == {
        "without": ALL, "changed": "0", "budgets": "4", "worse": "0", "better": "0",
        "lost": "+0.00%", "compiles": "14", "off": "10.0%", "at most": "10.0%",
    }  # fmt: skip
    assert dict(zip(cells[0], cells[2], strict=True)) == {
        "without": "this", "changed": "1", "budgets": "4, 1 not met", "worse": "1",
        "better": "1", "lost": "+0.03%", "compiles": "+6", "off": "10.0%", "at most": "50.0%",
    }  # fmt: skip
    assert cells[3][2:] == ["1, 1 not met", "0", "0", "", "+4", "", ""]


def test_every_rule_of_a_target_is_asked_about() -> None:
    assert set(ablation.rules_of("h100-80g")) & {"calls_libraries", "fuses_operands"} == {
        "calls_libraries"
    }
    both = {*ablation.rules_of("h100-80g"), *ablation.rules_of("v5e-16g")}
    fields = dataclasses.fields(compiler.Compiler)
    assert both == {field.name for field in fields if isinstance(field.default, bool)}


@pytest.mark.slow  # the experiment itself
def test_without_a_rule_the_same_program_is_predicted_otherwise(tmp_path: Path) -> None:
    with (ablation.RESULTS / "fit_models.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = "matrix_chain", "h100-80g", "7"
    known = next(row for row in rows if (row["model"], row["target"], row["place"]) == wanted)
    with (tmp_path / "fit_models.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(known))
        writer.writeheader()
        writer.writerow(known)
    options = Options(
        targets=("h100-80g",),
        models=("matrix_chain",),
        places=(7,),
        nets=(),
        rules=("writes_in_place", "calls_libraries"),
        results=tmp_path,
    )
    whole, less, same = ablation.main(options)
    assert (whole.rule, less.rule, same.rule) == (ALL, "writes_in_place", "calls_libraries")
    assert less.changed
    assert same == dataclasses.replace(whole, rule="calls_libraries"), (
        "nothing in it is a library's"
    )
    assert whole.required is not None
    assert whole.required <= whole.budget == less.budget
    assert whole.off is not None
    assert less.off is not None
    assert abs(whole.off) < 0.01 < less.off, "what is not written over stays"
    assert compiler.of_platform("gpu") is compiler.GPU, "and nothing of it stays"
    assert ablation.main(options) == [whole, less, same]
    assert jaxmem.target("h100-80g").platform == "gpu"
