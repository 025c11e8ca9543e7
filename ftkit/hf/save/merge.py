"""An adapter merged into its base by PEFT, written as one plain model.

One process holds the base and the adapter in host memory. `ftkit.hf.save.export` writes full checkpoints without that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn
from transformers import PreTrainedModel

from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.engine.checkpoint.sealed import CONTENTS, check_contents
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.load.config import read_config, reading
from ftkit.hf.load.tasks import TASKS
from ftkit.hf.save.export import copy_small_files, new_folder
from ftkit.hf.save.model import SHARD_BYTES

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, SAFETENSORS_WEIGHTS_NAME, "README.md")


def merge_adapter(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    task: str = "causal-lm",
    trust_remote_code: bool = False,
) -> int:
    """Merge an adapter into its base, and write the result as a folder that `from_pretrained` opens.

    Args:
        adapter: A checkpoint-N of an adapter's run, or an adapter folder.
        out: Folder to write. It must not exist, or be empty.
        base: Folder or hub name of the base. None takes the one that the adapter names.
        dtype: fp32, bf16 or fp16. None keeps the dtype of the base.
        shard_bytes: Largest size of a safetensors file, bytes.
        task: A task of `ftkit.hf.load.tasks.TASKS`.
        trust_remote_code: Whether Python code in the base's folder may run.

    Returns:
        The number of parameters.

    Raises:
        UserError: The adapter is damaged, does not fit the base or cannot be merged, or `out` is not empty.

    Cost: host memory for the whole model. PEFT merges in the dtype of the base, and in fp32 for `dtype="fp32"`.
    """
    listed = check_contents(adapter) if (adapter / CONTENTS).exists() else _files(adapter)
    for name in (ADAPTER_CONFIG, SAFETENSORS_WEIGHTS_NAME):
        if not (adapter / name).is_file():
            raise UserError(
                f"{adapter}: no {name}. Name an adapter folder with safetensors weights, or a checkpoint of an adapter's "
                "run; export a full checkpoint without --merge-adapter"
            )
    with new_folder(out) as target:
        with reading(str(adapter), "the adapter's configuration cannot be read"):
            config = PeftConfig.from_pretrained(str(adapter))
        if config.is_prompt_learning:
            raise UserError(f"{adapter}: an adapter of prompts has no weights to merge: use peft.PeftModel.from_pretrained")
        name, revision = (base, None) if base else (config.base_model_name_or_path, config.revision)
        if not name:
            raise UserError(f"{adapter / ADAPTER_CONFIG}: names no base model; name it with --base")
        options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        read_config(name, None, **options)  # refuses a quantised base, and an adapter in its place
        with reading(name, f"the base of {adapter} cannot be loaded"):
            # PEFT adds in the dtype of the base, so a wider result needs a wider base.
            options["dtype"] = torch.float32 if dtype == "fp32" else "auto"
            loaded = getattr(transformers, TASKS[task]).from_pretrained(name, use_safetensors=True, **options)
        model: Any = _merged(loaded, adapter)
        if dtype is not None:
            torch.nn.Module.to(model, DTYPES[dtype])
        for tensor_name, parameter in model.named_parameters():
            refuse_not_finite(tensor_name, parameter.detach().reshape(-1))
        copy_small_files(adapter, listed, target, but=ADAPTER_FILES)
        model.save_pretrained(target, max_shard_size=shard_bytes)
    return sum(parameter.numel() for parameter in model.parameters())


def _files(folder: Path) -> list[str]:
    """Return the names of a folder's files, without links."""
    return [path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()] if folder.is_dir() else []


def _merged(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Return `model` with the adapter merged into it.

    PEFT adds an adapter of one tied weight to both, and adapters of both (`ensure_weight_tying`) twice. So each name gets
    a tensor of its own first. Afterwards equal tensors are tied again, others stay apart in the written folder.
    """
    ties, was_tied = dict(model.all_tied_weights_keys), getattr(model.config, "tie_word_embeddings", False)
    with reading(str(adapter), "the adapter cannot be merged into the base"):
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
        # `from_pretrained` does not return what it could not use.
        unused = adapted.load_adapter(str(adapter), "default", torch_device="cpu").unexpected_keys
        if unused:
            raise UserError(f"{adapter}: {min(unused)} is not in the base: another base, or a head of another --task")
        _untie(adapted)
        merged: PreTrainedModel = adapted.merge_and_unload()
    state = merged.state_dict()
    if all(torch.equal(state[one], state[other]) for one, other in ties.items()):
        merged.config.tie_word_embeddings = was_tied
        merged.tie_weights(recompute_mapping=False)
    else:
        for part in merged.modules():
            if isinstance(part, PreTrainedModel):
                part.config.tie_word_embeddings = False
    return merged


def _untie(model: nn.Module) -> None:
    """Give each parameter that several modules share a copy in each of them."""
    known: set[int] = set()
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in known:
                copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                module.register_parameter(key, copy)
            known.add(id(parameter))
