# shellcheck shell=bash
# Timed stages: `stage NAME COMMAND…` runs the command, prints how many minutes it took, and ends the whole
# script with the name of the stage when it fails. Sourced by ./run and ./test.

STAGE_LINES=()

# Prints minutes with two decimals between two readings of EPOCHREALTIME.
minutes_between() {
    local micros=$((${2/[.,]/} - ${1/[.,]/}))
    local hundredths=$((micros / 600000))
    printf '%d.%02d' $((hundredths / 100)) $((hundredths % 100))
}

stage() {
    local name=$1 begin=$EPOCHREALTIME status=0 minutes
    shift
    printf '\n==> %s\n' "$name"
    # The command runs in a condition, where `set -e` is off: stages are single commands or functions that
    # return the status of what failed.
    "$@" || status=$?
    minutes=$(minutes_between "$begin" "$EPOCHREALTIME")
    STAGE_LINES+=("$(printf '%-28s %6s min' "$name" "$minutes")")
    if ((status != 0)); then
        printf '==> %s failed (exit %d) after %s min\n' "$name" "$status" "$minutes" >&2
        exit "$status"
    fi
    printf '    %s: %s min\n' "$name" "$minutes"
}

# Prints one line for every stage that has run.
stage_table() {
    printf '%s\n' "${STAGE_LINES[@]}"
}
