"""GGUF files: metadata, and tensors of all types that `gguf` dequantises."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

MAGIC = b"GGUF"


def gguf_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of a GGUF file: numbers, strings and lists of them, by their key.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a GGUF file, or is cut short.
    """
    return _metadata(_open(path))


class GgufTensors:
    """The tensors of a GGUF file, dequantised one at a time.

    Attributes:
        path: of the file.
        fields: its metadata.
        shapes: {name: shape}, in NumPy's order (rows are outputs).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        reader = _open(path)
        self.path = str(path)
        self.fields = _metadata(reader)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def read(self, name: str) -> np.ndarray:
        """float32 of the tensor's shape.

        Raises:
            ValueError: if the `gguf` package cannot dequantise its type.
        """
        import gguf

        tensor = self._tensors[name]
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} is of type {tensor.tensor_type.name}, "
                "which the gguf package cannot dequantise: convert the file to another"
            ) from error
        return np.asarray(array, np.float32).reshape(self.shapes[name])


def _metadata(reader: Any) -> dict[str, Any]:
    fields = {key: field.contents() for key, field in reader.fields.items()}
    # The reader adds what it read of the header under names of its own.
    return {k: v for k, v in fields.items() if not k.startswith("GGUF.")}


def _open(path: str | os.PathLike[str]) -> Any:
    import gguf  # on demand: `import rlpost` stays light

    file = pathlib.Path(path)
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != MAGIC:
        raise ValueError(
            f"{file}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}"
        )
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        if "GGMLQuantizationType" in str(error):
            raise ValueError(
                f"{file}: a tensor is of a type that the gguf package does not know "
                f"({error}): update the package, or convert the file"
            ) from error
        raise ValueError(
            f"{file}: the GGUF file is damaged, or cut short at "
            f"{file.stat().st_size} bytes ({error})"
        ) from error
