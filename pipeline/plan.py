"""Prints what a run would do: `python -m pipeline.plan [overrides]` takes the overrides of `python -m pipeline.run`.

Reads only headers and writes nothing. `topology=v5e-64` plans for a TPU slice, on any machine: it compiles the step for
the slice, and prints memory, limits, time and cost.

Exit codes: 0 planned; 1 the model, the data or the store cannot be reached; 2 the configuration or the input is wrong;
42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

from pipeline.cli.main import main
from pipeline.config.schema import RunConfig
from pipeline.job.opening import print_plan
from pipeline.planning.slice.slice_plan import print_slice_plan


def plan(config: RunConfig) -> None:
    """Prints the plan for the slice that `topology` names, or for this machine's devices."""
    if config.topology:
        print_slice_plan(config)
    else:
        print_plan(config)


if __name__ == "__main__":
    main(plan, __doc__)
