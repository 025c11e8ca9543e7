"""The persistent buffers of a model, such as running means: whole on every rank, and one small file of a checkpoint.

They change in a forward and not in an update, so a save takes a copy of them when it is asked for. Rank 0 writes its own.
What it costs: a copy of them in host memory while a save is under way.

Each rank's forward writes from its own rows (running means, moving averages, codebooks). Ranks would part, and train for
other buffers than those that are saved. DDP sends rank 0's before the next forward; here they are sent after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.files.pieces import PIECE_BYTES, Piece
from ftkit.engine.files.sealed_files import checksum
from ftkit.engine.files.storage import NAMES, TensorFile, create_file, data_start
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


class CommonBuffers:
    """Makes persistent buffers that forwards have written to the same on all ranks again: rank 0's.

    Args:
        model: the model, whose buffers are the same on all ranks now.
        comm: the ranks.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.comm = comm
        modules = list(model.modules()) if comm.world_size > 1 else []
        self.slots = [(module, key) for module in modules for key in persistent_buffers(module, recurse=False)]
        self.seen = [_seen(module._buffers.get(key)) for module, key in self.slots]

    def written(self) -> list[float]:
        """Return a number a buffer, whose sum over ranks is positive where some rank wrote to it, so that it is to be sent.

        One that has another shape or dtype than before on any rank, or is gone, stays that rank's own.

        Cost: a look at each, and at up to 4096 of its values (what is written through `.data` leaves no other trace).
        """
        now = [_seen(module._buffers.get(key)) for module, key in self.slots]
        own = -float(self.comm.world_size)
        return [float(seen[1:] != before[1:]) if seen[0] == before[0] else own for seen, before in zip(now, self.seen)]

    @torch.no_grad()
    def send(self, written: Sequence[float]) -> None:
        """Take rank 0's. A collective where there are any to send.

        Args:
            written: the sums over ranks of what `written` returned.

        Cost: one broadcast of all that were written to.
        """
        places = [(number, *self.slots[number]) for number, count in enumerate(written) if count > 0]
        sent = [(number, buffer) for number, module, key in places if (buffer := module._buffers[key]) is not None]
        if not sent:
            return
        rows = [buffer.to(self.comm.device).contiguous().view(-1).view(torch.uint8) for _, buffer in sent]
        values = torch.cat(rows)
        self.comm.broadcast(values, "buffers")
        for (number, buffer), row in zip(sent, values.split([len(row) for row in rows])):
            buffer.copy_(row.clone().view(buffer.dtype).view(buffer.shape))  # a row may begin at an odd byte
            self.seen[number] = _seen(buffer)


def _seen(buffer: Tensor | None) -> tuple[object, ...]:
    """Return a buffer's form, and what changes when it is written to or replaced."""
    if buffer is None:
        return (None,)
    if buffer.layout != torch.strided:  # a sparse one is refused where it would be saved, and is a rank's own
        return ((buffer.shape, buffer.dtype, buffer.layout),)
    values = buffer.detach().reshape(-1)
    sample = values[:: max(1, -(-values.numel() // SAMPLE))].cpu().contiguous()
    version = 0 if buffer.is_inference() else buffer._version
    summed = checksum(sample.view(torch.uint8).numpy().tobytes())
    return (buffer.shape, buffer.dtype, buffer.layout), id(buffer), version, summed


SAMPLE = 4096
"""Values of a buffer that are looked at."""


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
                f"{name or type(module).__name__} has extra state (get_extra_state), which is not saved: keep its "
                "content in a buffer (register_buffer)"
            )
    for name, buffer in persistent_buffers(model).items():
        if buffer.dtype not in NAMES:
            raise UserError(
                f"the buffer {name} has dtype {buffer.dtype}, which is not saved: keep it as real numbers "
                "(torch.view_as_real), or register it with persistent=False"
            )
        if buffer.layout != torch.strided:
            raise UserError(
                f"the buffer {name} has layout {buffer.layout}, which is not saved: keep it dense, or register it with "
                "persistent=False"
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
