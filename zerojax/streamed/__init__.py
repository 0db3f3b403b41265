"""The step whose layers come to the device and go."""

from zerojax.streamed.plan import StreamedPlan as StreamedPlan
from zerojax.streamed.plan import record_bytes as record_bytes
from zerojax.streamed.step import StreamedStep as StreamedStep
