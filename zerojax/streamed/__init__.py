"""The streamed step: layers are loaded to the device one after another, used and released."""

from zerojax.streamed.activations import ResidualPlan as ResidualPlan
from zerojax.streamed.loops import StackLoops as StackLoops
from zerojax.streamed.residuals import derivative_jaxpr as derivative_jaxpr
from zerojax.streamed.schedules import RunFacts as RunFacts
from zerojax.streamed.schedules import run_schedule as run_schedule
from zerojax.streamed.step import StreamedStep as StreamedStep
