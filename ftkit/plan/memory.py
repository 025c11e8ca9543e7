"""Bytes that a run needs on each tier, by purpose and phase, before anything is allocated.

[Note: the purposes]   of one rank. S, W*S: elements of a shard, and of all shards, of a flat parameter

    parameters       S or W*S of each flat parameter, compute dtype                on their tier
    gradients        S (W*S if they are reduced late)                              on their tier
    master, moments  the stores of each trained flat parameter (`state.py`)        on the state's tier
    slots            two of the widest block's weights, one of its gradient, all weights if they stay gathered, and
                     a buffer of the widest gradient shard that moves to host or NVMe                            device
    staging          host buffers between tiers: weights read ahead, gradients offloaded, pieces updated           host
    activations      inputs of recomputed blocks, from forward to backward         on their tier
    workspace        the widest block's graph, and the graphs of blocks that keep their activations              device
    logits           logits and the loss's intermediate tensors                    device
    root parameters  embedding and head, gathered, and a gradient                  device
    initial values   exact fp32 values of weights that were not read from files, until the first step
    runtime          Python, torch and the collectives

Permanent bytes are exact: tests compare them with the engine's own storages. Activations, logits and runtime are estimates,
calibrated against measured runs (docs/rates.md). The phases are load, train, save and resume. Within train the worst of
five instants counts: the last block's forward beside the head, the loss, a block's backward, the embedding's gradient, the
update. On a CPU the worst of each purpose counts, because malloc gives little back between the instants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ftkit.plan.attention import backward_bytes
from ftkit.plan.shape import Flat, Placed, Shape
from ftkit.plan.state import saved_bytes, state_of, total_bytes, weights_tier
from ftkit.spec import sizes
from ftkit.spec.strategy import Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME, activation_bytes

MIB, GIB = 1 << 20, 1 << 30

LABELS = {
    "activations": "inputs of recomputed blocks",
    "master": "fp32 master weights",
    "moments": "optimizer moments",
    "residual": "16-bit residuals of master weights",
    "root parameters": "embedding and head",
    "slots": "gather buffers",
    "staging": "copy buffers",
    "workspace": "kept activations and current block",
}
"""Purposes in the words of messages and reports, where those differ."""

PHASES = ("load", "train", "save", "resume")
AFTER_LOAD = ("train", "save", "resume")

ACTIVATIONS = "activations"

LOGIT_BYTES = 12
"""Bytes per logit at the loss's backward: log-softmax, its gradient, and that of the logits, fp32 each."""

FORWARD_SHARE = (1, 2)
"""Peak bytes of a forward without a graph, as a share of the block's graph. Derived, not measured: three tensors of the
inner width and three of the hidden width, of all those in the graph (`Shape.block_elements`)."""

BACKWARD_SHARE = (1, 3)
"""Share of a block's graph that its backward needs in addition, while most of the graph still exists."""

RUNTIME = {"cpu": 832 * MIB, "cuda": 2560 * MIB}
"""Host bytes of a rank before any model: imports, threads, compiled loops, malloc's arenas. See docs/rates.md."""

HEAP_SHARE = (15, 100)
"""Share of temporary bytes on a CPU that malloc does not give back. Measured (docs/rates.md)."""

CONTEXT_BYTES = 448 * MIB
"""Bytes of a CUDA context, used before anything is allocated. Assumed (docs/rates.md)."""

DEVICE_RUNTIME = CONTEXT_BYTES + 448 * MIB
"""The context, NCCL's buffers and cuBLAS' workspace. Assumed (docs/rates.md)."""


