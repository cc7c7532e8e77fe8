"""Extracts activations: `python -m pipeline.run [overrides]` composes the configuration, plans the job, and runs it.

Exit codes: 0 finished; 42 interrupted, run again to resume; 2 the configuration or the input is wrong; 1 anything else.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

from pipeline.cli.main import main
from pipeline.job.running import join_and_run

if __name__ == "__main__":
    main(join_and_run, __doc__)
