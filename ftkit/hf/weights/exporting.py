"""From a checkpoint to a Hugging Face folder, tensor by tensor: no model, no ranks, some 40 MiB of memory.

The masters (or fp32 weights) of the checkpoint are read piece by piece, each compared with its checksum, and written in
the dtype that is asked for. What transformers calls each tensor is asked of a model without weights. Beside them goes what
the checkpoint holds of configuration, tokenizer and template; of the run itself (optimizer, random numbers) nothing.

It refuses a checkpoint that is not whole, one of an adapter (its folder is in the checkpoint already, ready to be used;
`merging` adds it to its base), and models whose tensors transformers stores in another form. Only files that the checkpoint
lists are read or copied, and of these no pickles. What it costs: one read and one write of the weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.checkpoint.export import cut, publish
from ftkit.engine.checkpoint.manifest import BUFFERS, read_manifest
from ftkit.engine.checkpoint.reader import Places, open_files
from ftkit.engine.checkpoint.safetensors import PIECE_BYTES, TensorFile, create_file
from ftkit.engine.checkpoint.sealed import CONTENTS, BrokenCheckpoint, check_contents
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.weights.loading import load_model
from ftkit.hf.weights.new_folder import new_folder
from ftkit.hf.weights.saving import SHARD_BYTES, hub_names
from ftkit.output.ownership import ENGINE_FOLDER

CONFIG = "config.json"
LARGEST = 1 << 24
"""No field of a configuration is refused for being larger than the model, up to this: positions are counted in millions."""
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
OF_THE_RUN = ("trainer_state.json", "training_args.bin", "training_args.json", "scheduler.pt", "optimizer.pt", CONTENTS)
"""Files of a checkpoint that belong to the run and not to the model; those of random numbers are left out as well."""
NOT_COPIED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".safetensors"}
"""Suffixes of pickles, and of weights: these are written anew."""
NO_MODEL = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError, ImportError),
    AssertionError,
)
"""What transformers raises where the fields of a configuration make no model."""


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    task: str = "causal-lm",
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a Trainer checkpoint's model as a folder that `from_pretrained` opens; return its parameters.

    Args:
        checkpoint: a folder `checkpoint-N`.
        out: folder to make; it must not hold a model yet.
        dtype: fp32, bf16 or fp16; None: what each tensor had before training.
        shard_bytes: largest size of a safetensors file, bytes.
        task: causal-lm or seq2seq.
        trust_remote_code: whether code from the checkpoint folder is run.
        progress: called with the bytes written so far and the bytes of all.

    Raises:
        UserError: if the checkpoint is not whole or cannot be exported, or `out` holds a model.
    """
    check_is_checkpoint(checkpoint)
    listed = check_contents(checkpoint)
    manifest = read_manifest(checkpoint / ENGINE_FOLDER)
    if (checkpoint / "adapter_config.json").exists():
        raise UserError(
            f"{checkpoint}: is an adapter folder already: give it to PEFT or to ftkit generate, or add it to its base with "
            "--merge-adapter"
        )
    refuse_model(out)
    if CONFIG not in listed:
        raise BrokenCheckpoint(f"{checkpoint / CONTENTS}: {CONFIG} is not listed")
    with ExitStack() as stack:
        _, places = stack.enter_context(open_files(checkpoint / ENGINE_FOLDER, manifest))
        sources = _sources(places)
        elements = sum(file.entries[name].numel for name, file in sources.items())
        model = _model(checkpoint, task, trust_remote_code, most_layers=len(sources), largest=max(elements, LARGEST))
        names = _names(model, sources, checkpoint)
        tensors = {
            hub: Outgoing(
                file.entries[name].shape,
                _dtype(dtype, manifest, file, name),
                partial(pieces, file, name),
                check=name in manifest["dtypes"],
            )
            for name, file in sources.items()
            for hub in names.get(name, ())
        }
        target = stack.enter_context(new_folder(out, small_files(listed)))
        copy_small_files(checkpoint, listed, target)
        if dtype is not None:
            note_dtype(target, DTYPES[dtype])
        return write_model(target, tensors, shard_bytes, progress)


@dataclass(frozen=True)
class Outgoing:
    """One tensor of a model that is written.

    Args:
        shape: shape in the file.
        dtype: dtype in the file.
        values: yields (first element, values (n,)) until all elements have come, in order.
        check: whether values that are not finite are refused; buffers may hold masks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[], Iterable[tuple[int, Tensor]]]
    check: bool = True


def write_model(out: Path, tensors: Mapping[str, Outgoing], shard_bytes: int, progress: Callable[[int, int], None]) -> int:
    """Write tensors, by their hub names, as the safetensors files of a folder, which get their names when all are whole.

    Returns:
        The number of elements.
    """
    wanted = [(hub, tensor.shape, tensor.dtype) for hub, tensor in tensors.items()]
    files = cut(wanted, shard_bytes)
    total = sum(torch.Size(shape).numel() * kind.itemsize for _, shape, kind in wanted)
    done = 0
    try:
        for file_name, members in files.items():
            path = out / f"{file_name}.writing"
            path.unlink(missing_ok=True)
            create_file(path, members)
            with TensorFile(path, writable=True) as target:
                for hub, _, kind in members:
                    for start, values in tensors[hub].values():
                        target.write(hub, start, values, check=tensors[hub].check)
                        done += values.numel() * kind.itemsize
                        progress(done, total)
                target.sync()
        publish(out, files)
    except (OSError, UserError) as error:
        for path in out.glob("*.writing"):
            path.unlink()
        if isinstance(error, UserError):
            raise
        raise UserError(f"{out.parent}: cannot be written: {error.strerror}; {total} bytes are needed there") from error
    return sum(torch.Size(shape).numel() for _, shape, _ in wanted)


def pieces(file: TensorFile, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, values (n,)) of a tensor in a file, a few MiB at a time; fp32, but counts as they are."""
    entry, step = file.entries[name], PIECE_BYTES // 8
    numel, dtype = entry.numel, entry.dtype
    dtype = torch.float32 if dtype is None or dtype.is_floating_point else dtype
    for start in range(0, numel, step):
        piece = torch.empty(min(step, numel - start), dtype=dtype)
        file.read(name, start, piece)
        yield start, piece


