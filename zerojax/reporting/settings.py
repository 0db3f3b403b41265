"""The settings of a run as text: each with its default, so that the chosen ones come first.

Defaults are known for dataclasses. A mapping has none, so all of its settings count as chosen.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
      name: name; nested settings have dots, as in "model.layers".
      value: value as text.
      default: default value as text; None if there is no default, or it is unknown.
    """

    name: str
    value: str
    default: str | None = None

    @property
    def is_default(self) -> bool:
        """Whether the value is the default."""
        return self.value == self.default


def flatten_settings(config: Any, omitted: tuple[type, ...] = ()) -> list[Setting]:
    """Return the settings of a mapping or dataclass, possibly nested; None has no settings.

    Args:
      config: a mapping or a dataclass of numbers, texts and None.
      omitted: types of values to leave out.

    Raises:
      ValueError: the settings are neither a mapping nor a dataclass.
    """
    if config is None:
        return []
    if not _is_nested(config):
        raise ValueError(f"config={config!r}: a mapping or a dataclass is needed")
    return list(_walk(config, {}, "", omitted))


def _is_nested(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_instance or isinstance(value, Mapping)


def _walk(
    config: Any, outer_defaults: Mapping[str, Any], prefix: str, omitted: tuple[type, ...]
) -> Iterator[Setting]:
    """Yield the settings of one level and of the levels below it."""
    defaults = {**_read_defaults(config), **outer_defaults}
    for name, value in _read_values(config).items():
        if isinstance(value, omitted):
            continue
        full_name = f"{prefix}{name}"
        has_default = name in defaults
        if not _is_nested(value):
            yield Setting(full_name, str(value), str(defaults[name]) if has_default else None)
        elif has_default and type(defaults[name]) is type(value):
            yield from _walk(value, _read_values(defaults[name]), f"{full_name}.", omitted)
        else:
            yield from _walk(value, {}, f"{full_name}.", omitted)


def _read_values(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _read_defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields; a mapping has none."""
    defaults: dict[str, Any] = {}
    if isinstance(config, Mapping):
        return defaults
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults
