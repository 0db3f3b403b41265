"""Make a call of each kind fail once, and check that only calls in the folder fail.

    LD_PRELOAD=shim.so python each_kind.py shim.so FOLDER

The exit status and the assertion give the result.
"""

import errno
import fcntl
import mmap
import os
import pathlib
import sys

import shim


def transferred(path: pathlib.Path, call: str, *rest: object) -> object:
    fd = os.open(path, os.O_RDWR)
    try:
        return getattr(os, call)(fd, *rest)
    finally:
        os.close(fd)


def copied(path: pathlib.Path) -> int:
    source, target = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY)
    try:
        return os.sendfile(target, source, 0, 8)
    finally:
        os.close(source)
        os.close(target)


def locked(path: pathlib.Path, call: str) -> None:
    with open(path, "r+b") as file:
        getattr(fcntl, call)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def mapped(path: pathlib.Path) -> None:
    with open(path, "r+b") as file:
        mmap.mmap(file.fileno(), 8).close()


def removed(path: pathlib.Path, in_folder: bool) -> None:
    """Open or remove a name relative to an open folder, as shutil.rmtree does."""
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        (os.rmdir if path.is_dir() else os.unlink)(
            path.name if in_folder else path, **({"dir_fd": fd} if in_folder else {})
        )
    finally:
        os.close(fd)


CALLS = {
    "open_read": [lambda p: open(p / "file").close()],
    "open_write": [
        lambda p: open(p / "file", "r+").close(),
        lambda p: os.close(os.open(p / "new", os.O_WRONLY | os.O_CREAT)),
    ],
    "read": [
        lambda p: transferred(p / "file", "read", 8),
        lambda p: transferred(p / "file", "preadv", [bytearray(8)], 0),
    ],
    "write": [
        lambda p: transferred(p / "file", "write", bytes(8)),
        lambda p: transferred(p / "file", "pwritev", [bytes(8)], 0),
    ],
    "fsync": [lambda p: transferred(p / "file", "fsync")],
    "link": [lambda p: os.link(p / "file", p / "second")],
    "rename": [lambda p: os.replace(p / "file", p / "other")],
    "unlink": [lambda p: removed(p / "file", False), lambda p: removed(p / "file", True)],
    "mkdir": [lambda p: os.mkdir(p / "made")],
    "rmdir": [lambda p: removed(p / "empty", False), lambda p: removed(p / "empty", True)],
    "truncate": [lambda p: transferred(p / "file", "ftruncate", 4)],
    "allocate": [lambda p: transferred(p / "file", "posix_fallocate", 0, 8)],
    "lock": [lambda p: locked(p / "file", "flock"), lambda p: locked(p / "file", "lockf")],
    "stat": [
        lambda p: os.stat(p / "file"),
        lambda p: os.lstat(p),
        lambda p: transferred(p / "file", "fstat"),
    ],
    "list": [lambda p: os.listdir(p), lambda p: list(os.scandir(p))],
    "space": [lambda p: os.statvfs(p)],
    "close": [lambda p: open(p / "file").close()],
    "mode": [lambda p: os.chmod(p / "file", 0o600)],
    "times": [lambda p: os.utime(p / "file")],
    "copy": [lambda p: copied(p / "file")],
    "map": [lambda p: mapped(p / "file")],
}


def fails(call: object, folder: pathlib.Path, number: int) -> bool:
    try:
        call(folder)  # type: ignore[operator]
    except OSError as error:
        if error.errno != number:
            raise
        return True
    return False


def main(library: str, folder: pathlib.Path) -> None:
    """Create two folders; calls fail in one of them."""
    faults = shim.Faults(library, folder / "below")
    for kind, calls in CALLS.items():
        for call in calls:
            places = [folder / name for name in ("below", "below_not")]
            for place in places:
                (place / "empty").mkdir(parents=True, exist_ok=True)
                (place / "file").write_bytes(bytes(16))
                for name in ("new", "second", "made"):
                    path = place / name
                    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            with faults.some(shim.Plan({kind: ["EDQUOT"]}, last=1)) as injected:
                assert [fails(call, place, errno.EDQUOT) for place in places] == [True, False], kind
            (fault,) = injected()
            assert (fault.kind, fault.error) == (kind, "EDQUOT"), fault
            assert faults.counts()[kind] >= 1
    with faults.some(shim.Plan({"fsync_folder": ["EINVAL"], "fsync": ["EIO"]})):
        fd = os.open(folder / "below", os.O_RDONLY)
        assert fails(lambda _: os.fsync(fd), folder, errno.EINVAL)
        os.close(fd)
    path = folder / "below" / "file"
    path.write_bytes(bytes(range(16)))
    with faults.some(shim.Plan({"read": [shim.SHORT], "write": [shim.SHORT]})):
        assert transferred(path, "read", 16) == bytes(range(8))
        assert transferred(path, "pwritev", [b"", bytes(10)], 0) == 5
    with faults.some(shim.Plan({"read": [shim.NOTHING]})):
        assert transferred(path, "pread", 16, 0) == b""
    assert path.read_bytes() == bytes(5) + bytes(range(5, 16))
    assert set(CALLS) | {"fsync_folder"} == set(shim.KINDS)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
