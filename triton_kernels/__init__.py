"""Fused Triton kernels, one operation a file: reference, kernel, autograd function, public function. None yet."""
