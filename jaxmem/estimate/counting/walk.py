"""A traced program as a flat list of operations, each with how often it runs.

Calls are looked through, loops are multiplied out, of a conditional the branch
with the most work is taken, and what no result needs is left out first.  The
body of a `shard_map` runs once for each shard, so that figures are global.
"""

import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from jaxmem import _jax
from jaxmem.estimate.counting import flops, trips
from jaxmem.estimate.counting.ops import Op, Place, Value, Walk, size_of

# ---------------------------------------------------------------- API


def walk(closed: ClosedJaxpr, dead: bool = False) -> Walk:
    """All operations of a traced function that its results need; if `dead`, the others too."""
    if not dead and (known := _LAST.get(closed)) is not None:
        return known
    walker = _Walker()
    given = [_value(var) for var in closed.jaxpr.invars]
    outs = walker.call(closed if dead else _needed(closed), given, Place())
    walker.edge(outs, Place())
    if not dead:
        _LAST.clear()
        _LAST[closed] = walker.found
    return walker.found


# ---------------------------------------------------------------- implementation

# The last program and its operations, which nobody changes: a report asks for them several times.
_LAST: weakref.WeakKeyDictionary[ClosedJaxpr, Walk] = weakref.WeakKeyDictionary()


def _needed(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr = closed.jaxpr
    outs = [True] * len(jaxpr.outvars)
    slim, _ = partial_eval.dce_jaxpr(jaxpr, outs, instantiate=[True] * len(jaxpr.invars))
    return ClosedJaxpr(slim, closed.consts)


def _value(atom: Any) -> Value:
    return Value(size_of(atom.aval))


class _Walker:
    def __init__(self) -> None:
        self.found = Walk()
        self.marks: dict[Any, tuple[bool, bool, bool]] = {}

    # ------------------------------------------------------------ jaxprs

    def call(self, closed: ClosedJaxpr, args: Sequence[Value], place: Place) -> list[Value]:
        jaxpr = closed.jaxpr
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = Value(size_of(var.aval), trips.constant(const))

        def read(atom: Any) -> Value:
            if _jax.is_literal(atom):
                return Value(0, trips.constant(atom.val))  # part of the code
            return env[atom]

        for eqn in jaxpr.eqns:
            outs = self.step(eqn, [read(atom) for atom in eqn.invars], self.enter(eqn, place))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def enter(self, eqn: Any, place: Place) -> Place:
        """The place of an equation in a jaxpr whose equations stand at `place`."""
        recomputed, by_policy, transposed = self.words(eqn)
        if recomputed and not place.recomputed:
            planned = place.checkpoint == "policy"
            if place.checkpoint == "none":
                # The schedules of jaxmem mark what they recompute, and have no checkpoint.
                planned = by_policy or _jax.checkpointed_by(eqn) is None
            place = dataclasses.replace(place, recomputed=True, planned=planned)
        if transposed and not place.transposed:
            place = dataclasses.replace(place, transposed=True)
        return place

    def words(self, eqn: Any) -> tuple[bool, bool, bool]:
        """What the name scopes of an equation say: recomputed, by a policy, transposed."""
        stack = eqn.source_info.name_stack
        found = self.marks.get(stack)
        if found is None:
            text = str(stack)
            found = (
                _jax.RECOMPUTED in text,
                _jax.PLANNED in text or _jax.PIECE in text,
                "transpose(" in text,
            )
            self.marks[stack] = found
        return found

    # ------------------------------------------------------------ equations

    def step(self, eqn: Any, ins: list[Value], place: Place) -> list[Value]:
        count = flops.flops(eqn)
        if count is not None:
            return self.leaf(eqn, ins, place, count)
        if flops.is_matmul(eqn):
            return self.leaf(eqn, ins, place, matmul=flops.matmul_flops(eqn))
        name = eqn.primitive.name
        if _jax.is_scan(eqn):
            return self.loop(_jax.scan_parts(eqn), ins, place)
        if _jax.is_stack(eqn):
            form = eqn.params["stack"].form
            body = form.body
            scan = _jax.Scan(
                body.jaxpr, body.num_consts, body.num_carry, form.length, form.reverse, form.unroll
            )
            return self.loop(scan, ins, place)
        if _jax.checkpointed_by(eqn) is not None:
            self.found.checkpoints.append((eqn, place))
            by_policy = self.words(eqn)[1]
            place = dataclasses.replace(place, checkpoint="policy" if by_policy else "own")
        if name == "while":
            return self.while_loop(eqn, ins, place)
        if name == "cond":
            return self.cond(eqn, ins, place)
        if name == "shard_map":
            return self.shards(eqn, ins, place)
        if name == "custom_linear_solve":
            lengths = eqn.params["const_lengths"]
            first = lengths.matvec + lengths.vecmat
            rest = [*ins[first : first + lengths.solve], *ins[sum(lengths) :]]
            return self.call(eqn.params["jaxprs"].solve, rest, place)
        if name == "pallas_call":
            return self.pallas(eqn, ins, place)
        if name == "jaxmem_stack_tangent":
            return self.tangent(eqn, ins, place)
        if _jax.name_given_by(eqn) is not None:
            return self.leaf(eqn, ins, place)
        body = _body(eqn)
        if body is not None and len(body.jaxpr.invars) == len(ins):
            return self.call(body, ins, place)
        self.found.uncounted.add(name)
        return self.leaf(eqn, ins, place)

    def leaf(
        self, eqn: Any, ins: list[Value], place: Place, count: int = 0, matmul: int = 0
    ) -> list[Value]:
        outs = [_value(var) for var in eqn.outvars]
        if len(outs) == 1 and outs[0].size <= _SMALL:
            outs[0].known = trips.follow(eqn, [value.known for value in ins])
        self.found.ops.append(Op(eqn, place, ins, outs, count + matmul, matmul))
        return outs

    def edge(self, values: Sequence[Value], place: Place) -> None:
        self.found.ops.append(Op(None, place, values))

    # ------------------------------------------------------------ loops and branches

    def loop(self, scan: _jax.Scan, ins: list[Value], place: Place) -> list[Value]:
        jaxpr, length, runs = scan.body.jaxpr, scan.length, place.times
        self.edge(ins, place)
        inner = [_value(var) for var in jaxpr.invars]
        first_x = scan.num_consts + scan.num_carry
        for k, (value, given) in enumerate(zip(inner, ins, strict=True)):
            if given.known is None or not length:
                continue
            if k < scan.num_consts:
                value.known = trips.repeated(given.known, length, runs)
            elif k >= first_x:
                value.known = trips.rows(given.known, runs, scan.reverse)
            elif given.known.ndim == 1:
                out = jaxpr.outvars[k - scan.num_consts]
                if (step := trips.step_of(jaxpr, k, out, _literal)) is not None:
                    value.known = trips.counted(given.known, step, length, runs)
        # A compiler takes a loop of one iteration apart.
        looped = place.looped or length != 1
        inside = dataclasses.replace(place, times=runs * length, looped=looped)
        outs = self.call(scan.body, inner, inside)
        self.edge(outs, inside)
        carry, ys = outs[: scan.num_carry], outs[scan.num_carry :]
        return [Value(value.size) for value in carry] + [Value(y.size * length) for y in ys]

    def while_loop(self, eqn: Any, ins: list[Value], place: Place) -> list[Value]:
        params, runs = eqn.params, place.times
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        count, steps = trips.while_trips(eqn, [value.known for value in ins])
        self.edge(ins, place)
        if count is None:
            self.found.unknown_loops += 1
            times = runs
        else:
            times = int(count.sum()) if len(count) == runs else int(count[0]) * runs
        inside = dataclasses.replace(place, times=times, looped=True)
        each = 1 if count is None else count
        inner = []
        body_ins = ins[num_cond:]
        for k, (var, given) in enumerate(
            zip(params["body_jaxpr"].jaxpr.invars, body_ins, strict=True)
        ):
            value = _value(var)
            step = 0 if k < num_body else steps.get(k - num_body)
            if given.known is not None and step is not None and (count is not None or step == 0):
                value.known = trips.counted(given.known, step, each, runs)
            inner.append(value)
        outs = self.call(params["body_jaxpr"], inner, inside)
        # The test is also run when it ends the loop; that is not worth a count of its own.
        tested = [_value(var) for var in params["cond_jaxpr"].jaxpr.invars]
        self.edge(self.call(params["cond_jaxpr"], tested, inside), inside)
        self.edge(outs, inside)
        return [Value(value.size) for value in outs]

    def cond(self, eqn: Any, ins: list[Value], place: Place) -> list[Value]:
        self.edge(ins, place)
        outer, best, best_outs = self.found, None, []
        for branch in eqn.params["branches"]:
            self.found = Walk()
            inner = [Value(x.size, x.known) for x in ins[1:]]
            outs = self.call(branch, inner, place)
            self.edge(outs, place)
            if best is None or _work(self.found) > _work(best):
                best, best_outs = self.found, outs
        self.found = outer
        assert best is not None
        outer.ops += best.ops
        outer.checkpoints += best.checkpoints
        outer.unknown_loops += best.unknown_loops
        outer.uncounted |= best.uncounted
        return [Value(value.size) for value in best_outs]

    # ------------------------------------------------------------ other units

    def shards(self, eqn: Any, ins: list[Value], place: Place) -> list[Value]:
        # The axes that this equation splits over; those of an outer `shard_map` are split already.
        axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))
        count = math.prod(eqn.params["mesh"].shape[axis] for axis in axes)
        inside = dataclasses.replace(place, shards=place.shards * count)
        body = _jax.as_closed(eqn.params["jaxpr"])
        self.edge(ins, place)
        self.edge(self.call(body, [_value(var) for var in body.jaxpr.invars], inside), inside)
        return [_value(var) for var in eqn.outvars]

    def pallas(self, eqn: Any, ins: list[Value], place: Place) -> list[Value]:
        estimate = eqn.params.get("cost_estimate")
        if estimate is None:
            self.found.uncounted.add("pallas_call")
            return self.leaf(eqn, ins, place)
        # A kernel with a matrix product in it is one: its other work is small compared with that.
        work = estimate.flops + estimate.transcendentals
        if _has_matmul(eqn.params["jaxpr"]):
            return self.leaf(eqn, ins, place, estimate.transcendentals, estimate.flops)
        return self.leaf(eqn, ins, place, work)

    def tangent(self, eqn: Any, ins: list[Value], place: Place) -> list[Value]:
        linear = eqn.params["linear"]
        split = linear.num_residuals
        pushed = _jax.trace(
            lambda *args: linear.push(args[:split], args[split:]),
            [atom.aval for atom in eqn.invars],
        )
        return self.call(_needed(pushed), ins, place)


