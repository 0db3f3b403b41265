"""Services for a running program: disk records, other processes, signals and preemption."""

from zerojax.runtime.cluster import Place as Place
from zerojax.runtime.cluster import find_place as find_place
from zerojax.runtime.cluster import join_cluster as join_cluster
from zerojax.runtime.interrupts import interrupts_wait as interrupts_wait
from zerojax.runtime.peers import Calls as Calls
from zerojax.runtime.peers import find_peers as find_peers
from zerojax.runtime.preemption import Preemption as Preemption
from zerojax.runtime.processes import AllProcesses as AllProcesses
from zerojax.runtime.processes import BackgroundBarrier as BackgroundBarrier
from zerojax.runtime.swap import RecordKey as RecordKey
from zerojax.runtime.swap import SwapSession as SwapSession
from zerojax.runtime.switching import quick_switches as quick_switches
from zerojax.runtime.termination import raise_on_sigterm as raise_on_sigterm
