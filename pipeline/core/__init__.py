"""What every room uses: errors and exit codes, addresses, the Hub, the names of activations. Imports no other room."""
