"""Faults of what comes between `load_model` and `shard`."""

from __future__ import annotations

from tests.mutants.fault import fault

_KEPT = "tests/hf/test_before_sharding.py::test_what_is_done_before_sharding_is_kept"
_NAMES = "tests/hf/test_adapters.py::test_a_name_that_matches_nothing_stops"

FAULTS = (
    fault(
        "what was written in place is read from the file again",
        "ftkit/hf/load/sources.py",
        "        if place.is_written() or",
        "        if",
        _KEPT + "[lora olora]",
    ),
    fault(
        "values stay as each rank drew them",
        "ftkit/hf/load/sources.py",
        "        data.copy_(value)\n",
        "",
        "tests/hf/test_before_sharding.py::test_of_values_that_ranks_drew_differently_rank_0s_count",
    ),
    fault(
        "a write to a parameter on meta is not seen",
        "ftkit/hf/load/sources.py",
        "parameter._version > made[id(parameter)]",
        "parameter._version < made[id(parameter)]",
        "tests/hf/test_adapters.py::test_a_change_that_the_meta_device_does_not_keep_is_refused_by_name",
    ),
    fault(
        "one matching target is enough",
        "ftkit/hf/adapters.py",
        '(("target_modules", "."), ("modules_to_save", ""))',
        '(("modules_to_save", ""),)',
        _NAMES + "[a target beside good ones]",
    ),
    fault(
        "a model that could not be sharded is left without its values",
        "ftkit/hf/load/sources.py",
        "            parameter.data = value\n",
        "            pass\n",
        "tests/hf/test_adapters.py::test_a_model_that_could_not_be_sharded_keeps_its_values",
    ),
    fault(
        "parameters that share memory become two shards",
        "ftkit/hf/load/sources.py",
        "        if owner is not parameter and parameter.requires_grad",
        "        if False and parameter.requires_grad",
        "tests/hf/test_own_memory.py::test_what_cannot_be_kept_is_refused_by_name",
    ),
    fault(
        "a user's hook on the gradient of an embedding is never called",
        "ftkit/engine/core/root_parameters.py",
        "            gathered.register_hook(hook)\n",
        "            pass\n",
        "tests/hf/test_own_memory.py::test_hooks_on_gradients_are_called_at_stage_3",
    ),
    fault(
        "a fused MLP passes over a hook on its activation",
        "ftkit/hf/kernels/fuse.py",
        " and not others[0]._forward_hooks:",
        ":",
        "tests/hf/test_fusing.py::test_a_hook_on_an_activation_is_still_called",
    ),
    fault(
        "a chunked loss passes over a user's hook on the head",
        "ftkit/hf/kernels/head.py",
        "    around = (model, base_of(model), head)\n",
        "    around = (model, base_of(model))\n",
        "tests/hf/test_head.py::test_a_users_hook_around_the_head_gets_logits_before_the_proof_and_after[halved]",
    ),
    fault(
        "the files of a base draw trained adapters anew",
        "ftkit/hf/load/model.py",
        "    wanted = set(_shapes(units)) - adapter_parameters(units.model, copies=True)\n",
        "    wanted = set(_shapes(units))\n",
        "tests/hf/test_loading.py::test_the_files_of_a_base_leave_adapters_unchanged",
    ),
)
