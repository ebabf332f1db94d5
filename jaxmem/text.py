"""How numbers look in a terminal: sizes in KiB, MiB, GiB, and aligned columns."""

from collections.abc import Sequence

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """A number of bytes for people.

    >>> size(0), size(1536), size(40 * 2**30)
    ('0 B', '1.5 KiB', '40.0 GiB')
    """
    if abs(count) < 1024:
        return f"{count} B"
    value, unit = count / 1024, 0
    # What would be rounded to 1024.0 belongs to the next unit.
    while abs(value) >= 1023.95 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> str:
    """The rows as text with aligned columns; those numbered in `right` stand on the right.

    >>> print(columns([["a", "1 B"], ["bcd", "10 B"]], right=[1]))
      a     1 B
      bcd  10 B
    """
    if not rows:
        return ""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if k in right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)
