"""The faults, as data: what is broken, where, and the tests that must notice.

Each is a mistake that somebody could make on a bad day and that a plain run would not show: it trains, only not as it
should. The text that is replaced must be found exactly once in its file, so that a fault cannot quietly stop being
planted. Its tests are the quickest that notice; each of them must be green without the fault.
"""

from __future__ import annotations

from dataclasses import dataclass

_COMM = "tests/engine/test_comm.py::"
_LAYOUT = "tests/engine/test_layout.py::"
_OPTIMIZER = "tests/engine/test_optimizer.py::"
_USES = "tests/engine/test_uses.py::"
_PRECISION = "tests/engine/test_precision.py::"
_CHECKPOINT = "tests/engine/test_checkpoint.py::"
_GUARD = "tests/test_guard.py::"
_UPDATE = "tests/engine/test_update.py::"
_BYTES = "tests/engine/test_bytes.py::"
_REFUSALS = "tests/engine/test_refusals.py::"
_EVERYWHERE = "tests/engine/test_resume_everywhere.py::test_every_pair_of_settings_goes_on"
_BLOCKS = "tests/hf/test_blocks.py::"
_TRAINER = "tests/hf/test_trainer.py::"
_KERNELS = "tests/kernels/"

_TIERS = "tests/engine/test_tiers.py::test_every_pair_of_places_trains_as_plain_pytorch"
_ON_DISK = _TIERS + (
    "[llama-W2-stage3-recompute-free-acc2-2groups-adamw-p=nvme-g=nvme-s=nvme-k=nvme-prefetch-debug-clip-deferred-late]"
)
_ON_HOST = _TIERS + (
    "[llama-W2-stage3-recompute-free-acc1-2groups-adamw-p=host-g=host-s=host-k=host-parts2-prefetch-debug-clip-deferred-late]"
)
_NOT_POISONED = _TIERS + (
    "[llama-W2-stage3-recompute-free-acc1-2groups-adamw-p=nvme-g=nvme-s=nvme-k=nvme-prefetch-clip-deferred-late]"
)
_STAGE2 = _TIERS + "[llama-W2-stage2-recompute-free-acc1-2groups-adamw-g=host-s=host-prefetch-debug-clip-deferred-late]"

_TRAINS = _USES + "test_trains_as_plain_pytorch"
_RECOMPUTE = "W2-stage3-recompute-free-acc1-1groups-adamw-prefetch-debug-clip]"
_KEEP = "W2-stage3-keep-free-acc2-2groups-adamw-prefetch-clip]"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: what goes wrong.
        edits: (file, old text, new text); several only where one alone is harmless.
        tests: pytest node ids, run until the first turns red.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, ((file, old, new),), tests)


