"""Read and check what the user writes: recipes, in YAML, with line numbers in errors. Imports no torch."""
