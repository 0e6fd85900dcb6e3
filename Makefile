# make test   lint, types and tests, from a bare checkout
# make demo   train a classifier at 8, 4 and 2 bits, deploy it, and compare every bit; at most three minutes
# make bench  time every kernel on this machine
# make docs   write the generated parts of docs/, and build the site in site/
# make stubs  write the type stubs of the names that are found at import

PYTHON ?= python3
# The versions to install. CI gives other files, for other versions of torch.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install test demo bench docs stubs clean

install: $(INSTALLED)

# pip would compile on one processor. Some packages hold files that are not Python and cannot be compiled.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -e '.[dev]' -c $(CONSTRAINTS)
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# The tests start many processes; without bytecode, each would compile the package. Each worker takes a
# contiguous half of the tests, so that it makes few fixtures and kernels that the other makes too.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

demo: $(INSTALLED)
	$(BIN)/holdfast demo

bench: $(INSTALLED)
	$(BIN)/holdfast bench

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

stubs: $(INSTALLED)
	$(BIN)/python scripts/stubs.py

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		holdfast-demo.html
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
