"""What was moved, drawn beside what was planned."""

from host_offload.trace.perfetto import check_path as check_path
from host_offload.trace.recorder import Recorder as Recorder
