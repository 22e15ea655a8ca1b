# Short names for what developers do. `just` comes with the pinned tools: `. scripts/tools.sh && ensure_tools`.

# List the recipes.
default:
    @just --list --unsorted

# Build, start and show the scene.
run *arguments:
    ./run {{arguments}}

# Every check there is.
test *arguments:
    ./test {{arguments}}

# Write every generated file: API code, reference pages.
gen:
    cargo xtask gen

# The rules of the tree that no compiler knows.
tidy:
    cargo xtask tidy

# Format, lint with warnings as errors, and the tidy rules: the quick part of `just test`.
check:
    cargo fmt --all --check
    cargo clippy --quiet --workspace --all-targets -- -D warnings
    cargo xtask tidy

# Build the newest gVisor that is known to work and put it beside the built `cloister`, which offers it when it is started again.
gvisor:
    #!/usr/bin/env bash
    set -euo pipefail
    . scripts/gvisor.sh
    ensure_runsc
    for profile in debug release; do
        place_runsc "$RUNSC" "${CARGO_TARGET_DIR:-target}/$profile"
    done

# Measure a running Cloister beside bubblewrap and crun or runc; `--write` puts the table into bench/results.md.
bench *arguments:
    cargo run --quiet --release --package cloister-bench -- {{arguments}}

# Output of many GiB through the whole path: equal by count and BLAKE3, and what each process took at most.
torture-output gib="10":
    CLOISTER_TEST_OUTPUT_GIB={{gib}} cargo test --quiet --package cloister --test e2e_output -- --nocapture \
        --exact a_gibibyte_arrives_equal_and_nobody_on_the_way_grows

# Kill every process at every step, with 20 sessions and in an order from a seed; `--write` puts the figures into bench/results.md.
torture *arguments:
    TORTURE_ARGUMENTS="{{arguments}}" cargo test --quiet --package cloister --test e2e_crash -- \
        --exact torture::torture --nocapture

# Licences, banned crates and sources of every dependency.
deny:
    #!/usr/bin/env bash
    set -euo pipefail
    . scripts/tools.sh
    ensure_tools
    cargo-deny --log-level error check --hide-inclusion-graph licenses bans sources
