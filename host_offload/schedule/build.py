"""Build the schedule of a step, and say what to change where it does not fit a budget of bytes.

A phase follows from the order in which it visits the layers, and from the kinds that it fetches, reads and writes; only kinds
off the device count. Everything else follows from the rule of the ring (`host_offload.schedule.schedule`):

    takes       the layers visited whose record is off the device, in order
    slots       take number c empties slot c mod distance
    preload     the first `distance` takes, before tick 0
    fetch[t]    take t + distance, into the slot that take t has just emptied

Bytes in flight never fall as the distance grows, so the largest distance that fits a budget is found by bisection.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np

from host_offload.schedule.schedule import KINDS, SIZES, UPDATES, EndsMove, Phase, Schedule, int32, moved, padded
from host_offload.tiers import TIERS


def build_schedule(
    num_layers: int,
    distance: int = 0,
    *,
    tiers: Mapping[str, str] | None = None,
    update: str = "after_backward",
    gather_ahead: bool = False,
    master: bool = True,
    device_layers: int = 0,
    stores_late: bool = False,
    ends: Mapping[str, int] | None = None,
    num_head_pieces: int = 0,
    record_bytes: Mapping[str, int] | None = None,
    budget_bytes: int | None = None,
    first_layer: int = 0,
) -> Schedule:
    """Build the schedule of a train step.

    Args:
      num_layers: equal layers of the stack.
      distance: ticks between the fetch of a record and its use; may exceed num_layers.
      tiers: kind -> tier, of KINDS and TIERS; kinds that are missing are on the device.
      update: when a layer's optimizer runs, "after_backward" or "in_backward".
      gather_ahead: take and gather the next layer while one computes; two layers are then whole at once.
      master: parameters have float32 masters, which rest and move with opt_state; without, an update reads the parameters.
      device_layers: opt_state of layers below this one stays on the device.
      stores_late: what updates, backward or update, stores each record in the tick after the one that updated it.
      ends: bytes of the records of leaves that are no stack of layers and are updated beside ticks whose stores are late:
        "head", whose gradients are complete before backward; "head_pieces", of a piece of others of the head, of which each
        tick updates one; "embed", which are updated when the layers are; and "pieces", of a piece of each of the others, which
        are updated after all of them in pieces.
      num_head_pieces: how many ticks update a piece of the head: the first ones. At most num_layers.
      record_bytes: bytes of one layer on one device, by kind (params: its shard), and "gathered" (whole); missing ones are 0.
      budget_bytes: the most bytes that may be in flight on a device.
      first_layer: number of the first layer in its stack, where these are a run of its layers: all arrays count from it.

    Raises:
      ValueError: impossible sizes, unknown names, or more bytes in flight than the budget. The message then gives the largest
        distance that fits, if possible with the same gather_ahead.
    """
    _check_int("num_layers", num_layers, 1)
    _check_int("distance", distance, 0)
    _check_int("first_layer", first_layer, 0)
    _check_int("device_layers", device_layers, 0, first_layer + num_layers)
    _check_names("tiers", tiers or {}, KINDS)
    _check_names("ends", ends or {}, ("head", "head_pieces", "embed", "pieces"))
    _check_int("num_head_pieces", num_head_pieces, 0, num_layers)
    _check_names("record_bytes", record_bytes or {}, SIZES)
    for kind, tier in (tiers or {}).items():
        if tier not in TIERS:
            raise ValueError(f"tiers[{kind!r}]={tier!r}: known tiers are {', '.join(TIERS)}")
    if update not in UPDATES:
        raise ValueError(f"update={update!r}: 'after_backward' or 'in_backward' is needed")
    for kind, size in (record_bytes or {}).items():
        _check_int(f"record_bytes[{kind!r}]", size, 0)

    where = {kind: (tiers or {}).get(kind, "device") for kind in KINDS}
    size = None if record_bytes is None else MappingProxyType({kind: record_bytes.get(kind, 0) for kind in SIZES})

    def build(distance: int, gather_ahead: bool) -> Schedule:
        return Schedule(
            num_layers=num_layers,
            distance=distance,
            update=update,
            gather_ahead=gather_ahead,
            master=master,
            tiers=MappingProxyType(where),
            device_layers=device_layers,
            phases=_build_phases(
                range(first_layer, first_layer + num_layers), distance, where, update, gather_ahead, master, device_layers,
                stores_late, ends or {}, num_head_pieces,
            ),
            record_bytes=size,
            first_layer=first_layer,
        )  # fmt: skip

    schedule = build(distance, gather_ahead)
    if budget_bytes is not None:
        _check_int("budget_bytes", budget_bytes, 0)
        if record_bytes is None:
            raise ValueError(f"budget_bytes={budget_bytes} needs record_bytes, the bytes of one layer by kind")
        if schedule.peak_bytes > budget_bytes:
            raise ValueError(
                f"budget_bytes={budget_bytes}: prefetch_distance={distance} with gather_ahead={gather_ahead} puts "
                f"{schedule.peak_bytes} bytes in flight on a device, {schedule.peak_bytes - budget_bytes} more; "
                + advise(build, distance, gather_ahead, budget_bytes)
            )
    return schedule


def advise(build: Callable[[int, bool], Schedule], distance: int, gather_ahead: bool, budget_bytes: int) -> str:
    """Return a change of the schedule with which it fits a budget."""
    for ahead in (True, False) if gather_ahead else (False,):
        fits = bisect.bisect_right(range(distance + 1), budget_bytes, key=lambda d: build(d, ahead).peak_bytes) - 1
        if fits >= 0:
            off = "gather_ahead=False with " if gather_ahead and not ahead else ""
            return f"{off}prefetch_distance={fits} fits, with {build(fits, ahead).peak_bytes} bytes"
    least = build(0, False).peak_bytes
    return f"nothing fits: prefetch_distance=0 with gather_ahead=False needs {least} bytes, {least - budget_bytes} more"


def _build_phases(
    numbers: range,
    distance: int,
    tiers: Mapping[str, str],
    update: str,
    gather_ahead: bool,
    master: bool,
    device_layers: int,
    stores_late: bool,
    ends: Mapping[str, int],
    num_head_pieces: int,
) -> tuple[Phase, ...]:
    moving, num_layers = {kind for kind, tier in tiers.items() if tier != "device"}, len(numbers)
    if device_layers == numbers.stop:
        moving.discard("opt_state")

    updating = "backward" if update == "in_backward" else "update"

    def phase(name: str, layer: np.ndarray, fetches: str, writes: str, reads: str = "") -> Phase:
        ahead = gather_ahead and name != "update"
        kinds = [tuple(kind for kind in text.split() if kind in moving) for text in (fetches, reads, writes)]
        consume = np.append(layer[1:], -1) if ahead else layer
        # Ticks that take something off the device come first: of an update, the layers whose state is on the device come last.
        takes = consume[moved(kinds[0], consume, device_layers)]
        slots = np.arange(len(takes)) % distance if distance else np.full(len(takes), -1)
        use_slot, fetch = (padded(array, num_layers) for array in (slots, takes[distance:]))
        store = np.where(moved(kinds[2], layer, device_layers), layer, -1)
        late = stores_late and name == updating and bool(kinds[2])
        return Phase(
            name=name,
            layer=int32(layer),
            consume=int32(consume),
            use_slot=use_slot,
            fetch=fetch,
            fetch_slot=int32(np.where(fetch >= 0, use_slot, -1)),
            store=int32([-1, *store[:-1]] if late else store),
            drain=int32(store[-1:] if late else []),
            preload=int32(takes[:distance]),
            preload_slot=int32(slots[:distance]),
            first=int(layer[0]) if ahead else -1,
            fetches=kinds[0],
            reads=kinds[1],
            writes=kinds[2],
            device_layers=device_layers,
            first_layer=numbers.start,
            ends=beside if late else (),
        )

    ticks = {
        "head": (-1, 0),
        "head_pieces": (0, 1),
        "embed": (num_layers, num_layers + 1),
        "pieces": (num_layers + 1, num_layers + 2),
    }
    beside = tuple(
        EndsMove(
            name=name, fetch=ticks[name][0], store=ticks[name][1], num_bytes=n,
            count=num_head_pieces if name == "head_pieces" else 1,
        )
        for name, n in ends.items()
    )  # fmt: skip
    layers = np.arange(numbers.start, numbers.stop)
    forward = phase("forward", layers, "params frozen", "activations")
    if update == "in_backward":
        return forward, phase("backward", layers[::-1], "params frozen activations", "opt_state params", "opt_state")
    backward = phase("backward", layers[::-1], "params frozen activations", "grads")
    reads = "grads opt_state" if master else "grads opt_state params"
    if stores_late:
        # A record is loaded in the tick that updates it, while the one before it is stored: there is nothing else to wait for.
        return forward, backward, phase("update", layers, "", "opt_state params", reads)
    # Rolled: the layers whose state is on the device come last, so that fetches begin with the first tick.
    rolled = np.roll(layers, -max(0, device_layers - numbers.start))
    return forward, backward, phase("update", rolled, reads, "opt_state params")


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}={value!r}: an int is needed")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: {least} or more is needed" if most is None else f"{name}={value}: {least} to {most}")


def _check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(known), key=str):
        raise ValueError(f"{what} has {', '.join(map(repr, unknown))}: known are {', '.join(known)}")
