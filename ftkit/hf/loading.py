"""From a folder to a sharded model, without a whole copy in any rank.

The model is built on the meta device. After sharding, each rank reads its own byte ranges of the folder's safetensors
files straight into its shards (any stored dtype). What the folder lacks is initialised block by block with the model's own
`_init_weights`, the same on all ranks, and reported; what it has too much is reported. Buffers that no file holds (rotary
tables) are made by transformers' own initialisation.

Refused: pickled weights, folders that lack most of the model, shapes that differ, and checkpoints whose tensors
transformers would have to cut or merge (mixtures of experts): load those with from_pretrained and shard the result.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import cached_file

from ftkit.engine.comm import Communicator
from ftkit.engine.flat import FlatParameter, Origin
from ftkit.engine.layout import Span
from ftkit.engine.optimizer import ShardedOptimizer
from ftkit.engine.shard import Units
from ftkit.engine.storage import TensorFile
from ftkit.errors import UserError

logger = logging.getLogger(__name__)

TASKS = {"causal-lm": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM"}
"""Task of a recipe to the transformers class that builds its model."""


_Places = dict[str, tuple[TensorFile, str]]

NARROWED_NUMEL = 1 << 20
"""Weights that are looked at at a time on their way into fp16."""


@dataclass
class LoadReport:
    """What a load found: tensor names that were missing and initialised anew, and names in the folder nobody wanted.

    `narrowing` is what becomes of wider weights in fp16, of those that this rank has read.
    """

    initialised: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    bytes_read: int = 0
    narrowing: Narrowing = field(default_factory=lambda: Narrowing())


def load_model(
    folder: str | os.PathLike[str] | None,
    *,
    task: str = "causal-lm",
    config: PretrainedConfig | Mapping[str, Any] | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
    adapter: PeftConfig | None = None,
    **config_changes: Any,
) -> PreTrainedModel:
    """Build a model on the meta device; `ftkit.shard` and the Trainer then stream its weights into shards.

    Args:
        folder: a local folder or hub name with config.json and safetensors; None builds from `config` without weights.
            The weights come from the folder also where `config` is given.
        task: "causal-lm" or "seq2seq".
        config: replaces the folder's configuration: an object, its fields with `model_type`, or a path.
        revision: of the hub name.
        trust_remote_code: run Python from the folder. Off: a folder that needs it is refused.
        dtype: of the parameters; None takes what the configuration says.
        adapter: a PEFT configuration to add; only its parameters then train.
        config_changes: fields of the configuration to set.

    Returns:
        The model in eval mode, as from_pretrained gives it, its parameters on meta. (Where its weights will come from is
        noted on it for `load_weights`.)

    Raises:
        UserError: for a folder without configuration or safetensors weights, or an adapter whose first values come from
            the base's weights, before anything is allocated.

    Cost: the module tree; no weights.
    """
    if task not in TASKS:
        raise UserError(f"task is {task!r}, one of {', '.join(TASKS)} is needed")
    source = None if folder is None else os.fspath(folder)
    settled = _config(source, config, revision, trust_remote_code)
    for key, value in config_changes.items():
        setattr(settled, key, value)
    files = [] if source is None else find_weights(source, revision)
    try:
        with torch.device("meta"):
            model = getattr(transformers, TASKS[task]).from_config(
                settled, trust_remote_code=trust_remote_code, **({"dtype": dtype} if dtype else {})
            )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        others = ", ".join(other for other in TASKS if other != task)
        raise UserError(
            f"{source or 'the config'}: a {settled.model_type} model has no form for task {task}; other tasks: {others}"
        ) from error
    _make_buffers(model)
    if files and model.can_generate():
        model.generation_config = _generation_config(source, revision, model.config)
    model.config._name_or_path = source or ""
    weights_model = model
    if adapter is not None:
        _check_adapter(adapter)
        with torch.device("meta"):
            model = get_peft_model(model, adapter)
    model._ftkit_source = WeightSource(weights_model, files)
    return model.eval()


def _check_adapter(adapter: PeftConfig) -> None:
    """Refuse an adapter that cannot be initialised without the weights of its base at hand."""
    plain = isinstance(adapter, LoraConfig) and adapter.init_lora_weights in (True, "gaussian")
    if not plain or adapter.use_dora or adapter.trainable_token_indices:
        raise UserError(
            f"adapter: {adapter.peft_type.value} with these settings is initialised from the base's weights, which no rank "
            "has whole. Load the base with from_pretrained(), apply get_peft_model(), and give the result to the Trainer"
        )


@dataclass
class WeightSource:
    """Where the weights of a model on meta will come from: the (inner) model that the folder describes, and its files.

    `report` is what the last load from it found.
    """

    model: PreTrainedModel
    files: list[Path]
    report: LoadReport | None = None


def find_weights(source: str, revision: str | None = None) -> list[Path]:
    """Return the safetensors files of a local folder or hub name.

    Raises:
        UserError: if there are none, naming the way to convert pickled weights where those are there instead.
    """
    if os.path.isdir(source):
        folder = Path(source)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return _indexed(index)
        if (folder / "model.safetensors").is_file():
            return [folder / "model.safetensors"]
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
            return [Path(cached_file(source, "model.safetensors", revision=revision))]
        return [Path(cached_file(source, name, revision=revision)) for name in _names_in(Path(index_path))]
    except OSError as error:
        raise UserError(f"{source}: neither a folder nor a model that could be fetched ({error})") from error


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
    units: Units,
    files: list[Path] | None = None,
    *,
    optimizer: ShardedOptimizer | None = None,
    init_missing: bool = True,
) -> LoadReport:
    """Stream weights into a sharded model. A collective: whole copies are gathered again, whatever was missing.

    Args:
        units: of a model on one of transformers' classes, PEFT adapters on top or not.
        files: safetensors files; None takes what `load_model` found (nothing: all weights are initialised).
        optimizer: its fp32 master weights are replaced too, if it has any yet.
        init_missing: initialise what no file has; False raises for it.

    Raises:
        UserError: for wrong shapes, merged tensors, or files that share no tensor with the model.

    Cost: reads this rank's byte ranges once; 8 MiB, and one unit where tensors are initialised.
    """
    source = getattr(units.model, "_ftkit_source", None)
    described = source.model if source is not None else _described(units.model)
    files = (source.files if source is not None else []) if files is None else files
    report = LoadReport()
    wanted = {segment.name for flat in units.flats for segment in flat.layout.segments}
    prefix = next((n for n, m in units.model.named_modules() if m is described), "")
    with ExitStack() as stack:
        opened = [stack.enter_context(TensorFile(path)) for path in files]
        places, report.unused = _places(described, opened, prefix, wanted, units.aliases)
        _check_shapes(units, places)
        if opened and not places:
            raise UserError(f"{files[0].parent}: none of its tensors belongs to a {type(described).__name__}")
        report.bytes_read = _stream(units, places, optimizer, report.narrowing)
        report.narrowing.refuse(units.comm, files)
        _load_buffers(described, places)
    missing = wanted - set(places)
    expected_anew = {n for n in missing if _is_adapter_name(n) or _matches(n, described._keys_to_ignore_on_load_missing)}
    report.initialised = sorted(missing - expected_anew) if files else []
    if report.initialised and not init_missing:
        raise UserError(f"{len(report.initialised)} tensors are in no file, first {report.initialised[0]}")
    _refuse_holes(units, report.initialised, files)
    fresh = _initialise(units, missing) if init_missing else {}
    units.rewritten()
    for flat in units.trainable:
        if (optimizer is None or flat.name not in optimizer.lines) and flat.dtype != torch.float32:
            flat.origin = _origin(flat, places, fresh.get(flat.name))
    if files:
        _say(report, files)
    if source is not None:
        source.report = report
    return report


def _refuse_holes(units: Units, initialised: list[str], files: list[Path]) -> None:
    """Raise if blocks lack weights: a new head may begin at random, a block of a pretrained model may not."""
    inside = {segment.name for unit in units.units for flat in unit.flats for segment in flat.layout.segments}
    holes = [name for name in initialised if name in inside]
    if holes:
        more = f" and {len(holes) - 1} more" if len(holes) > 1 else ""
        raise UserError(
            f"{files[0].parent}: lacks {holes[0]}{more}: the folder is incomplete, or belongs to another model than its "
            "config.json says; fetch it again"
        )


def load_adapter(units: Units, folder: str | os.PathLike[str], optimizer: ShardedOptimizer | None = None) -> None:
    """Read an adapter folder that `save_model` (or PEFT) wrote into a sharded PEFT model.

    Args:
        units: of a PEFT model with the same adapter.
        optimizer: its fp32 master weights are replaced too.

    Raises:
        UserError: if the folder lacks a tensor of the adapter, or a shape differs.
    """
    path = Path(folder) / SAFETENSORS_WEIGHTS_NAME
    trained = {segment.name for flat in units.trainable for segment in flat.layout.segments}
    saved_as = adapter_names(units.model, trained, units.model.active_adapters[0])
    with TensorFile(path) as file:
        places = {name: (file, key) for name, key in saved_as.items() if key in file.entries}
        if lacking := trained - set(places):
            raise UserError(f"{path}: lacks {len(lacking)} tensors of the adapter, first {min(lacking)}")
        _check_shapes(units, places)
        narrowing = Narrowing()
        _stream(units, places, optimizer, narrowing)
        narrowing.refuse(units.comm, [path])
    units.rewritten()


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
            module.state_dict = partial(dict, module.named_parameters())
        yield
    finally:
        for module in whole:
            vars(module).pop("state_dict", None)


def _described(model: nn.Module) -> PreTrainedModel:
    """Return the model that a folder of weights would describe: without PEFT's wrapping."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise UserError(f"{type(inner).__name__} is no transformers model: its weights cannot be found in a folder")
    return inner


