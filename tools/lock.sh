#!/bin/sh
# Resolve pyproject.toml, with its dev extra, into requirements.lock: exact versions with hashes, and no address, so that
# every machine fetches from the index that its own pip is configured for. With arguments: passed on, such as `--upgrade`.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python

# uv does not read pip's configuration.
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || :)}
[ -z "$index" ] || export UV_DEFAULT_INDEX="$index"

lock=$(mktemp)
trap 'rm -f "$lock"' EXIT
[ ! -f requirements.lock ] || cp requirements.lock "$lock"
.venv/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.12 --generate-hashes \
    --no-header --quiet --output-file "$lock" "$@"
if grep -n '://' "$lock"; then
    echo "error: the lock would name an address" >&2
    exit 1
fi
{
    echo "# What sluicegate and its development run with: exact versions and their hashes. Written by \`make lock\`."
    cat "$lock"
} > requirements.lock
