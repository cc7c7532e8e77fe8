"""What the commands share: the exit codes of errors. Only commands import it."""
