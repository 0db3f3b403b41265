"""Find the code blocks of the documentation, and run the blocks of one page.

A page's blocks run in order and in one namespace, which begins with the names of `prelude.py`.
Python blocks run in this process, which has already imported and compiled. Shell blocks hold
`zerojax` commands, which are called in this process too. `/mnt/disk` is replaced by a temporary
folder.
"""

import contextlib
import dataclasses
import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

import prelude

from zerojax import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

DISK = "/mnt/disk"
CODE = ("python", "sh")
NO_RUN = re.compile(r"(python|sh) no-run: (.+)")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
      page: the file.
      line: number of its first line of code.
      info: text after the opening fence: the language, and perhaps why it does not run.
      text: the code.
    """

    page: pathlib.Path
    line: int
    info: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.info in CODE


def blocks_of(page: pathlib.Path, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    info, first, code = None, 0, []
    for number, line in enumerate((page.read_text() if text is None else text).splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            assert line.startswith("```"), (
                f"{page.name}:{number}: a fence must be three backticks at the start of its line"
            )
            if info is None:
                info, first, code = line.removeprefix("```"), number + 1, []
            else:
                assert line == "```", f"{page.name}:{number}: a block opens inside another block"
                found.append(Block(page, first, info, "\n".join(code) + "\n"))
                info = None
        elif info is not None:
            code.append(line)
    assert info is None, f"{page.name}:{first}: this block does not end"
    return found


def complaint(block: Block) -> str | None:
    """Return what is wrong with the words after a block's opening fence.

    The result is None if the block runs, says why not, or is output.
    """
    # Directives of the site, such as cells of tutorials: building it executes them.
    if block.runs or block.info == "text" or block.info.startswith("{"):
        return None
    said = NO_RUN.fullmatch(block.info)
    if said and len(said[2].split()) >= 2:
        return None
    return f"{block.where}: ```{block.info} neither runs (python, sh) nor is output (text), nor says `no-run: why` in words"


def run(blocks: list[Block], folder: pathlib.Path, disk: pathlib.Path) -> None:
    """Run the blocks of one page.

    Args:
      blocks: blocks of the page, in order.
      folder: folder in which the blocks run.
      disk: folder that replaces `/mnt/disk`. Pages share it, so it is probed once.
    """
    namespace = prelude.names()
    with contextlib.chdir(folder):
        if any(block.runs and prelude.PRETRAINED in block.text for block in blocks):
            prelude.write_pretrained()
        try:
            for block in blocks:
                text = block.text.replace(DISK, str(disk))
                if block.info == "python":
                    _python(block, text, namespace)
                elif block.info == "sh":
                    _shell(block, text)
        finally:
            for value in namespace.values():
                if isinstance(value, prelude.zj.Program):
                    value.close()


def _python(block: Block, text: str, namespace: dict[str, Any]) -> None:
    """Execute a block; a traceback shows the line of the page."""
    code = compile("\n" * (block.line - 1) + text, str(block.page), "exec")
    exec(code, namespace)


def _shell(block: Block, text: str) -> None:
    """Call the commands of a block, one per line."""
    for words in _commands(text):
        assert words[0] == "zerojax", (
            f"{block.where}: {words[0]} is not the zerojax command: say `no-run: why`"
        )
        try:
            cli.main(words[1:])
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(
                    f"{block.where}: {shlex.join(words)} exits with {ended.code}"
                ) from ended


def _commands(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if words := shlex.split(line, comments=True):
            yield words
