"""From a sharded model to a folder that `from_pretrained` opens, without gathering the model anywhere.

Each rank writes its own ranges of hub-named safetensors files; rank 0 adds the configuration. Where transformers renames
tensors on load, its own reverse mapping gives the names; where it would have to cut or merge them, the save is refused. An
adapter is small and replicated: PEFT writes it as it always does.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from peft import PeftModel
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from transformers import PreTrainedModel, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer import TRAINING_ARGS_NAME

from ftkit.engine.checkpoint.durable import all_ranks, rank_zero
from ftkit.engine.checkpoint.export import export_tensors
from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError
from ftkit.hf.models.dtypes import named_dtype
from ftkit.hf.models.hooks import LIBRARIES, home_of, name_of
from ftkit.hf.weights.loading import adapter_names, every_buffer, names_only

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""Size at which a new safetensors file is begun, as transformers does."""


WHOLE_BYTES = 1 << 62
"""Other modules are one file, as in the Trainer: nothing reads an index of them."""


def check_savable(units: ShardedModel) -> dict[str, list[str]]:
    """Return the names under which a model's tensors and persistent buffers are saved; see `hub_names`.

    An adapter's are PEFT's affair: none.

    Raises:
        UserError: if parameters are others than those that were sharded, or transformers cannot turn the weights back into
            the form in which they are stored, or would look for an adapter in them.
    """
    units.check_unchanged()
    if isinstance(units.model, PeftModel):
        return {}
    _refuse_own_states(units.model)
    _refuse_hidden_adapters(units.model)
    own = [segment.name for flat in units.flats for segment in flat.layout.segments]
    return hub_names(units.model, own, _aliases(units))


def _aliases(units: ShardedModel) -> dict[str, str]:
    """Return every other name of a tensor or persistent buffer, also of those in a module that is registered twice."""
    found = dict(units.aliases)
    for name, parameter in units.model.named_parameters(remove_duplicate=False):
        flat, index = units.places[id(parameter)]
        if (first := flat.layout.segments[index].name) != name:
            found[name] = first
    firsts: dict[int, str] = {}
    for name, module in units.model.named_modules(remove_duplicate=False):
        first = firsts.setdefault(id(module), name)
        for key in persistent_buffers(module, recurse=False) if first != name else ():
            found[f"{name}.{key}"] = f"{first}.{key}"
    return found


def _refuse_own_states(model: nn.Module) -> None:
    """Raise for modules that say by code of the user's own what their state is, or how it is saved: nobody would call it.

    Raises:
        UserError: naming the module.
    """
    for name, module in model.named_modules():
        told = name or type(module).__name__
        saved = any(True for _ in module.parameters()) or bool(persistent_buffers(module))
        own = _own_of_saving(module, SAVING if name == "" else SAVING_A_PART) if saved else None  # else: a metric
        if own is not None:
            raise UserError(
                f"{told} has a {own} of its own, and its weights are saved under the names that its modules have, as they "
                f"are: leave {own} as it is, or change the saved file"
            )
        found = [hook for kind in STATE_HOOKS for hook in vars(module).get(kind, {}).values()]
        if hook := next((each for each in found if home_of(each).partition(".")[0] not in LIBRARIES), None):
            raise UserError(
                f"{told} has {name_of(hook)} as a hook of its state_dict(), which is not called here: weights are saved "
                "under the names that modules have, as they are. Remove it, or change the saved file"
            )


STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
SAVING_A_PART = ("state_dict", "_save_to_state_dict")
SAVING = (*SAVING_A_PART, "save_pretrained")
"""Methods that make what is saved: nobody calls `save_pretrained` of a part when the whole is saved."""
THEIRS = LIBRARIES | {"huggingface_hub"}
"""Whose methods save what the modules hold: `PyTorchModelHubMixin` gives any module a `save_pretrained`."""


def _own_of_saving(module: nn.Module, methods: Sequence[str]) -> str | None:
    """Return the name of the method by which a module makes itself what is saved of it; None where it has none."""
    for name in methods:
        for method in (vars(module).get(name), getattr(type(module), name, None)):
            while method is not None and home_of(method).startswith("ftkit."):  # ours asks the model's own
                method = getattr(method, "__wrapped__", None)
            if method is not None and home_of(method).partition(".")[0] not in THEIRS:
                return f"{name}()"
    if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict and not isinstance(module, LazyModuleMixin):
        return "_save_to_state_dict()"
    return None


