"""Options of adapters, with PEFT's names and meanings.

    y = x W + s dropout(x) A B                 s = alpha / rank, or alpha / sqrt(rank) with rsLoRA
    y = m / |W + s A B| (x W + s x A B)        with DoRA; the norm is a column's, and a constant

`Lora` is checked when it is built, alone; `check_lora` compares it with a decoder.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from flax import nnx

from zerojax.hf.config import DecoderConfig
from zerojax.hf.names import PROJECTIONS
from zerojax.user_values import as_flag, as_int_or_float, as_integer, as_number

ENDS = ("embed_tokens", "lm_head")
"""Targets that are not in a layer."""
_TARGETS = (*PROJECTIONS, *ENDS)
_PISSA = re.compile(r"pissa(_niter_[1-9][0-9]*)?")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv:2106.09685), with PEFT's scale and initial values.

        y = x W + (alpha / rank) dropout(x) A B        A[in, rank], uniform; B[rank, out], 0

    Attributes:
      rank: rank of A B.
      alpha: numerator of the scale.
      targets: names of the adapted projections, such as ("q_proj", "v_proj"), and "embed_tokens" or
        "lm_head"; "all" for the seven projections of a layer.
      dropout: fraction of A's input that is dropped in training.
      use_rslora: whether the scale is alpha / sqrt(rank) (arXiv:2312.03732).
      use_dora: whether a trained vector gives the magnitude of each column of W + s A B
        (arXiv:2402.09353). It starts as the norms of W's columns.
      init: "default"; or "pissa" for A and B from the largest singular values of W, which are
        subtracted from the frozen W (arXiv:2404.02948); or "pissa_niter_N" for an approximation of
        them by N iterations, which is faster.
      modules_to_save: names of modules that are trained in full, such as "lm_head" or "norm". As in
        PEFT, a name stands for all modules whose name ends with it: "norm" is every norm.

    Raises:
      ValueError: a number is out of range, a target is unknown, or options cannot be combined.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | str = ("q_proj", "v_proj")
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    init: str = "default"
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check and normalize the values."""
        rank = as_integer(self.rank)
        alpha = as_number(self.alpha)
        dropout = as_number(self.dropout)
        if rank is None or rank < 1:
            raise ValueError(f"rank={self.rank!r} of a Lora: an integer of at least 1 is needed")
        if alpha is None or alpha <= 0:
            raise ValueError(
                f"alpha={self.alpha!r} of a Lora: a positive number is needed; alpha / rank scales "
                "the adapters"
            )
        if dropout is None or not 0 <= dropout < 1:
            raise ValueError(
                f"dropout={self.dropout!r} of a Lora: a number from 0 to below 1 is needed"
            )
        # An integer alpha stays an int, so that adapter files show it as it was given.
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "alpha", as_int_or_float(self.alpha))
        object.__setattr__(self, "dropout", dropout)
        for name in ("use_rslora", "use_dora"):
            flag = as_flag(getattr(self, name))
            if flag is None:
                raise ValueError(f"{name}={getattr(self, name)!r} of a Lora: a bool is needed")
            object.__setattr__(self, name, flag)
        if not isinstance(self.init, str) or not (
            self.init == "default" or _PISSA.fullmatch(self.init)
        ):
            raise ValueError(
                f"init={self.init!r} of a Lora: 'default', 'pissa' or 'pissa_niter_N' is needed, "
                "such as 'pissa_niter_16'"
            )
        object.__setattr__(self, "targets", _checked_targets(self.targets))
        object.__setattr__(
            self, "modules_to_save", _checked_names("modules_to_save", self.modules_to_save)
        )
        self._check_ends()

    def _check_ends(self) -> None:
        """Raise ValueError if an option is not built for the embedding or the head."""
        ends = [name for name in ENDS if name in self.targets]
        options = {"use_dora=True": self.use_dora, f"init={self.init!r}": self.init != "default"}
        for option, is_set in options.items():
            if is_set and ends:
                raise ValueError(
                    f"{option} of a Lora is not built for the target {ends[0]}: remove one of them"
                )
        both = [name for name in self.targets if name in self.modules_to_save]
        if both:
            raise ValueError(
                f"modules_to_save={self.modules_to_save!r} of a Lora: {both[0]} is a target, too: "
                "remove it from one of them"
            )

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def can_be_off(self) -> bool:
        """Whether the model without the adapters' output is the base."""
        changes_base = self.use_dora or self.init != "default" or bool(self.modules_to_save)
        return not changes_base and not set(ENDS) & set(self.targets)

    def saves(self, module: str) -> bool:
        """Return whether a module is trained in full.

        Args:
          module: its name in the files, such as "model.layers.0.input_layernorm".
        """
        return module.endswith(self.modules_to_save) if self.modules_to_save else False


