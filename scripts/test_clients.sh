# shellcheck shell=bash
# Clients for the end-to-end tests (gRPC for Python), pinned by scripts/test_clients.txt and kept under .cache/ in a
# directory named by that file's digest and the Python's version. Sourced by ./test, and by the test itself where
# that was not run; from the root of the repository.

# Installs the clients where they are missing and sets TEST_CLIENTS_PYTHON to the interpreter that has them.
ensure_test_clients() {
    local digest python directory
    digest=$(sha256sum scripts/test_clients.txt | cut --characters=1-12)
    python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])') || return
    directory=$PWD/.cache/test-clients-$digest-$python
    # shellcheck disable=SC2034  # read by whoever sources this
    TEST_CLIENTS_PYTHON=$directory/bin/python
    [[ -e $directory/complete ]] && return
    mkdir --parents .cache || return
    (
        # Tests run beside each other.
        flock 9 || exit
        [[ -e $directory/complete ]] && exit
        rm --recursive --force "$directory"
        python3 -m venv "$directory" &&
            "$directory/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps \
                --only-binary :all: --requirement scripts/test_clients.txt &&
            touch "$directory/complete"
    ) 9>"$directory.lock"
}
