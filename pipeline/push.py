"""Uploads a finished store to the Hugging Face Hub: `python -m pipeline.push store.path=... repo=owner/name`.

The store becomes a data set repository with a card (README.md) that describes it; a repository that does not exist is
created. Your own text in the card stays; the licence is yours to add. The store's root contains the configuration of
the run that made it, including paths.
`ActivationStore.open("hf://datasets/owner/name")` reads the store from the Hub.

Repeat an interrupted push to continue it: objects that the repository has are not uploaded again. Push an extended
store in the same way. Until the last commit of a push, the repository holds the store as it was, or an unfinished one.

The access token comes from `hf auth login` or HF_TOKEN.

Exit codes: 0 the repository holds the store; 1 the Hub or the store cannot be reached, or the repository changed during
the push; 2 the store is not finished, the repository holds something else, or the Hub refuses it; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from pipeline.cli.settings import command, flag, setting, store_path
from pipeline.core.progress import progress_bar
from pipeline.store.publish import push_store


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    repo: str = setting("repo", "the data set repository, owner/name")
    revision: str = setting("revision", "its branch; created from main if it does not exist", default="main")
    private: bool | None = setting(
        "private",
        "for a new repository: true or false; default: its owner's setting",
        flag,
        default=None,
    )


def push(settings: Settings) -> None:
    """Pushes with a progress bar."""
    disable_progress_bars()  # one bar per file
    set_verbosity_error()  # its warnings about failed uploads contain signed URLs
    with progress_bar("push", "object") as progress:
        summary = push_store(settings.path, settings.repo, settings.revision, settings.private, progress)
    print(summary)


main = command("push", __doc__, Settings, push)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
