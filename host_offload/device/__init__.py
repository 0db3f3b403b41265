"""Memory that a device reaches: aligned buffers, links, copies on streams, limits, and a self-test."""

from host_offload.device.buffers import Ring as Ring
from host_offload.device.buffers import allocate as allocate
from host_offload.device.copies import Copies as Copies
from host_offload.device.copies import HostCopies as HostCopies
from host_offload.device.copies import num_bytes as num_bytes
from host_offload.device.cuda_driver import Driver as Driver
from host_offload.device.cuda_driver import driver as driver
from host_offload.device.gpu_copies import copies_of as copies_of
from host_offload.device.limits import available_bytes as available_bytes
from host_offload.device.limits import check_host_memory as check_host_memory
from host_offload.device.limits import host_memory_error as host_memory_error
from host_offload.device.link import Link as Link
from host_offload.device.link import link_of as link_of
from host_offload.device.link import pointer as pointer
from host_offload.device.link import stream_of as stream_of
from host_offload.device.link import view as view
from host_offload.device.link import writable as writable
from host_offload.device.loops import one_trip as one_trip
from host_offload.device.self_test import LinearOrder as LinearOrder
from host_offload.device.self_test import build_form as build_form
from host_offload.device.self_test import check_host_slices as check_host_slices
from host_offload.device.self_test import forms as forms
from host_offload.device.self_test import has_linear_fix as has_linear_fix
from host_offload.device.self_test import linear_order as linear_order
from host_offload.device.self_test import linear_slices_are_right as linear_slices_are_right
from host_offload.device.self_test import records as records
