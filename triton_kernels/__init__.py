"""Fused Triton kernels. Each file has one operation: PyTorch reference, kernel, autograd function and public function.

    rms_norm                RMSNorm
    rotary                  rotary embedding of queries and keys
    gated                   SwiGLU, GeGLU and their relatives
    cross_entropy           losses of logits; the gradient overwrites the logits
    linear_cross_entropy    losses of a head's inputs, with a chunk of the logits at a time
    adamw                   AdamW update of a shard
    adamw_8bit              AdamW and Lion updates of a shard with 8-bit moments
    squared_norm            sum of squares of a gradient, with a check for non-finite values

The package imports torch and Triton only. Matrix products stay in PyTorch. Without a GPU, each public function computes its
reference; that of adamw_8bit is ftkit.engine.optim.coding, and the caller chooses it. ftkit.hf.kernels replaces submodules,
the loss and the optimizer's loops by these functions.
"""
