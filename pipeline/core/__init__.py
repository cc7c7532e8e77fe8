"""What every package uses: errors and exit codes, addresses, the Hub, names of activations. Imports no other."""
