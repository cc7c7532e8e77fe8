"""The commands of the launch scripts, compared with reviewed lists: tests/launch/expected/*.txt."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from pipeline import verify
from pipeline.cli.settings import parse
from tests.jobs import ROOT
from tests.launch.conftest import HERE, JOB, Recorded

pytestmark = pytest.mark.heavy
SCRIPTS = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch"))

CALLS = {
    "tpu-create": ("launch/tpu.sh", "create", "+experiment=qwen_fineweb_edu", "capture.layers=[6,12]"),
    "tpu-run": ("launch/tpu.sh", "run", "data.path=gs://my-bucket/text"),
    "tpu-status": ("launch/tpu.sh", "status"),
    "tpu-logs": ("launch/tpu.sh", "logs", "3"),
    "tpu-logs-all": ("launch/tpu.sh", "logs", "all"),
    "tpu-delete": ("launch/tpu.sh", "delete"),
    "gke-image": ("launch/gke.sh", "image"),
    "gke-create": ("launch/gke.sh", "create", "+experiment=qwen_fineweb_edu"),
    "gke-status": ("launch/gke.sh", "status"),
    "gke-logs": ("launch/gke.sh", "logs"),
    "gke-delete": ("launch/gke.sh", "delete"),
}


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([shellcheck, "-x", *SCRIPTS, HERE / "recorder.sh"], cwd=ROOT, capture_output=True)
    assert result.returncode == 0, result.stdout.decode()


@pytest.mark.parametrize("name", CALLS)
def test_commands_equal_the_reviewed_ones_and_a_dry_run_only_prints_them(recorded: Recorded, name: str):
    script, *arguments = CALLS[name]
    expected = (HERE / "expected" / f"{name}.txt").read_text()
    dry = recorded.run(script, "--dry-run", *arguments)
    assert (dry.returncode, recorded.commands()) == (0, []), dry.stderr
    for command in expected.replace("BUILD", f"{recorded.path}/build").splitlines():
        assert f"+ {' '.join(shlex.split(command))}\n" in dry.stderr
    recorded.answer("request", "ABSENT" if name == "tpu-create" else "ACTIVE")
    recorded.answer("slice", "READY")
    result = recorded.run(script, *arguments)
    assert result.returncode == 0, result.stderr
    assert recorded.commands() == expected.splitlines()


@pytest.mark.parametrize("script", ["launch/tpu.sh", "launch/gke.sh"])
def test_help_lists_the_commands_and_wrong_ones_are_refused(recorded: Recorded, script: str):
    late = recorded.run(script, "status", "--dry-run")
    assert late.returncode == 2
    assert f"expected {script} --dry-run status" in late.stderr
    asked, wrong, none = (recorded.run(script, *arguments) for arguments in (["--help"], ["delet"], []))
    assert (asked.returncode, wrong.returncode, none.returncode) == (0, 2, 2)
    assert f"{script} create" in asked.stdout
    assert asked.stdout in wrong.stderr
    assert "there is no command delet" in wrong.stderr
    assert "a command is needed" in none.stderr
    assert recorded.commands() == []


@pytest.mark.parametrize(
    ("tpu", "capacity", "request_options"),
    [
        ("v4-128", "spot", "--accelerator-type=v4-128 --runtime-version=tpu-ubuntu2204-base --spot "),
        ("v5e-16", "reserved", "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --reserved "),
        ("v5p-128", "on-demand", "--accelerator-type=v5p-128 --runtime-version=v2-alpha-tpuv5 "),
        ("v6e-64", "", "--accelerator-type=v6e-64 --runtime-version=v2-alpha-tpuv6e "),
    ],
)
def test_a_request_names_the_kind_of_tpu_and_of_capacity(recorded, tmp_path, tpu, capacity, request_options):
    chosen = settings(tmp_path, TPU=tpu, CAPACITY=capacity)
    result = recorded.run("launch/tpu.sh", "--dry-run", "create", TPU_ENV=chosen)
    assert f"{request_options}--valid" in result.stderr


@pytest.mark.parametrize(
    ("changes", "network", "ssh"),
    [
        ({}, "", ""),
        ({"NETWORK": "net", "SUBNETWORK": "sub"}, "--network=net --subnetwork=sub ", ""),
        ({"INTERNAL_IPS": "yes"}, "--internal-ips ", "--tunnel-through-iap "),
        (
            {"SUBNETWORK": "sub", "INTERNAL_IPS": "yes", "SSH": "--internal-ip"},
            "--subnetwork=sub --internal-ips ",
            "--internal-ip ",
        ),
    ],
)
def test_a_request_names_the_network_and_ssh_reaches_its_addresses(recorded, tmp_path, changes, network, ssh):
    place = "--project=my-project --zone=us-west4-a "
    create, logs = (
        recorded.run("launch/tpu.sh", "--dry-run", command, TPU_ENV=settings(tmp_path, **changes)).stderr
        for command in ("create", "logs")
    )
    assert f"--valid-until-duration=12h {network}--scopes=" in create
    assert f"queued-resources ssh qwen-fineweb {place}{ssh}--worker=0" in logs


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"TPU": "v3-8"},
            {"CAPACITY": "cheap"},
            {"BUCKET": "my-bucket"},
            {"NAME": "My_Job"},
            {"INTERNAL_IPS": "true"},
        ),
        *({"TOPOLOGY": "8by8"}, {"TOPOLOGY": "64"}, {"CHIPS_PER_HOST": "5"}, {"CHIPS_PER_HOST": "four"}),
    ],
)
def test_wrong_settings_are_refused(recorded, tmp_path, wrong):
    script = "launch/gke.sh" if wrong.keys() & {"TOPOLOGY", "CHIPS_PER_HOST"} else "launch/tpu.sh"
    result = recorded.run(script, "create", TPU_ENV=settings(tmp_path, **wrong))
    assert result.returncode == 2
    assert "expected" in result.stderr
    assert recorded.commands() == []


def settings(tmp_path: Path, **changes: str) -> str:
    """A file with the example's settings, some of them changed."""
    file = tmp_path / "tpu.env"
    lines = [f"{name}={value}\n" for name, value in changes.items()]
    file.write_text((ROOT / "launch/tpu.env.example").read_text() + "".join(lines))
    return str(file)


