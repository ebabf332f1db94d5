"""Parameters cast to a narrower type as late as possible: where an operation reads them.

A function is traced for parameters in the narrower type, and evaluated with the parameters as they
are.  What only cuts or moves them (a row of a stack, a reshape) waits until an operation reads the
result; scans, conditions, jits and the like take them as they are, and hold the cast inside.  So a
stack of layers is cast layer by layer.  What reads a parameter is in a checkpoint together with the
cast (`trace.casts`), so that the backward pass casts again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.precision import reductions
from jaxmem.precision.reductions import Wide
from jaxmem.trace.casts import is_recast, recast
from jaxmem.trace.layer import FUSED, Body

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Late:
    """A parameter, or a part of it, that is cast to another type when an operation reads it.

    Attributes:
      sources: the parameter, and indices of its parts.
      dtype: what it is cast to.
      steps: the operations that cut and move it, in their order.
      num_cuts: the cast is made behind so many of them, the last of which makes it smaller.
    """

    sources: tuple[Any, ...]
    dtype: Any
    steps: tuple[Any, ...] = ()
    num_cuts: int = 0

    @property
    def param(self) -> Any:
        """The whole parameter, as it is."""
        return self.sources[0]

    @property
    def is_whole(self) -> bool:
        """Whether nothing has been done to it but to give it another shape."""
        return all(eqn.primitive.name in _SHAPING for eqn in self.steps)

    def then(self, eqn: Any, others: Sequence[Any]) -> "Late":
        """What an operation that cuts or moves makes of it."""
        steps = (*self.steps, eqn)
        cuts = len(steps) if eqn.primitive.name in _CUTTING else self.num_cuts
        return dataclasses.replace(
            self, sources=(*self.sources, *others), steps=steps, num_cuts=cuts
        )

    def of(self, sources: Sequence[Any]) -> "Late":
        """The same of another parameter."""
        return dataclasses.replace(self, sources=tuple(sources))

    def shaped(self) -> Any:
        """The parameter in its own type, in the shape that it has been given."""
        return self._moved(self.param, self.steps, ())

    def cut(self) -> Any:
        """The part that is cast, in the parameter's own type."""
        return self._moved(self.param, self.steps[: self.num_cuts], self.sources[1:])

    def moved(self, value: Any) -> Any:
        """The value, from the part when it has been cast."""
        return self._moved(value, self.steps[self.num_cuts :], ())

    def cast(self) -> Any:
        """The value, cast here."""
        return self.moved(_rounded(self.cut(), self.dtype))

    @staticmethod
    def _moved(value: Any, steps: Sequence[Any], others: Sequence[Any]) -> Any:
        rest = iter(others)
        for eqn in steps:
            (value,) = _jax.bound(eqn, value, *(next(rest) for _ in eqn.invars[1:]))
        return value


# ---------------------------------------------------------------- API


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], reductions: Any = None) -> list[Any]:
    """Evaluate a jaxpr, some of whose arguments are `Late`; results may be `Late` or `Wide`.

    Args:
      reductions: the type to compute reductions in, as for `precision.reductions`; None leaves them
        as they are.
    """
    return _jax.evaluate(closed, args, _Reader(reductions).special)


# ---------------------------------------------------------------- implementation

_SHAPING = frozenset({"reshape", "squeeze", "expand_dims"})
_CUTTING = _SHAPING | {"slice", "dynamic_slice"}
_MOVING = _CUTTING | {"transpose", "rev", "broadcast_in_dim"}
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"})
# What else is put into a checkpoint with the casts: what is cheap.
_READING = FUSED - _MOVING
_CALLS = frozenset({"closed_call", "core_call"})


def _rounded(wide: Any, dtype: Any) -> Any:
    """The cast, behind a rounding to the type, after which it changes no number.

    XLA for TPUs does not look through that.  A cast alone, of the row that a loop reads, it makes
    of the whole stack, ahead of the loop.
    """
    given, wanted = jnp.finfo(wide.dtype), jnp.finfo(dtype)
    if wanted.bits < given.bits:
        wide = lax.reduce_precision(wide, wanted.nexp, wanted.nmant)
    return lax.convert_element_type(wide, dtype)


def _is_late(value: Any) -> bool:
    return isinstance(value, Late)


def _here(value: Any) -> Any:
    return value.cast() if isinstance(value, Late | Wide) else value


