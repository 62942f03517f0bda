# `make demo` and `make test` set up what they need and do not redo what is done.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= build/k3-random
BIN := $(VENV)/bin

.PHONY: demo test lint types clean

demo: $(VENV)/installed $(filter build/k3-random,$(MODEL))
	$(BIN)/moonvit encode examples/rocket.jpg --model $(MODEL) -o build/demo.safetensors

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

build/k3-random: | $(VENV)/installed
	$(BIN)/moonvit make-checkpoint $@

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

# nemo-automodel is the published reference model; one of its files is loaded, so its own needs are left out.
$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps nemo-automodel
	touch $@

clean:
	rm -rf build $(VENV)
