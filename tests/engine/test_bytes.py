"""Bytes that a rank stores and sends, against the ZeRO paper (arXiv:1910.02054, sections 5 and 7).

N parameters in 16 bits under AdamW cost 2N of weights, 2N of gradients and 12N of state (fp32 master and two moments).
The stage decides which of them are divided by W. Every storage that this process did not have before the model was sharded
is measured, found among all live tensors, so bytes that the engine forgets to count are counted here.

Sent are 2N numbers a step below stage 3 (a reduce-scatter and an all-gather, or the all-reduce made of them) and 3N at
stage 3, each times (W-1)/W as a ring sends them. What deviates is written out in `expected_traffic`.
"""

from __future__ import annotations

import gc

import pytest
import torch
import transformers

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.placeholder import Placeholder
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.spec.strategy import Strategy
from tests.engine.trajectory import shard_model

LAYERS, HIDDEN, INNER, VOCABULARY = 4, 256, 1024, 2048
BLOCK = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
TABLE = VOCABULARY * HIDDEN  # the embedding, and as much again the head
N = LAYERS * BLOCK + 2 * TABLE + HIDDEN


def build():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def padded(numel: int, world: int) -> int:
    """Elements of a flat parameter: shards are whole multiples of 4096 elements."""
    return -(-numel // (4096 * world)) * 4096 * world


def storages() -> dict[int, int]:
    """Return every live storage of this process: address to bytes."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not isinstance(each, Placeholder)]
    found = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def train(units, optimizer, model, steps: int, accumulation: int = 1) -> dict[str, int]:
    """Make steps; return the bytes sent in the last one, by operation."""
    for step in range(steps):
        units.comm.bytes_sent.clear()
        for _ in range(accumulation):
            torch.manual_seed(step)
            ids = torch.randint(0, VOCABULARY, (1, 8))
            model(input_ids=ids).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(units.comm.bytes_sent)


def measure(strategy: Strategy) -> dict[str, int]:
    """On every rank: the bytes of a rank after a step."""
    comm = Communicator(torch.device("cpu"))  # its window of shared memory is the machine's, not this rank's
    before = storages()
    model = build()
    units = shard_model(model, strategy, comm)
    optimizer = ShardedAdamW(units, None)
    train(units, optimizer, model, 1)
    now = storages()
    return {
        "measured": sum(size for address, size in now.items() if before.get(address) != size),
        "optimizer": optimizer.state_bytes(),
        **units.state_bytes(),
    }


STATE = {
    0: lambda world: 16 * N,
    1: lambda world: 4 * N + 12 * N / world,
    2: lambda world: 2 * N + 14 * N / world,
    3: lambda world: 16 * N / world,
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", STATE)
def test_state_bytes_are_those_of_the_paper(worlds, stage, world):
    for found in worlds[world].run(measure, Strategy.of(stage=stage, dtype="bf16")):
        state = found["parameters"] + found["gradients"] + found["optimizer"]
        assert found["measured"] == pytest.approx(state + found["slots"], rel=0.005)
        assert state == pytest.approx(STATE[stage](world), rel=0.02)
        weights = 2 if stage == 3 else 0
        gradients = 1 if stage >= 2 else 0
        assert found["slots"] == (weights + gradients) * 2 * padded(BLOCK, world)


@pytest.mark.parametrize("world", [2])
def test_holding_costs_the_weights_and_ends_with_the_step(worlds, world):
    for found in worlds[world].run(measure, Strategy.of(reshard_after_forward=False, dtype="bf16")):
        state = found["parameters"] + found["gradients"] + found["optimizer"]
        assert found["measured"] == pytest.approx(state + found["slots"], rel=0.005)


def expected_traffic(stage: int, world: int, accumulation: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by operation."""
    share = 2 * (world - 1) / world  # bf16, and what a ring sends of it
    blocks = padded(BLOCK, world)
    tables = 2 * padded(TABLE, world)
    norm = padded(HIDDEN, world)  # outside blocks, small: whole everywhere
    everything = LAYERS * blocks + tables + norm
    if stage == 0:  # replicated: padded as for one rank; 2N in one operation
        alone = LAYERS * padded(BLOCK, 1) + 2 * padded(TABLE, 1) + padded(HIDDEN, 1)
        return {"all_reduce": 2 * share * alone}
    if stage == 1:  # gradients wait for the end of the step
        return {"reduce_scatter": share * everything, "all_gather": share * everything}
    if stage == 2:  # gradients leave with each micro-batch, but for the whole ones
        return {
            "reduce_scatter": share * (accumulation * (LAYERS * blocks + tables) + norm),
            "all_gather": share * everything,
        }
    # stage 3: forward and backward gather each block, except the two that are still in the slots when the direction turns:
    # the last two blocks when backward begins, the first two when the next micro-batch does.
    gathers = accumulation * (2 * LAYERS - 2) - (accumulation - 1) * 2
    # the embedding is gathered in forward, the head too; neither is asked for again in backward
    return {
        "reduce_scatter": share * (accumulation * (LAYERS * blocks + tables) + norm),
        "all_gather": share * (gathers * blocks + accumulation * tables + norm),
    }


def traffic(strategy: Strategy, accumulation: int) -> dict[str, int]:
    """On every rank: the bytes sent in a step after the first."""
    model = build()
    units = shard_model(model, strategy)
    return train(units, ShardedAdamW(units, None), model, 2, accumulation)


@pytest.mark.quick(5)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_bytes_sent_are_those_of_the_paper(worlds, stage, accumulation, world):
    for prefetch in (True, False) if stage == 3 else (True,):
        strategy = Strategy.of(stage=stage, dtype="bf16", prefetch=prefetch)
        for sent in worlds[world].run(traffic, strategy, accumulation):
            few = sent.pop("sum")
            assert few < 4 * 2 * 100  # the norm, and which of the 39 tensors got a gradient
            assert sent == pytest.approx(expected_traffic(stage, world, accumulation), rel=1e-4)


def test_held_weights_are_gathered_once(world2):
    """Holding is ZeRO-2's trade: nothing of a block is gathered again in backward."""
    strategy = Strategy.of(reshard_after_forward=False, dtype="bf16")
    for sent in world2.run(traffic, strategy, 1):
        gathered = LAYERS * padded(BLOCK, 2) + 2 * padded(TABLE, 2) + padded(HIDDEN, 2)
        assert sent["all_gather"] == 2 * gathered // 2
