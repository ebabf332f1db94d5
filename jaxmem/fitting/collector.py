"""Looks at a step while it is traced: its decorated regions, and what each could keep."""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxmem import _jax
from jaxmem.errors import NoEffectWarning, warn
from jaxmem.estimate.roofline import Roofline
from jaxmem.fitting.regions import Region, called, stack_region, unrolled_region
from jaxmem.fitting.turn import Turn, turn_of
from jaxmem.fitting.uses import NOWHERE, ONCE, SCOPE, twice_differentiated, uses
from jaxmem.parallel.carries import SplitCarries
from jaxmem.parallel.partition import Partition
from jaxmem.policies import ByLayer, PipelineChoice, PipelineNote, Scans
from jaxmem.rewrite.around import own_way, ways
from jaxmem.trace import context
from jaxmem.trace.layer import Layer, NoReverseMode, nbytes
from jaxmem.unrolled import Code

# ---------------------------------------------------------------- types

# A layer or a piece of code, by its digest, and how many layers or operations it has.
_Key = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class _Reads:
    """Under which numbers values of a region are read, in one of the places where it runs.

    Attributes:
      operands: all of them.
      made: of unrolled code, the results of each operation, by its place.
    """

    operands: int
    made: Mapping[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Spread:
    """A region whose arrays are spread over a mesh: how it is made once it is known how.

    Attributes:
      reads: where it runs.
      on_one_device: from the partition of the step and where the region is read in it to the
        region; None where it has no reverse mode.
    """

    on_one_device: Callable[[Partition | None, _Reads], Region | None]
    reads: list[_Reads] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class Collector(ByLayer):
    """The policy of every decorated region while its step is looked at: notes the regions.

    Each region is traced in a scope of its own, by which it is found again in the whole step.

    Attributes:
      scans: what scans are that can be taken for something else than stacks.
    """

    roofline: Roofline
    offload: bool
    devices: int = 1
    partition: str = ""
    choice: PipelineChoice | None = None
    scans: Scans = "stacks"
    regions: dict[_Key, Region] = dataclasses.field(default_factory=dict, init=False)
    # How pipelines that leave it open can be run, and of all pipelines, what was noted.
    choices: list[PipelineChoice] = dataclasses.field(default_factory=list, init=False)
    pipelines: list[PipelineNote] = dataclasses.field(default_factory=list, init=False)
    # What is in each scope, and the layers of each stack, by what of it is differentiated.
    _regions: dict[str, _Key] = dataclasses.field(default_factory=dict, init=False)
    _layers: dict[Any, set[_Key]] = dataclasses.field(default_factory=dict, init=False)
    _spread: dict[_Key, "_Spread"] = dataclasses.field(default_factory=dict, init=False)
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count, init=False)
    # What else scans can be taken for.
    other_scans: dict[Scans, None] = dataclasses.field(default_factory=dict, init=False)
    # Of each mesh axis, the bytes of carries that it could split and does not.
    _whole: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter, init=False
    )

    def count(self, closed: Any) -> None:
        """Tell each region where the step runs it, and how often.

        Args:
          closed: the step, as it was traced.
        """
        found = uses(closed, self._regions)
        if not any(where.times for where in found.values()):
            found = {}  # no gradient was told from the rest
        # A loop's stack is differentiated for ever more operands, till they are all that are.
        superseded = {
            key
            for layers in self._layers.values()
            if any(key in found for key in layers)
            for key in layers
        }
        for key, region in self.regions.items():
            # What was differentiated while the step was traced, and is not found, may yet be there.
            region.uses = found.get(key, NOWHERE if key in superseded else ONCE)

        for key in self.regions.keys() & twice_differentiated(closed, self._regions):
            warn(
                f"{self.regions[key].where} is differentiated twice, and planned for its first "
                "derivative alone: what the second one keeps is in no prediction and can be most "
                "of what the step needs, whatever the plan; a smaller batch lowers it",
                NoEffectWarning,
            )

    def turn(self, closed: Any) -> Turn:
        """Where the step turns from the forward to the backward pass of its regions."""
        # That of a pipeline over its ticks is counted apart.
        return turn_of(closed, self._regions, self.roofline, in_loops=not self.pipelines)

    def splitting(self, least: int) -> list[str]:
        """Mesh axes that would spare each device so many bytes, were all carries kept split."""
        return [axis for axis, size in self._whole.items() if size >= least]

    def scans_are(self, closed: Any, stacks: Sequence[Any]) -> Scans:
        found = ways(closed, stacks)
        self.other_scans.update(dict.fromkeys(found))
        return own_way(self.scans, found)

    def pipeline(self, choices: Sequence[PipelineChoice]) -> PipelineChoice:
        self.choices.extend(one for one in choices if one not in self.choices)
        return next((one for one in choices if one == self.choice), choices[0])

    def note_pipeline(self, note: PipelineNote) -> None:
        if note not in self.pipelines:  # a step is traced more than once
            self.pipelines.append(note)

    def plan_for(self, stack: Any, layer: Layer) -> None:
        """Note a stack; it keeps everything."""
        if not layer.has_reverse_mode:
            return  # forward mode keeps nothing, and has nothing to plan
        key = _key(stack, layer)
        if key not in self.regions:
            if self._is_spread():
                self._spread[key] = _Spread(functools.partial(self._local_stack, stack, layer))
                self.regions[key] = _unplanned(layer.digest, called(stack))
            else:
                self.regions[key] = stack_region(stack, layer, layer, self.roofline, self.offload)
        self._layers.setdefault(stack, set()).add(key)

    def as_it_stands(
        self, stack: Any, layer: Layer, args: Sequence[Any]
    ) -> contextlib.AbstractContextManager[Any]:
        scope, key = self._new_scope(), _key(stack, layer)
        if key in self._layers.get(stack, ()):
            self._regions[scope] = key
            self._read(key, args)
        return jax.named_scope(scope)

    def on_one_device(self, parts: Partition | None) -> None:
        """Have the regions whose arrays are spread over a mesh speak of one of its devices.

        Args:
          parts: None where it is not known how they are split.
        """
        for key, known in self._spread.items():
            before = self.regions.pop(key)
            # A loop is traced several times, and what was read then is not in the step.
            there = [one for one in known.reads if parts and one.operands in parts.read]
            own = parts if there else None
            if region := known.on_one_device(own, there[0] if there else _Reads(-1, {})):
                region.uses, region.is_local = before.uses, own is not None
                self.regions[key] = region

    def run_unrolled(self, closed: Any, args: Sequence[Any], label: str) -> list[Any]:
        """Note code without a stack; it runs as it stands."""
        scope, code = self._new_scope(), Code(closed)
        key = self._note(code, label, scope)
        with context.inside_layer(), jax.named_scope(scope):
            if key not in self._spread or not self._is_spread():
                return _jax.evaluate(closed, args)
            made: dict[int, int] = {}

            def read(place: int, outs: Sequence[Any]) -> Sequence[Any]:
                made[place] = next(self._numbers)
                _jax.read(outs, made[place])
                return outs

            self._read(key, args, made)
            return _jax.evaluate(code.closed, args, each=read)

    def __str__(self) -> str:
        return "looked at by jaxmem.fit"

    # ------------------------------------------------------------ implementation

    def _note(self, code: Code, label: str, scope: str) -> _Key | None:
        if not len(code):
            return None  # nothing is computed, and nothing kept
        key = code.digest, len(code)
        if key not in self.regions:
            if self._is_spread():
                self._spread[key] = _Spread(functools.partial(self._local_code, code, label))
                region = _unplanned(code.digest, label)
            elif (region := self._code(code, label)) is None:
                return None
            self.regions[key] = region
        self._regions[scope] = key
        return key

    def _code(self, code: Code, label: str) -> Region | None:
        try:
            return unrolled_region(code, label, self.roofline, self.offload)
        except NoReverseMode as error:
            why = str(error).split(". ")[0]
            warn(
                f"{label} is not planned and keeps everything, as part of it has no reverse "
                f"mode in jax: {why}",
                NoEffectWarning,
            )
            return None

    def _is_spread(self) -> bool:
        """Whether arrays here are spread over devices: inside of a `shard_map` they are parts."""
        return self.devices > 1 and _jax.shards() == 1

    def _read(self, key: _Key, args: Sequence[Any], made: Mapping[int, int] | None = None) -> None:
        """Have the operands of a region read where it runs.

        Args:
          made: by the place of an operation, under which number its results are read.
        """
        if self._is_spread() and key in self._spread:
            number = next(self._numbers)
            self._spread[key].reads.append(_Reads(number, {} if made is None else made))
            _jax.read(args, number)

    def _local_stack(
        self, stack: Any, layer: Layer, parts: Partition | None, reads: _Reads
    ) -> Region:
        if parts is None:
            return stack_region(stack, layer, layer, self.roofline, self.offload)
        consts, carry, xs = layer.body.split_in(parts.read[reads.operands])
        rows = [None if spec is None else spec[1:] for spec in xs]
        results = [*carry, *[None] * layer.body.num_y]
        local = parts.layer(layer, [*consts, *carry, *rows], results)
        _, avals, _ = local.body.split_in(local.body.jaxpr.in_avals)
        for axis, size in parts.mesh.shape.items():
            if size > 1 and SplitCarries.can_split(layer.body, axis):
                self._whole[axis] += stack.form.length * sum(
                    nbytes(aval)
                    for aval, spec in zip(avals, carry, strict=True)
                    if not any(axis in axes for axes in spec or ())
                )
        return stack_region(stack, layer, local, self.roofline, self.offload)

    def _local_code(
        self, code: Code, label: str, parts: Partition | None, reads: _Reads
    ) -> Region | None:
        if parts is None:
            return self._code(code, label)
        jaxpr = code.closed.jaxpr
        specs = dict(zip(jaxpr.invars, parts.read[reads.operands], strict=True))
        for place, number in reads.made.items():
            specs.update(zip(jaxpr.eqns[place].outvars, parts.read.get(number, ()), strict=False))
        return self._code(code.on_one_device(parts, specs), label)

    def _new_scope(self) -> str:
        return f"{SCOPE}{next(self._numbers)}."


# ---------------------------------------------------------------- implementation


def _unplanned(digest: str, where: str) -> Region:
    """A region that is planned once it is known how its arrays are split."""
    return Region(digest=digest, inputs=(), where=where, param_bytes=0)


def _key(stack: Any, layer: Layer) -> _Key:
    return layer.digest, stack.form.length
