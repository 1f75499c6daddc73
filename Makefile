# Everything a newcomer types. Each target sets up what it needs; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup local parity test quick test-long chaos year bench check docs diff site images images-check mirror lock clean

SUPPORTED := import sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for name in python3.12 python3.11 python3.10 python3; do \
	$$name -c '$(SUPPORTED)' 2>/dev/null && { echo $$name; break; }; done)
VENV := .venv
UV := uv==0.13.8
# Where Python may not keep bytecode, every process would compile every module anew: seconds each, thousands in the tests.
INSTALL = $(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode)
# Index of torch's CPU builds: cpu, PyTorch's own, which uv knows, or the address of a copy. Empty: the build of the lock.
TORCH_INDEX ?=

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/ready ## Create the virtual environment with the locked dependencies (TORCH_INDEX=cpu: torch without CUDA)

$(VENV)/ready: requirements.lock pyproject.toml
	@test -x $(VENV)/bin/python || $(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
		echo "trnpipe needs Python 3.10, 3.11 or 3.12 with venv; set PYTHON=/path/to/python"; exit 64; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(UV)"
ifneq ($(TORCH_INDEX),)
	awk '/^[^ ]/ { kept = !/^(torch|triton|nvidia-[^=]*)==/ } kept' requirements.lock > $(VENV)/requirements.lock
	$(INSTALL) --require-hashes --no-deps -r $(VENV)/requirements.lock
# Without a hash: the lock has those of the ordinary build, and the CPU build is another file of the same version.
	$(INSTALL) --no-deps $(if $(findstring /,$(TORCH_INDEX)),--index-url,--torch-backend) $(TORCH_INDEX) $(shell sed -nE 's/^(torch==[^ ]+).*/\1/p' requirements.lock)
else
	$(INSTALL) --require-hashes -r requirements.lock
endif
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

local: setup ## Run the weekly pipeline on this machine (DEVICE=xla; ARGS="--set train.steps=50" and the like)
	$(VENV)/bin/trnpipe local $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

# Enough hold-out queries to show 0.1 %, few steps, no dropout (every kind draws its own), nothing published, one text to embed.
PARITY = .trnpipe/parity
PARITY_SETTINGS = registry=null gate.max_drop=1 evaluate.candidates=1 embed.children=1 embed.length=64 train.dropout=0 \
	train.query_length=32 train.length=64 train.steps=12 train.log_every=2 train.validate_every=6 train.checkpoint_every=12 \
	train.validation_queries=2000
A ?= cpu-fp32
B ?= xla-fp32

parity: setup ## Train twice from one parent and compare all evaluations (A=cpu-fp32 B=xla-fp32; KIND-PRECISION)
	rm -rf $(PARITY)
	mkdir -p $(PARITY)
	echo '{"id": "one", "text": "Runs are compared by their evaluations, not by their embeddings."}' > $(PARITY)/corpus.jsonl
	for run in A-$(A) B-$(B); do \
		device=$${run#*-}; \
		$(VENV)/bin/trnpipe local --state $(PARITY)/$${run%%-*} --corpus $(PARITY)/corpus.jsonl --nodes 1 --demo M \
			--device $${device%-*} --set device.precision=$${device#*-} $(foreach setting,$(PARITY_SETTINGS),--set '$(setting)') $(ARGS) || exit $$?; \
	done
	$(VENV)/bin/trnpipe parity $(PARITY)/A/bucket/runs/* $(PARITY)/B/bucket/runs/*

# More than there are processors: many tests wait for processes, deadlines or time to pass.
WORKERS ?= $(shell expr $$(nproc) + 2)

# `make -j2 test` checks and tests at the same time.
test: check quick ## Lint, type check and test

# In the order of their folders: tests/chain, whose files take longest, begins at once.
quick: setup
	MAKEFLAGS= OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Only the files that have some: to import all others takes each worker half a minute.
LONG = $(shell grep -rl --include='test_*.py' 'mark\.long' tests | sort)

test-long: setup ## The tests that take longest
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m long $(LONG)

# Results are kept and summed over sittings: a number of runs is a total.
RUNS ?= 1000
REAL_RUNS ?= 100

chaos: setup ## Whole executions with one fault each (RUNS=50 REAL_RUNS=5 for a short sitting; goes on where it was ended)
	status=0; \
	$(VENV)/bin/python -m tests.chain.chaos --depth orchestration --runs $(RUNS) || status=$$?; \
	$(VENV)/bin/python -m tests.chain.chaos --depth real --runs $(REAL_RUNS) || status=$$?; \
	exit $$status

year: setup ## A year of weekly executions and refreshes, checked from outside (ARGS="--weeks 5 --refreshes 1")
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.chain.year $(ARGS)

# The peers' environment: without torch-xla, see tests/benchmarks/peers/requirements.in.
.bench/ready: tests/benchmarks/peers/requirements.lock | setup
	test -x .bench/bin/python || $(PYTHON) -m venv .bench
	$(VENV)/bin/uv pip install --quiet --python .bench/bin/python --require-hashes -r $<
	touch $@

bench: setup .bench/ready ## Measure beside sentence-transformers and datasets on this machine (ARGS="--what train --rounds 1")
	$(VENV)/bin/python -m tests.benchmarks.peers $(ARGS)

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/hadolint containers/*/Dockerfile tests/containers/*/Dockerfile

docs: setup ## Write docs/configuration.md from the schemas of the configuration and the settings
	$(VENV)/bin/python -m docs.configuration

# Templates alone: other files of CDK's hold hashes of these.
AGAINST ?= origin/main
diff: setup ## Print what this tree changes in the templates of another commit (AGAINST=origin/main)
	rm -rf .trnpipe/diff
	mkdir -p .trnpipe/diff/base
	git archive $(AGAINST) | tar -x -C .trnpipe/diff/base
	cd .trnpipe/diff/base && $(CURDIR)/$(VENV)/bin/python -m infra.app
	$(VENV)/bin/python -m infra.app
	diff --recursive --unified --exclude='*.assets.json' --exclude=manifest.json --exclude=tree.json .trnpipe/diff/base/cdk.out cdk.out \
		|| test $$? = 1

site: setup ## Build the documentation as a site in site/ (python -m http.server --directory site)
	$(VENV)/bin/mkdocs build --strict

# Under the tag that cdk.json names, so that pushing them needs no other.
TAG ?= $(shell sed -nE 's/.*"images": *\{.*"tag": *"([^"]+)".*/\1/p' cdk.json)
# The first that works here; a client without its daemon does not.
ENGINE ?= $(shell for name in docker podman buildah; do $$name info >/dev/null 2>&1 && { echo $$name; break; }; done)
KINDS ?= cpu neuron
# Of the CPU image. Empty where the index of torch's CPU builds is out of reach: the ordinary build, which is that for CUDA, 5 GB larger.
TORCH_BACKEND ?= cpu
CPU_BUILD = --build-arg LOCK=$(if $(TORCH_BACKEND),cpu,cuda)/requirements.lock --build-arg TORCH_BACKEND=$(TORCH_BACKEND)
CUDA_BUILD = --build-arg LOCK=cuda/requirements.lock --build-arg TORCH_BACKEND=
# Bases other than the Dockerfiles' own. The Neuron image's has a digest, see `mirror`.
PYTHON_IMAGE ?=
NEURON_IMAGE ?=
REVISION ?= $(shell git rev-parse HEAD)
BASES = $(foreach name,PYTHON_IMAGE NEURON_IMAGE,$(if $($(name)),--build-arg $(name)=$($(name))))

images: ## Build container images (TAG=0.1.0 ENGINE=docker, podman or buildah, KINDS="cpu cuda neuron")
	@test -n "$(ENGINE)" || { echo "no docker, podman or buildah works here; set ENGINE=/path/to/one"; exit 66; }
	for kind in $(KINDS); do \
		case $$kind in \
			cpu) set -- cpu $(CPU_BUILD);; \
			cuda) set -- cpu $(CUDA_BUILD);; \
			*) set -- $$kind;; \
		esac; \
		folder=$$1; \
		shift; \
		$(ENGINE) build --platform linux/amd64 --file containers/$$folder/Dockerfile --tag trnpipe/$$kind:$(TAG) $(BASES) "$$@" \
			--build-arg VERSION=$(TAG) --build-arg REVISION=$(REVISION) . || exit $$?; \
	done

