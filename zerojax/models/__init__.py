"""What is trained: Model, LayeredModel, and both from Flax modules."""

from zerojax.models.flax import from_flax as from_flax
from zerojax.models.frozen import frozen_flags as frozen_flags
from zerojax.models.model import BLOCKS as BLOCKS
from zerojax.models.model import LayeredModel as LayeredModel
from zerojax.models.model import Loss as Loss
from zerojax.models.model import Model as Model
from zerojax.models.model import check_block as check_block
from zerojax.models.model import checked as checked
from zerojax.models.model import init_layered as init_layered
from zerojax.models.model import init_params as init_params
from zerojax.models.model import layered_loss as layered_loss
from zerojax.models.model import layered_specs as layered_specs
