"""`launch/tpu.sh babysit` in the states of a queued resource."""

import shutil

import pytest

from tests.launch.conftest import JOB, Recorded

pytestmark = pytest.mark.heavy
CREATE, DELETE = "queued-resources create", "queued-resources delete"


@pytest.fixture
def uploaded(recorded: Recorded) -> Recorded:
    """A job that `create` has uploaded and requested a slice for. The recorded calls are deleted."""
    assert recorded.run("launch/tpu.sh", "create").returncode == 0
    (recorded.path / "commands").unlink()
    return recorded


def changes(recorded: Recorded) -> list[str]:
    """The commands that change something."""
    return [verb for command in recorded.commands() for verb in (CREATE, DELETE) if verb in command]


def test_a_lost_slice_is_requested_again_until_the_job_has_finished(uploaded: Recorded):
    asked_again = [DELETE, CREATE]
    story = [
        ("WAITING_FOR_RESOURCES", []),
        ("PROVISIONING", []),
        ("ACTIVE", []),  # READY
        ("SUSPENDING", []),
        ("SUSPENDED", asked_again),
        ("WAITING_FOR_RESOURCES", []),
        ("FAILED", asked_again),
        ("ABSENT", [CREATE]),
        ("", []),  # cannot be asked
        ("ACTIVE", asked_again),  # PREEMPTED
        ("ACTIVE", []),  # READY
        ("ACTIVE", asked_again),  # ABSENT
        ("ACTIVE", []),  # cannot be asked
        ("ACTIVE", []),  # READY
        ("ACTIVE exit-code 0", [DELETE]),
        ("DELETING", [DELETE]),
        ("ABSENT", []),
    ]
    uploaded.answer("request", *(state for state, _ in story))
    uploaded.answer("slice", "READY", "PREEMPTED", "READY", "ABSENT", "", "READY", "READY")
    result = uploaded.run("launch/tpu.sh", "babysit")
    assert result.returncode == 0, result.stderr
    assert changes(uploaded) == [change for _, changes in story for change in changes]
    assert "no route to host" in result.stderr
    assert len({command for command in uploaded.commands() if CREATE in command}) == 1


def test_a_job_with_exit_code_2_is_not_restarted(uploaded: Recorded):
    uploaded.answer("request", "ACTIVE", "ACTIVE exit-code 2", "ABSENT")
    uploaded.answer("slice", "READY", "READY")
    assert uploaded.run("launch/tpu.sh", "babysit").returncode == 2
    assert changes(uploaded) == [DELETE]


def test_a_checkout_that_has_not_uploaded_the_job_fetches_its_startup_script(uploaded: Recorded):
    shutil.rmtree(uploaded.path / "build")
    uploaded.answer("request", "FAILED", "ACTIVE exit-code 0", "ABSENT")
    uploaded.answer("slice", "READY")
    result = uploaded.run("launch/tpu.sh", "babysit")
    assert result.returncode == 0, result.stderr
    assert changes(uploaded) == [DELETE, CREATE, DELETE]


def test_without_an_uploaded_job_nothing_is_deleted(recorded: Recorded):
    recorded.answer("request", "SUSPENDED")
    result = recorded.run("launch/tpu.sh", "babysit")
    assert result.returncode == 2
    assert "begin with launch/tpu.sh create" in result.stderr
    assert changes(recorded) == []


@pytest.mark.parametrize(("state", "message"), [("ACTIVE", r"exists (ACTIVE): use"), ("", "does not say whether")])
def test_create_leaves_the_job_of_an_existing_slice_alone(uploaded: Recorded, state: str, message: str):
    job = uploaded.object(JOB)
    before = {path: path.read_bytes() for path in job.rglob("*") if path.is_file()}
    uploaded.answer("request", state)
    result = uploaded.run("launch/tpu.sh", "create", "batch.rows=2")
    assert result.returncode == 2
    assert message in result.stderr
    assert changes(uploaded) == []
    assert {path: path.read_bytes() for path in job.rglob("*") if path.is_file()} == before
