"""ftkit's own ZeRO engine. It knows torch only."""
