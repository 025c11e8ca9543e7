"""What the plan knows of a model and of the memory of a machine."""
