"""A layer stack under a policy: how it runs, how it is mapped, how it is differentiated.

`Stack` is what the primitive `stack_p` carries.  Evaluated, it is the scan that
it was.  Under `vmap` its layer is mapped, so that the gradient of a shared
parameter is summed where it is made.  Differentiated, it picks its plan (only
now is it known what is differentiated, and hence what a layer's tape weighs)
and splits into a forward pass that keeps what the plan says, and a linear part
whose transpose follows the plan's schedule.  Forward mode and second
derivatives go through the nested form of the plan, in plain `jax.checkpoint`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxmem import _jax
from jaxmem.errors import NoEffectWarning, warn
from jaxmem.plans.choose import choose
from jaxmem.plans.plan import Plan
from jaxmem.policies import ByLayer, Policy
from jaxmem.stacked import (
    NOWHERE,
    Form,
    Into,
    Schedule,
    as_body,
    checkpointed,
    nested,
    plain,
    schedule_for,
)
from jaxmem.trace import context
from jaxmem.trace.context import note_plan, platform
from jaxmem.trace.find import LayerStack
from jaxmem.trace.layer import Layer, NoReverseMode, Wrt, differentiated
from jaxmem.trace.row_casts import rounded_rows

# ---------------------------------------------------------------- API


def native(plan: Plan) -> Callable[[Form, Sequence[Any]], list[Any]] | None:
    """The plan as an ordinary scan, where jax's own scan can express it."""
    if plan.kind == "none":
        return plain
    if plan.kind == "full":
        host = plan.carries == "host"
        return lambda form, args: checkpointed(_cast_by_rows(form), plan.layer, host, args)
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """A scan whose layers are recomputed by a policy (the value that `stack_p` carries).

    Attributes:
      info: where it was found; None for one that nobody has to be told of.
      is_partitioned: whether its carries are split over mesh axes between layers.
      is_stage: whether it is a stage of a pipeline, run again in each tick.
    """

    form: Form
    policy: Policy | Plan
    info: LayerStack | None = None
    is_partitioned: bool = False
    is_stage: bool = False

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The plain scan."""
        return plain(self.form, args)

    def out_avals(self) -> list[Any]:
        carry, ys = self.form.body.split_out(self.form.body.jaxpr.out_avals)
        return [*carry, *(_jax.stacked(y, self.form.length) for y in ys)]

    @property
    def called(self) -> str:
        """What it is called in messages."""
        return str(self.info or "a stack")

    @property
    def effects(self) -> Any:
        return self.form.body.jaxpr.effects

    @property
    def is_part(self) -> bool:
        """Whether it is a part of code that was looked at as a whole, for what uses its keys."""
        return self.form.interleaved

    def unplanned(self, outs: Sequence[Any]) -> list[Any]:
        """Results of the plain scan; warns when and if that is differentiated."""
        what = self.called
        return context.when_differentiated(
            outs,
            lambda: warn(
                f"{what}: what checkify has rewritten is differentiated as it stands, everything "
                "kept; put checkify around the gradient, not the gradient around checkify",
                NoEffectWarning,
            ),
        )

    def batched(
        self, batch: Callable[..., Any], flags: Sequence[bool]
    ) -> tuple["Stack", list[bool], list[int], list[bool], list[int]]:
        """The stack with its layer mapped; which operands and results are, and along which axis."""
        body = self.form.body
        consts, carry, xs = body.split_in(flags)
        while True:
            ins = [*consts, *carry, *xs]
            # A carry is mapped on both sides of a layer or on neither.
            jaxpr, outs = batch(body.jaxpr, ins, [*carry, *[False] * body.num_y])
            carry_out, ys = body.split_out(outs)
            if carry_out == carry:
                break
            carry = [a or b for a, b in zip(carry, carry_out, strict=True)]
        form = dataclasses.replace(self.form, body=dataclasses.replace(body, jaxpr=jaxpr))
        in_axes = [0] * (body.num_consts + body.num_carry) + [1] * body.num_x
        out_axes = [0] * body.num_carry + [1] * body.num_y
        mapped = dataclasses.replace(self, form=form)
        return mapped, ins, in_axes, [*carry, *ys], out_axes

    def layer(self, operands: Sequence[bool]) -> Layer:
        """The layer, taken apart for the derivative with respect to these operands."""
        return Layer(self.form.body, self.wrt(operands))

    def wrt(self, operands: Sequence[bool]) -> Wrt:
        """What of the layer takes part in the derivative with respect to these operands."""
        return differentiated(self.form.body, *self.form.body.split_in(operands))

    def plan(self, layer: Layer) -> Plan:
        """The plan that the policy means for this stack."""
        if isinstance(self.policy, ByLayer):
            known = None if context.is_inside_layer() else self.policy.plan_for(self, layer)
            return known or Plan.none(self.form.length)
        return choose(self.policy, layer.problem(self.form.length))

    def jvp(
        self, args: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Results and their tangents; a tangent is None for zero."""
        operands = [t is not None for t in tangents]
        layer = None
        with suppress(NoReverseMode):
            layer = self.layer(operands)
        if layer is None:
            # Forward mode needs no plan, and reverse mode ends here in jax's own error.
            note_plan(self.policy, Plan.none(self.form.length))
            return self.derivative(self.run, self.wrt(operands), args, tangents)
        plan = self.plan(layer)
        note_plan(self.policy, plan)
        whole = plan.kind == "full" and plan != Plan.full(plan.length)
        # Of arrays on the host jax would keep rows on the device.
        if any(map(_jax.is_on_host, args)) or (self.is_partitioned and whole):
            with self.scope(layer, plan, args):
                return self.streamed(layer, plan).split(args, tangents)
        # The loops in a piece of unrolled code have arrays of their own if jaxmem reverses them.
        if plan.kind == "none" and not self.form.interleaved:
            with self.scope(layer, plan, args):
                return self.derivative(self.run, layer.wrt, args, tangents)
        return Tangent(self.form, _by_rows(layer), plan).split(args, tangents)

    def streamed(self, layer: Layer, plan: Plan) -> "Tangent":
        """The linear part by a schedule that reads and writes rows, for every plan."""
        form = self.form
        if plan.kind == "full":  # what jax's scan does elsewhere
            form = as_body(form, plan.layer, plan.carries == "host")
            layer = Layer(form.body, layer.wrt)
            plan = Plan.none(form.length)
        return Tangent(form, _by_rows(layer), plan)

    def checkpointed(self, plan: Plan) -> Form:
        """An ordinary scan for a plan that jax's own can express, its layer checkpointed."""
        return as_body(_cast_by_rows(self.form), plan.layer, plan.carries == "host")

    def derivative(
        self,
        run: Callable[[Sequence[Any]], list[Any]],
        wrt: Wrt,
        args: Sequence[Any],
        tangents: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Results and tangents as jax has them of one way to run it; a tangent is None for zero."""
        outs, found = _partial_jvp(lambda *args: run(args), args, tangents)
        return outs, [t if reached else None for t, reached in zip(found, wrt.outs, strict=True)]

    @contextmanager
    def scope(self, layer: Layer, plan: Plan, args: Sequence[Any]) -> Iterator[None]:
        """What is open where the stack runs under this plan."""
        if plan.kind != "none" or not isinstance(self.policy, ByLayer):
            yield
            return
        with context.inside_layer(), self.policy.as_it_stands(self, layer, args):
            yield

    def linear(self, operands: Sequence[bool]) -> "Tangent":
        """The linear part, for the derivative with respect to these operands."""
        layer = self.layer(operands)
        plan = self.plan(layer)
        return Tangent(self.form, _by_rows(layer), plan)


# ---------------------------------------------------------------- implementation


def _cast_by_rows(form: Form) -> Form:
    """With the casts of stacked inputs kept in the loop, where a compiler takes them out."""
    if platform() != "tpu":
        return form
    return dataclasses.replace(form, body=rounded_rows(form.body))


def _by_rows(layer: Layer) -> Layer:
    return layer.casting_rows() if platform() == "tpu" else layer


class Tangent:
    """The linear part of a stack (the value that `tangent_p` carries).

    Its residuals are the operands of the stack, then what the schedule keeps.
    """

    def __init__(self, form: Form, layer: Layer, plan: Plan) -> None:
        self.form, self.layer, self.wrt, self.plan = form, layer, layer.wrt, plan
        self.first_x = form.body.num_consts + form.body.num_carry
        self.num_args = len(layer.wrt.ins)
        schedule = schedule_for(plan, form, layer)
        assert schedule is not None  # as all results have cotangents
        self.schedule = schedule
        self.num_residuals = 0
        self.tangent_avals: list[Any] = []

    def split(
        self, args: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Results, computed keeping what the plan says, and their tangents, to be transposed."""
        outs, kept = self.forward(args)
        given = [
            _jax.zeros_like(arg) if t is None else t
            for arg, t, wrt in zip(args, tangents, self.wrt.ins, strict=True)
            if wrt
        ]
        found = iter(_jax.bind_tangent(self, [*args, *kept], given))
        return outs, [next(found) if wrt else None for wrt in self.wrt.outs]

    def forward(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Results, and what the schedule keeps."""
        tree = None

        def run(*args: Any) -> list[Any]:
            nonlocal tree
            outs, kept = self.schedule.forward(args)
            leaves, tree = jax.tree.flatten(kept)
            return [*outs, *leaves]

        plain = Stack(self.form, self.plan)
        used = _jax.used_by(plain, args)
        with _jax.keys_unchecked():
            flat = _differentiated_as(run, self.nested)(*used)
        outs, kept = flat[: len(self.wrt.outs)], flat[len(self.wrt.outs) :]
        outs = _jax.made_by(plain, args, outs)
        self.kept_tree = tree
        self.num_residuals = self.num_args + len(kept)
        self.tangent_avals = [
            jax.typeof(out).to_tangent_aval()
            for out, wrt in zip(outs, self.wrt.outs, strict=True)
            if wrt
        ]
        return outs, kept

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The plain scan."""
        return plain(self.form, args)

    def nested(self, *args: Any) -> list[Any]:
        return nested(self.form, self.schedule.lengths, args)

    def active(self, *args: Any) -> Callable[..., list[Any]]:
        """The nested form, from the differentiated operands to the differentiated results."""

        def run(*diff: Any) -> list[Any]:
            given = iter(diff)
            full = [next(given) if wrt else a for a, wrt in zip(args, self.wrt.ins, strict=True)]
            outs = self.nested(*full)
            return [out for out, wrt in zip(outs, self.wrt.outs, strict=True) if wrt]

        return run

    def primals(self, args: Sequence[Any]) -> list[Any]:
        return [arg for arg, wrt in zip(args, self.wrt.ins, strict=True) if wrt]

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        args = residuals[: self.num_args]
        return jax.jvp(self.active(*args), self.primals(args), list(tangents))[1]

    def without(self, used: Sequence[bool]) -> Schedule | None:
        """The schedule for a backward pass in which only these ys have cotangents.

        Zeros in their place would be pulled through the layer, where they are work
        for nothing, and NaN wherever a derivative is infinite.  None if what was kept is not
        enough for it.
        """
        carry, ys = self.form.body.split_out(self.wrt.outs)
        rest = iter(used)
        outs = (*carry, *(wrt and next(rest) for wrt in ys))
        return schedule_for(self.plan, self.form, self.layer, outs)

    def pull(self, residuals: Sequence[Any], cts: Sequence[Any], into: Into = NOWHERE) -> list[Any]:
        given = [ct is not None for ct in cts]
        body = self.form.body
        num_carry = sum(self.wrt.outs[: body.num_carry])
        first_x = sum(self.wrt.ins[: self.first_x])
        schedule = self.schedule
        if not all(given[num_carry:]):
            schedule = self.without(given[num_carry:])

        def parts(flat: Sequence[Any]) -> tuple[Sequence[Any], Any, list[Any]]:
            rest = iter(flat[self.num_residuals :])
            kept = jax.tree.unflatten(self.kept_tree, flat[self.num_args : self.num_residuals])
            return flat[: self.num_args], kept, [next(rest) if g else None for g in given]

        parts_of_into, tree = jax.tree.flatten((into.held, into.factor))
        num_into = len(parts_of_into)

        def split(flat: Sequence[Any]) -> tuple[Sequence[Any], Into]:
            rest = len(flat) - num_into
            held, factor = jax.tree.unflatten(tree, flat[rest:])
            return flat[:rest], dataclasses.replace(into, held=held, factor=factor)

        def backward(*flat: Any) -> list[Any]:
            rest, into = split(flat)
            args, kept, cts = parts(rest)
            ct_ys = [ct for ct in cts[num_carry:] if ct is not None]
            assert schedule is not None
            found = schedule.backward(args, kept, cts[:num_carry], ct_ys, into)
            return [*found.consts, *found.carry, *found.xs]

        def as_nested(*flat: Any) -> list[Any]:
            rest, into = split(flat)
            args, _, cts = parts(rest)

            def wanted(*diff: Any) -> list[Any]:
                # Zeros for the others would be NaN where a derivative is infinite.
                outs = self.active(*args)(*diff)
                return [out for out, g in zip(outs, given, strict=True) if g]

            _, vjp = jax.vjp(wanted, *self.primals(args))
            found = list(vjp([ct for ct in cts if ct is not None]))
            for number, held in into.held.items():
                found[first_x + number] = into.write_all(number, held, found[first_x + number])
            return found

        present = [ct for ct in cts if ct is not None]
        if schedule is None:  # what was kept does not do
            return as_nested(*residuals, *present, *parts_of_into)
        return _differentiated_as(backward, as_nested)(*residuals, *present, *parts_of_into)


def _differentiated_as(fn: Callable[..., list[Any]], form: Callable[..., list[Any]]) -> Any:
    """`fn`, whose derivatives are those of `form`.

    `form` returns the first results of `fn`; the others (carries and tapes that
    a schedule keeps) are handles for its own backward pass, and constant to
    everybody else.
    """
    run = jax.custom_jvp(fn)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = run(*primals)
        given = [None if isinstance(t, SymbolicZero) else t for t in tangents]
        _, found = _partial_jvp(form, primals, given)
        zeros = [_symbolic_zero(out) for out in outs[len(found) :]]
        return outs, [*found, *zeros]

    run.defjvp(rule, symbolic_zeros=True)
    return run


def _symbolic_zero(out: Any) -> Any:
    return jax.custom_derivatives.zero_from_primal(out, symbolic_zeros=True)


def _partial_jvp(
    fn: Callable[..., list[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """jvp with respect to the operands whose tangent is not None."""

    def active(*diff: Any) -> list[Any]:
        given = iter(diff)
        pairs = zip(primals, tangents, strict=True)
        return fn(*(p if t is None else next(given) for p, t in pairs))

    diff = [p for p, t in zip(primals, tangents, strict=True) if t is not None]
    return jax.jvp(active, diff, [t for t in tangents if t is not None])
