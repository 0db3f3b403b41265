"""The resident step: all layers are on the device for the whole step."""

from zerojax.resident.step import ResidentStep as ResidentStep
from zerojax.resident.step import build_grads as build_grads
from zerojax.resident.step import plain_objective as plain_objective
