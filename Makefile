# Targets that set up do so by themselves, once; `make help` lists them all.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := scripts/constraints.txt

.PHONY: help setup setup-test demo test test-fast test-slow test-saes lint docs config-table coverage train-demo-model train-demo-sae clean \
	audit-tpu audit-gpu audit-decode first-day bench bench-reader bench-host bench-peers bench-scale

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(VENV)/.setup  ## install the package and what it needs into .venv

setup-test: $(VENV)/.setup-test $(VENV)-moto/.setup

$(VENV)/.setup: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is %s. Use make PYTHON=python3.11 ..." % sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.setup-test: $(VENV)/.setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test]'
	@touch $@

$(VENV)-moto/.setup: scripts/moto-requirements.txt
	@test -x $(VENV)-moto/bin/python || $(PYTHON) -m venv $(VENV)-moto
	$(VENV)-moto/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VENV)-saes/.setup: scripts/saes-requirements.txt pyproject.toml $(CONSTRAINTS)
	@test -x $(VENV)-saes/bin/python || $(PYTHON) -m venv $(VENV)-saes
	$(VENV)-saes/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[train]" -r $<
	$(VENV)-saes/bin/python -m pip uninstall --quiet --yes torchvision  # which may be of another torch
	@touch $@

# JAX's CUDA plugin alone, without NVIDIA's libraries, which a compilation does not need.
$(VENV)-gpu/.setup: pyproject.toml $(CONSTRAINTS)
	@test -x $(VENV)-gpu/bin/python || $(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[tpu]'
	version=$$($(VENV)-gpu/bin/python -c 'import jax; print(jax.__version__)') && $(VENV)-gpu/bin/python -m pip install \
	  --quiet --disable-pip-version-check --no-deps jax-cuda12-pjrt==$$version jax-cuda12-plugin==$$version
	@touch $@

$(VENV)-peers/.setup: scripts/bench/peers/requirements.txt
	@test -x $(VENV)-peers/bin/python || $(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VENV)/.setup-docs: $(VENV)/.setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

$(VENV)/.setup-train: $(VENV)/.setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[train]'
	@touch $@

demo: setup  ## the main job on text and on ARC tasks, with the bundled model: CPU, no network
	$(BIN)/python scripts/demo/run_demo.py

# Also where it is set: the suite starts some 200 processes, and each would compile the package's modules again.
test test-fast: export PYTHONDONTWRITEBYTECODE =

test: setup-test  ## the test suite, in three processes: many tests wait for jobs that they start, or for time to pass
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-fast: setup-test  ## what needs no process of its own and compiles little
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not heavy'

test-slow: setup-test  ## the long soaks: 20 kills of a 30-block run, ...
	$(BIN)/python -m pytest -m slow

test-saes: setup-test $(VENV)-saes/.setup  ## SAEs of SAELens, sparsify and dictionary_learning, and training with these
	$(BIN)/python -m pytest -m slow tests/models/test_saes_of_libraries.py tests/scripts/test_train_with_libraries.py

lint: setup-test  ## style, formatting, who imports whom, and the sizes of things
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/lint/check_shape.py
	$(BIN)/python scripts/lint/check_imports.py

# What others import, and no more; an import that fails, or a warning of pdoc's, fails the target.
DOCUMENTED := pipeline '!pipeline\..*' pipeline.library '!pipeline\.library\..*' pipeline.store '!pipeline\.store\..*' \
  pipeline.core.errors pipeline.core.sites

docs: $(VENV)/.setup-docs  ## the API reference, from docstrings: build/docs/index.html
	rm -rf build/docs
	$(BIN)/python -W error::UserWarning -m pdoc --no-show-source -o build/docs $(DOCUMENTED)

audit-tpu: setup-test  ## what the compiled programs do on TPU slices, against docs/audit-tpu.json; no TPU is needed
	$(BIN)/python -m scripts.audit.audit $(AUDIT_TPU)

audit-gpu: $(VENV)-gpu/.setup  ## the same for GPUs, against docs/audit-gpu.json; no GPU is needed
	$(VENV)-gpu/bin/python -m scripts.audit.audit --platform gpu $(AUDIT_GPU)

audit-decode: $(VENV)-gpu/.setup  ## the same for decoding steps of TPUs and GPUs, against docs/audit-decode.json
	$(VENV)-gpu/bin/python -m scripts.audit.audit --platform decode $(AUDIT_DECODE)

bench: setup-test  ## the job against its own bare forward pass; writes build/bench.json
	$(BIN)/python -m scripts.bench.bench_job

bench-reader: setup  ## the reader against numpy on the same files; writes build/bench-reader.json
	$(BIN)/python -m scripts.bench.bench_reader

bench-host: setup  ## everything but the model, per core, against its floors; writes build/bench-host.json
	$(BIN)/python -m scripts.bench.bench_host

first-day: setup  ## on a new TPU or GPU machine: is the job right, how fast is it; writes build/first-day/report.md
	$(BIN)/python -m scripts.first_day $(FIRST_DAY)

bench-peers: setup $(VENV)-peers/.setup  ## against HF, TransformerLens, SAELens, nnsight; writes build/bench-peers.json
	$(BIN)/python -m scripts.bench.bench_peers $(BENCH_PEERS)

bench-scale: setup  ## bookkeeping of stores of 10^4 and 10^5 blocks, 50 ms per request; writes build/bench-scale.json
	$(BIN)/python -m scripts.bench.bench_scale $(BENCH_SCALE)

config-table: setup  ## write docs/configuration.md, the table of configuration keys
	$(BIN)/python scripts/docs/config_table.py

coverage: $(VENV)-saes/.setup  ## write docs/coverage.md: which models and which published SAEs are read
	$(VENV)-saes/bin/python scripts/docs/coverage.py

train-demo-model: $(VENV)/.setup-train  ## train the bundled model again, in minutes
	$(BIN)/python -m scripts.train.train_demo_model --out pipeline/assets/tiny-qwen2

train-demo-sae: $(VENV)/.setup-train  ## train the bundled SAE again, in minutes
	$(BIN)/python -m scripts.train.train_demo_sae --out pipeline/assets/tiny-sae

clean:  ## remove what was built, but not .venv
	rm -rf build
