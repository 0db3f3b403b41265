"""Plans from numbers alone: the choice against brute force, its restrictions, and its report."""

import dataclasses
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import zerojax as zj
from zerojax.machines import Machine
from zerojax.planner import Plan, PlanError
from zerojax.planner.candidates import MIN_GAIN, Bound, Candidate, Space
from zerojax.planner.planner import Planner
from zerojax.planner.search import Exact, Search, disk_days
from zerojax.planner.segments import _segment, list_options, mix, with_options

SIZES = zj.Sizes(layers=16, hidden=256, heads=4, seq=64, batch=4, vocab=1024)
STATE = 16 * SIZES.num_params  # bytes: in bfloat16 with Adam
BF16 = {"precision": "bf16"}
FEW = BF16 | {
    "prefetch_distance": 1,
    "num_microbatches": 1,
    "update": "in_backward",
    "opt_state_device_fraction": 0.0,
}
"""Fixed fields that leave a few hundred configs."""
FEWER = FEW | {"activations": "remat", "update_on": "device"}


@pytest.fixture(autouse=True)
def estimates(monkeypatch):
    """Make plans of sizes use estimated bytes: these tests check the search.

    test_plan_bytes.py checks the bytes of programs.
    """
    monkeypatch.setattr(
        Planner, "has_programs", property(lambda planner: not isinstance(planner.model, zj.Sizes))
    )


def lab(**figures: Any) -> Machine:
    """Return a machine of one device with room for everything; `figures` replace its figures."""
    given: dict[str, Any] = {
        "device_bytes": 100 * STATE, "host_bytes": 100 * STATE, "disk_bytes": 100 * STATE, "flops": {"bf16": 1e12},
        "memory_rate": 1e11, "link_up": 1e10, "link_down": 1e10, "link_both": 1.5e10, "network_in_node": 1e10, "disk_read": 1e9,
        "disk_write": 1e9, "disk_both": 1e9, "host_kernel": 1e10,
    }  # fmt: skip
    return Machine(name="lab", **(given | figures))


def plan(machine: Machine | str, sizes: zj.Sizes = SIZES, fixed: Any = BF16, **more: Any) -> Plan:
    return zj.plan(sizes, machine=machine, fixed=fixed, **more)


# --- the choice -----------------------------------------------------------------------------------


def random_case(seed: int, fewer: bool) -> tuple[zj.Sizes, Machine, dict[str, Any], float | None]:
    """Return sizes, a machine that may lack memory, fixed fields, and the disk's minimum days."""
    draw = random.Random(seed)

    def power(low: float, high: float) -> float:
        return 10 ** draw.uniform(low, high)

    n = draw.choice([1, 1, 2, 4])
    sizes = zj.Sizes(
        layers=draw.randint(1, 4), hidden=draw.choice([256, 512, 1024]), heads=8, seq=draw.choice([64, 256]),
        batch=draw.choice([1, 2, 4]) * n, vocab=draw.choice([0, 1024]),
    )  # fmt: skip
    state, per = 16 * sizes.num_params / n, draw.choice([1, n])
    rates = {
        "memory_rate": (10, 12), "link_up": (9, 11), "link_down": (9, 11), "network_in_node": (9, 11.5),
        "network_between_nodes": (9, 11), "disk_read": (8.5, 10.5), "disk_write": (8.5, 10.5), "host_kernel": (9, 11),
    }  # fmt: skip
    figures: dict[str, Any] = {name: power(*ends) for name, ends in rates.items()}
    for both, one, other in (
        ("link_both", "link_up", "link_down"),
        ("disk_both", "disk_read", "disk_write"),
    ):
        figures[both] = max(figures[one], figures[other]) * draw.uniform(1, 2)
    memory = {"device_bytes": (1, -1, 1.5), "host_bytes": (n, -0.5, 2), "disk_bytes": (n, 0, 2)}
    figures |= {name: int(state * times * power(*ends)) for name, (times, *ends) in memory.items()}
    machine = Machine(
        name="lab",
        devices_per_node=per,
        nodes=n // per,
        flops={"bf16": power(12, 14)},
        disk_tbw_bytes=int(power(12, 16)),
        **figures,
    )
    fields = {"prefetch_distance": [1, 2], "gather_ahead": [False], "num_microbatches": [1], "update": [None, "in_backward", "in_forward"],
              "stage": [3], "grads": ["device", "pinned_host"], "opt_state_device_fraction": [0.0]}  # fmt: skip
    fixed = {
        name: draw.choice(values) for name, values in fields.items() if fewer or draw.random() < 0.6
    }
    return sizes, machine, BF16 | fixed, draw.choice([None, None, power(0, 3)])


def planner_of(case: Any) -> Planner:
    sizes, machine, fixed, days = case
    return Planner(sizes, None, None, None, machine, fixed, days)


