"""Plans: how a stack of layers is cut and what is kept, as plain data.

A plan is made for one length.  It is hashable, compared by value, written to
and read from JSON, and can be drawn.  What it costs is arithmetic on its
fields; what it does to a program is `jaxmem.remat`'s business.

>>> from jaxmem import Plan
>>> print(Plan.periodic(20, segments=4))
Plan of 20 layers: 4 segments of 5, 20 extra forward evaluations
  |....|....|....|....
  | carry kept   . computed again
>>> Plan.from_json(Plan.revolve(1000, slots=8).to_json()).extra_forwards()
4285
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jaxmem import policies
from jaxmem.errors import check_positive, check_segments
from jaxmem.policies import LayerPolicy
from jaxmem.solve import extra_steps, first_sweep, periodic_bytes, segment_lengths

Kind = Literal["none", "full", "periodic", "revolve"]
Place = Literal["device", "host"]

_KINDS = ("none", "full", "periodic", "revolve")
_PLACES = ("device", "host")
_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the backward pass of a stack gets its values.

    Use the constructors `Plan.none`, `Plan.full`, `Plan.periodic`,
    `Plan.revolve`; they check what they are given.

    Attributes:
      length: number of layers, 0 or more.
      kind: "none" keeps all tapes; "full" keeps all carries; "periodic" keeps
        the carries at the cuts; "revolve" keeps `slots` carries.
      lengths: for "periodic", the segment length at each level, outermost first.
      slots: for "revolve", the number of carries, the initial state counted in.
      layer: for "full", what each layer keeps besides its carry.
      carries: for "full", where the carries are kept.
    """

    length: int
    kind: Kind = "none"
    lengths: tuple[int, ...] = ()
    slots: int = 0
    layer: LayerPolicy = policies.Full()  # noqa: RUF009 (it is frozen)
    carries: Place = "device"

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
        """Keep the carries between segments; compute a segment again for its backward.

        Args:
          n: number of layers.
          segments: how many segments at most (several numbers: for each level).
            Where the number does not divide the length, the last one is shorter.
            None cuts as if carry and tape were of equal size, sqrt(n) about.
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
    def cut(cls, n: int, lengths: Sequence[int]) -> "Plan":
        """The periodic plan of these segment lengths, in its simplest equivalent form.

        No cut keeps everything; segments of one layer at the first level are
        the plan `full`.
        """
        n = _length(n)
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

        A layer that a policy computes again in part counts as one.
        """
        if self.kind == "full":
            return self.length
        if self.kind == "periodic":
            return _periodic_extra(self.length, self.lengths)
        if self.kind == "revolve":
            return extra_steps(self.length, self.slots)
        return 0

    def bytes(self, carry_bytes: int, tape_bytes: int) -> int:
        """Predicted bytes kept on the device at the worst moment, for layers of these sizes."""
        n = self.length
        if self.kind == "full":
            return (n * carry_bytes if self.carries == "device" else 0) + tape_bytes
        if self.kind == "revolve":
            return min(self.slots, n) * carry_bytes + (tape_bytes if n else 0)
        return periodic_bytes(n, self.lengths, carry_bytes, tape_bytes)

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
        if self.kind == "full":
            data["layer"] = self.layer.to_json()
            data["carries"] = self.carries
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
          ValueError: the text is no such plan; the message says where.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"bad plan: not JSON at line {error.lineno} column {error.colno}: {error.msg}"
            ) from None
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
        return cls(**data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file is there whole or not at all."""
        path, text = Path(path), self.to_json() + "\n"
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, suffix=".part", delete=False
        ) as part:
            try:
                part.write(text)
                part.close()
                os.replace(part.name, path)
            except BaseException:
                os.unlink(part.name)
                raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan that `save` wrote.

        Raises:
          ValueError: the file holds no plan; the message names the file and the place.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    # ------------------------------------------------------------ looking at it

    def __str__(self) -> str:
        n = self.length
        extra = self.extra_forwards()
        cost = f"{extra} extra forward evaluation{'' if extra == 1 else 's'}"
        head = f"Plan of {n} layer{'' if n == 1 else 's'}: {self._words()}, {cost}"
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
            return ", each in ".join(words)
        if self.kind == "revolve":
            return f"{min(self.slots, max(self.length, 1))} carries, optimal schedule"
        return "everything kept"

    def _mark(self, layer: int) -> str:
        if self.kind == "none":
            return "="
        if self.kind == "full":
            return "|" if self.carries == "device" else "^"
        if self.kind == "revolve":
            return "|" if layer in first_sweep(self.length, self.slots) else "."
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
            ".": "computed again",
        }
        return "   ".join(f"{mark} {text}" for mark, text in meaning.items() if mark in drawing)


def blocks(n: int, length: int) -> list[tuple[int, int]]:
    """How n layers fall into segments of `length`: pairs (how many, of what length), first to last.

    >>> blocks(61, 8)
    [(7, 8), (1, 5)]
    """
    count, rest = divmod(n, length)
    return [pair for pair in ((count, length), (1, rest)) if pair[0] and pair[1]]


# ---------------------------------------------------------------- implementation


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
    if plan.kind != "full" and plan.layer != policies.Full():
        return "layer", f"only a plan of kind 'full' has one, and this one is {plan.kind!r}"
    if plan.carries not in _PLACES:
        return "carries", f"expected one of {', '.join(_PLACES)}, got {_short(plan.carries)}"
    if plan.kind != "full" and plan.carries != "device":
        return "carries", "only a plan of kind 'full' can keep them elsewhere than on the device"
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _periodic_extra(n: int, lengths: Sequence[int]) -> int:
    """Evaluations beyond the first forward pass, which itself records the outermost cuts."""
    return sum(count * _reversal(m, lengths[1:]) for count, m in blocks(n, lengths[0]))


def _reversal(n: int, lengths: Sequence[int]) -> int:
    """Evaluations to reverse n layers from the carry in front of them."""
    if not lengths:
        return n  # the tapes, all at once
    parts = blocks(n, lengths[0])
    advance = (sum(count for count, _ in parts) - 1) * lengths[0]
    return advance + sum(count * _reversal(m, lengths[1:]) for count, m in parts)
