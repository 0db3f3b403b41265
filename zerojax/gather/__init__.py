"""Gather on use: ZeRO-3 for any traced loss.

An interpreter gathers each parameter where it meets data.
"""

from zerojax.gather.lazy import Rule as Rule
from zerojax.gather.on_use import gather_on_use as gather_on_use
