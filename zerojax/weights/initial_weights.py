"""Complete a file of weights with missing weights from `program.init(key)`.

This adds adapters to a pretrained base, for example.

    file     embed.table, blocks.w [L, ..]
    model    embed.table, blocks.w [L, ..], blocks.lora_a [L, ..]
             lora_a[l] = init_block(key[l])["lora_a"]

A layer's missing weights are computed when one of its records is read. The layer's other weights
are not computed: a jitted function computes only what it returns. The keys are the keys of `init`,
so the numbers are the same too.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from host_offload.disk import Box
from zerojax.models import BLOCKS, LayeredModel, Model, block_path, layer_keys, list_stacks
from zerojax.weights.names import Tensor, WeightFile, split_path


class CompletedFile:
    """A file of weights, completed by the weights that it lacks.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes, by name.
      tiled: names of the tensors that are known to be stacks of tiles.
    """

    def __init__(
        self,
        file: WeightFile,
        model: Model | LayeredModel,
        key: jax.Array,
        missing: Mapping[str, Sequence[int]],
    ) -> None:
        """Take the weights named in `missing` from the model.

        Args:
          file: file that lacks them.
          model: model whose init functions create them.
          key: random key, as for `program.init`.
          missing: shapes of the missing weights, by name.
        """
        self.path = file.path
        self._file = file
        self._missing = dict(missing)
        self.tensors = {
            **file.tensors,
            **{name: Tensor(tuple(shape), "float32") for name, shape in missing.items()},
        }
        self.tiled = file.tiled
        self._sources = _sources(model, key, self._missing)
        # The weights of one layer, or of the embedding or head: they are requested one after the
        # other, and by each device.
        self._last: tuple[Any, dict[str, np.ndarray]] = (None, {})
        self._lock = threading.Lock()

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the file cannot be read.
        """
        if name not in self._missing:
            return self._file.read(name, box)
        source, is_stacked = self._sources[name]
        if not is_stacked:
            return self._create(source, 0)[name][tuple(slice(a, b) for a, b in box)]
        start, stop = box[0]
        index = tuple(slice(a, b) for a, b in box[1:])
        return np.stack([self._create(source, layer)[name][index] for layer in range(start, stop)])

    def _create(self, source: Callable[[int], dict[str, Any]], layer: int) -> dict[str, np.ndarray]:
        with self._lock:
            if self._last[0] != (source, layer):
                device = jax.local_devices()[0]
                # The program's mesh may be in scope, and need not contain this device.
                with (
                    jax.set_mesh(Mesh(np.asarray([device]), ("device",))),
                    jax.default_device(device),
                ):
                    weights = jax.tree.map(np.asarray, source(layer))
                self._last = (source, layer), weights
            return self._last[1]


def _sources(
    model: Model | LayeredModel, key: jax.Array, missing: Mapping[str, Any]
) -> dict[str, tuple[Callable[[int], dict[str, Any]], bool]]:
    """Return, for each missing weight, the function of a layer's number that creates it.

    It comes with a flag: whether the weight is a stack of layers.
    """
    sources: dict[str, tuple[Callable[[int], dict[str, Any]], bool]] = {}

    def add(
        init: Callable[[jax.Array], Any], prefix: Sequence[str], keys: Callable[[int], jax.Array]
    ) -> None:
        shapes = jax.eval_shape(init, key)
        names = [_name(prefix, path) for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
        wanted = [name for name in names if name in missing]
        if not wanted:
            return

        @jax.jit
        def make(key: jax.Array) -> dict[str, Any]:
            leaves = dict(zip(names, jax.tree.leaves(init(key)), strict=True))
            return {name: leaves[name] for name in wanted}

        def source(layer: int) -> dict[str, Any]:
            return make(keys(layer))

        sources.update(dict.fromkeys(wanted, (source, prefix[:1] == (BLOCKS,))))

    if isinstance(model, Model):
        add(model.init, (), lambda _: key)
        return sources
    k_embed, _, k_head = jax.random.split(key, 3)
    all_layer_keys = layer_keys(model, key)
    add(model.init_embed, ("embed",), lambda _: k_embed)
    add(model.init_head, ("head",), lambda _: k_head)
    for stack in list_stacks(model):
        stack_keys = all_layer_keys[stack.first : stack.first + stack.model.num_layers]
        add(
            stack.model.init_block,
            block_path(stack.name),
            lambda layer, stack_keys=stack_keys: stack_keys[layer],
        )
    return sources


def _name(prefix: Sequence[str], path: Any) -> str:
    """Return the name in files of a leaf under a prefix of keys."""
    return ".".join((*prefix, *split_path(f"weights{jax.tree_util.keystr(path)}")))
