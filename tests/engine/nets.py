"""Small nets that are no Hugging Face models: blocks with odd arguments, results and parameters.

`Net` is an embedding, three blocks and a head; the others change its blocks, or what goes from block to block. They take
the batches of the families, and answer with `logits`, so that the same loops train them.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.engine.families import HIDDEN, VOCABULARY


class Block(GradientCheckpointingLayer):
    """Norm, up, down, and a way through."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 90)
        self.down = nn.Linear(90, HIDDEN)

    def forward(self, x, **others):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, three blocks, head; `pass_on` says what goes from block to block."""

    def __init__(self, block=Block):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def run_blocks(self, x, input_ids):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids, attention_mask=None):
        x = self.run_blocks(self.embed(input_ids), input_ids)
        return SimpleNamespace(logits=self.head(self.norm(x)))


class ManyResults(Block):
    """Results in a tuple and a dict, with gradient, without, of integers, and none; a keyword with gradient."""

    def forward(self, x, *, extra, count):
        y = super().forward(x) + extra["bias"].tanh()
        return y, {"bias": y.mean(-1, keepdim=True) * 2, "seen": x.detach().argmax(-1)}, None, count + 1


class ManyResultsNet(Net):
    def __init__(self):
        super().__init__(ManyResults)

    def run_blocks(self, x, input_ids):
        extra, count, total = {"bias": x.sum(-1, keepdim=True), "seen": input_ids}, 0, 0.0
        for block in self.blocks:
            x, extra, nothing, count = block(x, extra=extra, count=count)
            assert nothing is None
            total = total + extra["seen"].float().mean(-1)[:, None, None]
        assert count == 3
        return x + extra["bias"] + 0.01 * total


class Unused(Block):
    """Has a layer that nobody calls."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(HIDDEN, HIDDEN)


class UnusedNet(Net):
    def __init__(self):
        super().__init__(Unused)
        self.spare = nn.Linear(HIDDEN, VOCABULARY)
        self.spare_scale = nn.Parameter(torch.ones(3))


class Sometimes(Block):
    """An expert for the rows that begin with certain tokens: some ranks, and some steps, have none."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, chosen):
        x = super().forward(x)
        if len(chosen):
            x = x.index_add(0, chosen, self.expert(x[chosen]))
        return x


class SometimesNet(Net):
    def __init__(self):
        super().__init__(Sometimes)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def run_blocks(self, x, input_ids):
        chosen = (input_ids[:, 0] % 16 == 3).nonzero()[:, 0]
        for block in self.blocks:
            x = block(x, chosen)
        return x.index_add(0, chosen, x[chosen] * self.scale) if len(chosen) else x


class TwiceNet(Net):
    """Goes through its blocks twice, as weights shared among layers do."""

    def run_blocks(self, x, input_ids):
        return super().run_blocks(super().run_blocks(x, input_ids), input_ids)


class Scalars(Block):
    """Has parameters without dimensions, and one without elements."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return super().forward(x * self.gain) + self.nothing.sum()


class ScalarsNet(Net):
    def __init__(self):
        super().__init__(Scalars)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def run_blocks(self, x, input_ids):
        return super().run_blocks(x, input_ids) * self.gain


class ReadsHeadNet(Net):
    """Reads its head's weight instead of calling the head, as fused losses do; and once more for a penalty."""

    def forward(self, input_ids, attention_mask=None):
        x = self.run_blocks(self.embed(input_ids), input_ids)
        return SimpleNamespace(logits=F.linear(self.norm(x), self.head.weight) + self.head.weight.mean())


class TiedNet(Net):
    """A head tied to the embedding, and two blocks that share a norm's weights."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class InPlace(Block):
    """Writes into its own temporary tensors, and hands its argument through."""

    def forward(self, x, mask):
        y = super().forward(x)
        y.mul_(0.5).add_(x)
        return y, mask


class InPlaceNet(Net):
    def __init__(self):
        super().__init__(InPlace)

    def run_blocks(self, x, input_ids):
        mask = (input_ids % 2).float()[..., None] + x.mean() * 0
        for block in self.blocks:
            x, mask = block(x, mask)
        return x * (1 + mask)
