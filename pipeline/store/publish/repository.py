"""Writes to a branch of a dataset repository on the Hub, by commits."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import huggingface_hub
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import httpx

from pipeline.core.errors import ConfigError, StoreError
from pipeline.core.hub import HubUnavailable, repeat_requests
from pipeline.core.requests import brief_cause, is_transient, repeated
from pipeline.store.io.hub_files import HubFiles


class HubRepository:
    """A branch of a dataset repository, at its latest commit `head`. Use `open_repository`.

    Methods raise ConfigError if the Hub refuses a request, HubUnavailable if it cannot be reached, and StoreError if
    somebody else has changed the branch.
    """

    def __init__(self, repo: str, branch: str, head: str) -> None:
        self.head = head
        self._repo = repo
        self._branch = {"repo_id": repo, "repo_type": "dataset", "revision": branch}
        self._api = huggingface_hub.HfApi()

    @property
    def files(self) -> HubFiles:
        """The files at `head`."""
        return HubFiles(self._repo, self.head)

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Uploads the large ones of these files, as the Hub decides, and drops their content. The Hub keeps them for a
        later commit. Files that it already has, from any commit or interrupted upload, are not sent again."""

        def send() -> None:
            try:
                self._api.preupload_lfs_files(additions=additions, gitignore_content="", **self._branch)
            except RuntimeError as error:
                raise (error.__cause__ or error) from None

        with _errors(self._repo):
            repeated(f"the upload to {self._repo}", send)

    def commit(self, title: str, additions: Sequence[CommitOperationAdd]) -> None:
        """Commits files, after uploading those that `upload` has not."""
        self.upload(additions)
        title = f"{title} [{secrets.token_hex(4)}]"
        with _errors(self._repo):
            try:
                self.head = self._api.create_commit(
                    operations=additions, commit_message=title, parent_commit=self.head, **self._branch
                ).oid
            except (HubUnavailable, HfHubHTTPError) as error:
                last = self._api.list_repo_commits(**self._branch)[0]
                if last.title != title:
                    if last.commit_id == self.head:
                        raise
                    raise StoreError(
                        f"{self._repo} was changed by another client during the push (commit {last.commit_id}: "
                        f"{last.title}). Run the same command again; it continues."
                    ) from error
                self.head = last.commit_id  # only the answer was lost


def open_repository(repo: str, branch: str, private: bool | None) -> HubRepository:
    """Opens a branch of a repository; creates the repository, and the branch from `main`, if they do not exist.

    private: whether a new repository is private; None for the owner's default on the Hub.
    Raises ConfigError if the Hub refuses a request, or if `private` is true and the repository is public, and
    HubUnavailable.
    """
    repeat_requests()
    api = huggingface_hub.HfApi()
    with _errors(repo):
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        if private and not api.dataset_info(repo).private:
            raise ConfigError(
                f"private=true, but {repo} is public. Remove the setting, or make the repository private."
            )
        if branch != "main":
            api.create_branch(repo, branch=branch, repo_type="dataset", exist_ok=True)
        return HubRepository(repo, branch, api.dataset_info(repo, revision=branch).sha)


@contextmanager
def _errors(repo: str) -> Iterator[None]:
    """Turns errors of calls that change a repository into ConfigError or HubUnavailable."""
    try:
        yield
    except (HubUnavailable, httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        cause = f"{brief_cause(error):.500}"
        # They were retried; RuntimeError is from hf_xet, which retries for minutes.
        if isinstance(error, HubUnavailable | RuntimeError) or is_transient(error):
            raise HubUnavailable(
                f"the push to {repo} failed: {cause} Check the network, and run the same command again; it continues."
            ) from error
        raise ConfigError(
            f"repo={repo:.200}: the Hub refuses the push ({cause}). Check the spelling, and log in with a token that "
            "has write access: `hf auth login`."
        ) from error
