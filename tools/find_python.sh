#!/bin/sh
# Print the path of a Python that is new enough (3.12 or later), or say what to install. Looks, in this order, at what
# .python-version selects under pyenv, at the PATH, and at what uv has or can provide.
set -eu
wanted=$(cat "$(dirname "$0")/../.python-version")

# pyenv puts shims on the PATH even for versions that are not selected; they fail when run. So each candidate is run.
print_if_suitable() {
    "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 12))' >/dev/null 2>&1 || return 1
    printf '%s\n' "$1"
    exit 0
}

if command -v pyenv >/dev/null 2>&1; then
    for version in ${PYENV_VERSION:-} "$wanted" 3.13 3.12; do
        prefix=$(pyenv prefix "$version" 2>/dev/null) || continue
        print_if_suitable "$prefix/bin/python3" || :
    done
fi
for name in "python$wanted" python3.13 python3.12 python3.14 python3; do
    python=$(command -v "$name" 2>/dev/null) || continue
    print_if_suitable "$python" || :
done
if command -v uv >/dev/null 2>&1; then
    python=$(uv python find --no-project --no-python-downloads '>=3.12' 2>/dev/null) && print_if_suitable "$python" || :
    printf 'setup: asking uv for Python %s\n' "$wanted" >&2
    uv python install --quiet "$wanted" >&2 || :
    python=$(uv python find --no-project --no-python-downloads "$wanted" 2>/dev/null) && print_if_suitable "$python" || :
fi
cat >&2 <<'END'
error: no Python of version 3.12 or newer was found: neither under pyenv, nor on the PATH, nor through uv
hint: Debian 13: `apt-get install python3 python3-venv`
hint: Debian 12 has only 3.11: `pyenv install 3.13`, or install uv, then run this again
END
exit 1
