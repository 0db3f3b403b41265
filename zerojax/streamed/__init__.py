"""The streamed step: layers are loaded to the device one after another, used and released."""

from zerojax.streamed.activations import BlockTracer as BlockTracer
from zerojax.streamed.activations import ResidualPlan as ResidualPlan
from zerojax.streamed.embed_head import EmbedHead as EmbedHead
from zerojax.streamed.loops import StackLoops as StackLoops
from zerojax.streamed.microbatches import LayerInputs as LayerInputs
from zerojax.streamed.microbatches import Microbatches as Microbatches
from zerojax.streamed.microbatches import derive_key as derive_key
from zerojax.streamed.phases import Tick as Tick
from zerojax.streamed.plan import StreamedPlan as StreamedPlan
from zerojax.streamed.residuals import check_names as check_names
from zerojax.streamed.residuals import derivative_jaxpr as derivative_jaxpr
from zerojax.streamed.schedules import RunFacts as RunFacts
from zerojax.streamed.schedules import run_schedule as run_schedule
from zerojax.streamed.step import StreamedStep as StreamedStep
from zerojax.streamed.step import build_policy as build_policy
from zerojax.streamed.update_policies.interface import BackwardResult as BackwardResult
from zerojax.streamed.update_policies.interface import HeadDone as HeadDone
from zerojax.streamed.update_policies.interface import RecordGrads as RecordGrads
from zerojax.streamed.update_policies.interface import UpdatePolicy as UpdatePolicy
from zerojax.streamed.update_policies.interface import loss_scale as loss_scale
from zerojax.streamed.update_policies.stored import GradsAlone as GradsAlone
