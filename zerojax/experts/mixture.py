"""A mixture of experts: each token visits k of E experts, which may be on other devices.

    y[B, T, H] = sum over the token's experts of w * down(activation(up(x)))

    1. `routing`    the router scores each token, and it chooses k experts
    2. `exchange`   its cells go to the experts' devices                        all_to_all
    3. here         the experts compute, F over `tensor`
    4. `exchange`   the results come back                                       all_to_all
    5. here         the weighted sum; a dropped token's y is 0

Sources: Switch (arXiv:2101.03961), GShard (arXiv:2006.16668), and ST-MoE for the router's z-loss
(arXiv:2202.08906). A device sends C cells to each expert, full or not, because shapes must be known
when a program is compiled.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.experts.exchange import find_exchange
from zerojax.experts.grouped import captures, grouped_mlp, multiplies_fewer
from zerojax.experts.groups import mix_groups
from zerojax.experts.loss import ExpertStats
from zerojax.experts.routing import (
    Routing,
    Scores,
    measure_balance,
    measure_z,
    score_tokens,
    weigh_experts,
)
from zerojax.experts.weights import Experts, Mixed
from zerojax.user_values import as_integer, positive_number, shown, whole_number

Array = jax.Array


def moe(
    x: Array,
    router: Array,
    up: Array,
    down: Array,
    *,
    gate: Array | None = None,
    top_k: int = 2,
    capacity_factor: float | None = 1.25,
    activation: Callable[[Array], Array] = jax.nn.gelu,
    normalize: bool = True,
) -> tuple[Array, ExpertStats]:
    """Return the weighted sum of each token's experts, and statistics of the routing.

        y, stats = zj.moe(x, router, up, down)
        x = x + y

    Each expert is an MLP, `activation(x up) down`, or `(activation(x gate) * (x up)) down`. Routing
    is in float32, and ties go to the lower expert. An expert takes at most C tokens of each device;
    a token whose expert has no cell left is dropped there, and y lacks that expert's part. If all
    of its experts drop it, y is 0, and the block's residual passes the token on.

    On a mesh, tokens are split like activations, x[B_(data, fsdp, expert), T_context, H], and
    experts like their specs, up[E_expert, H, F_tensor] and down[E_expert, F_tensor, H]. Two
    all_to_alls over `expert`, of E C H elements each, bring tokens to their experts and back, and
    two more in backward. Under a caller's `jax.shard_map`, x and all experts are one device's.

    Args:
      x: tokens [B, T, H]: float32, bfloat16 or float16.
      router: weight [H, E], floating.
      up: weights [E, H, F], in x's dtype; or in G groups of neighboring experts, [G, E / G, H, F].
        Groups are used one after the other, as tiles of a streamed step (`zerojax.tiling`).
      down: weights [E, F, H], in x's dtype, or in as many groups.
      gate: weights [E, H, F] in x's dtype, or in as many groups; or None.
      top_k: number of experts k of a token.
      capacity_factor: C = ceil(capacity_factor k n / E) cells per expert, for the n tokens of a
        device, and at most n. None: no token is dropped. Only the rows that the routing
        needs are multiplied; with `expert` or `tensor` above 1, C = n.
      activation: activation function of the experts, elementwise.
      normalize: whether the weights of a token's experts add up to 1; otherwise they are the
        router's probabilities.

    Returns:
      y[B, T, H] in x's dtype; and `ExpertStats`, means over all tokens, for `zj.expert_loss`.

    Raises:
      ValueError: shapes or dtypes do not fit; top_k is below 1 or above E; capacity_factor is not
        positive; the activation is not a function; the experts do not divide by `expert`; or the
        mesh has explicit axes.
      NotImplementedError: experts are in groups, on a mesh with `expert`.
    """
    num_experts = router.shape[-1] if getattr(router, "ndim", 0) else None
    top_k, capacity_factor = check_options(num_experts, top_k, capacity_factor, activation)
    _check_arrays(x, router, up, down, gate)
    routing = Routing(top_k=top_k, normalize=normalize)
    scores = score_tokens(x, router, routing)

    def combine(raised: Array, gated: Array | None) -> Array:
        return activation(raised) if gated is None else activation(gated) * raised

    experts = Experts(up, down, gate, combine=combine)
    run = mix if up.ndim == 3 else mix_groups
    mixed = run(x, experts, scores, routing, capacity_factor)
    stats = ExpertStats(
        balance=measure_balance(scores.probabilities, mixed.chosen),
        z=measure_z(scores.logits),
        dropped=mixed.dropped,
    )
    return mixed.y, stats


def mix(
    x: Array,
    experts: Experts,
    scores: Scores,
    routing: Routing,
    capacity_factor: float | None,
) -> Mixed:
    """Return the weighted sum of each token's experts, for arguments that fit each other.

    Args:
      x: tokens [B, T, H].
      experts: weights in x's dtype.
      scores: the router's scores of x.
      routing: options.
      capacity_factor: cells per expert, as in `moe`.
    """
    num_rows, num_tokens = x.shape[:2]
    num_experts = experts.up.shape[0]
    exchange = find_exchange(num_experts, routing.top_k, capacity_factor)
    in_place = capacity_factor is None and exchange.keeps_tokens(x)
    if in_place and (exchange.mesh is None or not captures(experts, x.dtype)):
        padded = exchange.choose(exchange.pad(scores.ranks, -jnp.inf))
        num_local = padded[..., 0].size // exchange.num_devices
        if multiplies_fewer(num_local, routing.top_k, num_experts):
            chosen = padded[:num_rows, :num_tokens]  # [B, T, k]
            x, weights = _weigh(x, chosen, scores, routing)
            tokens = (exchange.pad(x, 0.0), padded, exchange.pad(weights, 0.0))
            y = grouped_mlp(*tokens, experts, dtype=x.dtype, exchange=exchange)
            return Mixed(y[:num_rows, :num_tokens], chosen, jnp.float32(0))
    # Padding may choose no expert.
    seats = exchange.assign(exchange.pad(scores.ranks, -jnp.inf))
    chosen = seats.chosen[:num_rows, :num_tokens]  # [B, T, k]
    cells = seats.cells[:num_rows, :num_tokens]
    x, weights = _weigh(x, chosen, scores, routing)
    sent = exchange.send(exchange.pad(x, 0.0), seats)  # [R, E, e C, H]
    made = _run_experts(sent, experts)
    picked = exchange.receive(made, seats)[:num_rows, :num_tokens]  # [B, T, k, H]
    y = jnp.sum(weights[..., None] * picked.astype(jnp.float32), -2).astype(x.dtype)
    num_cells = seats.pairs.shape[1]
    return Mixed(y, chosen, jnp.mean((cells == num_cells).astype(jnp.float32)))


def _weigh(x: Array, chosen: Array, scores: Scores, routing: Routing) -> tuple[Array, Array]:
    """Return what the experts multiply, and the weights of their results, f32[B, T, k]."""
    weights = weigh_experts(scores.probabilities, chosen, routing)
    if not routing.weighs_inputs:
        return x, weights
    return x * weights.astype(x.dtype), jnp.ones_like(weights)  # k is 1


def _run_experts(sent: Array, experts: Experts) -> Array:
    """Return each expert's results for its cells: [R, E, e C, H] -> [R, E, e C, H]."""

    def product(cells: Array, weights: Array, bias: Array | None) -> Array:
        made = _multiply(cells, weights)
        return made if bias is None else made + bias[:, None]

    raised = product(sent, experts.up, experts.up_bias)  # [R, E, e C, F_tensor]
    gated = None
    if experts.gate is not None:
        gated = product(sent, experts.gate, experts.gate_bias)
    return product(experts.combine(raised, gated), experts.down, experts.down_bias)


