"""Numbers as text: sizes, times, changes in per cent, and aligned columns."""

import numbers
import re
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
    # A value that rounds to 1024.0 belongs to the next unit.
    while abs(value) >= 1023.95 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time for people, to three digits.

    >>> duration(1234.5), duration(0.9999), duration(0.00249), duration(3e-9)
    ('1234 s', '1 s', '2.49 ms', '3 ns')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        # A value that rounds to 1000 belongs to the next unit.
        if seconds >= 0.9995 * scale:
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def change(share: float) -> str:
    """A relative change in per cent; one that rounds to zero has no sign.

    >>> change(0.123), change(-0.05), change(-0.0002)
    ('+12.3%', '-5.0%', '0.0%')
    """
    text = f"{share:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def parse_size(text: "str | int | float", what: str = "") -> int:
    """Bytes from a number of them or from text such as "40GiB", "15.75 GiB", "500MB".

    Args:
      text: the size.
      what: its name, to begin error messages with.

    Raises:
      ValueError: it is not a size; TypeError: neither text nor number.

    >>> parse_size("40GiB") == 40 * 2**30, parse_size("1.5 kB"), parse_size(1024)
    (True, 1500, 1024)
    """
    named = f"{what}: " if what else ""
    if isinstance(text, numbers.Real) and not isinstance(text, bool):
        number, unit = float(text), 1
    elif isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)\s*", text)
        known = None if match is None else _SIZES.get(match[2].casefold())
        if match is None or known is None:
            raise ValueError(
                f"{named}{text!r} is not a memory size; write a number of bytes or a text such as "
                '"40GiB", "15.75 GiB" or "500MB"'
            )
        number, unit = float(match[1]), known
    else:
        raise TypeError(
            f'{named}a size is a number of bytes or a text such as "40GiB", got an object of type '
            f"{type(text).__name__}"
        )
    if not 0 < number < float("inf"):
        raise ValueError(f"{named}a size must be positive and finite, got {text!r}")
    if number * unit < 1024:
        raise ValueError(
            f'{named}{text!r} is less than a KiB; is a unit missing, as in "{text}GiB"?'
        )
    return int(number * unit)


_SIZES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> str:
    """The rows as text with aligned columns; those numbered in `right` are right-aligned.

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


def arrow(before: int, after: int) -> str:
    """Two sizes, with a common unit written once, and one size where both read the same.

    >>> arrow(41 * 2**30, 38 * 2**30), arrow(2**20, 2**30), arrow(2**30, 2**30 + 1)
    ('41.0 → 38.0 GiB', '1.0 MiB → 1.0 GiB', '1.0 GiB')
    """
    first, second = size(before), size(after)
    if first == second:
        return first
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(f' {unit}') else first} → {second}"
