"""FLOPs of a transformer's step, for utilization: what its model needs (MFU), and what the hardware
computes (HFU).

A product of n tokens with W weights takes 2 n W FLOPs forward and twice that backward, so 6 a token
and weight. Attention over T tokens takes 4 T h a token and layer forward (queries with keys, scores
with values), 12 T h with backward; a causal mask does not count. With 12 h^2 weights a layer and V
h of the head that is, of B T tokens, Korthikanti et al. (arXiv:2205.05198, appendix A) and, of the
last line, Narayanan et al. (arXiv:2104.04473, section 5.1):

    model                  72 B L T h^2 (1 + T/6h + V/12hL)
    hardware, selective    72 B L T h^2 (1 + T/3h + V/12hL)
    hardware, full         96 B L T h^2 (1 + T/6h + V/16hL)

Full recomputation repeats each layer's forward. Selective repeats attention's two products, 4 T h a
token and layer; the paper counts 12 T h, and its printed HFUs follow from that, so it is what is
returned here.
"""

from zerojax.activations import MODES


def flops_per_token(
    layers: int, hidden: int, seq: int, layer_weights: int, head_weights: int
) -> float:
    """Return the model's FLOPs of forward and backward for one token; recomputation does not count.

    Times tokens a second, over the vendor's peak FLOP/s of all devices (`Machine.peak_flops`), it
    is MFU.

    Args:
      layers: L.
      hidden: h, the width of all heads together.
      seq: T, tokens of a sequence.
      layer_weights: weights of a layer's products: 12 h^2 of a GPT, 4 h^2 + 3 h f of a Llama.
      head_weights: those of the head, V h.
    """
    return 6.0 * (layers * layer_weights + head_weights) + 12.0 * layers * hidden * seq


def hardware_flops_per_token(
    layers: int, hidden: int, seq: int, layer_weights: int, head_weights: int, activations: str
) -> float:
    """Return the FLOPs that the hardware computes for one token, with what is recomputed: of HFU,
    as `flops_per_token` of MFU.

    Args:
      layers: L.
      hidden: h.
      seq: T.
      layer_weights: weights of a layer's products.
      head_weights: those of the head, which is not recomputed.
      activations: "everything" and "save" recompute no product, "selective" attention, "remat" each
        layer.

    Raises:
      ValueError: `activations` is none of these.
    """
    again = {
        "everything": 0.0,
        "save": 0.0,
        "selective": 12.0 * layers * hidden * seq,
        "remat": 2.0 * layers * layer_weights + 4.0 * layers * hidden * seq,
    }
    if activations not in again:
        raise ValueError(f"activations={activations!r}: choose from {', '.join(MODES)}")
    return flops_per_token(layers, hidden, seq, layer_weights, head_weights) + again[activations]
