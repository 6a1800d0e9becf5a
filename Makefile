# make demo: a real GRPO run of verl on this machine, profiled. make test: the tests. make faults: those that let things go
# wrong, and a table of what was lost. make test-engines: the same engine in several releases, each in an environment of
# its own; ENGINES=all for all of them. make matrix: whether figures are the same with and without autoprof, whatever is
# recorded, in real runs of verl and TRL. make test-releases: real runs of older releases of verl, each its
# own wheel in front of the same environment; RELEASES=all for all of them. PYTEST=--thorough makes the real runs too for
# which CI has no time, PYTEST='-n 0' has one process for all tests. Tests of pages take the
# machine's Chromium, and root gets Debian's where there is none (tests/chromium.sh; CHROMIUM=none: they are skipped).
# make contracts: the stored signatures of the targets' releases, from PyPI; CONTRACTS=--new looks for newer releases,
# CONTRACTS=vllm==0.33.0 refreshes one. make bench: the benchmarks, and bench/RESULTS.md; BENCH="boot calls" for some of
# them, BENCH=--quick for a look. All make what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# verl imports thousands of modules in a dozen processes: without their bytecode a run takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

# Other releases of the engines, by the names of their requirement files; these, or ENGINES=all.
ENGINES ?= sglang-0.5.8 sglang-0.5.23 trl-1.16.0 vllm-0.32.0
CHOSEN := $(ENGINES)
ifeq ($(ENGINES),all)
CHOSEN := $(patsubst tests/engines/requirements/%.txt,%,$(wildcard tests/engines/requirements/*.txt))
endif

# Older releases of verl, likewise; these, or RELEASES=all.
RELEASES ?= verl-0.5.0 verl-0.7.1
VERLS := $(RELEASES)
ifeq ($(RELEASES),all)
VERLS := $(patsubst tests/releases/requirements/%.txt,%,$(wildcard tests/releases/requirements/*.txt))
endif

# Other releases of wrapt, likewise, which the tests put in front: that of $(VENV) is the newest.
WRAPTS := $(patsubst tests/wrapt/%.txt,%,$(wildcard tests/wrapt/*.txt))

# Whose tests `make differential` runs, which only source distributions have.
SUITES := wrapt==2.5.2 accelerate==1.15.0

# What autoprof is measured against: each in an environment of its own, since its .pth runs in every interpreter there.
PEERS := $(patsubst bench/requirements/%.txt,%,$(wildcard bench/requirements/*.txt))
INSTALLED := pyproject.toml $(wildcard sitecustomize/* recipes/*) $(shell find autoprof -name '*.py')

.PHONY: demo environments chromium test differential faults matrix test-engines test-releases contracts bench check clean

# What the tests need, with -j beside each other.
environments: chromium $(VENV)/.ready-for-tests $(WRAPTS:%=.venvs/%/.ready) $(CHOSEN:%=.venvs/%/.ready) $(VERLS:%=.venvs/%/.ready)

demo: $(VENV)/.ready
	@examples/demo.sh

chromium:
	@tests/chromium.sh

test: chromium $(VENV)/.ready-for-tests $(WRAPTS:%=.venvs/%/.ready)
	$(VENV)/bin/python -m pytest -n 2 --ignore tests/engines --ignore tests/releases $(PYTEST)

# Programs and other people's test suites, without autoprof and with it; those that are quick are in `make test`, too.
differential: $(VENV)/.ready-for-tests .venvs/differential/.ready
	DIFFERENTIAL=.venvs/differential $(VENV)/bin/python -m pytest -n 2 tests/differential --thorough $(PYTEST)

# Those that are quick are in `make test`, too.
faults: $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m pytest --ignore tests/engines --ignore tests/releases --thorough --faults -m fault $(PYTEST)

test-engines: $(VENV)/.ready-for-tests $(CHOSEN:%=.venvs/%/.ready)
	ENGINES="$(CHOSEN)" $(VENV)/bin/python -m pytest tests/engines $(PYTEST)

test-releases: $(VENV)/.ready-for-tests $(VERLS:%=.venvs/%/.ready)
	$(VENV)/bin/python -m pytest tests/releases --releases "$(VERLS)" $(PYTEST)

# Whatever is recorded changes no figure: of verl (some 16 runs), and of TRL in the environments of ENGINES.
matrix: $(VENV)/.ready-for-tests $(CHOSEN:%=.venvs/%/.ready)
	ENGINES="$(CHOSEN)" $(VENV)/bin/python -m pytest -rP --thorough tests/real/test_verl_matrix.py tests/engines/test_trl_matrix.py $(PYTEST)

contracts: $(VENV)/.ready-for-tests
	$(VENV)/bin/python tests/contracts/make.py $(CONTRACTS)

bench: $(VENV)/.ready-for-tests $(PEERS:%=.venvs/bench-%/.ready) .venvs/bench-autoprof/.installed
	$(VENV)/bin/python -m bench $(BENCH)

check: $(VENV)/.ready-for-tests
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/vermin --quiet --no-tips --violations --target=3.10- autoprof sitecustomize

$(VENV)/.ready: examples/verl_cpu/requirements.txt pyproject.toml $(wildcard sitecustomize/*)
	@echo "== The environment in $(VENV): verl, Ray, vLLM and torch for the CPU, 1 GB to download, once =="
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps -r examples/verl_cpu/requirements.txt
	$(PIP) install --quiet --editable '.[report]'
	@touch $@

$(VENV)/.ready-for-tests: $(VENV)/.ready tests/requirements.txt
	$(PIP) install --quiet -r tests/requirements.txt
	@touch $@

.venvs/wrapt-%/.ready: tests/wrapt/wrapt-%.txt | $(VENV)/.ready-for-tests
	$(PIP) install --quiet --no-deps --upgrade --target .venvs/wrapt-$* -r $<
	@touch $@

# In front of the packages of $(VENV), of the programs that use them only.
.venvs/differential/.ready: tests/differential/requirements.txt | $(VENV)/.ready-for-tests
	$(PIP) install --quiet --no-deps --upgrade --target .venvs/differential -r $<
	$(PIP) download --quiet --no-deps --no-build-isolation --no-binary :all: --dest .venvs/differential/sources $(SUITES)
	@touch $@

.venvs/%/.ready: tests/engines/requirements/%.txt pyproject.toml $(wildcard sitecustomize/*) | $(VENV)/.ready-for-tests
	@echo "== The environment .venvs/$*, once =="
	test -x .venvs/$*/bin/python || $(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	$(VENV)/bin/python -m pip --disable-pip-version-check --python .venvs/$*/bin/python install --quiet --no-deps --editable .
	@touch $@

.venvs/bench-%/.ready: bench/requirements/%.txt | $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m venv --without-pip .venvs/bench-$*
	$(PIP) --python .venvs/bench-$*/bin/python install --quiet --no-deps -r $<
	@touch $@

.venvs/bench-autoprof/.installed: .venvs/bench-autoprof/.ready $(INSTALLED)
	$(PIP) --python .venvs/bench-autoprof/bin/python install --quiet --no-deps --force-reinstall .
	@touch $@

# Python alone: the wheel is put in front of the packages of $(VENV).
.venvs/verl-%/.ready: tests/releases/requirements/verl-%.txt | $(VENV)/.ready-for-tests
	$(PIP) install --quiet --no-deps --upgrade --target .venvs/verl-$* -r $<
	@touch $@

clean:
	rm -rf $(VENV) .venvs autoprof_runs examples/verl_cpu/.assets
