"""What one layer can do with the values that backward reads: keep, offload or recompute each, and
the choices worth having.

A block's forward makes values v, of b_v bytes, from its input x, its parameters and each other.
Backward reads all of them. Of each value one of three holds, and in the layer's backward it is then
there:

    keep        b_v bytes of the device from forward to backward
    offload     b_v bytes of host memory, stored in forward and fetched for backward
    recompute   s_v seconds of backward, from its operands

Checkmate (arXiv:1910.02653) and its successors schedule the operands of what is recomputed. Here
backward reads every value, so every operand is there, and no value is made twice: the costs of the
values add up. The input x is stored in any case, on the device or in host memory. Over the values,
and the input where it is kept, offloaded or recomputed,

    device_bytes = sum of b over kept        host_bytes = sum of b over offloaded        seconds = sum of s over recomputed
    transient_bytes = sum of b over offloaded and recomputed, on the device while the layer's own
    backward runs

Transient bytes are the sum of all less the kept ones, so an option is dominated exactly if another
one needs no more of device_bytes, host_bytes and seconds. The 2 * 3^n options of n values are met
value after value, and dominated ones are dropped after each: costs add up, so what is dominated
stays so.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_OPTIONS = 16
_MAX_FRONT = 2048
_PRICES = 32
_KEEP, _OFFLOAD, _RECOMPUTE = "kor"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A value of a block's forward that its backward reads.

    Attributes:
      name: of the value, once in a layer.
      num_bytes: on a device, at least 1.
      seconds: to make it again once its operands are there, at least 0.
      operands: indices of the earlier values that it is made from directly, beside the layer's
        input and parameters.
    """

    name: str
    num_bytes: int
    seconds: float
    operands: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerOption:
    """What a layer does with its values, and what that costs.

    Attributes:
      device_bytes: on the device from the layer's forward to its backward.
      host_bytes: in host memory for as long, which cross the link once each way.
      seconds: that backward computes again.
      transient_bytes: on the device while the layer's backward runs, beside device_bytes.
      keep: names of the values that are kept on the device.
      offload: names of those in host memory. The others are recomputed.
      input_offloaded: whether the layer's input is in host memory, and not on the device.
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
    """Return the options of a layer that no other one dominates, by falling device bytes, at most
    `max_options`.

    Of more than that, the first taken are the four corners, which are always in the result:

        nothing recomputed or offloaded     where a value takes no time to recompute, it need not be kept
        all values recomputed               the input on the device: the fewest device bytes without host memory
        all values recomputed               the input offloaded, and nothing else
        everything offloaded                but what takes no time to recompute

    Then those come that are the cheapest at some price of a device byte, a host byte and a second:
      of many layers a mixture of
    such options is as good as any, up to a layer's rounding. The others fill up. In both groups the
    next one taken is the farthest from all that were taken before, of coordinates that are shares
    of the layer's bytes and seconds.

    The front is exact while no step of the merging leaves more than 2048 options; it is thinned to
    so many where one does.

    Args:
      values: of the block, in the order of its program.
      x_bytes: of the layer's input on a device.
      max_options: at least 4.

    Raises:
      ValueError: a negative cost, a name that comes twice, an operand that is no earlier value, or
        fewer than 4 options.
    """
    if max_options < 4:
        raise ValueError(f"max_options={max_options}: at least 4, the corners of the front")
    labels = _thinned(_front(values, x_bytes), max_options)
    whole = x_bytes + sum(value.num_bytes for value in values)
    return tuple(_option(label, values, whole) for label in reversed(labels))


def layer_front(values: Sequence[Value], x_bytes: int) -> tuple[LayerOption, ...]:
    """Return all options of a layer that no other one dominates, by falling device bytes; arguments
    as of `layer_options`.
    """
    whole = x_bytes + sum(value.num_bytes for value in values)
    return tuple(_option(label, values, whole) for label in reversed(_front(values, x_bytes)))


def _front(values: Sequence[Value], x_bytes: int) -> list[_Label]:
    _check(values, x_bytes)
    front = _undominated([_Label(x_bytes, 0, 0.0, _KEEP), _Label(0, x_bytes, 0.0, _OFFLOAD)])
    for value in values:
        front = _thinned(
            _undominated([after for label in front for after in _with(label, value)]), _MAX_FRONT
        )
    return front


def _with(label: _Label, value: Value) -> tuple[_Label, _Label, _Label]:
    device, host, seconds, letters = label
    return (
        _Label(device + value.num_bytes, host, seconds, letters + _KEEP),
        _Label(device, host + value.num_bytes, seconds, letters + _OFFLOAD),
        _Label(device, host, seconds + value.seconds, letters + _RECOMPUTE),
    )


def _undominated(labels: Sequence[_Label]) -> list[_Label]:
    """Return what no other label dominates, one of equal ones, by rising device bytes.

    Labels are met by rising device bytes. The stairs are the (host bytes, seconds) met so far that
    none of them dominates: hosts rise and seconds fall along them, so the last stair of no more
    host bytes has the fewest seconds to compare with.
    """
    kept: list[_Label] = []
    hosts: list[int] = []
    seconds: list[float] = []
    for label in sorted(labels):
        at = bisect.bisect_right(hosts, label.host_bytes)
        if at and seconds[at - 1] <= label.seconds:
            continue
        first = at - 1 if at and hosts[at - 1] == label.host_bytes else at
        last = first
        while last < len(hosts) and seconds[last] >= label.seconds:
            last += 1
        hosts[first:last], seconds[first:last] = [label.host_bytes], [label.seconds]
        kept.append(label)
    return kept


def _thinned(front: list[_Label], count: int) -> list[_Label]:
    """Return at most `count` labels of a front, in their order, as `layer_options` tells."""
    if len(front) <= count:
        return front
    costs = np.array([label[:3] for label in front], float)
    shares = costs / np.maximum(costs.max(axis=0), 1e-300)
    corners = list(dict.fromkeys(min(range(len(front)), key=key) for key in _corner_keys(front)))
    cheapest = _farthest_first(shares, corners, sorted({*corners, *_cheapest(shares)}), count)
    chosen = _farthest_first(shares, cheapest, range(len(front)), count)
    return [front[i] for i in sorted(chosen)]


def _corner_keys(front: list[_Label]):
    """Yield, for each corner, what is least there, by index."""
    orders = (
        ("host_bytes", "seconds"),
        ("host_bytes", "device_bytes"),
        ("device_bytes", "host_bytes"),
        ("device_bytes", "seconds"),
    )
    for order in orders:
        yield lambda i, order=order: tuple(getattr(front[i], name) for name in order)


def _cheapest(shares: np.ndarray) -> np.ndarray:
    """Return the index of the cheapest option at each of a grid of prices; shares: [N, 3]."""
    steps = range(_PRICES + 1)
    prices = [
        (a, b, _PRICES - a - b) for a, b in itertools.product(steps, steps) if a + b <= _PRICES
    ]
    return (np.array(prices, float) @ shares.T).argmin(axis=1)


def _farthest_first(
    shares: np.ndarray, chosen: Sequence[int], others: Sequence[int], count: int
) -> list[int]:
    """Return `chosen` and, one after another, the one of `others` that is farthest from all chosen,
    until there are `count`.
    """
    result, pool = list(chosen), np.array(others)
    points = shares[pool]
    distance = np.min([np.linalg.norm(points - shares[i], axis=1) for i in result], axis=0)
    while len(result) < count and distance.max() > 0:
        at = int(distance.argmax())
        result.append(int(pool[at]))
        distance = np.minimum(distance, np.linalg.norm(points - points[at], axis=1))
    return result


def _option(label: _Label, values: Sequence[Value], whole: int) -> LayerOption:
    names = {
        letter: tuple(
            v.name for v, at in zip(values, label.letters[1:], strict=True) if at == letter
        )
        for letter in "kor"
    }
    return LayerOption(
        device_bytes=label.device_bytes,
        host_bytes=label.host_bytes,
        seconds=label.seconds,
        transient_bytes=whole - label.device_bytes,
        keep=names[_KEEP],
        offload=names[_OFFLOAD],
        input_offloaded=label.letters[0] == _OFFLOAD,
    )


def _check(values: Sequence[Value], x_bytes: int) -> None:
    if x_bytes < 1:
        raise ValueError(f"x_bytes={x_bytes}: the layer's input has at least 1 byte")
    names: set[str] = set()
    for i, value in enumerate(values):
        if value.name in names:
            raise ValueError(
                f"value {i}: the name {value.name!r} comes twice; give each value of a layer its own"
            )
        names.add(value.name)
        if value.num_bytes < 1 or not (value.seconds >= 0 and math.isfinite(value.seconds)):
            raise ValueError(
                f"value {value.name!r}: num_bytes={value.num_bytes}, seconds={value.seconds}: at least 1 byte, and finite "
                "seconds, at least 0"
            )
        if wrong := [operand for operand in value.operands if not 0 <= operand < i]:
            raise ValueError(
                f"value {value.name!r}: operand {wrong[0]} is no earlier value: they are 0 to {i - 1}"
            )