def with_each_fraction(space: Space, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield candidates; a candidate without a fixed fraction is yielded with each sixteenth."""
    for candidate in candidates:
        if not space.leaves_fraction(candidate.fields):
            yield candidate
            continue
        for part in range(1, 16):
            fields = {**candidate.fields, "opt_state_device_fraction": part / 16}
            yield candidate._replace(fields=fields, seconds=Bound(space).seconds(fields))


def brute_force(planner: Planner) -> list[tuple[float, float]]:
    """Return the seconds and complexity of every config that fits.

    Also check the bounds of all configs against their seconds.
    """
    space, found = with_options(planner.space()), []
    search = Search(space, planner.limits)
    for candidate in with_each_fraction(space, space):
        config = space.config(candidate.fields)
        if config is None:
            continue
        assert {name: getattr(config, name) for name in planner.fixed} == planner.fixed
        estimated = search.estimate(config, candidate.tiles)
        seconds = estimated.time.seconds
        assert candidate.seconds <= seconds * (1 + 1e-9), (candidate, seconds)
        assert estimated.least <= seconds * (1 + 1e-9), (candidate, estimated.least, seconds)
        for tier, n in search.bound.resting(candidate.fields).items():
            assert n * (1 - 1e-6) <= estimated.needed(tier), (candidate, tier)
        bytes_of = {tier: estimated.needed(tier) for tier in ("device", "pinned_host", "nvme")}
        days = disk_days(planner.limits, estimated.moved["write"], seconds)
        least = planner.limits.min_disk_days
        if all(n <= planner.limits.of(tier) for tier, n in bytes_of.items()) and not (
            least and days and days < least
        ):
            found.append((seconds, search._complexity(config, candidate.tiles)))
    return found


def check_choice(seed: int, fewer: bool, **fixed: Any) -> None:
    """Compare a search with brute force; if nothing fits, follow the error's suggestion."""
    sizes, machine, drawn, days = random_case(seed, fewer)
    case = (sizes, machine, drawn | fixed, days)
    planner = planner_of(case)
    every, search = brute_force(planner), Search(planner.space(), planner.limits)
    search.run()
    assert bool(search.found) == bool(every), seed
    if not every:  # with equal layers
        try:
            planner.plan(validate=False)
        except PlanError:
            check_repair(case)
        return
    least = min(seconds for seconds, _ in every)
    near = [(harder, seconds) for seconds, harder in every if seconds * (1 - MIN_GAIN) <= least]
    plainest = search.plainest()
    assert search.found[0].seconds == pytest.approx(least, rel=1e-9), seed
    assert (plainest.complexity, plainest.seconds) == pytest.approx(min(near), rel=1e-9), seed
    mix(search, seconds=2.0)
    assert search.found[0].seconds <= least * (1 + 1e-9), (
        seed
    )  # no uniform config is faster than the fastest
    assert search.plainest().seconds <= search.found[0].seconds / (1 - MIN_GAIN), seed


@pytest.mark.by_default("9-remat")
@pytest.mark.parametrize(
    ("seed", "fixed"),
    [*((seed, {}) for seed in (0, 1, 2, 8, 9)), (9, {"activations": "remat"})],
    ids=["0", "1", "2", "8", "9", "9-remat"],
)
def test_plan_is_the_best_of_all_configs(seed, fixed):
    """For seed 9, nothing fits."""
    check_choice(seed, fewer=True, **fixed)


def test_bounds_are_no_more_than_the_seconds_where_wires_are_slow():
    """The bounds are close there: the link or the disk takes nearly all of the step."""
    for slow in (
        {"link_up": 1e7, "link_down": 1e7, "link_both": 1.5e7},
        dict.fromkeys(("disk_read", "disk_write", "disk_both"), 1e7),
    ):
        brute_force(
            Planner(
                SIZES,
                None,
                None,
                None,
                lab(**slow),
                FEW | {"activations": "remat", "gather_ahead": False},
                None,
            )
        )


def test_search_looks_again_at_what_it_passed_over_for_a_program_that_is_refused():
    """Programs that save anything are refused.

    The search had passed over the programs that save nothing, because they are slower.
    """

    def exact(config: zj.ZeroConfig, tiles: int) -> Exact:
        del tiles
        if config.activations != "remat" or config.saved_names or config.offloaded_names:
            raise ValueError("it does not fit after all")
        return Exact({tier: {} for tier in ("device", "pinned_host", "nvme")}, None)

    space = Planner(
        SIZES, None, None, None, lab(), FEW | {"gather_ahead": False, "params": "device"}, None
    ).space()
    space = dataclasses.replace(space, options=())
    search, expected = (Search(s, planner_of((SIZES, lab(), FEW, None)).limits, e) for s, e in (
        (space, exact), (dataclasses.replace(space, fixed={**space.fixed, "activations": "remat"}), None),
    ))  # fmt: skip
    search.run()
    expected.run()
    assert not any(found.config.activations == "remat" for found in search.found)
    settled = search.settle()
    assert settled is not None
    assert settled.config == expected.plainest().config


@pytest.mark.parametrize("tier", ["pinned_host", "nvme"])
def test_plan_keeps_the_largest_fraction_of_the_state_on_the_device_that_fits(tier):
    """The fraction is in sixteenths, and as fast as the best of all sixteenths.

    With 20 layers, sixteenths are rounded to 1 or 2 layers.
    """
    sizes = dataclasses.replace(SIZES, layers=20)
    fixed = {name: value for name, value in FEWER.items() if name != "opt_state_device_fraction"}
    fixed |= {"opt_state": tier, "params": "device", "grads": "device", "update": None}
    fractions = []
    for device in (0.55, 0.7, 0.72, 0.9):
        machine = lab(device_bytes=int(device * 16 * sizes.num_params))
        planner = Planner(sizes, None, None, None, machine, fixed, None)
        search = Search(planner.space(), planner.limits)
        search.run()
        best = search.found[0]
        assert best.seconds == pytest.approx(min(brute_force(planner))[0], rel=1e-9)
        fractions.append(best.config.opt_state_device_fraction)
        more = dataclasses.replace(best.config, opt_state_device_fraction=fractions[-1] + 1 / 16)
        assert search.estimate(more).needed("device") > planner.limits.device
    assert fractions == sorted(fractions)
    assert any(16 * fraction % 4 for fraction in fractions)


SWEPT = {
    "wide": zj.Sizes(layers=8, hidden=512, heads=8, seq=1024, batch=16, vocab=1024),
    "gated": zj.Sizes(
        layers=12,
        hidden=512,
        heads=8,
        kv_heads=2,
        mlp=1536,
        gated=True,
        seq=1024,
        batch=4,
        vocab=4096,
    ),
    "long": zj.Sizes(layers=10, hidden=256, heads=4, seq=4096, batch=2),
}


# by default test_plan_is_the_best_of_all_configs covers three random machines
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SWEPT)
def test_no_uniform_config_beats_the_plan_of_layers_that_may_differ(name):
    """Plan with the device's memory in ten steps.

    In a uniform config, all layers have the same fields and the same option for their values.
    """
    sizes, before = SWEPT[name], math.inf
    fixed = FEW | {"update": None, "grads": "device", "params": "device", "update_on": "device"}
    kept = set()
    for step in range(10):
        device = int(16 * sizes.num_params * 0.3 * 1.35**step)
        planner = Planner(sizes, None, None, None, lab(device_bytes=device), fixed, None)
        every, search = brute_force(planner), planner.search(planner.space())
        assert bool(every) == bool(search.found)
        if not every:
            continue
        best = search.settle()
        assert best is not None
        assert best.seconds <= min(every)[0] / (1 - MIN_GAIN)
        assert search.found[0].seconds <= min(*every, (before,))[0] * (
            1 + 1e-9
        )  # and less memory is not faster
        before = search.found[0].seconds
        kept.add((best.config.activations, best.config.saved_names, best.config.offloaded_names))
    assert len(kept) > 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 200))
