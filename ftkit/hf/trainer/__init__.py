"""`Trainer`, `TrainingArguments` and `Accelerator`, with the loss, seeds and checkpoints of a run."""
