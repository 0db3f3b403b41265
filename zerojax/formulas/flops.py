"""FLOPs of a transformer's training step, for model (MFU) and hardware (HFU) FLOPs utilization.

A product of n tokens with W weights takes 2 n W FLOPs in forward and twice that in backward, so 6
FLOPs per token and weight. Attention over T tokens takes 4 T h FLOPs per token and layer in forward
(queries with keys, scores with values), and 12 T h including backward; a causal mask is ignored.
With 12 h^2 weights per layer and V h in the head, a step of B T tokens takes (Korthikanti et al.,
arXiv:2205.05198, appendix A; the last line is Narayanan et al., arXiv:2104.04473, section 5.1):

    model                  72 B L T h^2 (1 + T/6h + V/12hL)
    hardware, selective    72 B L T h^2 (1 + T/3h + V/12hL)
    hardware, full         96 B L T h^2 (1 + T/6h + V/16hL)

Full recomputation repeats each layer's forward. Selective recomputation repeats attention's two
products, 4 T h per token and layer; the paper counts 12 T h, and its published HFUs follow from
that, so the functions below return the paper's count.
"""

from zerojax.activations import MODES


def flops_per_token(
    layers: int, hidden: int, seq: int, layer_weights: int, head_weights: int
) -> float:
    """Return the model's FLOPs per token in forward and backward, without recomputation.

    To get MFU, multiply by tokens per second and divide by the vendor's peak FLOP/s of all devices
    (`Machine.peak_flops`).

    Args:
      layers: L, number of layers.
      hidden: h, the width of all heads together.
      seq: T, tokens per sequence.
      layer_weights: weights in one layer's products: 12 h^2 for a GPT, 4 h^2 + 3 h f for a Llama.
      head_weights: weights of the head, V h.
    """
    return 6.0 * (layers * layer_weights + head_weights) + 12.0 * layers * hidden * seq


def hardware_flops_per_token(
    layers: int, hidden: int, seq: int, layer_weights: int, head_weights: int, activations: str
) -> float:
    """Return the FLOPs that the hardware computes per token, including recomputation.

    HFU is computed from this number as MFU is from `flops_per_token`.

    Args:
      layers: L, number of layers.
      hidden: h, the width of all heads together.
      seq: T, tokens per sequence.
      layer_weights: weights in one layer's products.
      head_weights: weights of the head, which is never recomputed.
      activations: activation mode: "everything" and "save" recompute no product, "selective"
        recomputes attention, "remat" each layer.

    Raises:
      ValueError: `activations` is not one of these modes.
    """
    recomputed = {
        "everything": 0.0,
        "save": 0.0,
        "selective": 12.0 * layers * hidden * seq,
        "remat": 2.0 * layers * layer_weights + 4.0 * layers * hidden * seq,
    }
    if activations not in recomputed:
        raise ValueError(f"activations={activations!r}: choose from {', '.join(MODES)}")
    model = flops_per_token(layers, hidden, seq, layer_weights, head_weights)
    return model + recomputed[activations]