def test_plan_is_the_best_of_all_configs_of_any_machine(seed):
    check_choice(seed, fewer=False)


@pytest.mark.by_default("device_bytes", "host_bytes")
@pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "disk_bytes"])
def test_more_memory_is_never_slower(name):
    """The fastest uniform config is no slower with more memory.

    The plan may be slower, by the fraction that a plainer config may cost.
    """
    small = {
        "device_bytes": int(0.15 * STATE),
        "host_bytes": int(0.5 * STATE),
        "disk_bytes": int(2 * STATE),
    }
    before = math.inf
    for step in range(5):
        figures = small | {name: int(small[name] * 2.8**step)}
        planner = Planner(SIZES, None, None, None, lab(**figures), dict(FEW), None)
        search = Search(planner.space(), planner.limits)
        search.run()
        seconds = search.found[0].seconds if search.found else math.inf
        assert seconds <= before * (1 + 1e-9), figures
        assert not search.found or search.plainest().seconds <= seconds / (1 - MIN_GAIN)
        before = seconds
    assert before < math.inf


def test_plan_with_room_for_all_is_the_default():
    made = plan(
        lab(), fixed=BF16 | {"prefetch_distance": 1, "num_microbatches": 1, "grads": "device"}
    )
    assert (made.fields, made.tiles) == ({"precision": "bf16"}, 1)
    assert made.time.bound_by == "compute"
    assert made.bytes["pinned_host"] == made.bytes["nvme"] == {}


def test_plan_goes_from_the_device_to_the_host_to_the_disk():
    used = []
    for device, host in ((2.0, 2.0), (0.6, 2.0), (0.2, 2.0), (0.2, 0.3)):
        made = plan(lab(device_bytes=int(device * STATE), host_bytes=int(host * STATE)), fixed=FEW)
        used.append([tier for tier in ("device", "pinned_host", "nvme") if made.bytes[tier]])
        for tier, n in made.bytes.items():
            assert sum(n.values()) <= (made.capacity[tier] or 0)
    assert used[0] == ["device"]
    assert used[1] == used[2] == ["device", "pinned_host"]
    assert used[3][-1] == "nvme"


