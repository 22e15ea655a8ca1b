# shellcheck shell=bash
# Developer tools (cargo-nextest, cargo-deny, just), pinned by scripts/tools.txt and kept under .cache/ in a
# directory named by that file's digest: a changed pin makes a new directory, an unchanged one costs nothing.
# Sourced by ./test and the justfile, from the root of the repository.

# Puts the tools into PATH; installs them from wheels that carry binaries, or builds them where there is no wheel
# for this machine.
ensure_tools() {
    local digest directory name version
    digest=$(sha256sum scripts/tools.txt | cut --characters=1-12)
    directory=$PWD/.cache/tools-$digest
    PATH=$directory/bin:$PATH
    [[ -e $directory/complete ]] && return
    rm --recursive --force "$directory"
    mkdir --parents "$directory"
    if ! {
        python3 -m venv "$directory" &&
            "$directory/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps \
                --only-binary :all: --requirement scripts/tools.txt
    }; then
        echo "no ready-made tools for this machine: building them (some minutes, once)"
        while read -r name version; do
            cargo install --quiet --locked --root "$directory" "$name" --version "$version" || return
        done < <(tool_crates)
    fi
    touch "$directory/complete"
}

# Prints the crate and version of each pinned tool.
tool_crates() {
    sed --quiet --regexp-extended \
        's/^(astral-dev-toolchain-|rust-)([a-z-]+)==([0-9.]+).*/\2 \3/p' scripts/tools.txt
}
