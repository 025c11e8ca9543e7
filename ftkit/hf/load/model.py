"""Load a model folder into shards. No rank has a whole copy, except of tensors that transformers splits or merges.

1. from_pretrained builds the model of the folder's mapped safetensors files (`sources.py`). The user may change the model.
2. After sharding, each rank reads its own byte ranges into its shards, from any stored dtype.

Tensors that transformers splits or merges on load (mixtures of experts) are values in the host memory of each rank. A model
of a bare configuration stays on meta and is initialised after sharding (`initialise.py`), the same on all ranks.

Refused: pickled weights, folders that lack weights of a block, and other shapes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.model import Exact, ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError
from ftkit.hf.adapters import adapter_parameters, add_adapter, check_plain_lora, saved_names
from ftkit.hf.dtypes import named_dtype
from ftkit.hf.load.config import config_file, read_config, reading
from ftkit.hf.load.initialise import fill_weights, initialise, mark_initialised
from ftkit.hf.load.names import Places, find_places
from ftkit.hf.load.sources import WeightSource, from_files, source_of
from ftkit.hf.load.tasks import TASKS, build
from ftkit.hf.save.finite import Narrowing
from ftkit.spec.layout import Span

CHECKED_NUMEL = 1 << 20
"""Weights that are read and checked at a time. A cast to fp16 needs them in fp32, too."""


def load_model(
    folder: str | os.PathLike[str] | None,
    *,
    task: str = "auto",
    config: PretrainedConfig | Mapping[str, Any] | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str | None = None,
    adapter: PeftConfig | None = None,
    **config_changes: Any,
) -> PreTrainedModel:
    """Build a model whose weights are read on use; `ftkit.shard` and the Trainer stream them into shards.

    Args:
        folder: A local folder or hub name with config.json and safetensors; None builds from `config` without weights.
        task: A task of `ftkit.hf.load.tasks.TASKS`; "auto" selects it by the configuration's `architectures`.
        config: Replaces the folder's configuration, not its weights: an object, its fields with `model_type`, or a path.
        revision: Revision of the hub name.
        trust_remote_code: Run Python code from the folder. If False, a folder that needs it is refused.
        dtype: Dtype of the sharded parameters, of torch or "fp32", "bf16", "fp16"; None is the configuration's.
        adapter: A PEFT configuration to add; only its parameters then train.
        config_changes: Fields of the configuration to set. A mapping is merged into a part (`text_config={...}`).

    Returns:
        The model in eval mode, as from_pretrained returns it. Its parameters are CPU tensors of the mapped files, in the
        files' dtype. Changes made to them before sharding are kept. Without a folder they are on meta.

    Raises:
        UserError: The folder has no configuration, no safetensors weights, or weights of another model; the adapter names
            modules that do not exist; without a folder, the adapter is initialised from the base's weights.

    Cost: the module tree, address space, and new tensors: adapters, heads that the folder lacks.
    """
    if task not in ("auto", *TASKS):
        raise UserError(f"task is {task!r}, one of auto, {', '.join(TASKS)} is needed")
    source = None if folder is None else os.fspath(folder)
    settled = read_config(source, config, revision, trust_remote_code=trust_remote_code)
    if config_changes:
        if settled._attn_implementation is not None:  # to_dict() leaves it out
            config_changes.setdefault("attn_implementation", settled._attn_implementation)
        made = type(settled).from_dict(settled.to_dict(), return_unused_kwargs=True, **config_changes)
        settled, unknown = cast("tuple[PretrainedConfig, dict[str, Any]]", made)
        if unknown:
            kind = settled.model_type
            raise UserError(f"load_model: {min(unknown)!r} is neither an argument nor a field of a {kind} configuration")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, **({"dtype": named_dtype(dtype)} if dtype else {})}
    file = config_file(source, config)
    with torch.device("meta"), reading(file, f"no {settled.model_type} model can be made of this configuration"):
        model = build(settled, task, source or file, **options)
    model.config._name_or_path = model.name_or_path = source or ""
    if source is None:
        _make_buffers(model)
        model._ftkit_source = WeightSource()
        if adapter is not None:
            check_plain_lora(adapter)
            with torch.device("meta"):
                model = add_adapter(model, adapter)
        return cast(PreTrainedModel, model.eval())
    model = from_files(model, find_weights(source, revision))
    model.config._name_or_path = model.name_or_path = source
    if model.can_generate():
        model.generation_config = generation_config(
            source, config=config, revision=revision, trust_remote_code=trust_remote_code
        )
    return model if adapter is None else add_adapter(model, adapter).eval()  # type: ignore[return-value]  # PEFT's model


def _make_buffers(model: PreTrainedModel) -> None:
    """Give the buffers of a model on meta their values: memory first, then transformers' own initialisation."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                persistent = key not in module._non_persistent_buffers_set
                module.register_buffer(key, torch.zeros(buffer.shape, dtype=buffer.dtype), persistent=persistent)
        mark_initialised(module, done=False)
    model.initialize_weights()  # writes nothing to parameters on meta


