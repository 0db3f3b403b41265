"""`build_train_step`, and the `Program` that it returns."""

from zerojax.program.build import assemble as assemble
from zerojax.program.build import build_train_step as build_train_step
from zerojax.program.compile import LoweredStep as LoweredStep
from zerojax.program.program import Program as Program
from zerojax.program.skipped import FAULT as FAULT
from zerojax.program.skipped import SkippedSteps as SkippedSteps
from zerojax.program.updated_records import LeafUpdate as LeafUpdate
from zerojax.program.updated_records import RecordSettler as RecordSettler
from zerojax.program.updated_records import UpdatedRecord as UpdatedRecord
