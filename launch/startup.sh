#!/usr/bin/env bash
# Runs on every worker of a TPU slice, at each boot: installs the job from JOB in the bucket, and runs it until it is
# finished. launch/tpu.sh inserts the settings (JOB and others) above this text.
#
# The job's exit codes: 0 and 2 end it, and are written to JOB/exit-codes/ID for the other workers and `tpu.sh babysit`;
# JOB/run-id has the ID of the upload to run. After 42 (interrupted) and 1 (failed) it is restarted, until it has failed
# MAX_FAILURES times without running for STEADY_S in between. SIGTERM to this script stops the job, which then exits with
# 42 and is not restarted.
# shellcheck disable=SC2329 # functions that `attend` calls
set -euo pipefail

: "${JOB:?the job in the bucket, gs://...}"
MAX_FAILURES=${MAX_FAILURES:-20}
STEADY_S=${STEADY_S:-3600}
RETRY_DELAY_S=${RETRY_DELAY_S:-30} # after each failure in a row as much longer, up to ten times
WORK=${WORK:-/var/lib/extract}
HUGEPAGES=${HUGEPAGES:-/sys/kernel/mm/transparent_hugepage/enabled}
export HOME=${HOME:-/root}
export HF_HOME=$WORK/huggingface

mkdir -p "$WORK"
cd "$WORK"
exec 9>>lock
until flock --nonblock 9; do # held by an earlier start of the job, which is stopped
    kill "$(<pid)" || true
    sleep 1
done
echo $$ >pid
exec >>log 2>&1

child=
stopping=
# Later signals are ignored: a trap that runs while `$(...)` is read can be a syntax error in bash 5.2.
trap 'stopping=1; trap "" TERM INT; [[ -z $child ]] || kill "$child" || true' TERM INT

# Runs a command that the trap can end, and sets $code to its exit code.
attend() {
    "$@" &
    child=$!
    [[ -z $stopping ]] || kill "$child" || true # the signal came before the trap knew the child
    while true; do
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break # otherwise a signal ended `wait`, not the command
    done
    child=
}

say() { echo "$(date -u +%FT%TZ) $(hostname): $*" || true; } # the log's disk may be full

verdict() { gcloud storage cat "$JOB/exit-codes/$run_id" 2>/dev/null || true; }

conclude() {
    say "the job ends with exit code $1"
    until [[ -z $run_id || -n $stopping ]] || echo "$1" | gcloud storage cp - "$JOB/exit-codes/$run_id"; do
        attend sleep "$RETRY_DELAY_S"
    done
    exit "$1"
}

# TPU VMs run Ubuntu 22.04, whose Python is too old. For a newer one, the constraints pin another jax and libtpu than
# those that docs/audit-tpu.json was made with.
find_python() {
    if python3.11 -c "import ensurepip, venv" 2>/dev/null; then
        echo python3.11
        return
    fi
    python3 -m pip install --quiet --target uv uv==0.9.5 >&2
    uv/bin/uv python install --quiet 3.11 >&2
    uv/bin/uv python find 3.11
}

# Keeps the lock, so that a later start waits for a pip that outlives this script.
install() {
    local wheel
    rm -rf files
    gcloud storage cp --recursive "$JOB/files" .
    wheel=$(echo files/*.whl)
    if [[ ! -e venv/complete ]]; then # none, or one whose installation was cut off
        rm -rf venv
        "$(find_python)" -m venv venv
    fi
    venv/bin/python -m pip install --quiet --constraint files/constraints.txt "$wheel${EXTRAS-[tpu]}"
    touch venv/complete
    venv/bin/python -m pip install --quiet --no-deps --force-reinstall "$wheel" # another wheel of the same version
}

extract() {
    local overrides
    mapfile -d '' -t overrides <files/overrides
    if [[ -n ${HF_TOKEN_SECRET:-} ]]; then
        HF_TOKEN=$(gcloud secrets versions access latest --secret="$HF_TOKEN_SECRET" --project="$PROJECT")
        export HF_TOKEN
    fi
    exec venv/bin/python -m pipeline.run "${overrides[@]}" 9>&-
}

# As JAX recommends for v5e and later; otherwise the TPU runtime starts slowly.
echo always >"$HUGEPAGES" || say "transparent hugepages stay as they are"

failures=0
run_id=
while [[ -z $stopping ]]; do
    code=1 began=$SECONDS
    if uploaded=$(gcloud storage cat "$JOB/run-id"); then
        run_id=$uploaded
        others=$(verdict)
        if [[ -n $others ]]; then
            say "the job has ended with exit code $others"
            exit "$others"
        fi
        attend install
    fi
    if ((code == 0)); then
        say "start"
        attend extract
    else
        code=1
    fi
    say "exit code $code"
    gcloud storage cp - "$JOB/logs/$(hostname).log" <log || true # as a stream, since this command writes to it, too
    [[ -z $stopping ]] || break
    ((SECONDS - began < STEADY_S)) || failures=0
    case $code in
        0 | 2) conclude "$code" ;;
        42) ;;
        *) failures=$((failures + 1)) ;;
    esac
    ((failures < MAX_FAILURES)) || conclude 1
    attend sleep $((RETRY_DELAY_S * (failures < 1 ? 1 : failures < 10 ? failures : 10)))
done
say "stopped"
exit 42
