"""Models and adapters written as Hugging Face folders."""
