# Makes the environment, builds the extension, runs the demo and the tests. `make help` lists the targets.
#
# Needed on the machine: Python 3.10 to 3.14 with its headers and venv module, a C++ compiler, make. All else goes
# into the virtual environment $(VENV).

# The interpreter of the environment.
PYTHON ?= python3
# The folder of the environment, which this Makefile owns.
VENV ?= .venv
# The torch that pip installs, and against which the extension is built.
TORCH ?= torch==2.13.0
# Arguments for the demo or for pytest: make demo ARGS="--mode atc", make test ARGS="-k neighbor -x".
ARGS ?=
# How many pytest processes run the tests, each a file at a time.
JOBS ?= 2
# What `make test-all` runs.
ALL_TESTS ?= test-long test-mpi test-rma test-tcp test-asan test-tsan test-frameworks test-notebooks conformance test-torch-2.11.0 test-torch-newest
# The tests that must pass on every torch.
CORE := $(addprefix tests/test_,$(addsuffix .py,collectives group_operations neighbor windows ops integration \
	wrapped_optimizers training_frame c10d_reconfigure c10d_window errors exit faults bootstrap))
# The files with checks of style, which `make lint` runs.
STYLE := $(addprefix tests/test_,layers.py docs.py package.py)
# The driver of PyTorch's own distributed suite, which is not part of this repository, and its number of ranks.
CONFORMANCE ?= ../shared/conformance/torch_distributed_suite.py
CONFORMANCE_RANKS ?= 3 4

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build wheels build-tests demo docs lint format test test-all test-asan test-long test-frameworks test-gpu test-mpi test-notebooks test-rma test-tcp test-tsan conformance coverage histories partitions soak soak-faults soak-joins faults benchmark benchmark-neighbor benchmark-windows benchmark-rma benchmark-training benchmark-cuda benchmark-scale benchmark-cluster benchmark-links benchmark-loss benchmark-loss-long benchmark-loss-settings benchmark-advise benchmark-traces benchmark-model benchmark-performance benchmark-compression clean FORCE

# Stamps are in the environment, so that they are deleted with it. Two of them contain their value and are rewritten only
# when it changes: another PYTHON makes a new environment, another TORCH a new build.
PYTHON_STAMP := $(VENV)/.made-from-python
TORCH_STAMP := $(VENV)/.made-with-torch
REQUIREMENTS_STAMP := $(VENV)/.requirements
EXTENSION_STAMP := $(VENV)/.extension
LINTERS_STAMP := $(VENV)/.linters
# The site needs neither torch nor the extension, so it has its own environment.
DOCS_VENV := build/docs-venv
DOCS_STAMP := $(DOCS_VENV)/.requirements
FRAMEWORKS_STAMP := build/frameworks/.installed
NOTEBOOKS_STAMP := $(VENV)/.notebooks

SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.h')
# The files that clang-format formats.
FORMATTED := $(shell find csrc tests -name '*.cpp' -o -name '*.hpp' -o -name '*.h')
# Programs of the environment, such as ninja, come first. The shell finds its folder, because make splits at spaces.
IN_VENV = PATH="$$(cd "$(VENV)/bin" && pwd):$$PATH"
PIP = $(IN_VENV) python -m pip --disable-pip-version-check
PYTEST = $(IN_VENV) OMP_NUM_THREADS=1 CONFORMANCE="$(CONFORMANCE)" python -m pytest

