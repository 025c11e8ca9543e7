"""What ftkit knows of Hugging Face models: blocks, adapters, fused modules, fp32 modules, attention, the head."""
