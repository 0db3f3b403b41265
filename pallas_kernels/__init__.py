"""GPU kernels for tiled large operators: arrays in, arrays out.

Each op is a folder: `reference` is plain jnp and the specification, `config` the sizes of blocks, `mosaic` the kernel, `vjp`
the derivative. `dispatch` tells which implementation runs, `shared_memory` what kernels have of it, `varying` what they must
know of a `jax.shard_map` around them. An op is imported from its folder:

    from pallas_kernels.matmul import matmul
    from pallas_kernels.quantize import dequantize, quantize
"""