def test_plan_where_layers_differ_keeps_what_the_memory_has_room_for():
    """Between saving all of every layer and saving nothing, some layers save more than others."""
    wide = zj.Sizes(layers=12, hidden=512, heads=8, seq=1024, batch=8)
    fixed = BF16 | {
        "opt_state": "device",
        "params": "device",
        "grads": "device",
        "num_microbatches": 1,
        "prefetch_distance": 1,
    }
    machine = lab(host_bytes=None, disk_bytes=None, flops={"bf16": 1e12})
    saved, remat = (
        plan(machine, wide, fixed | {"activations": mode}) for mode in ("save", "remat")
    )
    most, least = (sum(each.bytes["device"].values()) for each in (saved, remat))
    seconds = [remat.seconds]
    for part in (0.3, 0.5, 0.7, 0.9):
        between = least + part * (most - least)
        made = plan(dataclasses.replace(machine, device_bytes=int(between / 0.95)), wide, fixed)
        # A choice that fills the memory to the byte fits, and leaves less free than one layer's
        # activations.
        assert isinstance(made.config.activations, tuple)
        assert between - 2 * (most - least) / 12 < sum(made.bytes["device"].values()) <= between
        seconds.append(made.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert saved.seconds < seconds[-1] < 0.9 * remat.seconds


def test_options_of_a_layer_are_counted_as_their_estimates_count_them():
    """A choice fills the memory to the byte.

    Its count for a layer must therefore equal the count for the layer's segment.
    """
    planner = Planner(SIZES, None, None, None, lab(), dict(FEW), None)
    search, (stack,) = Search(planner.space(), planner.limits), planner.workload.stacks
    options = list_options(search.space)
    assert len(options) > 4
    for option in options:
        segments = (
            _segment(1, option, options),
            zj.Segment(stack.num_layers - 1, activations="remat"),
        )
        one, other = (
            search.estimate(zj.ZeroConfig(precision="bf16", activations=a))
            for a in (segments, (segments[1], segments[1]))
        )
        with_option, of_remat = one.layers[0], other.layers[0]
        assert with_option.backward - stack.backward["save"] == pytest.approx(option.seconds)
        assert one.bytes["pinned_host"].get("activations", 0) == option.host_bytes
        kept = (n.bytes["device"]["activations"] for n in (one, other))
        assert next(kept) - next(kept) / 2 == pytest.approx(option.device_bytes, abs=2)
        assert of_remat.backward == stack.backward["remat"]


def test_plan_keeps_the_simplest_of_nearly_as_fast_configs():
    """Gathers ahead hide a network that is nearly free: they save less than 3 %.

    They are chosen on a slow network.
    """
    sizes = dataclasses.replace(SIZES, batch=16)
    fast, slow = (
        plan(lab(devices_per_node=4, network_in_node=rate), sizes, FEW | {"stage": 3}) for rate in (1e13, 2e9)
    )  # fmt: skip
    assert not fast.config.gather_ahead
    assert slow.config.gather_ahead
    assert slow.time.hidden["network"] > 0


# --- what may not change --------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [
    {"stage": 1}, {"params": "pinned_host"}, {"grads": "nvme"}, {"opt_state": "nvme"}, {"activations": "remat"},
    {"update": "after_backward"}, {"update_on": "host"}, {"opt_state_device_fraction": 0.5}, {"prefetch_distance": 3},
    {"prefetch_distance": 0}, {"gather_ahead": True}, {"num_microbatches": 2}, {"moments": "bfloat16"}, {"clip_norm": 1.0},
    {"reduce_dtype": "float32"},
], ids=str)  # fmt: skip
def test_plan_keeps_what_is_fixed(fixed):
    others = {
        "prefetch_distance": 1,
        "opt_state": "pinned_host",
        "activations": "remat",
        "num_microbatches": 1,
        "update": None,
    }
    fixed = BF16 | others | fixed
    if fixed.get("update_on") == "host" or "opt_state_device_fraction" in fixed:
        fixed.pop("opt_state")  # the planner then has to find an update that goes with it
    config = plan(lab(devices_per_node=2), fixed=fixed).config
    assert {name: getattr(config, name) for name in fixed} == fixed
    assert config.update != "in_backward" or config.clip_norm is None


@pytest.mark.parametrize("fixed", [{"clip_norm": 1.0}, {"precision": "fp16"}, {}], ids=str)
def test_plan_updates_in_forward_if_an_update_must_know_all_gradients(fixed):
    """Forward's products take as long as the transfers of an update, which they hide."""
    sizes = dataclasses.replace(SIZES, seq=1024, batch=8)
    fields = FEWER | {"opt_state": "pinned_host", "params": "device", "grads": "device"} | fixed
    del fields["update"]
    machine = lab(flops={"bf16": 2e13, "fp16": 2e13})
    chosen = plan(machine, sizes, fields)
    assert chosen.config.update == ("in_forward" if fixed else "in_backward")
    if fixed:
        after = plan(machine, sizes, fields | {"update": None})
        assert chosen.seconds < 0.9 * after.seconds
        assert "update='in_forward'" in str(chosen)


