"""Faults of 8-bit moments and of split master weights: the reference, the loops of the host, and the kernels."""

from __future__ import annotations

from tests.mutants.fault import fault

_REFERENCE = "ftkit/engine/optim/coding.py"
_LOOPS = "ftkit/engine/kernels/numba_coded.py"
_KERNELS = "triton_kernels/adamw_8bit.py"
_CODING = "tests/engine/test_coding.py::"
_BITS = _CODING + "test_loops_give_the_bits_of_plain_pytorch"
_CODED = "tests/kernels/test_coded.py::"
_KERNEL_BITS = _CODED + "test_kernels_give_the_bits_of_plain_pytorch"
_CUBINS = "tests/test_cubins.py::test_a_cubin_comes_out[adamw_8bit, fp32 master, fp16 weight-70]"

FAULTS = (
    fault(
        "a value halfway between two codes is rounded down in the reference",
        _REFERENCE,
        "limits, right=True)",
        "limits)",
        _CODING + "test_every_limit_rounds_up_and_every_value_is_its_own",
    ),
    fault(
        "values of codes are evenly spaced in the logarithm",
        _REFERENCE,
        "* 2**octave * (1 + octaves - octave))",
        "* 2**octaves)",
        _CODING + "test_values_and_limits_are_those_of_the_formula",
    ),
    fault(
        "residuals of fp16 are not halved below a power of two in the reference",
        _REFERENCE,
        "left // 2, left)",
        "left, left)",
        _CODING + "test_split_of_random_and_of_edge_masters[torch.float16]",
    ),
    fault(
        "codes are rounded down",
        _LOOPS,
        "F32(0.5)), I32)",
        "F32(1.0)), I32)",
        _CODING + "test_every_limit_rounds_up_and_every_value_is_its_own",
    ),
    fault(
        "a negative zero keeps its sign in a code",
        _LOOPS,
        "place = builder.select(zero, place, builder.or_(place, sign))",
        "place = builder.or_(place, sign)",
        _CODING + "test_every_limit_rounds_up_and_every_value_is_its_own",
    ),
    fault(
        "groups so small that their values underflow keep a scale",
        _LOOPS,
        "2.0**-98",
        "2.0**-126",
        _CODING + "test_groups_of_all_magnitudes_and_small_ones_become_zero",
    ),
    fault(
        "the largest magnitude misses negative numbers",
        _LOOPS,
        "        found = _emit_size(builder, arguments[1])\n",
        "        found = builder.bitcast(arguments[1], I32)\n",
        _CODING + "test_groups_of_all_magnitudes_and_small_ones_become_zero",
    ),
    fault(
        "a NaN with all bits set becomes -0 in bf16",
        _LOOPS,
        'builder.icmp_signed("<", upper, I32(0x7FC0)), upper, I32(0x7FC0))',
        'builder.icmp_signed("<", upper, I32(0x7FC0)), upper, upper)',
        _CODING + "test_masters_that_are_not_finite_give_weights_that_are_not",
    ),
    fault(
        "fp16 weights of a split are rounded to nearest even",
        _LOOPS,
        "builder.bitcast(value, I32), I32(1))",
        "builder.bitcast(value, I32), I32(0))",
        _CODING + "test_split_of_random_and_of_edge_masters[torch.float16]",
    ),
    fault(
        "small masters are not rounded before the split to fp16",
        _LOOPS,
        "least), fine, value)",
        "least), value, value)",
        _CODING + "test_split_of_random_and_of_edge_masters[torch.float16]",
    ),
    fault(
        "residuals of subnormal fp16 weights have the unit of normal numbers",
        _LOOPS,
        'builder.icmp_signed(">", size, I32(113 << 23)), size, I32(113 << 23))',
        'builder.icmp_signed(">", size, I32(113 << 23)), size, size)',
        _CODING + "test_every_weight_with_residuals_comes_back[torch.float16]",
    ),
    fault(
        "a joined bf16 master loses its sign",
        _LOOPS,
        "builder.or_(size, sign)",
        "size",
        _CODING + "test_every_weight_with_residuals_comes_back[torch.bfloat16]",
    ),
    fault(
        "the square of the gradient is multiplied in another order",
        _LOOPS,
        "fresh2 * (g * g)",
        "fresh2 * g * g",
        _BITS + "[adamw_8bit-none-torch.float32]",
    ),
    fault(
        "Lion's direction has the rate of its moment",
        _LOOPS,
        "c = a * beta1 + fresh1 * g",
        "c = a * beta2 + fresh2 * g",
        _BITS + "[lion_8bit-none-torch.float32]",
    ),
    fault(
        "threads take scales from the other end",
        "ftkit/engine/kernels/host_loops.py",
        "array[start * array.size // n : stop * array.size // n]",
        "array[start:stop] if array.size == n else array[(n - stop) // 128 : (n - start) // 128]",
        _CODING + "test_the_number_of_threads_changes_no_bit",
    ),
    fault(
        "the kernel rounds split bf16 weights down",
        _KERNELS,
        "(size + 0x8000) & 0x7FFF0000",
        "size & 0x7FFF0000",
        _KERNEL_BITS + "[lion_8bit-split bfloat16-torch.float32]",
    ),
    fault(
        "the kernel reads subnormal fp16 weights with the unit of normal ones",
        _KERNELS,
        "tl.maximum(size, _FP16_LEAST)",
        "size",
        _KERNEL_BITS + "[lion_8bit-split float16-torch.float32]",
    ),
    fault(
        "the kernel keeps the sign of a zero in a code",
        _KERNELS,
        "tl.where(place == 0, 0, place | ((_bits(x) >> 24) & 0x80))",
        "place | ((_bits(x) >> 24) & 0x80)",
        _KERNEL_BITS + "[lion_8bit-none-torch.float32]",
    ),
    fault(
        "the last groups of a shard are not updated by the kernel",
        _KERNELS,
        "(triton.cdiv(groups, GROUPS),)",
        "(groups // GROUPS,)",
        _KERNEL_BITS + "[lion_8bit-none-torch.float32]",
    ),
    fault(
        "the 8-bit kernels are compiled with fused multiply-adds",
        "benchmarks/specimens.py",
        "options(specimen.warps, specimen.fused)",
        "options(specimen.warps)",
        _CUBINS,
    ),
    fault(
        "the 8-bit kernel divides approximately",
        _KERNELS,
        "tl.div_rn(size, root)",
        "(size / root)",
        _CUBINS,
    ),
)
