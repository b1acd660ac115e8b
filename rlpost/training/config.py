"""Configs: a file gives values, the command line changes some, nothing is ignored.

`configs/x.py` has `get_config(variant) -> ConfigDict`. A key that is misspelt on the
command line is an error, and so is one that the experiment never reads.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags


class ConfigError(ValueError):
    """A config, or a change to it, is not what it has to be."""


class Config(Mapping[str, Any]):
    """A config that remembers which of its values were read.

    Values are read as attributes or items; `**config.model` reads the whole of
    `config.model`. Nested values come as a Config, lists as tuples. Nothing can be set.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "config"):
        self.__dict__["_path"] = path
        self.__dict__["_read"] = set()
        self.__dict__["_values"] = {
            key: Config(value, f"{path}.{key}") if isinstance(value, Mapping) else value
            for key, value in values.items()
        }

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise KeyError(self._unknown(key))
        self._read.add(key)
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):  # what copy and the like look for
            raise AttributeError(key)
        if key not in self._values:
            raise AttributeError(self._unknown(key))
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise ConfigError(
            f"{self._path}.{key} cannot be set: change it in the file or on the "
            f"command line (--{self._path}.{key}={value})"
        )

    def __contains__(self, key: object) -> bool:
        return key in self._values  # to ask is not to read

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Config({plain(self)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts of all values, which thereby count as read."""
        return {k: v.to_dict() if isinstance(v, Config) else v for k, v in self.items()}

    def _unknown(self, key: str) -> str:
        return f"{self._path} has no {key!r}{_near(key, self._values)}"


def load(path: str, changes: Sequence[str] = ()) -> Config:
    """The config of a file and variant, with changes.

    Args:
        path: "configs/x.py:variant", or without ":variant" for the file's default.
        changes: "config.a.b=1" or "--config.a.b=1", read as the type that the value
            has in the file, as ml_collections does: a tuple in quotes ("(1, 2)"), a
            bool as true, false or --noconfig.flag.

    Raises:
        ConfigError: if there is no such file or variant, a key is misspelt (the message
            has near ones), or a value is of another type.
    """
    values = _from_file(path)
    asked = [c if c.startswith("-") else f"--{c}" for c in changes]
    for change in asked:
        _check_key(change, values)
    argv = ["", *asked]
    registry = flags.FlagValues()  # our own: no global state
    try:
        config_flags.DEFINE_config_dict(
            "config", values, flag_values=registry, sys_argv=argv
        )
        left = registry(argv)[1:]
        values = registry.config.copy_and_resolve_references()
    except (flags.Error, ValueError, TypeError, SyntaxError) as error:
        raise ConfigError(str(error)) from error
    except config_dict.RequiredValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if left:
        raise ConfigError(f"not a change of the config: {' '.join(left)}")
    return Config(values.to_dict())


def check_read(config: Config) -> None:
    """Raise if a value was never read: it would have no effect, whatever it says.

    Called when an experiment is built, before it runs.

    Raises:
        ConfigError: listing the keys.
    """
    unread = unread_keys(config)
    if unread:
        raise ConfigError(
            "these keys of the config are never read and would change nothing: "
            + ", ".join(unread)
        )


def unread_keys(config: Config) -> list[str]:
    """The full names of the values that were never read."""
    found = []
    for key in config:
        value = config._values[key]
        if isinstance(value, Config) and len(value):
            found += unread_keys(value)
        elif key not in config._read:
            found.append(f"{config._path}.{key}")
    return found


def plain(config: Config) -> dict[str, Any]:
    """The config as nested dicts, for a JSON file; does not count as reading."""
    return {
        key: plain(value) if isinstance(value, Config) else value
        for key, value in config._values.items()
    }


def reload(path: str | os.PathLike[str]) -> Config:
    """A config that was saved as JSON: the same values, of the same types."""
    return Config(_tuples(json.loads(Path(path).read_text())))


def comments(path: str) -> dict[str, str]:
    """{"a.b": "what is said behind `config.a.b = ...` in the file"}, for `--help`."""
    found: dict[str, str] = {}
    for line in Path(path.partition(":")[0]).read_text().splitlines():
        match = re.match(r"\s*\w+\.([\w.]+) = .*?  # (.+)$", line)
        if match:
            found.setdefault(match[1], match[2])
    return found


def _from_file(path: str) -> ConfigDict:
    file, _, variant = path.partition(":")
    if not Path(file).is_file():
        raise ConfigError(f"there is no config file {file}")
    spec = importlib.util.spec_from_file_location(f"config_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"{file} has no get_config")
    try:
        values = module.get_config(variant) if variant else module.get_config()
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path}: {error}") from error
    values = ConfigDict(values)
    _check_values(values, "config")
    return values


def _check_values(values: ConfigDict, path: str) -> None:
    """Lists become tuples; what JSON would not bring back as it is gets refused."""
    for key in values:
        value, name = _value(values, key), f"{path}.{key}"
        if isinstance(value, ConfigDict):
            _check_values(value, name)
            continue
        if isinstance(value, list):
            del values[key]  # or ml_collections would hold on to the type
            values[key] = _tuples(value)
        _check_scalars(_tuples(value), name)


def _check_scalars(value: Any, name: str) -> None:
    if isinstance(value, tuple):
        for entry in value:
            _check_scalars(entry, name)
    elif type(value) not in (type(None), bool, int, float, str):
        raise ConfigError(
            f"{name} is a {type(value).__name__}: a config holds numbers, strings, "
            "bools, None, tuples of them and nested dicts"
        )
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{name} is nan")


def _value(values: ConfigDict, key: str) -> Any:
    try:
        return values[key]
    except config_dict.RequiredValueError:  # the command line has to give it
        return None


def _check_key(change: str, values: ConfigDict) -> None:
    match = re.match(r"--?(no)?config\.([^=\[]+)", change)
    if not match:
        return  # the value of the change before it, or for the parser to refuse
    path = "config"
    *parents, last = match[2].split(".")
    for key in [*parents, last]:
        if not isinstance(values, ConfigDict) or key not in values:
            near = _near(key, values) if isinstance(values, ConfigDict) else ""
            raise ConfigError(f"{change}: {path} has no {key!r}{near}")
        path = f"{path}.{key}"
        if key != last or isinstance(_value(values, key), ConfigDict):
            values = values[key]
        elif values.get_type(key) is type(None):
            raise ConfigError(
                f"{change}: {path} is None in the file, so its type is not known; "
                "say there `config_dict.placeholder(float)`, say"
            )


def _near(key: str, keys: Any) -> str:
    near = difflib.get_close_matches(key, list(keys), n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; it has {', '.join(keys)}" if len(list(keys)) else ""


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_tuples(v) for v in value)
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return value
