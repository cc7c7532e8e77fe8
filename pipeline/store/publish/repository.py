"""Writes to a branch of a dataset repository on the Hub, by commits."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, GitCommitInfo
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from pipeline.core.errors import ConfigError, StoreError
from pipeline.core.hub import HubUnavailable, repeat_requests
from pipeline.core.retries import brief_cause, is_transient, repeated
from pipeline.store.io.hub_files import HubFiles

_AGAIN = "Check the network and https://status.huggingface.co, and run the same command again; it continues."
_CONFLICT = 412  # the HTTP status if a commit's parent is not the branch's head


class HubRepository:
    """A branch of a dataset repository. Use `open_repository`.

    head: the branch's latest commit; for a new branch that of `main`, until `make_branch`. files: the files at `head`.
    Methods raise ConfigError if the Hub refuses a request, HubUnavailable if it cannot be reached, and StoreError if
    somebody else has changed the branch.
    """

    def __init__(self, repo: str, branch: str, head: str, is_new: bool) -> None:
        self.repo = repo
        self.branch = branch
        self.head = head
        self._is_new = is_new
        self._api = huggingface_hub.HfApi()

    @property
    def files(self) -> HubFiles:
        return HubFiles(self.repo, self.head)

    def make_branch(self) -> None:
        """Creates the branch at `head`, if it does not exist."""
        if self._is_new:
            with _errors(self.repo):
                self._api.create_branch(
                    self.repo, branch=self.branch, revision=self.head, repo_type="dataset", exist_ok=True
                )

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Uploads the large ones of these files, as the Hub decides, and drops their content. The Hub keeps them for a
        later commit. Files that it already has, from any commit or interrupted upload, are not sent again."""
        with _errors(self.repo):
            repeated(f"the upload to {self.repo}", lambda: self._upload(additions))

    def _upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        try:
            self._api.preupload_lfs_files(
                self.repo, additions, repo_type="dataset", revision=self.branch, gitignore_content=""
            )
        except RuntimeError as error:
            if error.__cause__ is None:  # from hf_xet, which has already retried for minutes
                raise HubUnavailable(
                    f"{brief_cause(error)}. Check the network and https://status.huggingface.co."
                ) from error
            raise error.__cause__ from None

    def commit(self, title: str, operations: Sequence[CommitOperationAdd | CommitOperationDelete]) -> None:
        """Commits uploaded files, small files, and deletions."""
        title = f"{title} [{secrets.token_hex(4)}]"
        self.upload([added for added in operations if isinstance(added, CommitOperationAdd)])
        with _errors(self.repo):
            try:
                self.head = self._api.create_commit(
                    self.repo,
                    operations,
                    commit_message=title,
                    repo_type="dataset",
                    revision=self.branch,
                    parent_commit=self.head,
                ).oid
            except HubUnavailable:
                if (last := self._last_commit()).title != title:  # if equal, only the response was lost or late
                    raise
                self.head = last.commit_id
            except HfHubHTTPError as error:
                if error.response.status_code != _CONFLICT:
                    raise
                if (last := self._last_commit()).title != title:
                    raise StoreError(
                        f"{self.repo} was changed by another client during the push (commit {last.commit_id}: "
                        f"{last.title}). Run the same command again; it continues."
                    ) from error
                self.head = last.commit_id

    def _last_commit(self) -> GitCommitInfo:
        return self._api.list_repo_commits(self.repo, repo_type="dataset", revision=self.branch)[0]


def open_repository(repo: str, branch: str, private: bool | None) -> HubRepository:
    """Opens a repository, and creates it if it does not exist. Does not create the branch: see `make_branch`.

    private: whether a new repository is private; None for the owner's default on the Hub.
    Raises ConfigError if the Hub refuses a request, or if `private` is true and the repository is public, and
    HubUnavailable.
    """
    repeat_requests()
    api = huggingface_hub.HfApi()
    with _errors(repo):
        try:
            info = api.dataset_info(repo)
        except RepositoryNotFoundError:
            api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
            info = api.dataset_info(repo)
        if private and not info.private:
            raise ConfigError(
                f"private=true, but {repo} is public. Remove the setting, or make the repository private."
            )
        is_new = False
        if branch != "main":
            try:
                info = api.dataset_info(repo, revision=branch)
            except RevisionNotFoundError:
                is_new = True
    return HubRepository(repo, branch, info.sha, is_new)


@contextmanager
def _errors(repo: str) -> Iterator[None]:
    """Turns errors of calls that change a repository into ConfigError, HubUnavailable or StoreError."""
    try:
        yield
    except HubUnavailable as error:
        raise HubUnavailable(f"the push to {repo} failed: {error} Run the same command again; it continues.") from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"repo={repo} cannot be written: HF_HUB_OFFLINE is set. Unset it.") from error
    except (httpx.HTTPError, HFValidationError, ValueError) as error:
        if is_transient(error):  # and was retried
            raise HubUnavailable(f"the push to {repo} failed: {brief_cause(error):.500}. {_AGAIN}") from error
        raise ConfigError(
            f"repo={repo:.200}: the Hub refuses the push ({brief_cause(error):.500}). Check the spelling, and log in "
            f"with a token that has write access: `hf auth login`."
        ) from error
    except OSError as error:  # reading a file of the store
        raise StoreError(f"the push to {repo} failed: {error}. {_AGAIN}") from error
