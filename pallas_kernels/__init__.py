"""GPU kernels for tiled large operators: arrays in, arrays out.

Each op is a folder whose plain-jnp reference is its specification. No op is here yet; the resident step needs none.
"""
