"""What the commands share: settings, `--help`, and the exit codes of errors. Only commands import it."""
