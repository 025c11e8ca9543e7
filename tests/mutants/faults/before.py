"""Faults of what comes between `load_model` and `shard`."""

from __future__ import annotations

from tests.mutants.fault import fault

_KEPT = "tests/hf/test_before_sharding.py::test_what_is_done_before_sharding_is_kept"
_NAMES = "tests/hf/test_adapter_targets.py::test_a_name_that_matches_nothing_stops"

FAULTS = (
    fault(
        "what was written in place is read from the file again",
        "ftkit/hf/weights/sources.py",
        "    changed = written(stored.values())\n",
        "    changed = set[int]()\n",
        _KEPT + "[written_in_place]",
    ),
    fault(
        "values stay as each rank drew them",
        "ftkit/hf/weights/agreement.py",
        "        tensor.copy_(value)\n",
        "",
        "tests/hf/test_before_sharding.py::test_of_values_that_ranks_drew_differently_rank_0s_count",
    ),
    fault(
        "a write to a parameter on meta is not seen",
        "ftkit/hf/weights/sources.py",
        "parameter._version != made[id(parameter)][1]",
        "parameter._version < made[id(parameter)][1]",
        "tests/hf/test_adapter_targets.py::test_a_change_that_the_meta_device_does_not_keep_is_refused_by_name",
    ),
    fault(
        "one matching target is enough",
        "ftkit/hf/models/adapter_targets.py",
        '    _each(model, "target_modules", asked["target_modules"], modules, _is_target)\n',
        "",
        _NAMES + "[a target beside good ones]",
    ),
    fault(
        "a model that could not be sharded is left without its values",
        "ftkit/hf/weights/sources.py",
        "                parameter.data = value\n",
        "                pass\n",
        "tests/hf/test_adapter_targets.py::test_a_model_that_could_not_be_sharded_keeps_its_values",
    ),
    fault(
        "parameters that share memory become two shards",
        "ftkit/hf/weights/own_memory.py",
        "            if parameter.requires_grad or last[1].requires_grad:\n",
        "            if False:\n",
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
        "a merged adapter trains, and nothing changes",
        "ftkit/hf/sharding.py",
        "    refuse_merged(model)\n",
        "",
        "tests/hf/test_own_memory.py::test_a_merged_adapter_would_train_nothing",
    ),
    fault(
        "a fused MLP passes over a hook on its activation",
        "ftkit/hf/models/fusing.py",
        "        if has_hooks(each):\n",
        "        if False:\n",
        "tests/hf/test_fusing.py::test_what_a_proof_does_not_see_is_left_alone_and_told[hooked]",
    ),
    fault(
        "an exchanged MLP reads a weight that is computed at each read",
        "ftkit/hf/models/fusing.py",
        "    if weighed is not None and not _has_weight(",
        "    if False and not _has_weight(",
        "tests/hf/test_fusing.py::test_what_a_proof_does_not_see_is_left_alone_and_told[computed_weight]",
    ),
    fault(
        "a chunked loss passes over a user's hook on the head",
        "ftkit/hf/models/head.py",
        "    if head is not None and (hooks_on(head, AFTER, READERS) ",
        "    if head is not None and (False ",
        "tests/hf/test_head.py::test_a_users_hook_around_the_head_gets_logits_before_the_proof_and_after[halved]",
    ),
    fault(
        "a view of a trained weight goes on with its values from before",
        "ftkit/hf/weights/own_memory.py",
        "    refuse_aliases(model, {",
        "    refuse_aliases(nn.Module(), {",
        "tests/hf/test_own_memory.py::test_what_cannot_be_kept_is_refused_by_name",
    ),
    fault(
        "a cast to the dtype of the file is forgotten",
        "ftkit/hf/weights/sources.py",
        "            place = replace(place, dtype=parameter.dtype)\n",
        "            pass\n",
        "tests/hf/test_loading.py::test_a_cast_to_the_dtype_of_the_file_is_seen[cast_whole-30]",
    ),
)
