"""One fine-tuning run from a recipe: its rows, trainer, callbacks, output folder and summary."""
