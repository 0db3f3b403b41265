"""Moments in bfloat16 with stochastic rounding: half the bytes of the optimizer's state.

The bytes are halved both in storage and on the links. An optimizer is wrapped so that each float32
array of its state that mirrors a parameter is stored in bfloat16:

    s = widen(state)                                  exact
    updates, s = tx.update(grads, s, params)          float32, as without the wrapper
    state[k] = high16(bits(s[k]) + r[k])              r[k] uniform in 0 .. 2^16 - 1

The sum carries into the upper half with the probability (dropped half) / 2^16, so the expected
value of the stored number is s. Rounding to nearest instead would freeze a moment: Adam's v changes
by 1 - b2 = 0.001 of itself or less in a step, and bfloat16 has steps of 2^-8 to 2^-7 of a value, so
every small change would be rounded away (Gupta et al., arXiv:1502.02551).

The random bits are a hash of values that belong to the element. They are not drawn from a stream of
random numbers:

    r = hash(step count, leading bits of the element's gradient, its moments as stored)

So an element is rounded in the same way whatever the mesh, the tier, the layer's position in a
stack, and the time and place of its update. A stream by shape or position would not have this
property. A gradient's last bits and its sign are left out of the hash because programs that fuse
differently also differ there, and a last bit would change the random numbers of every element. A
few elements still differ, because their leading bits change too: their moments may then differ by
one step of bfloat16.

The effect of 8 bits on Adam: the exponent range is float32's, and rounding neither crosses zero nor
turns a normal number into zero. So v is never negative, and v never vanishes while m does not,
which would blow up m / (sqrt(v) + eps). Errors of v do accumulate over its memory of 1 / (1 - b2)
steps, to about 0.2 % / sqrt(2 (1 - b2)) of v (one standard deviation): 5 % at b2 = 0.999, half of
it in the size of the update.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.jaxprs import trace
from zerojax.state import OptimizerError, map_opt_state
from zerojax.trees import Grads, Params

HIGH = 0xFFFF0000
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: multiples of it are spread evenly


class RoundedState(NamedTuple):
    """State of a wrapped optimizer.

    Attributes:
      step: i32[], number of updates so far.
      inner: the optimizer's own state, with moments in bfloat16.
    """

    step: jax.Array
    inner: Any


def keep_in_bfloat16(
    tx: optax.GradientTransformation, *, nearest: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that its moments are stored in bfloat16.

    The wrapper narrows float32 state arrays that mirror a parameter (same path, same shape): m and
    v of Adam, the momentum of SGD or Lion. Scalars, factored moments, arrays that the optimizer
    keeps in another dtype, and arrays that its init computes from the parameters' values (such as
    the weights of schedule-free optimizers) stay as they are.

    Args:
      tx: the optimizer. Its update receives the moments in float32.
      nearest: whether to round to nearest even instead; only for comparison, because slow moments
        then stop changing.

    Returns:
      A transformation whose state is a `RoundedState`. Its init raises ValueError if the optimizer
      has no array to narrow.
    """

    def init(params: Params) -> RoundedState:
        leaves, tree = jax.tree.flatten(tx.init(params))
        owners = _narrowed(tx, params)
        if not owners:
            raise OptimizerError(
                "moments='bfloat16' narrows float32 moments, arrays that mirror a parameter, but "
                "this optimizer has none: use moments='float32'"
            )
        for j in owners:
            leaves[j] = leaves[j].astype(jnp.bfloat16)  # zeros, or a constant: to nearest, once
        return RoundedState(jnp.int32(0), jax.tree.unflatten(tree, leaves))

    def update(
        updates: Grads, state: Any, params: Params = None, **extra: Any
    ) -> tuple[Grads, RoundedState]:
        owners = _narrowed(tx, updates if params is None else params)
        grads = jax.tree.leaves(updates)
        before, tree = jax.tree.flatten(state.inner)
        for j in owners:
            before[j] = before[j].astype(jnp.float32)
        updates, inner = optax.with_extra_args_support(tx).update(
            updates, jax.tree.unflatten(tree, before), params, **extra
        )
        after = jax.tree.leaves(inner)
        moments_by_leaf: dict[int, list[int]] = {}
        for j, owner in owners.items():
            moments_by_leaf.setdefault(owner, []).append(j)
        for owner, moments in moments_by_leaf.items():
            values = [after[j] for j in moments]
            if nearest:
                rounded = [value.astype(jnp.bfloat16) for value in values]
            else:
                previous = [before[j] for j in moments]
                rounded = _round_together(state.step, grads[owner], previous, values)
            for j, value in zip(moments, rounded, strict=True):
                after[j] = value
        return updates, RoundedState(state.step + 1, jax.tree.unflatten(tree, after))

    return optax.GradientTransformationExtraArgs(init, update)


