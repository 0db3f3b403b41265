"""Host updates: an elementwise optimizer as a compiled CPU kernel, and callbacks that run it."""

from host_offload.host_update.delayed import DelayedStep as DelayedStep
from host_offload.host_update.group_memory import HOST_LAG as HOST_LAG
from host_offload.host_update.group_memory import LeafGroup as LeafGroup
from host_offload.host_update.host_leaves import HostLeaves as HostLeaves
from host_offload.host_update.kernel import build_kernel as build_kernel
from host_offload.host_update.leaf_kernel import LeafKernel as LeafKernel
from host_offload.host_update.leaf_kernel import OnRecord as OnRecord
from host_offload.host_update.leaf_kernel import Rest as Rest
from host_offload.host_update.queued import QueuedStep as QueuedStep
from host_offload.host_update.step import HostStep as HostStep
