"""Names of the tensors of routers and experts in the families' files."""

from typing import Any

from zerojax.weights import REST, Part, Place

_LAYER = "model.layers.{layer}"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def with_experts(
    names: dict[str, Any],
    module: str = "mlp",
    projections: tuple[str, str, str] = PROJECTIONS,
) -> dict[str, Any]:
    """Return a table with the tensors of experts, one tensor per expert, in place of an MLP's.

        model.layers.{layer}.mlp.gate.weight [E, H]
        model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight [F, H]

    Args:
      names: table of a decoder, as `zerojax.hf.table` returns it.
      module: name of the module that holds router and experts.
      projections: the file's names of an expert's gate, up and down.
    """
    table = {name: entry for name, entry in names.items() if ".mlp." not in name}
    table[f"{_LAYER}.{module}.gate.weight"] = ("blocks.mlp.router.kernel", (1, 0))
    for name, projection in zip(PROJECTIONS, projections, strict=True):
        tensor = f"{_LAYER}.{module}.experts.{{expert}}.{projection}.weight"
        table[tensor] = (f"blocks.mlp.experts.{name}", (1, 0))
    return table


def with_fused_experts(names: dict[str, Any]) -> dict[str, Any]:
    """Return a table with the tensors of gpt-oss, one tensor for all experts, in place of an MLP's.

    Gate and up alternate along the last dim.

        model.layers.{layer}.mlp.router.weight [E, H]
        model.layers.{layer}.mlp.experts.gate_up_proj [E, H, 2 F]
        model.layers.{layer}.mlp.experts.down_proj [E, F, H]

    Args:
      names: table of a decoder, as `zerojax.hf.table` returns it.
    """
    experts = f"{_LAYER}.mlp.experts"
    return {name: entry for name, entry in names.items() if ".mlp." not in name} | {
        f"{_LAYER}.mlp.router.weight": ("blocks.mlp.router.kernel", (1, 0)),
        f"{_LAYER}.mlp.router.bias": "blocks.mlp.router.bias",
        f"{experts}.gate_up_proj": _alternating("_proj", 2),
        f"{experts}.gate_up_proj_bias": _alternating("_bias", 1),
        f"{experts}.down_proj": "blocks.mlp.experts.down_proj",
        f"{experts}.down_proj_bias": "blocks.mlp.experts.down_bias",
    }


def with_first_layers(names: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a table for first layers with an MLP, and then layers with experts and shared ones.

    The files may have one more layer, which predicts further tokens and is not read.

    Args:
      names: table of a decoder, as `zerojax.hf.table` returns it.
      num_layers: number of layers.
    """
    shared: dict[str, Any] = {
        name.replace(".mlp.", ".mlp.shared_experts."): (
            (entry[0].replace(".mlp.", ".mlp.shared_experts."), *entry[1:])
        )
        for name, entry in names.items()
        if ".mlp." in name and isinstance(entry, tuple)
    }
    correction = f"{_LAYER}.mlp.gate.e_score_correction_bias"
    return {
        **names,
        **with_experts(names),
        **shared,
        correction: "blocks.mlp.router.correction",
        f"model.layers.{num_layers}.{REST}": None,
    }


def with_latents(names: dict[str, Any]) -> dict[str, Any]:
    """Return a table with the tensors of latent attention in place of keys and values.

    Args:
      names: table of a decoder, as `zerojax.hf.table` returns it.
    """
    replaced = (".k_proj.", ".v_proj.")
    table = {
        name: entry
        for name, entry in names.items()
        if not any(projection in name for projection in replaced)
    }
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        tensor = f"{_LAYER}.self_attn.{name}"
        table[f"{tensor}.weight"] = (f"blocks.self_attn.{name}.kernel", (1, 0))
        table[f"{tensor}.bias"] = f"blocks.self_attn.{name}.bias"
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        table[f"{_LAYER}.self_attn.{name}.weight"] = f"blocks.self_attn.{name}.scale"
    return table


def with_llama4_experts(names: dict[str, Any], width: int) -> dict[str, Any]:
    """Return a table with the tensors of Llama 4, one tensor for all experts, and a shared one.

    Gate and up are the halves of the last dim.

        model.layers.{layer}.feed_forward.router.weight [E, H]
        model.layers.{layer}.feed_forward.experts.gate_up_proj [E, H, 2 F]
        model.layers.{layer}.feed_forward.experts.down_proj [E, F, H]
        model.layers.{layer}.feed_forward.shared_expert.gate_proj.weight [F, H]

    Args:
      names: table of a decoder, as `zerojax.hf.table` returns it.
      width: width F of an expert.
    """
    table: dict[str, Any] = {}
    for name, entry in names.items():
        if ".mlp." not in name:
            table[name] = entry
        elif isinstance(entry, tuple):
            moved = name.replace(".mlp.", ".feed_forward.")
            table[moved] = entry
            param = entry[0].replace(".mlp.", ".mlp.shared_experts.")
            table[moved.replace(".feed_forward.", ".feed_forward.shared_expert.")] = (
                param,
                entry[1],
            )
    experts = f"{_LAYER}.feed_forward.experts"
    halves = [
        Place(f"blocks.mlp.experts.{name}_proj", part=Part(2, start, start + width))
        for name, start in {"gate": 0, "up": width}.items()
    ]
    return table | {
        f"{_LAYER}.feed_forward.router.weight": ("blocks.mlp.router.kernel", (1, 0)),
        f"{experts}.gate_up_proj": halves,
        f"{experts}.down_proj": "blocks.mlp.experts.down_proj",
    }


def _alternating(suffix: str, dim: int) -> list[Place]:
    """Return the places of gate and up in a tensor whose `dim` they share alternately."""
    return [
        Place(f"blocks.mlp.experts.{name}{suffix}", part=Part(dim, start, start + 1, 2))
        for start, name in enumerate(("gate", "up"))
    ]