def _round_together(
    step: jax.Array,
    grad: jax.Array,
    before: Sequence[jax.Array],
    after: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return the moments of one leaf, rounded stochastically to bfloat16.

    One hash per element provides the random bits of all of them.

    Args:
      step: i32[], number of the update.
      grad: gradient of the leaf.
      before: the moments before the update, in float32.
      after: the moments after the update, in float32.
    """
    bits = random_bits(step, grad, before)
    return [round_stochastically(value, r) for value, r in zip(after, bits, strict=True)]


def _narrowed(tx: optax.GradientTransformation, params: Params) -> dict[int, int]:
    """Return {index of a state leaf to store in bfloat16: index of the parameter it mirrors}."""
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    program, state = trace(tx.init, abstract)
    # A leaf that depends on the values of parameters holds the optimizer's own weights: it stays
    # float32.
    depends_on_params = set(program.inputs)
    for i in program.instructions:
        if any(isinstance(ref, int) and ref in depends_on_params for ref in i.ins):
            depends_on_params.update(i.outs)
    opt_map = map_opt_state(state, abstract)
    narrowed = {}
    for j, out in enumerate(program.outputs):
        owner = opt_map.owners[j]
        is_weight = isinstance(out, int) and out in depends_on_params
        if owner is not None and not is_weight and opt_map.leaves[j].dtype == jnp.float32:
            narrowed[j] = owner
    return narrowed


def round_stochastically(x: jax.Array, r: jax.Array) -> jax.Array:
    """Round each element to one of the two neighboring bfloat16 values.

    The result is the neighbor of larger magnitude if adding r carries. Values that bfloat16 can
    represent stay unchanged, as do infinities and NaN. A value that would round to infinity is
    rounded to the largest finite value.

    Args:
      x: float32 values.
      r: uint32 random bits below 2^16, of the same shape.

    Returns:
      The rounded values, in bfloat16.
    """
    bits = _bits(x)
    # Cutting off the low half leaves a bfloat16 value, so the cast at the end does not round.
    up = jax.lax.bitcast_convert_type((bits + r) & jnp.uint32(HIGH), jnp.float32)
    down = jax.lax.bitcast_convert_type(bits & jnp.uint32(HIGH), jnp.float32)
    is_finite = jnp.isfinite(x)
    rounded = jnp.where(jnp.isfinite(up), up, down)
    return jnp.where(is_finite, rounded, x).astype(jnp.bfloat16)


def random_bits(step: jax.Array, grad: jax.Array, moments: Sequence[jax.Array]) -> list[jax.Array]:
    """Return 16 random bits for each moment of each element.

    Args:
      step: i32[], a number that differs in each update.
      grad: gradient in any float dtype.
      moments: one or more float32 arrays of bfloat16 values, with the shape of `grad`.

    Returns:
      For each moment, uint32 numbers below 2^16, with the shape of `grad`.
    """
    # Pieces of 16 bits: the gradient's exponent and leading bits (the shift drops its sign), and
    # each moment. Each round absorbs two pieces.
    pieces = [_bits(grad.astype(jnp.float32)) << 1, *map(_bits, moments)]
    # Plus 1, because 0 is a fixed point of the hash.
    state = _mix((step.astype(jnp.uint32) + jnp.uint32(1)) * jnp.uint32(GOLDEN))
    for n in range(0, len(pieces), 2):
        word = pieces[n] & jnp.uint32(HIGH)
        if n + 1 < len(pieces):
            word = word | (pieces[n + 1] >> 16)
        state = _mix(state ^ word)
    # A state of 32 bits serves two moments.
    halves: list[jax.Array] = []
    for _ in range(0, len(moments), 2):
        halves += [state & jnp.uint32(0xFFFF), state >> 16]
        state = _mix(state + jnp.uint32(GOLDEN))
    return halves[: len(moments)]


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Permute 32-bit numbers so that each input bit changes half of the output bits.

    This is fmix32 of murmur3 (A. Appleby, public domain).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
