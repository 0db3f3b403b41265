"""A bound on single operations of chat templates that would create a huge value.

    "x" * 10**10      s + s, in a loop      "%9999999999d" % 1      s.ljust(10**10)      2 ** 10**9

Each of these is a single call into C, which no time limit interrupts. jinja2's sandbox lets an
environment intercept arithmetic and calls. transformers creates its environment from a class that
it imports by name; while a template is compiled here, that name refers to the class below.
Operations on constants are bounded too, because jinja2 does not fold intercepted operations.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MOST = 2**24
"""Maximum characters of a text, or items of a list, that one operation may create."""
MOST_BITS = 2**14
"""Maximum bits of an integer that one operation may create."""
_NAME = "ImmutableSandboxedEnvironment"
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice")
"""Methods and filters whose result is as large as a number among their arguments."""
_PERCENT = re.compile(r"%(?:\(\w*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
_BRACES = re.compile(r"\{[^{}]*:[^{}\d]*0?(\d+|\{)[^{}\d]*(\d+|\{)?")
_lock = threading.RLock()


class TooLargeError(ValueError):
    """An operation of a template would create a huge value."""


class _Generator(CodeGenerator):
    """Routes `~` through the environment, for which jinja2 has no hook."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Compile `a ~ b` to a call of `BoundedEnvironment.concatenated`."""
        self.write("environment.concatenated((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with bounds on the values that single operations create."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Generator

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of jinja2's sandbox, and bound its filters."""
        super().__init__(*args, **options)
        for name in (*_PADDING, "format", "replace", "join"):
            if name in self.filters:
                self.filters[name] = _bounded_filter(name, self.filters[name])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator.

        Raises:
          TooLargeError: the result would be huge.
        """
        if operator == "%" and isinstance(left, str):
            _check_widths(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and all(
            isinstance(value, str | list | tuple) for value in (left, right)
        ):
            _check_size("+", len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    def concatenated(self, values: Sequence[Any]) -> str:
        """Return the result of `~`.

        Raises:
          TooLargeError: the result would be huge.
        """
        _check_size("~", _length(values))
        return str_join(values)

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:  # noqa: N805
        """Return the result of a function or a method.

        Raises:
          TooLargeError: the result would be huge.
        """
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_call(method.__name__, owner, args, options)
        return super().call(__context, __obj, *args, **options)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that raises TooLargeError before it creates a huge value."""

    @functools.wraps(function)  # keeps the attributes by which jinja2 passes a context
    def bounded_filter(*args: Any, **options: Any) -> Any:
        arguments = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if name == "join":
            separator = str(arguments[1]) if len(arguments) > 1 else str(options.get("d", ""))
            _check_call(name, separator, arguments[:1], {})
        else:
            text = str(arguments[0]) if name in ("format", "replace") else ""
            _check_call(name, text, arguments[1:], options)
        return function(*args, **options)

    return bounded_filter


def _check_call(name: str, text: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise TooLargeError if a string method, or filter of that name, would create a huge value."""
    values = (*args, *options.values())
    if name in _PADDING:
        _check_size(name, max((value for value in values if isinstance(value, int)), default=0))
    elif name in ("format", "format_map"):
        _check_widths(text, values)
    elif name == "replace" and len(args) > 1:
        _check_size(name, len(text) + text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_size(name, len(text) * len(args[0]) + _length(args[0]))


def _length(values: Iterable[Any]) -> int:
    """Return the total number of characters of the strings among `values`."""
    return sum(len(value) for value in values if isinstance(value, str))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(count, int):
            _check_size("*", len(many) * count)


def _check_widths(text: str, values: Sequence[Any]) -> None:
    """Raise TooLargeError for a huge width or precision, in the format string or in the values."""
    widths: list[str] = []
    for pattern in (_PERCENT, _BRACES):
        for groups in pattern.findall(text):
            widths += [width for width in groups if width]
    # A star or braces: one of the values is the width.
    if not all(width.isdigit() for width in widths):
        widths += [str(value) for value in values if isinstance(value, int) and value > 0]
    for width in widths:
        if width.isdigit() and (len(width) > 20 or int(width) > MOST):
            raise TooLargeError(
                f"a format has a width of {width[:20]}: at most {MOST:,} is allowed"
            )


def _check_size(name: str, size: int) -> None:
    if size > MOST:
        raise TooLargeError(
            f"{name!r} would create {size:,} characters or items: at most {MOST:,} are allowed"
        )


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TooLargeError(f"a number would have more than {MOST_BITS:,} bits")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Make transformers compile chat templates in a `BoundedEnvironment`."""
    with _lock:
        before = getattr(chat_template_utils, _NAME)
        setattr(chat_template_utils, _NAME, BoundedEnvironment)
        try:
            yield
        finally:
            setattr(chat_template_utils, _NAME, before)
