"""What a user writes, read and checked: recipes, YAML with line numbers, environment variables. It knows no torch."""
