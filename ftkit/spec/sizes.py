"""Sizes of the engine's buffers. The engine allocates them, and the plan counts them."""

from __future__ import annotations

from typing import Final

ALIGNMENT_BYTES: Final = 256
"""Flat parameters in a slot begin at multiples of this, as allocations of CUDA do."""

READ_AHEAD_BUFFERS: Final = 3
"""Units whose weights are in host memory while they are read from NVMe: the one being gathered, and the next two."""

OFFLOAD_BUFFERS: Final = 2
"""Host buffers of gradient offload, each as wide as the widest gradient shard."""

UPDATE_SLOTS: Final = 6
"""Pieces of an update in progress: one is computed, the others are read ahead or written behind."""

CUDA_PIECE_NUMEL: Final = 1 << 24
"""Elements updated at a time on a GPU: bounds the fp32 copy of the gradient to 64 MiB."""

REFERENCE_NUMEL: Final = CUDA_PIECE_NUMEL // 4
"""Elements that PyTorch operations update at a time: up to four fp32 tensors of them take 64 MiB."""

CONVERTED_NUMEL: Final = CUDA_PIECE_NUMEL // 16
"""Elements of smaller forms of state that PyTorch operations update at a time: up to 60 bytes of each take 64 MiB."""

PIECE_NUMEL: Final = 1 << 20
"""Elements that a shard in a file is processed at a time."""

STAGING: Final = 4
"""Host buffers of activations between the device and files."""

LEAVING: Final = 2
"""Activations on the device that are being copied to the host. When one more leaves, the computing stream waits for the
oldest copy. As many come back at once."""

PIECE_BYTES: Final = 8 << 20
"""Bytes of a file that are read, converted or written at a time."""

STAGE_BYTES: Final = 4 << 20
"""Bytes of one buffer of CPU collectives: large enough that a barrier costs little beside the copy."""

CHUNK_BYTES: Final = 128 << 20
"""Bytes of the logits that exist at once in a chunked loss: enough for matrix products at full rate."""
