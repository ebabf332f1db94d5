"""The plan of a whole step: for each layer stack and each piece of unrolled code, what it keeps.

A `StepPlan` is plain data, as the plans of its stacks are.  A stack is known in it by a
digest of its layer, so that a plan applies wherever that layer runs, and nowhere else.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem import _jax, unrolled
from jaxmem._util.files import Saved
from jaxmem._util.records import from_data, parsed, to_data
from jaxmem.plans.plan import Plan
from jaxmem.policies import ByLayer, PipelineChoice, Scans
from jaxmem.rewrite.around import own_way, ways
from jaxmem.trace import context
from jaxmem.unrolled import Code, UnrolledPlan

# 2: by digests of layers that have the roles of inputs and results in them.
_VERSION = 2

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class RegionPlan:
    """The plan of one decorated region of a step.

    Attributes:
      layer: a digest of the layer that it is for.
      inputs: the types of that layer's inputs, for messages.
      where: what the stack is called and the line that made it, likewise.
      plan: for the stack.
    """

    layer: str
    inputs: tuple[str, ...]
    where: str
    plan: Plan | UnrolledPlan


@dataclasses.dataclass(frozen=True)
class StepPlan(Saved):
    """What `jaxmem.fit` found: plans for the decorated regions of one step.

    Attributes:
      regions: in the order in which the step differentiates them.
      target: the accelerator that it was made for.
      versions: of what traced it: the same code can be traced to another layer by another jax.
      partition: the mesh axis over which carries are stored split, of the stacks whose decorators
        name none; "" for none.
      microbatches, schedule: of pipelines that leave them open; 0 and "" where there are none.
      scans: what scans in decorated functions are that may be inside of layers, and not stacks of
        these.

    >>> import jaxmem
    >>> jaxmem.StepPlan.from_json(jaxmem.StepPlan().to_json()) == jaxmem.StepPlan()
    True
    """

    regions: tuple[RegionPlan, ...] = ()
    target: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    partition: str = ""
    microbatches: int = 0
    schedule: str = ""
    scans: Scans = "stacks"

    def to_json(self) -> str:
        """The plan as JSON text."""
        data = to_data(dataclasses.replace(self, regions=()))
        regions = [
            {
                **to_data(dataclasses.replace(region, plan=None)),
                "plan": json.loads(region.plan.to_json()),
            }  # pyright: ignore[reportArgumentType]
            for region in self.regions
        ]
        return json.dumps({"jaxmem_step_plan": _VERSION, **data, "regions": regions}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "StepPlan":
        """The plan that `to_json` wrote.

        Raises:
          ValueError: the text is no such plan; the message says where.
        """
        data = parsed(text, "step plan")
        version = data.pop("jaxmem_step_plan", None) if isinstance(data, dict) else None
        if version != _VERSION:
            other = isinstance(version, int) and not isinstance(version, bool)
            raise ValueError(
                f"bad step plan: jaxmem_step_plan: expected {_VERSION}, the version"
                + (
                    f", got {version}: another version of jaxmem wrote it; fit the step anew"
                    if other
                    else "; is this a plan that jaxmem.fit saved?"
                )
            )
        regions = data.pop("regions", None)
        if not isinstance(regions, list):
            raise ValueError("bad step plan: regions: expected a list")
        try:
            found = tuple(_region(region, f"regions[{k}]") for k, region in enumerate(regions))
            versions = _versions(data.pop("versions", []))
            bare = from_data(cls, {**data, "regions": [], "versions": []})
            return dataclasses.replace(bare, regions=found, versions=versions)
        except (TypeError, ValueError) as error:
            raise ValueError(f"bad step plan: {error}") from None

    def __str__(self) -> str:
        if not self.regions:
            return "Plan of a step: nothing in it is planned"
        lines = [f"{region.where}\n{region.plan}" for region in self.regions]
        if self.partition:
            lines.insert(0, f"Carries are stored split over the mesh axis {self.partition!r}")
        if self.scans != "stacks":
            again = ", each turn computed again" if self.scans == "checkpointed" else ""
            lines.insert(0, f"Scans are parts of the layers around them{again}")
        if self.microbatches:
            lines.insert(0, f"{self.microbatches} microbatches in the pipeline, {self.schedule}")
        return "\n".join(lines)


@contextlib.contextmanager
def use_plan(plan: StepPlan | str | os.PathLike[str]) -> Iterator[None]:
    """While open, every decorated stack follows this plan; nothing is solved.

    Args:
      plan: from `jaxmem.fit`, or the path of a file that it was saved to.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file holds no plan; and, when a function is differentiated inside,
        if the plan does not have one of its stacks.  The message says what differs.

    Warns:
      jaxmem.NoEffectWarning: nothing decorated was traced while it was open, nor ever before under
        the same: what jax has traced already it need not trace again.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat_auto
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> arrays = jnp.ones((16, 64, 64)), jnp.ones((64, 64))
    >>> step = jax.grad(model)
    >>> fitted = jaxmem.fit(step, *arrays, budget="1MiB", progress=False)
    >>> with jaxmem.use_plan(fitted.plan):
    ...     gradient = jax.jit(step)(*arrays)
    """
    if not isinstance(plan, StepPlan):
        if not isinstance(plan, str | os.PathLike):
            raise TypeError(
                "use_plan takes a jaxmem.StepPlan (the .plan of what jaxmem.fit returns) or the "
                f"path of a saved one, got an object of type {type(plan).__name__}; a jaxmem.Plan "
                "is for one stack and goes to its decorator"
            )
        plan = StepPlan.load(plan)
    with following(plan):
        yield
    context.warn_unmet(Filled(plan), "use_plan")


def following(plan: StepPlan) -> contextlib.AbstractContextManager[None]:
    """`use_plan` for callers that see for themselves whether there is anything to plan."""
    return context.instead(Filled(plan))


@dataclasses.dataclass(frozen=True)
class Filled(ByLayer):
    """The policy of every decorated region while a step plan is in force."""

    plan: StepPlan

    @property
    def partition(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.plan.partition

    def scans_are(self, closed: Any, stacks: Sequence[Any]) -> Scans:
        wanted = self.plan.scans
        return wanted if wanted == "stacks" else own_way(wanted, ways(closed, stacks))

    def pipeline(self, choices: Sequence[PipelineChoice]) -> PipelineChoice:
        """How the fit has a pipeline run that leaves it open.

        Raises:
          ValueError: it met no such pipeline, or one of another batch.
        """
        plan = self.plan
        own = PipelineChoice(plan.microbatches, plan.schedule)
        if not plan.microbatches:
            raise ValueError(
                "the plan is of a step whose pipelines say themselves how they run, and one here "
                'has microbatches or schedule "auto"; fit this step anew, or say it here as well'
            )
        if own not in choices:
            known = ", ".join(f"{one.microbatches} ({one.schedule})" for one in choices)
            raise ValueError(
                f"the plan has {own.microbatches} microbatches, {own.schedule}, and this batch and "
                f"mesh allow {known}; run the step on those of the fit, or fit this one anew"
            )
        return own

    def plan_for(self, stack: Any, layer: Any) -> Plan:
        """The plan of this stack.

        Raises:
          ValueError: there is none; says what differs.
        """
        length = stack.form.length
        for region in self.plan.regions:
            plan = region.plan
            if region.layer == layer.digest and isinstance(plan, Plan) and plan.length == length:
                return plan
        if not layer.has_reverse_mode:
            return Plan.none(length)  # as there is none for it
        what = stack.called
        if self.partition and not stack.is_partitioned:
            raise ValueError(
                f"the plan stores carries split over the mesh axis {self.partition!r}, which those "
                f"of {what} cannot be here: the mesh lacks that axis, or its devices divide none "
                "of them; run the step on a mesh like that of the fit, or fit it anew"
            )
        raise ValueError(_difference(self.plan, what, length, input_types(layer)))

    def run_unrolled(self, closed: Any, args: Sequence[Any], label: str) -> list[Any]:
        """The results of code without a stack, under its plan.

        Raises:
          ValueError: there is none; says what differs.
        """
        code = Code(closed)
        for region in self.plan.regions:
            if region.layer == code.digest and isinstance(region.plan, UnrolledPlan):
                with context.inside_layer():
                    return unrolled.run(code, region.plan, args)
        if not code.has_reverse_mode:  # as there is no plan for it
            with context.inside_layer():
                return _jax.evaluate(closed, args)
        types = tuple(aval.str_short() for aval in closed.in_avals)
        raise ValueError(_difference(self.plan, label, len(code), types))

    def __str__(self) -> str:
        return "a plan of jaxmem.fit"


# ---------------------------------------------------------------- implementation


def input_types(layer: Any) -> tuple[str, ...]:
    """The types of a layer's inputs, as they are shown."""
    return tuple(aval.str_short() for aval in layer.body.jaxpr.in_avals)


