"""Ranks that do not do the same end with one message, in the Trainer, the Accelerator and plain use, through the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

import ftkit
from ftkit.engine.comm import communicator as comm_module
from ftkit.engine.comm import watchdog
from ftkit.engine.comm.standstill import Patience
from ftkit.errors import UserError
from tests.hf.runs import Run, fresh_state, llama, make_trainer, rank, token_rows
from tests.worlds import World, Worlds

SHORT = Patience(beat=0.1, look=0.3, stuck=1.5, stopped=2.0, silent=15.0, leave=0.5, grace=1.0, remind=60.0)
"""An order of magnitude below a run's."""

SHARDED = {"stage": 3}


@pytest.fixture
def broken() -> Iterator[World]:
    """Return a world whose ranks may end in pieces."""
    world = World(2)
    yield world
    world.close()


def told(case: Callable[..., Any], *args: Any) -> str:
    """Run a case on short clocks; return the text of its error."""
    wake = mock.patch.object(comm_module, "WAKE", timedelta(seconds=0.1))
    with mock.patch.object(watchdog, "PATIENCE", SHORT), wake:
        try:
            case(*args)
        except UserError as error:
            return str(error)
    return ""


# --- towers


def towers() -> nn.Module:
    """Return a small Qwen2.5-VL: a tower for images beside a language model."""
    torch.manual_seed(3)
    text = {
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 128},
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    vision = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 56, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32},
        **{"spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 8, "fullatt_block_indexes": [1]},
    }
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def one_rank_without_an_image(stage: int) -> None:
    model = towers()
    ftkit.shard(model, {"stage": stage})
    ids = torch.randint(3, 80, (1, 12))
    inputs: dict[str, Any] = {}
    if rank() == 0:
        ids[0, 2:6] = 90
        inputs = {"pixel_values": torch.randn(4, 3 * 16), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        inputs["mm_token_type_ids"] = (ids == 90).int()
    model(input_ids=ids, labels=ids, **inputs).loss.backward()


def test_a_rank_without_an_image_stops_with_the_tower_named(worlds: Worlds):
    answers = worlds[2].run(told, one_rank_without_an_image, 3)
    assert len(set(answers)) == 1
    went = r"rank 0 to all-gather of model\.visual\.\S+; rank 1 to all-gather of model\.language_model"
    assert re.search(went, answers[0])
    assert "images (or audio) in every rank's batch or in none" in answers[0]


# --- blocks


def skip(model: nn.Module, number: int) -> None:
    """Leave out block `number` in forwards of this rank."""
    model.model.layers[number].forward = lambda hidden, *args, **kwargs: hidden


def skips_in_plain_use() -> None:
    model = llama()
    units = ftkit.shard(model, SHARDED)
    optimizer = ftkit.ShardedAdamW(units, lr=1e-3)
    skip(model, rank())
    rows = token_rows(2)
    ids = torch.stack([row["input_ids"] for row in rows])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def skips_under_the_accelerator() -> None:
    fresh_state()
    accelerator = ftkit.Accelerator(cpu=True, ftkit=SHARDED)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    skip(model, 2 * rank())
    ids = torch.stack([row["input_ids"] for row in token_rows(2)])
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()


class Skips(transformers.TrainerCallback):
    """Leaves out a block on one rank, from the second step on."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if rank() == 1:
            skip(model, 1)


class Alone(transformers.TrainerCallback):
    """Does on rank 0 what all ranks have to do."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if rank() == 0:
            self.act(self.trainer)


def generate(trainer: Any) -> None:
    trainer.model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=4)


def evaluate(trainer: Any) -> None:
    trainer.evaluate()


def save(trainer: Any) -> None:
    trainer.save_model()


def sleep(trainer: Any) -> None:
    time.sleep(4 * SHORT.stuck)


def trains(folder: str, callback: Any) -> None:
    trainer = make_trainer("ours", folder, Run(ftkit=SHARDED, rows=12, eval_rows=6, options={"callbacks": [callback]}))
    callback.trainer = trainer
    trainer.train()


@pytest.mark.parametrize("case", [skips_in_plain_use, skips_under_the_accelerator])
def test_ranks_that_skip_different_blocks_stop(case, worlds: Worlds):
    answers = worlds[2].run(told, case)
    assert len(set(answers)) == 1
    assert re.search(r"rank 0 to all-gather of model\.layers\.\d; rank 1 to all-gather of model\.layers\.\d", answers[0])


def test_ranks_that_skip_different_blocks_stop_in_the_trainer(worlds: Worlds, tmp_path):
    answers = worlds[2].run(told, trains, str(tmp_path), Skips())
    assert len(set(answers)) == 1
    assert "rank 0 to reduce-scatter of model.layers.1; rank 1 to " in answers[0]


def ending(folder: str, act: Callable[[Any], Any]) -> None:
    raise AssertionError(told(trains, folder, Alone(act)))


@pytest.mark.parametrize(
    "act", [save, *(pytest.param(act, marks=pytest.mark.slow) for act in (generate, evaluate))], ids=lambda act: act.__name__
)
def test_what_rank_0_does_alone_stops_all_ranks(act, broken: World, tmp_path, capfd):
    with pytest.raises(AssertionError) as caught:
        broken.run(ending, str(tmp_path), act, seconds=30.0)
    text = str(caught.value) + capfd.readouterr().err
    call = "save_model" if act is save else act.__name__
    assert f"`{call}` runs on rank 0 only. All ranks must call it" in text
    assert "no answer" not in text, "every rank ended"


@pytest.mark.slow
def test_a_callback_that_takes_its_time_on_rank_0_is_waited_for(worlds: Worlds, tmp_path):
    """Four times as long as ranks are given that wait for each other; in a run that is more than a minute."""
    assert worlds[2].run(told, trains, str(tmp_path), Alone(sleep)) == ["", ""]
