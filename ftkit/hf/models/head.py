"""The head and the loss of a causal language model together, so that its logits never exist as a whole.

A model computes `logits = self.lm_head(hidden)` and hands them to `self.loss_function`, which anybody may set. While the
Trainer wants a loss and nothing else, the head keeps what it is given and returns logits of no classes, which pass through
whatever the model does to logits; the loss function then makes the loss of what the head kept, by
`ftkit.kernels.linear_cross_entropy`, with the soft cap or scale that the configuration names. At all other times both do
what they always did.

Whether a model is one that can be treated so is not looked up: the exchange is proved on a probe whose body gives random
hidden states, against the same probe's own loss and gradients. A hook of the user's on the head, or on what returns the
logits, reads or changes them: then there are logits, whenever the hook came. So does a `forward` of the user's own, which
may do so in training alone, or later.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import AdaLoraModel, PeftModel, PeftType, PolyModel, XLoraModel
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.functional import linear as linear_layer
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ftkit.engine.core.instance_class import specialise
from ftkit.engine.core.recompute import autocast_kind
from ftkit.hf.models.hooks import AFTER, LIBRARIES, has_global_hooks, home_of, hooks_on
from ftkit.hf.models.probe_copies import Chance, difference, linear, results
from ftkit.kernels.cross_entropy import LossTerms
from ftkit.kernels.linear_cross_entropy import CHUNK_BYTES, linear_cross_entropy

READERS = LIBRARIES - {"torch"}
"""Libraries whose hooks leave logits alone; torch's are observers and simulated quantisation."""
WRITTEN_BY = LIBRARIES | {"transformers_modules"}
"""Packages whose forwards are what they were proved to be; the last is that of models which bring their own."""
PASSING = (BaseTuner.forward, PolyModel.forward, XLoraModel.forward)
"""Forwards of PEFT's that return what the model gave; any other may add to its loss, or call its head once more."""
HIDDEN = 8
"""Width of a probe's hidden states."""


@dataclass(frozen=True)
class TokenLosses:
    """What each token's label gave: token t + 1 by the hidden states at t.

    Args:
        losses: (B, T - 1) fp32, nats; 0 where a label does not count.
        hits: (B, T - 1) bool, whether the label was the likeliest token.
        counted: (B, T - 1) bool, whether the label counts.
    """

    losses: Tensor
    hits: Tensor
    counted: Tensor

    @property
    def rows(self) -> Tensor:
        """The sum of losses, label tokens and hits of each row, (B, 3) fp32."""
        return torch.stack([each.sum(1).float() for each in (self.losses, self.counted, self.hits)], 1)


