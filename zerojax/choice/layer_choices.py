"""What one layer can do with the values that backward reads, and the useful combinations.

A block's forward computes values v, of b_v bytes, from its input x, its parameters and each other.
Backward reads all of them. Each value is made available to the layer's backward in one of three
ways:

    keep        b_v bytes of device memory from forward to backward
    offload     b_v bytes of host memory, stored in forward and loaded for backward
    recompute   s_v seconds of backward, from its operands

Checkmate (arXiv:1910.02653) and its successors also schedule the operands of recomputed values.
Here backward reads every value, so every operand is available and no value is computed twice: the
costs of the values add up. The input x is always saved, on the device or in host memory. Summed
over the values and the input,

    device_bytes    = sum of b over kept
    host_bytes      = sum of b over offloaded
    seconds         = sum of s over recomputed
    transient_bytes = sum of b over offloaded and recomputed, on the device during the layer's
                      backward

Transient bytes are the total minus the kept bytes, so an option is dominated exactly if another one
needs no more device_bytes, host_bytes and seconds. The 2 * 3^n options of n values are enumerated
value by value, and dominated ones are dropped after each value: because costs add up, a dominated
option stays dominated.
"""

import bisect
import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_OPTIONS = 16
_MAX_FRONT = 2048
_PRICES = 32
_KEEP = "k"
_OFFLOAD = "o"
_RECOMPUTE = "r"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A value computed in a block's forward and read by its backward.

    Attributes:
      name: name of the value, unique in a layer.
      num_bytes: bytes per device, at least 1.
      seconds: seconds to recompute the value once its operands are available, at least 0.
      operands: indices of the earlier values that it is computed from directly, in addition to the
        layer's input and parameters.
    """

    name: str
    num_bytes: int
    seconds: float
    operands: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerOption:
    """What a layer does with its values, and the resulting costs per device.

    Attributes:
      device_bytes: bytes on the device from the layer's forward to its backward.
      host_bytes: bytes in host memory from forward to backward, which cross the link once each way.
      seconds: seconds of recomputation in backward.
      transient_bytes: bytes on the device only during the layer's backward, on top of device_bytes.
      keep: names of the values kept on the device.
      offload: names of the values in host memory. The remaining values are recomputed.
      input_offloaded: whether the layer's input is in host memory instead of on the device.
    """

    device_bytes: int
    host_bytes: int
    seconds: float
    transient_bytes: int
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    input_offloaded: bool = False


class _Label(NamedTuple):
    """The costs of an option, and a letter for the input and for each value: k, o or r."""

    device_bytes: int
    host_bytes: int
    seconds: float
    letters: str


def layer_options(
    values: Sequence[Value], x_bytes: int, *, max_options: int = MAX_OPTIONS
) -> tuple[LayerOption, ...]:
    """Return the undominated options of a layer, by falling device bytes, at most `max_options`.

    If there are more, the selection starts with the four corners, which are always in the result:

        nothing recomputed or offloaded     except values that take no time to recompute
        all values recomputed, input kept   the fewest device bytes without host memory
        all values recomputed               and only the input offloaded
        everything offloaded                except values that take no time to recompute

    Next are the options that are the cheapest at some price of a device byte, a host byte and a
    second: with many layers, a mixture of such options is as good as any, up to the rounding of a
    layer. Remaining options fill up the result. In both groups, the next option taken is the
    farthest from all options taken so far, in coordinates that are fractions of the layer's bytes
    and seconds.

    The front is exact as long as no merging step leaves more than 2048 options. If a step does, it
    is thinned to 2048.

    Args:
      values: values of the block, in program order.
      x_bytes: bytes of the layer's input per device.
      max_options: largest number of options returned, at least 4.

    Raises:
      ValueError: a cost is negative, a name is duplicated, an operand is not an earlier value, or
        `max_options` is below 4.
    """
    if max_options < 4:
        raise ValueError(
            f"max_options={max_options}: at least 4 are needed, for the corners of the front"
        )
    labels = _thinned(_front(values, x_bytes), max_options)
    total_bytes = x_bytes + sum(value.num_bytes for value in values)
    return tuple(_option(label, values, total_bytes) for label in reversed(labels))


def layer_front(values: Sequence[Value], x_bytes: int) -> tuple[LayerOption, ...]:
    """Return all undominated options of a layer, by falling device bytes.

    Args:
      values: values of the block, in program order.
      x_bytes: bytes of the layer's input per device.

    Raises:
      ValueError: a cost is negative, a name is duplicated, or an operand is not an earlier value.
    """
    total_bytes = x_bytes + sum(value.num_bytes for value in values)
    return tuple(_option(label, values, total_bytes) for label in reversed(_front(values, x_bytes)))


def _front(values: Sequence[Value], x_bytes: int) -> list[_Label]:
    """Return the undominated labels of a layer, thinned to `_MAX_FRONT`."""
    _check(values, x_bytes)
    front = _undominated([_Label(x_bytes, 0, 0.0, _KEEP), _Label(0, x_bytes, 0.0, _OFFLOAD)])
    for value in values:
        extended = list[_Label]()
        for label in front:
            extended += _extend(label, value)
        front = _thinned(_undominated(extended), _MAX_FRONT)
    return front


def _extend(label: _Label, value: Value) -> tuple[_Label, _Label, _Label]:
    """Return the label with one more value: kept, offloaded or recomputed."""
    device, host, seconds, letters = label
    return (
        _Label(device + value.num_bytes, host, seconds, letters + _KEEP),
        _Label(device, host + value.num_bytes, seconds, letters + _OFFLOAD),
        _Label(device, host, seconds + value.seconds, letters + _RECOMPUTE),
    )


def _undominated(labels: Sequence[_Label]) -> list[_Label]:
    """Return the undominated labels, one of each set of equal labels, by rising device bytes.

    Labels are visited by rising device bytes. `hosts` and `seconds` form a staircase: the (host
    bytes, seconds) pairs seen so far that no other seen pair dominates. Along it, hosts rise and
    seconds fall, so the last step with no more host bytes has the fewest seconds to compare with.
    """
    undominated: list[_Label] = []
    hosts: list[int] = []
    seconds: list[float] = []
    for label in sorted(labels):
        first = bisect.bisect_right(hosts, label.host_bytes)
        if first and seconds[first - 1] <= label.seconds:
            continue
        if first and hosts[first - 1] == label.host_bytes:
            first -= 1
        last = first
        while last < len(hosts) and seconds[last] >= label.seconds:
            last += 1
        hosts[first:last] = [label.host_bytes]
        seconds[first:last] = [label.seconds]
        undominated.append(label)
    return undominated


def _thinned(front: list[_Label], count: int) -> list[_Label]:
    """Return at most `count` labels of a front, in their order, selected as in `layer_options`."""
    if len(front) <= count:
        return front
    costs = np.array([label[:3] for label in front], float)
    shares = costs / np.maximum(costs.max(axis=0), 1e-300)
    corners = _corners(front)
    cheapest = sorted({*corners, *_cheapest(shares)})
    chosen = _farthest_first(shares, corners, cheapest, count)
    chosen = _farthest_first(shares, chosen, range(len(front)), count)
    return [front[i] for i in sorted(chosen)]


def _corners(front: list[_Label]) -> list[int]:
    """Return the indices of the corners of a front, each once."""
    orders = (
        operator.attrgetter("host_bytes", "seconds"),
        operator.attrgetter("host_bytes", "device_bytes"),
        operator.attrgetter("device_bytes", "host_bytes"),
        operator.attrgetter("device_bytes", "seconds"),
    )
    corners = list[int]()
    for order in orders:
        keys = [order(label) for label in front]
        corner = keys.index(min(keys))
        if corner not in corners:
            corners.append(corner)
    return corners


def _cheapest(shares: np.ndarray) -> np.ndarray:
    """Return the index of the cheapest option at each of a grid of prices; shares: [N, 3]."""
    steps = range(_PRICES + 1)
    pairs = itertools.product(steps, steps)
    prices = [(a, b, _PRICES - a - b) for a, b in pairs if a + b <= _PRICES]
    return (np.array(prices, float) @ shares.T).argmin(axis=1)


def _farthest_first(
    shares: np.ndarray, chosen: Sequence[int], candidates: Sequence[int], count: int
) -> list[int]:
    """Return `chosen`, extended from `candidates` until there are `count`.

    Each step adds the option that is farthest from all chosen so far.
    """
    result = list(chosen)
    pool = np.array(candidates)
    points = shares[pool]
    distance = np.min([np.linalg.norm(points - shares[i], axis=1) for i in result], axis=0)
    while len(result) < count and distance.max() > 0:
        farthest = int(distance.argmax())
        result.append(int(pool[farthest]))
        distance = np.minimum(distance, np.linalg.norm(points - points[farthest], axis=1))
    return result


def _option(label: _Label, values: Sequence[Value], total_bytes: int) -> LayerOption:
    """Return the option of a label."""
    keep = list[str]()
    offload = list[str]()
    for value, letter in zip(values, label.letters[1:], strict=True):
        if letter == _KEEP:
            keep.append(value.name)
        elif letter == _OFFLOAD:
            offload.append(value.name)
    return LayerOption(
        device_bytes=label.device_bytes,
        host_bytes=label.host_bytes,
        seconds=label.seconds,
        transient_bytes=total_bytes - label.device_bytes,
        keep=tuple(keep),
        offload=tuple(offload),
        input_offloaded=label.letters[0] == _OFFLOAD,
    )


def _check(values: Sequence[Value], x_bytes: int) -> None:
    """Raise ValueError for values that a layer cannot have."""
    if x_bytes < 1:
        raise ValueError(f"x_bytes={x_bytes}: the layer's input has at least 1 byte")
    names: set[str] = set()
    for i, value in enumerate(values):
        if value.name in names:
            raise ValueError(
                f"value {i}: the name {value.name!r} is already used; give each value of a layer "
                "its own name"
            )
        names.add(value.name)
        if value.num_bytes < 1 or not (value.seconds >= 0 and math.isfinite(value.seconds)):
            raise ValueError(
                f"value {value.name!r}: num_bytes={value.num_bytes}, seconds={value.seconds}: "
                "at least 1 byte, and finite seconds of at least 0, are needed"
            )
        if wrong := [operand for operand in value.operands if not 0 <= operand < i]:
            raise ValueError(
                f"value {value.name!r}: operand {wrong[0]} is not an earlier value; "
                f"earlier values are 0 to {i - 1}"
            )
