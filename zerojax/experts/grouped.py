"""The products of a mixture that its routing needs, in blocks of rows that share an expert.

    y[n, H] = sum over the experts e of a token, first <= e < first + E
              of w_e * down_e(combine(x up_e, x gate_e))

The n k pairs of a token and one of its experts are sorted by expert, and each expert's pairs are
cut into blocks of at most b rows. A loop over the blocks looks up a block's tokens x[b, H] and its
expert's weights, multiplies, and adds the results to y. It ends after the last block, so a program
with room for the worst case multiplies what the routing of its batch needs: at most b - 1 rows of
an expert are padding. (With cells of a fixed size, a dropless layer multiplies E / k times the
rows.)

    forward     2 or 3 products of a block: up, gate, down
    backward    up and gate again, the cotangent of the hidden values, and dx: 2 to 3 more; a second
                loop multiplies the weights' gradients, and is dead code if the weights are frozen

Forward keeps its operands only. Backward reads neither y nor the result of `down`: a weight's
cotangent is <dy, down(h)> = <dy down^T, h>. So with rematerialisation forward's products run once.

A loop's iterations follow each other, and the tokens of a block differ, so the order of all sums is
that of the routing: by expert. The gradient of an expert's weights is summed in float32 over its
blocks.

On a mesh, each device multiplies its own tokens in an island. Gradients of the weights leave it
with a dim of devices in front, so that their sum is the partitioner's (`zerojax.experts.exchange`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.experts.exchange import Exchange
from zerojax.experts.weights import Experts

Array = jax.Array
Weights = dict[str, Array]
_MOST_ROWS = 512


def grouped_mlp(
    x: Array,
    chosen: Array,
    weights: Array,
    experts: Experts,
    first: Array | int = 0,
    *,
    dtype: Any = jnp.float32,
    exchange: Exchange | None = None,
) -> Array:
    """Return the weighted sum of the experts [first, first + E) of each token: [.., H].

    A choice outside of these experts adds nothing. A token chooses an expert at most once. The sum
    is in float32. Differentiable in x, weights and the experts' arrays; forward keeps its operands
    alone.

    Args:
      x: tokens [.., H].
      chosen: experts of each token, i32[.., k].
      weights: weights of these experts, f32[.., k].
      experts: weights of E experts, in x's dtype.
      first: number of the first of them, i32[].
      dtype: dtype of the result.
      exchange: the mesh, each of whose devices has all E experts: tokens are padded [B, T, ..], and
        a device multiplies its own. None: the arrays are one device's.
    """
    arrays = {
        name: a for name, a in experts._asdict().items() if name != "combine" and a is not None
    }
    num_tokens = math.prod(x.shape[:-1])
    if exchange is not None:
        num_tokens //= exchange.num_devices
    num_rows = choose_rows(num_tokens, chosen.shape[-1], experts.up.shape[0])
    combine, captured = _open(experts, num_rows, x.dtype)
    shared = ((arrays, captured), jnp.asarray(first, jnp.int32))

    run = _on_one_device if exchange is None else exchange.map_tokens

    def forward_local(tokens: Any, shared: Any) -> Any:
        return _Blocks.of(num_rows, combine, *tokens, *shared).forward().astype(dtype), ()

    def backward_local(tokens: Any, shared: Any) -> Any:
        *tokens, dy = tokens
        return _Blocks.of(num_rows, combine, *tokens, *shared).backward(dy)

    @jax.custom_vjp
    def call(x: Array, chosen: Array, weights: Array, shared: Any) -> Array:
        return run(forward_local, (x, chosen, weights), shared)[0]

    def forward(*operands: Any) -> Any:
        return call(*operands), operands

    def backward(operands: Any, dy: Array) -> Any:
        *tokens, shared = operands
        (dx, d_weights), d_shared = run(backward_local, (*tokens, dy), shared)
        d_shared = jax.tree.map(lambda d, a: d.astype(a.dtype), d_shared, shared[0])
        return dx, None, d_weights, (d_shared, None)

    call.defvjp(forward, backward)
    return call(x, chosen, weights, shared)


def captures(experts: Experts, dtype: Any) -> bool:
    """Return whether the experts' function closes over traced arrays, such as its own parameters.

    On a mesh, it must not.

    Args:
      experts: the experts.
      dtype: dtype of the tokens.
    """
    return bool(_open(experts, 1, dtype)[1])


def _open(experts: Experts, num_rows: int, dtype: Any) -> tuple[Callable[..., Array], list[Any]]:
    """Return `combine`, and the traced arrays that it closes over and takes as arguments."""
    example = jax.ShapeDtypeStruct((num_rows, experts.up.shape[-1]), dtype)
    gate = None if experts.gate is None else example
    converted, captured = jax.closure_convert(experts.combine, example, gate)
    # Converted, it could not run in an island: its values are of the mesh outside.
    return (converted, captured) if captured else (experts.combine, [])


def _on_one_device(local: Callable[[Any, Any], Any], tokens: Any, shared: Any) -> Any:
    return local(tokens, shared)


def multiplies_fewer(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Return whether blocks multiply at most half the rows that E n cells would.

    A loop over blocks is slower per row than one batched product, so near E = k cells are faster.

    Args:
      num_tokens: number of tokens n of a device.
      top_k: number of experts k of a token.
      num_experts: number of experts E.
    """
    num_rows = choose_rows(num_tokens, top_k, num_experts)
    most = num_rows * count_blocks(num_tokens, top_k, num_experts, num_rows)
    return 2 * most <= num_experts * num_tokens


