"""The table that experiments go on with where they were stopped."""

import dataclasses
from pathlib import Path

import jax
import pytest

from common.table import Record, Table, markdown, read, versions


@dataclasses.dataclass(frozen=True)
class Row(Record):
    name: str
    size: int | None
    share: float = 0.5
    fits: bool = True


def table(path: Path) -> Table[Row]:
    return Table(path, Row, ("name", "size"))


def test_rows_come_back_as_they_were(tmp_path: Path):
    path = tmp_path / "new" / "rows.csv"
    rows = [
        Row("a, b", 3, 0.1 + 0.2, False, versions="one"),
        Row("c", None, versions="one", date="2020-01-02"),
    ]
    assert read(path, Row) == []
    table(path).add(*rows)
    assert path.read_text().splitlines()[0] == "name,size,share,fits,versions,date"
    again = table(path)
    assert again.of("one") == rows == read(path, Row)
    assert again.of("one", fits=False) == rows[:1]
    assert again.find("one", name="c", size=None) == rows[1]
    assert again.find("one", name="c", size=0) is None


def test_rows_of_other_versions_are_made_anew_in_their_place(tmp_path: Path):
    rows = table(tmp_path / "rows.csv")
    rows.add(Row("a", 1, versions="one"), Row("b", 1, versions="one"))
    assert rows.find("two", name="a", size=1) is None
    rows.add(Row("a", 1, 0.25, versions="two"))
    assert [row.share for row in table(rows.path).of("two")] == [0.25]
    assert [row.name for row in rows.of("one")] == ["b"]
    rows.drop(rows.of("one"))
    assert [row.versions for row in read(rows.path, Row)] == ["two"]


def test_a_file_of_other_columns_is_not_written_over(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("name,sizes\n")
    with pytest.raises(ValueError, match="rows.csv has other columns than this experiment writes"):
        table(path)
    assert path.read_text() == "name,sizes\n"


def test_versions_are_of_what_decides():
    assert f"jax {jax.__version__}" in versions("local")
    assert "equinox" in versions("local", "equinox")
    compiler = versions("h100-80g")
    assert "jax" in compiler
    assert compiler != versions("v5e-16g")


def test_a_markdown_table():
    assert markdown([["name", "MB"], ["none", "12"], ["full", "3"]]) == (
        "| name | MB |\n|------|---:|\n| none | 12 |\n| full |  3 |"
    )
