"""zerojax: train models whose state does not fit, with ZeRO expressed as sharding specs.

mesh    = zj.make_mesh(fsdp=8)
program = zj.build_train_step(model, optax.adamw(3e-4), zj.ZeroConfig(stage=3), mesh)
state   = program.init(jax.random.key(0))
state, metrics = program.step(state, batch)
"""

from host_offload.swap_error import SwapError as SwapError
from zerojax import tiled_linen as linen
from zerojax.checkpoint import Checkpointer as Checkpointer
from zerojax.checkpoint_error import CheckpointError as CheckpointError
from zerojax.checkpoint_error import IteratorError as IteratorError
from zerojax.config import ZeroConfig as ZeroConfig
from zerojax.export import export_orbax as export_orbax
from zerojax.export import export_safetensors as export_safetensors
from zerojax.flax import from_flax as from_flax
from zerojax.importing import import_params as import_params
from zerojax.loss import linear_cross_entropy as linear_cross_entropy
from zerojax.mesh import make_mesh as make_mesh
from zerojax.model import LayeredModel as LayeredModel
from zerojax.model import Model as Model
from zerojax.precision import LossScaling as LossScaling
from zerojax.preemption import Preemption as Preemption
from zerojax.state import TrainState as TrainState
from zerojax.step import Program as Program
from zerojax.step import build_train_step as build_train_step
from zerojax.tiled_nnx import TiledDense as TiledDense
from zerojax.tiled_nnx import TiledMLP as TiledMLP

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Checkpointer",
    "IteratorError",
    "LayeredModel",
    "LossScaling",
    "Model",
    "Preemption",
    "Program",
    "SwapError",
    "TiledDense",
    "TiledMLP",
    "TrainState",
    "ZeroConfig",
    "__version__",
    "build_train_step",
    "export_orbax",
    "export_safetensors",
    "from_flax",
    "import_params",
    "linear_cross_entropy",
    "linen",
    "make_mesh",
]
