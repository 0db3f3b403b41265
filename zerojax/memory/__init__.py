"""Bytes of memory and communication: in closed form by model size, and per leaf of one program."""

from zerojax.formulas import collective_elements as collective_elements
from zerojax.formulas import korthikanti_layer_bytes as korthikanti_layer_bytes
from zerojax.formulas import layer_activation_bytes as layer_activation_bytes
from zerojax.formulas import model_state_bytes as model_state_bytes
from zerojax.formulas import state_bytes as state_bytes
from zerojax.formulas import tiled_loss_pays as tiled_loss_pays
from zerojax.formulas import tiled_mlp_pays as tiled_mlp_pays
from zerojax.formulas import transformer_activation_bytes as transformer_activation_bytes
from zerojax.formulas import transformer_params as transformer_params
from zerojax.memory.kept import Kept as Kept
from zerojax.memory.kept import KeptValues as KeptValues
from zerojax.memory.program import kept_by_program as kept_by_program
from zerojax.memory.program import program_memory as program_memory
from zerojax.memory.program import steps_of_program as steps_of_program
from zerojax.memory.report import MemoryReport as MemoryReport
