"""jaxmem: train JAX models that do not fit.

In the order of the data's way: what a layer keeps (`policies`), how a stack is
cut (`Plan`), what to decorate (`remat` and its short forms, `scan`, `linen`,
`nnx`), what a whole step is to keep within a budget (`fit`, `frontier`), in how many parts a
batch goes through it (`value_and_grad`, `MultiSteps`), and what came of it (`stacks`,
`saved_residuals`, `memory_report`, for any of `targets`).
"""

from jaxmem import linen as linen
from jaxmem import nnx as nnx
from jaxmem import policies as policies
from jaxmem import targets as targets
from jaxmem.accumulate import AdamA as AdamA
from jaxmem.accumulate import AdamAState as AdamAState
from jaxmem.accumulate import BatchAux as BatchAux
from jaxmem.accumulate import MultiSteps as MultiSteps
from jaxmem.accumulate import MultiStepsState as MultiStepsState
from jaxmem.accumulate import Weighted as Weighted
from jaxmem.accumulate import value_and_grad as value_and_grad
from jaxmem.compare import Comparison as Comparison
from jaxmem.compare import compare as compare
from jaxmem.difference import Difference as Difference
from jaxmem.errors import BudgetError as BudgetError
from jaxmem.errors import JaxmemWarning as JaxmemWarning
from jaxmem.errors import NoEffectWarning as NoEffectWarning
from jaxmem.errors import NoStackWarning as NoStackWarning
from jaxmem.errors import OffloadWarning as OffloadWarning
from jaxmem.find import LayerStack as LayerStack
from jaxmem.fitting import Explanation as Explanation
from jaxmem.fitting import Fitted as Fitted
from jaxmem.fitting import Frontier as Frontier
from jaxmem.fitting import FrontierPoint as FrontierPoint
from jaxmem.fitting import HolePlan as HolePlan
from jaxmem.fitting import StepPlan as StepPlan
from jaxmem.fitting import ValueFate as ValueFate
from jaxmem.fitting import fit as fit
from jaxmem.fitting import frontier as frontier
from jaxmem.fitting import use_plan as use_plan
from jaxmem.inspect import PlannedStack as PlannedStack
from jaxmem.inspect import stacks as stacks
from jaxmem.jobs.job import Job as Job
from jaxmem.jobs.verify import Verification as Verification
from jaxmem.jobs.verify import verify as verify
from jaxmem.memory import memory_report as memory_report
from jaxmem.plan import Plan as Plan
from jaxmem.policies import Policy as Policy
from jaxmem.problem import Problem as Problem
from jaxmem.remat import remat as remat
from jaxmem.remat import remat_auto as remat_auto
from jaxmem.remat import remat_dots as remat_dots
from jaxmem.remat import remat_full as remat_full
from jaxmem.remat import remat_offload as remat_offload
from jaxmem.remat import remat_revolve as remat_revolve
from jaxmem.remat import remat_sqrt as remat_sqrt
from jaxmem.report import Lint as Lint
from jaxmem.report import MemoryReport as MemoryReport
from jaxmem.report import Suggestion as Suggestion
from jaxmem.residuals import Residual as Residual
from jaxmem.residuals import Residuals as Residuals
from jaxmem.residuals import saved_residuals as saved_residuals
from jaxmem.scan import scan as scan
from jaxmem.targets import CompileError as CompileError
from jaxmem.targets import Target as Target
from jaxmem.targets import target as target
from jaxmem.tracing import use_policy as use_policy

__version__ = "0.1.0"
