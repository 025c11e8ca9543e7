"""Fused kernels in Hugging Face models: norms, MLPs, rotary embeddings, packed attention, the loss."""
