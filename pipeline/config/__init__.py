"""The configuration: its schema, the limits of its values, and composing a command line into it. Only the modules
that compose import Hydra; other packages import the types. Imports `core`."""
