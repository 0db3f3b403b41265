"""How parameters are gathered on use, in the same way for every kind of step.

    forward    w[D_fsdp, F] -> w[D, F]               where an equation uses it (stage 3)
    backward   g[D, F]{U_fsdp} -> g[D_fsdp, F]       where it is made (stages 1 to 3)

A step receives `gather`, and evaluates leaves through it without knowing their specs or the stage.
"""

import logging
from collections.abc import Callable
from typing import Any

from zerojax.gather import Rule, gather_on_use
from zerojax.sharding import STAGES, stored_spec
from zerojax.state import Layout, unit_bytes
from zerojax.trees import Params

logger = logging.getLogger("zerojax")
Gather = Callable[..., Any]
"""`gather(function, params, *args)` evaluates `function(params, *args)` on stored parameters."""


class GatheredEarly:
    """Collect sentences about parameters that could not be gathered on use.

    Each sentence is kept, and logged, once.

    Attributes:
      sentences: sentences in the order in which they were reported.
    """

    def __init__(self) -> None:
        """Start without sentences."""
        self.sentences: list[str] = []

    def __call__(self, sentence: str) -> None:
        """Keep and log a sentence, unless it is already known."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
            logger.warning("gather on use: %s", sentence)


def build_gather(layout: Layout, report: Callable[[str], None]) -> Gather:
    """Return the function with which a step evaluates functions of stored parameters.

    Args:
      layout: layout of the program.
      report: called with a sentence about each parameter that is gathered before its use.
    """
    stage = STAGES[layout.config.stage]
    # If nothing is split, the function is evaluated unchanged, without rewriting its trace.
    # Quantized parameters are rewritten all the same: they are decoded where they are used, and
    # decoded again in backward.
    if not layout.encodings and (
        not stage.opt_state or all(spec.sharded == spec.base for spec in layout.specs.values())
    ):
        return lambda function, params, *args: function(params, *args)
    rule = build_rule(layout, stage.params or bool(layout.encodings), report)
    stored = {path: stored_spec(spec, stage.params) for path, spec in layout.specs.items()}
    # Frozen leaves have no gradient to move.
    frozen = {leaf.name for leaf in layout.frozen}
    # Below stage 1 gradients are unsharded, as the updates are; the trace is rewritten there only
    # for quantized parameters. Gradients are also unsharded if each device keeps its own sums,
    # which are reduced at the end of the step.
    to_shards = stage.opt_state and not layout.reduces_once
    cotangents = {
        path: stored[path] if path in frozen else stored_spec(spec, to_shards)
        for path, spec in layout.specs.items()
    }

    axes = {path: spec.added_axes for path, spec in layout.specs.items()}

    def gather(function: Callable[..., Any], params: Params, *args: Any) -> Any:
        return gather_on_use(
            function, params, *args, stored=stored, cotangents=cotangents, axes=axes, rule=rule
        )

    return gather


def build_rule(layout: Layout, remat: bool, report: Callable[[str], None]) -> Rule:
    """Return how parameters are gathered.

    The rule limits what neighboring uses may share, and how large a layer may be.
    """
    leaves, layer = unit_bytes(layout)
    return Rule(
        mesh=layout.mesh,
        remat=remat,
        budget_bytes=max(leaves),
        region_bytes=layer,
        report=report,
    )
