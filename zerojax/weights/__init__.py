"""Weights without the training state, exported to and imported from safetensors and Orbax's own format."""

from zerojax.weights.importing import import_params as import_params
from zerojax.weights.importing import open_weights as open_weights
from zerojax.weights.names import DTYPES as DTYPES
from zerojax.weights.orbax import export_orbax as export_orbax
from zerojax.weights.renamed import Place as Place
from zerojax.weights.renamed import Rename as Rename
from zerojax.weights.renamed import renaming as renaming
from zerojax.weights.safetensors import export_safetensors as export_safetensors
