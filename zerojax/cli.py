"""The `zerojax` command: memory formulas, predicted steps, machine figures and checkpoints.

    zerojax env --swap-dir FOLDER
    zerojax memory --params 7.5e9 --shards 64 --precision bf16
    zerojax memory --layers 48 --hidden 6144 --heads 64 --seq 2048 --shards 2 --tensor 8
        --sequence-parallel --activations selective
    zerojax simulate PROGRAM.txt --link 50e9
    zerojax bench-io FOLDER
    zerojax machines
    zerojax probe --swap-dir FOLDER --out machine.toml
    zerojax plan --params 1T --layers 128 --hidden 25600 --heads 256 --seq 1024 --batch 7
        --machine dgx2
    zerojax inspect CHECKPOINTS
    zerojax export CHECKPOINTS OUT --format safetensors --dtype bfloat16
    zerojax export CHECKPOINTS OUT --format hf --like FOLDER --merge-lora

If an argument is wrong, or something on the machine is, the command prints one line and exits with
status 2. With ZEROJAX_TRACEBACK=1 in the environment it raises the error instead. Any other
exception is a bug and always shows its traceback.
"""

import os
import sys
from collections.abc import Sequence

from zerojax.options import WRONG, on_one_line, parse

_TRACEBACK = "ZEROJAX_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `zerojax` command.

    Args:
      arguments: command-line arguments without the program's name; None: use `sys.argv`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parse(arguments)
        from zerojax.commands import run  # slow to import

        run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has closed the pipe
        # Python flushes the remaining output when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RuntimeError) as error:
        # RecursionError is a RuntimeError, but always a bug.
        if os.environ.get(_TRACEBACK) or isinstance(error, RecursionError):
            raise
        command = arguments[0] if arguments else ""
        print(f"zerojax {command}: {_one_line(error)}", file=sys.stderr)
        sys.exit(WRONG)


def _one_line(error: Exception) -> str:
    """Return an error's message on one line, or its type's name if it has no message."""
    return on_one_line(str(error)) or type(error).__name__
