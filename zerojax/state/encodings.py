"""Frozen weights stored in 8 or 4 bits: which leaves, how each is split, encoded and decoded.

    storage   Encoded(codes[A, (B C)_fsdp], scales[..], ..)     replaces the leaf W[A, B_fsdp, C]
    use       decode(all_gather(codes, scales, ..))             W[A, B, C] in the compute dtype, a
                                                                layer at a time

For code that stores, moves, gathers, saves or counts leaves, each encoded array is a frozen leaf of
its own. Only two places know about the weight: `Encoding.encode` makes the arrays from a layer's
float32 leaves, on each device's shard, and `decoded` makes weights from gathered arrays.
`pallas_kernels.storage` is the codec.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import storage
from pallas_kernels.storage import Encoded
from zerojax.models import LayeredModel, Model
from zerojax.sharding import LeafSpec, Spec, named, parse_axes
from zerojax.trees import Params

logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How one leaf is encoded.

    Attributes:
      layout: layout of the leaf's elements in the encoded arrays.
      shape: shape of the leaf, without the layer dim if it is stacked.
      spec: sharding spec of the stored leaf, without the layer dim if it is stacked.
      mesh: the device mesh.
      lead: 1 for a stack of layers, else 0.
      num_layers: number of layers in the stack; 1 for an unstacked leaf.
    """

    layout: storage.Layout
    shape: tuple[int, ...]
    spec: Spec
    mesh: Mesh
    lead: int
    num_layers: int

    def encode(self, w: Any) -> Encoded:
        """Return a leaf of one layer, or an unstacked leaf, encoded on each device's shard."""
        w = jax.lax.with_sharding_constraint(
            jnp.asarray(w, jnp.float32), named(self.mesh, self.spec)
        )
        # The XLA implementation inside shard_map, so that the partitioner need not see through the
        # reshapes.
        encode = functools.partial(storage.encode, layout=self.layout, implementation="xla")
        out_specs = PartitionSpec(*storage.encoded_spec(self.layout, self.spec))
        specs: dict[str, Any] = {"in_specs": PartitionSpec(*self.spec), "out_specs": out_specs}
        return jax.shard_map(encode, mesh=self.mesh, check_vma=False, **specs)(w)

    def encode_here(self, w: np.ndarray) -> list[np.ndarray]:
        """Return the encoded arrays of an unsharded weight, computed on one device of this process.

        Args:
          w: the weight, with all or some of its layers.
        """
        device = jax.local_devices()[0]
        # The program's mesh may be set here, and need not contain this device.
        with jax.set_mesh(Mesh(np.asarray([device]), ("device",))):
            return [
                np.asarray(a)
                for a in jax.tree.leaves(_encode_jit(jax.device_put(w, device), layout=self.layout))
            ]

    @property
    def abstract(self) -> Encoded:
        """The shapes of the encoded arrays, including all layers."""
        return storage.abstract_encoded(
            self.layout, ((self.num_layers,) if self.lead else ()) + self.shape
        )

    def leaf_spec(self, spec: LeafSpec, sharded: bool) -> LeafSpec:
        """Return how the mesh splits each encoded array.

        Args:
          spec: how the mesh would split the leaf.
          sharded: whether the stored arrays are split over the ZeRO axis.
        """
        base, stored = (
            storage.encoded_spec(self.layout, s)
            for s in (spec.base, spec.sharded if sharded else spec.base)
        )
        return LeafSpec(base, stored, spec.replicated)


@functools.partial(jax.jit, static_argnames="layout")
def _encode_jit(w: jax.Array, layout: storage.Layout) -> Encoded:
    return storage.encode(w, layout, "xla")


