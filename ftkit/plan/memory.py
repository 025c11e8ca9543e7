"""Bytes: what a run takes on each tier, for each purpose, at its peaks, before anything is allocated.

[Note: the purposes]   one rank; S, W*S: elements of a shard, of all shards of a line

    parameters       S or W*S of each line, compute dtype            on their tier
    gradients        S (or W*S where they are reduced late)          on their tier
    master, moments  S of each trained line, fp32, one and two       on the state's tier
    slots            two of the widest block's weights, one of its gradient; all weights if they stay gathered;
                     a buffer of the widest gradient shard on its way to host or NVMe                           device
    staging          host buffers between tiers: reading weights ahead, offloading gradients, updating pieces     host
    activations      of recomputed blocks, from forward to backward  on their tier
    workspace        the widest block's graph; the graphs of blocks whose activations are kept                  device
    logits           and what the loss makes of them                 device
    root parameters  embedding and head, gathered, and a gradient    device
    initial values   exact fp32 values of weights that were not read from files, until the first step
    runtime          what Python, torch and the collectives hold

The permanent bytes are exact: tests compare them with the engine's own storages. Activations, logits and runtime are
estimates, calibrated against measured runs (benchmarks/plan_against_runs.py). The phases are four: load, train, save,
resume. Within train the worst of five instants counts: the last block's forward beside the head, the loss, a block's
backward, the embedding's gradient, the update. On a CPU the worst of each purpose counts, because malloc gives little back
between them.

It knows no torch and no model: a `Shape` and a `Strategy` in, integers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ftkit.plan.attention import backward_bytes
from ftkit.plan.shape import Placed, Shape
from ftkit.spec.strategy import Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME, activation_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

PHASES = ("load", "train", "save", "resume")

# The engine's sizes, which this room may not import for they live beside torch; tests/plan compares them.
SLOT_ALIGNMENT_BYTES = 256  # transfer.ALIGNMENT_BYTES
READ_AHEAD_BUFFERS = 3  # read_ahead.UNITS + 1
OFFLOAD_BUFFERS = 2  # gradient_offload.BUFFERS
UPDATE_SLOTS = 6  # update.SLOTS
CUDA_PIECE_NUMEL = 1 << 24  # update.CUDA_PIECE_NUMEL
DISK_PIECE_NUMEL = 1 << 20  # flatfile.PIECE_NUMEL
ACTIVATION_STAGING = 4  # activation_offload.STAGING
ACTIVATIONS_LEAVING = 2  # activation_offload.LEAVING; as many come back at once
FILE_PIECE_BYTES = 8 * MIB  # storage.PIECE_BYTES
STAGE_BYTES = 4 * MIB  # comm.STAGE_BYTES
LOSS_CHUNK_BYTES = 128 * MIB  # linear_cross_entropy.CHUNK_BYTES

ACTIVATIONS = "activations"

LOGIT_BYTES = 12
"""Of one logit at the loss's backward, whatever the compute dtype: log-softmax, the gradient of the picked ones and that
of the logits, fp32 each (torch's cross entropy on `logits.float()`, as transformers computes it)."""

FORWARD_SHARE = (1, 2)
"""Peak bytes of a forward without a graph, as a share of the block's graph. Derived, not measured: three tensors of the
inner width and three of the hidden width, of all those in the graph (`Shape.block_elements`)."""

BACKWARD_SHARE = (1, 3)
"""Of a block's graph, that its backward needs on top, while most of the graph still lives."""

RUNTIME = {"cpu": 832 * MIB, "cuda": 2560 * MIB}
"""Host bytes of a rank with a model of nothing: imports, threads, compiled loops, malloc's arenas. Measured on a CPU under
`ftkit finetune` (torch 2.13, transformers 5): 540 MiB when the model is built, 650 before the first step, 680 after it; and
up to 150 more that differ between equal ranks of one run. With CUDA it was not measured."""

HEAP_SHARE = (15, 100)
"""Of what comes and goes on a CPU: what malloc does not give back in between. Measured, see the benchmark."""

CONTEXT_BYTES = 448 * MIB
"""Of a CUDA context: what is gone from a GPU before anything is allocated."""

DEVICE_RUNTIME = CONTEXT_BYTES + 448 * MIB
"""The context, NCCL's buffers and cuBLAS' workspace. Source: reference/performance-model.md, C6 (about 1 GB together)."""


@dataclass(frozen=True)
class Item:
    """So many bytes for one purpose on one tier of one rank, in some phases."""

    purpose: str
    tier: str
    size_bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class Memory:
    """What one rank takes, and all ranks together on the checkpoint disk.

    Args:
        items: what one rank takes.
        checkpoint_bytes: bytes of all ranks on the disk of `output.dir`.
    """

    items: tuple[Item, ...]
    checkpoint_bytes: int

    def purposes(self, tier: str, phase: str = "train") -> dict[str, int]:
        """Return the bytes of each purpose on a tier in a phase."""
        found: dict[str, int] = defaultdict(int)
        for item in self.items:
            if item.tier == tier and phase in item.phases and item.size_bytes:
                found[item.purpose] += item.size_bytes
        return dict(found)

    def at(self, tier: str, phase: str) -> int:
        """Return the bytes on a tier in a phase."""
        return sum(self.purposes(tier, phase).values())

    def peak_phase(self, tier: str) -> str:
        """Return the phase in which a tier holds most."""
        return max(("train", *PHASES), key=lambda phase: self.at(tier, phase))

    def peak(self, tier: str) -> int:
        """Return the most bytes that a tier ever holds."""
        return self.at(tier, self.peak_phase(tier))


def memory(shape: Shape, strategy: Strategy, *, cpu: bool) -> Memory:
    """Return what one rank takes.

    Args:
        shape: the model and what is asked of it.
        strategy: how it is held and trained.
        cpu: the rank computes on the host: device and host are then one memory, and everything is counted as host.
    """
    items = [*_weights(shape, strategy), *_state(shape, strategy, cpu=cpu), *_slots(shape, strategy, cpu=cpu)]
    items += [*_staging(shape, strategy, cpu=cpu), *_instants(shape, strategy, cpu=cpu)]
    items += [*_files(shape), *_runtime(shape, cpu=cpu)]
    if cpu:
        items = [Item(i.purpose, HOST if i.tier == DEVICE else i.tier, i.size_bytes, i.phases) for i in items]
    return Memory(tuple(items), _checkpoint_bytes(shape))


# --- what stays


AFTER_LOAD = ("train", "save", "resume")


def _weights(shape: Shape, strategy: Strategy) -> Iterator[Item]:
    """Parameters and gradients of every line."""
    world = shape.world_size
    owners = strategy.owners(world)
    for placed, count in shape.counted:
        line = placed.line
        shard, full = count * line.shard_numel(owners), count * line.padded_numel(owners)
        if strategy.resident(placed.kind, world):
            yield Item("parameters", DEVICE, full * line.itemsize)
        else:
            yield Item("parameters", strategy.parameters, shard * line.itemsize)
        if not line.trained:
            continue
        itemsize = strategy.gradient_itemsize(line.itemsize)
        if strategy.reduced_late(placed.kind, world):
            yield Item("gradients", DEVICE, full * itemsize, ("train", "save"))
        else:
            # below the device their room is taken at once; on it with the first backward
            phases = ("train", "save") if strategy.gradients == DEVICE else PHASES
            yield Item("gradients", strategy.gradients, shard * itemsize, phases)


def _state(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Master weights and moments; and the exact values of weights that were not read from files."""
    owners, moments = strategy.owners(shape.world_size), len(shape.rule.moments)
    sizes = {"master": 0, "moments": 0}
    widest = 0
    for placed, count in shape.counted:
        if placed.line.trained:
            shard = count * placed.line.shard_numel(owners) * 4
            own = _line_state_bytes(shape, strategy, placed, cpu=cpu)
            sizes["moments"] += moments * shard
            sizes["master"] += count * own - moments * shard
            widest = max(widest, own)
            if shape.fresh and placed.line.itemsize < 4:  # until the first step has made the state of them
                tier = DEVICE if strategy.state == DEVICE else HOST
                yield Item("initial values", tier, shard, ("load", "train") if strategy.state == NVME else ("load",))
    # Of a state on two tiers, whole lines stay on the host: up to what was granted, and not less than that but for one line.
    total = sum(sizes.values())
    most = min(decided(strategy.state_host_bytes), total)
    for tier, part in ((HOST, most), (strategy.state, total - max(most - widest, 0))):
        if part:
            master = sizes["master"] * part // total
            yield Item("master", tier, master, AFTER_LOAD)
            yield Item("moments", tier, part - master, AFTER_LOAD)
    if shape.fresh:
        widest = max((placed.line.padded_numel(owners) for placed, _ in shape.counted), default=0)
        yield Item("workspace", DEVICE, 4 * widest, ("load",))


def _line_state_bytes(shape: Shape, strategy: Strategy, placed: Placed, *, cpu: bool) -> int:
    """Return the bytes of a line's master and moments on a rank."""
    apart = not own_master(placed, strategy, shape.world_size, cpu=cpu)
    numel = placed.line.shard_numel(strategy.owners(shape.world_size))
    return placed.line.trained * (len(shape.rule.moments) + apart) * 4 * numel


def widest_states_bytes(shape: Shape, strategy: Strategy, units: int, *, cpu: bool) -> int:
    """Return the bytes of the state of the widest units, which are blocks, embedding and head, on a rank."""
    kinds = [([Placed(line, "block") for line in lines], count) for lines, count in shape.groups]
    kinds += [([Placed(line, "root")], 1) for line in shape.roots]
    sizes = [
        sum(_line_state_bytes(shape, strategy, placed, cpu=cpu) for placed in unit)
        for unit, count in kinds
        for _ in range(min(count, units))
    ]
    return sum(sorted(sizes)[-units:])


def own_master(placed: Placed, strategy: Strategy, world_size: int, *, cpu: bool) -> bool:
    """Whether a line's fp32 weights are their own master: they must be at hand where the state is updated."""
    if placed.line.itemsize != 4:
        return False
    tier = DEVICE if strategy.resident(placed.kind, world_size) else strategy.parameters
    updated_on_device = strategy.state == DEVICE
    return cpu or tier == NVME or (tier == DEVICE) == updated_on_device


def _slots(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Yield two weight slots, the gradient slot, the buffer of gradient offload, and buffers for weights that stay."""
    weights = [(_slot_bytes(shape, strategy, lines, gradients=False), count) for lines, count in shape.groups]
    gradients = max((_slot_bytes(shape, strategy, lines, gradients=True) for lines, _ in shape.groups), default=0)
    yield Item("slots", DEVICE, 2 * max((size for size, _ in weights), default=0))
    yield Item("slots", DEVICE, gradients, ("train", "save"))
    if strategy.gradients != DEVICE and not cpu:  # a CPU rank sums from this rank's part of the slot
        owners = strategy.owners(shape.world_size)
        roots = [x.shard_numel(owners) * strategy.slot_itemsize(x.itemsize) for x in shape.roots if x.trained]
        yield Item("slots", DEVICE, max(gradients // owners, *roots, 0), ("train", "save"))
    if not strategy.reshard_after_forward and strategy.stage == 3:
        yield Item("slots", DEVICE, sum(size * count for size, count in weights), ("train",))


def _slot_bytes(shape: Shape, strategy: Strategy, lines: Iterable, *, gradients: bool) -> int:
    """Return what a block's gathered weights, or its gradients, take in a slot."""
    total = 0
    for line in lines:
        placed = Placed(line, "block")
        if gradients:
            used = line.trained and not strategy.reduced_late(placed.kind, shape.world_size)
        else:
            used = not strategy.resident(placed.kind, shape.world_size)
        itemsize = strategy.slot_itemsize(line.itemsize) if gradients else line.itemsize
        size = line.padded_numel(strategy.owners(shape.world_size)) * itemsize
        total += used * -(-size // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    return total


def _staging(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Host buffers through which bytes pass from tier to tier."""
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    if strategy.parameters == NVME:
        groups = (
            sum(x.shard_numel(owners) * x.itemsize for x in lines if not strategy.resident("block", world))
            for lines, _ in shape.groups
        )
        yield Item("staging", HOST, READ_AHEAD_BUFFERS * max(groups, default=0))
    trained = [placed for placed, _ in shape.counted if placed.line.trained]
    leaving = [p.line for p in trained if strategy.gradients != DEVICE and not strategy.reduced_late(p.kind, world)]
    if leaving and (strategy.gradients == NVME or not cpu):
        widest = max(line.shard_numel(owners) * strategy.slot_itemsize(line.itemsize) for line in leaving)
        yield Item("staging", HOST, OFFLOAD_BUFFERS * widest)
    yield Item("staging", HOST, UPDATE_SLOTS * sum(update_widths(shape, strategy, cpu=cpu).values()), ("train", "save"))


def update_widths(shape: Shape, strategy: Strategy, *, cpu: bool) -> dict[str, int]:
    """Return the bytes of each buffer in one of the update's staging slots, by role: for what is not where it is updated."""
    widths: dict[str, int] = defaultdict(int)
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    home = DEVICE if strategy.state == DEVICE else HOST

    def note(role: str, tier: str, numel: int, itemsize: int) -> None:
        if tier == NVME or (not cpu and tier != home):
            widths[role] = max(widths[role], min(numel, DISK_PIECE_NUMEL) * itemsize)

    for placed, _ in shape.counted:
        line = placed.line
        if not line.trained:
            continue
        numel = line.shard_numel(owners)
        weights = DEVICE if strategy.resident(placed.kind, world) else strategy.parameters
        own = own_master(placed, strategy, world, cpu=cpu)
        gradient = DEVICE if strategy.reduced_late(placed.kind, world) else strategy.gradients
        note("gradient", gradient, numel, strategy.gradient_itemsize(line.itemsize))
        note("master", weights if own else strategy.state, numel, 4)
        for moment in range(len(shape.rule.moments)):
            note(f"moment {moment}", strategy.state, numel, 4)
        if not own:
            note("weight", weights, numel, line.itemsize)
    return dict(widths)


# --- what comes and goes


def kept_bytes(shape: Shape, strategy: Strategy) -> int:
    """Return the bytes of one block's kept input."""
    size = strategy.sequences * shape.sequence_tokens * shape.hidden * shape.itemsize
    return activation_bytes(size) if strategy.activation_offload != DEVICE else size


def graph_bytes(shape: Shape, strategy: Strategy) -> int:
    """Return the bytes that autograd keeps of the widest block for one micro-batch."""
    tokens = decided(strategy.micro_batch) * shape.sequence_tokens
    return tokens * (shape.block_elements + shape.score_elements * shape.sequence_tokens) * shape.itemsize


def attention_bytes(shape: Shape, strategy: Strategy) -> int:
    """Return the bytes that attention's backward allocates beside its gradients, on the card that needs most.

    The plan does not know the card's generation; a V100 needs as much as any.
    """
    assert shape.attention is not None
    dtype, micro_batch = "fp32" if shape.itemsize == 4 else "fp16", decided(strategy.micro_batch)
    return max(
        backward_bytes(shape.attention, micro_batch, shape.sequence_tokens, dtype, sm=sm, packed=shape.packed)
        for sm in (70, 80)
    )


def _instants(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Kept inputs, and the worst of the instants of a step."""
    blocks = len(shape.blocks)
    kept = kept_bytes(shape, strategy)
    graphs = strategy.graphs(blocks)
    if graphs < blocks:
        yield Item(ACTIVATIONS, strategy.activation_offload, (blocks - graphs) * kept, ("train",))
        if strategy.activation_offload != DEVICE:
            yield Item(ACTIVATIONS, DEVICE, ACTIVATIONS_LEAVING * kept, ("train",))
        if strategy.activation_offload == NVME:
            yield Item("staging", HOST, ACTIVATION_STAGING * kept, ("train",))
    yield Item("workspace", DEVICE, strategy.parts * graphs * graph_bytes(shape, strategy), ("train",))
    instants = list(_step_instants(shape, strategy, cpu=cpu))
    worst = max(instants, key=lambda items: sum(items.values()))
    if cpu:  # malloc keeps what one instant needed while the next needs something else
        purposes = dict.fromkeys(purpose for items in instants for purpose in items)
        worst = {purpose: max(items.get(purpose, 0) for items in instants) for purpose in purposes}
        held = strategy.parts * graphs * graph_bytes(shape, strategy)
        part, whole = HEAP_SHARE
        yield Item("runtime", DEVICE, (held + sum(worst.values())) * part // whole, ("train", "save"))
    for purpose, size in worst.items():
        yield Item(purpose, DEVICE, size, ("train",))


def _step_instants(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[dict[str, int]]:
    """Yield the bytes that are needed only in the last forward, at the loss, in a backward, and in the update."""
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    tokens = decided(strategy.micro_batch) * shape.sequence_tokens
    logits = tokens * strategy.parts * shape.vocabulary
    head, gradient, copied = _leaf_bytes(shape, strategy)
    hidden = tokens * strategy.parts * shape.hidden * (shape.itemsize + 4)  # the last norm's, in fp32 too
    if shape.chunked_loss:  # its backward sums the hidden states' gradient in fp32
        chunk = min(logits * shape.itemsize, LOSS_CHUNK_BYTES)
        if cpu:  # by the reference, in fp32, with what softmax makes of it
            chunk = min(logits, LOSS_CHUNK_BYTES // 4) * LOGIT_BYTES
            if shape.itemsize < 4:  # and the weights of a chunk's classes in fp32, for the hidden states' gradient
                classes = max(LOSS_CHUNK_BYTES // (4 * tokens * strategy.parts), 1)
                chunk += 4 * min(classes, shape.vocabulary) * shape.hidden
        summed = 4 * tokens * strategy.parts * shape.hidden
        freed = copied if cpu else 0  # malloc does not find it again for the copy
        yield {"logits": chunk + hidden + summed, "root parameters": head + gradient + freed}
        yield {"logits": hidden, "root parameters": gradient + copied}  # the weights went with the loss's graph
    else:
        yield {"logits": logits * LOGIT_BYTES + hidden, "root parameters": head}
        yield {"logits": logits * shape.itemsize + hidden, "root parameters": head + gradient + copied}
    yield {"root parameters": gradient + copied}

    graph = graph_bytes(shape, strategy)
    if not strategy.graphs(len(shape.blocks)):  # the head is gathered beside the last block's forward
        part, whole = FORWARD_SHARE
        yield {"workspace": graph * part // whole, "root parameters": head}
    part, whole = BACKWARD_SHARE
    # Attention's backward comes when that of the layers after it is over, and what that needed is free again.
    needed = attention_bytes(shape, strategy) if shape.attention is not None and not cpu else 0
    backward = max(graph * part // whole, needed) + shape.widest_tensor * shape.itemsize
    backward += tokens * strategy.parts * shape.hidden * shape.itemsize  # the gradient that comes from the block after
    if not strategy.graphs(len(shape.blocks)):  # else the kept ones are gone before the first block is computed again
        backward += graph
    trained = [p.line for p, _ in shape.counted if p.line.trained and not strategy.reduced_late(p.kind, world)]
    if strategy.gradients == DEVICE and trained and strategy.parts == 1:  # what a reduction adds to the sum of the others
        backward += max(line.shard_numel(owners) * line.itemsize for line in trained)
    yield {"workspace": backward}

    update = 0
    if strategy.state == DEVICE and not cpu and shape.trained_numel:  # the gradient in fp32, and times the clip
        widest = max(p.line.shard_numel(owners) for p, _ in shape.counted if p.line.trained)
        update = 8 * min(widest, CUDA_PIECE_NUMEL)
    yield {"workspace": update}


def _leaf_bytes(shape: Shape, strategy: Strategy) -> tuple[int, int, int]:
    """Return the bytes of the widest root parameter, gathered, of its gradient, and of what the reduction needs besides."""
    owners = strategy.owners(shape.world_size)
    head = gradient = copied = 0
    for line in shape.roots:
        placed = Placed(line, "root")
        if not strategy.resident(placed.kind, shape.world_size):
            head = max(head, line.padded_numel(owners) * line.itemsize)
        if line.trained:
            late = strategy.reduced_late(placed.kind, shape.world_size)
            copy = 0 if late else line.padded_numel(owners)
            if not late and strategy.gradient_itemsize(line.itemsize) != line.itemsize:  # reduced apart, then widened
                copy += line.shard_numel(owners)
            gradient, copied = max((gradient, copied), (line.numel * line.itemsize, copy * line.itemsize), key=sum)
    return head, gradient, copied


def _files(shape: Shape) -> Iterator[Item]:
    """What reading and writing folders needs: pieces, and for adapters rank 0's whole copy."""
    yield Item("staging", HOST, 2 * FILE_PIECE_BYTES, ("load", "save", "resume"))
    if shape.peft:
        yield Item("workspace", DEVICE, 4 * shape.trained_numel, ("save",))
        yield Item("workspace", HOST, 4 * shape.trained_numel, ("save",))


def _runtime(shape: Shape, *, cpu: bool) -> Iterator[Item]:
    shared = 2 * STAGE_BYTES if shape.world_size > 1 else 0  # this rank's buffers of comm.SharedStage
    yield Item("runtime", HOST, RUNTIME["cpu"] + shared if cpu else RUNTIME["cuda"])
    if not cpu:
        yield Item("runtime", DEVICE, DEVICE_RUNTIME)


def _checkpoint_bytes(shape: Shape) -> int:
    """Return the bytes on disk of the checkpoints that are kept, one being written, and the exported model."""
    saved = shape.trained_numel * shape.rule.state_bytes
    if not shape.peft:
        saved += sum(p.line.numel * p.line.itemsize * count for p, count in shape.counted if not p.line.trained)
    model = 4 * shape.trained_numel if shape.peft else shape.numel * shape.itemsize
    return model + (0 if shape.checkpoints is None else (shape.checkpoints + 1) * saved)
