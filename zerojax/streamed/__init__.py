"""The step whose layers come to the device and go."""

from zerojax.streamed.activations import Scratch as Scratch
from zerojax.streamed.phases import index_arrays as index_arrays
from zerojax.streamed.plan import StreamedPlan as StreamedPlan
from zerojax.streamed.plan import record_bytes as record_bytes
from zerojax.streamed.step import Plans as Plans
from zerojax.streamed.step import StreamedStep as StreamedStep
