# shellcheck shell=bash
# Rust: makes sure that `cargo` is there and new enough for Cargo.toml's `rust-version`. Debian 12's own is too
# old; rustup's documented installer is offered, and taken without asking under `--yes` or CI. Sourced by ./run
# and ./test, from the root of the repository.

# Succeeds when version $1 is at least version $2.
version_at_least() {
    [[ $(printf '%s\n%s\n' "$1" "$2" | sort --version-sort | head --lines=1) == "$2" ]]
}

# Prints the version of `cargo` in this directory, or nothing. With rustup, rust-toolchain.toml makes it fetch
# the pinned toolchain here.
cargo_version() {
    cargo --version 2>/dev/null | cut --delimiter=' ' --fields=2
}

ensure_rust() {
    local assume_yes=$1 needed found answer
    needed=$(sed --quiet 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    # rustup writes here; a shell that was open before does not have it in its PATH. It goes first, because an
    # older cargo of the distribution may stand in the way.
    [[ -x ${CARGO_HOME:-$HOME/.cargo}/bin/cargo ]] && PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
    found=$(cargo_version)
    if [[ -n $found ]] && version_at_least "$found" "$needed"; then
        echo "cargo $found"
        return
    fi
    echo "cargo ${found:-is missing}; Cloister needs $needed or newer."
    if ((EUID == 0)) && [[ -n ${SUDO_USER:-} ]]; then
        echo "You are here by sudo. Start this without sudo: it asks for sudo where it needs it." >&2
        return 1
    fi
    if [[ $assume_yes != yes ]]; then
        if [[ ! -t 0 ]]; then
            echo "Install Rust (see https://rustup.rs), or start this again with --yes." >&2
            return 1
        fi
        read -r -p "Install Rust for $USER with rustup's installer (https://sh.rustup.rs)? [y/N] " answer
        [[ $answer == [yY]* ]] || return 1
    fi
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
        sh -s -- -y --profile minimal --default-toolchain none --no-modify-path || return
    PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
    found=$(cargo_version)
    if [[ -z $found ]] || ! version_at_least "$found" "$needed"; then
        echo "rustup is installed, but cargo says \`${found:-nothing}\` where $needed is needed." >&2
        return 1
    fi
    echo "cargo $found"
}
