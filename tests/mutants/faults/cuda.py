"""Faults of the CUDA path: devices of threads, attention kernels and their workspace."""

from __future__ import annotations

from tests.mutants.fault import fault

_LAUNCHES = "tests/hf/test_attention_launches.py::"
_PLANNED = "tests/plan/test_attention.py::"
_THREADS = "tests/engine/test_streams.py::"

FAULTS = (
    fault(
        "workers of a rank create a context on GPU 0",
        "ftkit/engine/streams.py",
        "ThreadPoolExecutor(1, name, initializer=self.enter_thread)",
        "ThreadPoolExecutor(1, name)",
        _THREADS + "test_workers_of_tiers_begin_on_the_ranks_device",
    ),
    fault(
        "a wait goes to the current device's stream and not to the rank's",
        "ftkit/engine/streams.py",
        "torch.cuda.current_stream(self.device).wait_event(self.event)",
        "torch.cuda.current_stream().wait_event(self.event)",
        _THREADS + "test_an_event_belongs_to_its_own_device",
    ),
    fault(
        "NCCL rounds a third to 16 bits",
        "ftkit/engine/comm/communicator.py",
        "nccl and self.world_size & (self.world_size - 1) == 0",
        "nccl",
        "tests/engine/test_comm.py::test_nccl_averages_where_that_is_exact",
    ),
    fault(
        "a small activation takes the place of a large one",
        "ftkit/engine/core/activation_offload.py",
        "place = min(fitting",
        "place = max(fitting",
        "tests/engine/test_activation_offload.py::test_a_tensor_takes_the_smallest_place_that_fits",
    ),
    fault(
        "a launch over packed samples counts them as long as the row",
        "ftkit/hf/kernels/varlen.py",
        "longest = max(b - a for a, b in pairwise(cuts[first : last + 1]))",
        "longest = row_tokens",
        _LAUNCHES + "test_a_row_of_short_samples_takes_no_more_than_one_of_long_ones",
    ),
    fault(
        "gradients of a later launch are lost",
        "ftkit/hf/kernels/varlen.py",
        "whole[start : start + len(part)] = part",
        "whole[: len(part)] = part",
        _LAUNCHES + "test_launches_compute_what_the_loop_does",
    ),
    fault(
        "a launch takes one sample too many",
        "ftkit/hf/kernels/varlen.py",
        "if number > first and launch_tokens(number + 1 - first, widest) > limit:",
        "if number > first and launch_tokens(number - first, widest) > limit:",
        _PLANNED + "test_samples_that_one_launch_takes",
        _PLANNED + "test_no_launch_takes_more_than_the_plan_counts",
    ),
    fault(
        "the plan leaves out the fp32 copies of a V100's delta",
        "ftkit/plan/attention.py",
        "copies = 3 * 4 * rows",
        "copies = 0 * rows",
        _PLANNED + "test_fp32_has_copies_of_the_output",
    ),
    fault(
        "grouped keys go to the math kernel of a V100",
        "ftkit/hf/kernels/attention.py",
        "key, value = repeat_kv(key, groups), repeat_kv(value, groups)\n        owner",
        "owner",
        _LAUNCHES + "test_grouped_keys_are_repeated_where_torch_has_no_kernel_for_them",
    ),
    fault(
        "models of the stock Trainer keep their grouped keys",
        "ftkit/hf/kernels/attention.py",
        "    model.set_attn_implementation(REPEATED)\n",
        "",
        _LAUNCHES + "test_models_of_the_stock_trainer_repeat_them_too",
    ),
    fault(
        "the plan counts no workspace of attention",
        "ftkit/plan/memory.py",
        "max(graph * part // whole, needed)",
        "graph * part // whole",
        _PLANNED + "test_the_plan_of_a_gpu_counts_the_workspace",
    ),
)
