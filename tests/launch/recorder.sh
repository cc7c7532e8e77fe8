#!/usr/bin/env bash
# Stands in for gcloud, kubectl, docker, srun, scontrol and the Python of a virtual environment. Writes its command line
# to $RECORD/commands, and answers with the next line of $RECORD/<what is asked>, if there is such a file.
# `gcloud storage` really copies: $RECORD/buckets/NAME stands for gs://NAME.
set -euo pipefail

name=$(basename "$0")
printf -v line ' %q' "$@"
echo "$name$line" >>"$RECORD/commands"

# Takes the first line of a file of answers.
next() {
    answer=$(head -n 1 "$RECORD/$1")
    sed -i 1d "$RECORD/$1"
}

arguments=("${@/#gs:\/\//$RECORD/buckets/}")
case "$name $*" in
    "gcloud storage cp - "*)
        if [[ -s $RECORD/put ]]; then
            next put
            ((answer == 0)) || exit "$answer"
        fi
        mkdir -p "$(dirname "${arguments[3]}")"
        cat >"${arguments[3]}"
        ;;
    "gcloud storage cp "* | "gcloud storage rsync "*)
        from=${arguments[-2]} to=${arguments[-1]}
        mkdir -p "$(dirname "$to")"
        [[ $2 == cp ]] || rm -rf "$to"
        cp -r "$from" "$to"
        ;;
    "gcloud storage cat "*) cat "${arguments[2]}" ;;
    "gcloud storage rm "*) rm "${arguments[2]}" ;;
    "gcloud secrets versions access "*) echo "hf_secret" ;;
    "gcloud compute tpus "*" describe "*)
        what=request answer=ABSENT
        [[ $3 != tpu-vm ]] || what=slice
        [[ ! -e $RECORD/$what ]] || next $what
        case $answer in
            ABSENT) echo "ERROR: NOT_FOUND: Resource was not found" >&2 && exit 1 ;;
            "") echo "ERROR: no route to host" >&2 && exit 1 ;;
            *exit-code*) # ACTIVE exit-code 0: the job ends by itself
                job=$(find "$RECORD/buckets" -name launch)/$JOB_NAME
                mkdir -p "$job/exit-codes"
                echo "${answer##* }" >"$job/exit-codes/$(<"$job/run-id")"
                echo "${answer%% *}"
                ;;
            *) echo "$answer" ;;
        esac
        ;;
    "python -m pip wheel "*) touch "${arguments[-2]}/activation_pipeline-0.1.0-py3-none-any.whl" ;;
    "python3.11 -m venv "*)
        mkdir -p "$3/bin"
        ln -s "$(readlink -f "$0")" "$3/bin/python"
        ;;
    "python -m pip install "*)
        if [[ -s $RECORD/install ]]; then
            next install
            exit "$answer"
        fi
        ;;
    "python -m pipeline.run "* | "srun "*)
        echo "${HF_TOKEN:-no token}" >"$RECORD/token"
        next job
        if [[ $answer == wait ]]; then # for SIGTERM
            trap 'exit 42' TERM
            touch "$RECORD/waiting"
            while true; do sleep 0.1; done
        fi
        if [[ $answer == "released "* ]]; then # until there is $RECORD/released
            touch "$RECORD/waiting"
            until [[ -e $RECORD/released ]]; do sleep 0.1; done
        fi
        exit "${answer#released }"
        ;;
esac
