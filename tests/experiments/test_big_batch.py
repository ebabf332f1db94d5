"""The largest batch and model: the search, what is said of the rows, and the script itself."""

import dataclasses
import itertools
from pathlib import Path

import big_batch
import pytest
from big_batch import Options
from hypothesis import given, settings
from hypothesis import strategies as st

from common.table import read
from side import sizes
from side.largest import following, largest, rounded
from side.sizes import ALL, BATCH, FIT, MODEL, PARTS, PLAIN, REMAT, Row

# ---------------------------------------------------------------- the search


@settings(derandomize=True)
@given(
    fixed=st.integers(0, 10**10),
    slope=st.integers(1, 10**9),
    bend=st.floats(0.0, 1e-4),
    room=st.floats(0.5, 5000.0),
    start=st.integers(1, 3000),
    predicted=st.floats(0.0, 1.5),
)
def test_the_largest_size_fits_and_the_next_was_seen_not_to(
    fixed: int, slope: int, bend: float, room: float, start: int, predicted: float
):
    asked: dict[int, int] = {}

    def needs(size: int) -> int:
        assert size not in asked
        asked[size] = fixed + slope * size + int(bend * slope * size**2)
        return asked[size]

    capacity = fixed + int(slope * room)
    found = largest(needs, capacity, start, int(predicted * fixed))
    assert asked[following(found)] > capacity
    assert found == 0 or asked[found] <= capacity
    assert len(asked) <= 10


def test_where_memory_is_linear_few_sizes_are_asked_for():
    for room in range(1, 2000, 37):
        asked = []

        def needs(size: int, asked: list[int] = asked) -> int:
            asked.append(size)
            return 1000 + 50 * size

        largest(needs, 1000 + 50 * room, 8, 1000)
        assert len(asked) <= 4


def test_sizes_have_five_significant_bits():
    every = [0]
    while every[-1] < 5000:
        every.append(following(every[-1]))
    assert all(rounded(size) == size for size in every)
    assert [rounded(size) for size in range(1, 200)] == [
        max(one for one in every if one <= size) for size in range(1, 200)
    ]
    assert all(b / a <= 1 + 1 / 16 for a, b in itertools.pairwise(every[16:]))


# ---------------------------------------------------------------- what is said


def row(question: str, way: str, size: int, microbatches: int = 1, work: float = 0.0) -> Row:
    batch = question == BATCH
    return Row(
        "h100-80g",
        question,
        way,
        "width=8 length=8",
        24 if batch else size,
        size if batch else 64,
        microbatches,
        FIT if way == ALL else "none",
        80,
        70,
        30,
        12_000_000 * (24 if batch else size),
        round(1000 * (1 + work)),
        1000,
        versions="1",
    )


ROWS = [
    row(BATCH, PLAIN, 16),
    row(BATCH, REMAT, 320, work=0.25),
    row(BATCH, PARTS, 1024, 128),
    row(MODEL, PLAIN, 5),
    row(MODEL, ALL, 400, 16, 0.1),
]


def test_the_message_and_the_table_are_of_the_rows(tmp_path: Path):
    assert sizes.message(ROWS) == (
        "h100-80g: 20 × as many sequences by remat (+25 % FLOPs), "
        "80 × as many layers by all together (+10 % FLOPs)"
    )
    text = sizes.summary(ROWS)
    assert "any (1024 compiled) |   8 sequences" in text
    assert "400 layers, 4.8 B parameters |   4 sequences" in text
    assert sizes.message(ROWS[1:3]) == "h100-80g: too little fits to compare"
    none = dataclasses.replace(ROWS[0], sequences=1, required_bytes=90)
    assert (none.largest, ROWS[0].largest) == (0, 16)
    assert "by remat" not in sizes.message([none, *ROWS[1:]])
    assert "nothing fits, not even 1" in sizes.summary([none])
    other = [dataclasses.replace(row, target="v5e-16g") for row in ROWS[:2]]
    for rows in (ROWS, ROWS[:1], [none], [*ROWS, *other]):
        sizes.draw(rows, tmp_path / "rows.png")
        assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- the script


@pytest.mark.slow
def test_the_smallest_form_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = Options(small=True, results=tmp_path)
    plain, every = big_batch.main(options)
    assert (plain.way, every.way) == (PLAIN, ALL)
    assert every.layers > 4 * plain.layers
    assert every.policy == FIT
    compiled = read(tmp_path / "big_batch.csv", Row)
    for found, policy in ((plain, "none"), (every, "full")):
        own = {one.layers: one for one in compiled if (one.way, one.policy) == (found.way, policy)}
        assert own[found.layers].fits
        assert not own[following(found.layers)].fits
    assert every.fits
    assert sizes.message([plain, every]) in capsys.readouterr().out
    before = (tmp_path / "big_batch.csv").stat().st_mtime_ns
    assert (tmp_path / "big_batch.png").read_bytes().startswith(b"\x89PNG")
    assert big_batch.main(options) == [plain, every]
    assert (tmp_path / "big_batch.csv").stat().st_mtime_ns == before


@pytest.mark.slow  # the second question of the form above
def test_batches_of_the_smallest_form(tmp_path: Path):
    """With everything kept a batch needs more than cut into parts, of any size."""
    options = dataclasses.replace(
        Options(small=True, results=tmp_path).sized(),
        questions=(BATCH,),
        ways=(PLAIN, PARTS),
        small=False,
    )
    plain, parts = big_batch.main(options)
    assert parts.sequences > plain.sequences
    assert parts.unbounded
    assert parts.at_once <= plain.sequences
    assert plain.fits
    assert parts.fits
    assert parts.work == plain.work == 0