FAULTS = (
    _fault(
        "sum over ranks is not divided by their number",
        "ftkit/engine/comm.py",
        "            torch.div(total, world, out=total)\n",
        "",
        _COMM + "test_large_tensors[2-reduces-shared memory-torch.float32]",
    ),
    _fault(
        "a wait is left out: the other rank's half is read before it is written",
        "ftkit/engine/comm.py",
        "copy_(shard[start:stop])\n            self.comm.barrier()\n",
        "copy_(shard[start:stop])\n",
        _COMM + "test_late_ranks_are_waited_for[arrives late-0]",
    ),
    _fault(
        "one half of the stage for all pieces: it is written before others have read it",
        "ftkit/engine/comm.py",
        "        self.turn ^= 1\n",
        "",
        _COMM + "test_late_ranks_are_waited_for[leaves late-0]",
        _COMM + "test_late_ranks_are_waited_for[leaves late-1]",
    ),
    _fault(
        "no padding: the ragged end of a line is lost",
        "ftkit/engine/layout.py",
        "per_rank = -(-self.numel // self.world_size)",
        "per_rank = self.numel // self.world_size",
        _LAYOUT + "test_every_element_has_one_place_and_one_owner[a little over a shard-2]",
    ),
    Fault(
        "padding is not zeroed, and counts in the gradient norm",
        (
            ("ftkit/engine/unit.py", "            place[flat.layout.numel :].zero_()\n", ""),
            ("ftkit/engine/optimizer.py", "flat.grad[: flat.own_numel]", "flat.grad"),
        ),
        (f"{_TRAINS}[two forwards-{_RECOMPUTE}",),
    ),
    _fault(
        "random numbers are not restored in recomputation",
        "ftkit/engine/unit.py",
        "            torch.set_rng_state(self.cpu_state)\n",
        "",
        _USES + "test_dropout_on_one_rank_is_that_of_plain_pytorch[gpt2]",
    ),
    _fault(
        "autocast is not restored in recomputation",
        "ftkit/engine/unit.py",
        "            stack.enter_context(self.without_cast_cache())\n",
        "",
        _PRECISION + "test_autocast_is_restored_in_recomputation[1-recompute-torch.bfloat16]",
    ),
    _fault(
        "stale weights: an update does not change the version",
        "ftkit/engine/update.py",
        "            step.flat.version += 1\n",
        "",
        f"{_TRAINS}[two forwards-{_KEEP}",
    ),
    Fault(
        "stale weights: whole copies are not refreshed, neither after an update nor when they are read",
        (
            (
                "ftkit/engine/shard.py",
                "            self.transfer.refresh([flat for flat in self.trainable if flat.resident])\n",
                "",
            ),
            ("ftkit/engine/shard.py", "                flat.refresh()\n", "                pass\n"),
        ),
        (_OPTIMIZER + "test_whole_copies_follow_the_shards[2]",),
    ),
    _fault(
        "the neighbour is gathered into the slot that is being read",
        "ftkit/engine/unit.py",
        "self.transfer.slots[self.number % 2]",
        "self.transfer.slots[0]",
        f"{_TRAINS}[two forwards-{_RECOMPUTE}",
    ),
    _fault(
        "the wrong neighbour is gathered in backward",
        "ftkit/engine/unit.py",
        "unit.enter(graph=False, neighbour=unit.before)",
        "unit.enter(graph=False, neighbour=unit.after)",
        _USES + "test_the_neighbour_is_gathered_while_a_block_computes",
    ),
    _fault(
        "held weights are let go before their backward",
        "ftkit/engine/unit.py",
        "            if self.pending == 0:\n                self.held = None\n",
        "            self.held = None\n",
        _BYTES + "test_held_weights_are_gathered_once",
    ),
    _fault(
        "weights may be updated between a forward and its backward",
        "ftkit/engine/unit.py",
        "        if version != self.version:\n",
        "        if False:\n",
        _REFUSALS + "test_backward_is_refused[update_before_backward-recompute]",
    ),
    _fault(
        "the second contribution to a tied weight is dropped",
        "ftkit/engine/leaf.py",
        "    flat.touched[0] = True\n    flat.contribute(full)\n",
        "    if not flat.touched[0]:\n        flat.contribute(full)\n    flat.touched[0] = True\n",
        f"{_TRAINS}[tied by hand-{_RECOMPUTE}",
    ),
    _fault(
        "the second micro-batch overwrites the first",
        "ftkit/engine/flat.py",
        "                add_in_pieces(self.grad, part)\n",
        "                self.grad.copy_(part)\n",
        f"{_TRAINS}[many results-{_KEEP}",
    ),
    _fault(
        "what nobody wrote in the gradient slot is taken for a gradient",
        "ftkit/engine/unit.py",
        "                    place[segment.start : segment.stop].zero_()\n",
        "                    pass\n",
        f"{_TRAINS}[parameters never used-{_RECOMPUTE}",
    ),
    _fault(
        "an overflow is ignored",
        "ftkit/engine/optimizer.py",
        "overflow = self.loss_scale.dynamic and not math.isfinite(norm)",
        "overflow = False",
        _OPTIMIZER + "test_an_overflow_on_one_rank_skips_the_step_on_all[3]",
    ),
    _fault(
        "gradients are not clipped",
        "ftkit/engine/optimizer.py",
        "factor = self._clip / self.loss_scale.value",
        "factor = 1.0 / self.loss_scale.value",
        _OPTIMIZER + "test_clipped_as_by_torch[sgd]",
    ),
    _fault(
        "the norm is that of one rank's shards",
        "ftkit/engine/optimizer.py",
        "        self._norm = math.sqrt(sum(told[: len(flats)])) / self.loss_scale.value\n",
        "        self._norm = math.sqrt(float(squares.sum())) / self.loss_scale.value\n",
        _OPTIMIZER + "test_clipped_as_by_torch[sgd]",
    ),
    _fault(
        "all tensors of a line share one step count",
        "ftkit/engine/optimizer.py",
        "[count + now for count, now in zip(state.steps, due)]",
        "[max(state.steps) + 1] * len(due)",
        _OPTIMIZER + "test_as_torchs_own[2-some-two-adamw]",
    ),
    _fault(
        "a tensor without gradient is updated all the same",
        "ftkit/engine/optimizer.py",
        "due = [touched and group is not None for",
        "due = [group is not None for",
        _OPTIMIZER + "test_as_torchs_own[2-some-one-adamw]",
    ),
    _fault(
        "weight decay and learning rate of the wrong group",
        "ftkit/engine/update.py",
        "                    step.groups[run.group],\n",
        "                    step.groups[0],\n",
        _OPTIMIZER + "test_as_torchs_own[2-all-two-adamw]",
    ),
    _fault(
        "a range of a checkpoint is written by the wrong rank",
        "ftkit/engine/flat.py",
        "first, last = min(part * self.comm.rank, last)",
        "first, last = min(part * self.rank, last)",
        _CHECKPOINT + "test_it_goes_on_exactly_on_as_many_ranks[ddp]",
    ),
    _fault(
        "step counts are not restored",
        "ftkit/engine/checkpoint.py",
        "            optimizer.line(flat).steps = [steps[segment.name] for segment in flat.layout.segments]\n",
        "            pass\n",
        _CHECKPOINT + "test_it_goes_on_exactly_on_as_many_ranks[zero3]",
    ),
    _fault(
        "masters are not restored",
        "ftkit/engine/checkpoint.py",
        "            if state.master is not flat.weights:\n",
        "            if False:\n",
        _CHECKPOINT + "test_narrow_weights_come_back_from_masters[dtype0]",
    ),
    _fault(
        "a rank reads the beginning of a tensor instead of its range",
        "ftkit/engine/storage.py",
        "            raw = bytearray(count * size)\n            position = entry.offset + (start + low) * size\n",
        "            raw = bytearray(count * size)\n            position = entry.offset + low * size\n",
        "tests/hf/test_loading.py::test_stored_dtypes_in_one_file_or_many[1GB-dtype0-2]",
    ),
    _fault(
        "a rank resumes with the beginning of a tensor instead of its range",
        "ftkit/engine/checked_file.py",
        "in self.reader.views(entry.offset + start * size,",
        "in self.reader.views(entry.offset,",
        _CHECKPOINT + "test_it_goes_on_exactly_on_as_many_ranks[zero3]",
    ),
    _fault(
        "a piece of a checkpoint is filled while it is written",
        "ftkit/engine/pieces.py",
        "        self.room, self._other = self._other, self.room\n",
        "",
        "tests/engine/test_pieces.py::test_what_is_written_is_there_in_pieces",
    ),
    _fault(
        "a damaged checkpoint is kept and a whole one removed",
        "ftkit/recipe_trainer.py",
        "known = [path for path in there if path not in self.damaged]",
        "known = there",
        "tests/test_life.py::test_a_damaged_checkpoint_is_none_of_those_that_are_kept",
    ),
    _fault(
        "a piece that was read ahead is handed out before it is there",
        "ftkit/engine/piece_reader.py",
        "            future.result()\n",
        "            pass\n",
        "tests/engine/test_pieces.py::test_a_changed_piece_is_found_ahead_and_told_when_it_is_wanted",
    ),
    _fault(
        "a cache goes through a recomputed block",
        "ftkit/hf/blocks.py",
        '            "pass no past_key_values in training"\n        )\n    return None\n',
        '            "pass no past_key_values in training"\n        )\n    return value\n',
        _BLOCKS + "test_a_cache_made_in_training_is_left_out[llama-recompute]",
    ),
    _fault(
        "the loss is divided by one rank's label tokens",
        "ftkit/hf/trainer.py",
        "        return super().get_batch_samples(epoch_iterator, num_batches, device)\n",
        "        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)\n"
        '        return batches, sum((b["labels"] != -100).sum() for b in batches) * self.args.world_size\n',
        _TRAINER + "test_the_same_log_by_one_import_changed[2-default]",
    ),
    _fault(
        "the loss of an evaluation is that of one rank",
        "ftkit/hf/trainer.py",
        '            loss = self.accelerator.reduce(loss, "mean")  #',
        "            pass  #",
        _TRAINER + "test_the_same_log_by_one_import_changed[2-default]",
    ),
    _fault(
        "the order of samples depends on the number of ranks",
        "ftkit/hf/batches.py",
        "        low, high = self.seed % 2**32, (self.seed >> 32) % 2**32\n",
        "        import os\n\n"
        '        seed = self.seed + int(os.environ.get("WORLD_SIZE", "1"))\n'
        "        low, high = seed % 2**32, (seed >> 32) % 2**32\n",
        "tests/test_worlds.py::test_the_order_of_samples_knows_no_world",
    ),
    _fault(
        "deferred update: a gather does not wait for it",
        "ftkit/engine/flat.py",
        "        self.settle()\n        source = self.weights.tensor if read is None else read\n",
        "        source = self.weights.tensor if read is None else read\n",
        _ON_HOST,
    ),
    _fault(
        "deferred update: the learning rate is read late",
        "ftkit/engine/optimizer.py",
        '[{k: v for k, v in g.items() if k != "params"} | {"lr": float(g["lr"])} for g in self.param_groups]',
        "self.param_groups",
        _ON_DISK,
    ),
    _fault(
        "deferred update: whole copies are not refreshed when they are wanted",
        "ftkit/engine/unit.py",
        "        self.transfer.refresh(self.resident)\n",
        "",
        _STAGE2,
    ),
    _fault(
        "the update is made before clipping is known",
        "ftkit/engine/optimizer.py",
        "        factor = self._clip / self.loss_scale.value\n",
        "        factor = 1.0 / self.loss_scale.value\n",
        _ON_DISK,
    ),
    _fault(
        "weights are read ahead while they are still being updated",
        "ftkit/engine/transfer.py",
        "                update.wait()\n",
        "                pass\n",
        _ON_DISK,
    ),
    _fault(
        "read-ahead: what was read for another step is used",
        "ftkit/engine/transfer.py",
        "    return tuple((flat.name, flat.version) for flat in flats)\n",
        "    return tuple((flat.name, 0) for flat in flats)\n",
        _NOT_POISONED,
    ),
    _fault(
        "read-ahead of the wrong unit: its buffer is given to its neighbour",
        "ftkit/engine/transfer.py",
        "        future, buffer = self.coming.pop(_content(flats))\n",
        "        future, buffer = self.coming.pop(next(iter(self.coming)))\n",
        _ON_DISK,
    ),
    _fault(
        "staging of a gradient is reused before it was added",
        "ftkit/engine/drain.py",
        "        self._collect(self.turn)\n",
        "        self.jobs[self.turn] = None\n",
        _ON_DISK,
    ),
    _fault(
        "the norm is taken before the last gradients have arrived",
        "ftkit/engine/shard.py",
        "            self.drain.finish()\n",
        "            pass\n",
        _ON_DISK,
    ),
    _fault(
        "gradients below the device are left out of the norm",
        "ftkit/engine/optimizer.py",
        "                squares[number] = flat.square / share\n",
        "                pass\n",
        _ON_DISK,
    ),
    _fault(
        "the second micro-batch replaces a gradient below the device",
        "ftkit/engine/flat.py",
        "            self.drain.take(self, part, add=self._has_gradient)\n",
        "            self.drain.take(self, part, add=False)\n",
        _ON_DISK,
    ),
    Fault(
        "a model that is let go leaves its shards behind",
        (
            ("ftkit/engine/leaf.py", "own = line()", "own = flat"),
            ("ftkit/engine/unit.py", "weakref.ref(self), weakref.ref(flat)", "lambda: self, lambda held=flat: held"),
        ),
        (
            "tests/test_lifetime.py::test_a_model_that_is_let_go_takes_all_its_memory_along[llama-W2-stage3-recompute-free"
            "-acc1-1groups-adamw-prefetch-clip]",
        ),
    ),
    _fault(
        "inside a block, the second micro-batch's gradient replaces the first's",
        "ftkit/engine/unit.py",
        "                add_in_pieces(place, gradient.reshape(-1))\n",
        "                place.copy_(gradient.reshape(-1))\n",
        _ON_HOST,
    ),
    _fault(
        "a slot of the update is reused before it was written",
        "ftkit/engine/update.py",
        "        slot.settle()\n        self.slot = slot\n",
        "        self.slot = slot\n",
        _UPDATE + "test_slots_are_not_reused_early",
    ),
    _fault(
        "a buffer of kept inputs is reused before it was written",
        "ftkit/engine/kept.py",
        "            ring[-1].write.wait()\n",
        "            pass\n",
        "tests/engine/test_kept.py::test_what_goes_to_files_comes_back",
    ),
    _fault(
        "a flipped byte in a state file is not noticed",
        "ftkit/engine/flatfile.py",
        "            if value == self._sums[piece]:\n",
        "            if True:\n",
        "tests/engine/test_disk.py::test_a_flipped_bit_is_found",
    ),
    _fault(
        "the guard takes one jump for growth, and ends a healthy run",
        "ftkit/guard.py",
        "        rise = min(later",
        "        rise = max(later",
        _GUARD + "test_a_healthy_run_close_to_its_limit_is_left_alone",
    ),
    _fault(
        "the guard counts file cache, which the kernel takes back, as used",
        "ftkit/plan/box_memory.py",
        "max(0, usage - self._reclaimable())",
        "usage",
        _GUARD + "test_v2_limits_leave_out_what_the_kernel_can_take_back",
    ),
    _fault(
        "micro-batches that pass a block together are summed in 16 bits",
        "ftkit/engine/flat.py",
        "self.grad_dtype if policy.parts > 1 else dtype",
        "dtype",
        "tests/engine/test_precision.py::test_16_bits_train_as_in_plain_pytorch",
    ),
    _fault(
        "a state on both tiers takes more host memory than it was given",
        "ftkit/engine/tiers.py",
        "            left -= size if size <= left else 0\n",
        "",
        "tests/engine/test_tiers.py::test_lines_of_a_state_on_nvme_stay_in_host_memory_while_they_fit",
    ),
    _fault(
        "all ranks of a node take its first cores",
        "ftkit/engine/affinity.py",
        "    place = mates.index(rank)\n",
        "    place = 0\n",
        "tests/engine/test_affinity.py::test_eight_ranks_on_two_nodes_get_cores_of_their_own",
    ),
    _fault(
        "the plan counts on memory at which the guard ends the run",
        "ftkit/plan/box_memory.py",
        "max(0, self.free - guarded_bytes(self.limit))",
        "self.free",
        "tests/plan/test_limits.py::test_of_a_machine_a_share_is_granted_and_of_a_group_all",
    ),
    _fault(
        "of the blocks of a piece only the last one is summed",
        "ftkit/engine/flatfile.py",
        "            self.sums[piece] = (self.sums[piece] + word_sum(self.data[at:end])) % 2**64\n",
        "            self.sums[piece] = word_sum(self.data[at:end])\n",
        "tests/engine/test_disk.py::test_sums_that_come_with_a_write_are_what_is_compared",
    ),
    _fault(
        "an update does not wait until a save has its line",
        "ftkit/engine/update.py",
        "            updates[piece.number].await_capture()\n",
        "",
        "tests/engine/test_checkpoint.py::test_a_save_holds_one_moment_while_training_goes_on",
    ),
    _fault(
        "a save begins before the last update is written behind",
        "ftkit/engine/saving.py",
        "                self.update.result()\n",
        "                pass\n",
        "tests/engine/test_checkpoint.py::test_a_save_waits_for_the_update_before_it",
    ),
    _fault(
        "a piece of a checkpoint is used without a look at its checksum",
        "ftkit/engine/piece_reader.py",
        "if got < size or checksum(data[:size]) != piece.checksum:",
        "if got < size:",
        "tests/engine/test_checkpoint.py::test_not_one_byte_can_change_unseen",
    ),
    _fault(
        "a failed save keeps later ones from beginning",
        "ftkit/engine/saving.py",
        "        self.units.saving = None\n",
        "        pass\n",
        "tests/engine/test_checkpoint.py::test_a_save_that_fails_leaves_nothing_and_training_goes_on",
    ),
    _fault(
        "--resume auto takes the newest checkpoint unread",
        "ftkit/resume.py",
        "        if not told:\n",
        "        if True:\n",
        "tests/test_finetune.py::test_resume_takes_the_newest_checkpoint_that_is_whole",
    ),
    _fault(
        "the update of a step that went wrong is made all the same",
        "ftkit/engine/optimizer.py",
        "        if not self.step_was_skipped:\n",
        "        if not overflow:\n",
        "tests/test_divergence.py::test_what_is_left_out_was_never_there",
    ),
    _fault(
        "a rollback deals the same samples again",
        "ftkit/divergence_watch.py",
        "        self.trainer.left_out |= set(range(first, event.step + 1))\n",
        "",
        "tests/test_divergence.py::test_what_is_left_out_was_never_there",
    ),
    _fault(
        "a checkpoint forgets the losses that steps are judged by",
        "ftkit/recipe_trainer.py",
        "        self.losses = LossWindow(losses)\n",
        "        self.losses = LossWindow()\n",
        "tests/test_divergence.py::test_a_resumed_run_judges_as_the_first",
    ),
    _fault(
        "an adapter is merged without its scale",
        "ftkit/hf/merging.py",
        "        return self.scale * (self.second[start:stop] @ self.first)\n",
        "        return self.second[start:stop] @ self.first\n",
        "tests/hf/test_merging.py::test_it_is_what_peft_merges",
    ),
    _fault(
        "bytes that were taken by reference are not compared",
        "ftkit/engine/pieces.py",
        "* piece_bytes]) != expected:",
        "* piece_bytes]) is None:",
        "tests/engine/test_clone.py::test_what_the_drive_gives_back_is_compared",
    ),
    _fault(
        "a line is let go before all of it is taken",
        "ftkit/engine/saving.py",
        "                    for number, (job, sums) in enumerate(zip(self.jobs, shared), 1):\n",
        "                    for flat in self.units.trainable:\n                        self._capture(flat)\n"
        "                    for number, (job, sums) in enumerate(zip(self.jobs, shared), 1):\n",
        "tests/engine/test_clone.py::test_it_is_the_moment_of_the_save",
    ),
    _fault(
        "a run that was over makes one step more",
        "ftkit/hf/trainer.py",
        "if self.engine_is_on and self.state.global_step >= self.state.max_steps:",
        "if False:",
        "tests/test_finetune.py::test_a_run_that_was_over_makes_no_step_more",
    ),
    _fault(
        "the best checkpoint is removed with the others",
        "ftkit/recipe_trainer.py",
        "            if path != best:\n",
        "            if True:\n",
        "tests/test_finetune.py::test_the_last_checkpoints_and_the_best_are_kept",
    ),
    _fault(
        "verify looks at the best step instead of the worst",
        "ftkit/verify.py",
        "    return max((abs(a - b)",
        "    return min((abs(a - b)",
        "tests/test_verify.py::test_a_planted_fault_is_caught",
    ),
    _fault(
        "what is loaded never reaches the files of the NVMe tier",
        "ftkit/engine/checkpoint.py",
        "            behind.put(first, low, piece)\n",
        "",
        _EVERYWHERE + "[full-W2-device-stage3-fp32-meanwhile-to-W2-nvme-stage3-fp32-deferred]",
    ),
    _fault(
        "learning rates are not restored",
        "ftkit/engine/checkpoint.py",
        '{*optimizer.defaults, "initial_lr"}',
        'set(optimizer.defaults) - {"lr"}',
        _EVERYWHERE + "[full-W2-device-stage3-fp32-to-W2-device-stage3-fp32]",
    ),
    _fault(
        "whole copies stay what they were before a load",
        "ftkit/engine/checkpoint.py",
        "    units.rewritten()\n",
        "",
        _EVERYWHERE + "[full-W3-host-stage2-fp32-deferred-meanwhile-to-W2-nvme-stage1-fp32]",
    ),
    _fault(
        "after a resume in mid-epoch the order is that of epoch 0",
        "ftkit/recipe_trainer.py",
        "        loader.set_sampler(self.order)\n",
        "",
        "tests/test_data_cursor.py::test_the_next_sample_is_the_one_that_would_have_come[plain-2-3-22-in two]",
    ),
    _fault(
        "a link in a checkpoint is followed out of its folder",
        "ftkit/engine/seal.py",
        "        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):\n",
        "        if False:\n",
        "tests/engine/test_hostile_files.py::test_lists_that_are_links_are_not_followed",
    ),
    _fault(
        "a stranger's pickle is run when it is read",
        "ftkit/hf/plain.py",
        "weights_only=True",
        "weights_only=False",
        "tests/test_hostile_checkpoints.py::test_a_pickle_with_a_payload_is_refused_and_not_run[scheduler.pt-torch]",
    ),
    _fault(
        "a shorter model goes on with a part of a longer one",
        "ftkit/engine/checkpoint.py",
        "    if steps - wanted:\n",
        "    if False:\n",
        "tests/engine/test_hostile_files.py::test_a_shorter_model_does_not_go_on_with_a_part_of_a_longer_one",
    ),
    _fault(
        "a run goes on with other rows under the same name",
        "ftkit/resume.py",
        "    if rows and digest and rows != digest:\n",
        "    if False:\n",
        "tests/test_hostile_checkpoints.py::test_other_rows_under_the_same_name_are_refused",
    ),
    _fault(
        "rms_norm's mean counts the places beyond the row",
        "triton_kernels/rms_norm.py",
        "r = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)",
        "r = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / BLOCK + eps)",
        _KERNELS + "test_rms_norm.py::test_sizes_of_real_models[5120]",
    ),
    _fault(
        "rms_norm's backward forgets what came for the sum",
        "triton_kernels/rms_norm.py",
        "            out += tl.load(dtotal + row * columns + at, inside, other=0.0).to(tl.float32)\n",
        "            out += 0.0\n",
        _KERNELS + "test_rms_norm.py::test_as_exact_as_pytorch",
    ),
    _fault(
        "layer_norm's variance is taken before the mean is away",
        "triton_kernels/layer_norm.py",
        "    apart = tl.where(inside, wide - middle, 0.0)\n    r = 1.0 / tl.sqrt(tl.sum(apart * apart, 0) / columns + eps)",
        "    apart = tl.where(inside, wide - middle, 0.0)\n"
        "    r = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / columns - middle * middle + eps)",
        _KERNELS + "test_layer_norm.py::test_a_mean_far_from_zero_does_not_cancel",
    ),
    _fault(
        "layer_norm's gradient keeps its mean",
        "triton_kernels/layer_norm.py",
        "out = (g - tl.sum(g, 0) / columns - normal",
        "out = (g - normal",
        _KERNELS + "test_layer_norm.py::test_sizes_of_real_models",
    ),
    _fault(
        "rotary turns back the same way",
        "triton_kernels/rotary.py",
        "    if BACK:\n        y1 = x1 * c1 + x2 * s2\n        y2 = x2 * c2 - x1 * s1\n",
        "    if BACK:\n        y1 = x1 * c1 - x2 * s1\n        y2 = x2 * c2 + x1 * s2\n",
        _KERNELS + "test_rotary.py::test_sizes_of_real_models",
    ),
    _fault(
        "rotary reads every sample's angles from the first",
        "triton_kernels/rotary.py",
        "cos.stride(0) if len(cos) > 1 else 0",
        "0",
        _KERNELS + "test_rotary.py::test_sizes_of_real_models",
    ),
    _fault(
        "an activation's slope is that without the bias",
        "triton_kernels/activation.py",
        "        if BIAS:\n            z += own\n",
        "",
        _KERNELS + "test_activation.py::test_sizes_that_average_chance_out",
    ),
    _fault(
        "a gated backward mixes up its two gradients",
        "triton_kernels/gated.py",
        "(gradient * u * slope).to(dgate",
        "(gradient * value).to(dgate",
        _KERNELS + "test_gated.py::test_sizes_that_average_chance_out",
    ),
    _fault(
        "a loss loses what it summed when a larger logit comes",
        "triton_kernels/cross_entropy.py",
        "mass = mass * tl.exp(highest - now) + ",
        "mass = mass + ",
        _KERNELS + "test_cross_entropy.py::test_rows_of_many_blocks[8193]",
    ),
    _fault(
        "a chunk of classes finds the labels of the first",
        "triton_kernels/cross_entropy.py",
        "tl.where(at + first == label,",
        "tl.where(at == label,",
        _KERNELS + "test_cross_entropy.py::test_a_heads_chunks_make_the_loss_and_gradients_of_the_whole",
    ),
    _fault(
        "the last row of a chunk is left out of the loss",
        "triton_kernels/linear_cross_entropy.py",
        "            total += loss.sum()\n",
        "            total += loss[: max(1, step - 1)].sum()\n",
        _KERNELS + "test_cross_entropy.py::test_a_heads_chunks_make_the_loss_and_gradients_of_the_whole",
    ),
    _fault(
        "adamw corrects the second moment as the first",
        "triton_kernels/adamw.py",
        "(1.0 - how.beta2**how.step) ** -0.5, WEIGHT",
        "(1.0 - how.beta1**how.step) ** -0.5, WEIGHT",
        _KERNELS + "test_flat.py::test_adamw_as_torch_does_it",
    ),
    _fault(
        "the finite check lets nan pass",
        "triton_kernels/squared_norm.py",
        "bad |= (tl.abs(value) <= 3.4028234663852886e38).to(tl.int32) ^ 1",
        "bad |= (tl.abs(value) > 3.4028234663852886e38).to(tl.int32)",
        _KERNELS + "test_flat.py::test_squared_norm",
    ),
    _fault(
        "an exchange is proved by its values alone",
        "ftkit/hf/twins.py",
        "    for name, truth in exact.items():\n        own, other",
        "    for name, truth in [*exact.items()][:1]:\n        own, other",
        "tests/hf/test_fusing.py::test_what_does_not_agree_is_left_alone_and_told",
    ),
    _fault(
        "what does not agree is exchanged all the same",
        "ftkit/hf/twins.py",
        "        if not off <= 2 * allowed",
        "        if False and not off <= 2 * allowed",
        "tests/hf/test_fusing.py::test_what_does_not_agree_is_left_alone_and_told",
    ),
    _fault(
        "a chunked loss forgets to shift the labels",
        "ftkit/hf/head.py",
        "pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "pad(labels, (0, 1), value=ignore_index)[..., :-1]",
        "tests/hf/test_fusing.py::test_logits_are_there_unless_only_the_loss_is_wanted",
    ),
    _fault(
        "a head goes on making logits of no classes",
        "ftkit/hf/head.py",
        "            self.wanted, self.kept = False, None\n",
        "            self.kept = None\n",
        "tests/hf/test_fusing.py::test_logits_are_there_unless_only_the_loss_is_wanted",
    ),
    _fault(
        "doctor takes any wheel for one with kernels for the card",
        "ftkit/doctor.py",
        "        if number <= capability and",
        "        if",
        "tests/test_doctor.py::test_a_v100_box_with_the_default_wheel",
    ),
    _fault(
        "a step's overflow is laid to the first unit that it reached last",
        "ftkit/hf/overflow.py",
        "return max(overflowed, key=lines.index)",
        "return min(overflowed, key=lines.index)",
        "tests/hf/test_overflow.py::test_where_a_backward_began_to_overflow",
    ),
    _fault(
        "what overflows in a forward is not looked for",
        "ftkit/hf/overflow.py",
        "            if not found and not _finite(output)",
        "            if not found and _finite(output)",
        "tests/hf/test_overflow.py::test_the_first_module_that_overflows",
    ),
    _fault(
        "packed samples of every row end where the first row's do",
        "ftkit/hf/attention.py",
        "ends = (attention_mask.view(batch, -1) + rows).reshape(-1)",
        "ends = (attention_mask.view(batch, -1)[:1] + rows).reshape(-1)",
        "tests/hf/test_attention.py::test_packed_samples_have_the_losses_and_gradients_they_have_alone[llama]",
    ),
    _fault(
        "the leak test compares a batch with itself",
        "ftkit/hf/packing.py",
        "changed[:, :first] = (changed[:, :first] + 1)",
        "changed[:, :first] = (changed[:, :first] + 0)",
        "tests/hf/test_attention.py::test_a_leak_is_found_in_the_runs_own_batch[llama]",
    ),
    _fault(
        "a window is forgotten in backward",
        "ftkit/hf/varlen.py",
        "CAUSAL, False, scale=scale, window_size=window,",
        "CAUSAL, False, scale=scale, window_size=None,",
        "tests/hf/test_attention.py::test_a_window_counts_in_backward_too",
    ),
    _fault(
        "a leaf that was read without gradients has none",
        "ftkit/engine/leaf.py",
        "if self.gathered is None or (wants_graph and not self.gathered.requires_grad):",
        "if self.gathered is None:",
        "tests/engine/test_leaf.py::test_a_read_without_gradients_does_not_take_them_from_the_next",
    ),
    _fault(
        "an fp32 island narrows what it returns",
        "ftkit/hf/islands.py",
        "    return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())",
        "    return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float()).half()",
        "tests/hf/test_islands.py::test_sums_that_overflow[llama]",
    ),
    _fault(
        "a projection is an island without those beside it",
        "ftkit/hf/islands.py",
        "        if self._is_inner(module) and id(module) not in self.last_of:",
        "        if False:",
        "tests/hf/test_islands.py::test_products_that_overflow[llama]",
    ),
    _fault(
        "each rank decides for itself what overflows",
        "ftkit/hf/islands.py",
        "        if not self.comm.any(own):\n            return None",
        "        if not own:\n            return None",
        "tests/hf/test_islands.py::test_ranks_find_the_same_islands[2]",
    ),
    _fault(
        "a run that goes on forgets its fp32 islands",
        "ftkit/hf/trainer.py",
        "            restore_islands(self.units, Islands.from_dict(islands, str(manifest)))",
        "            islands_of(self.units)",
        "tests/hf/test_islands.py::test_a_run_goes_on_with_the_islands_it_had",
    ),
    _fault(
        "weights beyond fp16 become infinite in silence",
        "ftkit/hf/loading.py",
        "        report.narrowing.refuse(units.comm, files)\n",
        "",
        "tests/hf/test_islands.py::test_weights_that_fp16_does_not_hold_are_refused",
    ),
    _fault(
        "islands that do not help stay",
        "ftkit/hf/islands.py",
        "            _take_back(self.model, self.islands, before)",
        "            pass",
        "tests/hf/test_islands.py::test_islands_of_a_stream_that_no_precision_mends_are_taken_back",
    ),
    _fault(
        "kernels forget to clip",
        "ftkit/hf/flat_kernels.py",
        "step=step, scale=factor)",
        "step=step, scale=1.0)",
        "tests/engine/test_optimizer.py::test_kernels_that_were_brought_do_as_torch_does[0.5]",
    ),
    _fault(
        "a refused load leaves masters of nothing",
        "ftkit/engine/optimizer.py",
        "            if fresh:\n                self._begin_again()\n            raise",
        "            raise",
        "tests/engine/test_checkpoint.py::test_a_load_that_is_refused_leaves_the_masters_of_the_weights",
    ),
    _fault(
        "the last batch that was looked at hides the others",
        "ftkit/hf/islands.py",
        "                finite = finite and ends_finite",
        "                finite = ends_finite",
        "tests/hf/test_islands.py::test_one_batch_that_is_not_finite_is_enough",
    ),
    _fault(
        "hooks ask together where ranks call modules differently",
        "ftkit/hf/islands.py",
        "if len(set(counts)) == 1}",
        "if counts}",
        "tests/hf/test_islands.py::test_ranks_whose_tokens_go_to_different_experts",
    ),
    _fault(
        "the plan in seconds gathers what a slot still has",
        "ftkit/plan/schedule.py",
        "        if self.slots.get(number % 2) == number and not held:",
        "        if False:",
        "tests/plan/test_order.py::test_the_engine_does_what_is_simulated[3-free]",
    ),
    _fault(
        "a number of kept blocks keeps the first ones",
        "ftkit/engine/flat.py",
        "        return number >= blocks - self.activations",
        "        return number < self.activations",
        "tests/plan/test_order.py::test_blocks_whose_graphs_are_kept_compute_once[1-1]",
    ),
    _fault(
        "the plan counts kept blocks as computed again",
        "ftkit/plan/schedule.py",
        "        recomputed = once if self._recomputed(number) else 0.0",
        "        recomputed = once",
        "tests/plan/test_search.py::test_kept_blocks_take_what_their_graphs_take_and_are_not_computed_again",
    ),
    _fault(
        "graphs of kept blocks take no memory",
        "ftkit/plan/memory.py",
        '    yield Item("workspace", "device", way.parts * graphs * graph_bytes(shape, way), ("train",))',
        '    yield Item("workspace", "device", 0 * graph_bytes(shape, way), ("train",))',
        "tests/plan/test_search.py::test_kept_blocks_take_what_their_graphs_take_and_are_not_computed_again",
    ),
    _fault(
        "the search stops before the fastest way",
        "ftkit/plan/search.py",
        "        if len(reached) == 2 and bounds[number] > reached[1] * (1 + ALIKE):",
        "        if len(reached) == 2:",
        "tests/plan/test_search.py::test_it_finds_what_simulating_all_finds[as published]",
    ),
    _fault(
        "the norm does not wait for gradients on their way to the host",
        "ftkit/plan/schedule.py",
        "        after = [self.reduced, self.drained, self.computed[-1]]",
        "        after = [self.reduced, self.computed[-1]]",
        "tests/plan/test_search.py::test_it_finds_what_simulating_all_finds[as published]",
    ),
    _fault(
        "ranks of several boxes have NVLink between them",
        "ftkit/plan/hardware.py",
        '            told["link"] = min(told["link"], network)',
        '            told["link"] = max(told["link"], network)',
        "tests/plan/test_largest.py::test_a_hundred_billion_on_64_gpus",
    ),
    _fault(
        "the largest model has a block too few",
        "ftkit/plan/largest.py",
        "    return replace(asked, shape=with_blocks(asked.shape, low)).plan()",
        "    return replace(asked, shape=with_blocks(asked.shape, low - 1)).plan()",
        "tests/plan/test_largest.py::test_one_block_more_does_not_fit",
    ),
    _fault(
        "a report that broke records steps for ever",
        "ftkit/report/live.py",
        "        if self.writes and not self.broken and state.global_step + 1 == self.traced_step:",
        "        if self.writes and state.global_step + 1 >= self.traced_step:",
        "tests/report/test_live.py::test_a_report_that_broke_records_nothing",
    ),
    _fault(
        "links in a stranger's folder are followed into the report",
        "ftkit/report/facts.py",
        "    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)",
        "    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)",
        "tests/report/test_page.py::test_special_files_of_a_stranger_are_not_opened",
    ),
    _fault(
        "what shares a resource does not slow down",
        "ftkit/plan/events.py",
        "for name, _ in shares[each] if asked[name] > 1), default=1.0)",
        "for name, _ in shares[each] if asked[name] > 9), default=1.0)",
        "tests/plan/test_events.py::test_those_that_share_a_resource_slow_down_while_they_do",
    ),
    _fault(
        "text of strangers gets into the report as markup",
        "ftkit/report/text.py",
        "    return html.escape(",
        "    return str(",
        "tests/report/test_page.py::test_hostile_files_neither_crash_it_nor_get_into_it",
    ),
    _fault(
        "a spike is lost where a chart is thinned",
        "ftkit/report/charts.py",
        "sorted({0, by_value[0], by_value[-1], len(stretch) - 1})",
        "sorted({0, len(stretch) - 1})",
        "tests/report/test_charts.py::test_a_long_run_stays_small_and_keeps_its_spikes",
    ),
    _fault(
        "a report that cannot be written ends the run",
        "ftkit/report/live.py",
        "        except Exception as error:  # whatever",
        "        except KeyError as error:  # whatever",
        "tests/report/test_live.py::test_an_error_ends_the_report_and_not_the_run",
    ),
    _fault(
        "steps are recorded that nobody asked for",
        "ftkit/engine/trace.py",
        "        found, self._open = list(self._open or []), None",
        "        found, self._open = list(self._open or []), []",
        "tests/engine/test_trace.py::test_nothing_is_recorded_unless_somebody_asks",
    ),
    _fault(
        "a reduction is not in the trace",
        "ftkit/engine/transfer.py",
        'self.trace.span("collectives", f"reduce backward {number}")',
        'self.trace.span("collectives", "")',
        "tests/engine/test_trace.py::test_a_trace_is_what_the_engine_did_in_order",
    ),
    _fault(
        "a longer run begins at the end of the old schedule",
        "ftkit/hf/plain.py",
        '            group["lr"] = base * rule(inner.last_epoch)',
        '            group["lr"] = group["lr"]',
        "tests/hf/test_longer_runs.py::test_a_longer_run_follows_its_own_schedule[linear]",
    ),
    _fault(
        "an answer that no token ends passes for good",
        "ftkit/hf/faults.py",
        'found[name] = any(each < 0 for each in ends)',
        'found[name] = all(each < 0 for each in ends) and end >= 0',
        "tests/hf/test_faults.py::test_a_planted_fault_is_found_with_its_row[no_end]",
    ),
    _fault(
        "training on empty answers only is not refused",
        "ftkit/hf/preparation.py",
        "    refuse_empty_answers(reports)\n",
        "",
        "tests/hf/test_faults.py::test_answers_that_are_all_empty_are_refused",
    ),
    _fault(
        "rows get into the page of a preview as markup",
        "ftkit/report/data_page.py",
        "    text = escaped(visible(piece.text))",
        "    text = visible(piece.text)",
        "tests/test_data_preview.py::test_hostile_rows_stay_text",
    ),
    _fault(
        "ranks share the weights and all train on the same rows",
        "ftkit/hf/accelerator.py",
        "            if comm.world_size != self.num_processes:",
        "            if comm.world_size < self.num_processes:",
        "tests/hf/test_accelerator.py::test_ranks_that_would_all_train_on_the_same_rows_are_refused",
    ),
    _fault(
        "the preview shows what is read as trained on",
        "ftkit/hf/shown.py",
        "[label != IGNORED_LABEL for label in labels]",
        "[label is not None for label in labels]",
        "tests/test_data_preview.py::test_rows_are_shown_as_they_are_trained_on",
    ),
    _fault(
        "a rank that computes in a collective is taken for one that hangs",
        "ftkit/notebook/hang.py",
        "return self.cpu_now_s - self.cpu_s <= IDLE_SHARE * max(self.seen_s - self.since_s, 1.0)",
        "return True",
        "tests/notebook/test_hang.py::test_it_is_none_before_the_limit_and_where_something_goes_on",
    ),
    _fault(
        "ranks are ended because one waits while another sleeps",
        "ftkit/notebook/hang.py",
        "if not waiting or len(waiting) < len(running) or len(running) + len(ended) < 2:",
        "if not waiting or len(running) + len(ended) < 2:",
        "tests/notebook/test_hang.py::test_a_rank_that_waits_while_another_is_elsewhere_is_a_doubt_and_no_hang",
    ),
    _fault(
        "a cell's style reaches the whole notebook",
        "ftkit/report/style.py",
        "f\"{','.join(f'{root} {each}' for each in selectors.split(','))}{{{body}}}\"",
        'f"{selectors}{{{body}}}"',
        "tests/notebook/test_live.py::test_its_style_reaches_nothing_else_on_the_page",
    ),
    _fault(
        "workers outlive a kernel whose forked child holds their sockets",
        "ftkit/notebook/worker.py",
        "if os.getppid() != self.kernel:",
        "if os.getppid() < 0:",
        "tests/notebook/test_lost.py::test_workers_end_with_the_kernel_however_it_ends[killed]",
    ),
    _fault(
        "held weights are used after they were updated",
        "ftkit/engine/shard.py",
        "            if self.held_since != self.transfer.updates:\n",
        "            if self.held_since > self.transfer.updates:\n",
        "tests/engine/test_holding.py::test_training_on_held_weights_is_refused[step-while they are held]",
    ),
    _fault(
        "a prompt draws by its place in its rank's list, not in the whole one",
        "ftkit/hf/generation.py",
        "draw = sampling.draw([numbers[row] for row in rows])",
        "draw = sampling.draw(list(rows))",
        "tests/hf/test_generation.py::test_a_prompt_draws_from_its_own_stream",
    ),
    _fault(
        "batches are cut of what a rank was dealt: padding, and with it rounding, depends on the number of ranks",
        "ftkit/hf/generation.py",
        "    mine = [number for batch in batches[rank::ranks] for number in batch]",
        "    mine = order[rank::ranks]",
        "tests/hf/test_generation.py::test_batches_are_the_same_on_any_number_of_ranks",
    ),
    _fault(
        "evaluation counts the first label of a causal model, which nothing predicts",
        "ftkit/hf/evaluation.py",
        "        counted = (labels[:, 1:] != IGNORED_LABEL).sum()\n",
        "        counted = (labels != IGNORED_LABEL).sum()\n",
        "tests/hf/test_evaluation.py::test_loss_and_perplexity_are_exact[(3, 'llama', {}, 2, True, 11)]",
    ),
)
