#!/usr/bin/env bash
# Makes .venv with everything that the demo, the tests and the tools need, or brings it up to date.
# Quick when there is nothing to do. Needs Python 3.10 to 3.13 with venv; PYTHON=/path/to/python chooses one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=$PWD
stamp=.venv/tfps-installed

runs() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

is_made_here() { # the scripts in .venv/bin name their interpreter by its path, and so does this one
    runs .venv/bin/python && grep -qF "$here/.venv" .venv/bin/activate 2>/dev/null
}

if [[ -L .venv ]]; then # another checkout's: to clear it or install into it would break that one
    runs .venv/bin/python && exit 0
    echo "tools/venv.sh: .venv is a link to $(readlink .venv), which has no Python that fits; make that one where it" \
        "belongs, or remove the link" >&2
    exit 1
fi

# An installation is valid for these files at this place (a .venv that has been moved does not work).
wanted="$here $(cat setup.py pyproject.toml constraints.txt tfps/wire/_native.c | cksum)"
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && is_made_here; then
    exit 0
fi

if ! is_made_here; then
    for python in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 none; do
        runs "$python" && break
    done
    if [[ $python == none ]]; then
        found=$(python3 --version 2>/dev/null) || found=${found:-none}
        echo "tools/venv.sh: needs Python 3.10, 3.11, 3.12 or 3.13, found ${found}; PYTHON=/path/to/python chooses one" >&2
        exit 1
    fi
    echo "Making .venv with $("$python" --version) ..."
    if ! log=$("$python" -m venv --clear .venv 2>&1); then
        echo "$log" >&2
        echo "tools/venv.sh: $python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
        exit 1
    fi
fi

echo "Installing tfps, TensorFlow and the tools into .venv (a few hundred MB, only the first time) ..."
rm -f "$stamp"
export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! log=$(.venv/bin/python -m pip install --no-input -q -c constraints.txt -e '.[cpu,dev,docs,examples]' 2>&1 </dev/null); then
    echo "$log" >&2
    echo "tools/venv.sh: the installation failed, see above" >&2
    exit 1
fi
# Programs in tools/ import each other as the package that they are.
echo "$here" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tfps-tools.pth"
echo "$wanted" >"$stamp"
