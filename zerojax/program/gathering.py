"""How parameters are gathered on use, in the same way by every kind of step.

    forward    w[D_fsdp, F] -> w[D, F]               where an equation uses it (stage 3)
    backward   g[D, F]{U_fsdp} -> g[D_fsdp, F]       where it is made (stages 1 to 3)

A step is handed `gather` and knows neither stage nor specs of the leaves that it evaluates through
it.
"""

import logging
from collections.abc import Callable
from typing import Any

from zerojax.gather import Rule, gather_on_use
from zerojax.sharding import FSDP, STAGES, stored_spec
from zerojax.state import Layout, unit_bytes

logger = logging.getLogger("zerojax")
Gather = Callable[..., Any]
"""`gather(function, params, *args)`: `function(params, *args)` of parameters as they are stored."""


class GatheredEarly:
    """Collects sentences about what could not be gathered on use. Each is kept, and logged, once.

    Attributes:
      sentences: in the order in which they came.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def __call__(self, sentence: str) -> None:
        if sentence not in self.sentences:
            self.sentences.append(sentence)
            logger.warning("gather on use: %s", sentence)


def build_gather(layout: Layout, report: Callable[[str], None]) -> Gather:
    """Return how a step evaluates functions of stored parameters.

    Args:
      layout: of the program.
      report: told, in a sentence, of a parameter that is gathered before its use.
    """
    stage = STAGES[layout.config.stage]
    # Nothing is split: the function is evaluated as it is, and no rewriting of its trace can get in
    # its way. What rests encoded is walked all the same: it is decoded where it is used, and
    # backward decodes again.
    if not layout.encodings and (
        not stage.opt_state or all(spec.sharded == spec.base for spec in layout.specs.values())
    ):
        return lambda function, params, *args: function(params, *args)
    rule = build_rule(layout, stage.params or bool(layout.encodings), report)
    stored = {path: stored_spec(spec, stage.params) for path, spec in layout.specs.items()}
    # Frozen leaves have no gradient that would be moved.
    frozen = {leaf.name for leaf in layout.frozen}
    # Below stage 1 gradients are whole, as the updates are; this function is walked there for what
    # rests encoded alone. And whole where each device keeps sums of its own, which are reduced at
    # the end of the step.
    to_shards = stage.opt_state and not layout.reduces_once
    cotangents = {
        path: stored[path] if path in frozen else stored_spec(spec, to_shards)
        for path, spec in layout.specs.items()
    }

    def gather(function: Callable[..., Any], params: Any, *args: Any) -> Any:
        return gather_on_use(
            function, params, *args, stored=stored, cotangents=cotangents, rule=rule
        )

    return gather


def build_rule(layout: Layout, remat: bool, report: Callable[[str], None]) -> Rule:
    """Return how parameters are gathered: what neighbouring uses may share, and how large a layer
    may be.
    """
    leaves, layer = unit_bytes(layout)
    return Rule(
        mesh=layout.mesh,
        axis=FSDP,
        remat=remat,
        budget_bytes=max(leaves),
        region_bytes=layer,
        report=report,
    )
