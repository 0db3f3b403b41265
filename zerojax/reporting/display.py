"""Show a run on a terminal: lines, a bar for its steps, and a bar for each long operation.

In a file or a pipe there are only lines. Bars are rich's, which redraws them in a thread, so they
move while a program compiles.
"""

import contextlib
import sys
from collections.abc import Iterator

from zerojax.progress import Advance, shown_by
from zerojax.reporting.writers import import_module

EXTRA = "zerojax[report]"


class Display:
    """Bars and lines; a context manager."""

    def __init__(self, *, is_quiet: bool, has_bars: bool | None) -> None:
        """Set up the display on standard output.

        Args:
          is_quiet: whether to show nothing.
          has_bars: whether to draw bars; None draws them if standard output is a terminal.

        Raises:
          ModuleNotFoundError: rich is not installed.
        """
        console = import_module("rich.console", EXTRA)
        progress = import_module("rich.progress", EXTRA)
        is_terminal = sys.stdout.isatty()
        self.console = console.Console(
            quiet=is_quiet, highlight=False, width=None if is_terminal else 140
        )
        columns = (
            progress.BarColumn(30),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
        )
        description = progress.TextColumn("{task.description}")
        if has_bars is None:
            has_bars = is_terminal
        self._progress = progress.Progress(
            *columns,
            description,
            console=self.console,
            disable=is_quiet or not has_bars,
            transient=True,
        )
        self._steps: int | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Display":
        """Start to draw bars, and show long operations of the library."""
        self._stack.enter_context(self._progress)
        self._stack.enter_context(shown_by(self.work))
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bars."""
        self._stack.close()

    @contextlib.contextmanager
    def work(self, what: str, total: int | None) -> Iterator[Advance]:
        """Show a bar while the context runs, through the interface of `zerojax.progress`."""
        bar = self._progress.add_task(what, total=total)
        try:
            yield lambda count: self._progress.advance(bar, count)
        finally:
            self._progress.remove_task(bar)

    def step(self, step: int, total: int | None, line: str) -> None:
        """Show the number of steps so far, with `line` next to the bar."""
        if self._steps is None:
            self._steps = self._progress.add_task(line, total=total)
        self._progress.update(self._steps, completed=step, description=line)

    def print(self, text: str) -> None:
        """Print a line verbatim, with escapes for characters that the terminal cannot show."""
        encoding = self.console.encoding
        printable = text.encode(encoding, errors="backslashreplace").decode(encoding)
        self.console.print(printable, markup=False)


@contextlib.contextmanager
def bars() -> Iterator[None]:
    """Show bars for init, import, export, restore and compile while the context runs.

    They are shown only if standard output is a terminal. `zj.Run` does this by itself.

    Raises:
      ModuleNotFoundError: rich is not installed.
    """
    with Display(is_quiet=False, has_bars=None):
        yield
