"""`jaxmem.fit`: the least recomputation that fits a memory budget, proved by the compiler.

In the order of the data's way: `question` (a step and its target), `holes` (what can be planned,
met while tracing), `step_problem` (the ladder of plans), `fit` (the compiler is asked which rung
fits), `fitted` (what came of it) and `step_plan` (the plan as data, and `use_plan`).  `frontier`
compiles some rungs of the whole ladder.
"""

from jaxmem.fitting.fates import ValueFate
from jaxmem.fitting.fit import fit
from jaxmem.fitting.fitted import Explanation, Fitted
from jaxmem.fitting.frontier import Frontier, FrontierPoint, frontier
from jaxmem.fitting.step_plan import HolePlan, StepPlan, use_plan

__all__ = [
    "Explanation",
    "Fitted",
    "Frontier",
    "FrontierPoint",
    "HolePlan",
    "StepPlan",
    "ValueFate",
    "fit",
    "frontier",
    "use_plan",
]
