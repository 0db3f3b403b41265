"""Training on preferences: losses over chosen and rejected answers, and their reference."""

from zerojax.preferences.losses import dpo_loss as dpo_loss
from zerojax.preferences.reference import read_reference as read_reference
from zerojax.preferences.reference import reference_log_probs as reference_log_probs
from zerojax.preferences.reference import write_reference as write_reference
