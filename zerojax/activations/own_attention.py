"""Log attention that a model computes itself on a mesh with `context`.

Such attention is right, and expensive: the partitioner gathers keys and values, and scores take
T / c x T elements on each device. `zerojax.attention` exchanges tokens instead. In a traced block
it is one equation, and a model's own attention is two products of activations, one after another:

    scores[b, n, t, s] = q[b, t, n, d] k[b, s, n, d]        out = f(scores) v
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.activations.kept import attention_inner
from zerojax.jaxprs import trace
from zerojax.models import LayeredModel, Model
from zerojax.sharding import CONTEXT, context_size

logger = logging.getLogger("zerojax")


def watch_attention(model: Model | LayeredModel, mesh: Mesh) -> Model | LayeredModel:
    """Return a model that logs once if its blocks, or its loss, compute attention themselves.

    Without `context`, the model is returned unchanged. Its functions compute the same in any case.

    Args:
      model: the model.
      mesh: the device mesh.
    """
    if context_size(mesh) == 1:
        return model
    watch = _Watch(context_size(mesh))
    if isinstance(model, Model):
        return dataclasses.replace(model, loss=watch.watched(model.loss))
    if model.stacks:
        stacks = [dataclasses.replace(s, block=watch.watched(s.block)) for s in model.stacks]
        return dataclasses.replace(model, stacks=stacks)
    return dataclasses.replace(model, block=watch.watched(model.block))


class _Watch:
    """Looks at each function's first trace, until it has logged.

    Attributes:
      size: number of devices along `context`.
      has_logged: whether a function has attention of its own, which is logged.
    """

    def __init__(self, size: int) -> None:
        """Start without having logged."""
        self.size = size
        self.has_logged = False

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function(params, *data)`, which is looked at when it is first traced."""
        is_known = False

        def run(params: Any, *data: Any) -> Any:
            nonlocal is_known
            if not is_known:
                is_known = True
                self._look(function, params, data)
            return function(params, *data)

        return run

    def _look(self, function: Callable[..., Any], params: Any, data: Any) -> None:
        if self.has_logged:
            return
        program, _ = trace(function, params, *data)
        if not attention_inner(program, program.inputs[len(jax.tree.leaves(params)) :]):
            return
        self.has_logged = True
        logger.info(
            "attention over %s=%d is the model's own: XLA gathers its keys and values, and "
            "zerojax.attention would exchange tokens instead",
            CONTEXT,
            self.size,
        )
