"""From a folder to a sharded model, without a whole copy in any rank.

The model is built on the meta device; then its parameters become tensors of the folder's mapped safetensors files
(`sources.py`), so that everything a user does to a model of from_pretrained works and is kept. After sharding, each rank
reads its own byte ranges straight into its shards (any stored dtype). What the folder lacks is initialised by the model's
own `_init_weights` and reported; unexpected keys are reported. A model of a bare configuration stays on meta, and is
initialised block by block, the same on all ranks. Buffers that no file has (rotary tables) are made by transformers' own
initialisation.

Refused: pickled weights, folders that lack most of the model, shapes that differ, and checkpoints whose tensors
transformers would have to cut or merge (mixtures of experts): load those with from_pretrained and shard the result.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.model import Exact, ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError
from ftkit.hf.models.adapter_targets import check_kinds, check_names
from ftkit.hf.models.adapting import with_adapter
from ftkit.hf.models.config_names import check_changes, check_generation
from ftkit.hf.models.dtypes import named_dtype
from ftkit.hf.models.model_config import base_of_adapter, check_buffers, check_layers, config_file, read_config, reading
from ftkit.hf.models.tasks import build, check_task, task_of
from ftkit.hf.weights.initialising import fill_weights, initialise
from ftkit.hf.weights.marks import mark_initialised
from ftkit.hf.weights.narrowing import Narrowing
from ftkit.hf.weights.sources import LoadReport, WeightSource, check_adapter, fill, load_buffers, source_of
from ftkit.hf.weights.tensor_names import Places, find_places, matches
from ftkit.spec.layout import Span

logger = logging.getLogger(__name__)

NARROWED_NUMEL = 1 << 20
"""Weights that are looked at at a time on their way into fp16."""


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
    """Build a model whose weights are read when they are used; `ftkit.shard` and the Trainer stream them into shards.

    Args:
        folder: a local folder or hub name with config.json and safetensors; None builds from `config` without weights. The
            weights come from the folder also where `config` is given.
        task: a task of `ftkit.hf.models.tasks.TASKS`; "auto" takes the one that the configuration's `architectures` name.
        config: replaces the folder's configuration: an object, its fields with `model_type`, or a path.
        revision: revision of the hub name.
        trust_remote_code: whether Python from the folder is run. If not, a folder that needs it is refused.
        dtype: dtype of the sharded parameters, of torch or "fp32", "bf16", "fp16"; None takes what the configuration says.
        adapter: a PEFT configuration to add; only its parameters then train.
        config_changes: fields of the configuration to set.

    Returns:
        The model in eval mode, as from_pretrained gives it. Its parameters are CPU tensors of the folder's mapped files, in
        the dtype of the files: whatever is done to them before sharding is kept. Without a folder they are on meta.

    Raises:
        UserError: for a folder without configuration or safetensors weights or with weights of another model, an adapter
            that names modules which are not there, and, without a folder, an adapter whose first values come from the
            base's weights.

    Cost: the module tree, address space, and what is new: adapters, heads that the folder lacks.
    """
    source = None if folder is None else os.fspath(folder)
    if adapter is not None:
        check_kinds(adapter)
    model = skeleton(
        folder,
        task=task,
        config=config,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        **config_changes,
    )
    if source is None:
        return model.eval() if adapter is None else adapted_on_meta(model, adapter)  # type: ignore[return-value]  # PEFT's
    _refuse_other_weights(source, model.config)
    files = find_weights(source, revision)
    if model.can_generate():
        model.generation_config = _generation_config(source, revision, model.config)
    filled = fill(model, files)
    model._ftkit_source = filled  # type: ignore[assignment]  # ours, no module
    assert filled.report is not None
    _say(filled.report, files)
    if adapter is not None:
        check_names(model, adapter)
        return with_adapter(model, adapter).eval()  # type: ignore[return-value]  # PEFT's stands for the model
    return model.eval()


def skeleton(
    folder: str | os.PathLike[str] | None,
    *,
    task: str = "auto",
    config: PretrainedConfig | Mapping[str, Any] | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str | None = None,
    **config_changes: Any,
) -> PreTrainedModel:
    """Build a model on the meta device, its buffers on the CPU; no weights are looked for. Arguments as of `load_model`."""
    check_task(task)
    named_dtype(dtype)
    source = None if folder is None else os.fspath(folder)
    if revision is not None and (source is None or os.path.isdir(source)):
        raise UserError(f"revision={revision!r} is of a hub name, and {source or 'a configuration'} is none: remove it")
    settled = read_config(source, config, revision, trust_remote_code=trust_remote_code)
    check_changes(config_changes, settled, generation=source is None)
    for key, value in config_changes.items():
        part = getattr(settled, key, None)
        if isinstance(part, PretrainedConfig) and isinstance(value, Mapping):  # merged, as from_pretrained does
            value = type(part)(**{**part.to_dict(), **value})
        setattr(settled, f"_{key}" if key == "attn_implementation" else key, value)
    where = source or "the config"
    chosen = task_of(settled, where) if task == "auto" else task
    file = config_file(source, config)
    check_layers(settled, file)
    kind = settled.model_type
    with reading(file, f"no {kind} model can be made of this configuration", {**vars(settled), "model_type": kind}):
        with torch.device("meta"):
            options = {"dtype": named_dtype(dtype)} if dtype else {}
            model = build(settled, chosen, where, trust_remote_code=trust_remote_code, **options)
        check_buffers(model, file)
        _make_buffers(model)
    model.config._name_or_path = source or ""
    made = {id(parameter): (parameter, parameter._version) for parameter in model.parameters()}
    model._ftkit_source = WeightSource(model, [], made=made)
    return model


def adapted_on_meta(model: PreTrainedModel, adapter: PeftConfig) -> PeftModel:
    """Add an adapter to a model on meta, in eval mode.

    Raises:
        UserError: if its first values come from the base's weights, or it names modules that are not there.
    """
    check_adapter(adapter)
    check_names(model, adapter)
    with torch.device("meta"):
        return with_adapter(model, adapter).eval()


def find_weights(source: str, revision: str | None = None) -> list[Path]:
    """Return the safetensors files of a local folder or hub name.

    Raises:
        UserError: if there are none, naming the way to convert pickled weights where those are there instead.
    """
    if os.path.isdir(source):
        folder = Path(source)
        index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
        named = _indexed(index) if index.is_file() else []
        if whole.is_file():  # first, as for transformers
            if named not in ([], [whole]):
                logger.warning("%s: the weights are those of %s; what %s names is not read", folder, whole.name, index.name)
            return [whole]
        if named:
            return named
        pickles = [path.name for path in folder.glob("*.bin")] + [path.name for path in folder.glob("*.pt")]
        if pickles:
            raise UserError(
                f"{folder}: its weights are pickles ({pickles[0]}), which can run code when read. Convert the folder "
                "where you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        raise UserError(f"{folder}: no weights (model.safetensors or model.safetensors.index.json)")
    try:
        index_path = cached_file(
            source, "model.safetensors.index.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if index_path is None:
            return [Path(str(cached_file(source, "model.safetensors", revision=revision)))]
        return [Path(str(cached_file(source, name, revision=revision))) for name in _names_in(Path(index_path))]
    except OSError as error:
        raise UserError(f"{source}: neither a folder nor a model that could be fetched ({error})") from error


def _refuse_other_weights(folder: str, config: PretrainedConfig) -> None:
    """Refuse a local folder of which `from_pretrained` would read more than `load_model`: an adapter, other files.

    Raises:
        UserError: naming it.
    """
    if base_of_adapter(folder) is not None:
        raise UserError(
            f"{folder}: holds an adapter beside the model (adapter_config.json), which from_pretrained would add and ftkit "
            "does not. Move its files elsewhere; from there peft.PeftModel.from_pretrained(model, FOLDER, "
            "is_trainable=True) adds it to a model that load_model gives"
        )
    named = getattr(config, "transformers_weights", None)
    if named not in (None, "model.safetensors", "model.safetensors.index.json"):
        raise UserError(
            f"{folder}: config.json has transformers_weights: {named!r}, and ftkit reads model.safetensors, or what "
            "model.safetensors.index.json names. Rename the file and remove that key"
        )


def _names_in(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not a weight index ({error})") from error


def _indexed(index: Path) -> list[Path]:
    files = [index.parent / name for name in _names_in(index)]
    for path in files:
        if path.parent != index.parent:
            raise UserError(f"{index}: names a file outside its folder: {path.name}")
        if not path.is_file():
            raise UserError(f"{index}: names {path.name}, which is not in the folder")
    return files


def load_weights(
    units: ShardedModel,
    files: list[Path] | None = None,
    *,
    optimizer: ShardedOptimizer | None = None,
    init_missing: bool = True,
) -> LoadReport:
    """Stream weights into a sharded model. A collective: whole copies are gathered again, whatever was missing.

    Args:
        units: a sharded model of one of transformers' classes, PEFT adapters on top or not.
        files: safetensors files, by whose names tensors are found; None takes again what came from files when the model was
            sharded, and initialises what was on meta.
        optimizer: its fp32 master weights are replaced too, if it has any yet.
        init_missing: whether what no file has is initialised; else it raises.

    Raises:
        UserError: for wrong shapes, merged tensors, or files that share no tensor with the model.

    Cost: reads this rank's byte ranges once; 8 MiB, and one unit where tensors are initialised.
    """
    source = source_of(units.model)
    if files is None:
        return _load_again(units, source, optimizer) if source is not None else LoadReport()
    described = source.model if source is not None else _described(units.model)
    report = LoadReport()
    wanted = {segment.name for flat in units.flats for segment in flat.layout.segments}
    prefix = next((n for n, m in units.model.named_modules() if m is described), "")
    with ExitStack() as stack:
        opened = [stack.enter_context(TensorFile(path)) for path in files]
        places, report.unused = find_places(described, opened, prefix, wanted, units.aliases)
        _check_shapes(units, places)
        if opened and not places:
            raise UserError(f"{files[0].parent}: none of its tensors belongs to a {type(described).__name__}")
        missing = wanted - set(places)
        expected = {n for n in missing if _is_adapter_name(n) or matches(n, described._keys_to_ignore_on_load_missing)}
        report.initialised = sorted(missing - expected)
        if report.initialised and not init_missing:
            raise UserError(f"{len(report.initialised)} tensors are in no file, first {report.initialised[0]}")
        _refuse_holes(units, report.initialised, files)
        _write(units, places, missing if init_missing else set(), optimizer, report)
        load_buffers(described, places)
    _say(report, files)
    if source is not None:
        source.report = report
    return report


def _load_again(units: ShardedModel, source: WeightSource, optimizer: ShardedOptimizer | None) -> LoadReport:
    """Stream what files have, and initialise what was on meta; all else keeps its values."""
    report = source.report or LoadReport()
    with ExitStack() as stack:
        paths = sorted({path for path, _ in source.streamed.values()})
        opened = {path: stack.enter_context(TensorFile(path)) for path in paths}
        places = {name: (opened[path], key) for name, (path, key) in source.streamed.items()}
        _write(units, places, source.initialised, optimizer, report)
    source.report = report
    return report


def _write(
    units: ShardedModel, places: Places, missing: set[str], optimizer: ShardedOptimizer | None, report: LoadReport
) -> None:
    """Write what files have and what is initialised into shards, and note the exact values that masters begin from."""
    kept = dict(units.exact)  # of parameters that had values
    report.bytes_read = _stream(units, places, optimizer, report.narrowing)
    report.narrowing.refuse(units.comm, sorted({file.path for file, _ in places.values()}))
    fresh = initialise(units, missing)
    units.rewritten()
    for flat in units.trainable:
        if (optimizer is None or flat.name not in optimizer.states) and flat.dtype != torch.float32:
            exact = _exact(flat, places, [each for each in (kept.get(flat), fresh.get(flat.name)) if each])
            if exact is not None:
                units.exact[flat] = exact


def _refuse_holes(units: ShardedModel, initialised: list[str], files: list[Path]) -> None:
    """Raise if blocks lack weights: a new head may begin at random, a block of a pretrained model may not."""
    inside = {segment.name for unit in units.units for flat in unit.weights.flats for segment in flat.layout.segments}
    holes = [name for name in initialised if name in inside]
    if holes:
        more = f" and {len(holes) - 1} more" if len(holes) > 1 else ""
        raise UserError(
            f"{files[0].parent}: lacks {holes[0]}{more}: the folder is incomplete, or belongs to another model than its "
            "config.json says; fetch it again"
        )


def load_adapter(units: ShardedModel, folder: str | os.PathLike[str], optimizer: ShardedOptimizer | None = None) -> None:
    """Read an adapter folder that `save_model` (or PEFT) wrote into a sharded PEFT model.

    Args:
        units: a sharded PEFT model with the same adapters.
        folder: the adapter folder. Adapters with names lie in subfolders, as PEFT saves them; a folder that holds a single
            one may have it itself.
        optimizer: the optimizer, whose fp32 master weights are replaced too.

    Raises:
        UserError: if the folder lacks a tensor of the adapter, or a shape differs.
    """
    model = cast(PeftModel, units.model)
    paths = _adapter_files(Path(folder), [*model.peft_config])
    trained = {segment.name for flat in units.trainable for segment in flat.layout.segments}
    buffers = every_buffer(units.model)
    every_place: Places = {}
    with ExitStack() as stack:
        for adapter, path in paths.items():
            file = stack.enter_context(TensorFile(path))
            saved_as = adapter_names(model, [*trained, *buffers], adapter)
            every_place |= {name: (file, key) for name, key in saved_as.items()}
        known = {name: place for name, place in every_place.items() if name not in buffers}
        places = {name: (file, key) for name, (file, key) in known.items() if key in file.entries}
        if lacking := trained - set(places):
            listed = ", ".join(map(str, paths.values()))
            raise UserError(f"{listed}: lacks {len(lacking)} tensors of the adapter, first {min(lacking)}")
        _check_shapes(units, places)
        narrowing = Narrowing()
        _stream(units, places, optimizer, narrowing)
        narrowing.refuse(units.comm, [*paths.values()])
        _fill_buffers({name: buffers[name] for name in buffers.keys() & every_place.keys()}, every_place)
    units.rewritten()


def _adapter_files(folder: Path, adapters: Sequence[str]) -> dict[str, Path]:
    """Return the file of each adapter that a folder holds; of none, that which it should hold."""
    root = folder / SAFETENSORS_WEIGHTS_NAME
    paths = {name: root if name == "default" else folder / name / SAFETENSORS_WEIGHTS_NAME for name in adapters}
    found = {name: path for name, path in paths.items() if path.is_file()}
    return found or {adapters[0]: root}


def load_plain(units: ShardedModel, path: Path, optimizer: ShardedOptimizer | None = None) -> None:
    """Read a safetensors file with a module's own names, as `save_model` writes one of other modules than transformers'.

    Args:
        units: the sharded module.
        path: the safetensors file.
        optimizer: the optimizer, whose fp32 master weights are replaced too.

    Raises:
        UserError: if the file lacks a tensor, or a shape differs.
    """
    names = {segment.name for flat in units.flats for segment in flat.layout.segments}
    with TensorFile(path) as file:
        if lacking := names - set(file.entries):
            raise UserError(f"{path}: lacks {len(lacking)} tensors of the model, first {min(lacking)}")
        places = {name: (file, name) for name in names}
        _check_shapes(units, places)
        narrowing = Narrowing()
        _stream(units, places, optimizer, narrowing)
        narrowing.refuse(units.comm, [path])
        buffers = every_buffer(units.model)
        _fill_buffers(buffers, {name: (file, name) for name in buffers})
    units.rewritten()


def every_buffer(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model by all their names: PEFT shares some among modules."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules(remove_duplicate=False)
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


def _fill_buffers(buffers: Mapping[str, Tensor], places: Places) -> None:
    """Fill buffers from files; those that no file has stay.

    Raises:
        UserError: if one has another shape.
    """
    for name, buffer in buffers.items():
        file, key = places[name]
        if key not in file.entries:
            continue
        if file.entries[key].shape != tuple(buffer.shape):
            raise UserError(f"{file.path}: {key} has shape {file.entries[key].shape}, the model {tuple(buffer.shape)}")
        values = torch.empty(buffer.numel(), dtype=buffer.dtype)
        file.read(key, 0, values)
        with torch.no_grad():
            buffer.copy_(values.view(buffer.shape))


def adapter_names(model: PeftModel, names: Iterable[str], adapter: str) -> dict[str, str]:
    """Return, of the tensors `names`, those that PEFT saves with an adapter, and the name under which it does.

    PEFT is asked itself, with empty tensors: what comes out under another name is the same object.
    """
    stand_ins = {name: torch.empty(0, device="meta") for name in names}
    with names_only(model):
        saved = get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter)
    keys = {id(tensor): key for key, tensor in saved.items()}
    return {name: keys[id(tensor)] for name, tensor in stand_ins.items() if id(tensor) in keys}


@contextmanager
def names_only(model: PeftModel) -> Iterator[None]:
    """Let modules that PEFT trains whole answer `state_dict()` with absent tensors while the body runs."""
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    whole = [module for wrapper in wrappers for module in wrapper.modules_to_save.values()]
    try:
        for module in whole:
            module.state_dict = partial(dict, {**dict(module.named_parameters()), **persistent_buffers(module)})
        yield
    finally:
        for module in whole:
            vars(module).pop("state_dict", None)


def _described(model: nn.Module) -> PreTrainedModel:
    """Return the model that a folder of weights would describe: without PEFT's wrapping."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise UserError(f"{type(inner).__name__} is not a transformers model: its weights cannot be found in a folder")
    return inner


def _stream(units: ShardedModel, places: Places, optimizer: ShardedOptimizer | None, narrowing: Narrowing) -> int:
    """Read this rank's ranges of the tensors in `places`; return the bytes read. What becomes fp16 is looked at."""
    bytes_read = 0

    def read(span: Span, out: Tensor) -> None:
        nonlocal bytes_read
        if span.segment.name in places:
            file, key = places[span.segment.name]
            first, stored = span.start - span.segment.start, file.entries[key].dtype
            if out.dtype == torch.float16 != stored:
                for low in range(0, out.numel(), NARROWED_NUMEL):
                    wide = torch.empty_like(out[low : low + NARROWED_NUMEL], dtype=torch.float32)
                    file.read(key, first + low, wide)
                    if narrowing.check(span.segment.name, wide):
                        narrowing.look(span.segment.name, wide)
                    out[low : low + NARROWED_NUMEL].copy_(wide)
            else:
                file.read(key, first, out)
                narrowing.check(span.segment.name, out)
            bytes_read += span.numel * (0 if stored is None else stored.itemsize)

    units.comm.await_readers()
    (optimizer or units).settle()
    for flat in units.flats:
        fill_weights(flat, read)
        if optimizer is not None and flat.name in optimizer.states:
            master = optimizer.state_of(flat).master
            if master is not flat.weights:
                flat.fill(master, read)
    return bytes_read


def _exact(flat: FlatParameter, places: Places, others: list[Exact]) -> Exact | None:
    """Return what gives a line's weights as they were before they were cast: wider in the files, or from `others`."""
    wider = {}
    for segment in flat.layout.segments:
        file, key = places.get(segment.name, (None, ""))
        if file is not None and (stored := file.entries[key].dtype) is not None and stored.itemsize > flat.dtype.itemsize:
            wider[segment.name] = (file.path, key)
    if not wider and not others:
        return None

    def fill(start: int, out: Tensor) -> None:
        for other in others:
            other(start, out)
        first = flat.layout.shard_range(flat.rank)[0] + start
        with ExitStack() as stack:
            opened = {path: stack.enter_context(TensorFile(path)) for path in {path for path, _ in wider.values()}}
            for span in flat.layout.spans(first, first + out.numel()):
                if span.segment.name in wider:
                    path, key = wider[span.segment.name]
                    opened[path].read(key, span.start - span.segment.start, out[span.start - first : span.stop - first])

    return fill


def _say(report: LoadReport, files: list[Path]) -> None:
    if report.initialised:
        first = ", ".join(report.initialised[:8])
        logger.warning("%s: %d tensors missing, initialised anew: %s", files[0].parent, len(report.initialised), first)
    if report.unused:
        logger.warning("%s: %d tensors not used: %s", files[0].parent, len(report.unused), ", ".join(report.unused[:8]))


def _is_adapter_name(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _check_shapes(units: ShardedModel, places: Places) -> None:
    wrong = []
    for flat in units.flats:
        for segment in flat.layout.segments:
            if segment.name in places:
                file, key = places[segment.name]
                if file.entries[key].shape != segment.shape:
                    wrong.append(f"{key} is {list(file.entries[key].shape)}, the model needs {list(segment.shape)}")
    if wrong:
        file = next(iter(places.values()))[0]
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{file.path.parent}: shapes differ from config.json: {'; '.join(wrong[:3])}{more}")


# --- what no file holds


def _make_buffers(model: PreTrainedModel) -> None:
    """Give the buffers of a model on meta their values: memory first, then transformers' own initialisation."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                persistent = key not in module._non_persistent_buffers_set
                module.register_buffer(key, torch.zeros(buffer.shape, dtype=buffer.dtype), persistent=persistent)
        mark_initialised(module, done=False)
    model.initialize_weights()  # parameters are on meta, where this writes nothing


def generation_config(
    folder: str | os.PathLike | None,
    *,
    config: PretrainedConfig | Mapping[str, Any] | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> transformers.GenerationConfig:
    """Return how `load_model` lets a model generate, without the model; the arguments are the same.

    Raises:
        UserError: there is no configuration that can be read; a field of `generation_config.json` is misspelled
    """
    source = None if folder is None else os.fspath(folder)
    return _generation_config(source, revision, read_config(source, config, revision, trust_remote_code=trust_remote_code))


def _generation_config(source: str | None, revision: str | None, config: PretrainedConfig) -> transformers.GenerationConfig:
    """Return what the weights' folder says of generation; where it says nothing, what follows from the configuration."""
    if source is not None:
        try:
            found = transformers.GenerationConfig.from_pretrained(source, revision=revision or "main")
        except OSError:
            pass
        else:
            check_generation(source, revision)
            return found
    made = transformers.GenerationConfig.from_model_config(config)
    if source is not None:  # of old folders (BART) config.json has the fields of generation, which a configuration drops
        with suppress(OSError):
            given: dict[str, Any] = {"revision": revision or "main", "config_file_name": "config.json"}
            read = transformers.GenerationConfig.from_pretrained(source, **given)
            fields = {name: vars(read)[name] for name in vars(transformers.GenerationConfig()) if name[0] != "_"}
            known = vars(made)
            made.update(**{name: value for name, value in fields.items() if value is not None and known.get(name) is None})
    return made
