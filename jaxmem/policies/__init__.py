"""Policies: what to keep for the backward pass, as plain values.

A policy is frozen, hashable and compared by value.  Two kinds exist.

*Layer policies* say which values of one layer are kept: `full` (none),
`dots`, `dots_no_batch`, `names`, `from_jax`, and unions of those with ``|``.
*Stack policies* say how a stack of layers is cut: `none`, `sqrt`, `revolve`,
`offload`.  A layer policy given for a stack keeps every carry and applies to
each layer.

>>> import jaxmem
>>> jaxmem.policies.sqrt(levels=2) == jaxmem.policies.sqrt(levels=2)
True
>>> jaxmem.policies.names(save=["attn"]) | jaxmem.policies.dots()
Either(first=Names(save=('attn',), offload=()), second=Dots(batch=True))
"""

from jaxmem.policies.base import ByLayer as ByLayer
from jaxmem.policies.base import PipelineChoice as PipelineChoice
from jaxmem.policies.base import PipelineNote as PipelineNote
from jaxmem.policies.base import Policy as Policy
from jaxmem.policies.base import Scans as Scans
from jaxmem.policies.for_layers import Dots as Dots
from jaxmem.policies.for_layers import Either as Either
from jaxmem.policies.for_layers import FromJax as FromJax
from jaxmem.policies.for_layers import Full as Full
from jaxmem.policies.for_layers import Keep as Keep
from jaxmem.policies.for_layers import LayerPolicy as LayerPolicy
from jaxmem.policies.for_layers import Names as Names
from jaxmem.policies.for_stacks import Auto as Auto
from jaxmem.policies.for_stacks import NoRemat as NoRemat
from jaxmem.policies.for_stacks import Offload as Offload
from jaxmem.policies.for_stacks import Revolve as Revolve
from jaxmem.policies.for_stacks import Sqrt as Sqrt
from jaxmem.policies.named import auto as auto
from jaxmem.policies.named import dots as dots
from jaxmem.policies.named import dots_no_batch as dots_no_batch
from jaxmem.policies.named import from_jax as from_jax
from jaxmem.policies.named import from_json as from_json
from jaxmem.policies.named import full as full
from jaxmem.policies.named import names as names
from jaxmem.policies.named import none as none
from jaxmem.policies.named import offload as offload
from jaxmem.policies.named import parse as parse
from jaxmem.policies.named import revolve as revolve
from jaxmem.policies.named import sqrt as sqrt
