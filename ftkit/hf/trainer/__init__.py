"""`Trainer`, `TrainingArguments` and `Accelerator`, and what they need of a run."""
