#!/usr/bin/env bash
# Runs a job on a TPU slice, through gcloud's queued resources. Settings: launch/tpu.env (see tpu.env.example).
#
#   launch/tpu.sh create [overrides]   upload the job and request the slice; its workers start the job at each boot
#   launch/tpu.sh run [overrides]      upload the job and (re)start it on all workers of an existing slice, over ssh
#   launch/tpu.sh status               show the status of the slice and of the job
#   launch/tpu.sh logs [worker|all]    follow a worker's log (default 0); `all`: the last lines of each
#   launch/tpu.sh babysit              request the slice again whenever it is lost; delete it when the job has ended
#   launch/tpu.sh delete               delete the slice, but not the store
#
# --dry-run (or DRY_RUN=1) prints every command and executes none.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

settings() {
    : "${PROJECT:?}" "${ZONE:?}" "${NAME:?}" "${TPU:?}" "${BUCKET:?}"
    place=(--project="$PROJECT" --zone="$ZONE")
    JOB=$BUCKET/launch/$NAME
    files=$BUILD/$NAME

    [[ $BUCKET == gs://?* ]] || die "BUCKET is $BUCKET: expected gs://NAME"
    [[ $NAME =~ ^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$ ]] ||
        die "NAME is $NAME: expected at most 63 lower-case letters, digits and hyphens, beginning with a letter"
    case $TPU in
        v4-*) type=$TPU runtime=tpu-ubuntu2204-base ;;
        v5e-*) type=v5litepod-${TPU#v5e-} runtime=v2-alpha-tpuv5-lite ;;
        v5p-*) type=$TPU runtime=v2-alpha-tpuv5 ;;
        v6e-*) type=$TPU runtime=v2-alpha-tpuv6e ;;
        *) die "TPU is $TPU: expected v4-N, v5e-N, v5p-N or v6e-N" ;;
    esac
    runtime=${RUNTIME_VERSION:-$runtime}

    case ${CAPACITY:-on-demand} in
        spot) capacity=--spot ;;
        reserved) capacity=--reserved ;;
        on-demand) capacity= ;;
        *) die "CAPACITY is $CAPACITY: expected spot, reserved or on-demand" ;;
    esac
    case ${INTERNAL_IPS:-no} in
        yes) internal=--internal-ips SSH=${SSH:---tunnel-through-iap} ;;
        no) internal= ;;
        *) die "INTERNAL_IPS is $INTERNAL_IPS: expected yes or no" ;;
    esac
}

upload() {
    build_wheel "$files"
    local defaults=("store.path=$BUCKET/stores/$NAME" "run.compilation_cache=$BUCKET/compilation-cache"
        "run.progress=false")
    cmd write_items "$files/overrides" "${defaults[@]}" "$@"
    cmd write_startup
    cmd gcloud storage rsync --recursive --delete-unmatched-destination-objects "$files" "$JOB/files"
    # Last, so that a worker that reads a new id finds the new files. Exit codes are kept per upload, so that workers that
    # still run an earlier upload do not end this one.
    cmd gcloud storage cp - "$JOB/run-id" <<<"$(date -u +%Y%m%dT%H%M%SZ)-$RANDOM$RANDOM"
}

# Ends each item with a zero byte, since a stop text may have line breaks.
write_items() {
    local file=$1
    shift
    printf '%s\0' "$@" >"$file"
}

# startup.sh with this job's settings, with which a worker finds the other files.
write_startup() {
    {
        head -n 1 launch/startup.sh
        local name
        for name in JOB PROJECT HF_TOKEN_SECRET; do printf '%s=%q\n' "$name" "${!name:-}"; done
        tail -n +2 launch/startup.sh
    } >"$files/startup.sh"
}

create() {
    local state
    state=$(request_state)
    [[ $state != UNKNOWN ]] || die "gcloud does not say whether $NAME exists"
    # An upload would replace the job that its workers run.
    [[ -z $state || $state == ABSENT ]] ||
        die "$NAME exists ($state): use launch/tpu.sh run, launch/tpu.sh delete, or another NAME"
    upload "$@"
    request
}

