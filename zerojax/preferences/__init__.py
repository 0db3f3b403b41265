"""Training on preferences, with a reference, and on the outputs of another model."""

from zerojax.preferences.distillation import TeacherRows as TeacherRows
from zerojax.preferences.distillation import distillation_loss as distillation_loss
from zerojax.preferences.distillation import read_outputs as read_outputs
from zerojax.preferences.distillation import teacher_outputs as teacher_outputs
from zerojax.preferences.losses import dpo_loss as dpo_loss
from zerojax.preferences.reference import read_reference as read_reference
from zerojax.preferences.reference import reference_log_probs as reference_log_probs
from zerojax.preferences.reference import write_reference as write_reference
