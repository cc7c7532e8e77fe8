"""What the commands share: composing the command line, error messages, exit codes. Only commands import it."""
