#!/usr/bin/env bash
# Plays the scene that ./run shows: one session, whose sandbox looks around and then runs into each of its limits.
# It is a check as well: an act that does not end as announced ends the scene with exit 1.
#
#   CLOISTER=target/release/cloister examples/scene/scene.sh
#
# Needs a running `cloister up` that the client's context knows.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
cloister=${CLOISTER:-cloister}
session=scene-$$
timings=()

milliseconds_since() {
    echo $(((${EPOCHREALTIME/[.,]/} - ${1/[.,]/}) / 1000))
}

# act TITLE EXIT_CODE WORDS COMMAND…: runs a command, shows what it prints, and requires that it ends with this code
# and that its output has these words.
act() {
    local title=$1 code=$2 words=$3 begin output status=0 took
    shift 3
    printf '\n── %s\n' "$title"
    begin=$EPOCHREALTIME
    output=$("$@" 2>&1) || status=$?
    took=$(milliseconds_since "$begin")
    [[ -n $output ]] && printf '%s\n' "$output"
    timings+=("$(printf '%6d ms  %s' "$took" "$title")")
    if ((status != code)) || ! grep --quiet --ignore-case --fixed-strings -- "$words" <<<"$output"; then
        printf 'scene: expected exit %d and the words "%s"; the command ended with %d\n' "$code" "$words" "$status" >&2
        return 1
    fi
}

inside() {
    "$cloister" exec --env "OUTER_NAMESPACES=$outer_namespaces" "$session" -- python3 /workspace/inside.py "$@"
}

remove_session() {
    "$cloister" session delete "$session" >/dev/null 2>&1 || true
}

put_program() {
    "$cloister" exec --interactive "$session" -- sh -c 'cat > /workspace/inside.py && echo "  written to /workspace/inside.py"' <inside.py
}

# The namespaces of this shell, for the program inside to compare its own with.
outer_namespaces=$(
    cd /proc/self/ns
    for name in cgroup ipc mnt net pid user uts; do
        printf '%s=%s ' "$name" "$(readlink "$name")"
    done
)

trap remove_session EXIT
act "create a session: 256 MiB of memory, half a CPU, 32 processes, 64 MiB of disk" 0 "" \
    "$cloister" session create --name "$session" --memory 256M --cpus 0.5 --pids 32 --disk 64M --ttl 10m
act "send the program in, through standard input" 0 "written" put_program
act "look around" 0 "kernel" inside look
act "what the host says about this sandbox, read inside after all hardening" 0 "$session" \
    "$cloister" session get "$session"
session_json=$("$cloister" session get "$session" --json)
code=137 words="out of memory"
# The gVisor of 2024, whose kernel calls itself 4.4.0, lets a program that is killed for its memory exit with 1.
[[ $session_json != *'"gvisor"'* || $session_json != *'"4.4.0"'* ]] || code=1 words="memory limit reached"
act "take memory until it is killed, and be told why" "$code" "$words" inside memory
act "fill the disk" 1 "disk full" inside disk
act "empty it again" 0 "" "$cloister" exec "$session" -- rm /workspace/big
# gVisor does not count the forks that it refuses, so that only the program knows.
words="process limit reached"
[[ $session_json != *'"gvisor"'* ]] || words=refused
act "start processes until the kernel refuses" 0 "$words" inside pids
act "try to get out" 0 "refused" inside network
act "and the same sandbox still works" 0 "still here" "$cloister" exec "$session" -- echo "  still here"
act "delete the session: sandbox, layer and output go" 0 "" "$cloister" session delete "$session"
trap - EXIT

printf '\n── how long each step took, each a command of its own through the whole control plane\n'
printf '%s\n' "${timings[@]}"
