#!/bin/sh
# Make .venv with the `sluicegate` command, and install what the isolation needs. Safe to repeat. Run by `make setup`.
#
# System packages come from apt on Debian and its relatives; elsewhere they are named, and the set-up stops. Python packages
# come from wherever pip is configured to get them, at the versions and hashes of requirements.lock.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$1" >&2
    shift
    for hint in "$@"; do printf 'hint: %s\n' "$hint" >&2; done
    exit 1
}

# --- system packages -------------------------------------------------------------------------------------------------

have_libseccomp() {
    for directory in /usr/lib/*-linux-gnu* /lib/*-linux-gnu* /usr/lib64 /lib64 /usr/lib /lib; do
        [ ! -e "$directory/libseccomp.so.2" ] || return 0
    done
    return 1
}

have_ca_certificates() {
    for file in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
        [ ! -s "$file" ] || return 0
    done
    return 1
}

updated=no
install_packages() {
    if ! command -v apt-get >/dev/null 2>&1; then
        die "not found on this system: $*" "install the packages that provide them (named as Debian names them), then run this again"
    fi
    if [ "$(id -u)" = 0 ]; then
        as_root=
    elif command -v sudo >/dev/null 2>&1; then
        as_root=sudo
    else
        die "not found on this system: $*" "as root: \`apt-get install --no-install-recommends $*\`"
    fi
    say "installing $*"
    log=$(mktemp)
    if [ "$updated" = no ]; then
        $as_root apt-get -qq update >"$log" 2>&1 || { cat "$log" >&2; say "\`apt-get update\` failed; going on with the lists there are"; }
        updated=yes
    fi
    if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        die "apt-get could not install: $*"
    fi
    rm -f "$log"
}

set --
command -v bwrap >/dev/null 2>&1 || set -- "$@" bubblewrap
have_libseccomp || set -- "$@" libseccomp2
have_ca_certificates || set -- "$@" ca-certificates
[ $# = 0 ] || install_packages "$@"

# --- a Python --------------------------------------------------------------------------------------------------------

# A .venv whose interpreter has gone, or was never finished, is made again.
if ! .venv/bin/python -c 'import sys, pip; raise SystemExit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    python=$(sh tools/find_python.sh)
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        # Debian packs these apart, under the version's name.
        install_packages "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    fi
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi

# --- Python packages -------------------------------------------------------------------------------------------------

pip() {
    .venv/bin/python -m pip --disable-pip-version-check -qq "$@"
}
say "installing the locked packages"
pip install --require-hashes --requirement requirements.lock
pip install --no-deps --no-build-isolation --editable .
