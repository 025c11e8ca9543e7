"""Each wait for an event of the engine, removed. On a CPU no number changes; the checker of the order notices.

Two waits are missing here, because the checker does not notice their removal: for shards that were loaded (model.py,
`rewritten`), and for work before a save (saving.py). The reasons why they stay are beside them.
"""

from __future__ import annotations

from tests.mutants.fault import Fault, fault

_TEST = "tests/engine/test_streams.py::"
_LIFE = _TEST + "test_a_life_has_an_order[llama-W{}-stage{}-recompute-{}-acc1-1groups-adamw{}-prefetch-clip{}]"
_LIFE_HOST = _LIFE.format(2, 3, "free", "-p=host-g=host-s=host-a=host", "-deferred")
_LIFE_DEVICE = _LIFE.format(2, 3, "free", "", "-deferred")
_LIFE_NOW = _LIFE.format(1, 3, "free", "-p=host-g=host-s=host-a=host", "")
_LIFE_HOLD = _LIFE.format(2, 3, "hold", "-s=host", "-deferred")
_LIFE_STAGE1 = _LIFE.format(2, 1, "free", "", "-deferred")
_LIFE_ACTIVATIONS = _LIFE.format(1, 3, "free", "-a=host", "")
_ROW = _TEST + "test_every_access_has_an_order[{}]"
_ROW_DEVICE = _ROW.format("llama-W2-stage3-recompute-free-acc1-2groups-adamw-prefetch-debug-clip")
_ROW_STAGE0 = _ROW.format("llama-W2-stage0-recompute-free-acc1-2groups-adamw-s=host-prefetch-debug-clip-deferred-late")
_ROW_STAGE1 = _ROW.format("gpt2-W2-stage1-recompute-hold-acc4-1groups-adamw-prefetch-debug-clip")
_ROW_STAGE2 = _ROW.format(
    "llama-W2-stage2-recompute-free-acc1-2groups-adamw-g=host-s=host-prefetch-debug-clip-deferred-late"
)
_ROW_HOST = _ROW.format(
    "llama-W2-stage3-recompute-free-acc1-2groups-adamw-p=host-g=host-s=host-a=host-parts2-prefetch-debug-clip-deferred-late"
)
_ROW_NVME = _ROW.format(
    "t5-W2-stage3-recompute-free-acc1-2groups-adamw-p=nvme-g=nvme-s=nvme-a=nvme-prefetch-debug-clip-deferred-late"
)

_ROW_ACTIVATIONS = _ROW.format("llama-W3-stage3-1-free-acc2-2groups-adamw-g=host-s=both-a=host-prefetch-debug-clip-deferred")

_CORE = "ftkit/engine/core/"
_TRANSFER = _CORE + "transfer.py"
_ACTIVATIONS = _CORE + "activation_offload.py"
_ORIGINALS = "tests/engine/test_activation_offload.py::test_few_originals_are_on_the_device_at_once"
_UPDATER = "ftkit/engine/optim/updater.py"
_REDUCTIONS = _CORE + "gradient.py"
_SAVING = "ftkit/engine/checkpoint/saving.py"

