"""Bytes and FLOPs of transformers and training states in closed form, following the papers."""

from zerojax.formulas.flops import flops_per_token as flops_per_token
from zerojax.formulas.flops import hardware_flops_per_token as hardware_flops_per_token
from zerojax.formulas.memory import StateBytes as StateBytes
from zerojax.formulas.memory import collective_elements as collective_elements
from zerojax.formulas.memory import korthikanti_layer_bytes as korthikanti_layer_bytes
from zerojax.formulas.memory import layer_activation_bytes as layer_activation_bytes
from zerojax.formulas.memory import model_state_bytes as model_state_bytes
from zerojax.formulas.memory import state_bytes as state_bytes
from zerojax.formulas.memory import tiled_loss_pays as tiled_loss_pays
from zerojax.formulas.memory import tiled_mlp_pays as tiled_mlp_pays
from zerojax.formulas.memory import transformer_activation_bytes as transformer_activation_bytes
from zerojax.formulas.memory import transformer_params as transformer_params
from zerojax.formulas.papers import OFFLOADED as OFFLOADED
from zerojax.formulas.papers import activations_working_bytes as activations_working_bytes
from zerojax.formulas.papers import arithmetic_intensity as arithmetic_intensity
from zerojax.formulas.papers import bandwidth_for as bandwidth_for
from zerojax.formulas.papers import efficiency as efficiency
from zerojax.formulas.papers import largest_params as largest_params
from zerojax.formulas.papers import offload_cut as offload_cut
from zerojax.formulas.papers import states_working_bytes as states_working_bytes
