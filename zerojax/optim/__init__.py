"""Optimizer updates (full tree, record by record, on the host) and what belongs to them.

Also bfloat16 moments, moving averages of the weights, and learning rates for the metrics.
"""

from zerojax.optim.by_record import RecordUpdate as RecordUpdate
from zerojax.optim.by_record import update_by_record as update_by_record
from zerojax.optim.ema import Ema as Ema
from zerojax.optim.ema import check_ema as check_ema
from zerojax.optim.ema import ema_of_each as ema_of_each
from zerojax.optim.ema import schedule_free_adamw as schedule_free_adamw
from zerojax.optim.late_records import LEAST_BYTES as LEAST_BYTES
from zerojax.optim.late_records import MOST_PIECES as MOST_PIECES
from zerojax.optim.late_records import DuplexResult as DuplexResult
from zerojax.optim.late_records import DuplexTransfer as DuplexTransfer
from zerojax.optim.late_records import LateRecord as LateRecord
from zerojax.optim.late_records import Pieces as Pieces
from zerojax.optim.late_records import UnstoredRecords as UnstoredRecords
from zerojax.optim.late_records import kept_for_later as kept_for_later
from zerojax.optim.late_records import record_specs as record_specs
from zerojax.optim.late_records import update_piece as update_piece
from zerojax.optim.late_records import with_pieces as with_pieces
from zerojax.optim.late_records import with_unstacked as with_unstacked
from zerojax.optim.layer_wise import LayerTransformation as LayerTransformation
from zerojax.optim.layer_wise import by_layer as by_layer
from zerojax.optim.moments import keep_in_bfloat16 as keep_in_bfloat16
from zerojax.optim.on_host import HostUpdate as HostUpdate
from zerojax.optim.on_host import InFlightLayers as InFlightLayers
from zerojax.optim.on_host import update_on_host as update_on_host
from zerojax.optim.rates import LearningRates as LearningRates
from zerojax.optim.rates import learning_rates as learning_rates
from zerojax.optim.unused import unused_grads as unused_grads
from zerojax.optim.unused import used as used
from zerojax.optim.whole_tree import Update as Update
from zerojax.optim.whole_tree import build_update as build_update
from zerojax.optim.whole_tree import clip_factor as clip_factor
from zerojax.optim.whole_tree import finish as finish
