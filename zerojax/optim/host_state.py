"""How the state of an update on the host rests in host memory."""

from host_offload.host_update import OnRecord, Rest
from zerojax.state import RecordSpec


def rest_of(record: RecordSpec) -> Rest:
    """Return where a leaf of the state rests for the host update: None is host memory."""
    return None if record.disk_records is None else OnRecord(record.disk_records.kind, record.leaf)
