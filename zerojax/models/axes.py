"""Translation of a model's axis names into mesh axes.

Flax modules name the dims of a parameter: `with_partitioning(init, ("embed", "mlp"))`. Rules, as in
Flax, are pairs of a name and a mesh axis, several axes, or None. For each parameter, they are read
in order. The first rule for a name applies whose axes no other dim of the parameter has:

    rules   (("vocab", "tensor"), ("embed", None), ("mlp", "tensor"))
    names   W["embed", "mlp"]            ->  W[D, F_tensor]

Two kinds of names are dropped, and from_flax logs them once:

    `fsdp`, `data`, `context`, `pipe`             ZeRO chooses the dim that they split
    a name without a rule, if there are rules     the dim stays unsplit, as in Flax; a rule
                                                  ("*", "refuse") refuses all such names instead,
                                                  and (name, "refuse") refuses one of them

Without rules, a name is a mesh axis, which is checked when the program is built.

Activations: while a module runs, `flax.linen.with_logical_constraint` reads the same rules. A dim
to which a rule assigns an axis of the batch, or `context`, is left to the partitioner, which splits
it like the batch and its tokens.

A model that constrains activations by axes of its own mesh, such as
`jax.lax.with_sharding_constraint(x, P("dp", None, "tp"))`, runs under the program's mesh with these
names, given by `mesh_axes`: {"dp": "fsdp", "tp": "tensor"}. A model that only applies constraints
if it finds a mesh can run without one: {}.
"""

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.core.spmd
import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from zerojax.sharding import AXES, CONTEXT, DATA, FSDP, PIPE, TENSOR

logger = logging.getLogger("zerojax")

Rules = Sequence[tuple[str, Any]]

_ASSIGNED = (DATA, FSDP, CONTEXT, PIPE)
"""Axes that a parameter's spec cannot name."""
ANY_NAME = "*"
REFUSE = "refuse"
ZERO_ASSIGNS = "ZeRO assigns it"
UNKNOWN = "no rule for it"