@dataclass(frozen=True)
class Item:
    """Bytes for one purpose on one tier of one rank, in some phases."""

    purpose: str
    tier: str
    size_bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, and the bytes of all ranks' checkpoints on the disk of `output.dir`."""

    items: tuple[Item, ...]
    checkpoint_bytes: int

    def purposes(self, tier: str, phase: str = "train") -> dict[str, int]:
        """Return the bytes of each purpose on a tier in a phase."""
        found: dict[str, int] = defaultdict(int)
        for item in self.items:
            if item.tier == tier and phase in item.phases and item.size_bytes:
                found[item.purpose] += item.size_bytes
        return dict(found)

    @cached_property
    def _totals(self) -> dict[tuple[str, str], int]:
        """Bytes by tier and phase."""
        found: dict[tuple[str, str], int] = defaultdict(int)
        for item in self.items:
            for phase in item.phases:
                found[item.tier, phase] += item.size_bytes
        return dict(found)

    def at(self, tier: str, phase: str) -> int:
        """Return the bytes on a tier in a phase."""
        return self._totals.get((tier, phase), 0)

    def peak_phase(self, tier: str) -> str:
        """Return the phase in which a tier needs most."""
        return max(("train", *PHASES), key=lambda phase: self.at(tier, phase))

    def peak(self, tier: str) -> int:
        """Return the bytes that a tier needs at its peak."""
        return max(self.at(tier, phase) for phase in PHASES)


@lru_cache(maxsize=4096)
def memory(shape: Shape, strategy: Strategy, *, cpu: bool) -> Memory:
    """Return the memory of one rank. On the CPU, device and host are one memory, and everything is counted as host."""
    items = [*_weights(shape, strategy), *_state(shape, strategy, cpu=cpu), *_slots(shape, strategy, cpu=cpu)]
    items += [*_staging(shape, strategy, cpu=cpu), *_instants(shape, strategy, cpu=cpu)]
    items += _fixed(shape, cpu=cpu)
    if cpu:
        items = [Item(i.purpose, HOST if i.tier == DEVICE else i.tier, i.size_bytes, i.phases) for i in items]
    return Memory(tuple(items), _checkpoint_bytes(shape))


# --- permanent bytes


def _weights(shape: Shape, strategy: Strategy) -> Iterator[Item]:
    """Yield the parameters and gradients of every flat parameter."""
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    for placed, count in shape.counted:
        flat = placed.flat
        shard, full = count * flat.shard_numel(owners), count * flat.padded_numel(owners)
        if strategy.resident(placed.kind, world):
            yield Item("parameters", DEVICE, full * flat.itemsize)
        else:
            yield Item("parameters", strategy.parameters, shard * flat.itemsize)
        if not flat.trained:
            continue
        itemsize = strategy.gradient_itemsize(flat.itemsize)
        if strategy.reduced_late(placed.kind, world):
            yield Item("gradients", DEVICE, full * itemsize, ("train", "save"))
        else:
            # Below the device they are allocated at once, on the device with the first backward.
            phases = ("train", "save") if strategy.gradients == DEVICE else PHASES
            yield Item("gradients", strategy.gradients, shard * itemsize, phases)


