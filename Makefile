# `make up` and `make test` need nothing but Python (>= 3.11), pip and make; all else comes from the package index,
# by hash, into .venv.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

# uv does not read pip's configuration: a mirror that is set there is passed on.
export UV_DEFAULT_INDEX ?= $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null))
ifeq ($(UV_DEFAULT_INDEX),)
unexport UV_DEFAULT_INDEX
endif
# Some environments forbid Python to keep what it compiles: each start of a process would do it again, for half a second.
unexport PYTHONDONTWRITEBYTECODE
UV_INSTALL = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python

.PHONY: up test check format bench simulate simulate-planted soak-cluster soak-install soak-identity test-first-boot test-engines lock lock-engine release test-release lock-release clean

up: .venv/runtime
	@exec $(BIN)/llmgw up $(ARGS)

# Most tests wait: four of them share two cores well.
WORKERS ?= $(shell echo $$(( $$(nproc) * 2 )))

test: check
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: .venv/dev
	$(BIN)/ruff check src tests benchmarks deploy
	$(BIN)/ruff format --check src tests benchmarks deploy
	$(BIN)/mypy
	$(BIN)/mypy -p deploy.release
	$(BIN)/lint-imports

format: .venv/dev
	$(BIN)/ruff check --fix src tests benchmarks deploy
	$(BIN)/ruff format src tests benchmarks deploy

# One seed replays exactly: make simulate SEEDS=123. Many: make simulate SEEDS=1-10000 STEPS=1000 JOBS=2.
SEEDS ?= 1-1000
STEPS ?= 1000
JOBS ?= 2

simulate: .venv/dev
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --steps $(STEPS) --jobs $(JOBS) $(ARGS)

simulate-planted: .venv/dev
	$(BIN)/python -m tests.simulation.planted $(ARGS)

soak-cluster: .venv/dev
	$(BIN)/python -m tests.cluster.net.soak $(ARGS)

# kill -9 of installs at random moments: make soak-install ARGS="--kills 200"
soak-install: .venv/dev
	$(BIN)/python -m tests.agent.install.soak $(ARGS)

# A year of renewals with kill -9 at every step, and 200 races for one token: a quarter of an hour.
# make soak-identity ARGS="--seed 2 --days 30"
soak-identity: .venv/dev
	$(BIN)/python -m tests.control.year $(ARGS)
	LLMGW_RACES=200 $(BIN)/python -m pytest -q tests/control/test_house.py -k race

# The engines themselves, installed by agents: minutes, gigabytes, and nothing for a machine that is busy.
# ARGS="-k sglang" for some of it; LLMGW_REAL_ENGINES=/FOLDER keeps what is installed for the next run.
test-engines: export LLMGW_REAL_ENGINES ?= 1
test-engines: .venv/dev
	$(BIN)/python -m pytest -s tests/engines_real $(ARGS)

# The data of a machine's first boot, taken by the cloud-init of Debian 12: mmdebstrap makes the system in a minute.
test-first-boot: export LLMGW_FIRST_BOOT ?= /var/tmp/llmgw-first-boot
test-first-boot: .venv/dev
	$(BIN)/python -m pytest -s tests/first_boot $(ARGS)

# The list of packages that agents install an engine from: make lock-engine ENGINE=vllm VERSION=0.33.0 BUILD=cuda
BUILD ?= cuda
lock-engine: .venv/dev
	$(BIN)/python deploy/lock_engine.py $(ENGINE) $(VERSION) $(BUILD) $(ARGS)

# What llmgw is installed from: dist/vX.Y.Z/. ARGS="--arch amd64" for one of them; ARGS="--releases URL" says where they
# will be.
release: .venv/release
	$(BIN)/python -m deploy.release build $(ARGS)

# A release as it is used: built twice, started in bare systems. As root; minutes.
test-release: export LLMGW_TEST_RELEASE ?= 1
test-release: .venv/release
	$(BIN)/python -m pytest -s tests/release $(ARGS)

lock-release: .venv/release
	$(BIN)/uv pip compile $(LOCK) deploy/release/requirements.in -o deploy/release/requirements.txt
	$(BIN)/python -m deploy.release lock

bench: .venv/dev
	for each in gateway control promises plan install; do $(BIN)/python benchmarks/$$each/run.py || exit 1; done

lock: .venv/bootstrap
	$(BIN)/uv pip compile $(LOCK) requirements/bootstrap.in -o requirements/bootstrap.txt
	$(BIN)/uv pip compile $(LOCK) pyproject.toml -o requirements/runtime.txt
	$(BIN)/uv pip compile $(LOCK) --group dev pyproject.toml -o requirements/dev.txt
LOCK = --quiet --universal --python-version 3.11 --generate-hashes --no-header

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

.venv/bootstrap: requirements/bootstrap.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	    "llmgw needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	@touch $@

.venv/runtime: .venv/bootstrap requirements/runtime.txt pyproject.toml
	$(UV_INSTALL) --require-hashes -r requirements/runtime.txt
	$(UV_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/dev: .venv/runtime requirements/dev.txt
	$(UV_INSTALL) --require-hashes -r requirements/dev.txt
	@touch $@

.venv/release: .venv/dev deploy/release/requirements.txt
	$(UV_INSTALL) --require-hashes -r deploy/release/requirements.txt
	@touch $@
