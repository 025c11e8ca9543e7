"""Faults in 8-bit moments and the split master."""

from __future__ import annotations

from tests.mutants.fault import Fault, fault

_STATE = "tests/engine/test_coded_state.py::"
_ONE_PROCESS = _STATE + "test_the_state_is_that_of_one_process"
_RESUMED = _STATE + "test_a_resume_on_other_ranks_and_another_tier_changes_nothing"

FAULTS: tuple[Fault, ...] = (
    fault(
        "a piece takes the scales of the first one",
        "ftkit/engine/optim/state_stores.py",
        "        skipped = max(first - self.start, 0) // self.per\n",
        "        skipped = 0 if self.per == 1 else max(first - self.start, 0) // self.per + 1\n",
        _ONE_PROCESS,
    ),
    fault(
        "tensors that are coded do not come first",
        "ftkit/engine/core/partition.py",
        '        if group.kind == "block" and group.trained:\n',
        "        if False:\n",
        _ONE_PROCESS,
    ),
    fault(
        "a split master reads no weights from NVMe",
        "ftkit/engine/optim/flat_step.py",
        "        return whole and not isinstance(self.state.master, SplitMaster)\n",
        "        return whole\n",
        _ONE_PROCESS,
    ),
    fault(
        "every tensor of a block is coded",
        "ftkit/engine/optim/flat_step.py",
        "        run = Run(start, span.stop - base, group, step, span.start < coded_numel)\n",
        "        run = Run(start, span.stop - base, group, step, coded_numel > 0)\n",
        _ONE_PROCESS,
    ),
    fault(
        "roots are loaded as second moments",
        "ftkit/engine/checkpoint/loading.py",
        "root=kinds[0] in optimizer.rule.roots",
        "root=False",
        _RESUMED,
    ),
    fault(
        "a rank writes its scales at the place of its codes",
        "ftkit/engine/checkpoint/saving.py",
        "(first - part.start) // part.per * part.dtype.itemsize",
        "(first - part.start) * part.dtype.itemsize",
        _RESUMED,
    ),
    fault(
        "moments are converted without being asked",
        "ftkit/engine/checkpoint/loading.py",
        "    if kind != own_kind and coded and not optimizer.units.strategy.convert_state:\n",
        "    if False:\n",
        _STATE + "test_moments_are_converted_only_when_asked",
    ),
    fault(
        "a weight of a split master loses its residual in a step",
        "ftkit/engine/optim/optimizer.py",
        '            coder.split(master, weight, part["residual"])\n',
        "            weight.copy_(master)\n",
        _STATE + "test_a_split_master_trains_as_an_fp32_master",
    ),
    fault(
        "a rank that begins inside a group takes the scale of the one before",
        "ftkit/engine/checkpoint/reader.py",
        "[start - first * GROUP_NUMEL :][: out.numel()]",
        "[: out.numel()]",
        _STATE + "test_a_matrix_that_is_in_no_block_any_more_keeps_its_moments",
    ),
    fault(
        "a save reads less than whole pages of codes",
        "ftkit/engine/checkpoint/saving.py",
        "min(low + PIECE_NUMEL, self.flat.layout.shard_numel))  # whole pages",
        "stop)",
        _RESUMED,
    ),
    fault(
        "the plan counts codes as fp32",
        "ftkit/plan/state.py",
        'StateStore(f"{name}.codes", found.codes, 1)',
        'StateStore(f"{name}.codes", found.codes)',
        "tests/plan/test_live_bytes.py::test_other_forms_of_the_state",
    ),
)
