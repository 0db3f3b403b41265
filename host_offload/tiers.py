"""The three places where a byte of training state may live, and what JAX calls them.

`device` and `pinned_host` are memory kinds of `jax.sharding.Sharding`. `nvme` is not one: its
arrays are on disk, and only the layers in flight are device arrays.
"""

TIERS = ("device", "pinned_host", "nvme")


def memory_kind(tier: str) -> str:
    """Return the `jax.sharding` memory kind of the arrays of `tier`.

    Raises:
      ValueError: the tier is unknown, or its arrays are not in memory that JAX manages.
    """
    if tier not in ("device", "pinned_host"):
        raise ValueError(
            f"tier {tier!r} has no memory kind: those with one are 'device' and 'pinned_host'"
        )
    return tier
