"""Moves training state between device memory, pinned host memory and disk.

This package is the mechanism only; `zerojax` decides which state lives in which tier.
"""

from host_offload.schedule import Phase as Phase
from host_offload.schedule import Schedule as Schedule
from host_offload.schedule import build_schedule as build_schedule
from host_offload.tiers import TIERS as TIERS
from host_offload.tiers import memory_kind as memory_kind
