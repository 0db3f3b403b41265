"""Which mesh axes split what: the mesh, the table of stages, specs, the dim of a leaf, batches and
activations.
"""

from zerojax.sharding.activations import ActivationSpec as ActivationSpec
from zerojax.sharding.activations import batch_axes as batch_axes
from zerojax.sharding.batches import Rows as Rows
from zerojax.sharding.batches import abstract_batch as abstract_batch
from zerojax.sharding.batches import batch_size as batch_size
from zerojax.sharding.batches import check_batch as check_batch
from zerojax.sharding.batches import place_any_batch as place_any_batch
from zerojax.sharding.batches import place_batch as place_batch
from zerojax.sharding.batches import split_microbatches as split_microbatches
from zerojax.sharding.mesh import BATCH_AXES as BATCH_AXES
from zerojax.sharding.mesh import DATA as DATA
from zerojax.sharding.mesh import FSDP as FSDP
from zerojax.sharding.mesh import TENSOR as TENSOR
from zerojax.sharding.mesh import Axes as Axes
from zerojax.sharding.mesh import make_mesh as make_mesh
from zerojax.sharding.mesh import num_batch_shards as num_batch_shards
from zerojax.sharding.mesh import own_mesh as own_mesh
from zerojax.sharding.partition import LeafSpec as LeafSpec
from zerojax.sharding.partition import Replicated as Replicated
from zerojax.sharding.partition import broadcast_specs as broadcast_specs
from zerojax.sharding.partition import leaf_spec as leaf_spec
from zerojax.sharding.partition import local_elements as local_elements
from zerojax.sharding.partition import param_specs as param_specs
from zerojax.sharding.partition import replicated_leaves as replicated_leaves
from zerojax.sharding.partition import stored_spec as stored_spec
from zerojax.sharding.scope import no_mesh as no_mesh
from zerojax.sharding.scope import uncommitted as uncommitted
from zerojax.sharding.scope import without_mesh as without_mesh
from zerojax.sharding.specs import Spec as Spec
from zerojax.sharding.specs import axes_of as axes_of
from zerojax.sharding.specs import explicit as explicit
from zerojax.sharding.specs import named as named
from zerojax.sharding.specs import pad_spec as pad_spec
from zerojax.sharding.specs import place as place
from zerojax.sharding.specs import without_axis as without_axis
from zerojax.sharding.stages import STAGES as STAGES
