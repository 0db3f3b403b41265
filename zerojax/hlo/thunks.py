"""The thunks of a compiled program: what XLA's runtime does for each of its instructions, read from
a dump.

The HLO of a slice does not say who moves its bytes. The thunk does: a `kCopy`, alone or in a
  `kDynamicSliceFusion`, is a memory
copy of the driver; a `kCustomKernel` is a kernel, whose threads read or write host memory over the
link. Thunks also name the stream of each asynchronous operation, and a `kCommandBuffer` holds those
that XLA puts into a CUDA graph. Whether the driver gives a copy in a graph to a copy engine, as it
does one on a stream, is not documented.

XLA writes thunks where it is told to dump, with or without a GPU:

    compiled = program.lower(batch).compile({"xla_dump_to": folder})
    thunks = hlo.read_thunks(folder)

    000: kCommandBuffer [..]                              module_0001.jit_step.thunk_sequence_after_thunk_passes.txt
        083: kAsyncStart [..] stream=memcpy_h2d_stream, async_id=83
            082: kDynamicSliceFusion [..]
                081: kCopy
    thunk_metadata { thunk_info { profile_annotation: "copy-start.3" thunk_id: 83 } .. }      ..thunk_metadata.txt

The first file holds the tree of thunks, numbered; the second the instruction of each number. The
tree as it is before XLA's passes form graphs is in a file that ends in ".thunk_sequence.txt". Where
the passes change nothing XLA writes that one alone.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

_THUNK = re.compile(r"^( *)(\d+): (k\w+)(.*)$", re.MULTILINE)
_STREAM = re.compile(r"stream=([^,\s]+)")
_ANNOTATION = re.compile(r'profile_annotation: "([^"]*)"')
_NUMBER = re.compile(r"thunk_id: (\d+)")
_SEQUENCE, _BEFORE_PASSES = ".thunk_sequence_after_thunk_passes.txt", ".thunk_sequence.txt"
_GRAPH = "kCommandBuffer"
_COPIES = frozenset(
    {"kCopy", "kDeviceToHostCopy", "kHostToDeviceCopy", "kDeviceToDeviceCopy", "kMemcpy"}
)
_WRAPPERS = frozenset({"kAsyncStart", "kDynamicSliceFusion", "kSequential"})


@dataclasses.dataclass(frozen=True, slots=True)
class Thunks:
    """What XLA's runtime does for the instructions of a program.

    Attributes:
      kinds: by instruction, the kinds of its thunk and of the first one inside of it and so on, as
        "kAsyncStart/kDynamicSliceFusion/kCopy".
      streams: the stream of each asynchronous start, such as "computation_stream[0]" or
        "memcpy_h2d_stream".
      in_graphs: the instructions that run as nodes of a CUDA graph. Their order is that of the
        graph's edges, not of streams.
    """

    kinds: Mapping[str, str]
    streams: Mapping[str, str]
    in_graphs: frozenset[str] = frozenset()

    def is_copy(self, instruction: str) -> bool:
        """Tell whether a memory copy of the driver does an instruction's work, and no kernel.

        Raises:
          ValueError: no thunk has that name, so the dump is of another program.
        """
        if instruction not in self.kinds:
            raise ValueError(
                f"no thunk of the dump is that of {instruction!r}: the dump is of another compilation of the program"
            )
        return self.kinds[instruction].rsplit("/", 1)[-1] in _COPIES


def dumped_text(path: str | pathlib.Path, module: str | None = None) -> str:
    """Return the scheduled HLO of a program that was dumped to a folder.

    Args:
      path: the folder.
      module: as for `read_thunks`.

    Raises:
      ValueError: the folder holds no such program, or several.
    """
    return _one(pathlib.Path(path), "_gpu_after_optimizations.txt", module).read_text()


def read_thunks(path: str | pathlib.Path, module: str | None = None) -> Thunks:
    """Read the thunks of a program.

    Args:
      path: a folder that XLA dumped to, or the file in it that ends in ".thunk_sequence.txt",
        beside which are the others.
      module: name of the program where the folder holds several: what follows "HloModule" in its
        text, such as "jit_step".

    Raises:
      ValueError: the folder holds no thunks of such a program, or those of several.
    """
    path = pathlib.Path(path)
    given = _one(path, _BEFORE_PASSES, module) if path.is_dir() else path
    stem = given.name.removesuffix(_SEQUENCE).removesuffix(_BEFORE_PASSES)
    metadata, after_passes = (
        given.with_name(f"{stem}.thunk_metadata.txt"),
        given.with_name(f"{stem}{_SEQUENCE}"),
    )
    if stem == given.name or not metadata.is_file():
        raise ValueError(
            f"{path}: thunks are read from a file ...{_BEFORE_PASSES} with its ...thunk_metadata.txt beside it"
        )
    sequence = after_passes if after_passes.is_file() else given
    names = _names(metadata.read_text())
    kinds: dict[str, str] = {}
    streams: dict[str, str] = {}
    in_graphs = set[str]()
    around: list[
        tuple[int, str]
    ] = []  # (indent, instruction) of the thunks that wrap the one being read
    graphs: list[int] = []  # indents of the graphs that hold it
    for match in _THUNK.finditer(sequence.read_text()):
        indent, number, kind, rest = len(match[1]), int(match[2]), match[3], match[4]
        while around and around[-1][0] >= indent:
            around.pop()
        while graphs and graphs[-1] >= indent:
            graphs.pop()

        if kind == _GRAPH:  # a pass made it, of no instruction
            graphs.append(indent)
            continue

        name = around[-1][1] if around else names.get(number, "")
        if not around:
            kinds[name] = kind
        elif (
            kinds[name].rsplit("/", 1)[-1] in _WRAPPERS
        ):  # the first thunk inside says what is done
            kinds[name] += f"/{kind}"
        if kind in _WRAPPERS:
            around.append((indent, name))
        if (stream := _STREAM.search(rest)) is not None:
            streams[name] = stream[1]
        if graphs:
            in_graphs.add(name)
    return Thunks(kinds, streams, frozenset(in_graphs))


def _names(metadata: str) -> dict[int, str]:
    """Return the instruction of each number."""
    found = {}
    for block in metadata.split("thunk_metadata {"):
        name, number = _ANNOTATION.search(block), _NUMBER.search(block)
        if name is not None and number is not None:
            found[int(number[1])] = name[1]
    return found


def _one(folder: pathlib.Path, ending: str, module: str | None) -> pathlib.Path:
    """Return the one file of a folder with an ending, of a module; names are as
    module_0001.jit_step.thunk_sequence.txt.
    """
    part = "." if module is None else f".{module}."
    found = sorted(
        path for path in folder.glob("*") if path.name.endswith(ending) and part in path.name
    )
    if len(found) != 1:
        names = ", ".join(path.name for path in found)
        of = "" if module is None else f" named {module}"
        what = (
            f"several programs{of}: {names}"
            if found
            else f"no program{of} that XLA dumped for a GPU"
        )
        raise ValueError(
            f"{folder} holds {what}; a dump of one program is read: give XLA an empty folder, and one compilation"
        )
    return found[0]