def _stream(units: Units, places: _Places, optimizer: ShardedOptimizer | None, narrowing: Narrowing) -> int:
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
                    narrowing.look(span.segment.name, wide)
                    out[low : low + NARROWED_NUMEL].copy_(wide)
            else:
                file.read(key, first, out)
            bytes_read += span.numel * stored.itemsize

    (optimizer or units).settle()
    for flat in units.flats:
        _fill_weights(flat, read)
        if optimizer is not None and flat.name in optimizer.lines:
            master = optimizer.line(flat).master
            if master is not flat.weights:
                flat.fill(master, read)
    return bytes_read


@dataclass
class Narrowing:
    """What fp16 makes of weights that were wider.

    Args:
        numel: weights looked at. subnormal: of them, below fp16's normal range, where precision is lost. lost: of those,
            the ones that become 0. beyond: name of a tensor to its largest weight, where fp16 does not hold it.
    """

    numel: int = 0
    subnormal: int = 0
    lost: int = 0
    beyond: dict[str, float] = field(default_factory=dict)

    def look(self, name: str, weights: Tensor) -> None:
        """Look at some (n,) fp32 weights of a tensor."""
        sizes, known = weights.abs(), torch.finfo(torch.float16)
        zeros = int((sizes == 0).sum())
        self.numel += sizes.numel()
        self.subnormal += int((sizes < known.tiny).sum()) - zeros
        self.lost += int((sizes <= known.smallest_normal * known.eps / 2).sum()) - zeros
        if not (largest := float(sizes.max())) <= known.max:
            self.beyond[name] = max(largest, self.beyond.get(name, 0.0))

    def refuse(self, comm: Communicator, files: Sequence[Path]) -> None:
        """Raise where any rank has read a weight that fp16 does not hold. A collective."""
        found = {name: largest for ranks in comm.all(self.beyond) for name, largest in ranks.items()}
        if found:
            name, more = min(found), f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise UserError(
                f"{files[0].parent}: {name} has a weight of {found[name]:g}{more}, fp16 holds 65504: compute in bf16 or fp32"
            )

    def told(self) -> str:
        """Return which part of the weights fp16 holds badly."""
        if not self.subnormal:
            return "all weights are in its range"
        small, lost = self.subnormal / self.numel, self.lost / self.numel
        return f"{small:.2g} of the weights are below its normal range, {lost:.2g} become 0"


