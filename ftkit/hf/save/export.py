"""A full checkpoint written as a Hugging Face folder, tensor by tensor, without a model in memory.

The fp32 masters of the checkpoint (or its weights) are read in pieces, compared with their checksums and written in the
requested dtype. The configuration, tokenizer and chat template of the checkpoint are copied. Its optimizer state is not.
Only files that the checkpoint lists are read or copied, and no pickles.

Cost: one read and one write of the weights; some 40 MiB of host memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.checkpoint.export import cut, publish
from ftkit.engine.checkpoint.manifest import BUFFERS, read_manifest
from ftkit.engine.checkpoint.reader import Places, open_files
from ftkit.engine.checkpoint.safetensors import PIECE_BYTES, TensorFile, bytes_of, create_file
from ftkit.engine.checkpoint.sealed import CONTENTS, BrokenCheckpoint, check_contents
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.load.model import load_model
from ftkit.hf.save.model import SHARD_BYTES, hub_names
from ftkit.output.ownership import ENGINE_FOLDER

CONFIG = "config.json"
RUN_FILES = ("trainer_state.json", "training_args.bin", "scheduler.pt", "optimizer.pt", CONTENTS)
"""Files of a checkpoint that belong to the run, like those of random numbers (`rng_state*`), and are not copied."""
NOT_COPIED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".safetensors"}
"""Suffixes of pickles and weights."""
PARTIAL = ".writing-"
"""Prefix of the folder that holds an unfinished export."""


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
    """Write a full checkpoint as a folder that `from_pretrained` opens.

    Args:
        checkpoint: A folder `checkpoint-N`.
        out: Folder to write. It must not exist, or be empty.
        dtype: fp32, bf16 or fp16. None keeps the dtype that each tensor had before training.
        shard_bytes: Largest size of a safetensors file, bytes.
        task: A task of `ftkit.hf.load.tasks.TASKS`.
        trust_remote_code: Whether Python code in the checkpoint folder may run.
        progress: Called with the bytes written so far and in total.

    Returns:
        The number of parameters and buffer elements.

    Raises:
        UserError: The checkpoint is damaged or cannot be exported, or `out` is not empty.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: no such folder; a checkpoint-N of a run is needed")
    inside = sorted(path.name for path in checkpoint.glob("checkpoint-*"))
    if inside and not (checkpoint / CONTENTS).exists():
        raise UserError(f"{checkpoint}: is the folder of a run; name one of its checkpoints: {', '.join(inside)}")
    listed = check_contents(checkpoint)
    manifest = read_manifest(checkpoint / ENGINE_FOLDER)
    if (checkpoint / "adapter_config.json").exists():
        raise UserError(
            f"{checkpoint}: is an adapter folder: give it to PEFT or to ftkit generate, or merge it into its base with "
            "--merge-adapter"
        )
    if CONFIG not in listed:
        raise BrokenCheckpoint(f"{checkpoint / CONTENTS}: {CONFIG} is not listed")
    with ExitStack() as stack:
        target = stack.enter_context(new_folder(out))
        _, places = stack.enter_context(open_files(checkpoint / ENGINE_FOLDER, manifest))
        sources = _sources(places)
        model = load_model(None, task=task, config=os.fspath(checkpoint), trust_remote_code=trust_remote_code)
        names = _names(model, sources, checkpoint)
        own = {name: file.entries[name].dtype or torch.float32 for name, file in sources.items()}
        trained = {name: DTYPES[dtype] if dtype else getattr(torch, kept) for name, kept in manifest["dtypes"].items()}
        copy_small_files(checkpoint, listed, target)
        if dtype is not None:
            config = json.loads((target / CONFIG).read_text()) | {"dtype": str(DTYPES[dtype]).removeprefix("torch.")}
            (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        # Buffers keep their dtype, and may hold infinite masks.
        buffers = sources.keys() - trained.keys()
        return _write(target, sources, names, own | trained, buffers, shard_bytes, progress)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary subfolder of `out`. At the end its files are moved to `out`; it is removed after an error.

    Raises:
        UserError: `out` holds files already, or cannot be written.
    """
    there = [path.name for path in out.iterdir() if not path.name.startswith(PARTIAL)] if out.is_dir() else []
    if there:
        raise UserError(f"{out}: holds {min(there)} already; name a new or empty folder")
    made = [path for path in (out, *out.absolute().parents) if not path.exists()]
    partial_folder = out / f"{PARTIAL}{os.getpid()}"
    try:
        partial_folder.mkdir(parents=True)
        yield partial_folder
        for path in partial_folder.iterdir():
            path.rename(out / path.name)
        partial_folder.rmdir()
    except BaseException as error:
        shutil.rmtree(partial_folder, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{out}: cannot be written: {error.strerror or error}; name another folder") from error
        raise


def _write(
    target: Path,
    sources: Mapping[str, TensorFile],
    names: Mapping[str, Sequence[str]],
    dtypes: Mapping[str, torch.dtype],
    may_be_infinite: Collection[str],
    shard_bytes: int,
    progress: Callable[[int, int], None],
) -> int:
    """Write tensors from `sources` under their hub names to the files of a folder. Return the number of elements."""
    source_of = {hub: name for name in sources for hub in names.get(name, ())}
    wanted = [(hub, sources[name].entries[name].shape, dtypes[name]) for hub, name in source_of.items()]
    files = cut(wanted, shard_bytes)
    total, done = sum(bytes_of(shape, dtype) for _, shape, dtype in wanted), 0
    for file_name, members in files.items():
        path = target / f"{file_name}.writing"
        create_file(path, members)
        with TensorFile(path, writable=True) as file:
            for hub, _, dtype in members:
                name = source_of[hub]
                for start, values in _pieces(sources[name], name):
                    file.write(hub, start, values, check=name not in may_be_infinite)
                    done += values.numel() * dtype.itemsize
                    progress(done, total)
            file.sync()
    publish(target, files)
    return sum(torch.Size(shape).numel() for _, shape, _ in wanted)


def _pieces(file: TensorFile, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, values (n,)) of a tensor, a few MiB at a time; floating-point values in fp32."""
    entry, step = file.entries[name], PIECE_BYTES // 8
    dtype = torch.float32 if entry.dtype is None or entry.dtype.is_floating_point else entry.dtype
    for start in range(0, entry.numel, step):
        piece = torch.empty(min(step, entry.numel - start), dtype=dtype)
        file.read(name, start, piece)
        yield start, piece


def _sources(places: Places) -> dict[str, TensorFile]:
    """Return the file of each tensor, that of the fp32 master where there is one."""
    sources: dict[str, TensorFile] = {name: file for (kind, name), file in places.items() if kind in ("weights", BUFFERS)}
    return sources | {name: file for (kind, name), file in places.items() if kind == "master"}


def _names(model: Any, sources: Mapping[str, TensorFile], checkpoint: Path) -> dict[str, list[str]]:
    """Return the hub names of the checkpoint's tensors.

    Raises:
        UserError: The tensors are not those of `model`, for instance those of another task.
    """
    expected = dict(model.named_parameters()) | persistent_buffers(model)
    if odd := sorted(expected.keys() ^ sources.keys()):
        raise UserError(
            f"{checkpoint}: its tensors are not those of a {type(model).__name__} ({odd[0]}): is another --task needed?"
        )
    return hub_names(model, {name: file.entries[name].shape for name, file in sources.items()}, {})


def copy_small_files(source: Path, listed: Iterable[str], out: Path, *, but: Collection[str] = ()) -> None:
    """Copy configuration, tokenizer and chat template, of the files that a folder lists."""
    for name in listed:
        of_the_run = name in RUN_FILES or name in but or name.startswith("rng_state")
        if "/" not in name and not of_the_run and Path(name).suffix not in NOT_COPIED:
            shutil.copyfile(source / name, out / name)
