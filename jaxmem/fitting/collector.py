"""Looks at a step while it is traced: its decorated regions, and how often it runs each."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxmem import _jax, tracing
from jaxmem.fitting.holes import Hole, stack_hole, straight_hole
from jaxmem.layer import Layer
from jaxmem.policies import ByLayer
from jaxmem.roofline import Roofline
from jaxmem.straight import Code

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Collector(ByLayer):
    """The policy of every decorated region while its step is looked at: notes the holes.

    Each region is traced in a scope of its own, by which it is found again in the whole step.
    """

    roofline: Roofline
    offload: bool
    holes: dict[tuple[str, int], Hole] = dataclasses.field(default_factory=dict)
    _scopes: dict[str, Hole | None] = dataclasses.field(default_factory=dict)  # that it is of
    _stacks: list[tuple[Any, str]] = dataclasses.field(default_factory=list)  # with their scopes

    def count(self, closed: Any) -> None:
        """Tell each hole where the step runs it, and how often.

        Args:
          closed: the step, as it was traced.
        """
        uses = _uses(closed)
        for scope, hole in self._scopes.items():
            if hole is not None:
                # Of a region that is not found there it is known that it is somewhere.
                hole.uses += uses.get(scope, [()])

    def plan_for(self, stack: Any, layer: Layer) -> None:
        """Note a stack; it keeps everything."""
        if self._scope_of(stack) is not None:
            return
        key = layer.digest, stack.form.length
        if key not in self.holes:
            self.holes[key] = stack_hole(stack, layer, self.roofline, self.offload)
        scope = self._new_scope()
        self._stacks.append((stack, scope))
        self._scopes[scope] = self.holes[key]

    @contextlib.contextmanager
    def as_it_stands(self, stack: Any) -> Iterator[None]:
        scope = self._scope_of(stack)
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            yield

    def run_straight(self, closed: Any, args: Sequence[Any], label: str) -> list[Any]:
        """Note code without a stack; it runs as it stands."""
        if tracing.is_inside_layer() or tracing.is_inside_region():
            return _jax.evaluate(closed, args)
        scope = self._new_scope()
        with tracing.inside_layer(), jax.named_scope(scope):
            outs = _jax.evaluate(closed, args)
        return tracing.when_differentiated(outs, lambda: self._note(Code(closed), label, scope))

    def __str__(self) -> str:
        return "looked at by jaxmem.fit"

    # ------------------------------------------------------------ implementation

    def _note(self, code: Code, label: str, scope: str) -> None:
        if not len(code):
            return  # nothing is computed, and nothing kept
        key = code.digest, len(code)
        if key not in self.holes:
            self.holes[key] = straight_hole(code, label, self.roofline, self.offload)
        self._scopes[scope] = self.holes[key]

    def _new_scope(self) -> str:
        scope = f"{_SCOPE}{len(self._scopes)}."
        self._scopes[scope] = None
        return scope

    def _scope_of(self, stack: Any) -> str | None:
        return next((scope for known, scope in self._stacks if known is stack), None)


# ---------------------------------------------------------------- implementation

_SCOPE = "jaxmem_region_"


def _uses(closed: Any, differentiated: bool = False) -> dict[str, list[tuple[int, ...]]]:
    """Of each scope in a jaxpr its uses: of each the lengths of the scans around it.

    What is traced once may be called several times.  Counted is the way there alone.

    Args:
      differentiated: whether all of it is.
    """
    found: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)
    here: set[str] = set()
    for eqn in closed.jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        if "transpose(" in stack:
            continue
        # Where gradients are taken within a scan, it is no more itself a part of them.
        way_there = differentiated or "jvp(" in stack
        own = set(re.findall(rf"{_SCOPE}\d+\.", stack)) if way_there else set()
        here |= own
        scan = (_jax.scan_parts(eqn).length,) if way_there and _jax.is_scan(eqn) else ()
        branches: dict[str, list[tuple[int, ...]]] = {}
        for sub in _jax.all_subjaxprs(eqn):
            for scope, uses in _uses(sub, way_there).items():
                # Of the branches of a cond one is taken.
                branches[scope] = max(branches.get(scope, []), uses, key=len)
        for scope, uses in branches.items():
            if scope not in own:
                found[scope] += [(*scan, *use) for use in uses]
    return {**found, **{scope: [()] for scope in here}}
