"""The configuration: its schema, what values may be, and composing a command line into it. Only the modules that
compose import Hydra; whoever needs the types imports `schema` and `choices`. Imports `core`."""
