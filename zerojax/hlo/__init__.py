"""Facts read from a compiled program's HLO, and predictions made from it.

The facts are collectives, host copies and what overlaps them.
"""

from zerojax.hlo.callbacks import CALLBACKS as CALLBACKS
from zerojax.hlo.communication import Collective as Collective
from zerojax.hlo.communication import collective_bytes as collective_bytes
from zerojax.hlo.communication import collectives as collectives
from zerojax.hlo.communication import peak_gathered_bytes as peak_gathered_bytes
from zerojax.hlo.host_link import Descriptor as Descriptor
from zerojax.hlo.host_link import host_copies as host_copies
from zerojax.hlo.host_link import host_link_bytes as host_link_bytes
from zerojax.hlo.host_link import host_slices as host_slices
from zerojax.hlo.host_link import unsafe_host_slices as unsafe_host_slices
from zerojax.hlo.overlap import Span as Span
from zerojax.hlo.overlap import carried_arrays as carried_arrays
from zerojax.hlo.overlap import num_products as num_products
from zerojax.hlo.overlap import spans as spans
from zerojax.hlo.parse import module_name as module_name
from zerojax.hlo.rates import RATES as RATES
from zerojax.hlo.rates import Rates as Rates
from zerojax.hlo.rates import find_rates as find_rates
from zerojax.hlo.rates import rates_with as rates_with
from zerojax.hlo.simulation import GRAPHS as GRAPHS
from zerojax.hlo.simulation import STREAMS as STREAMS
from zerojax.hlo.simulation import Simulation as Simulation
from zerojax.hlo.simulation import simulate as simulate
from zerojax.hlo.thunks import Thunks as Thunks
from zerojax.hlo.thunks import dumped_text as dumped_text
from zerojax.hlo.thunks import read_thunks as read_thunks
from zerojax.hlo.traffic import HostMove as HostMove
from zerojax.hlo.traffic import HostTraffic as HostTraffic
from zerojax.hlo.traffic import host_traffic as host_traffic
