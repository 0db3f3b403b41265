"""zerojax: train models whose state does not fit in device memory, with ZeRO as sharding specs.

mesh    = zj.make_mesh(fsdp=8)
program = zj.build_train_step(model, optax.adamw(3e-4), zj.ZeroConfig(stage=3), mesh)
state   = program.init(jax.random.key(0))
state, metrics = program.step(state, batch)
"""

import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zerojax.linen as linen
    from host_offload.disk import SwapError as SwapError
    from zerojax.checkpoint import Checkpointer as Checkpointer
    from zerojax.checkpoint import CheckpointError as CheckpointError
    from zerojax.checkpoint import IteratorError as IteratorError
    from zerojax.config import Segment as Segment
    from zerojax.config import ZeroConfig as ZeroConfig
    from zerojax.context import attention as attention
    from zerojax.experts import MoE as MoE
    from zerojax.experts import expert_loss as expert_loss
    from zerojax.experts import moe as moe
    from zerojax.hf import Lora as Lora
    from zerojax.hf import export_hf as export_hf
    from zerojax.hf import export_peft as export_peft
    from zerojax.hf import import_hf as import_hf
    from zerojax.inference import Evaluation as Evaluation
    from zerojax.inference import generate as generate
    from zerojax.inference import perplexity as perplexity
    from zerojax.models import Cache as Cache
    from zerojax.models import LayeredModel as LayeredModel
    from zerojax.models import Loss as Loss
    from zerojax.models import Model as Model
    from zerojax.models import Stack as Stack
    from zerojax.models import from_flax as from_flax
    from zerojax.models import with_specs as with_specs
    from zerojax.optim import Ema as Ema
    from zerojax.optim import schedule_free_adamw as schedule_free_adamw
    from zerojax.planner import Machine as Machine
    from zerojax.planner import Plan as Plan
    from zerojax.planner import PlanError as PlanError
    from zerojax.planner import Sizes as Sizes
    from zerojax.planner import StepWatch as StepWatch
    from zerojax.planner import Tuned as Tuned
    from zerojax.planner import autotune as autotune
    from zerojax.planner import machine as machine
    from zerojax.planner import plan as plan
    from zerojax.planner import probe as probe
    from zerojax.precision import LossScaling as LossScaling
    from zerojax.preferences import dpo_loss as dpo_loss
    from zerojax.program import Program as Program
    from zerojax.program import build_train_step as build_train_step
    from zerojax.reporting import Run as Run
    from zerojax.runtime import Preemption as Preemption
    from zerojax.runtime import join_cluster as join_cluster
    from zerojax.sharding import make_mesh as make_mesh
    from zerojax.state import TrainState as TrainState
    from zerojax.tiling import TiledDense as TiledDense
    from zerojax.tiling import TiledMLP as TiledMLP
    from zerojax.tiling import linear_cross_entropy as linear_cross_entropy
    from zerojax.tiling import over_tokens as over_tokens
    from zerojax.weights import export_orbax as export_orbax
    from zerojax.weights import export_safetensors as export_safetensors
    from zerojax.weights import import_params as import_params

_HOME = {
    "Cache": "zerojax.models",
    "CheckpointError": "zerojax.checkpoint",
    "Checkpointer": "zerojax.checkpoint",
    "Ema": "zerojax.optim",
    "Evaluation": "zerojax.inference",
    "IteratorError": "zerojax.checkpoint",
    "LayeredModel": "zerojax.models",
    "Lora": "zerojax.hf",
    "Loss": "zerojax.models",
    "LossScaling": "zerojax.precision",
    "MoE": "zerojax.experts",
    "Machine": "zerojax.planner",
    "Model": "zerojax.models",
    "Plan": "zerojax.planner",
    "PlanError": "zerojax.planner",
    "Preemption": "zerojax.runtime",
    "Program": "zerojax.program",
    "Run": "zerojax.reporting",
    "Segment": "zerojax.config",
    "Sizes": "zerojax.planner",
    "Stack": "zerojax.models",
    "StepWatch": "zerojax.planner",
    "SwapError": "host_offload.disk",
    "TiledDense": "zerojax.tiling",
    "TiledMLP": "zerojax.tiling",
    "TrainState": "zerojax.state",
    "Tuned": "zerojax.planner",
    "ZeroConfig": "zerojax.config",
    "attention": "zerojax.context",
    "autotune": "zerojax.planner",
    "build_train_step": "zerojax.program",
    "dpo_loss": "zerojax.preferences",
    "expert_loss": "zerojax.experts",
    "export_hf": "zerojax.hf",
    "export_orbax": "zerojax.weights",
    "export_peft": "zerojax.hf",
    "export_safetensors": "zerojax.weights",
    "from_flax": "zerojax.models",
    "generate": "zerojax.inference",
    "import_hf": "zerojax.hf",
    "import_params": "zerojax.weights",
    "join_cluster": "zerojax.runtime",
    "linear_cross_entropy": "zerojax.tiling",
    "machine": "zerojax.planner",
    "make_mesh": "zerojax.sharding",
    "moe": "zerojax.experts",
    "over_tokens": "zerojax.tiling",
    "perplexity": "zerojax.inference",
    "plan": "zerojax.planner",
    "probe": "zerojax.planner",
    "schedule_free_adamw": "zerojax.optim",
    "with_specs": "zerojax.models",
}
"""The module of each public name.

Each module is imported when its name is first used, so `zerojax --help` imports none of them.
"""

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "CheckpointError",
    "Checkpointer",
    "Ema",
    "Evaluation",
    "IteratorError",
    "LayeredModel",
    "Lora",
    "Loss",
    "LossScaling",
    "Machine",
    "MoE",
    "Model",
    "Plan",
    "PlanError",
    "Preemption",
    "Program",
    "Run",
    "Segment",
    "Sizes",
    "Stack",
    "StepWatch",
    "SwapError",
    "TiledDense",
    "TiledMLP",
    "TrainState",
    "Tuned",
    "ZeroConfig",
    "__version__",
    "attention",
    "autotune",
    "build_train_step",
    "dpo_loss",
    "expert_loss",
    "export_hf",
    "export_orbax",
    "export_peft",
    "export_safetensors",
    "from_flax",
    "generate",
    "import_hf",
    "import_params",
    "join_cluster",
    "linear_cross_entropy",
    "linen",
    "machine",
    "make_mesh",
    "moe",
    "over_tokens",
    "perplexity",
    "plan",
    "probe",
    "schedule_free_adamw",
    "with_specs",
]


if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name

    def __getattr__(name: str) -> object:
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif (
            not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None
        ):
            value = importlib.import_module(f"{__name__}.{name}")
        else:
            near = difflib.get_close_matches(name, __all__, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