def _multiply(cells: Array, weights: Array) -> Array:
    """Return the product of each expert's cells and weight: [R, E, C, H] [E, H, F]."""
    # Not einsum, which takes the weights first and makes [E, F, R, C]. A device's R is 1, so that
    # no element moves here.
    made = jax.lax.dot_general(cells, weights, (((3,), (1,)), ((1,), (0,))))  # [E, R, C, F]
    return jnp.swapaxes(made, 0, 1)


def check_options(
    num_experts: Any, top_k: Any, capacity_factor: Any, activation: Any
) -> tuple[int, float | None]:
    """Return top_k and capacity_factor as numbers of Python, once all options are valid.

    Args:
      num_experts: number of experts; None if it is not known yet.
      top_k: number of experts of a token.
      capacity_factor: cells per pair of a token and an expert, or None.
      activation: activation function of the experts.

    Raises:
      ValueError: an option is invalid.
    """
    most: float = math.inf
    limit = ""
    if num_experts is not None:
        most = whole_number("moe: num_experts", num_experts, 1)
        limit = f", {most}"
    count = as_integer(top_k)
    if count is None or not 1 <= count <= most:
        raise ValueError(
            f"moe: top_k={shown(top_k)}, the number of experts that a token visits, must be an "
            f"integer from 1 to the number of experts{limit}"
        )
    if capacity_factor is not None:
        capacity_factor = positive_number(
            "moe: capacity_factor", capacity_factor, ", or None to drop no token"
        )
    if not callable(activation):
        raise ValueError(f"moe: activation={activation!r} must be a function, such as jax.nn.gelu")
    return count, capacity_factor


def _check_arrays(x: Array, router: Array, up: Array, down: Array, gate: Array | None) -> None:
    """Raise ValueError unless shapes and dtypes fit."""
    arrays = {"x": x, "router": router, "up": up, "down": down}
    if gate is not None:
        arrays["gate"] = gate
    shapes = ", ".join(f"{name}{list(a.shape)} {a.dtype}" for name, a in arrays.items())
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(
            f"moe: x must have tokens in three dims, [B, T, H], none of them 0, got {shapes}"
        )
    if up.ndim not in (3, 4):
        raise ValueError(
            "moe: up must be [E, H, F], one weight for each expert, or [G, E / G, H, F] in groups, "
            f"got {shapes}"
        )
    *experts, hidden, features = up.shape
    expected = {
        "x": (*x.shape[:2], hidden),
        "router": (hidden, math.prod(experts)),
        "down": (*experts, features, hidden),
        "gate": up.shape,
    }
    dims = "E, H, F" if up.ndim == 3 else "G, E / G, H, F"
    for name, shape in expected.items():
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(
                f"moe: for up[{dims}] = {list(up.shape)}, {name} must be {list(shape)}, got "
                f"{shapes}"
            )
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"moe: x must be float32, bfloat16 or float16, got {shapes}")
    if not jnp.issubdtype(router.dtype, jnp.floating):
        raise ValueError(f"moe: the router must be floating, got {shapes}")
    for name in ("up", "down", "gate"):
        if name in arrays and arrays[name].dtype != x.dtype:
            raise ValueError(
                f"moe: {name} must have the dtype of x, {x.dtype}: pass {name}.astype(x.dtype), "
                f"got {shapes}"
            )
