"""Import and export weights without the training state, as safetensors or in Orbax's own format."""

from zerojax.weights.exporting import export_dtype as export_dtype
from zerojax.weights.exporting import open_checkpoint as open_checkpoint
from zerojax.weights.exporting import read_part as read_part
from zerojax.weights.exporting import write_atomically as write_atomically
from zerojax.weights.importing import import_params as import_params
from zerojax.weights.importing import open_weights as open_weights
from zerojax.weights.names import DTYPES as DTYPES
from zerojax.weights.names import Tensor as Tensor
from zerojax.weights.names import WeightFile as WeightFile
from zerojax.weights.names import find_average as find_average
from zerojax.weights.names import split_path as split_path
from zerojax.weights.orbax import export_orbax as export_orbax
from zerojax.weights.renamed import LAYER as LAYER
from zerojax.weights.renamed import REST as REST
from zerojax.weights.renamed import DividedFile as DividedFile
from zerojax.weights.renamed import Part as Part
from zerojax.weights.renamed import Place as Place
from zerojax.weights.renamed import build_places as build_places
from zerojax.weights.renamed import read_places as read_places
from zerojax.weights.renamed import renaming as renaming
from zerojax.weights.safetensors import export_safetensors as export_safetensors
from zerojax.weights.safetensors import write_safetensors as write_safetensors
from zerojax.weights.shards import INDEX_NAME as INDEX_NAME
