"""What a step costs: FLOPs and bytes of a model's layers, and the bytes and seconds of a config on
a machine.
"""

from zerojax.costs.estimate import Estimate as Estimate
from zerojax.costs.estimate import estimate as estimate
from zerojax.costs.estimate import kept_of as kept_of
from zerojax.costs.programs import Buildable as Buildable
from zerojax.costs.programs import buildable_of_sizes as buildable_of_sizes
from zerojax.costs.programs import why_no_program as why_no_program
from zerojax.costs.sized_model import sized_batch as sized_batch
from zerojax.costs.sized_model import sized_model as sized_model
from zerojax.costs.sizes import MOST_LAYERS as MOST_LAYERS
from zerojax.costs.sizes import Sizes as Sizes
from zerojax.costs.timing import LANES as LANES
from zerojax.costs.timing import PhaseTime as PhaseTime
from zerojax.costs.timing import Span as Span
from zerojax.costs.timing import StepTime as StepTime
from zerojax.costs.timing import Wires as Wires
from zerojax.costs.traced import grid_of as grid_of
from zerojax.costs.traced import workload_of_model as workload_of_model
from zerojax.costs.workload import CHECKPOINTED as CHECKPOINTED
from zerojax.costs.workload import Grid as Grid
from zerojax.costs.workload import StackWork as StackWork
from zerojax.costs.workload import Workload as Workload
from zerojax.costs.workload import workload_of_sizes as workload_of_sizes
from zerojax.formulas import OFFLOADED as OFFLOADED
from zerojax.formulas import activations_working_bytes as activations_working_bytes
from zerojax.formulas import arithmetic_intensity as arithmetic_intensity
from zerojax.formulas import bandwidth_for as bandwidth_for
from zerojax.formulas import efficiency as efficiency
from zerojax.formulas import flops_per_token as flops_per_token
from zerojax.formulas import hardware_flops_per_token as hardware_flops_per_token
from zerojax.formulas import largest_params as largest_params
from zerojax.formulas import offload_cut as offload_cut
from zerojax.formulas import states_working_bytes as states_working_bytes
