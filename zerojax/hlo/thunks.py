"""Read the thunks of a compiled program from a dump: what XLA's runtime does for each instruction.

The HLO of a slice does not say how its bytes are moved. Its thunk does: a `kCopy`, alone or in a
`kDynamicSliceFusion`, is a memory copy by the driver; a `kCustomKernel` is a kernel, whose threads
read or write host memory over the link. Thunks also name the stream of each asynchronous operation,
and a `kCommandBuffer` contains the thunks that XLA puts into a CUDA graph. Whether the driver gives
a copy in a graph to a copy engine, as it does for a copy on a stream, is not documented.

XLA writes thunks if it is asked to dump, with or without a GPU:

    compiled = program.lower(batch).compile({"xla_dump_to": folder})
    thunks = hlo.read_thunks(folder)

    # module_0001.jit_step.thunk_sequence_after_thunk_passes.txt
    000: kCommandBuffer [..]
        083: kAsyncStart [..] stream=memcpy_h2d_stream, async_id=83
            082: kDynamicSliceFusion [..]
                081: kCopy

    # module_0001.jit_step.thunk_metadata.txt
    thunk_metadata { thunk_info { profile_annotation: "copy-start.3" thunk_id: 83 } .. }

The first file contains the numbered tree of thunks, the second the instruction of each number. The
tree before XLA's passes form graphs is in a file that ends in ".thunk_sequence.txt". If the passes
change nothing, XLA writes only that file.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

_THUNK = re.compile(r"^( *)(\d+): (k\w+)(.*)$", re.MULTILINE)
_STREAM = re.compile(r"stream=([^,\s]+)")
_ANNOTATION = re.compile(r'profile_annotation: "([^"]*)"')
_NUMBER = re.compile(r"thunk_id: (\d+)")
_SEQUENCE = ".thunk_sequence_after_thunk_passes.txt"
_BEFORE_PASSES = ".thunk_sequence.txt"
_GRAPH = "kCommandBuffer"
_COPIES = frozenset(
    {"kCopy", "kDeviceToHostCopy", "kHostToDeviceCopy", "kDeviceToDeviceCopy", "kMemcpy"}
)
_WRAPPERS = frozenset({"kAsyncStart", "kDynamicSliceFusion", "kSequential"})


@dataclasses.dataclass(frozen=True, slots=True)
class Thunks:
    """What XLA's runtime does for the instructions of a program.

    Attributes:
      kinds: for each instruction, the kind of its thunk and of the first thunk nested in it, and so
        on, such as "kAsyncStart/kDynamicSliceFusion/kCopy".
      streams: stream of each asynchronous start, such as "computation_stream[0]" or
        "memcpy_h2d_stream".
      in_graphs: instructions that run as nodes of a CUDA graph. Their order is given by the graph's
        edges, not by streams.
    """

    kinds: Mapping[str, str]
    streams: Mapping[str, str]
    in_graphs: frozenset[str] = frozenset()

    def is_copy(self, instruction: str) -> bool:
        """Return whether a memory copy by the driver, and not a kernel, does an instruction's work.

        Raises:
          ValueError: no thunk has that name, so the dump belongs to another program.
        """
        if instruction not in self.kinds:
            raise ValueError(
                f"the dump has no thunk for {instruction!r}: it belongs to another compilation of "
                "the program"
            )
        return self.kinds[instruction].rsplit("/", 1)[-1] in _COPIES


def dumped_text(path: str | pathlib.Path, module: str | None = None) -> str:
    """Return the scheduled HLO of a program that was dumped to a folder.

    Args:
      path: folder that XLA dumped to.
      module: name of the program if the folder contains several: the word after "HloModule" in its
        text, such as "jit_step".

    Raises:
      ValueError: the folder contains no such program, or several.
    """
    return _find_file(pathlib.Path(path), "_gpu_after_optimizations.txt", module).read_text()


def read_thunks(path: str | pathlib.Path, module: str | None = None) -> Thunks:
    """Read the thunks of a program.

    Args:
      path: folder that XLA dumped to, or the file in it that ends in ".thunk_sequence.txt", next to
        its other files.
      module: name of the program if the folder contains several: the word after "HloModule" in its
        text, such as "jit_step".

    Returns:
      The program's thunks.

    Raises:
      ValueError: the folder contains the thunks of no such program, or of several.
    """
    path = pathlib.Path(path)
    file = _find_file(path, _BEFORE_PASSES, module) if path.is_dir() else path
    stem = file.name.removesuffix(_SEQUENCE).removesuffix(_BEFORE_PASSES)
    metadata = file.with_name(f"{stem}.thunk_metadata.txt")
    after_passes = file.with_name(f"{stem}{_SEQUENCE}")
    if stem == file.name or not metadata.is_file():
        raise ValueError(
            f"{path}: thunks are read from a file ...{_BEFORE_PASSES} with its "
            "...thunk_metadata.txt next to it"
        )
    sequence = after_passes if after_passes.is_file() else file
    return _parse_thunks(sequence.read_text(), _parse_names(metadata.read_text()))


def _parse_thunks(sequence: str, names: Mapping[int, str]) -> Thunks:
    """Parse a tree of thunks, given the instruction of each thunk number."""
    kinds: dict[str, str] = {}
    streams: dict[str, str] = {}
    in_graphs = set[str]()
    # (indent, instruction) of the wrappers around the current thunk
    wrappers: list[tuple[int, str]] = []
    graphs: list[int] = []  # indents of the graphs around the current thunk
    for match in _THUNK.finditer(sequence):
        indent = len(match[1])
        number = int(match[2])
        kind = match[3]
        details = match[4]
        while wrappers and wrappers[-1][0] >= indent:
            wrappers.pop()
        while graphs and graphs[-1] >= indent:
            graphs.pop()

        if kind == _GRAPH:  # A pass made the graph's thunk, which belongs to no instruction.
            graphs.append(indent)
            continue

        if wrappers:
            _, name = wrappers[-1]
            if kinds[name].rsplit("/", 1)[-1] in _WRAPPERS:
                kinds[name] += f"/{kind}"
        else:
            name = names.get(number, "")
            kinds[name] = kind
        if kind in _WRAPPERS:
            wrappers.append((indent, name))
        stream = _STREAM.search(details)
        if stream is not None:
            streams[name] = stream[1]
        if graphs:
            in_graphs.add(name)
    return Thunks(kinds, streams, frozenset(in_graphs))


def _parse_names(metadata: str) -> dict[int, str]:
    """Return the instruction of each thunk number."""
    names = {}
    for block in metadata.split("thunk_metadata {"):
        name = _ANNOTATION.search(block)
        number = _NUMBER.search(block)
        if name is not None and number is not None:
            names[int(number[1])] = name[1]
    return names


def _find_file(folder: pathlib.Path, ending: str, module: str | None) -> pathlib.Path:
    """Return the only file of a folder with an ending, for one module.

    File names look like module_0001.jit_step.thunk_sequence.txt.
    """
    middle = "." if module is None else f".{module}."
    paths = [p for p in folder.glob("*") if p.name.endswith(ending) and middle in p.name]
    if len(paths) == 1:
        return paths[0]
    named = "" if module is None else f" named {module}"
    if paths:
        names = ", ".join(path.name for path in sorted(paths))
        contents = f"several programs{named}: {names}"
    else:
        contents = f"no program{named} that XLA dumped for a GPU"
    raise ValueError(
        f"{folder} holds {contents}; the dump of exactly one program is needed: give XLA an empty "
        "folder and one compilation"
    )
