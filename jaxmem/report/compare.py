"""`compare`: several reports side by side, and which of them are on the Pareto front.

A report is on the front if no other of the same target and batch needs less of memory or
matmul FLOPs and no more of the other.
"""

import csv
import dataclasses
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem._util.files import write_whole
from jaxmem._util.shown import Shown, picture
from jaxmem.report.report import MemoryReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---------------------------------------------------------------- API


def compare(reports: Mapping[Any, MemoryReport]) -> "Comparison":
    """Compare reports for one target.

    Args:
      reports: by name, such as ``{"none": report, "sqrt": report}``; or all by (policy,
        batch), such as ``{("none", 8): report, ("none", 16): report}``.

    Raises:
      TypeError: `reports` is not a mapping, or a value is not a report.
      ValueError: it is empty, the targets differ, or only some keys are pairs.

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
                f"the value of {key!r} is of type {type(report).__name__}, not a MemoryReport; "
                "pass what jaxmem.memory_report returns"
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
class Comparison(Shown):
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
        """The keys on the Pareto front of `required_bytes` and `matmul_flops`, in their order.

        Each batch has a separate front.  A report whose matmul FLOPs are unknown is on
        none.
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
        """Write one row per report; the file is replaced atomically."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*(("policy", "batch") if self.pairs else ("name",)), *_COLUMNS, "pareto"])
        front = self.pareto
        for key, report in self.reports.items():
            cells = [getattr(report, column) for column in _COLUMNS]
            writer.writerow([*(key if self.pairs else (key,)), *cells, key in front])
        write_whole(Path(path), text.getvalue().encode())

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> "Figure":
        """Draw memory against recomputation, and the Pareto front.

        Args:
          path: where to write it, as PNG or SVG by its suffix; None to not write it.
          **options: see `jaxmem.show.scatter.plot_comparison`.

        Raises:
          ImportError: matplotlib is not installed; the message says how to install it.
          ValueError: the matmul FLOPs of no report are known.
        """
        return picture(self, "plot", path, options)

    def heatmap(self, path: str | os.PathLike[str] | None = None, **options: Any) -> "Figure":
        """Draw policy × batch: the share of the capacity that each needs, and what fits.

        Args:
          path: where to write it, as PNG or SVG by its suffix; None to not write it.
          **options: see `jaxmem.show.heatmap.plot_heatmap`.

        Raises:
          ImportError: matplotlib is not installed; the message says how to install it.
          ValueError: the keys are not pairs.
        """
        return picture(self, "heatmap", path, options)

    # ------------------------------------------------------------ display

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.reports)} reports for {self.target}>"


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
            "memory and capacity of different devices are not comparable"
        )
