"""The commands for stores, called in this process."""

import os
from pathlib import Path

from pipeline import delete, export, finalize, inspect, push, verify

COMMANDS = {
    "delete": delete,
    "export": export,
    "finalize": finalize,
    "inspect": inspect,
    "push": push,
    "verify": verify,
}


def call(name: str, store: Path | str, *more: str) -> int:
    """Runs a command with the settings that it needs. Returns its exit code."""
    needed = {
        "delete": ["confirm=true"],
        "export": [f"export.path={os.path.abspath('exported')}"],
        "push": ["repo=owner/name"],
    }
    return COMMANDS[name].main([f"store.path={store}", *needed.get(name, []), *more])
