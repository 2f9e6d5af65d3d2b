# Two commands do everything: `make run` shows Belljar at work, `make test` runs the tests.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.belljar-ready
DIST   ?= dist

unexport PYTHONDONTWRITEBYTECODE  # tests start Belljar hundreds of times, and would compile it each time

.PHONY: run test test-all test-quick test-containers setup check bench docs dist profiles clean

run: $(STAMP)              ## a small showcase on the embedded default: no Docker, no root
	@$(BIN)/python examples/showcase.py

test: $(STAMP)             ## everything a change can break, on real sandboxes; as root also on the container engines, which it starts
	@sh scripts/system_packages.sh
	@sh scripts/test_engines.sh prepare & $(BIN)/belljar setup wasm; ready=$$?; wait; exit $$ready
	@$(BIN)/python scripts/run_tests.py $(TESTS)

test-all:                  ## the same and what takes long: see CONTRIBUTING.md
	@$(MAKE) test TESTS='--exhaustive $(TESTS)'

test-quick:                ## the same without container engines
	@$(MAKE) test TESTS='-m "not containers"'

test-containers:           ## only what needs container engines
	@$(MAKE) test TESTS='-m containers'

check: $(STAMP)            ## style, types, layers, shell scripts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/shellcheck src/belljar/guest/shell/*/*.sh scripts/*.sh images/*.sh

bench: $(STAMP)            ## side by side with bare Python, bubblewrap by hand and peers; BENCH=--quick for less
	@$(BIN)/belljar setup wasm
	@$(BIN)/python tests/bench/bench.py $(BENCH)
	@$(BIN)/python tests/bench/bench_wasm.py $(BENCH)
	@$(BIN)/python tests/bench/bench_containers.py $(BENCH)
	@$(BIN)/python tests/bench/bench_living.py $(BENCH)
	@$(BIN)/python tests/bench/bench_service.py $(BENCH)
	@$(BIN)/python tests/bench/bench_cli.py $(BENCH)
	@$(BIN)/python tests/bench/bench_neighbour.py $(BENCH)

docs: $(STAMP)             ## the documentation as a site, in build/site; nothing is loaded from elsewhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)             ## the package, built into dist, checked, installed into a clean environment and tried there
	@$(BIN)/python scripts/check_dist.py $(DIST)

setup: $(STAMP)

profiles: $(STAMP)         ## compile the seccomp profile anew, after a change of guest.json
	@$(BIN)/python scripts/compile_profiles.py

$(STAMP): pyproject.toml
	@PYTHON="$(PYTHON)" sh scripts/make_venv.sh $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache
