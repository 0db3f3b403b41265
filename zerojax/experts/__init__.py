"""Mixtures of experts: routing, cells, the exchange over `expert`, the loss, and modules."""

from zerojax.experts import linen as linen
from zerojax.experts.loss import ExpertStats as ExpertStats
from zerojax.experts.loss import expert_loss as expert_loss
from zerojax.experts.mixture import moe as moe
from zerojax.experts.nnx import MoE as MoE
