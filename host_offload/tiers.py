"""The three tiers in which training state is stored, and JAX's names for them.

`device` and `pinned_host` are memory kinds of `jax.sharding.Sharding`. `nvme` is not: its arrays
are on disk, and only the layers in flight are device arrays.
"""

TIERS = ("device", "pinned_host", "nvme")


def memory_kind(tier: str) -> str:
    """Return the `jax.sharding` memory kind of a tier's arrays.

    Raises:
      ValueError: the tier is unknown, or JAX does not manage its memory.
    """
    if tier not in ("device", "pinned_host"):
        raise ValueError(
            f"tier {tier!r} has no memory kind: only 'device' and 'pinned_host' have one"
        )
    return tier