def _versions(data: Any) -> tuple[tuple[str, str], ...]:
    pairs = data if isinstance(data, list) else [data]
    for place, pair in enumerate(pairs):
        texts = isinstance(pair, list) and all(isinstance(text, str) for text in pair)
        if not texts or len(pair) != 2:
            raise ValueError(f"versions[{place}]: expected a name and a version, two texts")
    return tuple((name, version) for name, version in pairs)


def _region(data: Any, where: str) -> RegionPlan:
    if not isinstance(data, dict) or not isinstance(data.get("plan"), dict):
        raise ValueError(f"{where}: expected an object with a plan")
    try:
        if "unrolled" in data["plan"]:
            plan = UnrolledPlan.from_data(data["plan"]["unrolled"])
        else:
            plan = Plan.from_json(json.dumps(data["plan"]))
    except ValueError as error:
        raise ValueError(f"{where}.plan: {error}") from None
    names = [field.name for field in dataclasses.fields(RegionPlan) if field.name != "plan"]
    for key in data:
        if key not in (*names, "plan"):
            raise ValueError(f"{where}.{key}: unknown key")
    inputs = data.get("inputs")
    texts = [data.get("layer"), data.get("where"), *(inputs if isinstance(inputs, list) else ())]
    if not isinstance(inputs, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: expected inputs (a list of texts), layer and where (texts)")
    return RegionPlan(data["layer"], tuple(inputs), data["where"], plan)


def _difference(plan: StepPlan, what: str, length: int, inputs: tuple[str, ...]) -> str:
    what = f"{what} is not in the plan"
    if not plan.regions:
        return f"{what}, which is empty; fit this step anew"

    def distance(region: RegionPlan) -> int:
        same = sum(a == b for a, b in zip(region.inputs, inputs, strict=False))
        return (
            abs(len(region.inputs) - len(inputs))
            + len(inputs)
            - same
            + (region.plan.length != length)
        )

    near = min(plan.regions, key=distance)
    parts = []
    if near.plan.length != length:
        what_of = "layers" if isinstance(near.plan, Plan) else "operations"
        parts.append(f"it is for {near.plan.length} {what_of}, and there are {length}")
    if len(near.inputs) != len(inputs):
        parts.append(f"it takes {len(near.inputs)} arrays, and here are {len(inputs)}")
    parts += [
        f"it takes {old} where there is {new}"
        for old, new in zip(near.inputs, inputs, strict=False)
        if old != new
    ][:3]
    if not parts:
        made = ", ".join(f"{name} {version}" for name, version in plan.versions)
        parts.append(
            "the types agree, but what the layer computes or what is differentiated does not"
            + (f" (the plan was made with {made})" if made else "")
        )
    return f"{what}.  The nearest there is {near.where}: {'; '.join(parts)}.  Fit this step anew"