def choose_encodings(
    format: storage.Format,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    specs: Mapping[str, Spec],
    stacked: Sequence[str],
    mesh: Mesh,
) -> dict[str, Encoding]:
    """Return how frozen leaves are encoded, by path.

    Leaves that no layout supports keep their dtype, which is logged once.

    Args:
      format: "int8" or "nf4".
      leaves: the floating frozen leaves, by path.
      specs: sharding specs of the stored leaves, including all dims, by path.
      stacked: paths of the stacks of layers.
      mesh: the device mesh.
    """
    encodings = {}
    kept = []
    for path, leaf in leaves.items():
        lead = int(path in stacked)
        shape = tuple(leaf.shape[lead:])
        spec = tuple(specs[path][lead:])
        shards = tuple(math.prod(mesh.shape[axis] for axis in parse_axes(entry)) for entry in spec)
        if (why := storage.refusal(format, shape, shards)) is not None:
            kept.append((path, leaf, why))
            continue
        layout = storage.choose_layout(format, shape, shards)
        encodings[path] = Encoding(layout, shape, spec, mesh, lead, leaf.shape[0] if lead else 1)
    if kept:
        path, leaf, why = max(kept, key=lambda item: item[1].size)
        logger.info(
            "frozen_dtype=%r: %d of %d frozen leaves, %d of %d elements, stay in %s, such as %s: "
            "%s",
            format,
            len(kept),
            len(leaves),
            sum(leaf.size for _, leaf, _ in kept),
            sum(a.size for a in leaves.values()),
            leaf.dtype,
            path,
            why,
        )
    return encodings


def encode_tree(encodings: Mapping[str, Encoding], params: Params, *part: str) -> Any:
    """Return parameters with `Encoded` nodes in place of the leaves to encode.

    Args:
      encodings: how each encoded leaf is encoded, by path.
      params: the full tree of a Model, or a part of a LayeredModel's tree, such as one layer.
      part: keys that lead to the part in the full tree.
    """
    if not encodings:
        return params
    before = tuple(jax.tree_util.DictKey(key) for key in part)

    def one(path: Any, leaf: Any) -> Any:
        encoding = encodings.get(jax.tree_util.keystr((*before, *path)))
        return leaf if encoding is None else encoding.encode(leaf)

    return jax.tree_util.tree_map_with_path(one, params)


def is_encoded(node: Any) -> bool:
    """Return whether a node of a parameter tree is a weight in 8 or 4 bits."""
    return isinstance(node, Encoded)


def decoded(params: Params, dtype: Any) -> Any:
    """Return parameters with their encoded leaves decoded to `dtype`."""
    # The XLA implementation keeps the dims, so a split array stays split without communication.
    decode = lambda leaf: storage.decode(leaf, dtype, "xla") if is_encoded(leaf) else leaf  # noqa: E731
    return jax.tree.map(decode, params, is_leaf=is_encoded)


def decoding_model(model: LayeredModel, dtype: Any) -> LayeredModel:
    """Return a model whose functions take encoded leaves and decode them to `dtype`."""

    def decoding(function: Any) -> Any:
        return lambda p, *args: function(decoded(p, dtype), *args)

    def head(p: Params, p_embed: Params, *args: Any) -> Any:
        return model.head(decoded(p, dtype), decoded(p_embed, dtype), *args)

    def predict(p: Params, p_embed: Params, *args: Any) -> Any:
        assert model.predict is not None
        return model.predict(decoded(p, dtype), decoded(p_embed, dtype), *args)

    def of_blocks(of: Any) -> dict[str, Any]:
        return {
            "block": decoding(of.block),
            "enter": None if of.enter is None else decoding(of.enter),
        }

    blocks = of_blocks(model)
    if model.stacks:
        blocks = {
            "stacks": [dataclasses.replace(stack, **of_blocks(stack)) for stack in model.stacks]
        }
    outputs = None if model.predict is None else predict
    return dataclasses.replace(
        model, embed=decoding(model.embed), head=head, predict=outputs, **blocks
    )


def check_tiles(
    model: Model | LayeredModel, format: str, encoded: Sequence[str], tiled: Sequence[str]
) -> None:
    """Check that no stack of tiles would be encoded.

    Args:
      model: the model, for the error.
      format: "int8" or "nf4".
      encoded: paths of the encoded leaves.
      tiled: paths of the stacks of tiles.

    Raises:
      NotImplementedError: a stack of tiles would be encoded.
    """
    if both := [path for path in encoded if path in tiled]:
        raise NotImplementedError(
            f"frozen_dtype={format!r} is not built for frozen stacks of tiles such as {both[0]}: "
            f"leave frozen_dtype=None, or give the {type(model).__name__} no `tiles` for it"
        )