def _refuse_hidden_adapters(model: nn.Module) -> None:
    """Raise for adapters inside of a transformers model: its weights have names then that from_pretrained does not know."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and getattr(module, "_hf_peft_config_loaded", False):
            raise UserError(
                f"{name or type(module).__name__} has an adapter of its own (add_adapter, load_adapter), which cannot be "
                "saved from shards: use peft.get_peft_model(model, config) or peft.PeftModel.from_pretrained(model, folder)"
            )


def save_arguments(arguments: TrainingArguments, folder: Path) -> None:
    """Write the arguments of a run for people, as the Trainer does; as JSON where they cannot be pickled.

    Classes that pickle cannot find again are why: those defined in a function, a notebook or `__main__` of a child process.
    """
    buffer = io.BytesIO()
    try:
        torch.save(arguments, buffer)
    except Exception as error:  # whatever a field of somebody's own makes of it
        logger.warning("%s cannot be pickled (%s): training_args.json is written instead", type(arguments).__name__, error)
        (folder / "training_args.json").write_text(_as_json(arguments))
        return
    (folder / TRAINING_ARGS_NAME).write_bytes(buffer.getvalue())


def _as_json(arguments: TrainingArguments) -> str:
    try:
        return str(arguments.to_json_string())
    except TypeError:  # a field that JSON has no form for
        known = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
        hidden = {name: f"<{name.upper()}>" for name, value in known.items() if name.endswith("_token") and value}
        return json.dumps(known | hidden, default=repr, indent=2)  # tokens hidden as to_json_string hides them


def save_model(
    units: ShardedModel,
    folder: str | os.PathLike[str],
    optimizer: ShardedOptimizer | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a sharded model as a Hugging Face folder, or a PEFT model as an adapter folder. A collective.

    A plain `nn.Module` is written as the Trainer does: safetensors under its own names, and no configuration.

    Args:
        units: the sharded model.
        folder: folder to make; model files in it are replaced.
        optimizer: the optimizer, whose fp32 master weights are the source where the weights in use are narrower.
        dtype: dtype of the tensors, of torch or "fp32", "bf16", "fp16"; None: what each had before sharding.
        shard_bytes: largest size of a safetensors file, bytes.

    Raises:
        UserError: if the folder cannot be written, or transformers would have to rewrite tensors.
    """
    path, dtype = Path(folder), named_dtype(dtype)
    if isinstance(units.model, PeftModel):
        _save_adapters(units, path, optimizer, dtype)
        return
    model = units.model
    names = check_savable(units)
    own_buffers = persistent_buffers(model)
    buffers = {hub: buffer.detach().cpu() for name, buffer in own_buffers.items() for hub in names.get(name, ())}
    with rank_zero(units.comm) as first:
        if first and isinstance(model, PreTrainedModel):
            _try_config(model)
    with _made(path, units):
        export_tensors(
            path,
            units,
            optimizer,
            names_of=lambda name: names.get(name, ()),
            dtype_of=lambda name: dtype or units.dtypes[name],
            buffers=buffers,
            shard_bytes=shard_bytes if isinstance(model, PreTrainedModel) else WHOLE_BYTES,
        )
    with rank_zero(units.comm) as first:
        if first and isinstance(model, PreTrainedModel):
            save_config(model, path, dtype or next(iter(units.dtypes.values())))


@contextmanager
def _made(folder: Path, units: ShardedModel) -> Iterator[None]:
    """Make a folder that is not there; where the body is refused, leave none. A collective."""
    made: list[Path] = []
    with rank_zero(units.comm) as first:
        if first:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except UserError:
        for path in made:
            with suppress(OSError):  # something is in it
                path.rmdir()
        raise


def _try_config(model: PreTrainedModel) -> None:
    """Write what belongs beside the weights once, and throw it away.

    Raises:
        UserError: if that raises, as it would once the weights are written.
    """
    advice = "Put that right in its config or generation_config before it is saved"
    try_writing(lambda folder: save_config(model, folder), "the model cannot be saved as it is", advice)


def try_writing(write: Callable[[Path], object], told: str, advice: str) -> None:
    """Let `write` fill a temporary folder, which is removed.

    Args:
        write: writes into the folder that it is given.
        told: what cannot be done if it raises.
        advice: what to do about it.

    Raises:
        UserError: if it raises anything but an error of that folder's drive; the true folder lies on another.
    """
    try:
        with TemporaryDirectory(prefix="ftkit-try-") as folder:
            write(Path(folder))
    except OSError:
        pass
    except Exception as error:
        raise UserError(f"{told}: {type(error).__name__}: {error}. {advice}") from error


