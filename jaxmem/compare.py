"""`compare`: several reports side by side, and which of them are worth choosing.

A report is on the Pareto front if no other of the same target and batch needs
neither more memory nor more matrix work, and less of one.
"""

import csv
import dataclasses
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.files import write_whole
from jaxmem.report import MemoryReport
from jaxmem.show import table
from jaxmem.show.blocks import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---------------------------------------------------------------- API


def compare(reports: Mapping[Any, MemoryReport]) -> "Comparison":
    """Put reports for one target side by side.

    Args:
      reports: by name, such as ``{"none": report, "sqrt": report}``; or all by pairs of
        policy and batch, such as ``{("none", 8): report, ("none", 16): report}``.

    Raises:
      TypeError: `reports` is no mapping, or a value is no report.
      ValueError: there is none, the targets are several, or only some keys are pairs.

    >>> import jax, jaxmem
    >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> step = lambda x: x + 1
    >>> given = {"kept": jaxmem.memory_report(step, x)}
    >>> given["donated"] = jaxmem.memory_report(step, x, donate_argnums=0)
    >>> jaxmem.compare(given).pareto
    ('donated',)
    """
    if not isinstance(reports, Mapping):
        raise TypeError(
            "compare takes reports by name, such as {'none': report, 'sqrt': report}, got "
            f"{type(reports).__name__}"
        )
    if not reports:
        raise ValueError("there are no reports to compare; pass {'none': report, 'sqrt': report}")
    for key, report in reports.items():
        if not isinstance(report, MemoryReport):
            raise TypeError(
                f"what stands under {key!r} is no MemoryReport but of type "
                f"{type(report).__name__}; pass what jaxmem.memory_report returns"
            )
    _check_targets(reports)
    pairs = [key for key in reports if isinstance(key, tuple) and len(key) == 2]
    if wrong := [key for key in reports if isinstance(key, tuple) and len(key) != 2]:
        raise ValueError(f"a key that is a tuple is (policy, batch), got {wrong[0]!r}")
    if pairs and len(pairs) < len(reports):
        other = next(key for key in reports if not isinstance(key, tuple))
        raise ValueError(
            f"some keys are pairs, such as {pairs[0]!r}, and some are not, such as {other!r}; "
            "make all of them (policy, batch), or none"
        )
    return Comparison(dict(reports))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Reports for one target, by name or by (policy, batch); `print` it.

    Attributes:
      reports: in the order in which they were given.
    """

    reports: dict[Any, MemoryReport] = dataclasses.field(hash=False)

    @property
    def pairs(self) -> bool:
        """Whether the keys are (policy, batch)."""
        return isinstance(next(iter(self.reports)), tuple)

    @property
    def target(self) -> str:
        return next(iter(self.reports.values())).target

    @property
    def capacity_bytes(self) -> int | None:
        return next(iter(self.reports.values())).capacity_bytes

    @property
    def pareto(self) -> tuple[Any, ...]:
        """The keys on the Pareto front of `required_bytes` against `matmul_flops`, in their order.

        Each batch has a front of its own.  A report that does not know its matrix
        work is on none.
        """
        return tuple(key for key in self.reports if self._is_on_front(key))

    def _is_on_front(self, key: Any) -> bool:
        mine = self.reports[key]
        if mine.matmul_flops is None:
            return False
        for other_key, other in self.reports.items():
            if other.matmul_flops is None or (self.pairs and other_key[1] != key[1]):
                continue
            needs = other.required_bytes - mine.required_bytes
            works = other.matmul_flops - mine.matmul_flops
            if max(needs, works) <= 0 and min(needs, works) < 0:
                return False
        return True

    # ------------------------------------------------------------ out

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row for each report; the file is there whole or not at all."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*(("policy", "batch") if self.pairs else ("name",)), *_COLUMNS, "pareto"])
        front = self.pareto
        for key, report in self.reports.items():
            cells = [getattr(report, column) for column in _COLUMNS]
            writer.writerow([*(key if self.pairs else (key,)), *cells, key in front])
        write_whole(Path(path), text.getvalue().encode())

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> "Figure":
        """Draw memory against recompute, and the Pareto front.

        Args:
          path: where to write it, as PNG or SVG by its ending; None for nowhere.
          **options: see `jaxmem.show.scatter.plot_comparison`.

        Raises:
          ImportError: matplotlib is not installed; says what to type.
          ValueError: no report knows its matrix work.
        """
        from jaxmem.show.scatter import plot_comparison

        return plot_comparison(self, path, **options)

    def heatmap(self, path: str | os.PathLike[str] | None = None, **options: Any) -> "Figure":
        """Draw policy × batch: how much of the capacity each takes, and what fits.

        Args:
          path: where to write it, as PNG or SVG by its ending; None for nowhere.
          **options: see `jaxmem.show.heatmap.plot_heatmap`.

        Raises:
          ImportError: matplotlib is not installed; says what to type.
          ValueError: the keys are not pairs.
        """
        from jaxmem.show.heatmap import plot_heatmap

        return plot_heatmap(self, path, **options)

    # ------------------------------------------------------------ looking at it

    def __str__(self) -> str:
        return plain(table.page(self))

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.reports)} reports for {self.target}>"

    def __rich__(self) -> Any:
        from jaxmem.show.text import Rendered

        return Rendered(table.page(self))

    def _repr_html_(self) -> str:
        from jaxmem.show.html import fragment

        page = table.page(self)
        return fragment(page, opened=[getattr(block, "title", "") for block in page])


# ---------------------------------------------------------------- implementation

_COLUMNS = (
    "target",
    "required_bytes",
    "capacity_bytes",
    "fits",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "host_bytes",
    "on_chip_bytes",
    "peak_bytes",
    "flops",
    "matmul_flops",
    "model_matmul_flops",
    "recompute_overhead",
    "bytes_moved",
    "estimated_seconds",
    "source",
)


def _check_targets(reports: Mapping[Any, MemoryReport]) -> None:
    targets: dict[str, Any] = {}
    for key, report in reports.items():
        targets.setdefault(report.target, key)
    if len(targets) > 1:
        listed = ", ".join(f"{target} (of {key!r})" for target, key in targets.items())
        raise ValueError(
            f"the reports are for several targets: {listed}; compare those of one target, as "
            "memory and capacity of different devices say nothing side by side"
        )
