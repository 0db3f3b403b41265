"""The three tiers where training state can live, and their JAX memory kinds.

`device` and `pinned_host` are memory kinds of `jax.sharding.Sharding`. `nvme` is not: its arrays
are on disk, and only the layers in flight are device arrays.
"""

TIERS = ("device", "pinned_host", "nvme")


def memory_kind(tier: str) -> str:
    """Return the `jax.sharding` memory kind of arrays in `tier`.

    Args:
      tier: "device" or "pinned_host".

    Raises:
      ValueError: the tier is unknown, or JAX does not manage its memory.
    """
    if tier not in ("device", "pinned_host"):
        raise ValueError(
            f"tier {tier!r} has no memory kind: only 'device' and 'pinned_host' have one"
        )
    return tier
