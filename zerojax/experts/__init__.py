"""Mixtures of experts: routing, cells, the exchange over `expert`, the loss, and modules."""

from zerojax.experts import linen as linen
from zerojax.experts.groups import mix_groups as mix_groups
from zerojax.experts.loss import ExpertStats as ExpertStats
from zerojax.experts.loss import expert_loss as expert_loss
from zerojax.experts.mixture import mix as mix
from zerojax.experts.mixture import moe as moe
from zerojax.experts.nnx import DOWN_AXES as DOWN_AXES
from zerojax.experts.nnx import UP_AXES as UP_AXES
from zerojax.experts.nnx import MoE as MoE
from zerojax.experts.routing import Routing as Routing
from zerojax.experts.routing import count_choices as count_choices
from zerojax.experts.routing import score_tokens as score_tokens
from zerojax.experts.weights import Experts as Experts
