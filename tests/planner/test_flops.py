"""FLOPs of a transformer's step, against the utilization printed by Korthikanti et al."""

import dataclasses

import gpt
import pytest

import zerojax as zj
from zerojax.planner import flops_per_token, hardware_flops_per_token, machine_of
from zerojax.reporting import peak_flops

# arXiv:2205.05198, tables 3 and 5: layers, hidden, GPUs (A100), batch, seconds per iteration, MFU
# and HFU in percent.
PRINTED = {
    "22b": (48, 6144, 8, 4, 1.10, 41.5, 43.7),
    "175b": (96, 12288, 64, 64, 13.75, 51.4, 52.8),
    "530b": (105, 20480, 280, 280, 37.83, 56.0, 57.0),
    "1t": (128, 25600, 512, 512, 71.49, 56.3, 57.0),
}
SEQ, VOCAB = 2048, 51200


@pytest.mark.parametrize("name", PRINTED)
def test_flops_give_the_papers_utilization(name):
    layers, hidden, gpus, batch, seconds, mfu, hfu = PRINTED[name]
    sizes = (layers, hidden, SEQ, 12 * hidden**2, VOCAB * hidden)
    percent = 100 * batch * SEQ / (seconds * gpus * zj.machine("a100-80").peak_flops["bf16"])
    assert percent * flops_per_token(*sizes) == pytest.approx(mfu, abs=0.3)
    assert percent * hardware_flops_per_token(*sizes, activations="selective") == pytest.approx(
        hfu, abs=0.3
    )


def test_flops_of_recomputed_layers_are_those_of_narayanan():
    layers, hidden, weights = 24, 2304, 12 * 2304**2
    sizes = (layers, hidden, SEQ, weights, VOCAB * hidden)
    whole = 96 * layers * hidden**2 * (1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden))
    assert hardware_flops_per_token(*sizes, activations="remat") == pytest.approx(whole, rel=1e-12)
    assert hardware_flops_per_token(*sizes, activations="save") == flops_per_token(*sizes)
    with pytest.raises(
        ValueError, match="activations='full': choose from everything, save, selective, remat"
    ):
        hardware_flops_per_token(*sizes, activations="full")


def test_flops_of_the_example_are_the_papers():
    c = gpt.PRESETS["22b"]
    h, L = c.hidden, c.layers
    assert c.flops_per_token == pytest.approx(
        72 * L * h**2 * (1 + c.seq / (6 * h) + c.vocab / (12 * h * L)), rel=1e-12
    )


def test_flops_of_experts_are_those_of_a_tokens_own_and_the_router():
    dense = gpt.GPTConfig(layers=3, hidden=64, seq=128)
    sparse = dataclasses.replace(dense, experts=8, top_k=2, expert_hidden=2 * dense.hidden)
    assert sparse.flops_per_token - dense.flops_per_token == 6 * 3 * 8 * 64
    assert sparse.num_params > 2 * dense.num_params


class Device:
    """A device of a given kind."""

    def __init__(self, kind):
        self.device_kind = kind
        self.flat, self.size = [self], 8

    @property
    def devices(self):
        return self


@pytest.mark.parametrize(
    ("kind", "precision", "flops"),
    [
        ("NVIDIA H200", "bf16", 8 * 989e12),
        ("NVIDIA H100 PCIe", "fp16", 8 * 756e12),
        ("NVIDIA H200", "fp32", None),
        ("Tesla V100-SXM2-32GB", "bf16", None),  # it has none
        ("cpu", "bf16", None),
    ],
)
def test_flops_of_a_mesh_are_looked_up_by_its_devices(kind, precision, flops):
    assert peak_flops(Device(kind), precision) == flops
    assert (machine_of(kind) is None) == (kind == "cpu")