# Bytes of what may be a bound of a loop, or a table of such.
_SMALL = 1 << 16


def _literal(atom: Any) -> trips.Known:
    return trips.constant(atom.val) if _jax.is_literal(atom) else None


def _work(found: Walk) -> int:
    return sum(op.flops * op.place.times * op.place.shards for op in found.ops)


def _body(eqn: Any) -> ClosedJaxpr | None:
    """The one jaxpr that an equation runs, if there is one."""
    bodies = [value for value in eqn.params.values() if hasattr(value, "eqns")]
    if not bodies:
        checkpoint = _jax.in_checkpoint(eqn)
        return _expanded(eqn) if checkpoint is None else checkpoint
    return _jax.as_closed(bodies[0]) if len(bodies) == 1 else None


def _expanded(eqn: Any) -> ClosedJaxpr | None:
    """What a user's `HiPrimitive` is made of, by its own account."""
    held = (value for value in eqn.params.values() if callable(getattr(value, "expand", None)))
    primitive = next(held, None)
    tree = getattr(primitive, "in_tree", None)
    if primitive is None or tree is None:
        return None

    def run(*args: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*tree.unflatten(args)))

    return _jax.trace(run, [atom.aval for atom in eqn.invars])


def _has_matmul(jaxpr: Any) -> bool:
    """Whether there is a matrix product in a kernel, however deep."""
    for eqn in jaxpr.eqns:
        inner = [value for value in eqn.params.values() if hasattr(value, "eqns")]
        inner += eqn.params.get("branches", ())
        if flops.is_matmul(eqn) or any(_has_matmul(body) for body in inner):
            return True
    return False
