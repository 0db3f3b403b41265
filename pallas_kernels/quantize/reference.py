"""The specification of `quantize` and `dequantize`, on blocks `x[G, B]`.

It is plain jnp, which is also XLA's form.

    largest[G] = max |x|                over a block
    scale[G]   = largest / most         most: 127 (int8), 448 (float8_e4m3fn), 57344 (float8_e5m2)
    code[G, B] = round(x * inverse)     inverse[G]: largest float32 with inverse * largest <= most
    y[G, B]    = code * scale

Rounding is to nearest even, or with random bits r to one of the two neighbours: to the upper one in
magnitude with the probability of the distance from the lower one (Gupta et al., arXiv:1502.02551),
so that the expected value of y is x:

    u = |x| * inverse / step            step: the distance of neighbours; 1, or for fp8
                                        2^(exponent - mantissa bits)
    n = floor(u + r / 2^F)              r uniform in 0 .. 2^F - 1, u rounded to F fractional bits

Every implementation returns the same bits on every device. The obstacles, and how they are avoided:

- Compilers may fuse a product and a sum into one instruction that rounds once. Nothing is therefore
  added to a product, unless the product is exact (by a power of 2) or its magnitude is taken in
  between, for which there is no fused instruction.
- A quotient is off by a last bit or two on GPUs, as compiled by XLA. It is only a first guess,
  which products correct.
- A cast to fp8 rounds twice in some compilers. Here fp8 is built from integers. One formula serves
  subnormal numbers too: where they begin, the distance of neighbours stops shrinking.
- Subnormal float32 are zeros on some processors. A block whose largest magnitude is below 2^-72
  counts as zeros, and in other blocks an element that small has no effect on any result.

The random bits are a hash of the key, the block and the column, not a stream: an element's bits
depend on nothing else.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: its multiples are spread evenly
# Masks for float32's bits; EXPONENT alone is infinity, and larger magnitudes are NaN.
MAGNITUDE = 0x7FFFFFFF
EXPONENT = 0x7F800000
SMALLEST = (127 - 72) << 23  # the bits of 2^-72


@dataclasses.dataclass(frozen=True)
class Format:
    """A dtype of 8 bits.

    Attributes:
      dtype: dtype of the codes.
      most: largest magnitude that is used.
      mantissa: number of mantissa bits of fp8; None for an integer.
      bias: exponent bias of fp8.
      fraction: number F of fractional bits in stochastic rounding; 2^(23 - F) is above every u.
    """

    dtype: jnp.dtype
    most: float
    mantissa: int | None = None
    bias: int = 0
    fraction: int = 16

    def encode(self, v: jax.Array, r: jax.Array | None) -> jax.Array:
        """Return the codes int8[..] as bits for v float32[..], |v| <= most.

        To round stochastically, r holds 32 random bits per element, uint32[..]; otherwise None.
        """
        bits = _integers(v)
        magnitude = bits & MAGNITUDE
        u = _floats(magnitude)
        if self.mantissa is None:
            n = self._round(u, r)
            sign = bits >> 31  # 0 or -1
            # n, or -n in two's complement.
            return ((n ^ sign) - sign).astype(jnp.int8)
        least = (128 - self.bias) << 23  # the smallest normal number
        # Numbers below it have the step of the smallest normal number.
        exponent = jnp.maximum(magnitude & EXPONENT, least)
        # u / step as a product by a power of 2, which is exact.
        inverse_step = _floats(((126 + self.mantissa + self.bias) << 23) - (exponent - least))
        n = self._round(u * inverse_step, r)
        # n is below 2^(mantissa + 1), so the sum carries into the exponent.
        n = n + ((exponent - least) >> (23 - self.mantissa))
        # Move the sign from bit 31 to bit 7.
        return (n | ((bits >> 24) & 0x80)).astype(jnp.int8)

    def _round(self, u: jax.Array, r: jax.Array | None) -> jax.Array:
        """Return u >= 0 rounded to int32, to nearest or with the random bits r.

        Adding a power of 2 leaves no smaller bits, and rounds to nearest.
        """
        fraction = 0 if r is None else self.fraction
        anchor = (127 + 23 - fraction) << 23  # the bits of 2^(23 - fraction)
        n = _integers(u + 2.0 ** (23 - fraction)) - anchor
        if r is None:
            return n
        # n has F fractional bits. Adding F random bits carries into the integer part with the
        # probability of the fraction.
        random = lax.bitcast_convert_type(r >> jnp.uint32(32 - fraction), jnp.int32)
        return (n + random) >> fraction

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of codes that `encode` returned."""
        codes = codes.astype(jnp.int32)
        if self.mantissa is None:
            return codes.astype(jnp.float32)
        # The exponent's bits in their place. Subnormal numbers have 0 there, which counts as 1.
        exponent = jnp.maximum(codes & (0x7F - (1 << self.mantissa) + 1), 1 << self.mantissa)
        # The mantissa with the implicit bit of a normal number; for a subnormal one it cancels.
        n = (codes & 0x7F) - exponent + (1 << self.mantissa)
        step = (exponent << (23 - self.mantissa)) + ((127 - self.bias - self.mantissa) << 23)
        y = n.astype(jnp.float32) * _floats(step)
        return _floats(_integers(y) | ((codes & 0x80) << 24))

    def scales(self, largest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (scale, inverse, mask) of each block.

        Scale and inverse are float32; mask is int32, all ones if the block's elements count, else
        0.

        Args:
          largest: largest magnitude of the block's elements as the bits of float32, int32[..].
        """
        is_finite = largest < EXPONENT
        is_zero = largest < SMALLEST
        mask = jnp.where(is_finite, jnp.where(is_zero, 0, -1), 0)
        # Blocks that do not count also divide by a number: use one that gives neither NaN nor
        # infinity.
        largest = jnp.where(mask == 0, SMALLEST, largest)
        value = _floats(largest)
        inverse = self.inverse(value, self.most / value)
        # Multiply by a constant, because devices disagree on the last bit of a quotient.
        scale = jnp.where(is_zero, 0.0, jnp.where(is_finite, value * (1 / self.most), jnp.nan))
        return scale, inverse, mask

    def inverse(self, largest: jax.Array, guess: jax.Array) -> jax.Array:
        """Return the largest float32 whose product with `largest` is at most `most`.

        `guess` may be off by 2 last bits.
        """
        inverse = _integers(guess) - 4  # now 1 to 7 last bits too low
        # Bisect in three steps by products, which every device rounds alike.
        for more in (4, 2, 1):
            fits = _floats(inverse + more) * largest <= self.most
            inverse = jnp.where(fits, inverse + more, inverse)
        return _floats(inverse)


FORMATS = {
    jnp.dtype(jnp.int8): Format(jnp.dtype(jnp.int8), 127.0),
    jnp.dtype(jnp.float8_e4m3fn): Format(
        jnp.dtype(jnp.float8_e4m3fn), 448.0, mantissa=3, bias=7, fraction=19
    ),
    jnp.dtype(jnp.float8_e5m2): Format(
        jnp.dtype(jnp.float8_e5m2), 57344.0, mantissa=2, bias=15, fraction=20
    ),
}


def quantize(form: Format, x: jax.Array, words: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return (codes int8[G, B], scales float32[G]) for x[G, B].

    To round stochastically, `words` are the uint32[G] of `block_words`; otherwise None.
    """
    x = x.astype(jnp.float32)
    scale, inverse, mask = form.scales(magnitudes(x).max(1))
    columns = lax.broadcasted_iota(jnp.uint32, x.shape, 1)
    r = None if words is None else random_bits(words[:, None], columns)
    return form.encode(normalized(x, inverse[:, None], mask[:, None]), r), scale


def dequantize(form: Format, codes: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return y[..., B] for codes int8[..., B] and scales float32[...]."""
    return (form.decode(codes) * scales[..., None]).astype(dtype)


def magnitudes(x: jax.Array) -> jax.Array:
    """Return |x| as the bits of float32, int32 of the same shape.

    The integers are ordered like the numbers, with NaN above infinity.
    """
    return _integers(x) & MAGNITUDE


def normalized(x: jax.Array, inverse: jax.Array, mask: jax.Array) -> jax.Array:
    """Return x * inverse, or 0 in blocks whose elements do not count."""
    return _floats(_integers(x) & mask) * inverse


def block_words(key: jax.Array, num_blocks: int) -> jax.Array:
    """Return a word per block, uint32[G], from which its elements' random bits are derived."""
    seeds = jax.random.bits(key, (2,), jnp.uint32)
    # With a single seed, two keys would have the same words in another order: it would only permute
    # the words among blocks.
    return mix(mix(lax.iota(jnp.uint32, num_blocks) ^ seeds[0]) ^ seeds[1])


def random_bits(words: jax.Array, columns: jax.Array) -> jax.Array:
    """Return 32 random bits per element, uint32[G, B], from the blocks' words and column indices.

    Both arguments are uint32 and broadcast against each other.
    """
    return mix(words ^ (columns * jnp.uint32(GOLDEN)))


def mix(x: jax.Array) -> jax.Array:
    """Return a 32-bit permutation in which each input bit changes half of the output bits.

    It is murmur3's fmix32 (A. Appleby, public domain).
    """
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def _integers(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)
