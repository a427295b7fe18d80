# shellcheck shell=bash
# Sourced by the jobs beside it: commands that stop before their time is up and go on where they stopped.

read -ra crrl <<<"${CRRL:-.venv/bin/crrl}" # for example CRRL="apptainer run --nv crrl.sif"

# train CONFIG [KEY=VALUE]...: `crrl train`, resumable.
train() {
    local plan
    plan=$("${crrl[@]}" train "$@" --dry-run --json) # a mistake ends the job here
    resumable "$(sed -n 's/.*"run": "\([^"]*\)".*/\1/p' <<<"$plan")" train "$@"
}

# resumable RUN COMMAND...: `crrl COMMAND...`, which goes on if the folder RUN has begun. The exit code is the command's;
# one that the job's time cut short is queued again.
resumable() {
    local run=$1 status=0
    shift
    if [ -s "$run/log.jsonl" ]; then
        set -- "$@" --resume
    fi
    again=
    trap 'again=yes; kill -USR1 $!' USR1 # of --signal=B:USR1@300; srun hands it on
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${crrl[@]}" "$@" &
    wait $! || status=$?
    if [ "$status" = 138 ]; then # the wait was interrupted, not the run
        status=0
        wait $! || status=$?
    fi
    if [ -n "$again" ] && [ "$status" = 130 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$status"
}
