"""The one room that knows jax's private modules.

Three things are needed that jax's public API does not give: evaluating a jaxpr equation by
equation, keeping source lines and name stacks (`evaluation`); the parts of equations whose
parameters differ between releases (`jaxprs`); and primitives with rules of their own (`primitives`,
`rules`, `keys`).
"""

import jaxmem._jax.rules  # noqa: F401  (the primitives get their rules)
from jaxmem._jax.digests import digest as digest
from jaxmem._jax.digests import exactly as exactly
from jaxmem._jax.digests import operation_digest as operation_digest
from jaxmem._jax.digests import place_name as place_name
from jaxmem._jax.digests import place_named_by as place_named_by
from jaxmem._jax.edits import another as another
from jaxmem._jax.edits import as_program as as_program
from jaxmem._jax.edits import flattened as flattened
from jaxmem._jax.edits import followed_by as followed_by
from jaxmem._jax.edits import piece_of as piece_of
from jaxmem._jax.edits import renamed as renamed
from jaxmem._jax.edits import reordered as reordered
from jaxmem._jax.edits import with_equations as with_equations
from jaxmem._jax.edits import with_shape as with_shape
from jaxmem._jax.evaluation import bound as bound
from jaxmem._jax.evaluation import bound_with as bound_with
from jaxmem._jax.evaluation import evaluate as evaluate
from jaxmem._jax.evaluation import evaluate_each as evaluate_each
from jaxmem._jax.evaluation import inlined as inlined
from jaxmem._jax.evaluation import with_consts as with_consts
from jaxmem._jax.evaluation import without_checkpoint as without_checkpoint
from jaxmem._jax.evaluation import without_consts as without_consts
from jaxmem._jax.evaluation import without_jit as without_jit
from jaxmem._jax.jaxprs import PIECE as PIECE
from jaxmem._jax.jaxprs import PLANNED as PLANNED
from jaxmem._jax.jaxprs import RECOMPUTED as RECOMPUTED
from jaxmem._jax.jaxprs import Scan as Scan
from jaxmem._jax.jaxprs import all_subjaxprs as all_subjaxprs
from jaxmem._jax.jaxprs import as_closed as as_closed
from jaxmem._jax.jaxprs import can_be_recomputed as can_be_recomputed
from jaxmem._jax.jaxprs import checkpointed_by as checkpointed_by
from jaxmem._jax.jaxprs import constrains as constrains
from jaxmem._jax.jaxprs import in_call as in_call
from jaxmem._jax.jaxprs import in_checkpoint as in_checkpoint
from jaxmem._jax.jaxprs import is_dropped as is_dropped
from jaxmem._jax.jaxprs import is_jit as is_jit
from jaxmem._jax.jaxprs import is_literal as is_literal
from jaxmem._jax.jaxprs import is_planned as is_planned
from jaxmem._jax.jaxprs import is_scan as is_scan
from jaxmem._jax.jaxprs import is_var as is_var
from jaxmem._jax.jaxprs import name_given_by as name_given_by
from jaxmem._jax.jaxprs import needed as needed
from jaxmem._jax.jaxprs import scan_parts as scan_parts
from jaxmem._jax.keys import made_by as made_by
from jaxmem._jax.keys import named as named
from jaxmem._jax.keys import same_keys as same_keys
from jaxmem._jax.keys import used_by as used_by
from jaxmem._jax.memory import DEVICE as DEVICE
from jaxmem._jax.memory import HOST as HOST
from jaxmem._jax.memory import beside as beside
from jaxmem._jax.memory import is_on_host as is_on_host
from jaxmem._jax.memory import on_device as on_device
from jaxmem._jax.memory import type_on_device as type_on_device
from jaxmem._jax.memory import unfilled_like as unfilled_like
from jaxmem._jax.primitives import Differentiable as Differentiable
from jaxmem._jax.primitives import Linear as Linear
from jaxmem._jax.primitives import bind_stack as bind_stack
from jaxmem._jax.primitives import bind_tangent as bind_tangent
from jaxmem._jax.primitives import is_stack as is_stack
from jaxmem._jax.primitives import keys_p as keys_p
from jaxmem._jax.primitives import stack_p as stack_p
from jaxmem._jax.primitives import tangent_p as tangent_p
from jaxmem._jax.propagation import Spec as Spec
from jaxmem._jax.propagation import is_jaxpr as is_jaxpr
from jaxmem._jax.propagation import is_looked_into as is_looked_into
from jaxmem._jax.propagation import read as read
from jaxmem._jax.propagation import read_number as read_number
from jaxmem._jax.propagation import splits as splits
from jaxmem._jax.tracing import cleared_with_jax as cleared_with_jax
from jaxmem._jax.tracing import flax_config as flax_config
from jaxmem._jax.tracing import is_staged as is_staged
from jaxmem._jax.tracing import keys_are_checked as keys_are_checked
from jaxmem._jax.tracing import keys_unchecked as keys_unchecked
from jaxmem._jax.tracing import trace as trace
from jaxmem._jax.tracing import trace_context as trace_context
from jaxmem._jax.types import Aval as Aval
from jaxmem._jax.types import Eqn as Eqn
from jaxmem._jax.types import as_array as as_array
from jaxmem._jax.types import has_tangent as has_tangent
from jaxmem._jax.types import is_key as is_key
from jaxmem._jax.types import is_tracer as is_tracer
from jaxmem._jax.types import mesh_devices as mesh_devices
from jaxmem._jax.types import shards as shards
from jaxmem._jax.types import stacked as stacked
from jaxmem._jax.types import unfilled as unfilled
from jaxmem._jax.types import varying as varying
from jaxmem._jax.types import zeros_like as zeros_like
