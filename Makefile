# Trainyard. Needs Python 3.11 or later, git and make; `make setup` brings the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
STAMP := $(VENV)/.installed
BASE_PYTHON := $(shell command -v python3.11 || command -v python3)
IMAGES := pytorch horovod tensorflow
PACKAGES := console billing storage jobs runtime
# `make check` looks at the project as it is deployed: behind HTTPS.
CHECKED := TRAINYARD_URL=https://trainyard.example.com

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)$$/  make \1	\2/' | expand -t 20

.PHONY: setup
setup: $(STAMP) ## Make the virtual environment; again only when the dependencies change

$(STAMP): pyproject.toml constraints.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed; $(BASE_PYTHON) is older."; exit 1; }
	@test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV)
	@echo "Installing the dependencies (minutes, the first time) ..."
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	@touch $@

.PHONY: up
up: image ## Serve the console at http://127.0.0.1:8000 until Ctrl-C
	@exec $(PYTHON) manage.py up

.PHONY: image
image: setup
	@$(PYTHON) manage.py build_image pytorch

.PHONY: images
images: setup ## Build the images that the tests train in, once (needs g++ for Horovod); IMAGES="pytorch" for some
	@$(PYTHON) manage.py build_image $(IMAGES)

.PHONY: demo
demo: image ## Buy a training run through the API and watch it; ONCE=1 stops everything at the end
	@exec $(PYTHON) manage.py demo $(if $(ONCE),--once)

.PHONY: test
test: images ## Run every test; ARGS="-k name" for some of them
	@$(PYTHON) -m pytest -n 2 --dist loadgroup $(ARGS)

.PHONY: test-kubernetes
test-kubernetes: setup ## Run the suites of the Kubernetes backend; on a real cluster where KUBECONFIG names one
	@$(PYTHON) -m pytest tests/kubernetes tests/runtime/backends/test_contract_*.py \
	  -k "not local$(if $(KUBECONFIG), and not test_apiserver and not test_faults)" $(ARGS)

.PHONY: check
check: setup ## Linters, types, layers, templates, migrations, deployment settings, the API's schema
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/djlint templates --lint --quiet
	$(CHECKED) $(PYTHON) -W ignore::RuntimeWarning manage.py makemigrations --check --dry-run
	$(CHECKED) $(PYTHON) manage.py check --deploy --fail-level WARNING
	$(CHECKED) $(PYTHON) manage.py spectacular --validate --fail-on-warn --file /dev/null

.PHONY: bench
bench: setup ## Run one benchmark: NAME=launch, QUICK=1 for a smaller run
	@test -n "$(NAME)" || { echo "Say which: make bench NAME=launch. There are:"; ls bench/*.py; exit 2; }
	@QUICK=$(QUICK) $(PYTHON) -m bench.$(NAME)

.PHONY: mutants
mutants: setup ## Break a copy of the money's rules one at a time, and see the tests fail; minutes
	@$(PYTHON) -m tests.mutants

.PHONY: messages
messages: setup ## Collect the sentences to translate, and compile the translations (needs gettext)
	@$(PYTHON) manage.py makemessages -l zh_Hans --ignore $(VENV) --ignore var --no-location --no-obsolete
	@$(PYTHON) manage.py compilemessages --ignore $(VENV)

.PHONY: clean
clean: ## Remove caches. Data in var/ and the environment in .venv/ stay
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache *.egg-info build
	@find $(PACKAGES) tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