def _checked_targets(targets: object) -> tuple[str, ...]:
    """Return the names of the targets, in the order of a decoder.

    Raises:
      ValueError: they are not a tuple of known names, or "all".
    """
    if targets == "all":
        return tuple(PROJECTIONS)
    names = _checked_names("targets", targets)
    if not names:
        raise ValueError(_names_needed("targets", targets))
    unknown = sorted(set(names) - set(_TARGETS))
    if unknown:
        raise ValueError(
            f"targets={targets!r} of a Lora: {', '.join(unknown)} unknown: choose from "
            f"{', '.join(_TARGETS)}"
        )
    return tuple(name for name in _TARGETS if name in names)


def _checked_names(field: str, names: object) -> tuple[str, ...]:
    """Return a list or tuple of names as a tuple.

    Raises:
      ValueError: it has another form.
    """
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and name for name in names
    ):
        raise ValueError(_names_needed(field, names))
    return tuple(names)


def _names_needed(field: str, names: object) -> str:
    example = "('q_proj',), or 'all'" if field == "targets" else "('lm_head',)"
    return f"{field}={names!r} of a Lora: a tuple of names is needed, such as {example}"


def module_of(path: tuple[str, ...], layer: int | str = 0) -> str:
    """Return the name in the files of the module that holds a parameter.

    Args:
      path: names of the parameter, within the embedding, the head or a block.
      layer: number of the layer.
    """
    module = ".".join(path[:-1])
    if path[0] in ("lm_head", "score"):
        return module
    if path[0] in ("embed_tokens", "norm"):
        return f"model.{module}"
    return f"model.layers.{layer}.{module}"


def choose_trained(lora: Lora) -> Callable[[Any, Any], bool]:
    """Return the filter of the trained parameters: adapters, and modules that are saved in full."""

    def is_trained(path: tuple[str, ...], value: Any) -> bool:
        return isinstance(value, nnx.LoRAParam) or lora.saves(module_of(path))

    return is_trained


def check_lora(lora: Lora, config: DecoderConfig, mlp_tiles: int) -> None:
    """Raise ValueError if adapters do not fit a decoder.

    Args:
      lora: options of the adapters.
      config: the decoder.
      mlp_tiles: number of tiles of an MLP's weights; 0: untiled.
    """
    if config.tied and "lm_head" in lora.targets:
        raise ValueError(
            f"targets={lora.targets!r} of a Lora: config.json ties lm_head to the embedding, so it "
            "has no matrix to adapt: remove lm_head"
        )
    if config.tied and (lora.saves("lm_head") or lora.saves("model.embed_tokens")):
        raise ValueError(
            f"modules_to_save={lora.modules_to_save!r} of a Lora: config.json ties lm_head to the "
            "embedding, and PEFT would train a copy of one of them: remove it, or use "
            "trainable= of model_of"
        )
    tiled = [name for name in lora.targets if PROJECTIONS.get(name) == "mlp"] if mlp_tiles else []
    if tiled and lora.use_dora:
        raise ValueError(
            f"mlp_tiles={mlp_tiles} cannot be combined with use_dora=True for {', '.join(tiled)}, "
            "whose columns' norms need all tiles: use mlp_tiles=0, or other targets"
        )
    if "down_proj" in tiled and lora.dropout:
        raise ValueError(
            f"mlp_tiles={mlp_tiles} cannot be combined with dropout={lora.dropout} for down_proj, "
            "whose input is never in memory in full: use mlp_tiles=0, dropout=0, or other targets"
        )


def check_switch(lora: Lora) -> None:
    """Raise ValueError if a batch cannot switch adapters off by `adapters`."""
    if not lora.can_be_off:
        raise ValueError(
            f"a batch has 'adapters', but the model without the output of {lora} is not the base: "
            "only adapters of projections without use_dora, init and modules_to_save are switched"
        )


def check_modules(lora: Lora, modules: set[str], mlp_tiles: int) -> None:
    """Raise ValueError if `modules_to_save` does not fit the modules of a decoder.

    Args:
      lora: options of the adapters.
      modules: names of the modules with parameters, as `module_of` returns them.
      mlp_tiles: number of tiles of an MLP's weights; 0: untiled.
    """
    field = f"modules_to_save={lora.modules_to_save!r} of a Lora"
    for name in lora.modules_to_save:
        if not any(module.endswith(name) for module in modules):
            raise ValueError(
                f"{field}: no module of this model has a name that ends with {name!r}; its modules "
                f"are {', '.join(sorted(modules))}"
            )
    for module in sorted(modules):
        if not lora.saves(module):
            continue
        if module.rpartition(".")[2] in lora.targets:
            raise ValueError(f"{field}: {module} is a target, too: remove it from one of them")
        if mlp_tiles and ".mlp" in module:
            raise ValueError(
                f"mlp_tiles={mlp_tiles} cannot be combined with {field}, which has {module}: use "
                "mlp_tiles=0, or trainable= of model_of"
            )
