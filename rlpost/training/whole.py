"""Files and folders that are there as a whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import jax


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old or the new one, never half."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:  # that of a full disk would not say which file
        raise OSError(error.errno, error.strerror, str(path)) from error


def damaged(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None if all is well.

    Of several processes each looks at its share.
    """
    try:
        files = json.loads((folder / "files.json").read_text())
    except (OSError, ValueError):
        return "its list of files (files.json) is missing or unreadable"
    for name in _my_share(sorted(files)):
        path, (size, checksum) = folder / name, files[name]
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _checksum(path) != checksum:
            return f"{name} is not what was written (its CRC-32 differs)"
    return None


def list_files(folder: Path) -> None:
    """Write down size and checksum of this process's share of the files."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    names = [name for name in names if not name.startswith("list.")]
    listed = {
        name: ((folder / name).stat().st_size, _checksum(folder / name))
        for name in _my_share(names)
    }
    (folder / f"list.{jax.process_index()}.json").write_text(json.dumps(listed))


def _my_share(names: list[str]) -> list[str]:
    return names[jax.process_index() :: jax.process_count()]


def _checksum(path: Path) -> int:
    """CRC-32: neither Orbax nor its compression notices a flipped bit in the data."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def remove(folder: Path) -> None:
    """Delete a folder under a name that nobody takes for a checkpoint."""
    if folder.exists():
        aside = folder.with_name(folder.name + ".deleted")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
