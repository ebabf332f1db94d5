"""Looks at a step while it is traced: its decorated regions, and what each could keep."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxmem import _jax
from jaxmem.errors import NoEffectWarning, warn
from jaxmem.estimate.roofline import Roofline
from jaxmem.fitting.regions import Region, stack_region, unrolled_region
from jaxmem.fitting.turn import Turn, turn_of
from jaxmem.fitting.uses import NOWHERE, ONCE, SCOPE, twice_differentiated, uses
from jaxmem.parallel.partition import Partition
from jaxmem.policies import ByLayer
from jaxmem.trace import context
from jaxmem.trace.layer import Layer, NoReverseMode
from jaxmem.unrolled import Code

# ---------------------------------------------------------------- types

# A layer or a piece of code, by its digest, and how many layers or operations it has.
_Key = tuple[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Stack:
    """A stack that is a region, and under which numbers its operands are read where it runs."""

    stack: Any
    layer: Layer
    numbers: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class Collector(ByLayer):
    """The policy of every decorated region while its step is looked at: notes the regions.

    Each region is traced in a scope of its own, by which it is found again in the whole step.
    """

    roofline: Roofline
    offload: bool
    devices: int = 1
    regions: dict[_Key, Region] = dataclasses.field(default_factory=dict, init=False)
    # What is in each scope, and the layers of each stack, by what of it is differentiated.
    _regions: dict[str, _Key] = dataclasses.field(default_factory=dict, init=False)
    _layers: dict[Any, set[_Key]] = dataclasses.field(default_factory=dict, init=False)
    _stacks: dict[_Key, "_Stack"] = dataclasses.field(default_factory=dict, init=False)
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count, init=False)

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
        return turn_of(closed, self._regions, self.roofline)

    def plan_for(self, stack: Any, layer: Layer) -> None:
        """Note a stack; it keeps everything."""
        if not layer.has_reverse_mode:
            return  # forward mode keeps nothing, and has nothing to plan
        key = _key(stack, layer)
        if key not in self.regions:
            self.regions[key] = stack_region(stack, layer, layer, self.roofline, self.offload)
            self._stacks[key] = _Stack(stack, layer)
        self._layers.setdefault(stack, set()).add(key)

    def as_it_stands(
        self, stack: Any, layer: Layer, args: Sequence[Any]
    ) -> contextlib.AbstractContextManager[Any]:
        scope, key = self._new_scope(), _key(stack, layer)
        if key in self._layers.get(stack, ()):
            self._regions[scope] = key
            if self.devices > 1:
                number = next(self._numbers)
                self._stacks[key].numbers.append(number)
                _jax.read(args, number)
        return jax.named_scope(scope)

    def split(self, parts: Partition) -> None:
        """Have the regions that are stacks speak of one device of a mesh."""
        for key, known in self._stacks.items():
            operands = next((parts.read[n] for n in known.numbers if n in parts.read), None)
            if operands is None:
                continue
            stack, layer, region = known.stack, known.layer, self.regions[key]
            local = parts.layer(layer, operands, layer.body.num_consts + layer.body.num_carry)
            new = stack_region(stack, layer, local, self.roofline, self.offload)
            self.regions[key] = dataclasses.replace(new, uses=region.uses, is_local=True)

    def run_unrolled(self, closed: Any, args: Sequence[Any], label: str) -> list[Any]:
        """Note code without a stack; it runs as it stands."""
        scope = self._new_scope()
        self._note(Code(closed), label, scope)
        with context.inside_layer(), jax.named_scope(scope):
            return _jax.evaluate(closed, args)

    def __str__(self) -> str:
        return "looked at by jaxmem.fit"

    # ------------------------------------------------------------ implementation

    def _note(self, code: Code, label: str, scope: str) -> None:
        if not len(code):
            return  # nothing is computed, and nothing kept
        key = code.digest, len(code)
        if key not in self.regions:
            try:
                region = unrolled_region(code, label, self.roofline, self.offload)
            except NoReverseMode as error:
                why = str(error).split(". ")[0]
                warn(
                    f"{label} is not planned and keeps everything, as part of it has no reverse "
                    f"mode in jax: {why}",
                    NoEffectWarning,
                )
                return
            self.regions[key] = region
        self._regions[scope] = key

    def _new_scope(self) -> str:
        return f"{SCOPE}{next(self._numbers)}."


# ---------------------------------------------------------------- implementation


def _key(stack: Any, layer: Layer) -> _Key:
    return layer.digest, stack.form.length
