#!/usr/bin/env bash
# Runs the unit tests under each named Python, such as `3.12 3.13`, that this machine has, and prints a summary.
# PYTEST has more arguments for pytest. The environments are .venvs/python-<release>.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Print the interpreter of a release, if one works. pyenv's shims don't work unless pyenv is activated.
find_python() {
    local root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")} each
    for each in $(type -aP "python$1" || true) "/usr/bin/python$1" "$root/versions/$1".*/bin/python; do
        if "$each" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$each"
            return
        fi
    done
    return 1
}

make_environment() {
    local folder=.venvs/python-$1
    if [ "$folder/.ready" -nt tests/pythons.txt ] && [ "$folder/.ready" -nt pyproject.toml ]; then return; fi
    echo "== The environment $folder, once =="
    test -x "$folder/bin/python" || "$2" -m venv --without-pip "$folder"
    .venv/bin/python -m pip --disable-pip-version-check --python "$folder/bin/python" \
        install --quiet -r tests/pythons.txt --editable '.[report]'
    touch "$folder/.ready"
}

status=0 summary=()
for release in "$@"; do
    if ! python=$(find_python "$release"); then
        summary+=("Python $release: not found")
        continue
    fi
    make_environment "$release" "$python"
    log=$(mktemp)
    # The environment lacks these packages, so tests that need one are skipped. Any other absent package is an error.
    # shellcheck disable=SC2086
    TESTS_LACK=torch,vllm,verl,transformers,numpy ".venvs/python-$release/bin/python" -m pytest -n 3 \
        tests/unit ${PYTEST:-} | tee "$log" || status=1
    summary+=("$("$python" -V): $(tail -n 1 "$log" | tr -d '=')")
    rm -f "$log"
done
printf '%s\n' "${summary[@]:-no Python was named}"
exit "$status"
