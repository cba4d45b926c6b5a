# Two commands matter: `make quickstart` and `make test`. Each does its own set-up through `make venv`.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# One thread a worker: two pytest workers on two cores are faster than torch's own threads on tiny tensors.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest

.PHONY: help venv quickstart test test-slow test-gpu lint clean

help:
	@echo "make quickstart   train a small GPT in FP8 and in BF16 on real text, plot both (minutes, CPU or GPU)"
	@echo "make test         the tests (CPU)"
	@echo "make test-slow    the long proofs"
	@echo "make test-gpu     the tests that need a CUDA GPU"
	@echo "make lint         ruff"
	@echo "make venv         only the set-up that all of these share: .venv with megafp8 installed"

venv: $(VENV)/.ready

$(VENV)/.ready: setup.py constraints.txt tools/make_venv.sh
	PYTHON="$(PYTHON)" bash tools/make_venv.sh $(VENV)
	@touch $@

quickstart: venv
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash examples/quickstart.sh

test: venv lint
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not gpu" -q --durations 20

test-slow: venv
	$(PYTEST) -n 2 --dist worksteal -m "slow and not gpu" -q --durations 20

# Most of a GPU test's time is compilation on the host: GPU_WORKERS processes share the device.
GPU_WORKERS ?= 4

test-gpu: venv
	$(PYTEST) -n $(GPU_WORKERS) --dist worksteal -m gpu -q

lint: venv
	$(PY) -m ruff check .

clean:
	rm -rf $(VENV) build *.egg-info
