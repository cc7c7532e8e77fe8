"""What the commands share: settings, `--help`, error messages, exit codes. Only commands import it."""