def _origin(flat: FlatParameter, places: _Places, fresh: Origin | None) -> Origin | None:
    """Return what gives a line's weights as they were before they were cast: initialised here, or wider in the files."""
    wider = {}
    for segment in flat.layout.segments:
        file, key = places.get(segment.name, (None, ""))
        if file is not None and (stored := file.entries[key].dtype) is not None and stored.itemsize > flat.dtype.itemsize:
            wider[segment.name] = (file.path, key)
    if not wider:
        return fresh

    def fill(start: int, out: Tensor) -> None:
        if fresh is not None:
            fresh(start, out)
        first = flat.layout.shard_range(flat.rank)[0] + start
        with ExitStack() as stack:
            opened = {path: stack.enter_context(TensorFile(path)) for path in {path for path, _ in wider.values()}}
            for span in flat.layout.spans(first, first + out.numel()):
                if span.segment.name in wider:
                    path, key = wider[span.segment.name]
                    opened[path].read(key, span.start - span.segment.start, out[span.start - first : span.stop - first])

    return fill


def _fill_weights(flat: FlatParameter, put: Callable[[Span, Tensor], object]) -> None:
    """Let `put` write each tensor's part of what this rank holds of a line: all of it where it is resident."""
    if flat.full is None:
        flat.fill(flat.weights, put)
        return
    for span in flat.layout.spans(0, flat.layout.numel):
        put(span, flat.full[span.start : span.stop])


