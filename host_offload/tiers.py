"""The three places where a byte of training state may live, and what JAX calls them.

`device` and `pinned_host` are memory kinds of `jax.sharding.Sharding`. `nvme` is none: its arrays exist on disk, and only the
layers in flight are device arrays.
"""

TIERS = ("device", "pinned_host", "nvme")


def memory_kind(tier: str) -> str:
    """Return the `jax.sharding` memory kind in which arrays of `tier` rest.

    Raises:
      ValueError: the tier is unknown, or rests outside of JAX's memory.
    """
    if tier not in ("device", "pinned_host"):
        raise ValueError(f"tier {tier!r} has no memory kind: those with one are 'device' and 'pinned_host'")
    return tier
