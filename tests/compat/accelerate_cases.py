"""Cases of accelerate's documented loops: accumulation, clipping, schedules, states, metrics, early stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import accelerate
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    find_executable_batch_size,
    set_seed,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import ftkit
from tests.compat.case import Case, names_in
from tests.compat.trainer_cases import Stream
from tests.hf.runs import llama, token_rows

Loop = Callable[..., Mapping[str, Any]]


def accelerator(kind: str, **options: Any) -> accelerate.Accelerator:
    """Return an accelerator of a kind."""
    made = accelerate.Accelerator if kind == "stock" else ftkit.Accelerator
    return made(cpu=True, **options)


def prepared(made: Any, *, rows: Any = None, batch: int = 4, optimizer: Any = torch.optim.AdamW) -> Any:
    """Return model, optimizer, loader and scheduler, prepared."""
    set_seed(2)
    model = llama()
    own = optimizer(model.parameters(), lr=3e-3)
    loader = DataLoader(rows if rows is not None else token_rows(18), batch_size=batch)
    return made.prepare(model, own, loader, LambdaLR(own, lambda step: 1 / (1 + step)))


def weights(made: Any, model: Any) -> dict[str, Any]:
    """Return whole weights."""
    return {name: tensor.detach().clone() for name, tensor in made.get_state_dict(model).items()}


def steps(made: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any, *, clip: float | None = 0.5) -> dict[str, Any]:
    """Make an epoch as accelerate's examples do."""
    losses, norms = [], []
    model.train()
    for batch in loader:
        with made.accumulate(model):
            loss = model(**batch).loss
            made.backward(loss)
            if clip is not None and made.sync_gradients:
                norms.append(float(made.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "rate": optimizer.param_groups[0]["lr"]}


def epoch(
    kind: str, folder: str, clip: float | None = 0.5, rows: Any = None, optimizer: Any = torch.optim.AdamW, **options: Any
) -> Any:
    made = accelerator(kind, **options)
    model, own, loader, scheduler = prepared(made, rows=rows() if rows else None, optimizer=optimizer)
    found = steps(made, model, own, loader, scheduler, clip=clip)
    return {**found, "weights": weights(made, model)}


def by_hand(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, _ = prepared(made)
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            with made.no_sync(model):
                made.backward(model(**batch).loss / 2)
        else:
            made.backward(model(**batch).loss / 2)
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(made, model)}


def local_sgd(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, scheduler = prepared(made)
    with LocalSGD(accelerator=made, model=model, local_sgd_steps=2) as local:
        found = steps(made, model, optimizer, loader, scheduler)
        local.step()
    return found


def triggers(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, _ = prepared(made)
    done = 0
    for batch in loader:
        made.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == 2:
            made.set_trigger()
        if made.check_trigger():
            break
    return {"steps": done}


def skipped(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, scheduler = prepared(made)
    return steps(made, model, optimizer, made.skip_first_batches(loader, 2), scheduler)


def joined(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, scheduler = prepared(made)
    with made.join_uneven_inputs([model], even_batches=False):
        return steps(made, model, optimizer, loader, scheduler)


def profiled(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, scheduler = prepared(made)
    with made.profile():
        return steps(made, model, optimizer, loader, scheduler)


def saved(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, scheduler = prepared(made)
    steps(made, model, optimizer, loader, scheduler)
    made.save_model(model, f"{folder}/model")
    return {"files": names_in(f"{folder}/model", "*"), "class": type(made.unwrap_model(model)).__name__}


def clipped_by_value(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, _ = prepared(made)
    for batch in loader:
        made.backward(model(**batch).loss)
        made.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(made, model)}


def torch_clipping(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    model, optimizer, loader, _ = prepared(made)
    norms = []
    for batch in loader:
        made.backward(model(**batch).loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": weights(made, model)}


def freed(kind: str, folder: str) -> Any:
    made = accelerator(kind)
    first = prepared(made)
    steps(made, *first)
    made.free_memory(*first)
    return steps(made, *prepared(made))


def executable(kind: str, folder: str) -> Any:
    seen = []

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> Any:
        seen.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")
        made = accelerator(kind)
        return steps(made, *prepared(made, batch=batch_size))

    return {**attempt(), "sizes": seen}


ACCUMULATES = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
HOOK = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
SIXTEEN_BITS = "the engine computes in 16 bits with fp32 masters; stock keeps fp32 weights and casts by autocast"


def loop(feature: str, make: Loop, *, differs: str = "", **given: Any) -> Case:
    """Return the case of a loop."""
    return Case("accelerate's loops", feature, partial(make, **given), differs)


ACCELERATE: tuple[Case, ...] = (
    loop("without clipping", epoch, clip=None),
    loop("SGD", epoch, optimizer=torch.optim.SGD),
    loop("Adam", epoch, optimizer=torch.optim.Adam),
    loop("GradientAccumulationPlugin across epochs", epoch, gradient_accumulation_plugin=ACCUMULATES),
    loop("accumulation by hand with no_sync", by_hand),
    loop("mixed_precision='bf16'", epoch, mixed_precision="bf16", differs=SIXTEEN_BITS),
    loop("a stream", epoch, rows=Stream),
    loop("a DDP communication hook", epoch, kwargs_handlers=[HOOK]),
    loop("skip_first_batches", skipped),
    loop("LocalSGD on one process", local_sgd),
    loop("join_uneven_inputs on one process", joined),
    loop("set_trigger and check_trigger (early stop)", triggers),
    loop("profile", profiled),
    loop("save_model and unwrap_model", saved),
    loop("free_memory and a second model", freed),
    loop("find_executable_batch_size", executable),
    loop("clip_grad_value_", clipped_by_value),
    loop("torch.nn.utils.clip_grad_norm_ on the model's parameters", torch_clipping),
)
