"""Faults of the loss: how it scales, weights of ranks and micro-batches, the probe, random numbers."""

from __future__ import annotations

from tests.mutants.fault import fault

_SCALING = "tests/hf/test_loss_scaling.py::"
_RANKS = _SCALING + "test_the_loss_of_two_ranks_is_that_of_one"
_CASES = "tests/hf/test_loss_cases.py::test_a_users_loss_on_two_ranks_is_that_of_one"

FAULTS = (
    fault(
        "loss: a sum is taken for a mean of ranks",
        "ftkit/hf/trainer/loss.py",
        "            return counts, [1.0] * len(batches)\n",
        "            return counts, [float(comm.world_size)] * len(batches)\n",
        _RANKS + "[sum]",
    ),
    fault(
        "loss: a rank whose last batch is all repeated counts like the others",
        "ftkit/hf/trainer/loss.py",
        "        counts[-1] = 0.0 if empty else counts[-1]\n",
        "",
        _RANKS + "[rows]",
    ),
    fault(
        "loss: label tokens are weighted by rows",
        "ftkit/hf/trainer/loss.py",
        "        elif kind == ROWS:\n",
        "        elif True:\n",
        _RANKS + "[tokens]",
    ),
    fault(
        "loss: the probe moves a model's statistics",
        "ftkit/hf/trainer/loss.py",
        "            stack.enter_context(evaluating(trainer.model))\n",
        "",
        _SCALING + "test_the_probe_leaves_statistics_and_random_numbers_alone",
    ),
    fault(
        "loss: the probe draws random numbers of the run",
        "ftkit/hf/trainer/loss.py",
        "            stack.enter_context(seeded(trainer.accelerator.device, STEPS, trainer.args.seed))\n",
        "",
        _SCALING + "test_the_probe_leaves_statistics_and_random_numbers_alone",
    ),
    fault(
        "loss: no loss reacts to the count",
        "ftkit/hf/trainer/loss.py",
        "kind = COUNTED if self._reacts_to_count(batch) else kind",
        "pass",
        _RANKS + "[users counted]",
    ),
    fault(
        "loss: micro-batches are seeded by their number on the rank",
        "ftkit/hf/trainer/trainer.py",
        "number * self.accelerator.num_processes + self.accelerator.process_index",
        "number",
        _SCALING + "test_random_numbers_do_not_depend_on_the_number_of_ranks[noise]",
    ),
    fault(
        "loss: a resumed run draws the masks of the epoch's first batches again",
        "ftkit/hf/trainer/trainer.py",
        'kwargs["steps_trained_in_current_epoch"] if skips else 0',
        "0",
        _SCALING + "test_masks_go_on_where_they_were_after_a_resume",
    ),
    fault(
        "loss: samples that fill up a dispatched batch count",
        "ftkit/hf/trainer/loss.py",
        "        return int(loader.remainder) if 0 < loader.remainder < rows * ranks else 0\n",
        "        return 0\n",
        _CASES + "[dispatched]",
    ),
    fault(
        "loss: each rank is given the count of all",
        "ftkit/hf/trainer/loss.py",
        "return count / self.trainer.engine.comm.world_size if self.kind == COUNTED else count",
        "return count",
        _CASES + "[function with a part]",
    ),
    fault(
        "loss: the Trainer multiplies a counted loss by the ranks",
        "ftkit/hf/trainer/loss.py",
        "return self.trainer.accelerator.with_num_processes(1) if self.takes_count else nullcontext()",
        "return nullcontext()",
        _CASES + "[a part and a penalty]",
    ),
    fault(
        "loss: a batch without labels counts in an evaluation",
        "ftkit/hf/trainer/loss.py",
        "        labelled = self._has_labels(batch)\n",
        "        labelled = True\n",
        _SCALING + "test_rows_without_labels_do_not_count_in_an_evaluation[2-off]",
    ),
)