def save_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write what belongs beside the weights: configuration, generation configuration, custom code."""
    model.config.architectures = [type(model).__name__]
    if dtype is not None:
        model.config.dtype = str(dtype).removeprefix("torch.")
    if model._auto_class is not None:
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _save_adapters(units: ShardedModel, path: Path, optimizer: ShardedOptimizer | None, dtype: torch.dtype | None) -> None:
    """Let PEFT write its folder. A collective; rank 0 holds what is written.

    PEFT itself says what belongs in it: adapters, modules trained whole, embeddings where they were resized.
    """
    model, comm = cast(PeftModel, units.model), units.comm
    units.check_unchanged()
    line_names = {}  # every name of a tensor, also those that lead through a module which several others have
    for name, parameter in model.named_parameters(remove_duplicate=False):
        flat, index = units.places[id(parameter)]
        line_names[name] = flat.layout.segments[index].name
    buffers = every_buffer(model)
    wanted: set[str] = set()
    with rank_zero(comm) as first:
        if first:
            names = [*line_names, *buffers]
            wanted.update(*(adapter_names(model, names, adapter) for adapter in model.peft_config))
    saved_buffers = {name: buffers[name].detach().cpu() for name in wanted & buffers.keys()}
    wanted = comm.same(wanted - buffers.keys())
    trained = {segment.name for flat in units.trainable for segment in flat.layout.segments}
    if (left := sorted(trained - {line_names[name] for name in wanted})) and comm.rank == 0:
        logger.warning(
            "%s: trained beside the adapter, and not in its folder: %s. PEFT saves adapters and modules_to_save; name the "
            "modules there before training",
            path,
            ", ".join(left[:8]),
        )
    whole = {}
    for name, tensor in _whole(units, optimizer, {line_names[name] for name in wanted}):
        if comm.rank == 0:
            whole[name] = tensor.to(device="cpu", dtype=dtype or units.dtypes[name], copy=True)
    with rank_zero(comm) as first:
        for name, tensor in whole.items() if first else ():
            refuse_not_finite(name, tensor.reshape(-1))
    with rank_zero(comm) as first, names_only(model):
        if first:
            path.mkdir(parents=True, exist_ok=True)
            state = {**{name: whole[line_names[name]] for name in wanted}, **saved_buffers}
            model.save_pretrained(str(path), state_dict=state)


def _whole(units: ShardedModel, optimizer: ShardedOptimizer | None, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) from the fp32 masters where there are any, gathering one line at a time. A collective."""
    with all_ranks(units.comm):
        (optimizer or units).settle()
    units.streams.join()
    for flat in units.flats:
        segments = [segment for segment in flat.layout.segments if segment.name in names]
        if not segments:
            continue
        source = optimizer.state_of(flat).master if optimizer is not None and flat.trainable else flat.weights
        full = flat.collect(source)
        for segment in segments:
            yield segment.name, full[segment.start : segment.stop].view(segment.shape)


def hub_names(model: nn.Module, own: Sequence[str], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hub's names of each tensor and of each persistent buffer: more than one for a weight that was tied by hand,
    or whose module was registered twice by hand, which transformers would not tie again when it loads.

    A plain `nn.Module` has the names of its `state_dict()`. For a transformers model the mapping is asked of transformers
    itself: its reverse conversion runs on empty tensors, and what comes out under another name is the same object, unless it
    was cut or merged.

    Args:
        model: the model.
        own: names of the tensors in the model.
        aliases: other name of a tensor to its name in `own`.

    Raises:
        UserError: if transformers would have to cut or merge tensors.
    """
    own = [*own, *persistent_buffers(model)]
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    if not isinstance(model, PreTrainedModel):
        named = {name: [name] for name in own}
        for alias, name in aliases.items():
            named[name].append(alias)
        return named
    by_hand = {alias: name for alias, name in aliases.items() if alias not in model.all_tied_weights_keys}
    by_hand = {a: n for a, n in by_hand.items() if n not in model.all_tied_weights_keys}
    shared = [alias for alias, name in by_hand.items() if _shared_module(model, alias, name)]
    for alias in _shared_by_code(model, {alias: by_hand[alias] for alias in shared}):
        del by_hand[alias]
    own = [name for name in (*own, *by_hand) if name not in left_out]
    stand_ins = {name: torch.empty(0, device="meta") for name in own}
    original = {id(tensor): name for name, tensor in stand_ins.items()}
    names: dict[str, list[str]] = {}
    try:
        reverted = revert_weight_conversion(model, dict(stand_ins))
    except Exception as error:  # of torch, from operations that cut or stack tensors: they cannot be done with empty ones
        raise _not_savable(model, f"its weights are cut or stacked ({error})") from error
    for hub_name, tensor in reverted.items():
        if id(tensor) not in original:
            raise _not_savable(model, f"{hub_name} is cut or merged")
        name = original[id(tensor)]
        names.setdefault(by_hand.get(name, name), []).append(hub_name)
    return names


def _not_savable(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        f"{type(model).__name__} is stored in another form than it has in the model ({reason}), and cannot be saved from "
        "shards. Train an adapter (LoRA on the attention's matrices, for instance), which PEFT saves as always, or "
        "train without saving (save_strategy='no') and use units.state_dict() with save_pretrained(state_dict=...) yourself"
    )


def _shared_module(model: PreTrainedModel, one: str, other: str) -> bool:
    """Return whether two names of a tensor lead through the same module: shared by the code, or by hand."""
    return model.get_submodule(one.rpartition(".")[0]) is model.get_submodule(other.rpartition(".")[0])


def _shared_by_code(model: PreTrainedModel, shared: Mapping[str, str]) -> list[str]:
    """Return those names of `shared` that are one tensor with their others in any model of this class, as in a new one."""
    if not shared:
        return []
    try:
        with torch.device("meta"):
            new = type(model)(copy.deepcopy(model.config))
    except Exception as error:  # of somebody's own class: then all names are written, which does no harm
        logger.debug("%s is not built anew: %s", type(model).__name__, error)
        return []
    tensors = {**dict(new.named_parameters(remove_duplicate=False)), **dict(new.named_buffers(remove_duplicate=False))}
    return [alias for alias, name in shared.items() if alias in tensors and tensors[alias] is tensors.get(name)]
