"""Uploads a finished store to the Hugging Face Hub: `python -m pipeline.push store.path=... repo=owner/name`.

It becomes a data set repository, created where there is none, with a card (README.md) that describes the store. Your
own text in the card stays, and what its front matter says, but for `size_categories`; its licence is yours to add. The
root contains the configuration of the
run that made the store, with its paths. `ActivationStore.open("hf://datasets/owner/name")` reads the store there.

Repeat an interrupted push to continue it: what the repository has is not uploaded again. Push a store that was extended
in the same way. Until the last commit of a push the repository says that the store is not complete.

The token is that of `hf auth login`, or HF_TOKEN.

Exit codes: 0 the repository holds the store; 1 the Hub or the store cannot be reached, or was changed meanwhile; 2 the
store is not finished, the repository holds something else, or the Hub refuses the push; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from pipeline.cli.settings import flag, setting, store_path
from pipeline.cli.store_command import run_command
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import progress_bar
from pipeline.store.publish.pushing import push_store


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    repo: str = setting("repo", "the data set repository, owner/name")
    revision: str = setting("revision", "its branch, made from main where there is none", default="main")
    private: bool | None = setting(
        "private",
        "true or false, of a new repository; if not given, its owner's default",
        flag,
        default=None,
    )


def push(settings: Settings) -> int:
    """Pushes with a progress bar. Returns the exit code."""
    disable_progress_bars()  # one bar per file
    set_verbosity_error()  # its warnings about failed uploads contain signed URLs
    with progress_bar("push", "object") as progress:
        pushed = push_store(settings.path, settings.repo, settings.revision, settings.private, progress)
    print(
        f"hf://datasets/{settings.repo}@{pushed.commit}: {pushed.num_objects:,} objects, {pushed.num_uploaded:,} of "
        f"them new ({pushed.num_bytes / 1e6:,.1f} MB)"
    )
    return EXIT_OK


def main(arguments: list[str]) -> int:
    return run_command("push", __doc__, Settings, push, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