run() {
    upload "$@"
    local script=/tmp/extract-startup.sh
    on_workers all "gcloud storage cp $JOB/files/startup.sh $script &&\
 sudo setsid --fork bash $script </dev/null >/dev/null 2>&1"
}

logs() {
    case ${1:-0} in
        all) on_workers all "sudo tail -n 20 /var/lib/extract/log" ;;
        *) on_workers "${1:-0}" "sudo tail -n 100 -F /var/lib/extract/log" ;;
    esac
}

on_workers() { # `tpu-vm ssh` has no --tunnel-through-iap
    cmd gcloud compute tpus queued-resources ssh "$NAME" "${place[@]}" ${SSH:+"$SSH"} --worker="$1" --command="$2"
}

request() {
    cmd gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" "${place[@]}" \
        --accelerator-type="$type" --runtime-version="$runtime" ${capacity:+"$capacity"} \
        ${VALID_UNTIL:+--valid-until-duration="$VALID_UNTIL"} \
        ${SERVICE_ACCOUNT:+--service-account="$SERVICE_ACCOUNT"} \
        ${NETWORK:+--network="$NETWORK"} ${SUBNETWORK:+--subnetwork="$SUBNETWORK"} ${internal:+"$internal"} \
        --scopes=https://www.googleapis.com/auth/cloud-platform \
        --metadata-from-file=startup-script="$files/startup.sh"
}

# The state of a resource according to gcloud: ABSENT if it does not exist, UNKNOWN if the request fails.
state_of() {
    local errors
    errors=$(mktemp)
    if ! cmd gcloud compute tpus "$@" "${place[@]}" 2>"$errors"; then
        if grep -q NOT_FOUND "$errors"; then
            echo ABSENT
        else
            cat "$errors" >&2
            echo UNKNOWN
        fi
    fi
    rm "$errors"
}

request_state() { state_of queued-resources describe "$NAME" --format='value(state.state)'; }

slice_state() { state_of tpu-vm describe "$NAME" --format='value(state)'; }

# How the job that was uploaded last has ended; nothing if it has not.
verdict() {
    local run_id
    run_id=$(cmd gcloud storage cat "$JOB/run-id" 2>/dev/null || true)
    [[ -z $run_id ]] || cmd gcloud storage cat "$JOB/exit-codes/$run_id" 2>/dev/null || true
}

status() {
    local code
    code=$(verdict)
    echo "request   $(request_state)"
    echo "slice     $(slice_state)"
    echo "job       ${code:+ended with exit code }${code:-not ended}"
}

delete() { cmd gcloud compute tpus queued-resources delete "$NAME" "${place[@]}" --force --quiet; }

babysit() {
    local code state
    if [[ ! -f $files/startup.sh && -z ${DRY_RUN:-} ]]; then # another checkout has uploaded the job
        mkdir -p "$files"
        cmd gcloud storage cp "$JOB/files/startup.sh" "$files/startup.sh" ||
            die "$JOB/files has no startup.sh: begin with launch/tpu.sh create"
    fi
    while true; do
        state=$(request_state)
        [[ $state != ACTIVE ]] || state=ACTIVE:$(slice_state)
        code=$(verdict)
        echo "$(date -u +%FT%TZ) slice $state, job ${code:+ended with exit code }${code:-not ended}" >&2
        case $code/$state in
            [0-9]*/ABSENT) exit "$code" ;;
            [0-9]*) delete ;;
            /ABSENT) request ;;
            /FAILED | /SUSPENDED | /ACTIVE:PREEMPTED | /ACTIVE:TERMINATED | /ACTIVE:ABSENT) delete && request ;;
        esac || echo "that failed and will be tried again" >&2
        [[ -z ${DRY_RUN:-} ]] || break
        sleep "${POLL_S:-60}"
    done
}

begin "$@"
settings
case $command in
    create | run | status | logs | babysit | delete) "$command" ${arguments[@]+"${arguments[@]}"} ;;
    *) refuse "there is no command $command" ;;
esac