def _state(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Yield master weights and moments, and the exact values of weights that were not read from files."""
    owners = strategy.owners(shape.world_size)
    sizes = {"master": 0, "residual": 0, "moments": 0}
    widest = 0
    for placed, count in shape.counted:
        if placed.flat.trained:
            state = state_of(shape, strategy, placed, cpu=cpu)
            sizes["moments"] += count * total_bytes(state.moments)
            for store in state.masters:
                sizes[store.role] += count * store.size_bytes
            widest = max(widest, state.size_bytes)
            if shape.fresh and placed.flat.itemsize < 4:  # until the first step has made the state from them
                tier, shard = DEVICE if strategy.state == DEVICE else HOST, count * placed.flat.shard_numel(owners) * 4
                yield Item("initial values", tier, shard, ("load", "train") if strategy.state == NVME else ("load",))
    # A state on two tiers is divided by whole flat parameters: host memory is used up to the limit, or up to one flat
    # parameter less.
    total = sum(sizes.values())
    most = min(decided(strategy.state_host_bytes), total)
    for tier, part in ((HOST, most), (strategy.state, total - max(most - widest, 0))):
        if part:
            shares = {purpose: sizes[purpose] * part // total for purpose in ("master", "residual")}
            for purpose, share in {**shares, "moments": part - sum(shares.values())}.items():
                yield Item(purpose, tier, share, AFTER_LOAD)
    if shape.fresh:
        widest = max((placed.flat.padded_numel(owners) for placed, _ in shape.counted), default=0)
        yield Item("workspace", DEVICE, 4 * widest, ("load",))


def widest_states_bytes(shape: Shape, strategy: Strategy, units: int, *, cpu: bool) -> int:
    """Return the bytes of the state of the widest units (blocks, embedding, head) on a rank."""
    kinds = [([Placed(flat, "block") for flat in flats], count) for flats, count in shape.groups]
    kinds += [([Placed(flat, "root")], 1) for flat in shape.roots]
    sizes = [
        sum(state_of(shape, strategy, placed, cpu=cpu).size_bytes for placed in unit)
        for unit, count in kinds
        for _ in range(min(count, units))
    ]
    return sum(sorted(sizes)[-units:])


def _slots(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Yield two weight slots, the gradient slot, the buffer of gradient offload, and buffers for weights that stay."""
    weights = [(_slot_bytes(shape, strategy, flats, gradients=False), count) for flats, count in shape.groups]
    gradients = max((_slot_bytes(shape, strategy, flats, gradients=True) for flats, _ in shape.groups), default=0)
    yield Item("slots", DEVICE, 2 * max((size for size, _ in weights), default=0))
    yield Item("slots", DEVICE, gradients, ("train", "save"))
    if strategy.gradients != DEVICE and not cpu:  # a CPU rank sums from this rank's part of the slot
        owners = strategy.owners(shape.world_size)
        roots = [x.shard_numel(owners) * strategy.slot_itemsize(x.itemsize) for x in shape.roots if x.trained]
        yield Item("slots", DEVICE, max(gradients // owners, *roots, 0), ("train", "save"))
    if not strategy.reshard_after_forward and strategy.stage == 3:
        yield Item("slots", DEVICE, sum(size * count for size, count in weights), ("train",))


def _slot_bytes(shape: Shape, strategy: Strategy, flats: Iterable[Flat], *, gradients: bool) -> int:
    """Return the bytes of a block's gathered weights, or of its gradients, in a slot."""
    absent = strategy.reduced_late if gradients else strategy.resident
    if absent("block", shape.world_size):
        return 0
    total = 0
    for flat in flats:
        if flat.trained or not gradients:
            itemsize = strategy.slot_itemsize(flat.itemsize) if gradients else flat.itemsize
            size = flat.padded_numel(strategy.owners(shape.world_size)) * itemsize
            total += -(-size // sizes.ALIGNMENT_BYTES) * sizes.ALIGNMENT_BYTES
    return total


def _staging(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Yield host buffers between tiers."""
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    if strategy.parameters == NVME:  # at stage 3, whose blocks are resident on no rank
        groups = (sum(flat.shard_numel(owners) * flat.itemsize for flat in flats) for flats, _ in shape.groups)
        yield Item("staging", HOST, sizes.READ_AHEAD_BUFFERS * max(groups, default=0))
    trained = [placed for placed, _ in shape.counted if placed.flat.trained]
    leaving = [p.flat for p in trained if strategy.gradients != DEVICE and not strategy.reduced_late(p.kind, world)]
    if leaving and (strategy.gradients == NVME or not cpu):
        widest = max(flat.shard_numel(owners) * strategy.slot_itemsize(flat.itemsize) for flat in leaving)
        yield Item("staging", HOST, sizes.OFFLOAD_BUFFERS * widest)
    pieces = sum(_update_widths(shape, strategy, cpu=cpu).values())
    yield Item("staging", HOST, sizes.UPDATE_SLOTS * pieces, ("train", "save"))


def _update_widths(shape: Shape, strategy: Strategy, *, cpu: bool) -> dict[str, int]:
    """Return the bytes of each buffer in a staging slot of the update, by role. Tensors on the update's tier need none."""
    widths: dict[str, int] = defaultdict(int)
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    updated = DEVICE if strategy.state == DEVICE else HOST

    def note(role: str, tier: str, numel: int, itemsize: int, piece_numel: int = sizes.PIECE_NUMEL) -> None:
        if tier == NVME or (not cpu and tier != updated):
            widths[role] = max(widths[role], min(numel, piece_numel) * itemsize)

    for placed, _ in shape.counted:
        flat = placed.flat
        if not flat.trained:
            continue
        numel = flat.shard_numel(owners)
        weights, state = weights_tier(placed, strategy, world), state_of(shape, strategy, placed, cpu=cpu)
        gradient = DEVICE if strategy.reduced_late(placed.kind, world) else strategy.gradients
        note("gradient", gradient, numel, strategy.gradient_itemsize(flat.itemsize))
        for store in state.stores:
            note(store.role, strategy.tier("state"), store.numel, store.itemsize, store.piece_numel)
        note("master" if state.own_master else "weight", weights, numel, flat.itemsize)
    return dict(widths)


# --- temporary bytes


def kept_bytes(shape: Shape, strategy: Strategy) -> int:
    """Return the bytes of one recomputed block's input."""
    size = strategy.sequences * shape.sequence_tokens * shape.hidden * shape.itemsize
    return activation_bytes(size) if strategy.activation_offload != DEVICE else size


def graph_bytes(shape: Shape, strategy: Strategy) -> int:
    """Return the bytes that autograd keeps of the widest block for one micro-batch."""
    tokens = decided(strategy.micro_batch) * shape.sequence_tokens
    return tokens * (shape.block_elements + shape.score_elements * shape.sequence_tokens) * shape.itemsize


def _instants(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[Item]:
    """Yield the inputs of recomputed blocks, and the worst of the instants of a step."""
    blocks = len(shape.blocks)
    kept = kept_bytes(shape, strategy)
    graphs = strategy.graphs(blocks)
    if graphs < blocks:
        yield Item(ACTIVATIONS, strategy.activation_offload, (blocks - graphs) * kept, ("train",))
        if strategy.activation_offload != DEVICE:
            yield Item(ACTIVATIONS, DEVICE, sizes.LEAVING * kept, ("train",))
        if strategy.activation_offload == NVME:
            yield Item("staging", HOST, sizes.STAGING * kept, ("train",))
    yield Item("workspace", DEVICE, strategy.parts * graphs * graph_bytes(shape, strategy), ("train",))
    instants = list(_step_instants(shape, strategy, cpu=cpu))
    worst = max(instants, key=lambda items: sum(items.values()))
    if cpu:  # malloc does not give one instant's memory back for another purpose
        purposes = dict.fromkeys(purpose for items in instants for purpose in items)
        worst = {purpose: max(items.get(purpose, 0) for items in instants) for purpose in purposes}
        kept_graphs = strategy.parts * graphs * graph_bytes(shape, strategy)
        part, whole = HEAP_SHARE
        yield Item("runtime", DEVICE, (kept_graphs + sum(worst.values())) * part // whole, ("train", "save"))
    for purpose, size in worst.items():
        yield Item(purpose, DEVICE, size, ("train",))


def _step_instants(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[dict[str, int]]:
    """Yield the temporary bytes of the last forward, of the loss, of a backward, and of the update."""
    head, gradient, copied = _root_bytes(shape, strategy)
    yield from _loss_instants(shape, strategy, cpu=cpu)
    yield {"root parameters": gradient + copied}
    graph = 0 if strategy.graphs(len(shape.blocks)) else graph_bytes(shape, strategy)
    if graph:  # the head is gathered beside the last block's forward
        part, whole = FORWARD_SHARE
        yield {"workspace": graph * part // whole, "root parameters": head}
    yield {"workspace": _backward_bytes(shape, strategy, cpu=cpu) + graph}
    update = 0
    if strategy.state == DEVICE and not cpu and shape.trained_numel:  # the gradient in fp32, and times the clip
        owners = strategy.owners(shape.world_size)
        widest = max(p.flat.shard_numel(owners) for p, _ in shape.counted if p.flat.trained)
        update = 8 * min(widest, sizes.CUDA_PIECE_NUMEL)
    yield {"workspace": update}


def _loss_instants(shape: Shape, strategy: Strategy, *, cpu: bool) -> Iterator[dict[str, int]]:
    """Yield the temporary bytes of the loss, and of the gradient of the head."""
    tokens = strategy.sequences * shape.sequence_tokens
    logits = tokens * shape.vocabulary
    head, gradient, copied = _root_bytes(shape, strategy)
    hidden = tokens * shape.hidden * (shape.itemsize + 4)  # the last norm's output, in fp32 too
    if not shape.chunked_loss:
        yield {"logits": logits * LOGIT_BYTES + hidden, "root parameters": head}
        yield {"logits": logits * shape.itemsize + hidden, "root parameters": head + gradient + copied}
        return
    chunk = min(logits * shape.itemsize, sizes.CHUNK_BYTES)
    if cpu:  # the reference computes in fp32, and keeps what softmax needs
        chunk = min(logits, sizes.CHUNK_BYTES // 4) * LOGIT_BYTES
        if shape.itemsize < 4:  # the weights of a chunk's classes in fp32, for the hidden states' gradient
            classes = max(sizes.CHUNK_BYTES // (4 * tokens), 1)
            chunk += 4 * min(classes, shape.vocabulary) * shape.hidden
    summed = 4 * tokens * shape.hidden  # the backward sums the hidden states' gradient in fp32
    freed = copied if cpu else 0  # malloc does not find it again for the copy
    yield {"logits": chunk + hidden + summed, "root parameters": head + gradient + freed}
    yield {"logits": hidden, "root parameters": gradient + copied}  # the weights are freed with the loss's graph


def _backward_bytes(shape: Shape, strategy: Strategy, *, cpu: bool) -> int:
    """Return the temporary bytes of a block's backward, beside its graph."""
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    part, whole = BACKWARD_SHARE
    graph = graph_bytes(shape, strategy)
    needed = 0
    if shape.attention is not None and not cpu:  # runs after the backward of the layers behind it, whose memory is free
        rows = decided(strategy.micro_batch)
        needed = backward_bytes(shape.attention, rows, shape.sequence_tokens, shape.itemsize, packed=shape.packed)
    total = max(graph * part // whole, needed) + shape.widest_tensor * shape.itemsize
    total += strategy.sequences * shape.sequence_tokens * shape.hidden * shape.itemsize  # the next block's gradient
    trained = [p.flat for p, _ in shape.counted if p.flat.trained and not strategy.reduced_late(p.kind, world)]
    if strategy.gradients == DEVICE and trained and strategy.parts == 1:  # a reduced shard before it is added to the sum
        total += max(flat.shard_numel(owners) * flat.itemsize for flat in trained)
    return total


def _root_bytes(shape: Shape, strategy: Strategy) -> tuple[int, int, int]:
    """Return the bytes of the widest root parameter, gathered, of its gradient, and of its reduction's copy."""
    owners = strategy.owners(shape.world_size)
    head = gradient = copied = 0
    late = strategy.reduced_late("root", shape.world_size)
    for flat in shape.roots:
        if not strategy.resident("root", shape.world_size):
            head = max(head, flat.padded_numel(owners) * flat.itemsize)
        if flat.trained:
            copy = 0 if late else flat.padded_numel(owners)
            if not late and strategy.gradient_itemsize(flat.itemsize) != flat.itemsize:  # reduced apart, then widened
                copy += flat.shard_numel(owners)
            gradient, copied = max((gradient, copied), (flat.numel * flat.itemsize, copy * flat.itemsize), key=sum)
    return head, gradient, copied


def _fixed(shape: Shape, *, cpu: bool) -> Iterator[Item]:
    """Yield the buffers for reading and writing folders, rank 0's whole copy of adapters, and the runtime."""
    yield Item("staging", HOST, 2 * sizes.PIECE_BYTES, ("load", "save", "resume"))
    if shape.peft:
        yield Item("workspace", DEVICE, 4 * shape.trained_numel, ("save",))
        yield Item("workspace", HOST, 4 * shape.trained_numel, ("save",))
    shared = 2 * sizes.STAGE_BYTES if shape.world_size > 1 else 0  # this rank's buffers of CPU collectives
    yield Item("runtime", HOST, RUNTIME["cpu"] + shared if cpu else RUNTIME["cuda"])
    if not cpu:
        yield Item("runtime", DEVICE, DEVICE_RUNTIME)


def _checkpoint_bytes(shape: Shape) -> int:
    """Return the disk space of the kept checkpoints, of one being written, and of the exported model."""
    saved = sum(saved_bytes(shape.rule, p.flat) * count for p, count in shape.counted if p.flat.trained)
    if not shape.peft:
        saved += sum(p.flat.numel * p.flat.itemsize * count for p, count in shape.counted if not p.flat.trained)
    model = 4 * shape.trained_numel if shape.peft else shape.numel * shape.itemsize
    return model + (0 if shape.checkpoints is None else (shape.checkpoints + 1) * saved)
