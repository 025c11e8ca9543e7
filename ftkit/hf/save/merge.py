"""An adapter merged into its base by PEFT, written as one plain model.

One process holds the base and the adapter in host memory. `ftkit.hf.save.export` writes full checkpoints without that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG
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

    Args, beside those of `export_checkpoint`:
        adapter: A checkpoint-N of an adapter's run, or an adapter folder.
        base: Folder or hub name of the base. None takes the one that the adapter names.
        dtype: fp32, bf16 or fp16. None keeps the dtype of the base.

    Returns:
        The number of parameters.

    Raises:
        UserError: The adapter is damaged, does not fit the base or cannot be merged, or `out` is not empty.

    Cost: host memory for the whole model. PEFT merges in the dtype of the base, and in fp32 for `dtype="fp32"`.
    """
    if not all((adapter / name).is_file() for name in (ADAPTER_CONFIG, SAFETENSORS_WEIGHTS_NAME)):
        raise UserError(
            f"{adapter}: an adapter needs {ADAPTER_CONFIG} and {SAFETENSORS_WEIGHTS_NAME}; export a full checkpoint without "
            "--merge-adapter"
        )
    sealed = (adapter / CONTENTS).exists()
    listed = check_contents(adapter) if sealed else [path.name for path in adapter.iterdir() if path.is_file()]
    with new_folder(out) as target:
        with reading(str(adapter), "the adapter's configuration cannot be read"):
            config = PeftConfig.from_pretrained(str(adapter))
        name, revision = (base, None) if base else (config.base_model_name_or_path, config.revision)
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
        copy_small_files(adapter, listed, target)
        model.save_pretrained(target, max_shard_size=shard_bytes)
    return sum(parameter.numel() for parameter in model.parameters())


def _merged(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Return `model` with the adapter merged into it.

    PEFT adds an adapter of one tied weight to both, and adapters of both (`ensure_weight_tying`) twice. So each name gets
    a tensor of its own first. Afterwards equal tensors are tied again, others stay apart in the written folder.
    """
    ties, was_tied = dict(model.all_tied_weights_keys), getattr(model.config, "tie_word_embeddings", False)
    with reading(str(adapter), "the adapter cannot be merged into the base"):
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
        # `from_pretrained` does not return the keys that it could not use.
        unused = adapted.load_adapter(str(adapter), "default", torch_device="cpu").unexpected_keys
        if unused:
            raise UserError(
                f"{adapter}: {min(unused)} is not in the base: another base, a head of another --task, or prompts, which "
                "cannot be merged"
            )
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
                module.register_parameter(key, nn.Parameter(parameter.detach().clone()))
            known.add(id(parameter))
