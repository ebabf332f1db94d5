"""Numbers, shapes and names as text, shortened to the available space."""

import re

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def flops(count: float) -> str:
    """A number of floating-point operations.

    >>> flops(989e12), flops(19_000), flops(0)
    ('989 TFLOP', '19.0 kFLOP', '0 FLOP')
    """
    value, step = float(count), 0
    # A value that rounds to 1000 belongs to the next prefix.
    while abs(value) >= 999.5 and step + 1 < len(_PREFIXES):
        value, step = value / 1000, step + 1
    return f"{_three_digits(value) if step else round(value)} {_PREFIXES[step]}FLOP"


def _three_digits(value: float) -> str:
    """Three digits.

    >>> _three_digits(19.0), _three_digits(123.4)
    ('19.0', '123')
    """
    return f"{value:#.3g}".rstrip(".")


def seconds(time: float) -> str:
    """A time.

    >>> seconds(0.0123), seconds(4.56e-5), seconds(90), seconds(0)
    ('12.3 ms', '45.6 µs', '90.0 s', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if time * scale >= 0.9995:
            return f"{_three_digits(time * scale)} {unit}" if time < 999.5 else f"{time:.0f} s"
    return f"{_three_digits(time * 1e9)} ns" if time else "0 s"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent.

    >>> share(1, 3), share(1, 1000), share(0, 5)
    ('33 %', '0.1 %', '0 %')
    """
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.1g} %" if 0 < percent < 0.95 else f"{percent:.0f} %"


def signed_share(part: float) -> str:
    """A change in percent.

    >>> signed_share(1 / 3), signed_share(-0.5), signed_share(0)
    ('+33 %', '-50 %', '+0 %')
    """
    percent = round(100 * part)
    return f"{percent or 0:+d} %"


def typed(dtype: str, shape: tuple[int, ...]) -> str:
    """An array's type as the compiler writes it.

    >>> typed("bfloat16", (24, 8)), typed("f32", ())
    ('bf16[24,8]', 'f32[]')
    """
    return f"{_SHORT.get(dtype, dtype)}[{','.join(map(str, shape))}]"


def typed_change(dtype: str, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Two types of as many dimensions, in one.

    >>> typed_change("bf16", (24, 8, 1024), (24, 16, 1024))
    'bf16[24,8→16,1024]'
    """
    dims = [str(a) if a == b else f"{a}→{b}" for a, b in zip(before, after, strict=True)]
    return f"{_SHORT.get(dtype, dtype)}[{','.join(dims)}]"


_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "bool": "pred",
    **{f"int{bits}": f"s{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
}


def clean(text: str) -> str:
    """`text` in one line, without terminal control characters.

    >>> clean("a\\nb\\x1b[31m")
    'a b?[31m'
    """
    text = re.sub(r"\s+", " ", text)
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` characters, its middle omitted where it is longer.

    >>> cut("Encoder/Block_0/attention/softmax", 20)
    'Encoder/Bl…n/softmax'
    """
    if len(text) <= width:
        return text
    if width < 2:
        return text[:width]
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def cut_source(text: str, width: int) -> str:
    """The same for "file.py:12 (function)", where the line number matters more than the function.

    >>> cut_source("model.py:12 (attention)", 16)
    'model.py:12'
    """
    if len(text) > width and " (" in text:
        text = text.partition(" (")[0]
    if len(text) <= width:
        return text
    file, colon, line = text.rpartition(":")
    room = width - len(line) - 1
    return cut(file, room) + colon + line if colon and room > 3 else cut(text, width)


def cut_arrow(text: str, width: int) -> str:
    """The same for "before → after", of which both sides are kept.

    >>> cut_arrow("bf16[24,8,1024,4096] → bf16[24,16,1024,4096]", 31)
    'bf16[24…,4096] → bf16[24…,4096]'
    """
    before, arrow, after = text.partition(" → ")
    room = width - len(arrow)
    if not arrow or len(text) <= width or room < 6:
        return cut(text, width)
    first = min(len(before), max(room // 2, room - len(after)))
    return cut(before, first) + arrow + cut(after, room - first)
