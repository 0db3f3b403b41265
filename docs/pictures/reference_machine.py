"""The host memory and the SSD of the machine for which the documentation plans.

Figures are bytes, and bytes per second.
"""

HOST = {"host_bytes": 128e9, "pinned_bytes": 120e9, "host_kernel": 50e9}
DISK = {"disk_bytes": 2e12, "disk_read": 6e9, "disk_write": 4e9, "disk_both": 6e9}