def check_is_checkpoint(folder: Path) -> None:
    """Raise UserError unless a folder is there and not that of a whole run."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; a checkpoint-N of a run is needed")
    inside = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    if inside and not (folder / CONTENTS).exists():
        raise UserError(f"{folder}: is the folder of a run; name one of its checkpoints: {', '.join(inside)}")


def refuse_model(out: Path) -> None:
    """Raise where a folder holds a model already."""
    if any(out.glob("*.safetensors")):
        raise UserError(f"{out}: holds safetensors files already; name another folder")


def _sources(places: Places) -> dict[str, TensorFile]:
    """Return for each tensor the file that has its values, the exact ones where there are two."""
    sources: dict[str, TensorFile] = {name: file for (kind, name), file in places.items() if kind in ("weights", BUFFERS)}
    return sources | {name: file for (kind, name), file in places.items() if kind == "master"}


def _model(checkpoint: Path, task: str, trust_remote_code: bool, *, most_layers: int, largest: int) -> Any:
    """Return the model that config.json describes, without weights.

    Raises:
        UserError: if it describes none, or one with more layers than there are tensors.
    """
    path = checkpoint / CONFIG
    try:
        layers = _most_layers(json.loads(path.read_bytes()))
        size = _largest(json.loads(path.read_bytes()))
        if size > largest:  # tables as wide as that are made before shapes can be compared
            raise UserError(f"{path}: has a size of {size}, and the checkpoint {largest} elements at most")
        if layers > most_layers:  # to build a million of them takes longer than to refuse them
            raise UserError(f"{path}: describes {layers} layers, and the checkpoint has {most_layers} tensors")
        return load_model(None, task=task, config=os.fspath(checkpoint), trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except NO_MODEL as error:
        raise UserError(f"{path}: no configuration that a model can be built from ({error!s:.200})") from error


def _largest(fields: Any) -> int:
    """Return the largest whole number in a configuration."""
    if isinstance(fields, dict):
        fields = list(fields.values())
    if isinstance(fields, list):
        return max(map(_largest, fields), default=0)
    return fields if type(fields) is int else 0


def _most_layers(fields: Any) -> int:
    """Return the largest number of layers that a configuration, or one within it, asks for."""
    if not isinstance(fields, dict):
        return 0
    own = [fields[key] for key in LAYER_COUNTS if type(fields.get(key)) is int]
    return max([*own, *(_most_layers(value) for value in fields.values())], default=0)


def _names(model: Any, sources: dict[str, TensorFile], checkpoint: Path) -> dict[str, list[str]]:
    expected = dict(model.named_parameters()) | persistent_buffers(model)
    lacking = [name for name in expected if name not in sources]
    if lacking or len(sources) != len(expected):
        odd = (lacking or [name for name in sources if name not in expected])[0]
        raise UserError(f"{checkpoint}: its tensors are not those of a {type(model).__name__} by its config.json ({odd})")
    for name, parameter in expected.items():
        found = sources[name].entries[name].shape
        if found != tuple(parameter.shape):
            told = f"{name} has shape {found}, {tuple(parameter.shape)} by its config.json"
            raise UserError(f"{sources[name].path}: {told}")
    return hub_names(model, [name for name, _ in model.named_parameters()], {})


def _dtype(wanted: str | None, manifest: dict[str, Any], file: TensorFile, name: str) -> torch.dtype:
    if name not in manifest["dtypes"] and (own := file.entries[name].dtype) is not None:  # a buffer
        return own
    if wanted is not None:
        return DTYPES[wanted]
    return getattr(torch, manifest["dtypes"].get(name, "float32"))


def copy_small_files(source: Path, listed: Iterable[str], out: Path, *, but: tuple[str, ...] = ()) -> None:
    """Copy what lies beside the weights, of the files that a folder lists: configuration, tokenizer and template."""
    for name in small_files(listed, but=but):
        shutil.copyfile(source / name, out / name)


def small_files(listed: Iterable[str], *, but: tuple[str, ...] = ()) -> list[str]:
    """Return the files that `copy_small_files` copies."""
    found = []
    for name in sorted(listed):
        of_the_run = name in (*OF_THE_RUN, *but) or name.startswith("rng_state")
        if "/" not in name and not of_the_run and Path(name).suffix not in NOT_COPIED:
            found.append(name)
    return found


def note_dtype(out: Path, dtype: torch.dtype) -> None:
    """Write a model's dtype into its config.json."""
    config = json.loads((out / CONFIG).read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
