"""What a run will do, worked out in plain numbers before anything is opened. Imports `step`'s specification and what
is below it."""