def _holds_code(eqn: Any) -> bool:
    """Whether reductions in an operation are looked for."""
    called = eqn.primitive.name in {"while", "cond", "shard_map", *_CALLS}
    return (
        called
        or _jax.is_scan(eqn)
        or (_jax.is_stack(eqn) and not eqn.params["stack"].form.interleaved)
        or (_jax.is_jit(eqn) and not _jax.constrains(eqn))
        or (_jax.checkpointed_by(eqn) is not None and not is_recast(eqn))
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """What becomes of operations that read parameters, or are reductions.

    Attributes:
      wide: the type to compute reductions in; None leaves them as they are.
      again: whether casts are made again in a backward pass, and not kept for it.
      in_loop: whether this is run by a loop, in which compilers do not take the cast of the
        backward pass for that of the forward pass.
    """

    wide: Any = None
    again: bool = True
    in_loop: bool = False

    def special(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        if self.wide is not None:
            is_wide = any(isinstance(value, Wide) for value in operands)
            if self._is_wide(eqn, is_wide):
                return [self._in_wide(eqn, operands)]
            operands = [_here(value) if isinstance(value, Wide) else value for value in operands]
            found = self._reading(eqn, operands)
            return _jax.bound(eqn, *operands) if found is None and is_wide else found
        return self._reading(eqn, operands)

    def _is_wide(self, eqn: Any, has_wide: bool) -> bool:
        floating = [
            aval.dtype
            for aval in (atom.aval for atom in (*eqn.invars, *eqn.outvars))
            if hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
        ]
        if any(dtype.itemsize > self.wide.itemsize for dtype in floating):
            return False
        return reductions.begins(eqn) or (has_wide and reductions.goes_on(eqn))

    def _in_wide(self, eqn: Any, operands: Sequence[Any]) -> Wide:
        dtype = eqn.outvars[0].aval.dtype

        def run(*values: Any) -> list[Any]:
            return [reductions.computed(eqn, self.wide, values, _here)]

        if any(map(_is_late, operands)):
            ready = [value.value if isinstance(value, Wide) else value for value in operands]
            return Wide(self._together(run, ready, False)[0], dtype)
        return Wide(run(*operands)[0], dtype)

    def _reading(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        late = [_is_late(value) for value in operands]
        if not any(late) and (self.wide is None or not _holds_code(eqn)):
            return None
        name = eqn.primitive.name
        if name in _MOVING and late[0] and not any(late[1:]):
            return [operands[0].then(eqn, operands[1:])]
        if _jax.is_scan(eqn) or _jax.is_stack(eqn):
            return self._loop(eqn, operands)
        if name == "while":
            return self._while(eqn, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        if name == "shard_map":
            return self._shard_map(eqn, operands)
        if _jax.is_jit(eqn) and not _jax.constrains(eqn):
            return self._inside(eqn.params["jaxpr"], operands)
        if name in _CALLS:
            return self._inside(_jax.as_closed(eqn.params["call_jaxpr"]), operands)
        if _jax.checkpointed_by(eqn) is not None:
            return self._checkpoint(eqn, operands)
        if name == "gather" and late[0]:
            # Rows are gathered, and then cast.
            return self._together(lambda table, *rest: _rows(eqn, table, rest), operands, False)
        if name in _PRODUCTS:
            return self._together(lambda *values: _product(eqn, values), operands, True)
        if name in _READING:
            return self._together(
                lambda *values: _jax.bound(eqn, *map(_here, values)), operands, False
            )
        return _jax.bound(eqn, *map(_here, operands))

    def _together(
        self, run: Callable[..., list[Any]], operands: Sequence[Any], is_product: bool
    ) -> list[Any]:
        """What an operation makes, in a checkpoint with the casts of what it reads."""
        if not self.again:
            return run(*operands)
        arrays = _Arrays(operands)
        # Behind a barrier that waits for the gradient, or the compiler would take the cast of the
        # forward pass, and keep it.
        barrier = is_product and not self.in_loop
        flags = arrays.each([barrier and _is_late(value) for value in operands])
        again = jax.checkpoint(
            lambda *flat: run(*arrays.operands(flat)),
            prevent_cse=flags if barrier else False,
            policy=recast,
        )
        return again(*arrays.flat)

    def _inside(self, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        return _jax.evaluate(closed, operands, self.special)

    def _body(self, closed: ClosedJaxpr, operands: Sequence[Any], again: bool) -> ClosedJaxpr:
        """The body of a loop that gets parameters as they are."""
        reader = dataclasses.replace(self, again=again, in_loop=True)

        def run(*flat: Any) -> list[Any]:
            given = [
                Late((value,), operand.dtype) if _is_late(operand) else value
                for value, operand in zip(flat, operands, strict=True)
            ]
            return [*map(_here, reader._inside(closed, given))]

        avals = [
            aval.update(dtype=operand.param.dtype, weak_type=False) if _is_late(operand) else aval
            for aval, operand in zip(closed.in_avals, operands, strict=True)
        ]
        return _jax.trace(run, avals)

    def _loop(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """A scan, or a stack under its policy."""
        stack = eqn.params["stack"] if _jax.is_stack(eqn) else None
        if stack is not None:
            body = stack.form.body
        else:
            scan = _jax.scan_parts(eqn)
            body = Body(scan.body, scan.num_consts, scan.num_carry)
        consts, carry, xs = body.split_in(operands)
        # Carries are of the type that the layer returns, whatever they begin with.
        ready = [*map(_if_whole, consts), *map(_here, carry), *map(_if_whole, xs)]
        flat = [value.shaped() if _is_late(value) else value for value in ready]
        # Code is planned value by value, casts as well.
        again = self.again and not (stack is not None and stack.form.interleaved)
        closed = self._body(body.jaxpr, ready, again)
        if stack is None:
            return _jax.bound_with(eqn, {"jaxpr": closed}, *flat)
        form = dataclasses.replace(stack.form, body=dataclasses.replace(body, jaxpr=closed))
        return _jax.bind_stack(dataclasses.replace(stack, form=form), flat)

    def _while(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        consts = [_if_whole(value) for value in operands[first:last]]
        carry = [*map(_here, operands[last:])]
        closed = self._body(eqn.params["body_jaxpr"], [*consts, *carry], self.again)
        flat = [value.shaped() if _is_late(value) else value for value in consts]
        condition = [*map(_here, operands[:first])]
        return _jax.bound_with(eqn, {"body_jaxpr": closed}, *condition, *flat, *carry)

    def _cond(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        index, *rest = operands
        arrays = _Arrays(rest)

        def branch(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *flat: [*map(_here, self._inside(closed, arrays.operands(flat)))]

        branches = [branch(_jax.as_closed(one)) for one in eqn.params["branches"]]
        return lax.switch(_here(index), branches, *arrays.flat)

    def _checkpoint(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        inner, found = _jax.in_checkpoint(eqn), _jax.checkpointed_by(eqn)
        assert inner is not None
        assert found is not None
        arrays = _Arrays(operands)

        def run(*flat: Any) -> list[Any]:
            return [*map(_here, self._inside(inner, arrays.operands(flat)))]

        barrier = eqn.params.get("prevent_cse", True)
        if not isinstance(barrier, bool):
            barrier = arrays.each(barrier)
        return jax.checkpoint(run, prevent_cse=barrier, policy=found[0])(*arrays.flat)

    def _shard_map(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        params = eqn.params
        # Each operand has its own division over devices.
        ready = [_if_whole(value) if not _steps(value) else _here(value) for value in operands]
        inner = _jax.as_closed(params["jaxpr"])

        def run(*flat: Any) -> list[Any]:
            given = [
                value.of((own,)) if _is_late(value) else own
                for value, own in zip(ready, flat, strict=True)
            ]
            return [*map(_here, self._inside(inner, given))]

        return jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )(*(value.param if _is_late(value) else value for value in ready))


def _steps(value: Any) -> tuple[Any, ...]:
    return value.steps if _is_late(value) else ()


def _product(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A product with a parameter, whose gradient comes out of the transposed product as wide."""
    place = next(k for k, value in enumerate(operands) if _is_late(value))
    param = operands[place]
    arrays = _Arrays([*operands[:place], *operands[place + 1 :]])

    def run(part: Any, *flat: Any) -> Any:
        others = [*map(_here, arrays.operands(flat))]
        (out,) = _jax.bound(eqn, *others[:place], param.moved(part), *others[place:])
        return out

    def cast(part: Any) -> Any:
        return _rounded(part, param.dtype)

    return [_jax.with_wide_gradient(run, cast, param.cut(), arrays.flat)]


def _rows(eqn: Any, table: Any, rest: Sequence[Any]) -> list[Any]:
    if table.steps:
        return _jax.bound(eqn, table.cast(), *rest)
    (found,) = _jax.bound(eqn, table.param, *rest)
    return [_rounded(found, table.dtype)]


def _if_whole(value: Any) -> Any:
    """A parameter that something takes as it is; a part of one is cast here.

    In its own type it would be a copy of twice the bytes.
    """
    return value if _is_late(value) and value.is_whole else _here(value)


class _Arrays:
    """The arrays behind some operands, and from such arrays to the operands.

    Numbers that are written into the code stay there, where they have the type of what they meet.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = given
        self.flat = [array for value in given for array in self._of(value)]

    def operands(self, flat: Sequence[Any]) -> list[Any]:
        """The operands with these arrays."""
        rest = iter(flat)
        return [
            value.of([next(rest) for _ in self._of(value)])
            if _is_late(value)
            else next(rest)
            if isinstance(value, jax.Array)
            else value
            for value in self._given
        ]

    def each(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        """One flag for each array from one for each operand."""
        pairs = zip(self._given, flags, strict=True)
        return tuple(flag for value, flag in pairs for _ in self._of(value))

    @staticmethod
    def _of(value: Any) -> tuple[Any, ...]:
        if _is_late(value):
            return value.sources
        return (value,) if isinstance(value, jax.Array) else ()
