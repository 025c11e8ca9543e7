"""Faults of what comes between `load_model` and `shard`."""

from __future__ import annotations

from tests.mutants.fault import fault

_KEPT = "tests/hf/test_before_sharding.py::test_what_is_done_before_sharding_is_kept"
_NAMES = "tests/hf/test_adapters.py::test_a_name_that_matches_nothing_stops"

FAULTS = (
    fault(
        "what was written in place is read from the file again",
        "ftkit/hf/load/sources.py",
        "parameters[name].dim() == 0 or place.is_written()}",
        "parameters[name].dim() == 0}",
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
        "an adapter on meta above a folder's weights is initialised as the base is",
        "ftkit/hf/load/sources.py",
        "    if names and all(source.files for source in _sources(model)):\n",
        "    if False:\n",
        "tests/hf/test_adapters.py::test_an_adapter_without_values_is_refused_by_name",
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
        "        for parameter, value, _ in settled.streamed:\n",
        "        for parameter, value, _ in ():\n",
        "tests/hf/test_adapters.py::test_a_model_that_could_not_be_sharded_keeps_its_values",
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
        " and not _has_hooks(others[0]):",
        ":",
        "tests/hf/test_fusing.py::test_an_mlp_whose_activation_has_a_hook_is_left_alone",
    ),
    fault(
        "a fused MLP draws no random numbers where its original does",
        "ftkit/hf/kernels/probes.py",
        "if not torch.equal(state, torch.get_rng_state()):",
        "if False:",
        "tests/hf/test_fusing.py::test_what_does_not_agree_is_left_alone_and_reported",
    ),
    fault(
        "a fp32 module casts only what comes by position",
        "ftkit/hf/fp16/modules.py",
        "if not args:  # called by keyword",
        "if False:",
        "tests/hf/test_fp32_modules.py::test_an_fp32_module_that_is_called_by_keyword",
    ),
    fault(
        "a finite weight hides a NaN before it",
        "ftkit/hf/save/finite.py",
        "if math.isfinite(self.refused.get(name, 0.0)) and not is_finite(cast):",
        "if not is_finite(cast):",
        "tests/hf/test_nonfinite.py::test_a_nan_is_named_before_a_weight_beyond_fp16",
    ),
    fault(
        "a callback of TRL reads weights of before a deferred update",
        "ftkit/hf/trainer/trainer.py",
        '<= {"ftkit", "transformers"} and',
        "<= set(DEFERRING) and",
        "tests/hf/test_callbacks.py::test_code_that_may_read_weights_before_a_forward_gets_updates_in_the_step",
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
        "    wanted = _shapes(units).keys() - adapter_parameters(units.model, copies=True)\n",
        "    wanted = _shapes(units).keys()\n",
        "tests/hf/test_loading.py::test_the_files_of_a_base_leave_adapters_unchanged",
    ),
)
