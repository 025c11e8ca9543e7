"""The Hugging Face side: Trainer, Accelerator, models and their weights on the engine."""
