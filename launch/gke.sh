#!/usr/bin/env bash
# Runs a job on a TPU slice of a GKE cluster, with JobSet and kubectl. Settings: launch/tpu.env (see tpu.env.example).
#
#   launch/gke.sh image                build and push IMAGE
#   launch/gke.sh create [overrides]   start the job; launch/jobset.yaml describes when it is restarted
#   launch/gke.sh status
#   launch/gke.sh logs [worker]        follow a worker's log (default 0)
#   launch/gke.sh delete               delete the job, but not the store
#
# --dry-run (or DRY_RUN=1) prints every command and executes none.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

image() {
    local context=$BUILD/image
    build_wheel "$context"
    cmd docker build --file launch/Dockerfile --tag "$IMAGE" "$context"
    cmd docker push "$IMAGE"
}

# Fills the settings into launch/jobset.yaml and applies it.
create() {
    local text name HOSTS OVERRIDES
    # shellcheck disable=SC2034 # used by name below
    HOSTS=$((${TOPOLOGY//x/*} / CHIPS_PER_HOST))
    # shellcheck disable=SC2034
    OVERRIDES=$(json_list "store.path=$BUCKET/stores/$NAME" "run.compilation_cache=$BUCKET/compilation-cache" \
        "run.progress=false" "$@")
    text=$(<launch/jobset.yaml)
    for name in NAME HOSTS CHIPS_PER_HOST ACCELERATOR TOPOLOGY IMAGE KUBERNETES_SERVICE_ACCOUNT OVERRIDES; do text=${text//"@$name@"/"${!name}"}; done
    mkdir -p "$BUILD"
    printf '%s\n' "$text" >"$BUILD/$NAME.yaml"
    cmd kubectl apply --filename "$BUILD/$NAME.yaml"
}

json_list() {
    local item separator=
    printf '['
    for item in "$@"; do
        item=${item//\\/\\\\} item=${item//$'\n'/\\n}
        printf '%s"%s"' "$separator" "${item//\"/\\\"}"
        separator=', '
    done
    printf ']'
}

status() {
    cmd kubectl get jobset "$NAME"
    cmd kubectl get pods --selector "jobset.sigs.k8s.io/jobset-name=$NAME" --output wide
}

logs() {
    cmd kubectl logs --follow --container extract --selector \
        "jobset.sigs.k8s.io/jobset-name=$NAME,batch.kubernetes.io/job-completion-index=${1:-0}"
}

delete() { cmd kubectl delete jobset "$NAME"; }

begin "$@"
: "${NAME:?}" "${BUCKET:?}" "${IMAGE:?}" "${ACCELERATOR:?}" "${TOPOLOGY:?}" "${CHIPS_PER_HOST:?}"
KUBERNETES_SERVICE_ACCOUNT=${KUBERNETES_SERVICE_ACCOUNT:-default}
[[ $TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || die "TOPOLOGY is $TOPOLOGY: expected e.g. 4x4, or 2x2x4"
if [[ ! $CHIPS_PER_HOST =~ ^[1-9]$ ]] || ((${TOPOLOGY//x/*} % CHIPS_PER_HOST)); then
    die "CHIPS_PER_HOST is $CHIPS_PER_HOST: expected the node pool's number, which divides the chips of TOPOLOGY"
fi
case $command in
    image | create | status | logs | delete) "$command" ${arguments[@]+"${arguments[@]}"} ;;
    *) refuse "there is no command $command" ;;
esac
