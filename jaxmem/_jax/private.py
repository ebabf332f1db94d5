"""The one file that touches private modules: all that the public APIs of jax and flax lack.

What a release moves is mended here.  What a release may not have is asked for, and may be None.
"""

from typing import Any

import flax
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import util as _util
from jax._src.ad_util import empty_like_aval as empty_like_aval
from jax._src.ad_util import zeros_like_aval as zeros_like_aval
from jax._src.checkify import checkify_jaxpr as checkify_jaxpr
from jax._src.config import use_shardy_partitioner as use_shardy_partitioner
from jax._src.core import EvalTrace as EvalTrace
from jax._src.core import join_effects as join_effects
from jax._src.core import trace_ctx as trace_ctx
from jax._src.debugging import debug_effect as debug_effect
from jax._src.effects import ordered_effects as ordered_effects
from jax._src.effects import remat_allowed_effects as remat_allowed_effects
from jax._src.interpreters.batching import BatchTracer as BatchTracer
from jax._src.interpreters.batching import batch_jaxpr as batch_jaxpr
from jax._src.lax import lax as _lax
from jax._src.source_info_util import current_name_stack as current_name_stack
from jax._src.source_info_util import user_context as user_context
from jax._src.state.types import RefEffect as RefEffect
from jax.experimental.key_reuse import _core as _key_reuse

# `jax.debug_key_reuse`: which operations use up random keys, and which make them.
KeyReuseSignature = _key_reuse.KeyReuseSignature
KeySink, KeySource, KeyForward = _key_reuse.Sink, _key_reuse.Source, _key_reuse.Forward
dynamic_key_reuse_signature = _key_reuse.dynamic_key_reuse_signature
jaxpr_key_reuse_signature = _key_reuse.jaxpr_type_signature
key_reuse_signatures = _key_reuse.key_reuse_signatures

convert_element_type: Any = getattr(_lax, "_convert_element_type")  # noqa: B009

# What `jax.experimental.checkify` does with each primitive.
error_checks: dict[Any, Any] = getattr(_checkify, "error_checks", {})
trace_context: Any = getattr(_config, "trace_context", None)
register_cache: Any = getattr(_util, "register_cache", None)

flax_switches: Any = flax.config._values
