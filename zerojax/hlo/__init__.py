"""Facts of compiled programs, read from their HLO: collectives, copies between host and device, overlap."""

from zerojax.hlo.communication import COLLECTIVES as COLLECTIVES
from zerojax.hlo.communication import Collective as Collective
from zerojax.hlo.communication import collective_bytes as collective_bytes
from zerojax.hlo.communication import collectives as collectives
from zerojax.hlo.communication import peak_gathered_bytes as peak_gathered_bytes
from zerojax.hlo.host_link import Descriptor as Descriptor
from zerojax.hlo.host_link import HostCopy as HostCopy
from zerojax.hlo.host_link import HostSlice as HostSlice
from zerojax.hlo.host_link import host_copies as host_copies
from zerojax.hlo.host_link import host_link_bytes as host_link_bytes
from zerojax.hlo.host_link import host_slices as host_slices
from zerojax.hlo.host_link import unsafe_host_slices as unsafe_host_slices
from zerojax.hlo.overlap import Span as Span
from zerojax.hlo.overlap import carried_arrays as carried_arrays
from zerojax.hlo.overlap import num_products as num_products
from zerojax.hlo.overlap import spans as spans
