#!/bin/sh
# Makes the virtual environment with Belljar and its development tools in it; uv where it is installed, else pip.
set -eu
venv=$1
python=${PYTHON:-python3}
"$python" - <<'EOF' || { echo "Belljar needs Python 3.11 or later: make PYTHON=python3.12 run" >&2; exit 1; }
import sys
raise SystemExit(sys.version_info < (3, 11))
EOF
echo "Setting up $venv (once) …"
if command -v uv >/dev/null 2>&1; then
    uv venv --quiet --allow-existing --python "$python" "$venv"
    uv pip install --quiet --python "$venv/bin/python" --editable '.[dev]'
    exit 0
fi
"$python" -m venv "$venv" || {
    echo "python3 -m venv failed; on Debian: apt install python3-venv" >&2
    exit 1
}
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
