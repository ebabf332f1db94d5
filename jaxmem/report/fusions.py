"""Lints about what is not fused: calls between elementwise operations, layout copies, conversions.

Small shares of the traffic are not worth a reader's time; `report.fusions.unfused` has them.
"""

from collections.abc import Iterator

from jaxmem._util.text import size
from jaxmem.compile.compiling import Compiled
from jaxmem.compile.program import Program
from jaxmem.estimate.costs import Costs
from jaxmem.hlo.unfused import Unfused
from jaxmem.report.report import Lint

# Of all that is read and written in device memory, and in bytes of one call.
_SHARE = 0.05
_LEAST = 2**20
_MOST = 3

# ---------------------------------------------------------------- API


def broken_chains(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    """A hand-written kernel, or a library's call, between elementwise operations."""
    for one, moved in _large(compiled, "custom call"):
        yield Lint(
            "chain-broken",
            f"{one.name}{_at(one)} is a kernel of its own between elementwise operations, "
            f"{one.before} before it and {one.after} after it: what passes between them is "
            f"written and read again, {moved}",
            "do these operations inside of the kernel; or, if the kernel is elementwise too, write "
            "it in jax.numpy, so that the compiler fuses all of them",
        )


def layout_copies(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    """An array that is copied into another order of its dimensions in memory."""
    for one, moved in _large(compiled, "layout copy"):
        array = f"{one.dtype}[{','.join(map(str, one.shape))}]"
        value = _value(program, compiled, one)
        if one.asked_for:
            yield Lint(
                "layout-copy",
                f"{one.name}{_at(one)} is a kernel of its own that only reorders {array}"
                + (f" of {value}" if value else "")
                + f": {moved}",
                "choose the order of dimensions that its consumer reads, or leave transposing to "
                "it: a product takes any order, by its dimension numbers or jnp.einsum",
            )
        else:
            yield Lint(
                "layout-copy",
                f"the compiler copies {value or 'a value'}, {array}, into another layout"
                f"{_at(one)}: {moved}",
                "give what reads it the order of dimensions that it wants: channels last (NHWC) "
                "for a convolution, last the dimension that is sorted, scanned or reduced",
            )


def written_conversions(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    """A conversion to another type that is written to memory, not fused with what reads it."""
    for one, moved in _large(compiled, "convert"):
        value = _value(program, compiled, one) or "a value"
        types = f"from {one.from_dtype} to {one.dtype}[{','.join(map(str, one.shape))}]{_at(one)}"
        remedy = (
            "convert where the value is made, or keep it in that type between calls; of a stack of "
            "layers convert one layer's slice inside of the loop"
        )
        if one.asked_for:
            yield Lint(
                "conversion-written",
                f"the conversion of {value} {types} is a kernel of its own, whose result is "
                f"written to memory: {moved}",
                remedy,
            )
        else:
            yield Lint(
                "conversion-written",
                f"the compiler converts {value} {types}, in which it computes, by a kernel of its "
                f"own: {moved}",
                f"{remedy}; or ask for the type that it has with precision=",
            )


# ---------------------------------------------------------------- implementation


def _large(compiled: Compiled, kind: str) -> Iterator[tuple[Unfused, str]]:
    """The heaviest of a kind, if they are heavy, and the bytes in words."""
    analysis = compiled.analysis
    found = None if analysis is None else analysis.fusions
    if found is None or compiled.platform == "cpu":  # whose fusion is not that of accelerators
        return
    least = max(_SHARE * found.bytes, _LEAST)
    heavy = [one for one in found.unfused if one.kind == kind and one.total_bytes > least]
    for one in heavy[:_MOST]:
        times = f"{one.times} × {size(one.bytes)}, " if one.times > 1 else ""
        yield (
            one,
            f"{times}{one.total_bytes / found.bytes:.0%} of the {size(found.bytes)} that "
            "one call reads and writes"
            if times
            else f"{size(one.bytes)} of the {size(found.bytes)} that one call reads and writes",
        )


def _value(program: Program, compiled: Compiled, one: Unfused) -> str:
    name = one.value
    if one.parameter is not None and one.parameter < len(compiled.kept):
        name = program.arguments[compiled.kept[one.parameter]].name
    return f"{name} and {one.others} more" if name and one.others else name


def _at(one: Unfused) -> str:
    return f" ({one.source})" if one.source else ""
