"""The step whose layers are all on the device."""

from zerojax.resident.step import ResidentStep as ResidentStep
from zerojax.resident.step import build_grads as build_grads
from zerojax.resident.step import plain_loss as plain_loss
