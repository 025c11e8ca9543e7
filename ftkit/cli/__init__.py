"""Commands of ftkit, one file per group."""
