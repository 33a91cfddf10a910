"""What the config dataclasses are made of: fields, checks, their JSON form, and which fields name a run."""

import dataclasses
import typing
from dataclasses import field
from typing import Any, Literal

from grt.errors import ConfigError

LARGEST = 3e38  # what single precision holds


def operational(default: Any) -> Any:
    """A field that changes where and how often, never what is trained: left out of the hash."""
    return field(default=default, metadata={"operational": True})


def at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}: it must be at least {least}.")


def finite(section: str, config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, float) and not abs(value) <= LARGEST:
            raise ConfigError(f"{section}.{name} is {value}: it must be a finite number of single precision.")


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(cls: type, values: Any, where: str = "") -> Any:
    """Build a config dataclass from JSON values; ConfigError names an unknown field or a value of a wrong type."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where.rstrip('.') or 'the config'} is {values!r}: it must be an object of named fields.")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"unknown field {where + key!r}: this version knows {', '.join(hints)}.")
        arguments[key] = _typed(hints[key], value, where + key)
    return cls(**arguments)


def _typed(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where + ".")
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{where} is {value!r}: choose one of {', '.join(map(str, typing.get_args(hint)))}.")
        return value
    if hint is float and type(value) is int and abs(value) < 1e300:  # larger ones may not fit
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where} is {value!r}: it must be of type {hint.__name__}.")
    return value


def identity(config: Any) -> dict[str, Any]:
    """The fields that decide the result and differ from their defaults."""
    kept = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            if inner := identity(value):
                kept[f.name] = inner
        elif not f.metadata.get("operational") and value != f.default:
            kept[f.name] = value
    return kept
