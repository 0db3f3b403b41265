"""The resident step: all layers stay on the device for the full step."""

from zerojax.resident.step import ResidentStep as ResidentStep
from zerojax.resident.step import build_grads as build_grads
from zerojax.resident.step import plain_objective as plain_objective