def _say(report: LoadReport, files: list[Path]) -> None:
    if report.initialised:
        first = ", ".join(report.initialised[:8])
        logger.warning("%s: %d tensors missing, initialised anew: %s", files[0].parent, len(report.initialised), first)
    if report.unused:
        logger.warning("%s: %d tensors not used: %s", files[0].parent, len(report.unused), ", ".join(report.unused[:8]))


def _is_adapter_name(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _places(
    model: PreTrainedModel, opened: list[TensorFile], prefix: str, wanted: set[str], aliases: Mapping[str, str]
) -> tuple[_Places, list[str]]:
    """Return for each wanted tensor the file and the name under which it lies there, and the names left over."""
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    meta = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    own = _own_names(wanted, aliases, prefix)
    buffers = {name for name, _ in model.named_buffers()}
    ignored = model._keys_to_ignore_on_load_unexpected  # what old folders of this family hold too much
    places: _Places = {}
    unused: list[str] = []
    for file in opened:
        for key in file.entries:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, {**meta, **own})
            if pattern is not None and name in own:  # (a renaming has no pattern)
                raise UserError(
                    f"{file.path}: {key} must be cut or merged on load, which ftkit.load_model does not do: load the model "
                    "with from_pretrained() and give it to the Trainer"
                )
            if name in own:
                for target in own[name]:
                    places.setdefault(target, (file, key))
            elif name in buffers:
                places[f"buffer:{name}"] = (file, key)
            elif name not in meta and not _matches(name, ignored):
                unused.append(key)
    return places, unused


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _own_names(wanted: set[str], aliases: Mapping[str, str], prefix: str) -> dict[str, list[str]]:
    """Return names as the folder's model has them -> names on the lines, through PEFT's wrapping and ties.

    A module that PEFT trains whole (modules_to_save) stands on the lines twice: as it was, and as the copy that trains.
    """

    def plain(name: str) -> str:
        name = name.removeprefix(prefix + ".") if prefix else name
        name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)
        return name.replace(".base_layer.", ".").replace(".original_module.", ".")

    own: dict[str, list[str]] = {}
    for name, target in [*((name, name) for name in sorted(wanted)), *aliases.items()]:
        own.setdefault(plain(name), []).append(target)
    return own


def _check_shapes(units: Units, places: _Places) -> None:
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
        module._is_hf_initialized = False
    model.initialize_weights()  # parameters are on meta, where this writes nothing


def _load_buffers(model: PreTrainedModel, places: _Places) -> None:
    for name, buffer in model.named_buffers():
        place = places.get(f"buffer:{name}")
        if place is not None and place[0].entries[place[1]].shape == tuple(buffer.shape):
            place[0].read(place[1], 0, buffer.view(-1))


def _initialise(units: Units, missing: set[str]) -> dict[str, Origin]:
    """Initialise the tensors in `missing` with the models' own rules, the same on any number of ranks.

    Returns:
        For each trained line of 16 bits that was concerned, what gives its new weights in fp32.
    """
    if not missing:
        return {}
    device = units.comm.device
    seed = units.comm.same(int(torch.randint(1 << 62, ()).item()))  # ranks need not have the same random numbers
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        concerned = [f for f in units.flats if missing.intersection(segment.name for segment in f.layout.segments)]
        home = device if units.tiers.tier("state") == "device" else torch.device("cpu")
        owners = [_owners(units.model, flat) for flat in concerned]
        with _set_aside(units.model):
            fresh = {flat.name: _initialise_line(flat, line, missing, home) for flat, line in zip(concerned, owners)}
    return {flat.name: fresh[flat.name] for flat in concerned if flat.trainable and flat.dtype != torch.float32}


@contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Put empty tensors, marked as done, in the place of every parameter while the body runs, and mark the buffers.

    A module's initialiser may write to all that is below it, of which other lines hold some.
    """
    held = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    buffers = list(model.buffers())
    for module, key, parameter in held:
        module._parameters[key] = _empty(parameter)
    for buffer in buffers:
        buffer._is_hf_initialized = True
    try:
        yield
    finally:
        for module, key, parameter in held:
            module._parameters[key] = parameter
        for buffer in buffers:
            del buffer._is_hf_initialized


def _empty(parameter: Tensor) -> nn.Parameter:
    empty = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
    empty._is_hf_initialized = True
    return empty


def _initialise_line(flat: FlatParameter, owners: list[Owner], missing: set[str], home: torch.device) -> Origin:
    """Initialise one line, the others being set aside: in fp32, whole, each rank keeping its part, at `home`, which is
    where the master will be made of it.
    """
    full = torch.zeros(flat.layout.padded_numel, dtype=torch.float32, device=flat.comm.device)
    fresh = []
    for segment in flat.layout.segments:
        value = nn.Parameter(full[segment.start : segment.stop].view(segment.shape), requires_grad=False)
        value._is_hf_initialized = segment.name not in missing  # transformers' initialisers skip what is marked
        fresh.append(value)
    _register(owners, fresh)
    try:
        for owner in owners:
            owner.module._is_hf_initialized = False
            owner.initialise(owner.module)
    finally:
        _register(owners, [_empty(parameter) for parameter in flat.parameters])
    _fill_weights(flat, lambda span, out: span.segment.name in missing and out.copy_(full[span.start : span.stop]))
    first, last = flat.layout.shard_range(flat.rank)
    own = full[first:last].to(home, copy=True)

    def fill(start: int, out: Tensor) -> None:
        begin = first + start
        for span in flat.layout.spans(begin, begin + out.numel()):
            if span.segment.name in missing:
                out[span.start - begin : span.stop - begin].copy_(own[span.start - first : span.stop - first])

    return fill


@dataclass(frozen=True)
class Owner:
    """A module with parameters of one line in or below it: its own, with their index there, and who initialises it."""

    module: nn.Module
    places: tuple[tuple[str, int], ...]
    initialise: Callable[[nn.Module], None]


def _owners(model: nn.Module, flat: FlatParameter) -> list[Owner]:
    """Return the modules with the line's parameters in or below them, each with the `_init_weights` of its model.

    Children come first, as in transformers: some families give a weight its scale in the module above the one that has it.
    """
    indices = {id(parameter): index for index, parameter in enumerate(flat.parameters)}
    owners: list[Owner] = []
    placed: set[int] = set()  # a tied weight is initialised where it stands first: an embedding, not the head tied to it

    def walk(module: nn.Module, initialise: Callable[[nn.Module], None]) -> bool:
        if isinstance(module, PreTrainedModel):
            initialise = module._init_weights
        below = [walk(child, initialise) for child in module.children()]
        own = {key: indices[id(p)] for key, p in module._parameters.items() if id(p) in indices}
        places = tuple((key, index) for key, index in own.items() if index not in placed)
        placed.update(own.values())
        if concerned := bool(own) or any(below):
            owners.append(Owner(module, places, initialise))
        if isinstance(module, LoraLayer) and any(
            id(parameter) in indices for name, parameter in module.named_parameters() if name.startswith("lora_")
        ):
            owners.append(Owner(module, (), reset_adapter))  # after its parts: what transformers gave them is not LoRA's
        return concerned

    def reset_adapter(module: Any) -> None:
        for name in module.active_adapters:
            module.reset_lora_parameters(name, model.peft_config[name].init_lora_weights)

    walk(model, lambda module: None)
    return owners


def _register(owners: list[Owner], values: Sequence[nn.Parameter]) -> None:
    """Put `values` where the line's parameters are registered."""
    for owner in owners:
        for key, index in owner.places:
            owner.module._parameters[key] = values[index]


def _config(
    source: str | None, config: PretrainedConfig | Mapping[str, Any] | str | None, revision: str | None, trust: bool
) -> PretrainedConfig:
    if isinstance(config, PretrainedConfig):
        return config
    try:
        if isinstance(config, Mapping):
            fields = dict(config)
            if "model_type" not in fields:
                raise UserError("model.config: model_type is missing (llama, gpt2, t5, ...)")
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        where = config or source
        if where is None:
            raise UserError("a model needs a folder, a hub name or a config")
        loaded = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source or config}: no model configuration that transformers can read ({error})") from error
    if getattr(loaded, "quantization_config", None):
        raise UserError(f"{where}: a quantised model; ftkit trains full-precision bases only")
    return loaded


def generation_config(
    folder: str | os.PathLike | None,
    *,
    config: PretrainedConfig | Mapping[str, Any] | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> transformers.GenerationConfig:
    """Return how `load_model` lets a model generate, without the model; the arguments are the same.

    Raises:
        UserError: there is no configuration that can be read
    """
    source = None if folder is None else os.fspath(folder)
    return _generation_config(source, revision, _config(source, config, revision, trust_remote_code))


def _generation_config(
    source: str | None, revision: str | None, config: PretrainedConfig
) -> transformers.GenerationConfig:
    """Return what the weights' folder says of generation; where it says nothing, what follows from the configuration."""
    if source is not None:
        try:
            return transformers.GenerationConfig.from_pretrained(source, revision=revision)
        except OSError:
            pass
    return transformers.GenerationConfig.from_model_config(config)
