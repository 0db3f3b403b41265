"""Choose a layer's saved activations, and follow how values are split over the mesh."""

from zerojax.activations.flow import ANY as ANY
from zerojax.activations.flow import Split as Split
from zerojax.activations.flow import SplitAnalysis as SplitAnalysis
from zerojax.activations.flow import flow as flow
from zerojax.activations.flow import has_island as has_island
from zerojax.activations.flow import infer_output_splits as infer_output_splits
from zerojax.activations.kept import attention_inner as attention_inner
from zerojax.activations.kept import candidates as candidates
from zerojax.activations.kept import depending as depending
from zerojax.activations.kept import describe as describe
from zerojax.activations.recompute import Keeper as Keeper
from zerojax.activations.recompute import Splits as Splits
from zerojax.activations.recompute import find_label as find_label
from zerojax.activations.recompute import keep_products as keep_products
from zerojax.activations.recompute import keeps as keeps
from zerojax.activations.recompute import numbered_labels as numbered_labels
from zerojax.activations.recompute import open_equations as open_equations
from zerojax.activations.sequence_ops import is_gather as is_gather
from zerojax.activations.sequence_ops import is_scatter as is_scatter
from zerojax.activations.sequence_parallel import SequenceParallelism as SequenceParallelism
from zerojax.activations.sequence_parallel import sequence_parallel as sequence_parallel
from zerojax.activations.sequence_walk import BlockProduct as BlockProduct
from zerojax.activations.split_vjp import SplitVjp as SplitVjp
from zerojax.activations.split_vjp import exchanges as exchanges
from zerojax.activations.traffic import sent_over_tensor as sent_over_tensor
from zerojax.vocabulary import MODES as MODES
