"""The mesh axes of a collective, in all notations of HLO.

The programs are real compiled ones and handwritten ones.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax import hlo
from zerojax.hlo.groups import read_devices
from zerojax.hlo.parse import Instruction

AXES = ("data", "fsdp", "tensor")
MESH = zj.make_mesh(data=2, fsdp=2, tensor=2, devices=jax.devices()[:8])
HEADER = "HloModule step, num_partitions={}\n"
GLOBAL = ", use_global_device_ids=true"


def axes(groups, mesh=MESH, kind="all-reduce", header=HEADER, more=GLOBAL):
    of = read_devices(header.format(mesh.size), mesh)
    return of.axes(
        kind, Instruction("r", "f32[4]", kind, f"%x), channel_id=1, {groups}{more}, to_apply=%add")
    )


def test_bytes_of_a_compiled_program_are_split_by_axes():
    """Each collective moves a different number of bytes, which identifies it."""
    subsets = [s for n in (1, 2, 3) for s in itertools.combinations(AXES, n)]

    def collect(x):
        sums = [jax.lax.psum(x[: n + 1], subset) for n, subset in enumerate(subsets)]
        gathered = jax.lax.all_gather(x[:16], "fsdp")
        turned = jax.lax.ppermute(x[:32], "tensor", [(0, 1), (1, 0)])
        sent = jax.lax.all_to_all(x[:64], ("data", "fsdp"), 0, 0, tiled=True)
        return [*sums, gathered, turned, sent]

    run = jax.shard_map(collect, mesh=MESH, in_specs=P(AXES), out_specs=P(), check_vma=False)
    text = str(jax.jit(run).lower(jnp.zeros(8 * 64)).compile().as_text())
    expected = {"+".join(subset): {"all-reduce": 4 * (n + 1)} for n, subset in enumerate(subsets)}
    expected["fsdp"]["all-gather"] = 4 * 2 * 16
    expected["tensor"]["collective-permute"] = 4 * 32
    expected["data+fsdp"]["all-to-all"] = 4 * 64
    assert hlo.collective_bytes(text, mesh=MESH) == expected
    summed = {}
    for op, num_bytes in ((op, n) for moved in expected.values() for op, n in moved.items()):
        summed[op] = summed.get(op, 0) + num_bytes
    assert hlo.collective_bytes(text) == summed
    assert set(hlo.collective_bytes(text, least_bytes=64, mesh=MESH)) == {
        "data+fsdp",
        "fsdp",
        "tensor",
    }


@pytest.mark.parametrize(
    "subset", [s for n in (1, 2, 3) for s in itertools.combinations(AXES, n)], ids="+".join
)
def test_groups_as_lists_are_those_of_their_axes(subset):
    mesh = zj.make_mesh(data=2, fsdp=3, tensor=4, devices=[jax.devices()[0]] * 24)
    over = [AXES.index(axis) for axis in subset]
    ids = np.moveaxis(np.arange(24).reshape(2, 3, 4), over, range(-len(over), 0))
    groups = ids.reshape(-1, np.prod([mesh.shape[a] for a in subset]))
    groups = np.random.default_rng(0).permuted(groups, axis=1)  # in any order
    lists = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    assert axes(f"replica_groups={{{lists}}}", mesh) == "+".join(subset)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("[4,2]<=[8]", "tensor"),
        ("[2,4]<=[8]", "fsdp+tensor"),
        ("[1,8]<=[8]", "data+fsdp+tensor"),
        ("[4,2]<=[2,4]T(1,0)", "data"),
        ("[4,2]<=[2,2,2]T(0,2,1)", "fsdp"),
        ("[2,4]<=[4,2]T(1,0)", "data+fsdp"),
        ("[8,1]<=[8]", "none"),
        ("{}", "data+fsdp+tensor"),
        ("{{0,3},{1,2},{4,7},{5,6}}", "other"),
        ("mesh['a'=2,'b'=4] {'a'}", "data"),
        ("mesh['a'=2,'b'=4] {'b'}", "fsdp+tensor"),
        ("mesh['a'=2,'b'=4] {'a','b'}", "data+fsdp+tensor"),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", "fsdp"),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", "tensor"),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", "data+tensor"),
        ("mesh['a'=1,'b'=1,'c'=8] {}", "none"),
        ("mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'b'}", "fsdp"),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", "fsdp"),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,1,3,4,6,5,7) {'b':(2)2}", "fsdp"),
        ("@mesh<a=2,b=4> {a,b:(2)2}", "data+tensor"),
        ("@mesh<a=4,b=2>(devices=[4,2]<=[2,4]T(1,0)) {b}", "data"),
        ("@mesh<a=8>(devices=[8]0,2,1,3,4,6,5,7) {a:(4)2}", "fsdp"),
    ],
)
def test_groups_in_each_notation(groups, expected):
    assert axes(f"replica_groups={groups}") == expected
    assert axes(f"replica_groups={groups}", MESH.abstract_mesh) == expected


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("{{0,1},{1,0},{2,3},{3,2}}", "tensor"),
        ("{{0,0},{0,4}}", "data"),
        ("{{0,2},{1,6}}", "data+fsdp+tensor"),
        ("{{3,3}}", "none"),
    ],
)
def test_a_permute_runs_over_the_axes_in_which_its_pairs_differ(pairs, expected):
    assert axes(f"source_target_pairs={pairs}", kind="collective-permute", more="") == expected


def test_groups_count_partitions_replicas_or_devices():
    all_of_it = "data+fsdp+tensor"
    assert axes("replica_groups={{0}}", more="") == all_of_it  # a replica with all its partitions
    assert (
        axes("replica_groups={{0,2},{1,3},{4,6},{5,7}}", kind="all-to-all", more="") == "fsdp"
    )  # partitions
    replicas = "HloModule step, replica_count=4, num_partitions=2\n"
    assert axes("replica_groups={{0,1},{2,3}}", header=replicas, more="") == "fsdp+tensor"
    assert axes("replica_groups={{0,1}}", header=replicas, kind="all-to-all", more="") == "tensor"
    of = read_devices(replicas, MESH)
    assert (
        of.axes("all-reduce", Instruction("r", "", "", "%x), replica_groups={{0,2},{1,3}}"))
        == "data"
    )  # no channel
    assert of.axes("all-reduce", Instruction("r", "", "", "%x), to_apply=%add")) == "data+fsdp"


def test_groups_that_are_not_understood_are_refused():
    with pytest.raises(
        ValueError,
        match=r"r: its device groups are in an unknown notation: replica_groups=<0,1>",
    ):
        axes("replica_groups=<0,1>")
    with pytest.raises(ValueError, match=r"r: groups of different sizes"):
        axes("replica_groups={{0,1},{2}}")
    with pytest.raises(
        ValueError, match=r"the program runs on 1 x 8 devices .* has 4: give the mesh"
    ):
        hlo.collective_bytes(HEADER.format(8), mesh=zj.make_mesh(devices=jax.devices()[:4]))
