"""Activations of a layer: how each of its values is split over the mesh."""

from zerojax.activations.flow import flow as flow