def generation_config(
    folder: str | os.PathLike[str] | None,
    *,
    config: PretrainedConfig | Mapping[str, Any] | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> GenerationConfig:
    """Return the generation configuration of `load_model` without the model. Arguments as of `load_model`.

    Raises:
        UserError: There is no configuration that can be read.
    """
    source = None if folder is None else os.fspath(folder)
    if source is not None:
        # config.json of old folders (BART) contains the fields of generation; transformers reads it in second place.
        for name in ("generation_config.json", *(["config.json"] if config is None else [])):
            options: dict[str, Any] = {"config_file_name": name, "_from_model_config": name == "config.json"}
            with suppress(OSError):
                return GenerationConfig.from_pretrained(source, revision=revision or "main", **options)
    return GenerationConfig.from_model_config(read_config(source, config, revision, trust_remote_code=trust_remote_code))


# --- the files of a folder


def find_weights(source: str, revision: str | None = None) -> list[Path]:
    """Return the safetensors files of a local folder or hub name. A file of all weights precedes an index.

    Raises:
        UserError: There are none, or only pickled ones.
    """
    try:
        with suppress(OSError):
            return [Path(str(cached_file(source, SAFE_WEIGHTS_NAME, revision=revision)))]
        index = Path(str(cached_file(source, SAFE_WEIGHTS_INDEX_NAME, revision=revision)))
        return [Path(str(cached_file(source, name, revision=revision))) for name in _indexed(index)]
    except OSError as error:
        needed = f"{SAFE_WEIGHTS_NAME}, or {SAFE_WEIGHTS_INDEX_NAME} and its files"
        raise UserError(
            f"{source}: no weights; {needed} are needed ({error}). Pickles (.bin, .pt) can run code when read. Convert them "
            "where you trust the folder: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        ) from error


def _indexed(index: Path) -> list[str]:
    """Return the names of the files in an index, which are files beside it."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: not a weight index ({error})") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index}: names a file outside its folder: {name}")
    return names


# --- into a sharded model


def load_weights(units: ShardedModel, files: list[Path] | None = None, *, optimizer: ShardedOptimizer | None = None) -> None:
    """Stream weights into a sharded model. A collective: ranks with whole copies gather them again.

    Args:
        units: A sharded model. Adapters keep their values.
        files: Safetensors files with the names of a transformers model, or of any other module as `save_model` writes them;
            None reads the files of `load_model` again, and initialises the tensors that were on meta.
        optimizer: Its fp32 master weights are replaced too, if they exist.

    Raises:
        UserError: For wrong shapes, merged tensors, and files that lack a tensor of the model.

    Cost: reads this rank's byte ranges once, and again for existing masters; 8 MiB. Initialised tensors take one flat
        parameter in fp32 and, if 16-bit and trained, this rank's fp32 shard.
    """
    if files is None:
        source = source_of(units.model) or WeightSource()
        with _opened({path for path, _ in source.streamed.values()}) as opened:
            places = {name: (opened[path], key) for name, (path, key) in source.streamed.items()}
            _write(units, places, optimizer, source.initialised)
        return
    wanted = _shapes(units).keys() - adapter_parameters(units.model, copies=True)
    with _opened(files) as opened:
        places, optional = find_places(units, [*opened.values()], wanted | every_buffer(units.model).keys())
        _read_named(units, places, wanted - optional, optimizer, str(files[0].parent))


def load_adapter(units: ShardedModel, folder: str | os.PathLike[str], optimizer: ShardedOptimizer | None = None) -> None:
    """Read an adapter folder that `save_model` (or PEFT) wrote into a sharded PEFT model.

    Args:
        units: A sharded PEFT model with the same adapters.
        folder: The adapter folder. Adapters with names are in subfolders, as PEFT saves them; a single one may be in the
            folder itself.
        optimizer: Its fp32 master weights are replaced too.

    Raises:
        UserError: The folder lacks a tensor of the adapter, or a shape differs.
    """
    model = cast(PeftModel, units.model)
    root = Path(folder) / SAFETENSORS_WEIGHTS_NAME
    paths = {n: root if n == "default" else root.parent / n / root.name for n in model.peft_config}
    paths = {name: path for name, path in paths.items() if path.is_file()} or {next(iter(paths)): root}
    trained = {segment.name for flat in units.trainable for segment in flat.layout.segments}
    with _opened(paths.values()) as opened:
        places: Places = {}
        for adapter, path in paths.items():
            saved = saved_names(model, [*trained, *every_buffer(model)], adapter)
            places |= {name: (opened[path], key) for name, key in saved.items()}
        _read_named(units, places, trained, optimizer, ", ".join(map(str, paths.values())))


def _read_named(
    units: ShardedModel, places: Places, needed: set[str], optimizer: ShardedOptimizer | None, where: str
) -> None:
    """Read tensors and buffers whose places are known. Other buffers keep their values."""
    places = {name: (file, key) for name, (file, key) in places.items() if key in file.entries}
    if lacking := needed - set(places):
        raise UserError(f"{where}: lacks {len(lacking)} tensors of the model, first {min(lacking)}")
    buffers = {name: buffer for name, buffer in every_buffer(units.model).items() if name in places}
    shapes = {**_shapes(units), **{name: tuple(buffer.shape) for name, buffer in buffers.items()}}
    for name, (file, key) in places.items():
        if (stored := file.entries[key].shape) != shapes[name]:
            raise UserError(f"{file.path}: {key} is {[*stored]}, the model needs {[*shapes[name]]}")
    _write(units, places, optimizer)
    for name, buffer in buffers.items():
        file, key = places[name]
        values = torch.empty(buffer.numel(), dtype=buffer.dtype)
        file.read(key, 0, values)
        with torch.no_grad():
            buffer.copy_(values.view(buffer.shape))


def every_buffer(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model by all their names: PEFT shares some among modules."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules(remove_duplicate=False)
        for key, buffer in persistent_buffers(module, recurse=False).items()
    }


def _write(units: ShardedModel, places: Places, optimizer: ShardedOptimizer | None, missing: Set[str] = frozenset()) -> None:
    """Write tensors from files and initialised ones into shards, and note the exact values for the masters."""
    kept = dict(units.exact)  # of parameters that had values
    narrowing = Narrowing()
    _stream(units, places, optimizer, narrowing)
    narrowing.refuse(units.comm, sorted({file.path for file, _ in places.values()}))
    fresh = initialise(units, missing)
    units.rewritten()
    for flat in units.trainable:
        if (optimizer is None or flat.name not in optimizer.states) and flat.dtype != torch.float32:
            exact = _exact(flat, places, [each for each in (kept.get(flat), fresh.get(flat.name)) if each])
            if exact is not None:
                units.exact[flat] = exact


def _stream(units: ShardedModel, places: Places, optimizer: ShardedOptimizer | None, narrowing: Narrowing) -> None:
    """Read this rank's ranges of the tensors in `places`, and check the weights."""

    def read(span: Span, out: Tensor) -> None:
        if span.segment.name not in places:
            return
        file, key = places[span.segment.name]
        first, stored = span.start - span.segment.start, file.entries[key].dtype
        narrows = out.dtype == torch.float16 != stored
        for low in range(0, out.numel(), CHECKED_NUMEL):
            piece = out[low : low + CHECKED_NUMEL]
            values = torch.empty_like(piece, dtype=torch.float32) if narrows else piece
            file.read(key, first + low, values)
            if narrows:
                piece.copy_(values)
            narrowing.check(span.segment.name, values, piece)

    units.comm.await_readers()
    (optimizer or units).settle()
    for flat in units.flats:
        fill_weights(flat, read)
        if optimizer is not None and flat.name in optimizer.states:
            master = optimizer.state_of(flat).master
            if master is not flat.weights:
                flat.fill(master, read)


def _exact(flat: FlatParameter, places: Places, others: list[Exact]) -> Exact | None:
    """Return a function that gives the weights before they were cast: those of the files, and of `others`."""
    found = {segment.name: places[segment.name] for segment in flat.layout.segments if segment.name in places}
    stored = {name: (file.path, key) for name, (file, key) in found.items()}
    dtypes = {file.entries[key].dtype for file, key in found.values()}
    if not others and all(dtype is None or dtype.itemsize <= flat.dtype.itemsize for dtype in dtypes):
        return None

    def fill_range(start: int, out: Tensor) -> None:
        for other in others:
            other(start, out)
        first = flat.layout.shard_range(flat.rank)[0] + start
        with _opened({path for path, _ in stored.values()}) as opened:
            for span in flat.layout.spans(first, first + out.numel()):
                if span.segment.name in stored:
                    path, key = stored[span.segment.name]
                    opened[path].read(key, span.start - span.segment.start, out[span.start - first : span.stop - first])

    return fill_range


@contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[dict[Path, TensorFile]]:
    with ExitStack() as stack:
        yield {path: stack.enter_context(TensorFile(path)) for path in paths}


def _shapes(units: ShardedModel) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in the flat parameters."""
    return {segment.name: segment.shape for flat in units.flats for segment in flat.layout.segments}