def test_plan_rounds_moments_only_where_the_user_lets_it():
    alone = (
        BF16
        | dict.fromkeys(("params", "grads", "opt_state"), "device")
        | {"update": None, "activations": "remat"}
    )
    machine = lab(host_bytes=None, disk_bytes=None)
    needed = plan(machine, fixed=alone).device_bytes
    fits, less = (
        dataclasses.replace(machine, device_bytes=int(n / 0.95) + 2)
        for n in (needed, needed - STATE // 8)
    )
    assert (
        plan(fits, fixed=alone, rounds_moments=True).config.moments == "float32"
    )  # plainer, and as fast
    assert plan(less, fixed=alone, rounds_moments=True).config.moments == "bfloat16"
    for fixed in (alone, alone | {"moments": "float32"}):
        with pytest.raises(
            PlanError, match=r"With moments='bfloat16' fixed, .* a plan fits: .* s a step"
        ):
            plan(less, fixed=fixed)
    assert plan(less, fixed=alone | {"moments": "bfloat16"}).config.moments == "bfloat16"


def test_plan_of_a_machine_with_more_is_never_slower_where_rounded_moments_would_fit_less():
    """A disk with slow writes.

    The float32 moments that it makes fit are slower than rounded moments, which fit without it.
    """
    figures = {"device_bytes": int(0.2 * STATE), "host_bytes": int(0.6 * STATE)}
    slow = dict.fromkeys(("disk_read", "disk_write", "disk_both"), 1e7)
    without, disk = lab(**figures, disk_bytes=0), lab(**figures, **slow)
    rounded = plan(without, fixed=FEWER | {"moments": "bfloat16"})
    with pytest.raises(PlanError, match="With moments='bfloat16' fixed"):
        plan(without, fixed=FEWER)
    made = plan(disk, fixed=FEWER)
    assert made.config.moments == "float32"
    assert made.seconds > 2 * rounded.seconds
    (note,) = made.notes
    assert note.startswith(
        "with moments='bfloat16', which rounds the optimizer's moments, a step is predicted to take "
    )
    seconds = [plan(m, fixed=FEWER, rounds_moments=True).seconds for m in (without, disk)]
    assert seconds[1] <= seconds[0]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"fixed": {"stages": 3}}, "no field 'stages': did you mean 'stage'?"),
    ({"fixed": {"update": "in_backward", "clip_norm": 1.0}}, "update='in_backward' with clip_norm=1.0"),
    ({"sizes": dataclasses.replace(SIZES, batch=6), "mesh": {"fsdp": 4}}, "batch 6 is not divisible by data x fsdp = 1 x 4"),
    ({"mesh": {"fdsp": 4}}, "mesh has unknown axes ['fdsp']: choose from data, fsdp, tensor"),
    ({"mesh": {"tensor": 3}}, "mesh {'tensor': 3} does not divide the 4 devices of lab"),
    ({"mesh": {"fsdp": 2}}, "mesh {'fsdp': 2} has 2 devices, but lab has 4"),
    ({"machine": None}, "needs a machine"),
    ({"mesh": {"fsdp": "4"}}, "mesh {'fsdp': '4'}: '4' is not a number of devices"),
    ({"machine": 4}, "machine must be a zerojax.Machine or its name, such as 'h200', got int"),
    ({"min_disk_days": -1.0}, "min_disk_days=-1.0: pass a number of days above 0"),
    ({"tiles": ()}, "tiles=(): pass numbers of at least 1"),
    ({"batch": {}}, "a plan from Sizes takes no optimizer, batch or Mesh"),
    ({"min_disk_days": 30.0}, "disk_tbw_bytes"),
    ({"machine": lab(flops={}, devices_per_node=4)}, "flops.bf16"),
    ({"machine": lab(device_bytes=None, devices_per_node=4)}, "device_bytes"),
    ({"machine": lab(network_in_node=None, devices_per_node=4)}, "network_in_node"),
    ({"machine": lab(disk_read=None, devices_per_node=4), "fixed": {"params": "nvme"}}, "disk_read"),
    ({"machine": lab(host_kernel=None, devices_per_node=4), "fixed": {"update_on": "host"}}, "host_kernel"),
])  # fmt: skip
def test_plan_refuses_what_it_cannot_plan(arguments, message):
    given = {"machine": lab(devices_per_node=4), "sizes": SIZES, "fixed": {}} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        zj.plan(
            given["sizes"], None, given.get("mesh"), given.get("batch"), given["machine"], fixed=BF16 | given["fixed"],
            min_disk_days=given.get("min_disk_days"), tiles=given.get("tiles"),
        )  # fmt: skip


def test_plan_takes_a_machine_by_name():
    sizes = dataclasses.replace(SIZES, batch=8)
    assert plan("h200", sizes, FEWER).config == plan(zj.machine("h200"), sizes, FEWER).config


def test_plan_says_which_fixed_field_has_nothing_to_go_with():
    with pytest.raises(
        PlanError, match=r"update_on='host' needs opt_state=.*the machine lacks host_bytes"
    ) as caught:
        plan(lab(host_bytes=None, disk_bytes=0), fixed=BF16 | {"update_on": "host"})
    assert "SWAP_DIR" not in str(caught.value)


@pytest.mark.parametrize("fixed", [
    {"opt_state": "pinned_host"},
    {"activations": "remat", "offloaded_names": ("qkv",)},
    {"activations": (zj.Segment(8, activations="pinned_host"), zj.Segment(8, activations="remat"))},
    {"frozen": "pinned_host"},
], ids=str)  # fmt: skip
def test_only_a_fixed_field_that_needs_it_asks_for_a_figure_that_nobody_gave(fixed):
    sizes = dataclasses.replace(SIZES, batch=8)
    with pytest.raises(ValueError, match="machine h200 has no figure for host_bytes"):
        plan("h200", sizes, FEW | fixed)


def test_plan_of_a_machine_without_host_bytes_leaves_nothing_but_the_device():
    made = plan("h200", dataclasses.replace(SIZES, batch=8), FEW | {"activations": "remat"})
    assert {made.config.params, made.config.grads, made.config.opt_state} == {"device"}
    assert "pinned_host is not considered: the machine lacks host_bytes" in made.notes


