"""A full checkpoint written as a Hugging Face folder, tensor by tensor, without a model in memory.

The fp32 masters of the checkpoint (or its weights) are read in pieces, compared with their checksums and written in the
requested dtype. The configuration, tokenizer and chat template of the checkpoint are copied. Its optimizer state is not.
Only files that the checkpoint lists are read or copied, and no pickles.

Cost: one read and one write of the weights; about 20 MiB of host memory (`make bench-memory`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG
from transformers.utils.logging import tqdm

from ftkit.engine.checkpoint.export import cut, publish
from ftkit.engine.checkpoint.manifest import BUFFERS, ENGINE_FOLDER, read_manifest
from ftkit.engine.checkpoint.reader import open_files
from ftkit.engine.checkpoint.safetensors import TensorFile, create_file
from ftkit.engine.checkpoint.sealed import CONTENTS, check_contents
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.load.model import load_model
from ftkit.hf.save.model import SHARD_BYTES, hub_names
from ftkit.spec.sizes import PIECE_BYTES

CONFIG = "config.json"
NOT_COPIED = ("trainer_state.json", CONTENTS, ADAPTER_CONFIG, "README.md")
"""Files that belong to the run or to its adapter."""
PICKLES_AND_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".safetensors")
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
) -> int:
    """Write a full checkpoint as a folder that `from_pretrained` opens.

    Args:
        checkpoint: A folder `checkpoint-N`.
        out: Folder to write. It must not exist, or be empty.
        dtype: fp32, bf16 or fp16. None keeps the dtype that each tensor had before training.
        shard_bytes: Largest size of a safetensors file, bytes.
        task: A task of `ftkit.hf.load.tasks.TASKS`.
        trust_remote_code: Whether Python code in the checkpoint folder may run.

    Returns:
        The number of parameters and buffer elements.

    Raises:
        UserError: The checkpoint is damaged or cannot be exported, or `out` is not empty.
    """
    listed = check_contents(checkpoint)
    if CONFIG not in listed:
        raise UserError(
            f"{checkpoint}: no {CONFIG}. A checkpoint of an adapter is merged into its base with --merge-adapter, or opened "
            "by PEFT and ftkit generate"
        )
    manifest = read_manifest(checkpoint / ENGINE_FOLDER)
    with new_folder(out) as target, open_files(checkpoint / ENGINE_FOLDER, manifest) as (_, places):
        kinds = ("weights", BUFFERS, "master")  # masters replace weights
        sources = {name: places[kind, name] for kind in kinds for own, name in places if own == kind}
        model = load_model(None, task=task, config=str(checkpoint), trust_remote_code=trust_remote_code)
        if odd := sorted((dict(model.named_parameters()) | persistent_buffers(model)).keys() ^ sources.keys()):
            raise UserError(
                f"{checkpoint}: its tensors are not those of a {type(model).__name__} ({odd[0]}): is another --task needed?"
            )
        shapes = {name: torch.Size(file.entries[name].shape) for name, file in sources.items()}
        names = hub_names(model, shapes, dict(zip(shapes, shapes)))
        dtypes = {name: DTYPES[dtype] if dtype else getattr(torch, kept) for name, kept in manifest["dtypes"].items()}
        copy_small_files(checkpoint, listed, target)
        if dtype is not None:
            model.config.dtype = DTYPES[dtype]
            model.config.save_pretrained(target)
        return _write(target, sources, names, dtypes, shard_bytes)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary subfolder of `out`. At the end its files are moved to `out`; it is removed after an error.

    Raises:
        UserError: `out` holds files already, or cannot be written.
    """
    there = [path.name for path in out.iterdir() if not path.name.startswith(PARTIAL)] if out.is_dir() else []
    if there:
        raise UserError(f"{out}: holds {min(there)} already; name a new or empty folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=PARTIAL, dir=out) as partial_folder:
            yield Path(partial_folder)
            for path in Path(partial_folder).iterdir():
                path.rename(out / path.name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}; name another folder") from error


def _write(
    target: Path,
    sources: Mapping[str, TensorFile],
    names: Mapping[str, Iterable[str]],
    dtypes: Mapping[str, torch.dtype],
    shard_bytes: int,
) -> int:
    """Write tensors from `sources` under their hub names to the files of a folder. Return the number of elements.

    Buffers, which `dtypes` does not name, keep their dtype, and may hold infinite masks.
    """
    source_of = {hub: name for name in sources for hub in names.get(name, ())}
    wanted = []
    for hub, name in source_of.items():
        entry = sources[name].entries[name]
        wanted.append((hub, entry.shape, dtypes.get(name) or entry.dtype or torch.float32))
    files = cut(wanted, shard_bytes)
    for file_name, members in tqdm(files.items(), desc="Writing model files"):
        path = target / f"{file_name}.writing"
        create_file(path, members)
        with TensorFile(path, writable=True) as file:
            for hub, _, _ in members:
                name, step = source_of[hub], PIECE_BYTES // 8
                entry = sources[name].entries[name]
                for start in range(0, entry.numel, step):
                    values = torch.empty(min(step, entry.numel - start), dtype=entry.dtype)
                    sources[name].read(name, start, values)
                    file.write(hub, start, values, check=name in dtypes)
            file.sync()
    publish(target, files)
    return sum(torch.Size(shape).numel() for _, shape, _ in wanted)


def copy_small_files(source: Path, listed: Iterable[str], out: Path) -> None:
    """Copy configuration, tokenizer and chat template, of the files that a folder lists, and no links."""
    for path in (source / name for name in listed if "/" not in name and name not in NOT_COPIED):
        if path.suffix not in PICKLES_AND_WEIGHTS and not path.is_symlink():
            shutil.copyfile(path, out / path.name)
