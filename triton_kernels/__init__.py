"""Fused Triton kernels, one operation a file: reference, kernel, autograd function, public function.

    rms_norm                RMSNorm, with the residual addition
    gated                   SwiGLU, GeGLU
    cross_entropy           of logits, in their place
    linear_cross_entropy    of a head's outputs, of which only a chunk exists

They know torch and Triton only, multiply no matrices themselves, and are plain PyTorch where there is no GPU. No model uses
them yet.
"""