@pytest.mark.parametrize(("sizes", "message"), [
    ({"layers": 10**9}, "layers = 1,000,000,000: must be at most 1,000"),
    ({"params": float("inf")}, "params = inf: must be a whole number of at least 1"),
    ({"params": float("nan")}, "params = nan: must be a whole number of at least 1"),
    ({"hidden": 10**30}, "hidden = 2^99 or more: must be at most 10,000,000"),
    ({"batch": 10**9, "seq": 10**9}, "tokens of width 1,024 have 1.02e+21 elements"),
    ({"gated": 1}, "gated = 1: must be True or False"),
])  # fmt: skip
def test_sizes_beyond_every_machine_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(SIZES, **sizes)


def test_plan_for_an_unknown_machine_names_the_nearest():
    with pytest.raises(ValueError, match=r"h201.*h200"):
        plan(zj.machine("h201"))


def test_plan_assumes_that_reads_and_writes_share_the_slower_rate_of_the_disk():
    """No data sheet has the rate of reads and writes together.

    The report states the assumed rate, which is no faster than the disk's own limits.
    """
    fixed = FEWER | {"params": "nvme", "opt_state": "nvme", "moments": "float32"}
    figures = {"disk_read": 2e9, "disk_write": 1e9}
    assumed, slow, fast = (
        plan(lab(**figures, disk_both=both), fixed=fixed) for both in (None, 1e9, 3e9)
    )
    assert assumed.notes == (
        "disk_both, 1 GB/s, is assumed: simultaneous reads and writes share the lower of disk_read and disk_write",
    )  # fmt: skip
    assert assumed.seconds == slow.seconds > fast.seconds
    assert slow.notes == fast.notes == ()
    again = zj.plan(SIZES, machine=assumed.machine, fixed=fixed)  # a plan's machine states it again
    assert again.notes == assumed.notes


def test_plan_tells_what_it_did_not_consider():
    bare = Machine(name="bare", device_bytes=100 * STATE, flops={"bf16": 1e13}, memory_rate=1e11)
    assert plan(bare, fixed=FEW).notes == (
        "pinned_host is not considered: the machine lacks host_bytes, link_up, link_down, link_both",
        "nvme is not considered: the machine lacks disk_bytes, disk_read, disk_write, host_bytes, link_up, link_down, "
        "link_both",
        "update_on='host' is not considered: the machine lacks host_kernel",
    )  # fmt: skip
    assert plan(lab(), fixed=FEWER).notes == ()
    assert (
        plan(lab(disk_bytes=0), fixed=FEWER).notes == ()
    )  # there is no disk, and the user said so


# --- nothing fits ---------------------------------------------------------------------------------


def check_repair(case: Any) -> None:
    """Follow an error's suggestion, and check that something fits then."""
    sizes, machine, fixed, days = case
    with pytest.raises(PlanError) as caught:
        zj.plan(sizes, machine=machine, fixed=fixed, min_disk_days=days)
    error, text = caught.value, str(caught.value)
    assert error.tier in ("device", "pinned_host", "nvme", "days of the disk")
    assert error.needed > error.had
    field = re.search(r"Without (\w+)=.* a plan fits", text)
    rounded = {"moments": "bfloat16"} if "With moments='bfloat16' fixed" in text else {}
    more = {
        name: int(n.replace(",", "")) for name, n in re.findall(r"(\w+_bytes) of ([\d,]+)", text)
    }
    fewer = re.search(r"[Ww]ith min_disk_days=([\d.e+-]+\d)", text)
    assert field or rounded or more or fewer, text
    zj.plan(
        sizes, machine=dataclasses.replace(machine, **more), min_disk_days=float(fewer[1]) if fewer else days,
        fixed={name: value for name, value in fixed.items() if field is None or name != field[1]} | rounded,
    )  # fmt: skip


