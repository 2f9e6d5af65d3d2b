# Two commands do everything: `make run` shows Belljar at work, `make test` runs all tests.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.belljar-ready

.PHONY: run test test-containers setup check bench profiles clean

run: $(STAMP)              ## a small showcase on the embedded default: no Docker, no root
	@$(BIN)/python examples/showcase.py

test: $(STAMP)             ## all tests but those of container engines, on real sandboxes
	@sh scripts/system_packages.sh
	@$(BIN)/belljar setup wasm
	@echo "make test: the container engines are not part of this run while they are in progress: make test-containers"
	@$(BIN)/python -m pytest -m "not containers"

test-containers: $(STAMP)  ## the suites on a real Docker, gVisor and Podman, which are installed and started; half an hour
	@sh scripts/system_packages.sh
	@$(BIN)/belljar setup wasm
	@$(BIN)/python -m pytest -m containers

check: $(STAMP)            ## style, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP)            ## side by side with bare Python, bubblewrap by hand and peers; BENCH=--quick for less
	@$(BIN)/belljar setup wasm
	@$(BIN)/python tests/bench/bench.py $(BENCH)
	@$(BIN)/python tests/bench/bench_wasm.py $(BENCH)
	@$(BIN)/python tests/bench/bench_containers.py $(BENCH)

setup: $(STAMP)

profiles: $(STAMP)         ## compile the seccomp profile anew, after a change of guest.json
	@$(BIN)/python scripts/compile_profiles.py

$(STAMP): pyproject.toml
	@PYTHON="$(PYTHON)" sh scripts/make_venv.sh $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache
