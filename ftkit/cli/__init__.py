"""The commands of ftkit, one file for what each of them does."""