FAULTS: tuple[Fault, ...] = (
    fault(
        "stream: a block does not wait for the gather of its weights",
        _TRANSFER,
        "        slot.filled.wait()\n",
        "",
        _ROW_DEVICE,
    ),
    fault(
        "stream: weights are copied into a slot that is being read",
        _TRANSFER,
        "self.streams.up.run(*free, span",
        "self.streams.up.run(span",
        _ROW_HOST,
    ),
    fault(
        "stream: a gather does not wait for the copy of its own shard, or for the slot's last reader",
        _TRANSFER,
        "self.streams.collectives.run(*free, span",
        "self.streams.collectives.run(span",
        _ROW_DEVICE,
    ),
    fault(
        "stream: weights are copied into a slot that an unused gather still writes",
        _TRANSFER,
        "slot.read, slot.filled, blocks",
        "slot.read, blocks",
        _LIFE_HOST,
    ),
    fault(
        "stream: the host updates weights that an unused gather still copies",
        _UPDATER,
        "            ready.synchronize()\n",
        "            pass\n",
        _LIFE_NOW,
    ),
    fault(
        "stream: a slot is used while memory under it is still used by what was freed",
        _TRANSFER,
        "        self.read = streams.now()  # after the last computation that uses its memory\n",
        "        self.read = DONE\n",
        _LIFE_HOLD,
        _LIFE_HOST,
    ),
    fault(
        "stream: a root parameter is gathered into memory that is still used",
        _TRANSFER,
        "        filled = self._fill(flat.name, [flat], [full], self.streams.now())\n",
        "        filled = self._fill(flat.name, [flat], [full], DONE)\n",
        _LIFE_HOST,
        _ROW_DEVICE,
    ),
    fault(
        "stream: gradients are written before the last reduction has read the slot",
        _TRANSFER,
        "        self.reduced.wait()\n",
        "",
        _ROW_DEVICE,
    ),
    fault(
        "stream: nothing waits for the last write of shards",
        _CORE + "flat_parameter.py",
        "        self.updated.wait()\n",
        "",
        _LIFE_DEVICE,
        _ROW_HOST,
    ),
    fault(
        "stream: a gather does not wait for the values of a new model",
        _CORE + "flat_parameter.py",
        "        self.updated = tiers.streams.now()\n",
        "",
        _LIFE_DEVICE,
        _ROW_DEVICE,
    ),
    fault(
        "stream: a block does not wait for its refreshed weights",
        _CORE + "block_weights.py",
        "            flat.refreshed.wait()\n",
        "            pass\n",
        _LIFE_STAGE1,
        _ROW_STAGE1,
    ),
    fault(
        "stream: the model does not wait for refreshed weights outside blocks",
        "ftkit/engine/model.py",
        "            flat.refreshed.wait()\n",
        "            pass\n",
        _LIFE_STAGE1,
        _ROW_STAGE1,
    ),
    fault(
        "stream: a block's own buffer is freed while an unused gather writes it",
        _CORE + "block_weights.py",
        "            self._own.filled.wait()  #",
        "            #",
        _LIFE_HOLD,
    ),
    fault(
        "stream: an unused gather of a root parameter writes memory that is freed",
        _CORE + "root_parameters.py",
        "            self._coming[2].wait()\n",
        "",
        _LIFE_DEVICE,
        _LIFE_HOST,
    ),
    fault(
        "stream: a root parameter is read before its gather ends",
        _CORE + "root_parameters.py",
        "        coming[2].wait()\n",
        "",
        _ROW_DEVICE,
    ),
    fault(
        "stream: a drive overwrites a buffer that a copy still reads",
        _CORE + "read_ahead.py",
        "        copied.synchronize()\n",
        "",
        _ROW_NVME,
    ),
    fault(
        "stream: a gradient is offloaded before it is reduced",
        _CORE + "gradient_offload.py",
        "self.streams.down.run(reduced, span",
        "self.streams.down.run(span",
        _ROW_HOST,
    ),
    fault(
        "stream: a gradient is summed before it is in host memory",
        _CORE + "gradient_offload.py",
        "            copied.synchronize()\n",
        "",
        _ROW_HOST,
    ),
    fault(
        "stream: a reduction overwrites a gradient that is being offloaded",
        _REDUCTIONS,
        "run(streams.now(), *(each.free for each in gradients), span",
        "run(streams.now(), span",
        _ROW_HOST,
    ),
    fault(
        "stream: a reduction does not wait for the backward",
        _REDUCTIONS,
        "run(streams.now(), *(each.free for each in gradients), span",
        "run(*(each.free for each in gradients), span",
        _ROW_DEVICE,
    ),
    fault(
        "stream: the gradient of a root parameter is freed while it is reduced",
        _REDUCTIONS,
        "        reduce(flat.name, [self], [full], self.streams).wait()\n",
        "        reduce(flat.name, [self], [full], self.streams)\n",
        _ROW_DEVICE,
    ),
    fault(
        "stream: the remaining gradients are reduced before their backward ends",
        _REDUCTIONS,
        'run(self.streams.now(), span="finish gradients")',
        'run(span="finish gradients")',
        _ROW_STAGE0,
        _ROW_STAGE1,
    ),
    fault(
        "stream: the norm does not wait for deferred reductions",
        _REDUCTIONS,
        "        self.reduced.wait()\n",
        "",
        _ROW_STAGE0,
        _ROW_STAGE1,
    ),
    fault(
        "stream: a backward overwrites gradients that an abandoned step still reduces",
        "ftkit/engine/model.py",
        "        self.deferred.reduced.wait()  # a step may be left out after `last_backward`\n",
        "",
        _LIFE_STAGE1,
    ),
    fault(
        "stream: deferred gradients are reduced before their backward ends",
        _REDUCTIONS,
        'run(self.streams.now(), span=f"reduce backward {self._next}")',
        'run(span=f"reduce backward {self._next}")',
        _ROW_STAGE1,
    ),
    fault(
        "stream: an update writes weights that a gather still reads",
        _UPDATER,
        "        self.streams.join()\n",
        "",
        _LIFE_NOW,
        _LIFE_HOST,
        _LIFE_HOLD,
        _LIFE_DEVICE,
        _ROW_DEVICE,
    ),
    fault(
        "stream: a deferred update on the device does not wait for the gradients",
        _UPDATER,
        "self.compute.run(ready) if",
        "self.compute.run() if",
        _LIFE_DEVICE,
    ),
    fault(
        "stream: a piece is updated before it is in its slot",
        _UPDATER,
        "            piece.slot.settle()  # everything is in the slot\n",
        "",
        _ROW_STAGE0,
    ),
    fault(
        "stream: a slot is filled while its last piece is still written",
        _UPDATER,
        "        slot.settle()\n        self.slot = slot\n",
        "        self.slot = slot\n",
        _ROW_STAGE0,
        _ROW_HOST,
        _ROW_NVME,
    ),
    fault(
        "stream: a gather does not wait for the weights that the host has updated",
        _UPDATER,
        "piece.update.event = self.up.mark() if self.on_host else self.streams.now()",
        "piece.update.event = DONE if self.on_host else self.streams.now()",
        _ROW_STAGE2,
        _LIFE_HOLD,
    ),
    fault(
        "stream: a gather does not wait for the weights that the device has updated",
        _UPDATER,
        "piece.update.event = self.up.mark() if self.on_host else self.streams.now()",
        "piece.update.event = self.up.mark() if self.on_host else DONE",
        _LIFE_DEVICE,
    ),
    fault(
        "stream: a save reads what the last update still writes",
        _SAVING,
        "self.units.streams.save.run(self.ready, *updated)",
        "self.units.streams.save.run(self.ready)",
        _LIFE_DEVICE,
        _LIFE_HOLD,
    ),
    fault(
        "stream: a load or an export reads shards before the last write of them",
        "ftkit/engine/model.py",
        "        self.settle()\n        self.transfer.refresh(self.flats)\n        self.streams.join()\n",
        "        self.settle()\n        self.transfer.refresh(self.flats)\n",
        _LIFE_STAGE1,
        _LIFE_DEVICE,
    ),
    fault(
        "stream: gathered weights are read before they have come",
        "ftkit/engine/holding.py",
        "        transfer.streams.join()\n",
        "",
        _LIFE_DEVICE,
    ),
    fault(
        "stream: an activation leaves before it is computed",
        _ACTIVATIONS,
        "self.streams.down.run(self.streams.now(), host.copied)",
        "self.streams.down.run(host.copied)",
        _ROW_HOST,
    ),
    fault(
        "stream: an activation overwrites one that is still copied to the device",
        _ACTIVATIONS,
        "self.streams.down.run(self.streams.now(), host.copied)",
        "self.streams.down.run(self.streams.now())",
        _LIFE_ACTIVATIONS,
    ),
    fault(
        "stream: an activation that is freed is overwritten while it leaves",
        _ACTIVATIONS,
        "            copied.wait()\n",
        "",
        _ROW_HOST,
    ),
    fault(
        "activations: originals stay on the device as long as the host is ahead",
        _ACTIVATIONS,
        "        self.release(LEAVING)\n",
        "",
        _ORIGINALS,
    ),
    fault(
        "activations: originals stay on the device through the backward",
        _ACTIVATIONS,
        "        self.release()  # work",
        "        # work",
        _ORIGINALS,
    ),
    fault(
        "activations: originals of a forward that is forgotten stay on the device",
        _ACTIVATIONS,
        "        self.offload.release()\n",
        "",
        _ORIGINALS,
    ),
    fault(
        "stream: an activation is used before it has come back",
        _ACTIVATIONS,
        "        fetched().wait()\n",
        "        fetched()\n",
        _ROW_ACTIVATIONS,
    ),
    fault(
        "stream: an activation comes into memory that is still used",
        _ACTIVATIONS,
        "            with up.run(begun):\n",
        "            with up.run():\n",
        _ROW_HOST,
        _LIFE_NOW,
    ),
    fault(
        "stream: an activation that nothing took is overwritten while it comes",
        _ACTIVATIONS,
        "                up.keep(tensor)\n",
        "",
        _LIFE_NOW,
        _LIFE_HOST,
    ),
    fault(
        "stream: an activation is written to its file before it is in host memory",
        _ACTIVATIONS,
        "            host.copied.synchronize()\n            file.write",
        "            file.write",
        _ROW_NVME,
    ),
    fault(
        "stream: an activation is read from its file into a buffer that is still copied",
        _ACTIVATIONS,
        "            host.copied.synchronize()\n            written.result()\n",
        "            written.result()\n",
        _ROW_NVME,
    ),
    fault(
        "stream: an activation leaves into a buffer that is still written to a file",
        _ACTIVATIONS,
        "        place.settle()\n        if place.size_bytes < size_bytes:",
        "        if place.size_bytes < size_bytes:",
        _ROW_NVME,
    ),
)