class HeadLoss:
    """A model's loss function, and what its head keeps for it.

    Args:
        head: the head, a linear layer.
        cap: soft cap of the logits; 0: none.
        scale: factor on the logits, before the cap.
    """

    def __init__(self, head: nn.Linear, cap: float, scale: float) -> None:
        self.head = head
        self.cap = cap
        self.scale = scale
        self.wide = False  # compute logits in fp32, whatever the weights are
        self.wanted = False
        self.kept: Tensor | None = None
        self.tokens: list[TokenLosses] | None = None  # of the calls since somebody asked

    @contextmanager
    def each_token(self) -> Iterator[list[TokenLosses]]:
        """Let calls of the model in the body, without gradients, note what each token gave, in order. See `only`."""
        self.tokens = []
        try:
            with self.only():
                yield self.tokens
        finally:
            self.tokens = None

    @contextmanager
    def only(self) -> Iterator[None]:
        """Let calls of the model in the body make a loss, and logits of no classes."""
        self.wanted = True
        try:
            yield
        finally:
            self.wanted, self.kept = False, None

    def attach(self, model: PreTrainedModel) -> None:
        """Give the head its forward and the model its loss function."""
        plain, own = type(self.head).forward, self

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            if not own.wanted or torch.is_autocast_enabled(autocast_kind(input.device)):
                return linear_layer(*own.operands(input)) if own.wide else plain(self, own.operands(input)[0])
            own.kept = input
            return input.new_empty(*input.shape[:-1], 0)

        specialise(self.head, forward=forward)
        model.loss_function = self

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, weight and bias in one dtype: that of the weights, or fp32 where logits overflow it."""
        weight, bias = self.head.weight, self.head.bias
        if self.wide:
            return hidden.float(), weight.float(), None if bias is None else bias.float()
        return hidden.to(weight.dtype) if hidden.dtype == torch.float32 else hidden, weight, bias

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss, as `transformers.loss.loss_utils.ForCausalLMLoss` does; arguments as there."""
        hidden, self.kept = self.kept, None
        if hidden is None:
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        if self.tokens is not None:
            noted = self._each_token(hidden[:, :-1], labels[:, 1:].to(hidden.device), ignore_index)
            self.tokens.append(noted)
            return noted.losses.sum() / (noted.counted.sum() if num_items_in_batch is None else num_items_in_batch)
        if shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = shift_labels.reshape(-1).to(hidden.device)
        terms = LossTerms(ignore_index=ignore_index, cap=self.cap)
        rows, weight, bias = self.operands(hidden.reshape(-1, hidden.shape[-1]))
        total = linear_cross_entropy(rows, weight, flat, bias, terms, scale=self.scale)
        if num_items_in_batch is None:
            return total / (flat != ignore_index).sum()
        return total / (num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)

    def _each_token(self, hidden: Tensor, labels: Tensor, ignore_index: int) -> TokenLosses:
        """Return what hidden states (B, T, D) give for labels (B, T), a part of the logits at a time."""
        rows, weight, bias = self.operands(hidden.reshape(-1, hidden.shape[-1]))
        flat = labels.reshape(-1)
        losses = torch.zeros(len(flat), dtype=torch.float32, device=rows.device)
        hits = torch.zeros(len(flat), dtype=torch.bool, device=rows.device)
        step = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        for start in range(0, len(flat), step):
            part = slice(start, start + step)
            logits = linear_layer(rows[part], weight, bias).float() * self.scale
            if self.cap:
                logits = self.cap * torch.tanh(logits / self.cap)
            losses[part] = cross_entropy(logits, flat[part], ignore_index=ignore_index, reduction="none")
            hits[part] = logits.argmax(-1) == flat[part]
        return TokenLosses(losses.view(labels.shape), hits.view(labels.shape), labels != ignore_index)


def attach_head_loss(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str | None:
    """Let `model` make its loss by chunks of its head, where that agrees with its own; return why not, else None.

    Args:
        model: a causal language model, or a PEFT model of one, on any device.
        dtype: compute dtype.
        device: compute device.

    Cost: a proof, with a few rows of logits.
    """
    found = proven_head_loss(model, dtype, device)
    if isinstance(found, str):
        return found
    found.attach(cast(PreTrainedModel, _base(model)))
    return None


def proven_head_loss(model: nn.Module, dtype: torch.dtype, device: torch.device) -> HeadLoss | str:
    """Return the chunked loss of `model`, attached to nothing, or why it has none; arguments as `attach_head_loss`.

    The model may be on meta: only its configuration and its classes are looked at.
    """
    base = _base(model)
    if not isinstance(base, PreTrainedModel):
        return "no model of transformers"
    if "forward" in vars(base):
        return "its forward is replaced on the instance"
    if (reason := _read_by(model)) is not None:
        return reason
    if getattr(base, "loss_type", None) not in ("ForCausalLM", None) or base.loss_function is not ForCausalLMLoss:
        return "its loss is not that of a causal language model"
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear:
        return "its head is not a linear layer" if head is not None else "it has no head"
    config = base.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None) or 0.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    scale = (getattr(config, "logit_scale", None) or 1.0) / divisor
    if not _agrees(base, head, cap, scale, dtype, device):
        return "its loss is more than a head's"
    return HeadLoss(head, cap, scale)


