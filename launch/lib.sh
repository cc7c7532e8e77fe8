# shellcheck shell=bash
# Functions of the launch scripts. Source it from the repository's root.

die() {
    echo "$0: $*" >&2
    exit 2
}

BUILD=${BUILD:-build/launch} # output folder
exec 3>&2

# Prints a command, and executes it unless DRY_RUN is set.
cmd() {
    printf '+ %s\n' "$*" >&3
    [[ -n ${DRY_RUN:-} ]] || "$@"
}

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "launch/${0##*/}"; }

refuse() {
    echo "${0##*/}: $1" >&2
    usage >&2
    exit 2
}

# Reads the command line, [--dry-run] command [arguments], and the settings.
begin() {
    if [[ ${1:-} == --dry-run ]]; then
        DRY_RUN=1
        shift
    fi
    command=${1:-}
    # shellcheck disable=SC2034
    arguments=("${@:2}")
    case $command in
        '') refuse "a command is needed" ;;
        help | -h | --help) usage && exit ;;
    esac
    local argument
    for argument in ${arguments[@]+"${arguments[@]}"}; do # otherwise --dry-run would be an override of the job, and commands would run
        [[ $argument != --* ]] || die "$argument comes after $command: expected launch/${0##*/} --dry-run $command ..."
    done
    local file=${TPU_ENV:-launch/tpu.env}
    [[ -f $file ]] || die "no $file: copy launch/tpu.env.example and fill it in"
    # shellcheck source=launch/tpu.env.example
    source "$file"
}

# Writes to DIRECTORY what a job needs from this checkout: the package as a wheel, which contains the configs, and the
# constraints with tested versions.
build_wheel() {
    local directory=$1
    cmd rm -rf "$directory" build/lib
    cmd mkdir -p "$directory"
    cmd "${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$directory" .
    cmd cp scripts/constraints.txt "$directory"
}
