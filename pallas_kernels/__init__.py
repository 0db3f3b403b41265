"""GPU kernels for tiled large operators: arrays in, arrays out.

Each op is a folder: `reference` is plain jnp and the specification, `config` the sizes of blocks,
`mosaic` the kernel, `vjp` the derivative. `dispatch` tells which implementation runs,
`shared_memory` what kernels have of it, `varying` what they must know of a `jax.shard_map` around
them. `storage` keeps weights in 8 or 4 bits by two of the ops. An op is imported from its folder:

    from pallas_kernels.matmul import matmul
    from pallas_kernels.nf4 import dequantize_nf4, quantize_nf4
    from pallas_kernels.quantize import dequantize, quantize
"""
