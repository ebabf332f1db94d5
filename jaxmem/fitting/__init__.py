"""`jaxmem.fit`: the fastest plan that fits a memory budget, proved by the compiler.

In the order of the data's way: `compile_request` (a step and its target), `regions` (what can
be planned, met while tracing), `step_problem` (the Pareto front of plans), `ways` (that of all ways
to run the step), `fit` (the compiler is asked which of these candidates fits), `fitted` (what came
of it) and `step_plan` (the plan as data, and `use_plan`).  `frontier` compiles some candidates from
the whole front.
"""

from jaxmem.fitting.decisions import ValueDecision
from jaxmem.fitting.fit import fit
from jaxmem.fitting.fitted import Explanation, Fitted
from jaxmem.fitting.frontier import Frontier, FrontierPoint, frontier
from jaxmem.fitting.step_plan import RegionPlan, StepPlan, use_plan

__all__ = [
    "Explanation",
    "Fitted",
    "Frontier",
    "FrontierPoint",
    "RegionPlan",
    "StepPlan",
    "ValueDecision",
    "fit",
    "frontier",
    "use_plan",
]
