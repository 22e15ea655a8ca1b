# shellcheck shell=bash
# Debian packages: asks dpkg first and calls apt-get only for what is missing, so that a second run costs
# milliseconds. Sourced by ./run and ./test; sudo is used where the caller is not root.

# What building and running needs: a C compiler and the static C library, mkfs for disk layers, setpriv for
# the private database, and Python for the scene's program.
# shellcheck disable=SC2034  # used by the scripts that source this
RUN_PACKAGES=(ca-certificates curl e2fsprogs gcc libc6-dev pkg-config python3 util-linux)
# What ./test needs beyond that: the tools' virtual environment, the linter of scripts, ps and top for the tests that
# look for leftovers, peers for the benchmark, and what the tests of terminals use.
# shellcheck disable=SC2034  # used by ./test
TEST_PACKAGES=(bubblewrap crun ncurses-base procps python3-venv shellcheck tmux vim)

as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        sudo "$@"
    fi
}

is_installed() {
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

apt_install() {
    echo "installing: $*"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "$@" && return
    # The package lists may be absent or old, as in a fresh image.
    as_root apt-get update --quiet=2 || return
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "$@"
}

# Prints the directory with the programs of the newest installed PostgreSQL, or fails.
postgres_directory() {
    local directory
    while IFS= read -r directory; do
        [[ -x $directory/initdb && -x $directory/postgres ]] && echo "$directory" && return
    done < <(printf '%s\n' /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/local/pgsql/bin | sort --version-sort --reverse)
    directory=$(command -v postgres) && [[ -x $(dirname "$directory")/initdb ]] && dirname "$directory"
}

# Installs PostgreSQL's programs. Debian's package makes and starts a cluster on port 5432 unless it is told not
# to; nothing here wants that cluster, and a user may have something else on the port. The setting is taken away
# again, so that later installations behave as Debian has it.
ensure_postgres() {
    postgres_directory >/dev/null && return
    local setting=/etc/postgresql-common/createcluster.d/cloister-no-cluster.conf status=0
    as_root mkdir --parents "${setting%/*}" || return
    echo 'create_main_cluster = false' | as_root tee "$setting" >/dev/null || return
    apt_install postgresql || status=$?
    as_root rm --force "$setting"
    return "$status"
}

# Installs the named packages that are missing, and PostgreSQL.
ensure_packages() {
    local name missing=()
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        ensure_commands
        return
    fi
    for name in "$@"; do
        is_installed "$name" || missing+=("$name")
    done
    if ((${#missing[@]} > 0)); then
        apt_install "${missing[@]}" || return
    fi
    ensure_postgres
}

# Where there is no apt-get, nothing is installed: says what is missing, all at once.
ensure_commands() {
    local name missing=()
    for name in cc curl mkfs.ext4 pkg-config python3 setpriv; do
        command -v "$name" >/dev/null || missing+=("$name")
    done
    postgres_directory >/dev/null || missing+=("initdb and postgres (PostgreSQL 14 or newer)")
    if ((${#missing[@]} > 0)); then
        echo "This is no Debian, so nothing was installed. Missing:" >&2
        printf '  %s\n' "${missing[@]}" >&2
        return 1
    fi
}
