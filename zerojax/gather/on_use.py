"""Gather on use: ZeRO-3 for any traced loss, without an edit to the model.

The loss is traced once. An interpreter walks its jaxpr, and a sharded parameter stays sharded, as a
`Lazy` value, through casts and layout operations until an equation combines it with data. That
equation becomes a rematerialised unit

    unit(shards, data) = eqn(all_gather(barrier(shards, data)), data)          under jax.checkpoint

Two things bound memory, and the unit has both. The barrier makes the gather wait for its layer's
input, else the scheduler hoists every gather to the top of the program. The rematerialisation keeps
the gathered value from being a residual, else autodiff keeps the whole model alive between forward
and backward; backward gathers again, which is the third P of ZeRO-3's 3P elements a step
(arXiv:1910.02054, section 7.2.2).

What the interpreter knows:

- param-only equations (a scaled weight, a LoRA sum, weight norm) stay lazy: casts, layout and
  elementwise ones act on the shard, the rest run inside each unit that uses them; a sum over a
  parameter (a penalty in the loss) is taken on the shard;
- a slice of a stacked parameter, at a fixed or computed index, is taken while it is sharded;
- `jit` is inlined; `scan`, `cond` and rematerialised regions are entered, so a stack of layers
  `W[L, D_fsdp, F]` that is scanned is sliced while sharded and gathered layer by layer;
- a rematerialised region (`jax.checkpoint`, `nnx.remat`, `nn.remat`) is a layer: its parameters are
  gathered when its input is there, and again in its recomputation, unless it holds more than half
  of the model, or keeps all that costs (`zerojax.activations.keep_products`): then its equations
  are units;
- a look-up in a table sends the gradient of its rows to the table's shards, where these are fewer
  (`zerojax.gather.look_up`);
- a custom derivative is one equation: its operands are gathered for it, its rule is kept;
- neighbouring uses share one unit, hence one barrier and collectives that XLA can combine, while
  the unit gathers no more than `budget_bytes` and repeats no matrix product
  (`GatherInterpreter.group`);
- what it does not know (`while_loop`, `shard_map`, a carry) gets its parameters gathered just
  before, and is reported.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.activations import keeps
from zerojax.gather.lazy import (
    HERE,
    Lazy,
    Move,
    Node,
    Rule,
    Shard,
    Whole,
    gathered,
    move_spec,
    tie,
    total_bytes,
    union,
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
    read,
    rebind,
    rebind_scan,
    regions_of,
    trace,
)
from zerojax.sharding import Spec, without_axis

Array = jax.Array


def gather_on_use(
    loss: Callable[..., Any],
    params: Any,
    *args: Any,
    stored: dict[str, Spec],
    cotangents: dict[str, Spec],
    rule: Rule,
) -> Any:
    """Evaluate `loss(params, *args)`, gathering each parameter where it is used.

    Args:
      loss: any traceable function.
      params: tree of shards in the compute dtype.
      *args: further arguments, which are data.
      stored: spec of each leaf, by `jax.tree_util.keystr`.
      cotangents: spec of each leaf's gradient.
      rule: how to gather.

    Returns:
      What `loss` returns. Differentiable with respect to `params`; gradients arrive with the specs
      in `cotangents`.
    """
    program, out_shape = trace(loss, params, *args)
    inputs: list[Any] = []
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = jax.tree_util.keystr(key_path)
        inputs.append(Lazy((Shard(path, leaf, stored[path], cotangents[path]),)))
    outs = GatherInterpreter(rule, program, inputs + jax.tree.leaves(args)).run()
    return jax.tree.unflatten(jax.tree.structure(out_shape), outs)


class GatherInterpreter:
    """The interpreter for one jaxpr. Slots hold arrays, or Lazy values."""

    def __init__(self, rule: Rule, program: FlatJaxpr, args: Sequence[Any]) -> None:
        self.rule, self.program = rule, program
        self.slots: dict[int, Any] = dict(zip(self.program.inputs, args, strict=True))
        self.done: set[int] = set()
        self.constants: set[int] = set()  # slots that depend on nothing

    def run(self) -> list[Array]:
        index = 0
        while index < len(self.program.instructions):
            # `group` and `unit` do some instructions ahead of their turn.
            if index not in self.done:
                self.step(index)
            index += 1
        return [self.gather_now(self.read(ref), "returned") for ref in self.program.outputs]

    def read(self, ref: Any) -> Any:
        return read(ref, self.slots)

    def write(self, instruction: Instruction, outs: Sequence[Any]) -> None:
        self.slots.update(zip(instruction.outs, outs, strict=True))

    def step(self, index: int) -> None:
        instruction = self.program.instructions[index]
        values = [self.read(ref) for ref in instruction.ins]
        if not any(isinstance(v, Lazy) for v in values):
            self.write(instruction, bind(instruction.eqn, values))
            # Such a value (an iota, an epsilon) is no data: an equation that reads it beside
            # parameters stays param-only.
            if self.constants.issuperset(instruction.reads):
                self.constants.update(instruction.outs)
        elif self.is_param_only(instruction):
            self.defer(instruction)
        elif self.slices_shard(instruction):
            self.slice_shard(instruction)
        elif instruction.eqn.primitive.name in ENTERED["gather_on_use"]:
            self.write(instruction, self.enter(instruction.eqn, values))
        else:
            # A custom derivative is never entered, since that would lose its rule; it is no reason
            # for a report.
            if instruction.has_jaxpr and not instruction.eqn.primitive.name.startswith("custom_"):
                for z in values:
                    if isinstance(z, Lazy):
                        self.note(
                            z,
                            f"before {instruction.eqn.primitive.name}, which gather-on-use does not enter",
                        )
            self.unit(self.group(index))

    def note(self, lazy: Lazy, why: str) -> None:
        if self.rule.remat:
            self.rule.report(f"{', '.join(s.path for s in lazy.sources)}: gathered {why}")

    def gather_now(self, value: Any, why: str) -> Any:
        """Return `value` as an array, gathering it here and now if it is lazy."""
        if not isinstance(value, Lazy):
            return value
        self.note(value, f"where it is {why}")
        return Whole({s: self.rule.gather(s) for s in value.sources}).value(value)

    def is_param_only(self, instruction: Instruction) -> bool:
        name = instruction.eqn.primitive.name
        # A postponed equation runs once in each unit that uses it, and an effect would happen as
        # often.
        if instruction.eqn.effects or (instruction.has_jaxpr and not name.startswith("custom_")):
            return False
        slots = [slot for slot in instruction.reads if slot not in self.constants]
        return bool(slots) and all(isinstance(self.slots.get(slot), Lazy) for slot in slots)

    def defer(self, instruction: Instruction) -> None:
        """Keep a param-only equation lazy: moved to the shard, reduced on the shard, or postponed
        to the units that use it.
        """
        eqn, operands = instruction.eqn, tuple(self.read(ref) for ref in instruction.ins)
        lazies = list(dict.fromkeys(o for o in operands if isinstance(o, Lazy)))
        # Only an equation of one source and scalars has a single shard on which it can run.
        if len(lazies) == 1 and lazies[0].node is None:
            others = [o for o in operands if o is not lazies[0]]
            if all(jnp.ndim(o) == 0 for o in others) and self.move(
                instruction, operands, lazies[0]
            ):
                return
        # Postponed: each unit that uses it computes it anew, from whole values.
        node = Node(eqn, operands)
        results = [Lazy(union(lazies), node, i) for i in range(len(instruction.outs))]
        # Small enough to be kept: then no unit gathers the sources for it.
        if len(results) == 1 and self.shrinks(eqn, lazies):
            results = [_reduced(results[0])]
        self.write(instruction, results)

    def move(self, instruction: Instruction, operands: tuple[Any, ...], lazy: Lazy) -> bool:
        """Append an equation to its one source's moves, if it acts shard by shard."""
        eqn, source, here = instruction.eqn, lazy.sources[0], operands.index(lazy)
        stored, cotangent = (
            move_spec(eqn, source.stored, here),
            move_spec(eqn, source.cotangent, here),
        )
        if stored is None or cotangent is None or len(instruction.outs) != 1:
            return False
        marked = tuple(HERE if o is lazy else o for o in operands)
        moves = (*source.moves, Move(eqn, marked, stored, cotangent))
        self.write(instruction, [Lazy((dataclasses.replace(source, moves=moves),))])
        return True

    def shrinks(self, eqn: jex.JaxprEqn, lazies: Sequence[Lazy]) -> bool:
        """Tell whether a param-only result is so small, beside its sources, that it is better kept
        than computed again.
        """
        if eqn.primitive.name not in REDUCTIONS and eqn.primitive.name != "dot_general":
            return False
        out: Any = eqn.outvars[0].aval
        return 8 * out.size * out.dtype.itemsize <= total_bytes(union(lazies))

    def slices_shard(self, instruction: Instruction) -> bool:
        """Tell whether an equation takes a slice, at an index that is data, of dims that are not
        sharded.
        """
        operand = instruction.ins[0] if instruction.eqn.primitive.name == "dynamic_slice" else None
        lazy = self.slots.get(operand) if isinstance(operand, int) else None
        if not isinstance(lazy, Lazy) or lazy.node is not None:
            return False
        source = lazy.sources[0]
        return all(
            move_spec(instruction.eqn, spec) is not None
            for spec in (source.stored, source.cotangent)
        )

    def slice_shard(self, instruction: Instruction) -> None:
        """Take a slice of a stacked parameter while it is sharded."""
        lazy, *index = [self.read(ref) for ref in instruction.ins]
        self.move(instruction, (lazy, *(self.gather_now(i, "an index") for i in index)), lazy)

    def group(self, first: int) -> list[int]:
        """Return the indices of the equations that share a unit with the use at `first`.

        A group holds cheap equations and at most one product; after the product only linear
        equations, whose derivatives do not need its result, so that backward repeats nothing that
        costs. It ends with a use, and gathers at most the budget.
        """
        instructions = self.program.instructions
        group, last_use = [first], 1
        sources = dict.fromkeys(self.sources_of(instructions[first]))
        after_product = instructions[first].eqn.primitive.name in PRODUCTS
        # Nothing is known of such an equation (a custom derivative, a kernel), so it shares its
        # recomputation with no other.
        if not after_product and instructions[first].eqn.primitive.name not in CHEAP:
            return self.derivatives(first)
        for index in range(first + 1, len(instructions)):
            instruction = instructions[index]
            name = instruction.eqn.primitive.name
            if self.is_param_only(instruction):
                self.defer(instruction)
                self.done.add(index)
                continue
            new_sources = self.sources_of(instruction)
            # Left to `step`, which slices the shard. Inside a unit the whole stack would be
            # gathered.
            if self.slices_shard(instruction):
                break
            if instruction.eqn.effects or (
                name not in LINEAR if after_product else name not in CHEAP | PRODUCTS
            ):
                break
            if new_sources and total_bytes([*sources, *new_sources]) > self.rule.budget_bytes:
                break
            after_product = after_product or name in PRODUCTS
            group.append(index)
            if new_sources:
                sources.update(dict.fromkeys(new_sources))
                last_use = len(group)
        return group[:last_use]

    def derivatives(self, first: int) -> list[int]:
        """Return the index of a custom derivative, and those up to another one that reads its
        result and its parameter.

        That is how weights are quantized to 8-bit floats (flax.linen.fp8_ops): the product reads
        the quantized weight, and in backward the weight. No cotangent reaches the quantized one,
        and the rule that made it returns the new scale as a gradient all the same. JAX runs no rule
        of a checkpoint to whose results no cotangent comes, so both share one.
        """
        instructions = self.program.instructions
        if not instructions[first].eqn.primitive.name.startswith("custom_vjp"):
            return [first]
        group, made = [first], set(instructions[first].outs)
        paths = {s.path for s in self.sources_of(instructions[first])}
        for index in range(first + 1, len(instructions)):
            instruction = instructions[index]
            is_derivative = instruction.eqn.primitive.name.startswith("custom_vjp")
            if instruction.eqn.effects or not (
                is_derivative or instruction.eqn.primitive.name in CHEAP
            ):
                break
            if self.is_param_only(instruction):
                self.defer(instruction)
                self.done.add(index)
                continue
            group.append(index)
            used = {s.path for s in self.sources_of(instruction)}
            if is_derivative and made.intersection(instruction.reads) and used and used <= paths:
                return group
            if used:  # another parameter: left to its own unit
                break
        return [first]

    def sources_of(self, instruction: Instruction) -> tuple[Shard, ...]:
        values = [self.slots.get(slot) for slot in instruction.reads]
        return union([v for v in values if isinstance(v, Lazy)])

    def table_of(self, instruction: Instruction) -> Shard | None:
        """Return the sharded table of which an equation takes rows, or None."""
        lazy = self.slots.get(instruction.reads[0]) if instruction.reads else None
        if not isinstance(lazy, Lazy) or lazy.node is not None or not is_look_up(instruction.eqn):
            return None
        source = lazy.sources[0]
        # Of a replicated table the gradient is reduced whole: no rows go anywhere.
        return (
            source if without_axis(source.cotangent, self.rule.axis) != source.cotangent else None
        )

    def unit(self, group: list[int]) -> None:
        """Run the equations of `group` as one rematerialised unit over the gathered parameters they
        use.
        """
        instructions = [self.program.instructions[i] for i in group]
        inner_slots = {out for i in instructions for out in i.outs}
        # What the group reads from outside of it: lazy values, whose sources the unit gathers, and
        # data.
        refs = dict.fromkeys(
            slot for i in instructions for slot in i.reads if slot not in inner_slots
        )
        lazies = {ref: self.slots[ref] for ref in refs if isinstance(self.slots[ref], Lazy)}
        data = [ref for ref in refs if ref not in lazies]
        # What nobody reads after the unit is no result of it, so it is not kept for backward
        # either.
        results = [out for out in inner_slots if self.program.last_read.get(out, -1) > group[-1]]

        def equations(whole: Whole, values: Sequence[Any]) -> list[Any]:
            env = {ref: whole.value(z) for ref, z in lazies.items()} | dict(
                zip(data, values, strict=True)
            )
            for i in instructions:
                source = self.table_of(i)
                if source is None:
                    evaluate([i], env)
                else:
                    table, ids = (read(ref, env) for ref in i.ins)
                    env[i.outs[0]] = look_up(
                        i.eqn, table, ids, source.cotangent, self.rule.mesh, self.rule.axis
                    )
            return [env[out] for out in results]

        sources = union(list(lazies.values()))
        if (size := total_bytes(sources)) > self.rule.region_bytes:
            for z in lazies.values():
                self.note(z, f"in one equation, {size} bytes at once")
        outs = gathered(self.rule, equations, sources, [self.slots[ref] for ref in data])
        self.slots.update(zip(results, outs, strict=True))
        self.done.update(group)

    # --- control flow --------------------------------------------------------------------------

    def enter(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Apply an equation whose jaxprs are entered, some of whose operands are lazy."""
        if eqn.primitive.name == "scan":
            return self.scan(eqn, values)
        if eqn.primitive.name == REMAT:
            return self.region(eqn, values)
        # A branch gathers what it uses.
        index, *operands = values
        index = self.gather_now(index, "a cond's predicate")
        branches = [self.inside(region, operands) for region in regions_of(eqn)]
        return rebind(eqn, branches, [index, *_data(operands)])

    def inside(self, region: Region, operands: Sequence[Any]) -> Function:
        """Return a function of the data among `operands` that interprets a region.

        It closes over the lazy operands.
        """

        def run(data: Sequence[Any]) -> list[Any]:
            rest = iter(data)
            values = [v if isinstance(v, Lazy) else next(rest) for v in operands]
            return GatherInterpreter(self.rule, region.flatten(), values).run()

        return run

    def scan(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Enter a scan: loop-invariant parameters stay sharded, stacked ones are sliced so."""
        (region,) = regions_of(eqn)
        consts, carry, xs = region.split(values)
        # A carry is replaced by what the body returns, so it cannot stay a shard.
        carry = [self.gather_now(v, "a scan's carry") for v in carry]
        stacks = [self.stack(v) for v in xs]

        def body(values: Sequence[Any]) -> list[Any]:
            consts, carry, slices = region.split(values)
            slices = [_slice_of(v, one) for v, one in zip(stacks, slices, strict=True)]
            # Each unit of the body gathers the lazy constants that it uses.
            values = [*consts, *carry, *slices]
            return GatherInterpreter(self.rule, region.flatten(), values).run()

        arrays = [v.sources[0].moved() if isinstance(v, Lazy) else v for v in stacks]
        return rebind_scan(eqn, body, [*consts, *carry, *arrays])

    def stack(self, value: Any) -> Any:
        """Return an operand that is scanned over: still lazy, if its shards can be sliced."""
        if not isinstance(value, Lazy):
            return value
        source = value.sources[0]
        # An iteration takes one index of dim 0. If that is split, only some devices have the slice.
        if value.node is None and not source.stored[0] and not source.cotangent[0]:
            return value
        return self.gather_now(value, "scanned over a dim that is sharded or computed")

    def region(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Enter a rematerialised region: its gathers wait for its input.

        If it is most of the model, it is run unit by unit.
        """
        (region,) = regions_of(eqn)
        sources = union([v for v in values if isinstance(v, Lazy)])
        # A region this large would hold most of the model whole if it were gathered at its top.
        # One that keeps what costs is no layer that is run again, and may be a whole model. The
        # equations of both are units.
        is_large = total_bytes(sources) > self.rule.region_bytes
        if self.rule.remat and (eqn.params["policy"] is keeps or is_large):
            return checkpointed(eqn, self.inside(region, values), _is_gather)(_data(values))

        # the region itself is repeated in backward
        rule = dataclasses.replace(self.rule, remat=False)

        def run(shards: list[Array], data: list[Any]) -> list[Any]:
            shards = tie(shards, data) if self.rule.remat else shards
            pairs = zip(sources, shards, strict=True)
            inputs = {s: dataclasses.replace(s, value=value) for s, value in pairs}
            # Inside, values start from sources. What was computed from them is made whole here.
            postponed = union([v for v in values if isinstance(v, Lazy) and v.node is not None])
            whole = Whole({s: self.rule.gather(inputs[s]) for s in postponed})

            def inside(v: Lazy) -> Any:
                return Lazy((inputs[v.sources[0]],)) if v.node is None else whole.value(v)

            rest = iter(data)
            operands = [inside(v) if isinstance(v, Lazy) else next(rest) for v in values]
            return GatherInterpreter(rule, region.flatten(), operands).run()

        return checkpointed(eqn, run, _is_gather)([s.value for s in sources], _data(values))


def _reduced(lazy: Lazy) -> Lazy:
    """Compute a small value from shards, without a gather, and return it as a source of its own.

    The equations mean the same on sharded arrays; the partitioner adds the psum. What they read is
    kept for backward, not what they make on the way.
    """
    sources = lazy.sources

    @jax.checkpoint
    def reduce(shards: list[Array]) -> Array:
        inputs = [dataclasses.replace(s, value=v) for s, v in zip(sources, shards, strict=True)]
        return Whole({s: shard.moved() for s, shard in zip(sources, inputs, strict=True)}).value(
            lazy
        )

    value = reduce([s.value for s in sources])
    path = " and ".join(dict.fromkeys(s.path for s in sources))
    whole: Spec = (None,) * value.ndim
    return Lazy((Shard(path, value, whole, whole),))


def _data(values: Sequence[Any]) -> list[Any]:
    return [v for v in values if not isinstance(v, Lazy)]


def _slice_of(stack: Any, value: Any) -> Any:
    """Return an iteration's slice: the slice of a shard is a shard, without the layer dim."""
    if not isinstance(stack, Lazy):
        return value
    source = stack.sources[0]
    return Lazy((Shard(source.path, value, source.stored[1:], source.cotangent[1:]),))


def _is_gather(name: str, params: dict[str, Any]) -> bool:
    """Return whether an equation may be part of a gather, which a policy would save whole.

    A gather is its constraints where it is differentiated, and one call where it is not, behind a
    stop_gradient.
    """
    return name in ("sharding_constraint", "custom_jvp_call", "optimization_barrier")
