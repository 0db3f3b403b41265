"""Draws a program's transfers next to its plan, as a file for Perfetto."""

from host_offload.trace.perfetto import Span as Span
from host_offload.trace.perfetto import check_path as check_path
from host_offload.trace.recorder import Recorder as Recorder