def _base(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _read_by(model: nn.Module) -> str | None:
    """Return what of the user's reads or changes the logits on their way out of a model; None where nothing does."""
    base = _base(model)
    around = [model, model.base_model, base] if isinstance(model, PeftModel) else [base]
    if has_global_hooks() or any(hooks_on(each, AFTER, READERS) or "forward" in vars(each) for each in around):
        return "a hook of the model's may read its logits"
    if any(home_of(type(each).forward).partition(".")[0] not in WRITTEN_BY for each in around):
        return "its forward is the user's own, and may read its logits"
    if isinstance(model, PeftModel) and any(each.peft_type == PeftType.CPT for each in model.peft_config.values()):
        return "context-aware prompt tuning makes its loss of the logits"
    if adds_to_loss(model) and not isinstance(model.base_model, AdaLoraModel):  # whose penalty is of its weights alone
        return "its adapter has a loss of its own"
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    if head is not None and (hooks_on(head, AFTER, READERS) or "forward" in vars(head)):
        return "a hook of its head's may read or change its logits"
    return None


def adds_to_loss(model: nn.Module) -> bool:
    """Whether PEFT may add to the loss that the model gives: AdaLoRA's penalty, the loss of a shadow."""
    tuner = model.base_model if isinstance(model, PeftModel) else None
    return isinstance(tuner, BaseTuner) and type(tuner).forward not in PASSING


def head_loss(model: nn.Module) -> HeadLoss | None:
    """Return the chunked loss of a model that was given one; `usable_loss` says whether it may make it now."""
    found = getattr(_base(model), "_loss_function", None)
    return found if isinstance(found, HeadLoss) else None


def usable_loss(model: nn.Module) -> HeadLoss | None:
    """Return the chunked loss of a model that has one, and whose logits nobody else reads."""
    found = head_loss(model)
    return found if found is not None and _read_by(model) is None else None


def only_loss(model: nn.Module, *, wanted: bool) -> Any:
    """Return a context in which calls of the model need no logits, where `wanted` and the model can do so."""
    found = usable_loss(model) if wanted else None
    return nullcontext() if found is None else found.only()


class _Body(nn.Module):
    """In a probe's place of everything below the head: returns given hidden states."""

    hidden: Tensor

    def __init__(self, original: nn.Module, depth: int = 2) -> None:
        super().__init__()
        if depth:  # some models call a part of their body
            self._modules.update({name: _Body(child, depth - 1) for name, child in original.named_children()})

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


def _agrees(
    base: PreTrainedModel, head: nn.Linear, cap: float, scale: float, dtype: torch.dtype, device: torch.device
) -> bool:
    chance = Chance().manual_seed(0)
    classes = head.weight.shape[0]
    own_head = linear(classes, HIDDEN, chance, bias=head.bias is not None)
    hidden = 3 * torch.randn(2, 5, HIDDEN, generator=chance)
    labels = torch.randint(0, classes, (2, 5), generator=chance)
    labels[0, :2] = -100
    cpu = torch.device("cpu")
    here, exactly = (device, dtype), (cpu, torch.float64)
    # First on the CPU: a model that reads its logits finds no classes there, which a CUDA device answers with an assertion.
    rounds = [(True, (cpu, torch.float32))] if device.type != "cpu" else []
    rounds += [(True, here), (False, here), (False, exactly)]
    try:
        found = []
        for chunked, (where, of) in rounds:
            probe_head = copy.deepcopy(own_head).to(where, of)
            probe = _probe(base, head, probe_head)
            if chunked:
                HeadLoss(probe_head, cap, scale).attach(probe)
            leaves = {"hidden": hidden.to(dtype).to(where, of)}
            made = results(_loss_of(probe, labels.to(where)), leaves, dict(probe_head.named_parameters()))
            found.append({name: value.cpu() for name, value in made.items()})
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    return difference(*found[-3:]) is not None


def _probe(base: PreTrainedModel, head: nn.Linear, own_head: nn.Linear) -> Any:
    """Return a copy of the model whose body is `_Body` and whose head is `own_head`."""
    probe = copy.copy(base)
    probe.__dict__.update({key: type(value)() for key, value in vars(base).items() if key.endswith("_hooks")})
    probe.__dict__["_modules"] = {name: own_head if child is head else _Body(child) for name, child in base.named_children()}
    return probe.eval()


def _loss_of(probe: Any, labels: Tensor) -> Any:
    def loss(hidden: Tensor) -> Tensor:
        for module in probe.modules():
            if isinstance(module, _Body):
                module.hidden = hidden
        with only_loss(probe, wanted=True):
            found: Tensor = probe(input_ids=labels.clamp(min=0), labels=labels, num_items_in_batch=torch.tensor(7)).loss
        return found

    return loss
