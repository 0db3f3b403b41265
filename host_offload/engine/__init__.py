"""Reads records ahead and writes them behind a running program; fetch and store inside jit."""

from host_offload.engine.buffer_sets import num_buffers as num_buffers
from host_offload.engine.buffer_sets import shared_bytes as shared_bytes
from host_offload.engine.engine import Engine as Engine
from host_offload.engine.engine import Mode as Mode
from host_offload.engine.ops import DiskRecords as DiskRecords
from host_offload.engine.ops import Lifetime as Lifetime
from host_offload.engine.ops import Swap as Swap
from host_offload.engine.ops import User as User
from host_offload.engine.stats import MOST_EVENTS as MOST_EVENTS
from host_offload.engine.stats import Event as Event
from host_offload.engine.stats import Stats as Stats