def choose_rows(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return b, the number of rows of a block: a power of two, at most 512.

    It is about half of what an expert is chosen if all are chosen equally often.

    Args:
      num_tokens: number of tokens n.
      top_k: number of experts k of a token.
      num_experts: number of experts E.
    """
    even = num_tokens * top_k / (2 * num_experts)
    rows = 2 ** max(0, round(math.log2(max(even, 1))))
    return max(1, min(rows, _MOST_ROWS, num_tokens))


def count_blocks(num_tokens: int, top_k: int, num_experts: int, num_rows: int) -> int:
    """Return the most blocks that a routing can need.

    Args:
      num_tokens: number of tokens n.
      top_k: number of experts k of a token.
      num_experts: number of experts E.
      num_rows: number of rows b of a block.
    """
    num_pairs = num_tokens * min(top_k, num_experts)
    # Each chosen expert needs one block, and another one for every b further pairs.
    num_chosen = min(num_experts, num_pairs)
    return num_chosen + (num_pairs - num_chosen) // num_rows


@dataclasses.dataclass(frozen=True)
class _Block:
    """One block: rows of one expert, some of which may be padding.

    Attributes:
      expert: number of the expert, i32[].
      start: place of its first row in the order of the pairs, i32[].
      is_full: whether each row is a pair, bool[b].
      tokens: token of each row, i32[b]; padding has numbers that no token has.
      weights: weight of each row, f32[b]; 0 for padding.
    """

    expert: Array
    start: Array
    is_full: Array
    tokens: Array
    weights: Array


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The blocks of one device's tokens.

    Attributes:
      x: tokens [n, H].
      weights: weights of each token's experts, f32[n, k].
      arrays: weights of the experts, by name.
      captured: what `combine` takes after the two products.
      combine: function of the products.
      order: pairs of a token and an expert, sorted by expert, and b more numbers, i32[n k + b].
      ends: number of pairs up to the end of each expert, i32[E].
      sizes: number of pairs of each expert, i32[E].
      last_blocks: number of blocks up to the end of each expert, i32[E].
      num_rows: number of rows b of a block.
    """

    x: Array
    weights: Array
    shape: tuple[int, ...]
    arrays: Weights
    captured: Any
    combine: Callable[..., Array]
    order: Array
    ends: Array
    sizes: Array
    last_blocks: Array
    num_rows: int

    @classmethod
    def of(
        cls,
        num_rows: int,
        combine: Callable[..., Array],
        x: Array,
        chosen: Array,
        weights: Array,
        shared: tuple[Weights, Any],
        first: Array,
    ) -> "_Blocks":
        """Sort the pairs of tokens and experts by expert."""
        arrays, captured = shared
        num_experts = arrays["up"].shape[0]
        numbers = chosen.reshape(-1) - first
        is_here = (numbers >= 0) & (numbers < num_experts)
        numbers = jnp.where(is_here, numbers, num_experts)
        order = jnp.argsort(numbers, stable=True).astype(jnp.int32)
        sizes = jnp.sum(numbers[:, None] == jnp.arange(num_experts), 0, dtype=jnp.int32)
        return cls(
            x=x.reshape(-1, x.shape[-1]),
            weights=weights.reshape(-1, weights.shape[-1]),
            shape=x.shape[:-1],
            arrays=arrays,
            captured=captured,
            combine=combine,
            order=jnp.pad(order, (0, num_rows)),
            ends=jnp.cumsum(sizes, dtype=jnp.int32),
            sizes=sizes,
            last_blocks=jnp.cumsum(-(-sizes // num_rows), dtype=jnp.int32),
            num_rows=num_rows,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens n."""
        return self.x.shape[0]

    def forward(self) -> Array:
        """Return the sum y, float32."""

        def add(block: _Block, y: Array) -> Array:
            raised, gated = self.raise_rows(block, self.rows(self.x, block))
            hidden = self.combine(raised, gated, *self.captured)
            made = self.product("down", hidden, block).astype(jnp.float32)
            return _add_rows(y, block, block.weights[:, None] * made)

        y = self.loop(add, jnp.zeros(self.x.shape, jnp.float32))
        return y.reshape(*self.shape, -1)

    def backward(self, dy: Array) -> Any:
        """Return ((dx, d_weights), (gradients of the arrays in float32, of captured values))."""
        dy = dy.reshape(self.x.shape).astype(self.x.dtype)
        dtype = self.x.dtype
        num_pairs = self.weights.size
        num_features = self.arrays["up"].shape[-1]
        is_gated = "gate" in self.arrays

        def derive(block: _Block, sums: Any) -> Any:
            dx, d_weights, kept, d_captured = sums
            raised, gated = self.raise_rows(block, self.rows(self.x, block))
            hidden, pull = jax.vjp(self.combine, raised, gated, *self.captured)
            dy_rows = self.rows(dy, block)
            lowered = self.transposed("down", dy_rows, block)  # dy down^T, f32[b, F]
            d_weight = jnp.sum(hidden.astype(jnp.float32) * lowered, -1)
            if "down_bias" in self.arrays:
                bias = _at(self.arrays["down_bias"], block.expert)
                d_weight += jnp.sum(dy_rows.astype(jnp.float32) * bias.astype(jnp.float32), -1)
            d_hidden = (block.weights[:, None] * lowered).astype(hidden.dtype)
            d_raised, d_gated, *d_more = pull(d_hidden)
            d_rows = self.transposed("up", d_raised, block)
            if is_gated:
                d_rows += self.transposed("gate", d_gated, block)
            values = [hidden, d_raised] + [d_gated] * is_gated
            return (
                _add_rows(dx, block, d_rows),
                _put(d_weights, d_weight, block.start),
                [_put(a, value, block.start) for a, value in zip(kept, values, strict=True)],
                [total + d for total, d in zip(d_captured, d_more, strict=True)],
            )

        length = num_pairs + self.num_rows
        dx, d_sorted, kept, d_captured = self.loop(
            derive,
            (
                jnp.zeros(self.x.shape, jnp.float32),
                jnp.zeros(length, jnp.float32),
                [jnp.zeros((length, num_features), dtype)] * (2 + is_gated),
                [jnp.zeros(a.shape, a.dtype) for a in self.captured],
            ),
        )
        # Rows after those of a block are the next block's, which writes them. What follows the last
        # expert's rows is of no expert.
        d_sorted = jnp.where(jnp.arange(num_pairs) < self.ends[-1], d_sorted[:num_pairs], 0)
        places = jnp.argsort(self.order[:num_pairs])
        d_weights = d_sorted[places].reshape(*self.shape, -1)
        d_arrays = self.derive_arrays(dy, kept)
        return (dx.astype(dtype).reshape(*self.shape, -1), d_weights), (d_arrays, d_captured)

    def derive_arrays(self, dy: Array, kept: list[Array]) -> Weights:
        """Return the gradients of the experts' arrays, in float32.

        Args:
          dy: cotangent of y [n, H].
          kept: in the order of the pairs, what `down` multiplies, the cotangent of `x up`, and that
            of `x gate` if there is a gate.
        """
        hidden, *d_raised = kept
        names = ["up", "gate"][: len(d_raised)]

        def add(block: _Block, sums: Weights) -> Weights:
            sums = dict(sums)
            x_rows = self.rows(self.x, block)
            d_made = block.weights[:, None] * self.rows(dy, block).astype(jnp.float32)
            d_made = d_made.astype(self.x.dtype)

            def products(name: str, ins: Array, d_outs: Array) -> None:
                product = jax.lax.dot_general(
                    ins, d_outs, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
                )
                _add_to_expert(sums, name, block, product)
                d_bias = jnp.sum(d_outs, 0, dtype=jnp.float32)
                _add_to_expert(sums, f"{name}_bias", block, d_bias)

            products("down", self.sliced(hidden, block), d_made)
            for name, d in zip(names, d_raised, strict=True):
                products(name, x_rows, self.sliced(d, block))
            return sums

        zeros = {name: jnp.zeros(a.shape, jnp.float32) for name, a in self.arrays.items()}
        return self.loop(add, zeros)

    # --- one block --------------------------------------------------------------------------------

    def loop(self, body: Callable[[_Block, Any], Any], carry: Any) -> Any:
        """Return the carry after all blocks in use, in the order of the experts."""
        num_tokens, top_k = self.weights.shape
        most = count_blocks(num_tokens, top_k, self.sizes.shape[0], self.num_rows)

        def is_left(state: Any) -> Array:
            # The literal bounds the iterations for those who count products in a traced program.
            return (state[0] < self.last_blocks[-1]) & (state[0] < most)

        def run(state: Any) -> Any:
            number, carry = state
            return number + 1, body(self.block(number), carry)

        start = jnp.int32(0)
        return jax.lax.while_loop(is_left, run, (start, carry))[1]

    def block(self, number: Array) -> _Block:
        """Return a block in use."""
        expert = jnp.sum(self.last_blocks <= number, dtype=jnp.int32)
        num_blocks = -(-self.sizes[expert] // self.num_rows)
        place = number - (self.last_blocks[expert] - num_blocks)  # among the expert's blocks
        start = self.ends[expert] - self.sizes[expert] + place * self.num_rows
        rows = jnp.arange(self.num_rows, dtype=jnp.int32)
        is_full = start + rows < self.ends[expert]
        pairs = jax.lax.dynamic_slice_in_dim(self.order, start, self.num_rows)
        flat = self.weights.reshape(-1)
        return _Block(
            expert=expert,
            start=start,
            is_full=is_full,
            tokens=jnp.where(is_full, pairs // self.weights.shape[-1], self.num_tokens + rows),
            weights=jnp.where(is_full, flat[pairs], 0),
        )

    def rows(self, a: Array, block: _Block) -> Array:
        """Return the rows of an array of tokens, [n, H] -> [b, H], and zeros for padding."""
        return a.at[block.tokens].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )

    def sliced(self, a: Array, block: _Block) -> Array:
        """Return the rows of an array in the order of the pairs, and zeros for padding."""
        rows = jax.lax.dynamic_slice_in_dim(a, block.start, self.num_rows)
        return jnp.where(block.is_full[:, None], rows, 0)

    def raise_rows(self, block: _Block, rows: Array) -> tuple[Array, Array | None]:
        """Return the products with `up` and `gate`, [b, F], the latter None without a gate."""
        gated = self.product("gate", rows, block) if "gate" in self.arrays else None
        return self.product("up", rows, block), gated

    def product(self, name: str, rows: Array, block: _Block) -> Array:
        """Return rows times the expert's weight, plus its bias, in the dtype of the rows."""
        made = jax.lax.dot_general(rows, _at(self.arrays[name], block.expert), _PLAIN)
        bias = self.arrays.get(f"{name}_bias")
        return made if bias is None else made + _at(bias, block.expert)

    def transposed(self, name: str, rows: Array, block: _Block) -> Array:
        """Return rows times the transpose of the expert's weight, in float32."""
        weight = _at(self.arrays[name], block.expert)
        return jax.lax.dot_general(rows, weight, _TRANSPOSED, preferred_element_type=jnp.float32)


_PLAIN = (((1,), (0,)), ((), ()))
_TRANSPOSED = (((1,), (1,)), ((), ()))


def _at(a: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(a, index, keepdims=False)


def _put(a: Array, values: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(a, values, start, 0)


def _add_rows(a: Array, block: _Block, rows: Array) -> Array:
    """Return an array of tokens with rows added to the block's tokens; padding is dropped."""
    return a.at[block.tokens].add(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


def _add_to_expert(sums: Weights, name: str, block: _Block, value: Array) -> None:
    if name in sums:
        total = _at(sums[name], block.expert) + value
        sums[name] = jax.lax.dynamic_update_index_in_dim(sums[name], total, block.expert, 0)
