# Trainyard. Needs Python 3.11 or later, git and make; `make setup` brings the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
COMPILED := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet
BASE_PYTHON := $(shell command -v python3.11 || command -v python3)
IMAGES := pytorch horovod tensorflow horovod-tensorflow
# Chosen without `-k`: of several the last alone counts, and that one is for ARGS.
KUBERNETES_SUITES = tests/kubernetes tests/runtime/backends/test_backend_contract.py -m "not local_backend" \
  $(if $(KUBECONFIG),--ignore tests/kubernetes/test_apiserver.py --ignore tests/kubernetes/test_faults.py)
PACKAGES := cli console billing storage jobs runtime
# `make check` looks at the project as it is deployed: behind HTTPS.
CHECKED := TRAINYARD_URL=https://trainyard.example.com

# Where Python keeps no compiled modules, each of the console's programs compiles all it imports anew: three seconds of a core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)$$/  make \1	\2/' | expand -t 20

.PHONY: setup
setup: $(VENV)/.dev $(BIN)/trainyard ## Make the virtual environment with all tools; again only when the requirements change

# The command line as it is installed elsewhere, from this folder. Its packages are among those of requirements/dev.txt.
$(BIN)/trainyard: cli/pyproject.toml | $(VENV)/.dev
	@$(PYTHON) -m runtime.images.uv pip install --quiet --python $(PYTHON) --no-deps --no-build-isolation --editable cli
	@touch $@

# What requirements/<name>.txt lists, by its hashes, installed by uv with pip's configuration.
$(VENV)/.%: requirements/%.txt requirements/uv.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed; $(BASE_PYTHON) is older."; exit 1; }
	@test -x $(PYTHON) || { echo "Creating $(VENV) ..."; $(BASE_PYTHON) -m venv $(VENV); }
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@echo "Installing the packages of requirements/$*.txt ..."
	@$(PYTHON) -m runtime.images.uv pip install --python $(PYTHON) --require-hashes -r requirements/$*.txt
	@touch $@

.PHONY: requirements
requirements: setup ## Pin what pyproject.toml asks for, with hashes; UPGRADE=1 for the newest versions
	@for name in base production demo dev; do \
	  case $$name in base) extra=;; production) extra="--extra saml --extra tracing";; *) extra="--extra $$name";; esac; \
	  $(BIN)/uv pip compile pyproject.toml $$extra $(if $(UPGRADE),--upgrade) $(COMPILED) -o requirements/$$name.txt; \
	done

.PHONY: up
up: image ## Serve the console at http://127.0.0.1:8000 until Ctrl-C
	@exec $(PYTHON) manage.py up

.PHONY: image
image: $(VENV)/.demo
	@$(PYTHON) manage.py build_image pytorch

.PHONY: images
images: setup ## Build the images that the tests train in, once (needs g++ for Horovod); IMAGES="pytorch" for some
	@$(PYTHON) manage.py build_image $(IMAGES)

.PHONY: demo
demo: image ## Buy a training run through the API and watch it; ONCE=1 stops everything at the end
	@exec $(PYTHON) manage.py demo $(if $(ONCE),--once)

.PHONY: test
test: IMAGES := pytorch
test: images kustomize ## Run the fast tests, in the pytorch image alone; ARGS="-k name" for some of them
	@$(PYTHON) -m pytest -n auto --dist loadgroup --fast $(ARGS)

.PHONY: test-all
test-all: SELECTION = $(if $(SHARD),--shard $(SHARD)) $(ARGS)
test-all: test-needs ## Run every test and list the slowest; SHARD=2/3 for a part
	@$(PYTHON) -m pytest -n auto --dist loadgroup -rR --durations=25 $(SELECTION)

# Processes that tests start, such as launchers, workers and the web server, are not counted.
.PHONY: coverage
coverage: image ## Run the fast tests, and report the share of branches that they take, and each module's missing ones
	@mkdir -p var/coverage
	@$(PYTHON) -m pytest -n auto --dist loadgroup --fast -q --cov --cov-report=term-missing $(ARGS)

.PHONY: test-needs
test-needs: images kustomize lighthouse var/styles/.installed

# Python and pytest compile each module at its first import: here once, not in each of the test processes.
.PHONY: test-modules
test-modules: setup
	@output=$$($(PYTHON) -m pytest --collect-only -qq) || { echo "$$output"; exit 1; }

.PHONY: screenshots
screenshots: setup ## Take pictures of every page, in both languages and themes, wide and narrow, into var/screenshots
	@SCREENSHOTS=$(CURDIR)/var/screenshots BROWSER=1 $(PYTHON) -m pytest tests/browser/test_accessibility.py::test_pictures_of_every_page

.PHONY: kustomize
kustomize: setup
	@$(PYTHON) .ci/fetch_kustomize.py $(BIN)/kustomize || echo "Without kustomize the tests that render manifests are skipped."

.PHONY: lighthouse
lighthouse: var/lighthouse/.installed

.PHONY: styles
styles: var/styles/.installed ## Cut Tabler's style sheet down to what the pages use (needs npm); after a change of classes
	@cp .ci/styles/purge.mjs var/styles
	@node var/styles/purge.mjs static/vendor/tabler/tabler.min.css

# The packages of .ci/<name>, and its script if it has one.
var/%/.installed: .ci/%/package-lock.json
	@mkdir -p $(@D) && cp .ci/$*/* $(@D)
	@cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund --silent && touch .installed \
	  || echo "Without npm the test of its packages ($*) is skipped."

.PHONY: test-kubernetes
test-kubernetes: setup ## Run the suites of the Kubernetes backend; on a real cluster where KUBECONFIG names one
	@$(PYTHON) -m pytest $(KUBERNETES_SUITES) $(ARGS)

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
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache *.egg-info build cli/*.egg-info cli/build
	@find $(PACKAGES) tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
