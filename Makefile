# make demo: a real GRPO run of verl on this machine, profiled. make test: all tests. Both make what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# verl imports thousands of modules in a dozen processes: without their bytecode a run takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check clean

demo: $(VENV)/.ready
	@examples/demo.sh

test: $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m pytest $(PYTEST)

check: $(VENV)/.ready-for-tests
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(VENV)/.ready: examples/verl_cpu/requirements.txt pyproject.toml $(wildcard sitecustomize/*)
	@echo "== The environment in $(VENV): verl, Ray, vLLM and torch for the CPU, 1 GB to download, once =="
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps -r examples/verl_cpu/requirements.txt
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.ready-for-tests: $(VENV)/.ready tests/requirements.txt
	$(PIP) install --quiet -r tests/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) autoprof_runs examples/verl_cpu/.assets
