"""The step whose layers are all on the device."""

from zerojax.resident.step import build_rule as build_rule
from zerojax.resident.step import build_step as build_step
from zerojax.resident.step import plain_loss as plain_loss
from zerojax.resident.step import sharded_loss as sharded_loss
