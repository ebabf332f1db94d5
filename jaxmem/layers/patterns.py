"""What in a jaxpr can be put in another form: types, and activations, relu and dropout.

An activation is found by its operations: those that jax, or the usual formula, makes of it in this
dtype.  Norms: `norm_patterns`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _jax
from jaxmem.layers import activations, masks
from jaxmem.layers.pieces import SPREADING, Makers, Piece

# ---------------------------------------------------------------- types

Gradient = Literal["exact", "approximate"]


@dataclasses.dataclass(frozen=True)
class Match:
    """An operation whose result can be had in another way.

    Attributes:
      place: of its equation, the result of which is replaced.
      ins: variables that the other way takes.
      run: the other way, (ins) -> result.
      what, by: what is replaced, by which function of `jaxmem.layers`.
      gradient: whether the gradient stays what it was.
    """

    place: int
    ins: Sequence[Any]
    run: Callable[..., Any]
    what: str
    by: str
    gradient: Gradient


# ---------------------------------------------------------------- API


def activation_matches(makers: Makers) -> Iterator[Match]:
    """GELU and SiLU, in the order of the code."""
    for place, eqn in enumerate(makers.jaxpr.eqns):
        if eqn.primitive.name not in ("mul", "copy") or len(eqn.outvars) != 1:
            continue
        dtype = eqn.outvars[0].aval.dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            continue
        for known in _TEMPLATES:
            source = _unified(makers, _traced(known.form, dtype), eqn.outvars[0])
            piece = None if source is None else makers.piece([source], eqn.outvars)
            if source is None or piece is None or source.aval.shape != eqn.outvars[0].aval.shape:
                continue
            forward = functools.partial(_only, piece)
            stepped = activations.Stepped(known.by, known.steps, forward)
            run = functools.partial(activations.stepped, stepped)
            yield Match(place, [source], run, known.what, known.by, "approximate")
            break


def relu_matches(makers: Makers) -> Iterator[Match]:
    """`jax.nn.relu`."""
    for place, eqn in enumerate(makers.jaxpr.eqns):
        if eqn.primitive.name != "custom_jvp_call" or len(eqn.invars) != 1:
            continue
        inner = _jax.as_closed(eqn.params["call_jaxpr"])
        if [e.params.get("name") for e in inner.jaxpr.eqns] != ["relu"]:
            continue
        called = Makers(_jax.inlined(inner).jaxpr)
        if not called.jaxpr.eqns:
            continue
        *others, last = called.jaxpr.eqns
        known = [called.literal(atom) for atom in last.invars]
        zeros = [float(atom.val) for atom in known if _jax.is_literal(atom)]
        spread = all(_jax.is_literal(called.literal(var)) for e in others for var in e.outvars)
        is_max = last.primitive.name == "max" and spread and zeros == [0.0]
        if is_max and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            yield Match(place, list(eqn.invars), masks.relu, "relu", "relu", "exact")


KEPT_CALLS = frozenset({"_bernoulli"})
"""Names of jits that are found by their name."""


def dropout_matches(makers: Makers) -> Iterator[Match]:
    """What is selected by random bits: the mask is then made of the key again."""
    for place, eqn in enumerate(makers.jaxpr.eqns):
        if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            continue
        mask, *cases = eqn.invars
        if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            continue
        zeros = [_is_zero(makers, atom) for atom in cases]
        if sum(zeros) != 1 or _jax.is_literal(cases[zeros.index(False)]):
            continue
        found = _random_mask(makers, mask)
        if found is not None:
            keys, piece = found
            run = functools.partial(masks.remasked, piece, zeros.index(True) == 0)
            ins = [cases[zeros.index(False)], *keys]
            yield Match(place, ins, run, "dropout", "dropout", "exact")


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Template:
    what: str
    by: str
    steps: activations.Steps
    form: Callable[[Any], Any]


_ROOT, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_part(x: Any, cube: Any) -> Any:
    return 1.0 + jnp.tanh(_ROOT * (x + _CUBIC * cube))


# As people write them.
_GELUS: tuple[Callable[[Any], Any], ...] = (
    functools.partial(jax.nn.gelu, approximate=True),
    functools.partial(jax.nn.gelu, approximate=False),
    *(
        functools.partial(form, cube)
        for cube in (lambda x: x**3, lambda x: x * x * x, lambda x: jnp.power(x, 3.0))
        for form in (
            lambda cube, x: 0.5 * x * _tanh_part(x, cube(x)),
            lambda cube, x: x * (0.5 * _tanh_part(x, cube(x))),
        )
    ),
    *(
        functools.partial(form, inner)
        for inner in (lambda x: x / math.sqrt(2), lambda x: x * math.sqrt(0.5))
        for form in (
            lambda inner, x: 0.5 * x * (1.0 + jax.scipy.special.erf(inner(x))),
            lambda inner, x: x * (0.5 * (1.0 + jax.scipy.special.erf(inner(x)))),
        )
    ),
)
_SILUS: tuple[Callable[[Any], Any], ...] = (jax.nn.silu, lambda x: x / (1.0 + jnp.exp(-x)))
_TEMPLATES = (
    *(_Template("gelu", "regelu2", activations.GELU, form) for form in _GELUS),
    *(_Template("silu", "resilu2", activations.SILU, form) for form in _SILUS),
)


@functools.lru_cache(maxsize=256)
def _traced(form: Callable[[Any], Any], dtype: Any) -> Makers:
    spec = jax.ShapeDtypeStruct((2,), dtype)
    return Makers(_jax.inlined(_jax.trace(form, [spec])).jaxpr)


# Whose operands may stand in either order.
_COMMUTE = frozenset({"add", "mul", "max"})


def _unified(makers: Makers, template: Makers, out: Any) -> Any | None:
    """The variable that takes the place of the template's argument; None if this is another code.

    Args:
      out: the variable that would be the template's result.
    """
    (argument,) = template.jaxpr.invars
    found: list[Any] = []

    def same(known: Any, atom: Any) -> bool:
        if _jax.is_literal(known):
            atom = makers.literal(atom)
            return _jax.is_literal(atom) and np.array_equal(known.val, atom.val)
        if known is argument:
            if _jax.is_literal(atom) or atom.aval.dtype != argument.aval.dtype:
                return False
            found[:] = found or [atom]
            return atom is found[0]
        one, other = _made(template, known), _made(makers, atom)
        if one is None or other is None or one.primitive is not other.primitive:
            return False
        if not _same_params(one.params, other.params):
            return False
        before = list(found)
        if all(map(same_here, one.invars, other.invars)):
            return True
        found[:] = before
        swapped = one.primitive.name in _COMMUTE
        return swapped and all(map(same_here, one.invars, other.invars[::-1]))

    def same_here(known: Any, atom: Any) -> bool:
        before = list(found)
        if same(known, atom):
            return True
        found[:] = before
        return False

    return found[0] if same(template.jaxpr.outvars[0], out) and found else None


def _made(makers: Makers, atom: Any) -> Any:
    """The equation that makes a value, copies aside."""
    eqn = makers.of(atom)
    while eqn is not None and eqn.primitive.name == "copy":
        eqn = makers.of(eqn.invars[0])
    return eqn


def _same_params(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(str(one[key]) == str(other.get(key)) for key in one)


def _only(piece: Piece, x: Any) -> Any:
    (out,) = piece(x)
    return out


def _is_zero(makers: Makers, atom: Any) -> bool:
    if _jax.is_literal(atom):
        return bool(np.all(np.asarray(atom.val) == 0))
    eqn = makers.of(atom)
    return (
        eqn is not None
        and eqn.primitive.name in ("broadcast_in_dim", "convert_element_type", *SPREADING)
        and _is_zero(makers, eqn.invars[0])
    )


_MASK_OPERATIONS = SPREADING | {"broadcast_in_dim", "reshape", "convert_element_type", "not"}


def _random_mask(makers: Makers, mask: Any) -> tuple[list[Any], Piece] | None:
    """The keys that a mask is made of, and how; None if it is no random one."""
    eqn = makers.of(mask)
    while eqn is not None and eqn.primitive.name in _MASK_OPERATIONS:
        eqn = makers.of(eqn.invars[0])
    if eqn is None or not _jax.is_jit(eqn) or eqn.params["name"] not in KEPT_CALLS:
        return None
    ins = [atom for atom in eqn.invars if _jax.is_var(atom)]
    if not ins or not all(_jax.is_key(atom.aval) for atom in ins):
        return None
    piece = makers.piece(ins, [mask])
    return None if piece is None else (ins, piece)