help:
	@echo "make demo    train a digit classifier on 4 processes   (ARGS=\"--mode atc --dynamic\")"
	@echo "make test    run the tests, in ten minutes on two cores      (ARGS=\"-k neighbor\")"
	@echo "make test-all   run every test there is, one after the other (before a release or a large change): $(ALL_TESTS)"
	@echo "make test-long  run the long tests too, which include soak and faults"
	@echo "make test-torch-2.11.0   run the core of the tests on another torch; test-torch-newest on the newest one"
	@echo "make test-gpu   run the tests that need a GPU; skipped tests give a reason   (FOG_TEST_NCCL=/path/libnccl.so.2)"
	@echo "make conformance   run PyTorch's own distributed suite (an hour; CONFORMANCE_RANKS=3, ARGS=\"-k all_reduce\")"
	@echo "make test-asan   tests with AddressSanitizer and UndefinedBehaviorSanitizer, on an extension of their own"
	@echo "make test-tsan   the same with ThreadSanitizer             (ARGS=\"-k threads\")"
	@echo "make coverage   print the share of lines that the tests run; build/coverage/not-run.txt has the others"
	@echo "make histories   losses and joins of many seeds, without processes   (ARGS=\"--seconds 60\"; ten minutes)"
	@echo "make soak    check results and memory of 20,000 random operations on 4 processes (minutes)"
	@echo "make soak-faults   train while ranks are killed, stopped and hang   (ARGS=\"--minutes 60 --modes asynchronous\")"
	@echo "make soak-joins   kill ranks and hosts of jobs that processes join, on emulated hosts   (ARGS=\"--minutes 60\")"
	@echo "make partitions   cut the network between eight emulated hosts   (ARGS=\"--seconds 10 --first 4\"; an hour)"
	@echo "make faults  kill each rank during each kind of operation (minutes)"
	@echo "make benchmark  time fog beside Gloo and raw MPI          (ARGS=\"--ranks 4 --ops allreduce\")"
	@echo "make benchmark-neighbor   the same of exchanges with neighbors  (ARGS=\"--ranks 4 --exchanges exp2\")"
	@echo "make benchmark-windows    the same of one-sided windows       (ARGS=\"--ranks 2 --sizes 4K 1M\")"
	@echo "make benchmark-rma        the same of MPI RMA between hosts   (ARGS=\"--operations exchange --sizes 1M 16M\")"
	@echo "make benchmark-training   steps per second in every mode     (ARGS=\"--ranks 4 --models mlp\")"
	@echo "make benchmark-cuda       training on a GPU                  (ARGS=\"--models resnet50 --modes none awc\")"
	@echo "make benchmark-cluster    scaling on an emulated cluster      (as root; ARGS=\"--scenarios a --hosts 2 4\")"
	@echo "make benchmark-links      exchanges where links are slow      (as root; ARGS=\"--world 8 100mbit 16x128K\")"
	@echo "make benchmark-advise     fog advise beside a measured grid   (as root; ARGS=\"--clusters fast --hosts 2\")"
	@echo "make benchmark-traces     training over links that change    (as root; ARGS=\"--traces 1 --ways tune\")"
	@echo "make benchmark-performance   all for docs/measurements/scaling.md, and its tables   (as root, some three hours)"
	@echo "make benchmark-model      a model of it, checked, up to 16,384 ranks   (after benchmark-cluster)"
	@echo "make benchmark-compression   codecs, losses over bytes, links (as root; ARGS=\"--parts codecs\")"
	@echo "make benchmark-scale      many ranks: start, work, end        (ARGS=\"--ranks 64 --rounds 3\")"
	@echo "make benchmark-loss       steps to a loss, of virtual ranks   (ARGS=\"--ranks 16 --more-ranks 64\")"
	@echo "make benchmark-loss-long  the same, longer and with more seeds   (half an hour)"
	@echo "make benchmark-loss-settings  fragments, tune's settings and a slow rank beside DDP   (half an hour)"
	@echo "make test-mpi  install Intel MPI and Open MPI below build/mpi, run under every launcher"
	@echo "make test-rma  exchanges and collectives by MPI RMA, on one host   (ARGS=\"-k neighbor\")"
	@echo "make test-tcp  exchanges, collectives and windows by TCP, on one host   (ARGS=\"-k neighbor\")"
	@echo "make test-frameworks  install Lightning, accelerate, transformers and Ray below build/frameworks, run the recipes"
	@echo "make test-notebooks  ranks of a notebook, with ipyparallel, and the notebooks of examples/notebooks   (ARGS=\"-k suspend\")"
	@echo "make lint    check style, types and names: ruff, clang-format, mypy"
	@echo "make format  bring all files into that style"
	@echo "make docs    build the documentation as a site: build/docs/index.html"
	@echo "make wheels  the wheel of a release, in dist   (ARGS=\"--torch 2.13.0 2.14.1 2.15.0\")"
	@echo "make build   make the environment and build the extension"
	@echo "make clean   remove the environment and all build products"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH)"