images-check: KINDS = cpu
images-check: images setup ## Build the CPU image, run two stages in it and print its layers (same variables as images)
	$(VENV)/bin/python -m tests.containers.check $(ENGINE) trnpipe/cpu:$(TAG)

# The image that containers/neuron is written for. skopeo takes the credentials of `docker login`.
BASE ?= $(shell sed -n 's/^ARG NEURON_IMAGE=//p' containers/neuron/Dockerfile)
NAME_AND_TAG = $(subst :, ,$(BASE))
REPOSITORY ?=
mirror: ## Copy the base of the Neuron image into your registry and print its digest (REPOSITORY=...; needs skopeo)
	@test -n "$(REPOSITORY)" || { echo "set REPOSITORY=ACCOUNT.dkr.ecr.REGION.amazonaws.com/trnpipe/neuron-base"; exit 64; }
	copy=docker://$(REPOSITORY):$(lastword $(NAME_AND_TAG)); \
	digest=$$(skopeo inspect --no-tags --format '{{.Digest}}' $$copy 2>/dev/null) || { \
		digest=$$(skopeo inspect --no-tags --format '{{.Digest}}' docker://$(BASE)) && \
		skopeo copy --all --preserve-digests docker://$(firstword $(NAME_AND_TAG))@$$digest $$copy; } && \
	echo "make images NEURON_IMAGE=$(REPOSITORY)@$$digest"

LOCK_FORMAT = --generate-hashes --no-header --no-emit-index-url --no-annotate --quiet
COMPILE = $(VENV)/bin/uv pip compile pyproject.toml $(LOCK_FORMAT)
CONTAINER = --python-version 3.12 --python-platform x86_64-manylinux_2_28
# What the Neuron base image brings, in its own builds, and what only these stand on.
IN_NEURON_IMAGE = torch torch-xla triton setuptools networkx sympy mpmath \
	$(shell sed -nE 's/^(nvidia-[a-z0-9-]+)==.*/\1/p' requirements.lock)

lock: setup ## Resolve the dependencies again
	$(COMPILE) --extra infra --extra demo --extra dev --universal --python-version 3.10 -o requirements.lock
	$(COMPILE) $(CONTAINER) --torch-backend cpu -o containers/cpu/requirements.lock
	$(COMPILE) $(CONTAINER) --constraints requirements.lock -o containers/cuda/requirements.lock
	$(COMPILE) $(CONTAINER) $(foreach name,$(IN_NEURON_IMAGE),--no-emit-package $(name)) -o containers/neuron/requirements.lock
	$(VENV)/bin/uv pip compile tests/benchmarks/peers/requirements.in $(LOCK_FORMAT) --universal --python-version 3.10 \
		-o tests/benchmarks/peers/requirements.lock
	printf 'setuptools>=77\n$(UV)\n' | $(VENV)/bin/uv pip compile - --constraints requirements.lock $(LOCK_FORMAT) $(CONTAINER) \
		-o containers/build.lock

clean: ## Remove the virtual environment, the local run's state and the site
	rm -rf $(VENV) .bench .trnpipe cdk.out site
