"""The plan of unrolled code: which segments are recomputed, and what others keep."""

import dataclasses
import json
from typing import Any

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Piece:
    """Operations first..last-1 of a traced function, and what becomes of them.

    Attributes:
      first, last: places among the operations.
      keep: places of the operations whose results are kept for the backward pass, the others
        being recomputed; None for all that it reads.
      offload: of operations whose results are sent to the host.
      inner: not empty where nothing is kept but what enters: how the segment is evaluated
        again when its turn to be reversed comes.
    """

    first: int
    last: int
    keep: tuple[int, ...] | None = None
    offload: tuple[int, ...] = ()
    inner: "tuple[Piece, ...]" = ()

    @property
    def is_kept_whole(self) -> bool:
        return self.keep is None and not self.inner


@dataclasses.dataclass(frozen=True)
class UnrolledPlan:
    """How the backward pass of unrolled code gets its values.

    Attributes:
      length: number of operations.
      pieces: first to last, covering all of them.
      waits: whether what the last piece recomputes waits for the gradients of the results, too.
        The compiler of TPUs computes the gradient of a loss in the products that read it, unless
        something waits for it: then that is an array, of logits as large as all layers at times.
      orders_casts: whether parameters are cast, but for TPUs, only when the piece that reads them
        begins.  The compiler of GPUs at times puts what needs least room first, and so casts all
        parameters before anything else is computed.

    >>> plan = UnrolledPlan(10, (Piece(0, 6, inner=(Piece(0, 3), Piece(3, 6))), Piece(6, 10)))
    >>> print(plan)
    Plan of 10 operations: 2 pieces, 1 of them recomputed whole
    >>> UnrolledPlan.from_data(plan.to_data()) == plan
    True
    """

    length: int
    pieces: tuple[Piece, ...]
    waits: bool = True
    orders_casts: bool = False

    def __post_init__(self) -> None:
        _check(self.pieces, 0, self.length, "pieces")

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold."""
        data = {"length": self.length, "pieces": [_data(piece) for piece in self.pieces]}
        switches = {name: getattr(self, name) for name in _SWITCHES}
        return {**data, **{k: on for k, on in switches.items() if on != _SWITCHES[k]}}

    @classmethod
    def from_data(cls, data: Any) -> "UnrolledPlan":
        """The plan that `to_data` gave.

        Raises:
          ValueError: it is none; says where.
        """
        if not isinstance(data, dict) or data.keys() - _SWITCHES != {"length", "pieces"}:
            raise ValueError(f"expected an object with length and pieces, got {str(data)[:40]}")
        if not _is_whole(data["length"]):
            raise ValueError(f"bad plan: length: expected a number, got {str(data['length'])[:40]}")
        switches = {name: data[name] for name in _SWITCHES if name in data}
        for name, on in switches.items():
            if not isinstance(on, bool):
                raise ValueError(f"bad plan: {name}: expected true or false, got {str(on)[:40]}")
        return cls(data["length"], _pieces(data.get("pieces"), "pieces"), **switches)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"unrolled": self.to_data()})

    def __str__(self) -> str:
        again = sum(bool(piece.inner) for piece in self.pieces)
        parts = sum(piece.keep is not None for piece in self.pieces)
        words = [f"{again} of them recomputed whole"] * bool(again)
        words += [f"{parts} in part"] * bool(parts)
        count = len(self.pieces)
        head = f"Plan of {self.length} operations: {count} piece{'s' if count != 1 else ''}"
        return ", ".join([head, *(words or ["everything kept"])])


# ---------------------------------------------------------------- implementation

# What a plan says of all its pieces, and what it says where nothing stands.
_SWITCHES = {"waits": True, "orders_casts": False}


def _check(pieces: tuple[Piece, ...], first: int, last: int, where: str) -> None:
    at = first
    for number, piece in enumerate(pieces):
        if piece.first != at or piece.last <= at:
            raise ValueError(
                f"bad plan: {where}[{number}]: operations {piece.first} to {piece.last} do not "
                f"follow those before, which end at {at}"
            )
        if piece.inner:
            _check(piece.inner, piece.first, piece.last, f"{where}[{number}].inner")
        at = piece.last
    if at != last:
        raise ValueError(f"bad plan: {where}: they end at operation {at}, and there are {last}")


def _data(piece: Piece) -> dict[str, Any]:
    data: dict[str, Any] = {"first": piece.first, "last": piece.last}
    if piece.inner:
        data["inner"] = [_data(one) for one in piece.inner]
    elif piece.keep is not None:
        data["keep"] = list(piece.keep)
        if piece.offload:
            data["offload"] = list(piece.offload)
    return data


def _pieces(data: Any, where: str) -> tuple[Piece, ...]:
    if not isinstance(data, list):
        raise ValueError(f"bad plan: {where}: expected a list")
    found = []
    for number, one in enumerate(data):
        here = f"{where}[{number}]"
        if not isinstance(one, dict) or not {"first", "last"} <= one.keys():
            raise ValueError(f"bad plan: {here}: expected an object with first and last")
        if unknown := one.keys() - {"first", "last", "keep", "offload", "inner"}:
            raise ValueError(f"bad plan: {here}.{min(unknown)}: unknown key")
        for key in ("first", "last"):
            if not _is_whole(one[key]):
                raise ValueError(f"bad plan: {here}.{key}: expected the place of an operation")
        if "inner" in one and (one.keys() & {"keep", "offload"} or not one["inner"]):
            raise ValueError(f"bad plan: {here}: inner goes with neither keep nor offload")
        if "offload" in one and "keep" not in one:
            raise ValueError(f"bad plan: {here}.offload: goes with keep")
        for key in one.keys() & {"keep", "offload"}:
            if not isinstance(one[key], list) or not all(
                _is_whole(place) and one["first"] <= place < one["last"] for place in one[key]
            ):
                raise ValueError(f"bad plan: {here}.{key}: expected places of its operations")
        found.append(
            Piece(
                one["first"],
                one["last"],
                tuple(one["keep"]) if "keep" in one else None,
                tuple(one.get("offload", ())),
                _pieces(one["inner"], f"{here}.inner") if "inner" in one else (),
            )
        )
    return tuple(found)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
