# shellcheck shell=bash
# Sourced by the jobs beside it: `crrl train` that stops before its time is up and goes on where it stopped.

read -ra crrl <<<"${CRRL:-.venv/bin/crrl}" # for example CRRL="apptainer run --nv crrl.sif"

# train CONFIG [KEY=VALUE]...: the exit code is that of `crrl train`; a run that the job's time cut short is queued again.
train() {
    local plan run status=0
    plan=$("${crrl[@]}" train "$@" --dry-run --json) # a mistake ends the job here
    run=$(sed -n 's/.*"run": "\([^"]*\)".*/\1/p' <<<"$plan")
    if [ -s "$run/log.jsonl" ]; then
        set -- "$@" --resume
    fi
    again=
    trap 'again=yes; kill -USR1 $!' USR1 # of --signal=B:USR1@300; srun hands it on
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${crrl[@]}" train "$@" &
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
