"""Layer and RMS norms in a jaxpr, by what their values are of one array: its mean, its σ.

Going once through the operations, each value is called what it is of another: x, its square, the
sum of either along some axes, a mean, a variance, 1 / σ.  Where x, or x less its mean, meets 1 / σ
(times a scale, or as a quotient), that is a norm: batch norm is one as well, along other axes.
What computes it stays as it is; only the derivative is replaced.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _jax
from jaxmem.layers import norms
from jaxmem.layers.patterns import Match
from jaxmem.layers.pieces import SPREADING, Makers, Piece

# ---------------------------------------------------------------- types

Kind = Literal[
    "x", "square", "centered", "centered square",
    "sum", "sum of squares", "sum of centered squares",
    "mean", "mean of squares", "square of mean", "variance",
    "square + epsilon", "variance + epsilon", "sigma", "one over sigma", "scaled",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Is:
    """What a value is.

    Attributes:
      kind: of `of`.
      of: a variable.
      axes: along which it is summed, () before that.
      about_mean: of a σ, whether it is one of what is centered.
      of_sigma: of what is scaled: the variable that is 1 / σ, and the scale.
    """

    kind: Kind
    of: Any
    axes: tuple[int, ...] = ()
    about_mean: bool = False
    of_sigma: tuple[Any, Any] = (None, None)


# ---------------------------------------------------------------- API


def norm_matches(makers: Makers) -> Iterator[Match]:
    """Norms, in the order of the code."""
    known = _Values(makers)
    used_by = makers.used_by()
    for place, eqn in enumerate(makers.jaxpr.eqns):
        match = _norm(known, used_by, place, eqn)
        if match is not None:
            yield match
        known.add(eqn)


# ---------------------------------------------------------------- implementation


class _Values:
    """What is known of the values of a jaxpr so far."""

    def __init__(self, makers: Makers) -> None:
        self.makers = makers
        self._known: dict[Any, Is] = {}
        self._depends = functools.cache(makers.depend_on)

    def of(self, atom: Any) -> Is | None:
        if _jax.is_literal(atom):
            return None
        return self._known.get(atom) or Is("x", atom)

    def depends(self, atom: Any, on: Any) -> bool:
        return _jax.is_var(atom) and atom in self._depends(on)

    def add(self, eqn: Any) -> None:
        if len(eqn.outvars) == 1 and (found := self._made_by(eqn)) is not None:
            self._known[eqn.outvars[0]] = found

    def _made_by(self, eqn: Any) -> Is | None:
        name, ins = eqn.primitive.name, list(eqn.invars)
        out = eqn.outvars[0].aval
        if not jnp.issubdtype(out.dtype, jnp.floating) or not ins or not _jax.is_var(ins[0]):
            return self._of_two(name, ins) if len(ins) == 2 else None
        if name == "select_n" and len(ins) == 3 and (which := self._constant(ins[0])) is not None:
            return self.of(ins[1 + int(which)])
        one = self.of(ins[0])
        assert one is not None
        if name == "convert_element_type":
            # In a narrower type an array is another one; a mean of it stays what it was.
            wider = jnp.promote_types(ins[0].aval.dtype, out.dtype) == out.dtype
            return one if wider or one.axes else None
        if name in ("copy", "name"):
            return one
        if name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
            return one if _keeps_axes(one, eqn) else None
        if name == "square" or _is_power(eqn, 2):
            return _changed(one, _SQUARES)
        if name == "reduce_sum":
            axes, summed = tuple(sorted(eqn.params["axes"])), _changed(one, _SUMS)
            if summed is None or one.axes not in ((), axes):
                return None
            return dataclasses.replace(summed, axes=axes)
        if name == "rsqrt" or _is_power(eqn, -0.5):
            return _changed(one, _ROOTS, "one over sigma")
        if name == "sqrt" or _is_power(eqn, 0.5):
            return _changed(one, _ROOTS, "sigma")
        return self._of_two(name, ins) if len(ins) == 2 else None

    def _of_two(self, name: str, ins: list[Any]) -> Is | None:
        a, b = ins
        one, other = self.of(a), self.of(b)
        value, over = self._constant(b), self._constant(a)
        if name == "div" and one is not None and value is not None:
            return _meaned(one, value)
        if name == "div" and other is not None and over == 1 and other.kind == "sigma":
            return dataclasses.replace(other, kind="one over sigma")
        if name == "mul" and one is not None and value:
            return _meaned(one, 1 / value)
        if name == "mul" and other is not None and over:
            return _meaned(other, 1 / over)
        if name == "mul" and a is b and one is not None:
            return _changed(one, _SQUARES)
        if name == "mul":
            return self._scaled(a, one, b) or self._scaled(b, other, a)
        if name == "max":
            for this, least in ((one, value), (other, over)):
                if this is not None and this.kind == "variance" and least == 0:
                    return this
            return None
        if name == "add":
            for this, added in ((one, value), (other, over)):
                if this is not None and added is not None:
                    return _changed(this, _BEFORE_ROOT)
            return None
        if name == "sub" and one is not None and value == 0:
            return one
        if name == "sub" and one is not None and other is not None and one.of is other.of:
            if (one.kind, other.kind) == ("x", "mean"):
                return dataclasses.replace(other, kind="centered")
            pair = one.kind, other.kind
            if pair == ("mean of squares", "square of mean") and one.axes == other.axes:
                return dataclasses.replace(one, kind="variance")
        return None

    def _scaled(self, atom: Any, this: Is | None, scale: Any) -> Is | None:
        if this is None or this.kind != "one over sigma" or self.depends(scale, this.of):
            return None
        return dataclasses.replace(this, kind="scaled", of_sigma=(atom, scale))

    def _constant(self, atom: Any) -> float | None:
        """The number that a value is everywhere, where it does not depend on any array."""
        if _jax.is_literal(atom):
            return float(atom.val) if np.ndim(atom.val) == 0 else None
        eqn = self.makers.of(atom)
        if eqn is None or eqn.primitive.name not in _ON_CONSTANTS:
            return None
        numbers = [self._constant(a) for a in eqn.invars]
        if None in numbers or not numbers:
            return None
        return _ON_CONSTANTS[eqn.primitive.name](*numbers)


# As jnp.var has them: n less a correction, and whether that is above 0.
_ON_CONSTANTS: dict[str, Callable[..., float]] = {
    "broadcast_in_dim": lambda a: a,
    "convert_element_type": lambda a: a,
    **dict.fromkeys(SPREADING, lambda a: a),
    "sub": lambda a, b: a - b,
    "gt": lambda a, b: float(a > b),
}

_SQUARES: dict[Kind, Kind] = {
    "x": "square", "centered": "centered square", "mean": "square of mean",
}  # fmt: skip
_SUMS: dict[Kind, Kind] = {
    "x": "sum", "square": "sum of squares", "centered square": "sum of centered squares",
}  # fmt: skip
_MEANS: dict[Kind, Kind] = {
    "sum": "mean", "sum of squares": "mean of squares", "sum of centered squares": "variance",
}  # fmt: skip
_BEFORE_ROOT: dict[Kind, Kind] = {
    "mean of squares": "square + epsilon", "variance": "variance + epsilon",
}  # fmt: skip
_ROOTS: dict[Kind, bool] = {"square + epsilon": False, "variance + epsilon": True}


def _changed(this: Is, kinds: dict[Kind, Any], kind: Kind | None = None) -> Is | None:
    found = kinds.get(this.kind)
    if found is None:
        return None
    if kind is not None:
        return dataclasses.replace(this, kind=kind, about_mean=found)
    return dataclasses.replace(this, kind=found)


def _meaned(this: Is, count: float) -> Is | None:
    """A sum that is divided by as many as there are."""
    if this.kind not in _MEANS:
        return None
    number = math.prod(this.of.aval.shape[axis] for axis in this.axes)
    # 1 / n is rounded, to the dtype of what it multiplies.
    close = number and abs(count / number - 1) < 1e-2 / number
    return _changed(this, _MEANS) if close else None


def _is_power(eqn: Any, power: float) -> bool:
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] == power
    if eqn.primitive.name != "pow" or not _jax.is_literal(eqn.invars[1]):
        return False
    return np.ndim(eqn.invars[1].val) == 0 and float(eqn.invars[1].val) == power


def _keeps_axes(this: Is, eqn: Any) -> bool:
    """Whether what is broadcast or reshaped stands where it stood along the axes of `of`."""
    whole = this.of.aval.shape
    shape, before = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
    if not this.axes:
        return shape == before and eqn.primitive.name == "reshape"
    ones = tuple(1 if axis in this.axes else length for axis, length in enumerate(whole))
    left = tuple(length for axis, length in enumerate(whole) if axis not in this.axes)
    others = tuple(axis for axis in range(len(whole)) if axis not in this.axes)
    if eqn.primitive.name != "broadcast_in_dim":
        return before in (left, ones) and shape in (left, ones)
    dims = tuple(eqn.params["broadcast_dimensions"])
    stays = dims == (others if before == left and left != ones else tuple(range(len(whole))))
    return before in (left, ones) and shape in (ones, whole) and stays


def _norm(known: _Values, used_by: Any, place: int, eqn: Any) -> Match | None:
    if eqn.primitive.name not in ("mul", "div") or len(eqn.invars) != 2:
        return None
    out = eqn.outvars[0]
    pairs = [eqn.invars] if eqn.primitive.name == "div" else [eqn.invars, eqn.invars[::-1]]
    for a, b in pairs:
        wide, root = known.of(a), known.of(b)
        if wide is None or root is None or wide.of is not root.of:
            continue
        wanted = ("sigma",) if eqn.primitive.name == "div" else ("one over sigma", "scaled")
        kind = "centered" if root.about_mean else "x"
        if root.kind not in wanted or wide.kind != kind or wide.axes not in ((), root.axes):
            continue
        if out.aval.shape != root.of.aval.shape:
            continue
        sigma, scale = root.of_sigma if root.kind == "scaled" else (b, None)
        if scale is not None and _jax.is_literal(scale):
            continue
        return _match(known.makers, used_by, place, out, root, a, sigma, scale)
    return None


def _match(
    makers: Makers,
    used_by: Any,
    place: int,
    out: Any,
    root: Is,
    wide: Any,
    sigma: Any,
    scale: Any,
) -> Match | None:
    x, what = root.of, "layer norm" if root.about_mean else "rms norm"
    by = "ms_layer_norm" if root.about_mean else "ms_rms_norm"
    inverted = _sigma_is_divided_by(makers, sigma)
    if scale is None:
        # A cast of what is normalised alone is taken in: then that is what is kept.
        uses = used_by.get(out, [])
        cast = uses[0] if len(uses) == 1 else None
        is_cast = cast is not None and cast.primitive.name == "convert_element_type"
        if cast is not None and is_cast and cast.outvars[0].aval.dtype == x.aval.dtype:
            out, place = cast.outvars[0], makers.place[cast.outvars[0]]
    ins = [x] if scale is None else [x, scale]
    piece = makers.piece(ins, [out, wide, sigma])
    if piece is None:
        return None
    how = Found(root.about_mean, root.axes, 0.0, out.aval.dtype, piece=piece, inverted=inverted)
    run = functools.partial(norms.bare, how) if scale is None else functools.partial(_scaled, how)
    return Match(place, ins, run, what, by, "exact")


def _sigma_is_divided_by(makers: Makers, sigma: Any) -> bool:
    eqn = makers.of(sigma)
    while eqn is not None and eqn.primitive.name in (
        "broadcast_in_dim", "reshape", "convert_element_type", "copy", "expand_dims", "squeeze",
    ):  # fmt: skip
        eqn = makers.of(eqn.invars[0])
    return eqn is not None and eqn.primitive.name in ("sqrt", "pow") and not _is_power(eqn, -0.5)


def _scaled(how: "Found", x: Any, scale: Any) -> Any:
    return norms.affine(how, x, scale, None)


@dataclasses.dataclass(frozen=True)
class Found(norms.Norm):
    """A norm as it stands in a jaxpr.

    Attributes:
      piece: from x, and a scale, to the result, what is divided by σ, and 1 / σ.
      inverted: whether the last one is σ.
    """

    piece: Piece | None = None
    inverted: bool = False

    def bare(self, x: Any) -> tuple[Any, Any]:
        assert self.piece is not None
        out, wide, root = self.piece(x)
        return out, self._rstd(wide, root)

    def affine(self, x: Any, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
        assert self.piece is not None
        out, wide, root = self.piece(x, scale)
        rstd = self._rstd(wide, root)
        return out, (wide * rstd).astype(self.narrower(x.dtype)), rstd

    def _rstd(self, wide: Any, root: Any) -> jax.Array:
        """With axes of length 1 where it is the same along them, which broadcasting may hide."""
        if root.shape == wide.shape:
            for axis in self.axes:
                root = jax.lax.slice_in_dim(root, 0, min(1, root.shape[axis]), axis=axis)
        root = root.astype(wide.dtype)
        return 1 / root if self.inverted else root
