"""Faults of the loss: how it scales, weights of ranks and micro-batches, trials, random numbers."""

from __future__ import annotations

from tests.mutants.fault import fault

_SCALING = "tests/hf/test_loss_scaling.py::"
_RANKS = _SCALING + "test_the_loss_of_two_ranks_is_that_of_one"
_CASES = "tests/hf/test_loss_cases.py::test_a_users_loss_on_two_ranks_is_that_of_one"

FAULTS = (
    fault(
        "loss: a sum is taken for a mean of ranks",
        "ftkit/hf/trainer/loss.py",
        "            self._weights = [0.0 if empty and each is last else given * ranks for each in batches]\n",
        "            self._weights = [given for each in batches]\n",
        _RANKS + "[sum]",
    ),
    fault(
        "loss: a rank whose last batch is all repeated counts like the others",
        "ftkit/hf/trainer/loss.py",
        "            counts[-1] = 0 if empty else counts[-1]\n",
        "",
        _RANKS + "[rows]",
    ),
    fault(
        "loss: label tokens are weighted by rows",
        "ftkit/hf/trainer/loss_scaling.py",
        "        if self.kind == TOKENS:\n",
        "        if self.kind == COUNTED:\n",
        _RANKS + "[tokens]",
    ),
    fault(
        "loss: buffers stay as a trial left them",
        "ftkit/hf/trainer/untouched.py",
        "                buffer.copy_(content)\n",
        "                pass\n",
        _SCALING + "test_a_trial_leaves_statistics_counters_and_random_numbers_alone[2]",
    ),
    fault(
        "loss: micro-batches are seeded by their number on the rank",
        "ftkit/hf/trainer/loss.py",
        "number * self.accelerator.num_processes + self.accelerator.process_index",
        "number",
        _SCALING + "test_random_numbers_do_not_depend_on_the_number_of_ranks[noise]",
    ),
    fault(
        "loss: a resumed run draws the masks of the epoch's first batches again",
        "ftkit/hf/trainer/loss.py",
        "            self._collator.begin(epoch, skipped)\n",
        "            self._collator.begin(epoch)\n",
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
        "loss: what does not depend on the count is multiplied by the ranks",
        "ftkit/hf/trainer/loss_scaling.py",
        "            return True, not partly, partly  # a part's loss is computed where one rank is told\n",
        "            return True, True, False\n",
        _CASES + "[function with a part]",
    ),
    fault(
        "loss: a part of a loss is multiplied as if it were counted",
        "ftkit/hf/trainer/loss.py",
        "self.accelerator.telling_ranks(1) if self._partly else nullcontext()",
        "nullcontext()",
        _CASES + "[a part and a penalty]",
    ),
    fault(
        "loss: the penalty of an adapter counts once a rank",
        "ftkit/hf/trainer/loss.py",
        "            return Scaling(COUNTED, multiplied=averaged and not added, partly=averaged and added)\n",
        "            return Scaling(COUNTED, multiplied=averaged)\n",
        "tests/hf/test_peft.py::test_other_adapters[adaptive]",
    ),
    fault(
        "loss: in evaluation a part of a loss goes with the whole count",
        "ftkit/hf/trainer/loss.py",
        "        return count / self.accelerator.sharded(self.model).comm.world_size\n",
        "        return count\n",
        _CASES + "[own with a part]",
    ),
)
