"""Python imports this at the start of every process that a test starts: conftest puts its folder on PYTHONPATH."""

import os
import time

link = os.link


def held_link(source: str, target: str, **options: object) -> None:
    """Makes a put of a local object wait while a file `<key>.held.__lock` exists (`jobs.writes_held`)."""
    while os.path.exists(f"{target}.held.__lock"):
        time.sleep(0.005)
    link(source, target, **options)


os.link = held_link
