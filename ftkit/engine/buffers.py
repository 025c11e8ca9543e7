"""The persistent buffers of a model, such as running means: whole on every rank, and one small file of a checkpoint.

They change in a forward and not in an update, so a save takes a copy of them when it is asked for. Rank 0 writes its own.
What it costs: a copy of them in host memory while a save is under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ftkit.engine.pieces import PIECE_BYTES, Piece
from ftkit.engine.seal import checksum
from ftkit.engine.storage import NAMES, TensorFile, create_file, data_start
from ftkit.errors import UserError

BUFFERS = "buffers"
"""The kind, in the name of the file."""
FILE = f"model.{BUFFERS}.safetensors"
STATISTICS = ("running_mean", "running_var")
"""Of norms: infinite ones are a run gone wrong."""


def persistent_buffers(model: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return the buffers that a saved model holds, by name; without `recurse` those of the module itself."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in (model.named_modules() if recurse else [("", model)])
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


def may_be_infinite(name: str) -> bool:
    """Whether a buffer of this name is saved with infinite values, as masks hold them; NaN never is."""
    return name.rpartition(".")[2] not in STATISTICS


def refuse_unsaved(model: nn.Module) -> None:
    """Raise for a state of a model that no checkpoint of the engine would hold.

    Raises:
        UserError: naming the module or the buffer.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UserError(
                f"{name or type(module).__name__} has a state of its own (get_extra_state), which is not saved: keep what "
                "it holds in a buffer (register_buffer)"
            )
    for name, buffer in persistent_buffers(model).items():
        if buffer.dtype not in NAMES:
            raise UserError(
                f"the buffer {name} has dtype {buffer.dtype}, which is not saved: keep it as real numbers "
                "(torch.view_as_real), or register it with persistent=False"
            )


def write_buffers(folder: Path, buffers: dict[str, Tensor]) -> list[Piece]:
    """Write buffers durably as a file of `folder`, and return the pieces of its data."""
    path = folder / FILE
    create_file(path, [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()])
    with TensorFile(path, writable=True) as file:
        for name, buffer in buffers.items():
            file.write(name, 0, buffer.reshape(-1), infinite=may_be_infinite(name))
        file.sync()
    pieces, at = [], data_start(path)
    with open(path, "rb") as data:
        data.seek(at)
        while block := data.read(PIECE_BYTES):
            pieces.append(Piece(at, at + len(block), checksum(block)))
            at += len(block)
    return pieces


def read_buffers(places: Mapping[tuple[str, str], TensorFile], model: nn.Module) -> None:
    """Fill a model's persistent buffers with those of a checkpoint; what it lacks stays as it is.

    Raises:
        UserError: if one has another shape. BrokenCheckpoint: if a byte is not what was written.
    """
    with torch.no_grad():
        for name, buffer in persistent_buffers(model).items():
            file = places.get((BUFFERS, name))
            if file is None:
                continue
            if file.entries[name].shape != tuple(buffer.shape):
                raise UserError(f"{file.path}: {name} has shape {file.entries[name].shape}, the model {tuple(buffer.shape)}")
            values = torch.empty(buffer.numel(), dtype=buffer.dtype)
            file.read(name, 0, values)
            buffer.copy_(values.view(buffer.shape))
