"""A checkpoint directory: names of what is in it."""

STATE, CONFIG = "state", "config"
LOCK = ".zerojax.lock"
ASIDE = ".set-aside"
TEMPORARY = ".orbax-checkpoint-tmp"
DELETED = ".deleted"
"""Old checkpoints go here by one rename, so that none is listed that is half gone."""
