"""Training state that takes a fraction of its memory: gradients, optimizer state, parameters."""

from jaxmem.state.adalomo import AdaLomoState as AdaLomoState
from jaxmem.state.adalomo import adalomo as adalomo
from jaxmem.state.apply import apply_gradients as apply_gradients
from jaxmem.state.codecs import Coded as Coded
from jaxmem.state.codecs import Companding as Companding
from jaxmem.state.codecs import Dynamic as Dynamic
from jaxmem.state.disk import DiskState as DiskState
from jaxmem.state.disk import disk_state as disk_state
from jaxmem.state.masters import MasterWeightsState as MasterWeightsState
from jaxmem.state.masters import master_weights as master_weights
from jaxmem.state.offload import offload_state as offload_state
from jaxmem.state.one_bit import OneBitAdamState as OneBitAdamState
from jaxmem.state.one_bit import one_bit_adam as one_bit_adam
from jaxmem.state.one_bit_lamb import OneBitLambState as OneBitLambState
from jaxmem.state.one_bit_lamb import one_bit_lamb as one_bit_lamb
from jaxmem.state.one_bit_step import OneBitPlan as OneBitPlan
from jaxmem.state.one_bit_step import OneBitStep as OneBitStep
from jaxmem.state.one_bit_step import one_bit_specs as one_bit_specs
from jaxmem.state.one_bit_step import one_bit_step as one_bit_step
from jaxmem.state.one_bit_step import redistribute_errors as redistribute_errors
from jaxmem.state.quantize import quantize_state as quantize_state
from jaxmem.state.step import UpdatedLeaf as UpdatedLeaf
from jaxmem.state.step import UpdatePlan as UpdatePlan
from jaxmem.state.step import value_and_update as value_and_update
from jaxmem.state.stored import OnDisk as OnDisk
