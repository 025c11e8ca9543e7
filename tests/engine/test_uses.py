"""What people do with a model besides one forward and one backward, on the engine and in plain PyTorch.

Second forwards, evaluation in between, frozen parameters, parameters that some steps or some ranks do not use, blocks
with odd results, adapters: each is a case, and each case runs in a handful of settings that differ in everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.comm.shared_stage import SharedStage
from ftkit.engine.kernels import numba_loops
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.spec.strategy import Strategy
from tests.engine import families, nets
from tests.engine.families import HIDDEN, token_loss
from tests.engine.trajectory import Record, Row, differences, relative, run_plain, run_sharded, shard_model, split
from tests.worlds import RankFailure

STEPS = 4
ROWS = [
    Row("", world=2, debug=True),
    Row("", world=2, activations="keep", accumulation=2, groups=2),
    Row("", world=3, activations="keep", reshard_after_forward=False, debug=True),
]
"""Settings that the engine most differs in: one of them in each case, in turns; all of them where marked slow."""
MORE_ROWS = [
    Row("", world=1),
    Row("", world=2, reshard_after_forward=False, prefetch=False, accumulation=2),
    Row("", world=3, stage=2, debug=True, groups=2),
    Row("", world=2, stage=1, activations="keep"),
    Row("", world=2, stage=0, accumulation=2),
]
"""Others, for every third case."""


def freeze(model: nn.Module, trains: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    return model


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


# --- losses that do more than one forward


def backwards(rows):
    return {**rows, "input_ids": rows["input_ids"].flip(1)}


def with_no_grad_forward(model, rows, tokens):
    logits = model(rows["input_ids"], rows["attention_mask"]).logits
    with torch.no_grad():
        reference = model(rows["input_ids"].flip(1)).logits
    return (logits - reference).square().sum() / tokens


def two_forwards(model, rows, tokens):
    one = token_loss(model, rows, tokens)
    return one + 0.5 * token_loss(model, backwards(rows), tokens)


def two_forwards_two_backwards(model, rows, tokens):
    one = token_loss(model, rows, tokens)
    return one, 0.5 * token_loss(model, backwards(rows), tokens)


def forward_without_backward(model, rows, tokens):
    token_loss(model, rows, tokens)
    return token_loss(model, rows, tokens)


def evaluated_first(model, rows, tokens):
    model.eval()
    with torch.no_grad():
        token_loss(model, rows, tokens)
    model.train()
    return token_loss(model, rows, tokens)


def inferred_first(model, rows, tokens):
    model.eval()
    with torch.inference_mode():
        token_loss(model, rows, tokens)
    model.train()
    return token_loss(model, rows, tokens)


def inferred_between(model, rows, tokens):
    loss = token_loss(model, rows, tokens)
    with torch.inference_mode():
        token_loss(model, rows, tokens)
    return loss


def on_hidden_states(model, rows, tokens):
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
    output = model(**inputs, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    logits, labels = output.logits.flatten(0, 1), rows["labels"].flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return (loss + output.hidden_states[1].square().sum() + output.hidden_states[2].abs().sum()) / tokens


def from_embeddings(model, rows, tokens):
    embedded = model.get_input_embeddings()(rows["input_ids"])
    embedded.retain_grad()
    inputs = {**rows, "inputs_embeds": embedded * 1.1}
    del inputs["input_ids"]
    return token_loss(model, inputs, tokens)


def encoder_only(model, rows, tokens):
    states = model.get_encoder()(rows["input_ids"], attention_mask=rows["attention_mask"]).last_hidden_state
    return (states.sigmoid() * torch.linspace(-1, 1, HIDDEN)).sum() / tokens


def with_failed_block(model, rows, tokens):
    with pytest.raises(RuntimeError), torch.no_grad():
        model(inputs_embeds=torch.zeros(1, 4, HIDDEN + 1))
    with pytest.raises(RuntimeError):
        model(inputs_embeds=torch.zeros(1, 4, HIDDEN + 1))
    return token_loss(model, rows, tokens)


def against_the_base(model, rows, tokens):
    """The DPO of an adapter: its reference is the model without it."""
    logits = model(rows["input_ids"], rows["attention_mask"]).logits
    with torch.no_grad(), model.disable_adapter():
        reference = model(rows["input_ids"], rows["attention_mask"]).logits
    return ((logits - reference).square().sum() + logits.abs().sum()) / tokens


def lora() -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(families.build("llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at birth: draw it, so that both halves get a gradient at once
            nn.init.normal_(parameter, std=0.1)
    return model


def is_adapter(name: str, parameter: nn.Parameter) -> bool:
    return "lora_" in name


@dataclass(frozen=True)
class Case:
    """A model, a loss, and how they are used."""

    build: Callable[[], nn.Module]
    loss: Callable[..., Any] = token_loss
    settings: dict[str, Any] = field(default_factory=dict)
    early_zero_grad: bool = False


def _llama() -> nn.Module:
    return families.build("llama")


CASES = {
    "no_grad forward between": Case(_llama, with_no_grad_forward),
    "two forwards": Case(_llama, two_forwards),
    "two forwards, two backwards": Case(_llama, two_forwards_two_backwards),
    "forward without backward": Case(_llama, forward_without_backward),
    "evaluation between steps": Case(_llama, evaluated_first),
    "inference mode between steps": Case(_llama, inferred_first),
    "inference mode before backward": Case(_llama, inferred_between),
    "loss on hidden states": Case(_llama, on_hidden_states),
    "embeddings called outside": Case(_llama, from_embeddings),
    "decoder not used": Case(lambda: families.build("t5"), encoder_only),
    "failed blocks before": Case(_llama, with_failed_block),
    "zero_grad before backward": Case(_llama, early_zero_grad=True),
    "zero_grad before two backwards": Case(_llama, two_forwards_two_backwards, early_zero_grad=True),
    "many results": Case(nets.ManyResultsNet),
    "parameters never used": Case(nets.UnusedNet),
    "parameters used sometimes": Case(nets.SometimesNet),
    "blocks twice": Case(nets.TwiceNet),
    "parameters without dimensions": Case(nets.ScalarsNet),
    "head's weight is read": Case(nets.ReadsHeadNet),
    "tied by hand": Case(nets.TiedNet),
    "in place, and handed through": Case(nets.InPlaceNet),
    "frozen and trained in one block": Case(lambda: freeze(families.build("llama"), lambda n: "proj" not in n or "q" in n)),
    "frozen embedding": Case(lambda: freeze(families.build("llama"), lambda n: "embed" not in n)),
    "only the head trained": Case(lambda: freeze(families.build("llama"), lambda n: "lm_head" in n)),
    "frozen tied embedding": Case(lambda: freeze(families.build("qwen3"), lambda n: "embed" not in n)),
    "LoRA, adapters whole": Case(lora, settings={"replicated": is_adapter}),
    "LoRA, adapters in the blocks": Case(lora),
    "LoRA, no_grad forward between": Case(lora, with_no_grad_forward, settings={"replicated": is_adapter}),
    "LoRA, against its base": Case(lora, against_the_base, settings={"replicated": is_adapter}),
    "everything whole": Case(_llama, settings={"replicated": lambda name, parameter: True}),
}


def agree(name: str, row: Row) -> list[str]:
    """On every rank: train both ways; return where they part."""
    case = CASES[name]
    ours = run_sharded(
        row, seeded(case.build), case.loss, steps=STEPS, early_zero_grad=case.early_zero_grad, **case.settings
    )
    plain = run_plain(row, seeded(case.build), case.loss, steps=STEPS, early_zero_grad=case.early_zero_grad)
    return differences(ours, plain)


def check(worlds, name, row):
    assert worlds[row.world].run(agree, name, row) == [[]] * row.world


ALL = [(name, row) for name in CASES for row in ROWS + MORE_ROWS]
QUICK = [(name, ROWS[turn % len(ROWS)]) for turn, name in enumerate(CASES)]
QUICK += [(name, MORE_ROWS[turn % len(MORE_ROWS)]) for turn, name in enumerate(list(CASES)[::3])]


@pytest.mark.parametrize(("name", "row"), QUICK, ids=str)
def test_trains_as_plain_pytorch(worlds, name, row):
    check(worlds, name, row)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), [case for case in ALL if case not in QUICK], ids=str)
def test_trains_as_plain_pytorch_in_all_settings(worlds, name, row):
    check(worlds, name, row)


# --- random numbers


def dropped_out(row: Row) -> tuple[Record, Record]:
    """On every rank: train with dropout, recomputed and kept, from the same seeds; and in plain PyTorch."""
    return run_sharded(row, steps=STEPS), run_sharded(replace(row, activations="keep"), steps=STEPS)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_dropout_is_the_same_in_recomputation(world2, family):
    row = Row(family, world=2, accumulation=2, debug=True, changes=(("dropout", 0.2),))
    for recomputed, kept in world2.run(dropped_out, row):
        assert differences(recomputed, kept) == []


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_dropout_on_one_rank_is_that_of_plain_pytorch(world1, family):
    row = Row(family, changes=(("dropout", 0.2),))
    recomputed, kept = world1.run(dropped_out, row)[0]
    plain = run_plain(row, steps=STEPS)
    assert differences(recomputed, plain) == differences(kept, plain) == []
    assert differences(run_plain(replace(row, changes=()), steps=STEPS), plain) != []


def random_numbers_after_backward() -> tuple[float, float]:
    """The first number drawn after a backward, on the engine and in plain PyTorch."""
    drawn = []
    rows = families.batch("gpt2", 0)
    for sharded in (False, True):
        model = families.build("gpt2", dropout=0.2)
        if sharded:
            shard_model(model, Strategy.of())
        torch.manual_seed(7)
        token_loss(model, rows, 10).backward()
        drawn.append(torch.rand(()).item())
    return drawn[0], drawn[1]


def test_recomputation_draws_no_random_numbers_of_its_own(world2):
    for plain, ours in world2.run(random_numbers_after_backward):
        assert ours == plain


# --- the slots


def slots_while_blocks_compute(prefetch: bool) -> list[tuple[int, list[str]]]:
    """Return for each computation of a block, recomputations too: its number, and whose weights the slots hold."""
    model = seeded(nets.Net)
    units = shard_model(model, Strategy.of(prefetch=prefetch, debug=True))
    seen = []

    def look(number: int) -> None:
        contents = [name for slot in units.transfer.slots for name, _ in slot.content]
        seen.append((number, sorted(contents)))

    for unit in units.units:
        unit.module.up.register_forward_hook(lambda *args, number=unit.number: look(number))
    rows = families.batch("llama", 0)
    token_loss(model, rows, families.label_tokens(rows)).backward()
    return seen


def test_the_neighbour_is_gathered_while_a_block_computes(world2):
    forward, backward = [(0, [0, 1]), (1, [1, 2]), (2, [2])], [(2, [1, 2]), (1, [0, 1]), (0, [0])]
    expected = [(number, [f"blocks.{other}" for other in here]) for number, here in forward + backward]
    assert world2.run(slots_while_blocks_compute, True) == [expected] * 2
    alone = [(number, [f"blocks.{number}"]) for number, _ in expected]
    assert world2.run(slots_while_blocks_compute, False) == [alone] * 2


def parts_of_a_gradient(slow: bool) -> list[Tensor]:
    """Return this rank's gradients after one backward. `slow`: rank 1 reads gradient slots late."""
    model = seeded(nets.Net)
    units = shard_model(model, Strategy.of())
    mean = numba_loops.mean

    def late(*arguments: Any) -> None:
        time.sleep(0.2 * (units.comm.rank == 1))
        mean(*arguments)

    rows = families.batch("llama", 0)
    with mock.patch.object(numba_loops, "mean", late) if slow else nullcontext():
        token_loss(model, rows, families.label_tokens(rows)).backward()
    units.finish_gradients()
    return [gradient.part.clone() for gradient in units.gradients]


