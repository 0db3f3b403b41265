"""GPU kernels for tiled large operators: arrays in, arrays out.

Each op is a folder: `reference` is the specification in plain jnp, `config` chooses the block
sizes, `mosaic` is the kernel, and `vjp` is the derivative. `dispatch` chooses the implementation,
`shared_memory` describes the shared memory available to kernels, and `varying` tracks the axes of a
surrounding `jax.shard_map`. `storage` uses two of the ops to keep weights in 8 or 4 bits. Import an
op from its folder:

    from pallas_kernels.matmul import matmul
    from pallas_kernels.nf4 import dequantize_nf4, quantize_nf4
    from pallas_kernels.quantize import dequantize, quantize
"""
