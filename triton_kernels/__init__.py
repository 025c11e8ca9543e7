"""Fused Triton kernels, one operation a file: reference, kernel, autograd function, public function.

    rms_norm                RMSNorm, with the residual addition
    layer_norm              LayerNorm
    rotary                  rotary embedding of queries and keys
    activation              SiLU, GELU, ReLU, with the bias before them
    gated                   SwiGLU, GeGLU
    cross_entropy           of logits, in their place
    linear_cross_entropy    of a head's outputs, of which only a chunk exists
    adamw                   the update of a shard on a device
    squared_norm            of a gradient, with the check for non-finite values

They know torch and Triton only, multiply no matrices themselves, and are plain PyTorch where there is no GPU.
ftkit.hf.kernels.fuse replaces a model's modules by them, ftkit.hf.kernels.head its loss, and ftkit.hf.kernels.flat the loops
of the optimizer.
"""
