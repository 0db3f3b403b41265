"""Bytes between tiers: device memory, pinned host memory and disk.

Mechanism only: `zerojax` decides what lives where.
"""

from host_offload.schedule import Phase as Phase
from host_offload.schedule import Schedule as Schedule
from host_offload.schedule import build_schedule as build_schedule
from host_offload.tiers import TIERS as TIERS
from host_offload.tiers import memory_kind as memory_kind
