"""Calls of the user's losses and modules; their signatures show which arguments they take.

A step passes a key and `program.eval` passes none, so modules train if there is a key and evaluate
otherwise. An NNX module has both modes built in. A Linen module gets its mode by arguments and
attributes, under the names that Flax and its users give them:

    evaluate    deterministic = use_running_average = True, train = training = is_training = False
    train       the opposite, for arguments that are left open; explicit values are kept

Explicit values are overruled only in evaluation, which has no random streams. A Linen model without
random streams and state has a single mode, and nothing is set.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.errors
import flax.linen as nn
import jax
from flax import nnx

from zerojax.models.axes import AxisNames

EVALUATES = {
    "deterministic": True,
    "use_running_average": True,
    "train": False,
    "training": False,
    "is_training": False,
}
"""Value in evaluation, by the name of an argument or attribute."""

# Numbers folded into a key for draws outside of a module's own streams, which are numbered from 0.
EMBED_IN_HEAD = 0x7FFFFFFF
LOSS_STREAM = 0x7FFFFFFE
CALL_STREAM = 0x7FFFFFFD


def takes_key(loss: Callable[..., Any], *before: str) -> bool:
    """Return whether a loss takes a key after the arguments named in `before`.

    It does if an argument is named `key`, or if it has one more argument without a default.
    """
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = positional[len(before) : len(before) + 1]
    return any(p.name == "key" for p in parameters) or any(p.default is p.empty for p in more)


def call_with_key(loss: Callable[..., Any], *before: str) -> Callable[..., Any]:
    """Return `call(*args, key)`, which passes the key to a loss that takes one."""
    if not takes_key(loss, *before):
        return lambda *args: loss(*args[:-1])
    by_name = "key" in inspect.signature(loss).parameters

    def call(*args: Any) -> Any:
        *loss_args, key = args
        # Use a number that differs from those of the modules' streams.
        key = None if key is None else jax.random.fold_in(key, LOSS_STREAM)
        return loss(*loss_args, key=key) if by_name else loss(*loss_args, key)

    return call


@dataclasses.dataclass(frozen=True)
class Calls:
    """What all parts of a model share in their calls.

    Attributes:
      names: translation of axis names.
      rngs: Linen random streams in training.
      mutable: Linen collections that calls update.
      sown: Linen collections that each call creates.
      trainable: NNX filter or function (path, value) -> bool that selects the trainable parameters;
        None: all.
    """

    names: AxisNames
    rngs: tuple[str, ...] = ()
    mutable: tuple[str, ...] = ()
    sown: tuple[str, ...] = ()
    trainable: Any = None

    @property
    def has_modes(self) -> bool:
        """Whether Linen modules differ between training and evaluation."""
        return bool(self.rngs or self.mutable)

    @contextlib.contextmanager
    def run(self, is_training: bool) -> Iterator[None]:
        """Return a context that runs modules in training or evaluation mode."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.names.while_run())
            if self.has_modes:
                stack.enter_context(nn.intercept_methods(self._train if is_training else _evaluate))
            try:
                yield
            except flax.errors.ModifyScopeVariableError as e:
                raise ValueError(
                    "a Linen module updates a collection in its calls, which makes it state: list "
                    f"it in from_flax(..., mutable=('batch_stats',)); it is {self.mutable}. {e}"
                ) from e

    def _train(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        bound = _bound(context, args, kwargs)
        if bound is None:
            return call(*args, **kwargs)
        for name, default in _find_modes(context.orig_method.func).items():
            is_open = bound.arguments.get(name) is None and not isinstance(
                getattr(context.module, name, None), bool
            )
            # An explicit default is kept if the model draws and updates nothing that the other
            # mode would need.
            needs = {
                "deterministic": "dropout" in self.rngs,
                "use_running_average": "batch_stats" in self.mutable,
            }
            if is_open and (not isinstance(default, bool) or needs.get(name, True)):
                bound.arguments[name] = not EVALUATES[name]
        return call(*bound.args, **bound.kwargs)


def _evaluate(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    bound = _bound(context, args, kwargs)
    attributes = dict[str, bool]()
    for name in _list_fields(type(context.module)):
        value = getattr(context.module, name)
        if isinstance(value, bool):
            attributes[name] = value
    if bound is not None:
        for name in _find_modes(context.orig_method.func):
            if name not in attributes:
                bound.arguments[name] = EVALUATES[name]
        args = bound.args
        kwargs = bound.kwargs
    # A module's attributes are frozen, so they are set by force, and restored after the call.
    try:
        for name in attributes:
            object.__setattr__(context.module, name, EVALUATES[name])
        return call(*args, **kwargs)
    finally:
        for name, value in attributes.items():
            object.__setattr__(context.module, name, value)


def _bound(context: Any, args: Any, kwargs: Any) -> inspect.BoundArguments | None:
    """Return the arguments of an intercepted call by name, or None if no argument is a mode."""
    function = context.orig_method.func  # orig_method is a partial that holds the module
    if not _find_modes(function):
        return None
    bound = inspect.signature(function).bind_partial(None, *args, **kwargs)
    del bound.arguments[next(iter(bound.arguments))]  # self
    return bound


@functools.cache
def _find_modes(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a method that select its mode, with their defaults."""
    parameters = inspect.signature(function).parameters
    return {
        name: p.default
        for name, p in parameters.items()
        if name in EVALUATES and p.kind is not p.VAR_KEYWORD
    }


@functools.cache
def _list_fields(module: type[nn.Module]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(module) if f.name in EVALUATES)  # pyright: ignore[reportArgumentType]


def without_key(key: jax.Array | None) -> jax.Array:
    """Return the key that streams are created from; a constant in evaluation, which has no key."""
    return jax.random.key(0) if key is None else key


def without_variables(out: Any) -> Any:
    """Return the output of a loss or a module without NNX types.

    States become plain dicts, and Variables become arrays.
    """

    def is_nnx(node: Any) -> bool:
        return isinstance(node, nnx.State | nnx.Variable)

    def plain(node: Any) -> Any:
        if isinstance(node, nnx.State):
            return nnx.to_pure_dict(node)
        return node[...] if isinstance(node, nnx.Variable) else node

    return jax.tree.map(plain, out, is_leaf=is_nnx)
