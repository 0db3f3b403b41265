"""`quantize_nf4` and `dequantize_nf4` in XLA: the reference, compiled so that XLA fuses it."""

import jax

from pallas_kernels.nf4 import reference

quantize = jax.jit(reference.quantize)
dequantize = jax.jit(reference.dequantize, static_argnames="dtype")
quantize_scales = jax.jit(reference.quantize_scales, static_argnames="group")
dequantize_scales = jax.jit(reference.dequantize_scales)
