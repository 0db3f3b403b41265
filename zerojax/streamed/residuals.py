"""The residuals of one layer: which values forward saves and which ones backward recomputes.

This module also gives the layer's derivative from the residuals. `zerojax.streamed.activations`
decides where the saved values are stored until backward.

`zerojax.streamed.traced_block` defines how forward returns residuals and backward reads them; for
"everything" it is `zerojax.streamed.linearized`. `zerojax.activations` decides which values are
residuals. In every mode, values that the model marks by `jax.ad_checkpoint.checkpoint_name` and the
user names are residuals too. Values without a mark have a number: among the values that "save"
keeps, in the order of the block's program, the first is "#0". The program is the same in every mode
and tier, and so are the numbers. A value named by its number is kept like a marked one.

With "save", forward runs an equation with its own derivative rule, such as a fused attention
kernel, once, and the values that its rule saves are residuals. With "selective" this applies to
equations that send data to other devices, such as attention over `context`: repeating them would
send it again. Random masks agree in both runs
since keys are functions of (step, layer).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.activations import (
    SplitVjp,
    attention_inner,
    candidates,
    depending,
    describe,
    exchanges,
    open_equations,
)
from zerojax.config import parse_name_number
from zerojax.grads import Derivative
from zerojax.jaxprs import FlatJaxpr, flatten
from zerojax.models import Given, floating
from zerojax.streamed.linearized import linearized
from zerojax.streamed.traced_block import Block, TracedBlock, list_marked_names
from zerojax.tiling import find_loops, marked, parse
from zerojax.trees import Params


def plan_layer(
    block: Block,
    params: Params,
    x: Any,
    key: Any,
    given: Given,
    mode: str,
    saved: Sequence[str],
    offloaded: Sequence[str],
    tiled: bool = False,
    frozen: Sequence[bool] = (),
    of_context: bool = False,
    transform: Callable[[Derivative], Derivative] = lambda derivative: derivative,
    numbers: bool = True,
) -> TracedBlock:
    """Trace a block and choose its residuals.

    Args:
      block: the block of the layer.
      params: abstract parameters of one layer.
      x: abstract activations.
      key: abstract random key, or None.
      given: abstract other inputs of the block.
      mode: one of MODES.
      saved: names and numbers of values to keep on the device.
      offloaded: names and numbers of values to keep in host memory.
      tiled: whether loops over tiles stay equations (`zerojax.tiling.loops`).
      frozen: for each parameter leaf, whether it is frozen; empty if none is.
      of_context: whether to derive with respect to the context, too.
      transform: transformation of the derivative.
      numbers: whether values have numbers; they do if the block's program is the same in every
        mode.
    """
    args = (params, x, key, given)
    trace = _Trace(block, args, tiled, frozen, of_context, transform, numbers)
    if mode == "everything":
        return linearized(trace.read_by_backward({}, (), trace.closed), block, args, offloaded)
    # Values that the user names are kept in every mode; the mode adds its own.
    named = trace.find_named([*saved, *offloaded])
    chosen = trace.of_mode(mode) | {slot: trace.avals[slot] for slot in named}
    to_host = {slot for slot, name in named.items() if name in offloaded}
    if mode == "save" or not named.keys() <= trace.slots:
        opened = trace.opened
    else:
        opened = trace.opened_exchanges if mode == "selective" else trace.closed
    return trace.read_by_backward(chosen, to_host, opened)


_Opened = tuple[FlatJaxpr, Mapping[int, SplitVjp]]
"""A program in which some equations are taken apart, and these, by the slot of their first result.
"""


class _Trace:
    """A traced block whose residuals are to be chosen.

    Attributes:
      program: the flattened program.
      slots: slots that its equations compute.
      names: name and aval of each slot that the block marks.
    """

    def __init__(
        self,
        block: Block,
        args: tuple[Any, Any, Any, Given],
        tiled: bool,
        frozen: Sequence[bool],
        of_context: bool,
        transform: Callable[[Derivative], Derivative],
        has_numbers: bool,
    ) -> None:
        """Trace a block; the arguments are as in `plan_layer`."""
        closed, out = jax.make_jaxpr(block, return_shape=True)(*args)
        self.args = args
        self.of_context = of_context
        self.transform = transform
        self.has_numbers = has_numbers
        self.program = flatten(
            closed.jaxpr, closed.consts, lambda eqn: tiled and parse(eqn) is not None
        )
        self.structures = (jax.tree.structure(out[0]), jax.tree.structure(out[1]))
        self.loops = find_loops(self.program) if tiled else {}
        self.names = list_marked_names(self.program)
        self.slots = {slot for i in self.program.instructions for slot in i.outs}
        num_params = len(jax.tree.leaves(args[0]))
        self.frozen = tuple(frozen) or (False,) * num_params
        self._data = self.program.inputs[num_params:]  # slots of x, key and given

    @property
    def closed(self) -> _Opened:
        """The program as it is."""
        return self.program, {}

    @functools.cached_property
    def opened(self) -> _Opened:
        """The program with equations taken apart."""
        return self._opened[:2]

    @functools.cached_property
    def opened_exchanges(self) -> _Opened:
        """The program with only those equations taken apart that send data to other devices."""
        sending = {i.outs[0] for i in self.program.instructions if i.outs and exchanges(i.eqn)}
        if not sending:
            return self.closed
        program, apart = self.opened
        instructions = list(self.program.instructions)
        for n, opened in enumerate(program.instructions):
            if opened.outs and opened.outs[0] in sending:
                instructions[n] = opened
        chosen = {slot: split_vjp for slot, split_vjp in apart.items() if slot in sending}
        return dataclasses.replace(self.program, instructions=tuple(instructions)), chosen

    @functools.cached_property
    def _opened(self) -> tuple[FlatJaxpr, dict[int, SplitVjp], dict[int, Any]]:
        return open_equations(self.program, self._data, self.loops)

    @functools.cached_property
    def _costly(self) -> dict[int, Any]:
        return candidates(self.program, depending(self.program, self._data))

    @functools.cached_property
    def avals(self) -> dict[int, Any]:
        """Avals of all values that may be kept, by slot.

        These are the expensive values, the values kept for equations taken apart, and the marked
        values.
        """
        marked_avals = {slot: aval for slot, (_, aval) in self.names.items()}
        return self._costly | self._opened[2] | marked_avals

    def numbered(self) -> tuple[int, ...]:
        """Return the slots that "save" keeps if nothing is named, in program order."""
        return self._numbered if self.has_numbers else ()

    @functools.cached_property
    def _numbered(self) -> tuple[int, ...]:
        kept = {*self.read_by_backward(self.of_mode("save"), set(), self.opened).residuals}
        return tuple(slot for i in self.opened[0].instructions for slot in i.outs if slot in kept)

    def find_named(self, user_names: Sequence[str]) -> dict[int, str]:
        """Return the slots that the user names, by mark or by number, each with that name."""
        named = {slot: name for slot, (name, _) in self.names.items() if name in user_names}
        for name in user_names:
            number = parse_name_number(name)
            if number is not None and number < len(self.numbered()):
                named[self.numbered()[number]] = name
        return named

    def of_mode(self, mode: str) -> dict[int, Any]:
        """Return the slots that a mode may keep, with their avals."""
        if mode == "remat":
            return {}
        if mode == "save":
            return self._costly | self._opened[2]
        inner = attention_inner(self.program, self._data[: len(jax.tree.leaves(self.args[1]))])
        chosen = {
            slot: aval
            for slot, aval in self._costly.items()
            if slot not in inner or slot in self.names
        }
        program, apart = self.opened_exchanges
        for i in program.instructions:
            if i.outs and i.outs[0] in apart:
                chosen.update({slot: self.avals[slot] for slot in i.outs})
        return chosen

    def read_by_backward(
        self, chosen: Mapping[int, Any], to_host: Collection[int], opened: _Opened
    ) -> TracedBlock:
        """Return the block whose residuals are the chosen slots that its derivative reads.

        Args:
          chosen: candidate slots, with avals.
          to_host: the candidate slots that are kept in host memory.
          opened: the program, with some equations taken apart.
        """
        program, apart = opened
        equations = dict[int, str]()
        for i in program.instructions:
            for slot in i.outs:
                if slot in chosen:
                    equations[slot] = describe(i.eqn)

        def build_block(slots: Sequence[int]) -> TracedBlock:
            slots = tuple(sorted(slots))
            return TracedBlock(
                program=program,
                structures=self.structures,
                residuals=slots,
                offloaded=tuple(slot in to_host for slot in slots),
                shapes=tuple(
                    jax.ShapeDtypeStruct(chosen[slot].shape, chosen[slot].dtype) for slot in slots
                ),
                loops=self.loops,
                apart=apart,
                frozen=self.frozen,
                of_context=self.of_context,
                marked=frozenset(name for name, _ in self.names.values()),
                transform=self.transform,
                sources=tuple(
                    self.names[slot][0] if slot in self.names else equations[slot] for slot in slots
                ),
                numbered=self.numbered,
            )

        # The derivative is traced once with all candidates in place. Candidates that it does not
        # read are not saved.
        with_all = build_block(list(chosen))
        read = _read_by_backward(with_all, *self.args)
        return build_block(
            [slot for slot, is_read in zip(with_all.residuals, read, strict=True) if is_read]
        )


def check_names(
    blocks: Sequence[TracedBlock], saved: Sequence[str], offloaded: Sequence[str], where: str = ""
) -> None:
    """Raise ValueError for unknown names or numbers of values to keep.

    A name is unknown if no block of a model's stacks marks it, a number if no value has it.

    Args:
      blocks: the blocks of the layers.
      saved: names and numbers of values to keep on the device.
      offloaded: names and numbers of values to keep in host memory.
      where: which layers these are, such as " of layers 0-7".

    Raises:
      ValueError: a name or number is unknown.
    """
    marked = frozenset[str]().union(*(block.marked for block in blocks))
    numbers = dict[str, int]()
    for name in (*saved, *offloaded):
        number = parse_name_number(name)
        if number is not None:
            numbers[name] = number
    if missing := sorted({*saved, *offloaded} - marked - numbers.keys()):
        raise ValueError(
            f"saved_names and offloaded_names{where} name {missing}, which the block does not "
            f"mark; it marks {sorted(marked) or 'none'} "
            "(jax.ad_checkpoint.checkpoint_name(value, name))"
        )
    count = max((len(block.numbered()) for block in blocks), default=0) if numbers else 0
    if unknown := sorted(name for name, number in numbers.items() if number >= count):
        known = f"{count} values, #0 to #{count - 1}" if count else "no value"
        raise ValueError(
            f"saved_names and offloaded_names{where} name {unknown}, but in the block "
            f"activations='save' keeps {known}: program.kept(batch) lists them"
        )


def derivative_jaxpr(
    layer: TracedBlock, params: Params, x: Any, key: Any, given: Given
) -> jex.ClosedJaxpr:
    """Return `layer.backward` traced over abstract arguments.

    Its inputs are (params, x, key, given, residuals, dy, d_added).

    Args:
      layer: the traced block.
      params: abstract parameters of one layer.
      x: abstract input of the layer.
      key: abstract random key, or None.
      given: abstract other inputs of the block.
    """
    # x stands for dy too, since a block's output has the shape of its input.
    d_added = jax.ShapeDtypeStruct((), jnp.float32) if layer.adds else None
    return jax.make_jaxpr(layer.backward)(
        params, x, key, given, list(layer.shapes), floating(x), d_added
    )


def _read_by_backward(
    layer: TracedBlock, params: Params, x: Any, key: Any, given: Given
) -> list[bool]:
    """Return, for each residual, whether the derivative reads it."""
    closed = derivative_jaxpr(layer, params, x, key, given)
    program = flatten(closed.jaxpr, closed.consts, lambda eqn: marked(eqn) is not None)
    live = program.live(program.outputs, is_root=lambda i: bool(i.eqn.effects))
    read_slots = {ref for ref in program.outputs if isinstance(ref, int)}
    for i in live:
        read_slots.update(i.reads)
    first = len(jax.tree.leaves((params, x, key, given)))
    return [slot in read_slots for slot in program.inputs[first : first + len(layer.residuals)]]
