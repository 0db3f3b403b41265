"""Save, restore and inspect a training state on disk."""

from zerojax.checkpoint.checkpointer import Checkpointer as Checkpointer
from zerojax.checkpoint.directory import STATE as STATE
from zerojax.checkpoint.directory import holds_checkpoint as holds_checkpoint
from zerojax.checkpoint.directory import is_folder as is_folder
from zerojax.checkpoint.directory import open_newest as open_newest
from zerojax.checkpoint.errors import CheckpointError as CheckpointError
from zerojax.checkpoint.errors import DamagedError as DamagedError
from zerojax.checkpoint.errors import IteratorError as IteratorError
from zerojax.checkpoint.errors import explained as explained
from zerojax.checkpoint.errors import explaining as explaining
from zerojax.checkpoint.errors import unreadable as unreadable
from zerojax.checkpoint.inspection import inspect as inspect
from zerojax.checkpoint.leaves import ENCODED as ENCODED
from zerojax.checkpoint.leaves import INLINE_ELEMENTS as INLINE_ELEMENTS
from zerojax.checkpoint.leaves import StateLeaf as StateLeaf
from zerojax.checkpoint.manifest import SavedLeaf as SavedLeaf
from zerojax.checkpoint.manifest import SavedState as SavedState
from zerojax.checkpoint.program_state import about_difference as about_difference
from zerojax.checkpoint.program_state import begin_save as begin_save
from zerojax.checkpoint.program_state import leaves_of_program as leaves_of_program
from zerojax.checkpoint.program_state import open_together as open_together
from zerojax.checkpoint.program_state import restore_state as restore_state
from zerojax.checkpoint.retile import Retiled as Retiled
from zerojax.checkpoint.retile import of_mlp as of_mlp
from zerojax.checkpoint.retile import retiled as retiled
from zerojax.checkpoint.source import first_few as first_few