def test_overrides_reach_the_bucket_unchanged_after_the_launchers(recorded: Recorded):
    overrides = ["data.text='{{ title }}: {{ text }}'", "capture.layers=[1, 3]", 'stop=["\n"]']
    overrides += [r'data.path="/my \"texts\""']
    assert recorded.run("launch/tpu.sh", "create", *overrides).returncode == 0
    items = recorded.object(f"{JOB}/files/overrides").read_text().split("\0")
    assert items[0] == "store.path=gs://my-bucket/stores/qwen-fineweb"
    assert items[-5:] == [*overrides, ""]


def test_the_tpu_launchers_install_the_audited_versions():
    text = "".join((ROOT / "launch" / name).read_text() for name in ("Dockerfile", "startup.sh"))
    [version] = set(re.findall(r"(?<![\d.])3\.\d+", text))
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {pin.name: pin for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": version})}
    audited = json.loads((ROOT / "docs/audit-tpu.json").read_text())["versions"]
    assert {name: str(pinned[name].specifier) for name in audited} == {
        name: f"=={number}" for name, number in audited.items()
    }
    assert f"libtpu {audited['libtpu'].rpartition('.')[0]}" in (ROOT / "docs/performance.md").read_text()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert all("-c scripts/constraints.txt" in line for line in page.read_text().splitlines() if ".[tpu]" in line)


def jobset(recorded: Recorded, **environment: str) -> dict:
    """The JobSet that `gke.sh create` passes to kubectl."""
    overrides = ["data.text='{{ title }}: {{ text }}\n'", r'data.path="/my \"texts\" & more"']
    result = recorded.run("launch/gke.sh", "create", *overrides, **environment)
    assert result.returncode == 0, result.stderr
    made = yaml.safe_load((recorded.path / "build/qwen-fineweb.yaml").read_text())
    assert pod(made)["containers"][0]["args"][-2:] == overrides
    return made


def job(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod(jobset: dict) -> dict:
    return job(jobset)["template"]["spec"]


@pytest.mark.parametrize(
    ("topology", "chips", "hosts"), [("8x8", 4, 16), ("2x4", 8, 1), ("1x1", 1, 1), ("4x4x8", 4, 32)]
)
def test_a_jobset_requests_the_slice_in_the_settings(recorded, tmp_path, topology, chips, hosts):
    chosen = settings(tmp_path, TOPOLOGY=topology, CHIPS_PER_HOST=chips, KUBERNETES_SERVICE_ACCOUNT="writer")
    made = jobset(recorded, TPU_ENV=chosen)
    assert "@" not in str(made)
    assert (job(made)["completions"], job(made)["parallelism"]) == (hosts, hosts)
    assert pod(made)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod(made)["serviceAccountName"] == "writer"
    [container] = pod(made)["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": chips}}


def test_a_jobset_needs_no_privileges_replaces_pods_that_exit_with_42_and_fails_at_2(recorded):
    """Any other failure counts against a back-off limit of 0, so the job fails and the JobSet restarts it."""
    made = jobset(recorded)
    assert pod(made)["serviceAccountName"] == "default"
    assert not {"initContainers", "hostNetwork", "securityContext"} & pod(made).keys()
    assert "securityContext" not in pod(made)["containers"][0]
    rules = [rule for rule in job(made)["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert [(rule["action"], rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) for rule in rules] == [
        ("FailJob", "In", [2]),
        ("Ignore", "In", [42]),
    ]
    assert job(made)["backoffLimit"] == 0
    assert made["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]


@pytest.mark.parametrize(
    ("codes", "is_last_requeued"),
    [([0], False), ([2], False), ([42, 42, 42, 1], True), ([1, 42, 137], False)],
)
def test_slurm_requeues_interrupted_jobs_and_those_that_failed_less_than_twice(recorded, codes, is_last_requeued):
    recorded.answer("job", *codes)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "MAX_FAILURES": "2"}
    results = [recorded.run("launch/slurm.sbatch", "store.path=/shared/store", **slurm) for _ in codes]
    left = [file.unlink() for file in ROOT.glob("failures-7")]
    expected = (HERE / "expected/slurm.txt").read_text().splitlines() * len(codes)
    assert recorded.commands() == (expected if is_last_requeued else expected[:-1])
    assert [result.returncode for result in results[:-1]] == [0] * len(codes[:-1])
    assert (results[-1].returncode, len(left)) == ((0, 1) if is_last_requeued else (codes[-1], 0))


def test_slurm_does_not_requeue_if_a_process_exits_with_2_and_others_are_aborted(tmp_path):
    """This srun runs the command for two tasks and returns the highest exit code, as Slurm's does."""
    (tmp_path / "srun").write_text(
        '#!/bin/bash\nshift 4\ncode=0\nfor PROCESS in 2 134; do PROCESS=$PROCESS "$@" || code=$?; done\nexit $code\n'
    )
    (tmp_path / "python").write_text("#!/bin/bash\nexit $PROCESS\n")
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho requeued\n")
    for name in ("srun", "python", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python", "SLURM_JOB_ID": "7"}
    result = subprocess.run(
        ["bash", str(ROOT / "launch/slurm.sbatch")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 2, result.stderr
    assert "requeued" not in result.stdout
    assert not (tmp_path / "wrong-7").exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}, "verify.rank=3 verify.world=8"),
        (
            {"SLURM_ARRAY_TASK_ID": "17", "SLURM_ARRAY_TASK_COUNT": "1", "WORLD": "100"},
            "verify.rank=17 verify.world=100",
        ),
    ],
)
def test_a_task_of_slurm_verifies_its_share(recorded: Recorded, variables, expected):
    result = recorded.run("launch/verify.sbatch", "store.path=/shared/store", "verify.sample=0", **variables)
    assert result.returncode == 0, result.stderr
    assert recorded.commands() == [f"python -m pipeline.verify {expected} store.path=/shared/store verify.sample=0"]


def test_the_pods_of_the_indexed_job_verify_all_shares():
    spec = yaml.safe_load((ROOT / "launch/verify-job.yaml").read_text())["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "pipeline.verify"]
    shares = []
    for index in range(spec["completions"]):
        arguments = [argument.replace("$(JOB_COMPLETION_INDEX)", str(index)) for argument in container["args"]]
        settings = parse(verify.Settings, arguments)
        shares.append((settings.rank, settings.world))
    assert shares == [(rank, spec["completions"]) for rank in range(spec["completions"])]
    # Kubernetes requires this combination.
    assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert actions == {2: "FailJob", 42: "Ignore"}
