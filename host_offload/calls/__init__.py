"""Callbacks of running programs: which record each one is asked for, known before it is asked."""

from host_offload.calls.log import CallLog as CallLog
from host_offload.calls.site import Calls as Calls
from host_offload.calls.site import Site as Site
from host_offload.calls.site import site_of as site_of
