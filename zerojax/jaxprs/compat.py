"""Temporary."""
from zerojax.jaxprs.regions import rebind_cond, rebind_remat, rebind_shard_map

def switch(eqn, index, branches, operands):
    return rebind_cond(eqn, [lambda v, b=b: b(*v) for b in branches], [index, *operands])

def rematerialised(eqn, function, values):
    return rebind_remat(eqn, lambda v: function(*v), values)

def mapped_by_shards(eqn, function, values, out_specs=None):
    return rebind_shard_map(eqn, lambda v: function(*v), values, out_specs)
