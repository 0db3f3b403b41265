"""Build the library that makes system calls fail (`shim.c`), and control it when it is loaded.

    faults = Faults(library, root)
    with faults.some(Plan(...)) as injected:    in here, calls on files below `root` fail, in all
                                                threads
        ...
    injected()                                  what failed, in order

A `Plan` says which calls fail and how; `drawn` draws a plan for an operation whose calls were
counted.
"""

import contextlib
import ctypes
import dataclasses
import errno
import os
import pathlib
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

SHORT, NOTHING = -1, -2
"""Alternatives to an errno: only half of the bytes are moved; the file ends here."""

_CANNOT_OPEN = ("EIO", "EACCES", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EINTR")
_CANNOT_WRITE = ("EIO", "ENOSPC", "EDQUOT", "EROFS")
KINDS: dict[str, tuple[str | int, ...]] = {
    "open_read": _CANNOT_OPEN,
    "open_write": (*_CANNOT_OPEN, "ENOSPC", "EDQUOT", "EROFS", "EPERM"),
    "read": ("EIO", "EINTR", "ENOMEM", "ESTALE", SHORT, NOTHING),
    "write": ("EIO", "ENOSPC", "EDQUOT", "EFBIG", "EINTR", "ESTALE", SHORT),
    "fsync": (*_CANNOT_WRITE, "EINTR"),
    "fsync_folder": (*_CANNOT_WRITE, "EINVAL"),
    "link": (*_CANNOT_WRITE, "EMLINK", "EPERM", "EXDEV", "EOPNOTSUPP"),
    "rename": (*_CANNOT_WRITE, "EACCES"),
    "unlink": ("EIO", "EACCES", "EBUSY", "EPERM", "EROFS"),
    "mkdir": (*_CANNOT_WRITE, "EACCES", "EMLINK"),
    "rmdir": ("EIO", "EACCES", "EBUSY"),
    "truncate": ("EIO", "ENOSPC", "EFBIG", "EPERM", "EINTR"),
    "allocate": (*_CANNOT_WRITE, "EFBIG", "EINTR", "EINVAL", "ENOSYS", "EOPNOTSUPP"),
    "lock": ("EIO", "EINTR", "ENOLCK", "ENOSYS", "EOPNOTSUPP"),
    "stat": ("EIO", "EACCES", "ENOMEM", "ESTALE"),
    "list": ("EIO", "EACCES", "EMFILE", "ENOMEM", "ESTALE"),
    "space": ("EIO", "EACCES", "ENOSYS", "ESTALE"),
    "close": ("EIO", "ENOSPC", "EDQUOT"),
    "mode": ("EIO", "EPERM", "EROFS"),
    "times": ("EPERM", "EROFS"),
    "copy": ("EIO", "ENOSPC", "ENOSYS", "EXDEV", SHORT),
    "map": ("ENODEV", "ENOMEM"),
}
"""Kinds of calls in the order of shim.c, with the errors that a file system or kernel returns."""

BROKEN: dict[str, Mapping[str, str]] = {
    "a full disk": dict.fromkeys(("write", "mkdir", "link", "allocate", "open_write"), "ENOSPC"),
    "a quota": dict.fromkeys(("write", "mkdir", "link", "allocate", "open_write"), "EDQUOT"),
    "a read-only file system": dict.fromkeys(
        ("open_write", "mkdir", "link", "rename", "unlink", "rmdir", "mode", "times"), "EROFS"
    ),
    "no descriptors": dict.fromkeys(("open_read", "open_write", "list"), "EMFILE"),
    "no memory": dict.fromkeys(("open_read", "open_write", "list", "stat", "read"), "ENOMEM"),
    "a dead disk": dict.fromkeys(
        [k for k in KINDS if k not in ("close", "map", "times", "lock")], "EIO"
    ),
    "a lost server": dict.fromkeys([k for k in KINDS if k not in ("close", "map")], "ESTALE"),
    "no locks": {"lock": "ENOSYS"},
    "folders that cannot be synced": {"fsync_folder": "EINVAL"},
    "no links": {"link": "EOPNOTSUPP"},
    "no reservation": {"allocate": "EOPNOTSUPP"},
    "calls that are interrupted": dict.fromkeys(("read", "write"), "EINTR"),
}
"""Faults of an entire file system: from some call on, all calls of these kinds fail."""

LOST = frozenset({"EIO", NOTHING})
"""Errors that a reader must treat as damage: the bytes cannot be read again."""


def compiler() -> str | None:
    """Return the C compiler, or None."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(target: pathlib.Path) -> None:
    """Compile the library."""
    command = [
        compiler() or "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(target),
        str(pathlib.Path(__file__).with_suffix(".c")),
    ]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The calls that fail.

    Attributes:
      errors: the errors to draw from, by kind of call.
      first: number of the first call that may fail, from 1, counted over these kinds together.
      last: number of the last call that may fail.
      chance: probability that a call between them fails.
      seed: seed of the random choices.
    """

    errors: Mapping[str, Sequence[str | int]]
    first: int = 1
    last: int = 1 << 62
    chance: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        if self.errors == KINDS:
            return f"each call with chance {self.chance:g}"
        errors = ", ".join(
            f"{kind}: {' '.join(map(str, names))}" for kind, names in self.errors.items()
        )
        return f"calls {self.first} to {self.last}, chance {self.chance:g}, {errors}"


@dataclasses.dataclass(frozen=True)
class Injected:
    """A failed call; `error` is the name of an errno, or SHORT, or NOTHING."""

    kind: str
    function: str
    path: str
    error: str | int

    def __str__(self) -> str:
        how = {SHORT: "falls short", NOTHING: "is at the end"}.get(self.error, self.error)  # type: ignore[call-overload]
        return f"{self.function}({self.path}) {how}"


class _Fault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int), ("error", ctypes.c_int), ("function", ctypes.c_char * 16), ("path", ctypes.c_char * 236)
    )  # fmt: skip


class Faults:
    """Control of the library in a process that has it loaded (LD_PRELOAD)."""

    def __init__(self, library: str | os.PathLike[str], root: pathlib.Path) -> None:
        """Set the root: only calls on files below `root` fail."""
        self._root = os.fsencode(root.resolve())
        self._library = ctypes.CDLL(os.fspath(library))
        self._library.faults_count.restype = ctypes.c_uint64
        self._library.faults_log.restype = ctypes.POINTER(_Fault)

    @contextlib.contextmanager
    def some(self, plan: Plan) -> Iterator[Callable[[], list[Injected]]]:
        """Make calls fail as planned inside the context.

        Yields a function that returns the failed calls.
        """
        mask = 0
        for number, kind in enumerate(KINDS):
            errors = [
                getattr(errno, e) if isinstance(e, str) else e for e in plan.errors.get(kind, ())
            ]
            self._library.faults_choose(number, (ctypes.c_int * len(errors))(*errors), len(errors))
            mask |= bool(errors) << number
        uint64 = ctypes.c_uint64
        chance = uint64(int(plan.chance * (1 << 32)))
        self._library.faults_begin(
            self._root,
            uint64(mask),
            uint64(plan.first),
            uint64(plan.last),
            uint64(plan.seed),
            chance,
        )
        try:
            yield self._injected
        finally:
            self._library.faults_end()

    def _injected(self) -> list[Injected]:
        found, kinds = [], list(KINDS)
        for number in range(self._library.faults_logged()):
            fault = self._library.faults_log(number).contents
            error = errno.errorcode[fault.error] if fault.error > 0 else fault.error
            found.append(
                Injected(
                    kinds[fault.kind],
                    fault.function.decode(),
                    fault.path.decode(errors="replace"),
                    error,
                )
            )
        return found

    def counts(self) -> dict[str, int]:
        """Return the number of calls of each kind in the last or current context."""
        return {kind: int(self._library.faults_count(number)) for number, kind in enumerate(KINDS)}


def drawn(counts: Mapping[str, int], random: random.Random) -> Plan:
    """Return a plan for an operation that makes this many calls of each kind.

    The plan is one failing call, a broken disk, or many failing calls.
    """
    seed, kinds = random.getrandbits(32), [kind for kind, count in counts.items() if count]
    if not kinds:
        return Plan({})
    choice = random.random()
    if choice < 0.6:  # all kinds equally: some occur once in a save, others a hundred times
        kind = random.choice(kinds)
        call = random.randint(1, counts[kind])
        # Endless interruptions are not a fault of a disk.
        return Plan({kind: [random.choice(KINDS[kind])]}, first=call, last=call, seed=seed)
    if choice < 0.85:
        broken = BROKEN[
            random.choice([name for name, errors in BROKEN.items() if set(errors) & set(kinds)])
        ]
        is_interrupted = "EINTR" in broken.values()
        first = (
            1
            if random.random() < 0.25
            else random.randint(1, sum(counts[kind] for kind in kinds if kind in broken))
        )
        errors = {kind: [error] for kind, error in broken.items()}
        return Plan(errors, first=first, chance=0.5 if is_interrupted else 1.0, seed=seed)
    return Plan(KINDS, chance=random.choice((0.005, 0.02, 0.1, 0.5)), seed=seed)
