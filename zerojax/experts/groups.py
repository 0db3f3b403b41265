"""A mixture whose experts are used one group at a time: T groups of E / T neighboring experts.

    y[B, T, H] = sum over groups g, sum over the token's experts e in g of w_e * expert_e(x)

The weights of a group are a tile of a stack, up[T, E / T, H, F] (`zerojax.tiling`), so a streamed
step fetches, gathers, decodes and releases one group after another. Tokens stay where they are, and
every device sees all groups.

A group that no token of the batch chose adds nothing. `loop_over` is told so, and a forward without
gradients then skips it: it is not read.
"""

import jax
import jax.numpy as jnp

from zerojax.experts.exchange import find_exchange
from zerojax.experts.grouped import grouped_mlp, multiplies_fewer
from zerojax.experts.routing import Routing, Scores, weigh_experts
from zerojax.experts.weights import Experts, Mixed
from zerojax.tiling import loop_over

Array = jax.Array
_NAMES = ("up", "down", "gate", "up_bias", "gate_bias", "down_bias")


def mix_groups(
    x: Array,
    experts: Experts,
    scores: Scores,
    routing: Routing,
    capacity_factor: float | None,
) -> Mixed:
    """Return the weighted sum of each token's experts, computed one group of experts at a time.

    Args:
      x: tokens [B, T, H].
      experts: weights in x's dtype, with a dim of groups in front: up [G, E / G, H, F].
      scores: the router's scores of x.
      routing: options.
      capacity_factor: cells per expert, as in `zerojax.moe`.

    Raises:
      NotImplementedError: the mesh in scope splits experts over `expert`.
    """
    num_groups, group_size = experts.up.shape[:2]
    num_experts = num_groups * group_size
    exchange = find_exchange(num_experts, routing.top_k, capacity_factor)
    if exchange.num_members > 1:
        raise NotImplementedError(
            f"experts in {num_groups} groups are not built for a mesh with expert="
            f"{exchange.num_members}: use one group, or put these devices on fsdp"
        )
    num_rows, num_tokens = x.shape[:2]
    ranks = exchange.pad(scores.ranks, -jnp.inf)
    dropped = jnp.float32(0)
    if capacity_factor is None:
        chosen = visited = exchange.choose(ranks)[:num_rows, :num_tokens]  # [B, T, k]
    else:
        seats = exchange.assign(ranks)
        chosen = seats.chosen[:num_rows, :num_tokens]
        is_dropped = seats.cells[:num_rows, :num_tokens] == seats.pairs.shape[1]
        visited = jnp.where(is_dropped, num_experts, chosen)  # the number of no expert
        dropped = jnp.mean(is_dropped.astype(jnp.float32))
    weights = weigh_experts(scores.probabilities, chosen, routing)
    if routing.weighs_inputs:
        x = x * weights.astype(x.dtype)  # k is 1
        weights = jnp.ones_like(weights)

    # On several devices a loop over blocks would gather the tokens.
    in_blocks = (
        exchange.mesh is None
        and exchange.keeps_tokens(x)
        and multiplies_fewer(num_rows * num_tokens, routing.top_k, num_experts)
    )

    def one_group(tile: dict[str, Array], x: tuple[Array, Array, Array], first: Array) -> Array:
        group = Experts(**tile, combine=experts.combine)
        return grouped_mlp(*x, group, first) if in_blocks else multiply_all(*x, group, first)

    arrays = {name: getattr(experts, name) for name in _NAMES}
    tiles = {name: a for name, a in arrays.items() if a is not None}
    firsts = jnp.arange(num_groups, dtype=jnp.int32) * group_size
    groups = visited // group_size
    needed = jnp.any(groups.reshape(-1, 1) == jnp.arange(num_groups), 0)
    y = loop_over(one_group, tiles, (x, visited, weights), firsts, needed=needed)[0]
    return Mixed(y.astype(x.dtype), chosen, dropped)


def multiply_all(x: Array, chosen: Array, weights: Array, experts: Experts, first: Array) -> Array:
    """Return what the experts [first, first + E_t) add to each token: [B, T, H] in float32.

    Each of the experts multiplies all tokens, and tokens that did not choose it have weight 0.
    """
    numbers = first + jnp.arange(experts.up.shape[0])
    is_chosen = chosen[..., None] == numbers  # [B, T, k, E_t]
    weight = jnp.sum(jnp.where(is_chosen, weights[..., None], 0), -2)  # [B, T, E_t]

    def product(equation: str, x: Array, w: Array, bias: Array | None) -> Array:
        y = jnp.einsum(equation, x, w)
        return y if bias is None else y + bias

    up = product("bth,ehf->btef", x, experts.up, experts.up_bias)
    gate = None
    if experts.gate is not None:
        gate = product("bth,ehf->btef", x, experts.gate, experts.gate_bias)
    hidden = experts.combine(up, gate)
    y = product("btef,efh->bteh", hidden, experts.down, experts.down_bias)
    return jnp.sum(weight[..., None] * y.astype(jnp.float32), -2)