def test_error_has_the_tier_and_its_bytes():
    machine = lab(device_bytes=STATE // 1000, host_bytes=STATE // 10, disk_bytes=STATE)
    with pytest.raises(PlanError, match="nothing fits lab: device needs") as caught:
        plan(machine, fixed=FEWER)
    assert caught.value.tier == "device"
    assert caught.value.needed > caught.value.had == 0.95 * (STATE // 1000)
    check_repair((SIZES, machine, FEWER, None))


def test_error_names_every_tier_that_lacks():
    """On one device, what does not fit its memory would not fit the host's memory either."""
    machine = lab(device_bytes=int(0.01 * STATE), host_bytes=int(0.3 * STATE), disk_bytes=0)
    check_repair(
        (SIZES, machine, FEWER | {"params": "pinned_host", "opt_state": "pinned_host"}, None)
    )
    with pytest.raises(
        PlanError, match=r"device_bytes of [\d,]+ and host_bytes of [\d,]+ would fit it"
    ):
        plan(machine, fixed=FEWER)


def test_error_names_the_fixed_field_that_is_in_the_way():
    machine = lab(device_bytes=int(0.5 * STATE))
    with pytest.raises(PlanError, match=re.escape("Without opt_state='device' a plan fits.")):
        plan(machine, fixed=FEWER | {"opt_state": "device"})
    plan(machine, fixed=FEWER)


@pytest.mark.by_default("h100-pcie-12-768")
@pytest.mark.parametrize(("layers", "hidden"), [(40, 5120), (80, 8192), (12, 768)])
@pytest.mark.parametrize("name", ["l4", "h100-pcie"])
def test_error_names_a_change_that_fits_on_machines_by_name(name, layers, hidden):
    """Shrink each memory step by step; what an error names is always enough."""
    sizes = zj.Sizes(
        layers=layers, hidden=hidden, heads=hidden // 64, seq=2048, batch=1, vocab=32000
    )
    disk = {"disk_read": 3e9, "disk_write": 2e9, "disk_both": 2.5e9}
    refused = 0
    for device, host, on_disk in (
        (2.4e10, 6.4e10, 0),
        (6e9, 6.4e10, 0),
        (6e9, 2e9, 1e11),
        (2e8, 6.4e10, 1e13),
    ):
        figures = {
            "device_bytes": device,
            "host_bytes": host,
            "disk_bytes": on_disk,
            "host_kernel": 5e10,
        } | disk
        case = (sizes, dataclasses.replace(zj.machine(name), **figures), FEWER, None)
        planner = planner_of(case)
        if not planner.search(planner.space()).found:
            check_repair(case)
            refused += 1
    assert refused


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(300, 400))
def test_error_names_a_change_that_fits(seed):
    sizes, machine, fixed, days = random_case(seed, fewer=True)
    less = {name: int(getattr(machine, name) * 0.05) for name in ("device_bytes", "host_bytes")}
    case = (sizes, dataclasses.replace(machine, **less), fixed, days)
    planner = planner_of(case)
    if not planner.search(planner.space()).found:
        check_repair(case)


def test_disk_lasts_as_long_as_it_has_to():
    """If only the disk has room, it lasts some days; a demand for more is refused.

    If the host has room too, nothing is written to the disk.
    """
    machine = lab(
        device_bytes=int(0.3 * STATE), host_bytes=int(0.5 * STATE), disk_tbw_bytes=100 * STATE
    )
    made = plan(machine, fixed=FEWER)
    lasts = made.disk_days or 0.0
    assert lasts == pytest.approx(100 * STATE / (made.disk_bytes["write"] / made.seconds * 86400))
    assert (plan(machine, fixed=FEWER, min_disk_days=0.9 * lasts).disk_days or 0.0) >= 0.9 * lasts
    fixed = FEWER | dict.fromkeys(("params", "grads", "opt_state"), "nvme")
    with pytest.raises(
        PlanError, match=r"the disk lasts .* days of steps, but min_disk_days=1000 is required"
    ) as caught:
        plan(machine, fixed=fixed, min_disk_days=1000.0)
    assert (caught.value.tier, caught.value.needed) == ("days of the disk", 1000.0)
    check_repair((SIZES, machine, fixed, 1000.0))
    roomy = dataclasses.replace(machine, host_bytes=2 * STATE)
    assert plan(roomy, fixed=FEWER, min_disk_days=1000.0).disk_days is None  # nothing is written


# --- what a plan says -----------------------------------------------------------------------------


def test_plan_counts_the_bytes_of_link_and_disk():
    """P weights on disk with Adam in bfloat16.

    The update reads and writes 12 P bytes; computing reads 2 P twice and writes it once.
    """
    fixed = (
        FEW
        | dict.fromkeys(("params", "opt_state"), "nvme")
        | {"activations": "remat", "update_on": "device"}
    )
    sizes = zj.Sizes(layers=4, hidden=512, heads=8, seq=256, batch=8)
    made = plan(lab(devices_per_node=2), sizes, fixed)
    p = sizes.num_params
    assert made.disk_bytes == {
        "read": pytest.approx(16 * p),
        "write": pytest.approx(14 * p),
    }  # of the node
    assert made.link_bytes == {
        "up": pytest.approx(8 * p),
        "down": pytest.approx(7 * p),
    }  # of a device
    assert made.disk_bytes_a_day == pytest.approx(14 * p / made.seconds * 86400)
    assert made.bytes["nvme"] == {"params": p, "opt_state": 6 * p}
    assert made.collectives == {
        "all_gather": pytest.approx(2 * 2 * p / 2),
        "reduce_scatter": pytest.approx(2 * p / 2),
    }


@pytest.mark.parametrize(("precision", "opt_state", "read", "written"), [
    ("bf16", "nvme", 4 + 12, 2 + 12), ("bf16", "pinned_host", 4, 2),
    ("fp32", "nvme", 8 + 4 + 8, 4 + 8), ("fp32", "pinned_host", 8 + 4, 4),
])  # fmt: skip
def test_plan_counts_what_an_update_on_the_host_reads_and_writes(
    precision, opt_state, read, written
):
    """Parameters on disk are read twice to compute, and written by the host.

    Without masters, the host also reads them.
    """
    sizes = zj.Sizes(layers=4, hidden=512, heads=8, seq=256, batch=8)
    fixed = {
        "precision": precision,
        "params": "nvme",
        "opt_state": opt_state,
        "update_on": "host",
        "activations": "remat",
    }
    made = plan(
        lab(flops={"bf16": 1e12, "fp32": 1e12}),
        sizes,
        fixed | {"prefetch_distance": 1, "num_microbatches": 1},
    )
    p = sizes.num_params
    assert made.disk_bytes == {"read": pytest.approx(read * p), "write": pytest.approx(written * p)}


def test_plan_writes_its_figures_as_json():
    made = plan(
        lab(device_bytes=int(0.3 * STATE), host_bytes=int(0.3 * STATE), disk_tbw_bytes=10**15),
        fixed=FEW,
    )
    read = json.loads(made.to_json())
    assert (
        read["seconds"]
        == made.seconds
        == pytest.approx(sum(phase["seconds"] for phase in read["phases"]))
    )
    assert read["bytes"] == {tier: dict(kinds) for tier, kinds in made.bytes.items()}
    assert read["disk_bytes"] == made.disk_bytes
    assert read["disk_days"] == made.disk_days
    assert read["config"] == json.loads(json.dumps(made.fields))  # JSON has lists but no tuples
    assert sum(lane["exposed"] for lane in read["lanes"].values()) == pytest.approx(made.seconds)
    assert read["mfu"] is made.mfu is None  # the vendor's peak was not given
    assert zj.ZeroConfig(**read["config"]) == made.config


def test_plan_prints_its_config_and_every_tier():
    made = plan(
        lab(device_bytes=int(0.3 * STATE), host_bytes=int(0.3 * STATE), disk_tbw_bytes=10**15),
        fixed=FEW,
    )
    text = str(made)
    for name, value in made.fields.items():
        assert f"{name}={value!r}" in text
    for row in ("device", "pinned_host", "nvme", "link", "disk", "wear"):
        assert re.search(rf"^  {row} ", text, re.MULTILINE), row
    assert f"{made.seconds:.4g} s a step, predicted" in text
    assert "days to its TBW" in text
    printed = next(line for line in text.splitlines() if line.startswith("  read "))
    assert float(printed.split()[-1]) == pytest.approx(made.time.exposed["read"], abs=1e-4)


def test_plan_tells_which_configs_are_faster_and_less_plain():
    """Gathers ahead save less than 3 % here: no config beats them, and they are not worth it."""
    sizes = dataclasses.replace(SIZES, batch=16)
    made = plan(lab(devices_per_node=4, network_in_node=3e11), sizes, FEW | {"stage": 3})
    faster = [other for other in made.beaten if other.seconds < made.seconds]
    assert any(other.fields.get("gather_ahead") for other in faster)
    lines = [
        line
        for line in str(made).splitlines()
        if re.match(r"  less plain  .* \(\d\.\d% faster, but 3% required\)", line)
    ]
    assert len(lines) == len(faster)
    assert sum(line.startswith("  beaten ") for line in str(made).splitlines()) == len(
        made.beaten
    ) - len(faster)


def test_plan_utilization_counts_the_models_flops():
    peak = {"bf16": 2e13}
    made = plan(lab(peak_flops=peak), fixed=FEW | {"activations": "remat"})
    assert made.mfu == pytest.approx(SIZES.step_flops() / made.seconds / 2e13)
    assert made.hardware_flops == pytest.approx(SIZES.step_flops("remat"), rel=0.05)
    assert (made.hfu or 0.0) > (made.mfu or 0.0)
    assert made.tokens_per_second == SIZES.tokens / made.seconds


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (
            {"num_microbatches": 3},
            r"num_microbatches=3 does not divide the 4 rows of a device: use one of \[1, 2, 4\]",
        ),
        (
            {"activations": (zj.Segment(4), zj.Segment(3))},
            "the segments of activations have 7 layers, but the model has 8",
        ),
        (
            {"activations": "remat", "saved_names": ("nonsense",)},
            r"unknown names \['nonsense'\]: a transformer from Sizes has",
        ),
    ],
)
def test_plan_refuses_fixed_fields_that_do_not_go_with_the_model(fixed, message):
    sizes = zj.Sizes(layers=8, hidden=256, heads=8, seq=64, batch=4, vocab=512)
    with pytest.raises(ValueError, match=message):
        plan(lab(), sizes, BF16 | fixed)


def test_plan_with_fixed_names_keeps_them():
    sizes = zj.Sizes(layers=8, hidden=256, heads=8, seq=64, batch=4, vocab=512)
    assert plan(lab(), sizes, FEWER | {"saved_names": ("attention",)}).config.saved_names == (
        "attention",
    )


def test_tensor_parallelism_within_a_node_takes_the_nodes_network():
    sizes = zj.Sizes(layers=4, hidden=1024, heads=8, seq=256, batch=16, vocab=1024)
    seconds = []
    for between in (1e9, 1e10):
        machine = dataclasses.replace(
            lab(), devices_per_node=8, nodes=2, network_in_node=1e11, network_between_nodes=between
        )
        fixed = FEWER | {"activations": "save", "stage": 0}
        made = zj.plan(
            sizes, mesh={"data": 2, "fsdp": 1, "tensor": 8}, machine=machine, fixed=fixed
        )
        assert made.hardware_flops == made.flops  # nothing is recomputed
        seconds.append(made.time.busy["compute"])
    assert seconds[0] == seconds[1]