build: $(EXTENSION_STAMP)

# Each torch has an environment below build/wheels. The interpreter is that of the environment.
wheels: $(PYTHON_STAMP)
	@echo "== wheel of a release"
	@$(IN_VENV) python .ci/wheels.py $(ARGS)

demo: build
	@echo "== demo: 4 processes train on scikit-learn's digits"
	@$(IN_VENV) OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc_per_node=4 \
		examples/train_digits.py $(ARGS)

test: build build-tests
	@echo "== tests"
	@TEST_FILE_SHARES=1 $(PYTEST) -n $(JOBS) --dist loadfile --durations=15 $(ARGS)

test-long: build build-tests
	@echo "== all tests"
	@FOG_TEST_ALL=1 FOG_SOAK_OPERATIONS=20000 $(PYTEST) -n $(JOBS) --dist loadfile --durations=15 $(ARGS)

# Each reports its own result; all of them run, and the whole fails if one of them did.
test-all:
	@results=; failed=0; for each in $(ALL_TESTS); do \
		if $(MAKE) --no-print-directory $$each; then result=passed; else result=FAILED; failed=1; fi; \
		echo "== $$each: $$result"; results="$$results\n$$each: $$result"; \
	done; printf "== all:$$results\n"; exit $$failed

# The suite's core on another torch: a copy of the files, because the extension is built in place, with its own environment.
test-torch-%:
	@echo "== core of the tests on torch $*"
	@ls $(CORE) >/dev/null  # with a file that is missing, pytest runs none
	@rm -rf $(addprefix build/torch-$*/,benchmarks csrc examples python tests)  # files that are gone here
	@mkdir -p build/torch-$* && git ls-files -z | tar --null --files-from=- --create | tar --extract --directory build/torch-$*
	@$(MAKE) --no-print-directory -C build/torch-$* VENV=.venv JOBS=$(JOBS) ARGS="$(CORE) $(ARGS)" \
		TORCH='$(if $(filter newest,$*),torch,torch==$*)' test

# Exchanges and collectives over MPI RMA, between ranks that each count as a node; tests/test_windows.py does the
# same for windows. Tests that kill ranks are left out: UCX's shared memory ends a process whose peer vanishes.
test-rma: build
	@echo "== exchanges by MPI RMA"
	@FOG_BETWEEN_HOSTS=rma _FOG_LOCAL_LINKS=0 $(PYTEST) tests/test_neighbor.py tests/test_collectives.py \
		tests/test_hierarchical.py tests/test_random_exchanges.py tests/test_group_operations.py -k "not killed" $(ARGS)

# Exchanges, collectives and windows over TCP, between ranks of this host; tests/test_faults.py has killed ranks.
test-tcp: build
	@echo "== everything by TCP"
	@FOG_BETWEEN_HOSTS=tcp _FOG_LOCAL_LINKS=0 $(PYTEST) tests/test_neighbor.py tests/test_collectives.py \
		tests/test_hierarchical.py tests/test_random_exchanges.py tests/test_group_operations.py tests/test_windows.py $(ARGS)

# Codecs, virtual ranks and real ones, the latter by shared memory and by TCP.
test-asan test-tsan: test-%: build
	@echo "== tests with sanitizers: compiling build/$*, minutes the first time"
	@$(IN_VENV) OMP_NUM_THREADS=1 python tests/sanitized.py $* $(ARGS)

# A table of the shares of lines that `make test` runs, C++'s and Python's; build/coverage/not-run.txt has the others.
coverage: build build-tests
	@echo "== coverage: compiling build/coverage, minutes the first time; then the tests"
	@$(PIP) install --quiet 'coverage>=7.10' 'gcovr>=8'
	@$(IN_VENV) OMP_NUM_THREADS=1 python tests/sanitized.py coverage -n $(JOBS) --dist loadfile $(ARGS)

# The fake device of the tests; it is compiled again only if its sources change.
build-tests: build
	@echo "== fake device: compiling if needed"
	@$(IN_VENV) PYTHONPATH=tests python -c 'import device_double as d; d.compile_double(); d.compile_runtime()'

lint: $(LINTERS_STAMP)
	@echo "== style and types"
	@export $(IN_VENV); ruff check --quiet . && ruff format --quiet --check . && clang-format --dry-run -Werror $(FORMATTED) && mypy
	@$(PYTEST) -q -m style $(STYLE)

format: $(LINTERS_STAMP)
	@echo "== format"
	@export $(IN_VENV); ruff check --quiet --fix --exit-zero . && ruff format --quiet . && clang-format -i $(FORMATTED)

docs: $(DOCS_STAMP)
	@echo "== documentation: build/docs/index.html"
	@PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict $(ARGS)

# Tests that need several GPUs, or a newer NCCL for ranks that share one, are skipped with a reason.
test-gpu: build
	@echo "== tests on GPUs"
	@FOG_TEST_DEVICE=cuda $(PYTEST) -m gpu tests/test_device_*.py $(ARGS)

# Runs every number of ranks, even if cases fail with an earlier one.
conformance: build
	@if [ ! -f "$(CONFORMANCE)" ]; then \
		echo "the driver of PyTorch's suite is not at CONFORMANCE=$(CONFORMANCE): name the file torch_distributed_suite.py there" >&2; exit 1; \
	fi
	@mkdir -p build/conformance
	@failed=0; for ranks in $(CONFORMANCE_RANKS); do \
		report=build/conformance/fog-$$ranks.txt; rm -f $$report; \
		echo "== PyTorch's suite: $$ranks ranks, a line a case in $$report"; \
		$(IN_VENV) OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" SUITE_BACKEND=fog SUITE_WORLD_SIZE=$$ranks SUITE_REPORT=$$report \
			python "$(CONFORMANCE)" $(ARGS) || failed=1; \
	done; exit $$failed

soak: build
	@echo "== soak: 20,000 operations"
	@FOG_SOAK_OPERATIONS=20000 $(PYTEST) tests/test_soak.py -rP $(ARGS)

# As many seeds as fit into ten minutes; a failure prints the command that replays it.
histories: build
	@echo "== histories of losses and joins"
	@$(IN_VENV) PYTHONPATH=python python tests/histories.py $(ARGS)

# The result is also in soak-faults.json.
soak-faults: build
	@echo "== soak with faults: three minutes"
	@$(IN_VENV) OMP_NUM_THREADS=1 python tests/soak_faults.py --json soak-faults.json $(ARGS)

# The result is also in soak-joins.json.
soak-joins: build
	@echo "== soak with joins: three minutes"
	@$(IN_VENV) OMP_NUM_THREADS=1 python tests/soak_joins.py --json soak-joins.json $(ARGS)

# The result is also in partitions.json.
partitions: build
	@echo "== partitions of the network between eight emulated hosts: an hour"
	@$(IN_VENV) OMP_NUM_THREADS=1 python tests/partitions.py --json partitions.json $(ARGS)

faults: build
	@echo "== faults: every rank, every kind of operation"
	@FOG_TEST_ALL=1 $(PYTEST) tests/test_faults.py $(ARGS)

benchmark: build
	@echo "== benchmark of collectives"
	@$(IN_VENV) python benchmarks/collectives.py --json collectives.json $(ARGS)

benchmark-neighbor: build
	@echo "== benchmark of exchanges with neighbors"
	@$(IN_VENV) python benchmarks/neighbor.py --json neighbor.json $(ARGS)

benchmark-windows: build
	@echo "== benchmark of one-sided windows"
	@$(IN_VENV) python benchmarks/windows.py --json windows.json $(ARGS)

benchmark-rma: build
	@echo "== benchmark of MPI RMA between hosts"
	@$(IN_VENV) python benchmarks/rma.py --json rma.json $(ARGS)

benchmark-training: build
	@echo "== benchmark of training"
	@$(IN_VENV) python benchmarks/training.py --json training.json $(ARGS)

benchmark-cuda: build
	@echo "== benchmark on GPUs"
	@$(IN_VENV) python benchmarks/training.py --device cuda --back-to-back 20 --json cuda.json $(ARGS)

benchmark-cluster: build
	@echo "== benchmark on an emulated cluster"
	@$(IN_VENV) python benchmarks/cluster.py $(or $(ARGS),--json benchmarks/results/cluster.json)

benchmark-links: build
	@echo "== benchmark of exchanges where links are slow"
	@$(IN_VENV) python benchmarks/links.py --json links.json $(ARGS)

benchmark-advise: build
	@echo "== benchmark of the advice"
	@$(IN_VENV) python benchmarks/advise.py $(or $(ARGS),--json benchmarks/results/advise.json)

benchmark-traces: build
	@echo "== benchmark of links that change"
	@$(IN_VENV) python benchmarks/link_traces.py $(or $(ARGS),--json benchmarks/results/traces.json)

benchmark-model: build
	@echo "== model of the emulated cluster"
	@$(IN_VENV) OMP_NUM_THREADS=1 python benchmarks/model.py $(ARGS)
	@$(IN_VENV) python benchmarks/performance_tables.py

# All of docs/measurements/scaling.md, one after the other: each needs the machine for itself.
benchmark-performance:
	@for each in cluster model loss loss-long advise; do $(MAKE) --no-print-directory benchmark-$$each || exit; done
	@$(IN_VENV) python benchmarks/performance_tables.py

benchmark-compression: build
	@echo "== benchmark of compression"
	@$(IN_VENV) OMP_NUM_THREADS=1 python benchmarks/compression.py $(or $(ARGS),--json benchmarks/results/compression.json)

benchmark-scale: build
	@echo "== benchmark of many ranks"
	@$(IN_VENV) python benchmarks/scale.py --json scale.json $(ARGS)

# The results are kept in the repository.
benchmark-loss: build
	@echo "== steps to a loss"
	@$(IN_VENV) OMP_NUM_THREADS=1 python benchmarks/time_to_loss.py $(ARGS)

# Longer runs with more seeds, of the ways that come near DDP's loss.
benchmark-loss-long: build
	@echo "== loss of long runs"
	@$(IN_VENV) OMP_NUM_THREADS=1 python benchmarks/time_to_loss.py --steps 1600 --target 0.36 --more-ranks \
		--seeds 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 --json benchmarks/results/loss_long.json --ways \
		ddp_fog one_peer_exp static_exp base_k hierarchical exact_diffusion gradient_tracking $(ARGS)

# The same for fragments, the settings of tune, and a slow rank. The results are kept, and runs that they have not repeated.
benchmark-loss-settings: build
	@echo "== loss of settings"
	@$(IN_VENV) OMP_NUM_THREADS=1 python benchmarks/loss_of_settings.py $(ARGS)

# If something could not be installed, exits with an error after testing the rest.
test-mpi: build
	@$(IN_VENV) python tests/mpi_installations.py; installed=$$?; \
	echo "== tests under every launcher"; \
	FOG_TEST_MPI=all $(PYTEST) tests/test_mpi.py $(ARGS) && exit $$installed

# Includes the tests of fogdist's optimizers inside Lightning's wrappers.
test-frameworks: build $(FRAMEWORKS_STAMP)
	@echo "== recipes for frameworks"
	@$(IN_VENV) OMP_NUM_THREADS=1 build/frameworks/bin/python -m pytest tests/test_frameworks.py tests/test_wrapped_optimizers.py $(ARGS)

test-notebooks: $(NOTEBOOKS_STAMP)
	@echo "== notebooks"
	@$(PYTEST) tests/test_interactive.py $(ARGS)

clean:
	@echo "== removing $(VENV) and what was built"
	@if [ -e "$(PYTHON_STAMP)" ]; then rm -rf "$(VENV)"; fi
	@rm -rf build dist fogdist.egg-info python/fogdist.egg-info fog_pg/_C*.so fog_pg/_build_info.py .pytest_cache .mypy_cache .ruff_cache train_digits.png collectives.json neighbor.json windows.json rma.json training.json cuda.json scale.json soak-faults.json soak-joins.json partitions.json
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PYTHON_STAMP): FORCE
	@new=$$($(PYTHON) -c 'import sys; print("Python %d.%d.%d" % sys.version_info[:3], sys.base_prefix)') || exit 1; \
	if [ "$$(cat "$@" 2>/dev/null)" = "$$new" ]; then exit 0; fi; \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || \
		{ echo "PYTHON=$(PYTHON) is $$new; 3.10 to 3.14 are supported" >&2; exit 1; }; \
	if [ -e "$(VENV)" ] && [ ! -e "$@" ]; then \
		echo "$(VENV) was not made by this Makefile: remove it, or name another directory with VENV=" >&2; exit 1; \
	fi; \
	echo "== environment: $$new in $(VENV)"; \
	rm -rf "$(VENV)" && mkdir -p "$(VENV)" && echo unfinished > "$@" && \
	$(PYTHON) -m venv "$(VENV)" && echo "$$new" > "$@"

$(TORCH_STAMP): $(PYTHON_STAMP) FORCE
	@if [ "$$(cat "$@" 2>/dev/null)" != '$(TORCH)' ]; then rm -rf build; echo '$(TORCH)' > "$@"; fi

# Lists in pyproject.toml: the build's requirements, which pip installs here because the build is not isolated; the linters.
define REQUIREMENTS
import sys
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    table = tomllib.load(file)
for key in sys.argv[1:]:
    table = table[key]
print("\n".join(table))
endef
export REQUIREMENTS

$(REQUIREMENTS_STAMP): $(TORCH_STAMP) pyproject.toml setup.py
	@echo "== requirements: installing $(TORCH) and what the build needs (a large download the first time)"
	@$(IN_VENV) python -c "$$REQUIREMENTS" build-system requires > "$(VENV)/build-requirements.txt"
	@$(PIP) install --quiet '$(TORCH)' -r "$(VENV)/build-requirements.txt"
	@touch "$@"

$(EXTENSION_STAMP): $(REQUIREMENTS_STAMP) $(SOURCES)
	@echo "== extension: compiling fog_pg._C and installing fogdist in place (minutes the first time)"
	@$(PIP) install --quiet --no-build-isolation '$(TORCH)' --editable '.[test,examples]'
	@touch "$@"

$(NOTEBOOKS_STAMP): $(EXTENSION_STAMP) pyproject.toml
	@echo "== ipyparallel and nbclient: installing"
	@$(PIP) install --quiet --no-build-isolation '$(TORCH)' --editable '.[test-notebooks]'
	@touch "$@"

$(LINTERS_STAMP): $(EXTENSION_STAMP) pyproject.toml
	@$(IN_VENV) python -c "$$REQUIREMENTS" project optional-dependencies lint > "$(VENV)/linters.txt"
	@$(PIP) install --quiet -r "$(VENV)/linters.txt"
	@touch "$@"

$(DOCS_STAMP): pyproject.toml
	@echo "== environment for the documentation: $(DOCS_VENV)"
	@$(PYTHON) -m venv "$(DOCS_VENV)"
	@"$(DOCS_VENV)/bin/python" -c "$$REQUIREMENTS" project optional-dependencies docs > "$(DOCS_VENV)/requirements.txt"
	@"$(DOCS_VENV)/bin/python" -m pip --disable-pip-version-check install --quiet -r "$(DOCS_VENV)/requirements.txt"
	@touch "$@"

# The frameworks have their own environment, which uses the packages of $(VENV), such as torch, and does not change it.
$(FRAMEWORKS_STAMP): $(REQUIREMENTS_STAMP) pyproject.toml
	@echo "== frameworks: installing them into build/frameworks"
	@rm -rf build/frameworks && $(IN_VENV) python -m venv build/frameworks
	@$(IN_VENV) python -c "$$REQUIREMENTS" project optional-dependencies frameworks > build/frameworks/requirements.txt
	@packages=$$($(IN_VENV) python -c 'import site; print(site.getsitepackages()[0])') && \
		echo "import site; site.addsitedir('$$packages')" > "$$(echo build/frameworks/lib/python*/site-packages)/of-the-project.pth"
	@build/frameworks/bin/python -m pip --disable-pip-version-check install --quiet -r build/frameworks/requirements.txt
	@touch "$@"
