"""What a user writes, read and checked: recipes, YAML with line numbers. It knows no torch."""
