"""Gather on use: ZeRO-3 for any traced loss, without an edit to the model.

The loss is traced once. An interpreter walks its jaxpr. A sharded parameter stays sharded, as a
`Lazy` value, through casts and layout operations until an equation combines it with data. That
equation becomes a rematerialised unit:

    unit(shards, data) = eqn(all_gather(barrier(shards, data)), data)          under jax.checkpoint

Bounding memory takes two things, and the unit has both. The barrier makes the gather wait for its
layer's input; without it, the scheduler hoists every gather to the top of the program. The
rematerialisation keeps the gathered value from becoming a residual; without it, autodiff keeps the
full model alive between forward and backward. Backward gathers again, which is the third P of
ZeRO-3's 3P elements per step (arXiv:1910.02054, section 7.2.2).

How the interpreter treats each kind of equation:

- Param-only equations (a scaled weight, a LoRA sum, weight norm) stay lazy. Casts, layout and
  elementwise equations act on the shard. The rest run inside each unit that uses them. A sum over a
  parameter (a penalty in the loss) is computed on the shard.
- A slice of a stacked parameter, at a fixed or computed index, is taken while it is sharded.
- `jit` is inlined. `scan`, `cond` and rematerialised regions are entered, so a scanned stack of
  layers `W[L, D_fsdp, F]` is sliced while sharded and gathered layer by layer.
- A rematerialised region (`jax.checkpoint`, `nnx.remat`, `nn.remat`) counts as a layer: its
  parameters are gathered when its input is available, and again when it is recomputed. A region
  that holds more than half of the model, or that keeps all expensive values
  (`zerojax.activations.keep_products`), is instead split into units, one per equation or group.
- A look-up in a table sends the gradient of its rows to the table's shards if that takes fewer
  bytes (`zerojax.gather.look_up`).
- A custom derivative is one equation: its operands are gathered for it, and its rule is kept.
- Neighbouring uses share one unit, and hence one barrier and collectives that XLA can combine, as
  long as the unit gathers at most `budget_bytes` and repeats no matrix product
  (`GatherInterpreter.group`).
- For anything else (`while_loop`, `shard_map`, a carry), parameters are gathered just before it,
  and the gather is reported.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.activations import keeps
from zerojax.gather.lazy import (
    SHARD_OPERAND,
    GatheredSources,
    Lazy,
    Move,
    Node,
    Rule,
    Shard,
    move_spec,
    reduce_shards,
    run_gathered,
    slice_layer,
    tie,
    total_bytes,
    union,
    with_arrays,
)
from zerojax.gather.look_up import is_look_up, look_up
from zerojax.jaxprs import (
    CHEAP,
    ENTERED,
    LINEAR,
    PRODUCTS,
    REDUCTIONS,
    REMAT,
    FlatJaxpr,
    Function,
    Instruction,
    Region,
    bind,
    checkpointed,
    evaluate,
    list_regions,
    read,
    rebind,
    rebind_scan,
    trace,
)
from zerojax.sharding import Spec, without_axes
from zerojax.trees import Params

Array = jax.Array


def gather_on_use(
    loss: Callable[..., Any],
    params: Params,
    *args: Any,
    stored: dict[str, Spec],
    cotangents: dict[str, Spec],
    axes: Mapping[str, tuple[str, ...]],
    rule: Rule,
) -> Any:
    """Evaluate `loss(params, *args)`, gathering each parameter where it is used.

    Args:
      loss: any traceable function.
      params: tree of shards in the compute dtype.
      *args: further arguments of `loss`, treated as data.
      stored: spec of each leaf, by `jax.tree_util.keystr`.
      cotangents: spec of each leaf's gradient, by `jax.tree_util.keystr`.
      axes: the ZeRO axes in each leaf's specs, by `jax.tree_util.keystr`; a gather removes them.
      rule: how to gather.

    Returns:
      The result of `loss`. It is differentiable with respect to `params`; gradients arrive with the
      specs in `cotangents`.
    """
    program, out_shape = trace(loss, params, *args)
    inputs: list[Any] = []
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = jax.tree_util.keystr(key_path)
        shard = Shard(path, leaf, stored[path], cotangents[path], axes[path])
        inputs.append(Lazy((shard,)))
    outs = GatherInterpreter(rule, program, inputs + jax.tree.leaves(args)).run()
    return jax.tree.unflatten(jax.tree.structure(out_shape), outs)


class GatherInterpreter:
    """An interpreter of one jaxpr. Its slots hold arrays or Lazy values.

    Attributes:
      rule: how to gather.
      program: the jaxpr.
      slots: values of the slots.
      finished: indices of the instructions that ran, or were deferred, before their turn.
      constants: slots that depend on no input.
    """

    def __init__(self, rule: Rule, program: FlatJaxpr, args: Sequence[Any]) -> None:
        """Bind `args`, arrays or Lazy values, to the inputs of `program`."""
        self.rule = rule
        self.program = program
        self.slots: dict[int, Any] = dict(zip(self.program.inputs, args, strict=True))
        self.finished: set[int] = set()
        self.constants: set[int] = set()

    def run(self) -> list[Array]:
        """Run all instructions and return the program's results, gathered."""
        for index in range(len(self.program.instructions)):
            # `group` and `unit` run some instructions early.
            if index not in self.finished:
                self.step(index)
        return [self.gather_now(self.read(ref), "returned") for ref in self.program.outputs]

    def read(self, ref: Any) -> Any:
        """Return the value of a slot or constant: an array or a Lazy."""
        return read(ref, self.slots)

    def write(self, instruction: Instruction, outs: Sequence[Any]) -> None:
        """Store the results of an instruction in its slots."""
        self.slots.update(zip(instruction.outs, outs, strict=True))

    def step(self, index: int) -> None:
        """Run the instruction at `index`, alone or together with the following instructions."""
        instruction = self.program.instructions[index]
        values = [self.read(ref) for ref in instruction.ins]
        lazies = [v for v in values if isinstance(v, Lazy)]
        name = instruction.eqn.primitive.name
        if not lazies:
            self.write(instruction, bind(instruction.eqn, values))
            # A constant (an iota, an epsilon) is not data: an equation that reads constants and
            # parameters stays param-only.
            if self.constants.issuperset(instruction.reads):
                self.constants.update(instruction.outs)
        elif self.is_param_only(instruction):
            self.defer(instruction)
        elif self.slices_shard(instruction):
            self.slice_shard(instruction)
        elif name in ENTERED["gather_on_use"]:
            self.write(instruction, self.enter(instruction.eqn, values))
        else:
            # A custom derivative is never entered, since that would lose its rule. Gathering before
            # it is expected, so it is not reported.
            if instruction.has_jaxpr and not name.startswith("custom_"):
                for lazy in lazies:
                    self.note(lazy, f"before {name}, which gather-on-use does not enter")
            self.unit(self.group(index))

    def note(self, lazy: Lazy, why: str) -> None:
        """Report that the sources of `lazy` are gathered early, and why."""
        if self.rule.remat:
            paths = ", ".join(source.path for source in lazy.sources)
            self.rule.report(f"{paths}: gathered {why}")

    def gather_now(self, value: Any, why: str) -> Any:
        """Return `value` as an array, gathering it immediately if it is lazy."""
        if not isinstance(value, Lazy):
            return value
        self.note(value, f"where it is {why}")
        arrays = {source: self.rule.gather(source) for source in value.sources}
        return GatheredSources(arrays).value(value)

    def is_param_only(self, instruction: Instruction) -> bool:
        """Return whether all non-constant operands of an instruction are Lazy values."""
        name = instruction.eqn.primitive.name
        # A postponed equation runs once in each unit that uses it. An effect would be repeated as
        # often.
        if instruction.eqn.effects or (instruction.has_jaxpr and not name.startswith("custom_")):
            return False
        slots = [slot for slot in instruction.reads if slot not in self.constants]
        return bool(slots) and all(isinstance(self.slots.get(slot), Lazy) for slot in slots)

    def defer(self, instruction: Instruction) -> None:
        """Keep a param-only equation lazy.

        It becomes a move of the shard, or is reduced on the shard, or is postponed to the units
        that use it.
        """
        eqn = instruction.eqn
        operands = tuple(self.read(ref) for ref in instruction.ins)
        lazies = list(dict.fromkeys(o for o in operands if isinstance(o, Lazy)))
        # Only an equation with one source and otherwise scalars has a single shard on which it can
        # run.
        if len(lazies) == 1 and lazies[0].node is None:
            has_scalars = all(jnp.ndim(o) == 0 for o in operands if o is not lazies[0])
            if has_scalars and self.move(instruction, operands, lazies[0]):
                return
        # Postponed: each unit that uses it recomputes it from gathered values.
        node = Node(eqn, operands)
        results = [Lazy(union(lazies), node, i) for i in range(len(instruction.outs))]
        # If the result is small enough to be kept, no unit gathers the sources for it.
        if len(results) == 1 and self.shrinks(eqn, lazies):
            results = [reduce_shards(results[0])]
        self.write(instruction, results)

    def move(self, instruction: Instruction, operands: tuple[Any, ...], lazy: Lazy) -> bool:
        """Append an equation to its source's moves and return True if it acts shard by shard."""
        eqn = instruction.eqn
        source = lazy.sources[0]
        position = operands.index(lazy)
        stored = move_spec(eqn, source.stored, position)
        cotangent = move_spec(eqn, source.cotangent, position)
        if stored is None or cotangent is None or len(instruction.outs) != 1:
            return False
        move_operands = tuple(SHARD_OPERAND if o is lazy else o for o in operands)
        moves = (*source.moves, Move(eqn, move_operands, stored, cotangent))
        moved_source = dataclasses.replace(source, moves=moves)
        self.write(instruction, [Lazy((moved_source,))])
        return True

    def shrinks(self, eqn: jex.JaxprEqn, lazies: Sequence[Lazy]) -> bool:
        """Return whether a param-only result is small enough to keep instead of recompute.

        It is if its bytes are at most an eighth of its gathered sources' bytes.
        """
        if eqn.primitive.name not in REDUCTIONS and eqn.primitive.name != "dot_general":
            return False
        out: Any = eqn.outvars[0].aval
        return 8 * out.size * out.dtype.itemsize <= total_bytes(union(lazies))

    def slices_shard(self, instruction: Instruction) -> bool:
        """Return whether an equation slices unsharded dims of a shard at a computed index."""
        if instruction.eqn.primitive.name != "dynamic_slice":
            return False
        operand = instruction.ins[0]
        lazy = self.slots.get(operand) if isinstance(operand, int) else None
        if not isinstance(lazy, Lazy) or lazy.node is not None:
            return False
        source = lazy.sources[0]
        specs = (source.stored, source.cotangent)
        return all(move_spec(instruction.eqn, spec) is not None for spec in specs)

    def slice_shard(self, instruction: Instruction) -> None:
        """Take a slice of a stacked parameter while it is sharded."""
        lazy, *indices = [self.read(ref) for ref in instruction.ins]
        indices = [self.gather_now(index, "an index") for index in indices]
        self.move(instruction, (lazy, *indices), lazy)

    def group(self, first: int) -> list[int]:
        """Return the indices of the equations that share a unit with the use at `first`.

        A group holds cheap equations and at most one matrix product. After the product it holds
        only linear equations, whose derivatives do not need the product's result, so backward
        repeats nothing expensive. A group ends with a use of a parameter, and gathers at most the
        budget.
        """
        instructions = self.program.instructions
        group = [first]
        num_to_last_use = 1
        sources = dict.fromkeys(self.list_sources(instructions[first]))
        has_product = instructions[first].eqn.primitive.name in PRODUCTS
        # Nothing is known about such an equation (a custom derivative, a kernel), so it does not
        # share its recomputation with other equations.
        if not has_product and instructions[first].eqn.primitive.name not in CHEAP:
            return self.pair_derivatives(first)
        for index in range(first + 1, len(instructions)):
            instruction = instructions[index]
            name = instruction.eqn.primitive.name
            if self.is_param_only(instruction):
                self.defer(instruction)
                self.finished.add(index)
                continue
            new_sources = self.list_sources(instruction)
            # Left to `step`, which slices the shard. Inside a unit the full stack would be
            # gathered.
            if self.slices_shard(instruction):
                break
            joining = LINEAR if has_product else CHEAP | PRODUCTS
            if instruction.eqn.effects or name not in joining:
                break
            if new_sources and total_bytes([*sources, *new_sources]) > self.rule.budget_bytes:
                break
            has_product = has_product or name in PRODUCTS
            group.append(index)
            if new_sources:
                sources.update(dict.fromkeys(new_sources))
                num_to_last_use = len(group)
        return group[:num_to_last_use]

    def pair_derivatives(self, first: int) -> list[int]:
        """Return the indices of two custom derivatives that must share one unit, and those between.

        The second one reads the result and the parameter of the first one, at index `first`. If
        there is no such second one, the result is `[first]`.

        Weights are quantized to 8-bit floats in this way (flax.linen.fp8_ops). The product reads
        the quantized weight in forward and the weight in backward. No cotangent reaches the
        quantized weight, yet the rule that computed it returns the new scale as a gradient. JAX
        skips a rule inside a checkpoint if no cotangent reaches the checkpoint's results, so both
        equations share one checkpoint.
        """
        instructions = self.program.instructions
        if not instructions[first].eqn.primitive.name.startswith("custom_vjp"):
            return [first]
        group = [first]
        first_results = set(instructions[first].outs)
        first_paths = {source.path for source in self.list_sources(instructions[first])}
        for index in range(first + 1, len(instructions)):
            instruction = instructions[index]
            name = instruction.eqn.primitive.name
            is_derivative = name.startswith("custom_vjp")
            if instruction.eqn.effects or not (is_derivative or name in CHEAP):
                break
            if self.is_param_only(instruction):
                self.defer(instruction)
                self.finished.add(index)
                continue
            group.append(index)
            paths = {source.path for source in self.list_sources(instruction)}
            if not paths:
                continue
            reads_first = not first_results.isdisjoint(instruction.reads)
            if is_derivative and reads_first and paths <= first_paths:
                return group
            break  # another parameter gets its own unit
        return [first]

    def list_sources(self, instruction: Instruction) -> tuple[Shard, ...]:
        """Return the distinct sources that an instruction reads."""
        values = [self.slots.get(slot) for slot in instruction.reads]
        return union([v for v in values if isinstance(v, Lazy)])

    def find_table(self, instruction: Instruction) -> Shard | None:
        """Return the sharded table in which an equation looks up rows, or None."""
        lazy = self.slots.get(instruction.reads[0]) if instruction.reads else None
        if not isinstance(lazy, Lazy) or lazy.node is not None or not is_look_up(instruction.eqn):
            return None
        source = lazy.sources[0]
        # A replicated table's gradient is reduced unsharded, so no rows are sent.
        if without_axes(source.cotangent, *source.axes) != source.cotangent:
            return source
        return None

    def unit(self, group: list[int]) -> None:
        """Run the equations of `group` as one rematerialised unit over the parameters they use."""
        instructions = [self.program.instructions[index] for index in group]
        inner_slots = {out for i in instructions for out in i.outs}
        # The group's inputs: lazy values, whose sources the unit gathers, and data.
        lazies: dict[int, Lazy] = {}
        data: dict[int, Any] = {}
        for instruction in instructions:
            for slot in instruction.reads:
                if slot in inner_slots:
                    continue
                value = self.slots[slot]
                if isinstance(value, Lazy):
                    lazies[slot] = value
                else:
                    data[slot] = value
        # A value that is not read after the unit is not one of its results, so it is not kept for
        # backward either.
        results = [out for out in inner_slots if self.program.last_read.get(out, -1) > group[-1]]

        def equations(sources: GatheredSources, values: Sequence[Any]) -> list[Any]:
            env = {slot: sources.value(lazy) for slot, lazy in lazies.items()}
            env.update(zip(data, values, strict=True))
            for i in instructions:
                self.evaluate_gathered(i, env)
            return [env[out] for out in results]

        sources = union(list(lazies.values()))
        num_bytes = total_bytes(sources)
        if num_bytes > self.rule.region_bytes:
            for lazy in lazies.values():
                self.note(lazy, f"in one equation, {num_bytes} bytes at the same time")
        outs = run_gathered(self.rule, equations, sources, list(data.values()))
        self.slots.update(zip(results, outs, strict=True))
        self.finished.update(group)

    def evaluate_gathered(self, instruction: Instruction, env: dict[int, Any]) -> None:
        """Run an instruction on gathered values, reading and writing `env`.

        A look-up sends the gradient of its rows to the table's shards.
        """
        table_source = self.find_table(instruction)
        if table_source is None:
            evaluate([instruction], env)
            return
        table, ids = (read(ref, env) for ref in instruction.ins)
        rows = look_up(
            instruction.eqn,
            table,
            ids,
            table_source.cotangent,
            self.rule.mesh,
            table_source.axes,
        )
        env[instruction.outs[0]] = rows

    # --- control flow --------------------------------------------------------------------------

    def enter(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Interpret the jaxprs of an equation that has Lazy operands."""
        if eqn.primitive.name == "scan":
            return self.scan(eqn, values)
        if eqn.primitive.name == REMAT:
            return self.region(eqn, values)
        # Each branch gathers the parameters that it uses.
        index, *operands = values
        index = self.gather_now(index, "a cond's predicate")
        branches = [self.build_region_function(region, operands) for region in list_regions(eqn)]
        return rebind(eqn, branches, [index, *_data(operands)])

    def build_region_function(self, region: Region, operands: Sequence[Any]) -> Function:
        """Return a function of the data among `operands` that interprets a region.

        It closes over the Lazy operands.
        """

        def run(data: Sequence[Any]) -> list[Any]:
            values = _replace_data(operands, data)
            return GatherInterpreter(self.rule, region.flatten(), values).run()

        return run

    def scan(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Enter a scan; constants stay sharded, and stacked parameters are sliced while sharded."""
        (region,) = list_regions(eqn)
        consts, carry, xs = region.split(values)
        # The body replaces a carry, so a carry cannot stay a shard.
        carry = [self.gather_now(v, "a scan's carry") for v in carry]
        stacks = [self.stack(v) for v in xs]

        def body(values: Sequence[Any]) -> list[Any]:
            consts, carry, slices = region.split(values)
            pairs = zip(stacks, slices, strict=True)
            layers = [slice_layer(stack, value) for stack, value in pairs]
            # Each unit of the body gathers the lazy constants that it uses.
            operands = [*consts, *carry, *layers]
            return GatherInterpreter(self.rule, region.flatten(), operands).run()

        arrays = [v.sources[0].moved() if isinstance(v, Lazy) else v for v in stacks]
        return rebind_scan(eqn, body, [*consts, *carry, *arrays])

    def stack(self, value: Any) -> Any:
        """Return a scanned operand, still lazy if its shards can be sliced."""
        if not isinstance(value, Lazy):
            return value
        source = value.sources[0]
        # An iteration takes one index of dim 0. If dim 0 is sharded, only some devices have the
        # slice.
        if value.node is None and not source.stored[0] and not source.cotangent[0]:
            return value
        return self.gather_now(value, "scanned over a dim that is sharded or computed")

    def region(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Enter a rematerialised region, whose gathers wait for its input.

        A region with most of the model's parameters runs unit by unit.
        """
        (region,) = list_regions(eqn)
        sources = union([v for v in values if isinstance(v, Lazy)])
        # A region this large would hold most of the model unsharded if it were gathered at its top.
        # A region that keeps all expensive values is not a recomputed layer, and may be the full
        # model. In both cases its equations become units.
        is_large = total_bytes(sources) > self.rule.region_bytes
        if self.rule.remat and (eqn.params["policy"] is keeps or is_large):
            run_units = self.build_region_function(region, values)
            return checkpointed(eqn, run_units, _is_gather)(_data(values))

        # The region itself is repeated in backward.
        rule = dataclasses.replace(self.rule, remat=False)

        def run(shards: list[Array], data: list[Any]) -> list[Any]:
            if self.rule.remat:
                shards = tie(shards, data)
            inputs = with_arrays(sources, shards)
            # Inside, values start from sources. Values computed from sources outside are computed
            # here from gathered sources.
            postponed = union([v for v in values if isinstance(v, Lazy) and v.node is not None])
            arrays = {source: self.rule.gather(inputs[source]) for source in postponed}
            gathered_sources = GatheredSources(arrays)

            operands: list[Any] = []
            for value in _replace_data(values, data):
                if not isinstance(value, Lazy):
                    operands.append(value)
                elif value.node is None:
                    operands.append(Lazy((inputs[value.sources[0]],)))
                else:
                    operands.append(gathered_sources.value(value))
            return GatherInterpreter(rule, region.flatten(), operands).run()

        shards = [source.value for source in sources]
        return checkpointed(eqn, run, _is_gather)(shards, _data(values))


def _data(values: Sequence[Any]) -> list[Any]:
    return [v for v in values if not isinstance(v, Lazy)]


def _replace_data(operands: Sequence[Any], data: Sequence[Any]) -> list[Any]:
    """Return operands with the arrays among them replaced by `data`, in order."""
    arrays = iter(data)
    return [v if isinstance(v, Lazy) else next(arrays) for v in operands]


def _is_gather(name: str, params: dict[str, Any]) -> bool:
    """Return whether an equation may be part of a gather, which a policy would save unsharded.

    A gather appears as its constraints where it is differentiated, and as one call where it is not
    (behind a stop_gradient).
    """
    return name in ("sharding_constraint", "custom_jvp_call", "optimization_barrier")
