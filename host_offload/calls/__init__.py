"""Callbacks of running programs: predicts which record each call asks for, and checks it."""

from host_offload.calls.log import CallLog as CallLog
from host_offload.calls.site import CallbackSite as CallbackSite
from host_offload.calls.site import Calls as Calls
from host_offload.calls.site import find_site as find_site