class AxisNames:
    """Translates the names of a model's axes, and records the names that it drops.

    Attributes:
      rules: pairs of a name and an axis, several axes or None; or None if names are mesh axes.
      mesh_axes: axes of the program's mesh, by the names that the modules use; None if the modules
        use the program's names.
    """

    def __init__(
        self, rules: Rules | None = None, mesh_axes: Mapping[str, str | None] | None = None
    ) -> None:
        """Use the given rules, or else those of `flax.linen.logical_axis_rules` in scope.

        Raises:
          ValueError: a rule is not a pair of a name and axes.
        """
        pairs = rules if rules is not None else (flax.core.spmd.get_logical_axis_rules() or None)
        for rule in pairs or ():
            if not (isinstance(rule, Sequence) and len(rule) == 2 and isinstance(rule[0], str)):
                raise ValueError(
                    f"axis_rules holds {rule!r}: pairs are needed, such as (('vocab', 'tensor'), "
                    "('embed', None))"
                )
        if mesh_axes:
            pairs = (*(pairs or ()), *mesh_axes.items())
        self.rules = None if pairs is None else tuple((name, _entry(axes)) for name, axes in pairs)
        self.mesh_axes = mesh_axes
        self._dropped: Counter[tuple[str, str]] = Counter()

    def spec(self, path: str, names: Any, rules_of_leaf: Rules | None = None) -> PartitionSpec:
        """Return the spec of a parameter.

        Args:
          path: path of the parameter, for errors.
          names: one entry per dim: a name, several names, or None.
          rules_of_leaf: rules in the parameter's annotation; they apply after the model's rules.

        Raises:
          ValueError: a rule refuses a name.
        """
        rules = (*(self.rules or ()), *((name, _entry(axes)) for name, axes in rules_of_leaf or ()))
        has_rules = self.rules is not None or rules_of_leaf is not None
        entries = [_names(entry) for entry in names]
        axes_by_name: dict[str, tuple[str, ...]] = {}
        leaf_names = set(itertools.chain(*entries))
        used_axes = set()
        for name, axes in rules:
            if name not in leaf_names or name in axes_by_name or axes == REFUSE:
                continue
            if used_axes.isdisjoint(_names(axes)):
                axes_by_name[name] = _names(axes)
                used_axes.update(_names(axes))
        refused = {name for name, axes in rules if axes == REFUSE}

        def translate(name: str) -> tuple[str, ...]:
            if name in refused:
                raise ValueError(f"{path}: axis_rules refuses the name {name!r} of {tuple(names)}")
            if name in axes_by_name:
                return axes_by_name[name]
            # The name has a rule, but another dim of this parameter has its axes: unsplit, as in
            # Flax.
            if any(name == known for known, _ in rules):
                return ()
            if not has_rules or name in AXES:
                return (name,)
            if ANY_NAME in refused:
                raise ValueError(
                    f"{path}: axis_rules has no rule for the name {name!r} of {tuple(names)}; add "
                    f"({name!r}, None) or an axis"
                )
            self._dropped[name, UNKNOWN] += 1
            return ()

        def keep(axis: str) -> bool:
            if axis in _ASSIGNED:
                self._dropped[axis, ZERO_ASSIGNS] += 1
            return axis not in _ASSIGNED

        spec = []
        for entry in entries:
            axes = itertools.chain(*map(translate, entry))
            spec.append(_entry([axis for axis in axes if keep(axis)]))
        return PartitionSpec(*spec)

    def log_dropped(self) -> None:
        """Log the dropped names, with the number of parameters."""
        if not self._dropped:
            return
        lines = []
        level = logging.INFO
        for (name, why), count in self._dropped.items():
            lines.append(f"{name!r} ({why}) of {count} parameters")
            if why != ZERO_ASSIGNS:
                level = logging.WARNING
        logger.log(level, "dropped names of axes: %s", ", ".join(lines))

    def while_made(self) -> Any:
        """Return the context in which parameters are created.

        Annotations constrain nothing in it, because the step chooses the shardings.
        """
        translates = self.rules is not None or self.mesh_axes is not None or bool(self._dropped)
        return _under(AbstractMesh((), ())) if translates else contextlib.nullcontext()

    @contextlib.contextmanager
    def while_run(self) -> Iterator[None]:
        """Return a context that translates the modules' named constraints on activations."""
        if self.rules is None and self.mesh_axes is None:
            yield
            return
        mesh = jax.sharding.get_abstract_mesh()
        module_names = _invert(self.mesh_axes or {})
        rules = []
        for name, axes in self.rules or ():
            if axes != REFUSE:
                rules.append((name, _activation_entry(axes, mesh.axis_names, module_names)))
        with nn.logical_axis_rules(rules), _under(_renamed(mesh, self.mesh_axes)):
            yield


def _under(mesh: AbstractMesh) -> Any:
    return jax.sharding.use_abstract_mesh(mesh)


def _invert(mesh_axes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the modules' name of each axis of the program's mesh that has one."""
    return {axis: name for name, axis in mesh_axes.items() if axis is not None}


def _activation_entry(axes: Any, mesh_axes: Sequence[str], module_names: Mapping[str, str]) -> Any:
    """Return the entry to which a rule constrains a dim of an activation.

    Args:
      axes: axes of the rule.
      mesh_axes: axes of the program's mesh.
      module_names: the modules' names of axes of the mesh.
    """
    axes = _names(axes)
    constrained = [axis for axis in axes if axis in mesh_axes and axis == TENSOR]
    if not constrained and not set(axes).isdisjoint(AXES):
        return PartitionSpec.UNCONSTRAINED
    return _entry([module_names.get(axis, axis) for axis in constrained])


def _renamed(mesh: AbstractMesh, axes: Mapping[str, str | None] | None) -> AbstractMesh:
    """Return the mesh that modules see: the same devices in order under other names, or none."""
    if axes is None or mesh.empty:
        return mesh
    if not axes:
        return AbstractMesh((), ())
    module_names = _invert(axes)
    extra = [name for name, axis in axes.items() if axis is None and name not in mesh.axis_names]
    names: Any = (*(module_names.get(axis, axis) for axis in mesh.axis_names), *extra)
    types = (*mesh.axis_types, *(AxisType.Auto for _ in extra))
    return AbstractMesh((*mesh.axis_sizes, *(1 for _ in extra)), names, axis_types=types)


def _names(entry: Any) -> tuple[str, ...]:
    """Return the names of one dim as a tuple."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, Sequence) else ()


def _entry(axes: Any) -> Any:
    """Return axes as an entry of a PartitionSpec: None, one axis, or several axes."""
    axes = _names(axes)
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes
