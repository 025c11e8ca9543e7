"""Load a model folder into shards. No rank holds a whole copy.

1. The model is built on the meta device; buffers that no file contains (rotary tables) are initialised by transformers.
2. Its parameters become tensors of the folder's mapped safetensors files (`sources.py`). The user may change the model.
3. After sharding, each rank reads its own byte ranges into its shards, from any stored dtype.

transformers' own rules initialise what the folder lacks. A model of a bare configuration stays on meta and is initialised
after sharding (`initialise.py`), the same on all ranks.

Refused: pickled weights, folders that lack weights of a block, other shapes, and checkpoints whose tensors transformers
would split or merge (mixtures of experts): load those with from_pretrained and shard the result.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
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
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.model import Exact, ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError
from ftkit.hf.adapters import adapter_parameters, add_adapter, check_plain_lora, saved_names
from ftkit.hf.dtypes import named_dtype
from ftkit.hf.load.config import config_file, read_config, reading
from ftkit.hf.load.initialise import fill_weights, initialise, mark_initialised
from ftkit.hf.load.names import Places, check_shapes, find_places, matches
from ftkit.hf.load.sources import LoadReport, WeightSource, fill, load_buffers, refuse_incomplete, source_of
from ftkit.hf.load.tasks import TASKS, build
from ftkit.hf.save.finite import Narrowing
from ftkit.spec.layout import Span

logger = logging.getLogger(__name__)

CHECKED_NUMEL = 1 << 20
"""Weights that are read and checked at a time; the checks need memory of their size."""


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
        files' dtype; what is done to them before sharding is kept. Without a folder they are on meta.

    Raises:
        UserError: The folder has no configuration, no safetensors weights, or weights of another model; the adapter names
            modules that do not exist; without a folder, the adapter is initialised from the base's weights.

    Cost: the module tree, address space, and new tensors: adapters, heads that the folder lacks.
    """
    options: dict[str, Any] = {"config": config, "revision": revision, "trust_remote_code": trust_remote_code}
    model = skeleton(folder, task=task, dtype=dtype, **options, **config_changes)
    if folder is None:
        return model.eval() if adapter is None else adapted_on_meta(model, adapter)  # type: ignore[return-value]  # PEFT's
    files = find_weights(os.fspath(folder), revision)
    if model.can_generate():
        model.generation_config = generation_config(folder, **options)
    source = fill(model, files)
    model._ftkit_source = source  # type: ignore[assignment]  # torch knows tensors and modules only
    _log(source.report, files)
    if adapter is not None:
        return add_adapter(model, adapter).eval()  # type: ignore[return-value]  # PEFT's model replaces it
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
    """Build a model on the meta device, its buffers on the CPU, without weights. Arguments as of `load_model`."""
    if task not in ("auto", *TASKS):
        raise UserError(f"task is {task!r}, one of auto, {', '.join(TASKS)} is needed")
    options = {"dtype": named_dtype(dtype)} if dtype else {}
    source = None if folder is None else os.fspath(folder)
    settled = read_config(source, config, revision, trust_remote_code=trust_remote_code)
    kind, file = settled.model_type, config_file(source, config)
    for key, value in config_changes.items():
        key = f"_{key}" if key == "attn_implementation" else key
        if not hasattr(settled, key):
            raise UserError(f"load_model: {key!r} is neither an argument nor a field of a {kind} configuration")
        part = getattr(settled, key)
        if isinstance(part, PretrainedConfig) and isinstance(value, Mapping):  # merged, as from_pretrained does
            value = type(part)(**{**part.to_dict(), **value})
        setattr(settled, key, value)
    with reading(file, f"no {kind} model can be made of this configuration"):
        with torch.device("meta"):
            model = build(settled, task, source or file, trust_remote_code=trust_remote_code, **options)
        _make_buffers(model)
    model.config._name_or_path = source or ""
    made = [(parameter, parameter._version) for parameter in model.parameters()]
    model._ftkit_source = WeightSource([], made=made)
    return cast(PreTrainedModel, model)


def _make_buffers(model: PreTrainedModel) -> None:
    """Give the buffers of a model on meta their values: memory first, then transformers' own initialisation."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                persistent = key not in module._non_persistent_buffers_set
                module.register_buffer(key, torch.zeros(buffer.shape, dtype=buffer.dtype), persistent=persistent)
        mark_initialised(module, done=False)
    model.initialize_weights()  # writes nothing to parameters on meta


def adapted_on_meta(model: PreTrainedModel, adapter: PeftConfig) -> PeftModel:
    """Add an adapter to a model on meta, in eval mode.

    Raises:
        UserError: The adapter is initialised from the base's weights, or names modules that do not exist.
    """
    check_plain_lora(adapter)
    with torch.device("meta"):
        return add_adapter(model, adapter).eval()


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
    # config.json of old folders (BART) contains the fields of generation; transformers reads it in second place.
    files = ("generation_config.json",) if config is not None else ("generation_config.json", "config.json")
    for name in files if source is not None else ():
        options: dict[str, Any] = {"config_file_name": name, "_from_model_config": name == "config.json"}
        with suppress(OSError):
            return GenerationConfig.from_pretrained(str(source), revision=revision or "main", **options)
    return GenerationConfig.from_model_config(read_config(source, config, revision, trust_remote_code=trust_remote_code))


# --- the files of a folder


def find_weights(source: str, revision: str | None = None) -> list[Path]:
    """Return the safetensors files of a local folder or hub name. A file of all weights precedes an index.

    Raises:
        UserError: There are none; for pickled weights it says how to convert them.
    """
    try:
        with suppress(OSError):
            return [Path(str(cached_file(source, SAFE_WEIGHTS_NAME, revision=revision)))]
        index = Path(str(cached_file(source, SAFE_WEIGHTS_INDEX_NAME, revision=revision)))
        return [Path(str(cached_file(source, name, revision=revision))) for name in _indexed(index)]
    except OSError as error:
        pickles = [path.name for kind in ("pytorch_model*.bin", "model*.pt") for path in Path(source).glob(kind)]
        if pickles:
            raise UserError(
                f"{source}: its weights are pickles ({pickles[0]}), which can run code when read. Convert the folder "
                "where you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            ) from error
        needed = f"{SAFE_WEIGHTS_NAME}, or {SAFE_WEIGHTS_INDEX_NAME} and its files"
        raise UserError(f"{source}: no weights; {needed} are needed ({error})") from error


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


def load_weights(
    units: ShardedModel,
    files: list[Path] | None = None,
    *,
    optimizer: ShardedOptimizer | None = None,
    init_missing: bool = True,
) -> LoadReport:
    """Stream weights into a sharded model. A collective: whole copies are gathered again in any case.

    Args:
        units: A sharded model that is or contains a transformers model. Adapters keep their values.
        files: Safetensors files, in which tensors are found by name; None reads again what came from files when the model
            was sharded, and initialises what was on meta.
        optimizer: Its fp32 master weights are replaced too, if they exist.
        init_missing: Initialise tensors that no file contains. If False, they raise.

    Raises:
        UserError: For wrong shapes, merged tensors, files that share no tensor with the model, and blocks that lack
            weights.

    Cost: reads this rank's byte ranges once; 8 MiB, and one unit where tensors are initialised.
    """
    source = source_of(units.model)
    if files is None:
        return _load_again(units, source, optimizer) if source is not None else LoadReport()
    prefix, described = _described(units.model)
    report = LoadReport()
    wanted = set(_shapes(units)) - adapter_parameters(units.model, copies=True)
    with _opened(files) as opened:
        places, report.unused = find_places(described, [*opened.values()], prefix, wanted, units.aliases)
        check_shapes(_shapes(units), places)
        missing = wanted - set(places)
        report.initialised = sorted(n for n in missing if not matches(n, described._keys_to_ignore_on_load_missing))
        if report.initialised and not init_missing:
            raise UserError(f"{len(report.initialised)} tensors are in no file, first {report.initialised[0]}")
        refuse_incomplete(units.model, report.initialised, files[0].parent)
        _write(units, places, missing if init_missing else set(), optimizer, report)
        load_buffers(described, places)
    _log(report, files)
    if source is not None:
        source.report = report
    return report


def _load_again(units: ShardedModel, source: WeightSource, optimizer: ShardedOptimizer | None) -> LoadReport:
    """Stream what files contain, and initialise what was on meta; everything else keeps its values."""
    report = source.report or LoadReport()
    with _opened({path for path, _ in source.streamed.values()}) as opened:
        places = {name: (opened[path], key) for name, (path, key) in source.streamed.items()}
        _write(units, places, source.initialised, optimizer, report)
    source.report = report
    return report


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


def load_plain(units: ShardedModel, path: Path, optimizer: ShardedOptimizer | None = None) -> None:
    """Read a safetensors file with a module's own names, as `save_model` writes it for modules outside transformers.

    Args:
        units: The sharded module.
        path: The safetensors file.
        optimizer: Its fp32 master weights are replaced too.

    Raises:
        UserError: The file lacks a tensor, or a shape differs.
    """
    with _opened([path]) as opened:
        names = set(_shapes(units))
        places = {name: (opened[path], name) for name in (*names, *every_buffer(units.model))}
        _read_named(units, places, names, optimizer, str(path))


def _read_named(
    units: ShardedModel, places: Places, needed: set[str], optimizer: ShardedOptimizer | None, where: str
) -> None:
    """Read tensors and buffers whose names in the files are known. Buffers that no file contains keep their values."""
    places = {name: (file, key) for name, (file, key) in places.items() if key in file.entries}
    if lacking := needed - set(places):
        raise UserError(f"{where}: lacks {len(lacking)} tensors of the model, first {min(lacking)}")
    buffers = {name: buffer for name, buffer in every_buffer(units.model).items() if name in places}
    check_shapes({**_shapes(units), **{name: tuple(buffer.shape) for name, buffer in buffers.items()}}, places)
    narrowing = Narrowing()
    _stream(units, places, optimizer, narrowing)
    narrowing.refuse(units.comm, sorted({file.path for file, _ in places.values()}))
    for name, buffer in buffers.items():
        file, key = places[name]
        values = torch.empty(buffer.numel(), dtype=buffer.dtype)
        file.read(key, 0, values)
        with torch.no_grad():
            buffer.copy_(values.view(buffer.shape))
    units.rewritten()


def every_buffer(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model by all their names: PEFT shares some among modules."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules(remove_duplicate=False)
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


def _write(
    units: ShardedModel, places: Places, missing: set[str], optimizer: ShardedOptimizer | None, report: LoadReport
) -> None:
    """Write tensors from files and initialised ones into shards, and note the exact values for the masters."""
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


def _stream(units: ShardedModel, places: Places, optimizer: ShardedOptimizer | None, narrowing: Narrowing) -> int:
    """Read this rank's ranges of the tensors in `places`; return the bytes read. Casts to fp16 are checked."""
    bytes_read = 0

    def read(span: Span, out: Tensor) -> None:
        nonlocal bytes_read
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
    """Return a function that gives the weights before they were cast: wider in the files, or from `others`."""
    wider = {}
    for segment in flat.layout.segments:
        file, key = places.get(segment.name, (None, ""))
        if file is not None and (stored := file.entries[key].dtype) is not None and stored.itemsize > flat.dtype.itemsize:
            wider[segment.name] = (file.path, key)
    if not wider and not others:
        return None

    def fill_range(start: int, out: Tensor) -> None:
        for other in others:
            other(start, out)
        first = flat.layout.shard_range(flat.rank)[0] + start
        with _opened({path for path, _ in wider.values()}) as opened:
            for span in flat.layout.spans(first, first + out.numel()):
                if span.segment.name in wider:
                    path, key = wider[span.segment.name]
                    opened[path].read(key, span.start - span.segment.start, out[span.start - first : span.stop - first])

    return fill_range


@contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[dict[Path, TensorFile]]:
    with ExitStack() as stack:
        yield {path: stack.enter_context(TensorFile(path)) for path in paths}


def _shapes(units: ShardedModel) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in the flat parameters."""
    return {segment.name: segment.shape for flat in units.flats for segment in flat.layout.segments}


def _described(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """Return the name and the module of the transformers model that a folder of weights describes."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return name, module
    raise UserError(f"{type(model).__name__} is not a transformers model: its weights cannot be found in a folder")


def _log(report: LoadReport | None, files: list[Path]) -> None:
    if report is not None and report.initialised:
        first = ", ".join(report.initialised[:8])
        logger.warning("%s: %d tensors missing, initialised anew: %s", files[0].parent, len(report.initialised), first)
    if report is not None and report.unused:
        logger.warning("%s: %d tensors not used: %s", files[0].parent, len(report.unused), ", ".join(report.unused[:8]))
