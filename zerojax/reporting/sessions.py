"""The sessions of a run: its first process, and each one that resumed it, in `sessions.json`.

    [{"started": "2026-03-01 09:30:00+01:00", "seconds": 61.5, "first_step": 1, "last_step": 500,
      "state": "finished", "command": "python train.py"}]

The file is replaced whenever the page is written. A session that was killed therefore keeps the
state "running", which the page of a later session shows as "killed".
"""

import dataclasses
import datetime
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Sequence

from host_offload.fields import Field, parse_json
from zerojax.reporting.folder import SESSIONS, RunFolder, open_file, replace_file

RUNNING = "running"
KILLED = "killed"
logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """What one process did of a run.

    Attributes:
      started: local date and time of its start, with the offset from UTC.
      seconds: its duration so far.
      first_step: number of its first step.
      last_step: number of its last step; `first_step - 1` before the first one has ended.
      state: how it ended, or "running".
      command: its command line.
    """

    started: str
    seconds: float
    first_step: int
    last_step: int
    state: str
    command: str


def read_sessions(folder: RunFolder) -> list[Session]:
    """Return the earlier sessions of a run; a file that cannot be read is reported and left out."""
    path = folder.file(SESSIONS)
    try:
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            entries = Field(parse_json(file.read())).items()
        return [_parse_session(entry) for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, OverflowError) as error:
        logger.warning("%s cannot be read, and is replaced: %s", path, error)
        return []


def write_sessions(folder: RunFolder, sessions: Sequence[Session]) -> None:
    """Replace the file.

    Raises:
      OSError: it could not be written; the old file remains.
    """
    entries = [dataclasses.asdict(session) for session in sessions]
    replace_file(folder.file(SESSIONS), [json.dumps(entries, indent=1).encode() + b"\n"])


def mark_killed(session: Session) -> Session:
    """Return an earlier session; if it never wrote how it ended, its state becomes "killed"."""
    if session.state != RUNNING:
        return session
    return dataclasses.replace(session, state=KILLED)


def format_start(seconds: float) -> str:
    """Return a Unix time as local date and time, with the offset from UTC."""
    start = datetime.datetime.fromtimestamp(seconds, datetime.UTC).astimezone()
    return start.isoformat(sep=" ", timespec="seconds")


def read_command() -> str:
    """Return the command line of this process, quoted for a shell.

    Bytes that are not UTF-8 are shown as escapes.
    """
    command = shlex.join(sys.orig_argv)
    return command.encode(errors="backslashreplace").decode()


def _parse_session(entry: Field) -> Session:
    seconds = entry["seconds"]
    if not isinstance(seconds.value, int | float) or not 0 <= seconds.value < math.inf:
        seconds.refuse("a number of seconds")
    return Session(
        started=entry["started"].text(),
        seconds=float(seconds.value),
        first_step=entry["first_step"].integer(),
        last_step=entry["last_step"].integer(least=-1),
        state=entry["state"].text(),
        command=entry["command"].text(),
    )
