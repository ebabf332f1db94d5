"""Plans: how a stack of layers is cut and what is kept, as plain data.

A plan is made for one length.  It is hashable, compared by value, written to
and read from JSON, and can be drawn.  What it costs is arithmetic on its
fields; what it does to a program is `jaxmem.remat`'s business.

>>> from jaxmem import Plan
>>> print(Plan.periodic(20, segments=4))
Plan of 20 layers: 4 segments of 5, 20 extra forward evaluations
  |....|....|....|....
  | carry kept   . recomputed
>>> Plan.from_json(Plan.revolve(1000, slots=8).to_json()).extra_forwards()
4285
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal

from jaxmem import policies
from jaxmem._util.files import Saved
from jaxmem._util.records import parsed
from jaxmem.errors import check_positive, check_segments
from jaxmem.policies import LayerPolicy
from jaxmem.solve import extra_steps, first_sweep, periodic_bytes, segment_lengths
from jaxmem.solve.periodic import evaluations

Kind = Literal["none", "full", "periodic", "revolve", "keep"]
Place = Literal["device", "host"]

_KINDS = ("none", "full", "periodic", "revolve", "keep")
_PLACES = ("device", "host")
_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Plan(Saved):
    """How the backward pass of a stack gets its values.

    Use the constructors `Plan.none`, `Plan.full`, `Plan.periodic`, `Plan.revolve`; `Plan.cut` and
    `Plan.keep` are those that `jaxmem.fit` uses.  They check what they are given.

    Attributes:
      length: number of layers, 0 or more.
      kind: "none" keeps all residuals; "full" keeps all carries; "periodic" keeps
        the carries at the cuts; "revolve" keeps `slots` carries; "keep" keeps single
        values of each layer.
      lengths: for "periodic", the segment length at each level, outermost first.
      slots: for "revolve", the number of carries, the initial state counted in.
      layer: for "full", what each layer keeps in addition to its carry; for "periodic", what each
        keeps of its residuals while its segment is reversed.
      carries: for "full", where the carries are kept.
      runs: for "keep", pairs of a number of layers and what each of them keeps, first to
        last; None for all that its backward reads.

    >>> from jaxmem import Plan
    >>> plan = Plan.periodic(12, segments=3)
    >>> plan.lengths, plan.extra_forwards(), plan.bytes(carry_bytes=10, residual_bytes=100)
    ((4,), 12, 430)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    length: int
    kind: Kind = "none"
    lengths: tuple[int, ...] = ()
    slots: int = 0
    layer: LayerPolicy = policies.Full()  # noqa: RUF009 (it is frozen)
    carries: Place = "device"
    runs: tuple[tuple[int, policies.Keep | None], ...] = ()

    # ------------------------------------------------------------ making one

    @classmethod
    def none(cls, n: int) -> "Plan":
        """Keep everything: no recomputation."""
        return cls(_length(n))

    @classmethod
    def full(cls, n: int, layer: LayerPolicy | None = None, carries: Place = "device") -> "Plan":
        """Keep each carry (on the device or the "host") and in each layer what `layer` keeps."""
        return cls(_length(n), "full", layer=layer or policies.Full(), carries=carries)

    @classmethod
    def periodic(
        cls, n: int, segments: int | Sequence[int] | None = None, levels: int = 1
    ) -> "Plan":
        """Keep the carries between segments; recompute a segment for its backward pass.

        Args:
          n: number of layers.
          segments: how many segments at most (several numbers: for each level).
            Where the number does not divide the length, the last one is shorter.
            None cuts as if carry and residuals were of equal size, sqrt(n) about.
          levels: how many times segments are cut again.  Levels for which
            `segments` gives no number are cut as None would.

        Raises:
          ValueError: n < 0, segments < 1, levels < 1, no number or more than levels.
        """
        n, given = _length(n), check_segments(segments, levels)
        # Each level halves the segments at least; more of them would cut single layers.
        levels = max(min(levels, n.bit_length()), len(given))
        lengths, outer = [], n
        for number in given:
            outer = -(-outer // min(number, outer)) if outer else 0
            lengths.append(outer)
        if len(given) < levels:
            lengths += segment_lengths(outer, levels - len(given))
        return cls.cut(n, lengths)

    @classmethod
    def keep(cls, runs: Sequence[tuple[int, policies.Keep | None]]) -> "Plan":
        """Keep single values of each layer: pairs of a number of layers and what these keep.

        Neighbours that keep the same are one run.
        """
        merged: list[tuple[int, policies.Keep | None]] = []
        for count, keep in runs:
            if merged and merged[-1][1] == keep:
                count += merged.pop()[0]
            if count:
                merged.append((count, keep))
        n = sum(count for count, _ in merged)
        if all(keep is None for _, keep in merged):
            return cls.none(n)
        return cls(n, "keep", runs=tuple(merged))

    @classmethod
    def cut(cls, n: int, lengths: Sequence[int], layer: policies.Keep | None = None) -> "Plan":
        """The periodic plan of these segment lengths, in its simplest equivalent form.

        No cut keeps everything; segments of one layer at the first level are
        the plan `full`.
        """
        n = _length(n)
        if layer is not None:
            return cls(n, "periodic", lengths=tuple(lengths), layer=layer)
        if n == 0 or not lengths:
            return cls.none(n)
        if tuple(lengths) == (1,) * len(lengths):
            return cls.full(n)
        return cls(n, "periodic", lengths=tuple(lengths))

    @classmethod
    def revolve(cls, n: int, slots: int = 8) -> "Plan":
        """Keep `slots` carries, placed anew as the backward pass goes (Griewank & Walther 2000).

        Raises:
          ValueError: n < 0 or slots < 1.
        """
        slots = check_positive("slots", slots)
        return cls(_length(n), "revolve", slots=slots)

    def __post_init__(self) -> None:
        if problem := _fault(self):
            key, text = problem
            raise ValueError(f"bad plan: {key}: {text}")

    # ------------------------------------------------------------ what it costs

    def extra_forwards(self) -> int:
        """Layer evaluations beyond the first forward pass, in one value_and_grad.

        A layer that a policy recomputes in part counts as one.
        """
        if self.kind == "full":
            return self.length
        if self.kind == "periodic":
            return evaluations(self.length, self.lengths)
        if self.kind == "revolve":
            return extra_steps(self.length, self.slots)
        return sum(count for count, keep in self.runs if keep is not None)

    def bytes(self, carry_bytes: int, residual_bytes: int) -> int:
        """Predicted bytes kept on the device at the peak.

        Args:
          carry_bytes: of one layer's carry.
          residual_bytes: of one layer's residuals.
        """
        n = self.length
        if self.kind == "full":
            return (n * carry_bytes if self.carries == "device" else 0) + residual_bytes
        if self.kind == "revolve":
            return min(self.slots, n) * carry_bytes + (residual_bytes if n else 0)
        if self.kind == "keep":
            return sum(
                count * (keep.bytes if keep else residual_bytes) for count, keep in self.runs
            )
        if isinstance(self.layer, policies.Keep):
            residual_bytes = self.layer.bytes
        return periodic_bytes(n, self.lengths, carry_bytes, residual_bytes)

    # ------------------------------------------------------------ in and out

    def to_json(self) -> str:
        """The plan as JSON text.

        Raises:
          ValueError: `layer` wraps a function, which JSON cannot hold.
        """
        data: dict[str, Any] = {"jaxmem_plan": 1, "length": self.length, "kind": self.kind}
        if self.kind == "periodic":
            data["lengths"] = list(self.lengths)
        if self.kind == "revolve":
            data["slots"] = self.slots
        if self.kind == "keep":
            data["runs"] = [[count, keep and keep.to_json()] for count, keep in self.runs]
        if self.kind == "full" or self.layer != policies.Full():
            data["layer"] = self.layer.to_json()
        if self.kind == "full":
            data["carries"] = self.carries
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
          ValueError: the text is no such plan; the message says where.
        """
        data = parsed(text, "plan")
        if not isinstance(data, dict):
            raise ValueError(f"bad plan: expected an object, got {_short(data)}")
        if data.pop("jaxmem_plan", None) != 1:
            raise ValueError("bad plan: jaxmem_plan: expected 1, the version; is this a plan?")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(
                f"bad plan: {unknown[0]}: unknown key; known are {', '.join(sorted(known))}"
            )
        if "length" not in data or "kind" not in data:
            raise ValueError('bad plan: "length" and "kind" are required')
        if "layer" in data:
            try:
                data["layer"] = policies.from_json(data["layer"])
            except (ValueError, TypeError) as error:
                raise ValueError(f"bad plan: layer: {error}") from None
        if isinstance(data.get("lengths"), list):
            data["lengths"] = tuple(data["lengths"])
        if "runs" in data:
            data["runs"] = _runs(data["runs"])
        return cls(**data)

    # ------------------------------------------------------------ looking at it

    def __str__(self) -> str:
        n = self.length
        extra = self.extra_forwards()
        if self.kind == "keep" and extra:
            cost = f"{_layers(extra)} {'is' if extra == 1 else 'are'} recomputed in part"
        else:
            cost = f"{extra} extra forward evaluation{'' if extra == 1 else 's'}"
        head = f"Plan of {_layers(n)}: {self._words()}, {cost}"
        if n == 0:
            return head
        drawing = "".join(self._mark(layer) for layer in range(min(n, _WIDTH)))
        rest = f" … {n - _WIDTH} more" if n > _WIDTH else ""
        return f"{head}\n  {drawing}{rest}\n  {self._legend(drawing)}"

    def _words(self) -> str:
        if self.kind == "full":
            kept = "carries kept" if self.carries == "device" else "carries kept on the host"
            return kept if self.layer == policies.Full() else f"{kept} and {self.layer}"
        if self.kind == "periodic":
            words, outer = [], self.length
            for inner in self.lengths:
                count, rest = divmod(outer, inner)
                text = f"{count} segment{'' if count == 1 else 's'} of {inner}"
                words.append(text + (f" and one of {rest}" if rest else ""))
                outer = inner
            kept = "" if self.layer == policies.Full() else f", whose layers keep {self.layer} each"
            return ", each in ".join(words) + kept
        if self.kind == "keep":
            return ", then ".join(itertools.starmap(_keeps, self.runs))
        if self.kind == "revolve":
            slots = min(self.slots, max(self.length, 1))
            return f"{slots} {'carry' if slots == 1 else 'carries'}, optimal schedule"
        return "everything kept"

    def _mark(self, layer: int) -> str:
        if self.kind == "none":
            return "="
        if self.kind == "full":
            return "|" if self.carries == "device" else "^"
        if self.kind == "revolve":
            return "|" if layer in first_sweep(self.length, self.slots) else "."
        if self.kind == "keep":
            each = (keep for count, keep in self.runs for _ in range(count))
            return "=" if next(itertools.islice(each, layer, None)) is None else "+"
        place, marks = layer, "|:"
        for level, inner in enumerate(self.lengths):
            place %= inner
            if place == 0:
                return marks[min(level, 1)]
        return "."

    def _legend(self, drawing: str) -> str:
        meaning = {
            "=": "everything kept",
            "|": "carry kept",
            "^": "carry kept on the host",
            ":": "carry kept while its segment is reversed",
            ".": "recomputed",
            "+": "some values kept, the others recomputed",
        }
        return "   ".join(f"{mark} {text}" for mark, text in meaning.items() if mark in drawing)


# ---------------------------------------------------------------- implementation


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _keeps(count: int, keep: policies.Keep | None) -> str:
    each = "everything" if keep is None else f"{keep} each" if count > 1 else str(keep)
    return f"{_layers(count)} {'keeps' if count == 1 else 'keep'} {each}"


def _length(n: Any) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"n, the number of layers, must be a whole number, got {n!r}")
    if n < 0:
        raise ValueError(f"n, the number of layers, must be at least 0, got {n}")
    return n.__index__()


def _fault(plan: Plan) -> tuple[str, str] | None:
    """What is wrong with a plan's fields: the key and the reason."""
    if not _whole(plan.length) or plan.length < 0:
        return "length", f"expected a whole number of at least 0, got {_short(plan.length)}"
    if plan.kind not in _KINDS:
        return "kind", f"expected one of {', '.join(_KINDS)}, got {_short(plan.kind)}"
    if not isinstance(plan.lengths, tuple):
        return "lengths", f"expected a list of whole numbers, got {_short(plan.lengths)}"
    outer = plan.length
    for level, inner in enumerate(plan.lengths):
        key = f"lengths[{level}]"
        if not _whole(inner) or inner < 1:
            return key, f"expected a whole number of at least 1, got {_short(inner)}"
        if inner > outer:
            return key, f"{inner} is longer than the {outer} layers that it cuts"
        outer = inner
    if plan.kind == "periodic" and not plan.lengths:
        return "lengths", "a periodic plan needs at least one"
    if plan.kind != "periodic" and plan.lengths:
        return "lengths", f"a plan of kind {plan.kind!r} has none"
    if not _whole(plan.slots) or (plan.kind == "revolve" and plan.slots < 1):
        return "slots", f"expected a whole number of at least 1, got {_short(plan.slots)}"
    if plan.kind != "revolve" and plan.slots:
        return "slots", f"a plan of kind {plan.kind!r} has none"
    if not isinstance(plan.layer, LayerPolicy):
        return "layer", f"expected a policy for one layer (full, dots, names …), got {plan.layer!r}"
    if plan.kind == "periodic" and isinstance(plan.layer, policies.Keep):
        pass  # of the residuals of a segment
    elif plan.kind != "full" and plan.layer != policies.Full():
        return "layer", f"only a plan of kind 'full' has one, and this one is {plan.kind!r}"
    if plan.carries not in _PLACES:
        return "carries", f"expected one of {', '.join(_PLACES)}, got {_short(plan.carries)}"
    if plan.kind != "full" and plan.carries != "device":
        return "carries", "only a plan of kind 'full' can keep them elsewhere than on the device"
    if (plan.kind == "keep") != bool(plan.runs):
        return "runs", f"a plan of kind {plan.kind!r} has {'some' if not plan.runs else 'none'}"
    for place, (count, keep) in enumerate(plan.runs):
        if not _whole(count) or count < 1 or not isinstance(keep, policies.Keep | None):
            return (
                f"runs[{place}]",
                f"expected (layers, what they keep), got {_short((count, keep))}",
            )
    if plan.runs and (total := sum(count for count, _ in plan.runs)) != plan.length:
        return "runs", f"they are for {total} layers, and the plan for {plan.length}"
    return None


def _runs(data: Any) -> tuple[tuple[int, policies.Keep | None], ...]:
    runs = []
    for place, item in enumerate(data if isinstance(data, list) else [data]):
        try:
            count, keep = item
            runs.append((count, None if keep is None else policies.from_json(keep)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"bad plan: runs[{place}]: {error}") from None
    return tuple(runs)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
