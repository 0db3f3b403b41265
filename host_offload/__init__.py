"""Move bytes between tiers: device memory, pinned host memory and disk.

This package is mechanism only: `zerojax` decides where each record is stored.
"""

from host_offload.schedule import Phase as Phase
from host_offload.schedule import Schedule as Schedule
from host_offload.schedule import build_schedule as build_schedule
from host_offload.tiers import TIERS as TIERS
from host_offload.tiers import memory_kind as memory_kind