def test_a_backward_waits_for_readers_of_the_gradient_slot(world2):
    late, expected = (world2.run(parts_of_a_gradient, slow) for slow in (True, False))
    for found, wanted in zip(chain(*late), chain(*expected), strict=True):
        assert torch.equal(found, wanted)


def output_before_a_write(write: str, slow: bool, folder: str) -> Tensor:
    """Return the output of an evaluation right before a write of the shards. `slow`: rank 1 reads them late."""
    model = seeded(nets.Net)
    units = shard_model(model, Strategy.of())
    optimizer = ShardedAdamW(units, lr=0.1)
    rows = families.batch("llama", 0)
    save_checkpoint(Path(folder) / str(slow), units, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        token_loss(model, rows, families.label_tokens(rows)).backward()
        optimizer.grad_norm()
        if write == "load":
            optimizer.step()
    meet = SharedStage.meet

    def late(stage: SharedStage) -> None:
        meet(stage)
        time.sleep(0.3 * (units.comm.rank == 1))

    with mock.patch.object(SharedStage, "meet", late) if slow else nullcontext(), torch.no_grad():
        output = model(rows["input_ids"]).logits
    optimizer.step() if write == "step" else load_checkpoint(Path(folder) / str(slow), units, optimizer)
    return output


@pytest.mark.parametrize("write", ["step", "load"])
def test_a_write_waits_for_readers_of_the_shards(world2, tmp_path, write):
    late, expected = (world2.run(output_before_a_write, write, slow, str(tmp_path)) for slow in (True, False))
    for found, wanted in zip(late, expected, strict=True):
        assert torch.equal(found, wanted)


# --- reductions in the last backward of a step


class SkippingNet(nets.Net):
    """Leaves out the second block for a batch whose first token is `SKIPS`."""

    def run_blocks(self, x, input_ids):
        for number, block in enumerate(self.blocks):
            if number != 1 or input_ids[0, 0] != SKIPS:
                x = block(x)
        return x


SKIPS = 5


def with_a_skipped_block(stage: int, activations: str) -> tuple[list[str], list[str]]:
    """Train; rank 1 skips a block. Return which weights differ from plain PyTorch's, and this rank's reductions in order."""
    ours, plain = seeded(SkippingNet), seeded(SkippingNet)
    units = shard_model(ours, Strategy.of(stage=stage, activations=activations))
    optimizers = ShardedAdamW(units, lr=1e-3), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(3):
        rows = families.batch("llama", step)
        tokens = families.label_tokens(rows)
        halves = [{name: tensor.clone() for name, tensor in split(rows, 2, rank).items()} for rank in range(2)]
        halves[0]["input_ids"][0, 0], halves[1]["input_ids"][0, 0] = SKIPS + 1, SKIPS
        for half in halves:
            token_loss(plain, half, tokens).backward()
        units.transfer.trace.start()
        with units.last_backward():
            (token_loss(ours, halves[units.comm.rank], tokens) * 2).backward()
        early = [span.name for span in units.transfer.trace.stop() if span.name.startswith("reduce")]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = units.state_dict()
    return [name for name, tensor in plain.state_dict().items() if not relative(weights[name], tensor) < 1e-4], early


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("stage", [0, 1])
def test_blocks_are_reduced_in_one_order_although_a_rank_skips_one(world2, stage, activations):
    for wrong, reduced in world2.run(with_a_skipped_block, stage, activations):
        assert wrong == []
        assert reduced == ["reduce backward 2", "reduce backward 1", "reduce backward 0"]


def two_backwards_in_the_last() -> None:
    model = seeded(nets.Net)
    units = shard_model(model, Strategy.of(stage=1, activations="keep"))
    rows = families.batch("llama", 0)
    with units.last_backward():
        for _ in range(2):
            token_loss(model, rows, families.label_tokens(rows)).backward()


def test_a_second_backward_after_the_last_is_refused(world2):
    with pytest.raises(RankFailure, match=r"after its gradient was reduced: .*backward\(\) once in a training_step"):
        world2.run(two_backwards_in_the_last)


# --- two models, and gradients of inputs


def two_models() -> list[str]:
    """A strategy and its reference, both sharded, as preference training has them."""
    record, weights = [], []
    for sharded in (False, True):
        strategy, reference = families.build("llama"), families.build("gpt_neox")
        if sharded:
            units = shard_model(strategy, Strategy.of(debug=True))
            shard_model(reference, Strategy.of(debug=True))
            optimizer = ShardedAdamW(units, lr=1e-3)
        else:
            optimizer = torch.optim.AdamW(strategy.parameters(), lr=1e-3)
        for step in range(3):
            rows = families.batch("llama", step)
            with torch.no_grad():
                target = reference(rows["input_ids"]).logits
            loss = (strategy(rows["input_ids"]).logits - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record.append(loss.item())
        weights.append(units.state_dict() if sharded else strategy.state_dict())
    assert record[3:] == pytest.approx(record[:3], rel=1e-5)
    return [name for name in weights[0] if not relative(weights[1][name], weights[0][name]) < 1e-4]


def test_two_sharded_models(world2):
    assert world2.run(two_models) == [[], []]


def input_gradients(activations: str) -> list[float]:
    """The gradient with respect to inputs, which no parameter sees."""
    gradients = []
    for sharded in (False, True):
        model = freeze(families.build("t5"), lambda name: False)
        if sharded:
            shard_model(model, Strategy.of(activations=activations, debug=True))
        torch.manual_seed(2)
        embedded = torch.randn(2, 5, HIDDEN, requires_grad=True)
        decoded = torch.randn(2, 5, HIDDEN, requires_grad=True)
        model(inputs_embeds=embedded, decoder_inputs_embeds=decoded).logits.square().mean().backward()
        gradients.append((embedded.grad, decoded.grad))
    return [relative(ours, plain) for plain, ours in zip(*gradients)]


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_gradients_of_inputs_flow_through_frozen_blocks(world2, activations):
    for distances in world2.run(input_gradients, activations):
        assert max(distances) < 1e-5
