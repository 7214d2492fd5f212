# `make demo` and `make test` each set up .venv by themselves; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help setup bytecode demo test test-slow test-long test-matrix check size same answers golden fuzz docs picture score field bench bench-causes bench-whatif bench-cpu bench-devices bench-capture bench-experiments bench-live bench-pages bench-timeline sweep-pages soak kill bench-load release audit clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## make .venv with everything in it (PYTHON=python3.x chooses the interpreter; after `make clean` where .venv exists)

# torch first and alone: its exact version keeps pip from choosing a newer build with gigabytes of libraries
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; gpudiag needs Python 3.10 or newer: install it or set PYTHON=python3.x" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("gpudiag needs Python 3.10 or newer, found %d.%d.%d; set PYTHON=python3.x" % sys.version_info[:3] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV): PyTorch and the tools, a few minutes on the first run"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt "$$(grep -E '^torch==' constraints.txt)"
	@$(PIP) -c constraints.txt -e '.[all,dev,docs]'
	@touch $@

# tests start hundreds of programs: none of them compiles gpudiag anew where Python is told to write no byte code
bytecode: setup
	@$(BIN)/python -m compileall -q gpudiag dashboard rules

demo: setup ## train a small transformer for a few seconds and look at its report
	@$(BIN)/gpudiag demo

# byte code of the tests is kept where Python is told to write none: rewriting their assertions is half of what finding them takes.
# A module is run by one worker, which makes what its tests share once. Where a worker crashes the run ends: pytest-xdist may wait for ever else.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --maxprocesses 8 --dist loadfile --max-worker-restart 0
# slow tests wait for programs, signals and time limits: half as many workers again as there are processors
WAITING := -n $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores + (cores + 1) / 2)))

test: bytecode ## the tests that this machine can run, without those that are marked slow (under four minutes on two cores)
	@$(PYTEST) -n logical --durations 10 -m "not slow and not long"

test-slow: bytecode ## the tests that are marked slow (whole trainings, torchrun, compilers, a browser), and all examples of the properties
	@$(PYTEST) $(WAITING) --durations 25 --hypothesis-profile all --reruns 1 -rR -m "(slow or properties) and not long"

test-long: bytecode ## the tests that are marked long: each trainer, fault and moment of which test-slow looks at one (some ten minutes; not in CI)
	@$(PYTEST) $(WAITING) --hypothesis-profile all --reruns 1 -rR -m long

check: setup ## linters and types alone (part of the tests too)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache

size: setup ## how large and how deep the code is: lines, statements, lengths, helpers, one report, the path to the first measured block
	@$(BIN)/python tests/size.py

same: setup ## compare all Report JSON with that of another commit, on real recordings (COMMIT=main~1; needs ../shared)
	@$(BIN)/python tests/same_reports.py $(or $(COMMIT),HEAD)

answers: setup ## what reports say of recordings of real GPUs whose answers are known, beside the truth (needs ../shared); fails where one is missed
	@$(BIN)/python tests/answers.py

golden: setup ## rewrite the golden numbers of five real traces (tests/golden; needs ../shared/traces)
	@cd tests && ../$(BIN)/python -m golden.update

test-matrix: setup ## the tests on the oldest and newest Python, torch, polars, ... that are supported (gigabytes; ARGS="--cells 3.10-lowest")
	@$(BIN)/python tests/matrix/run.py $(ARGS)

fuzz: setup ## guided fuzzing of what reads foreign data, ten minutes a target (SECONDS=60 TARGETS="reader rule"); finds go to runs/fuzz
	@$(PIP) -c constraints.txt -e '.[fuzz]'
	@cd tests && ../$(BIN)/python -m fuzz.run --seconds $(or $(SECONDS),600) $(TARGETS)

docs: setup ## build the documentation into build/docs (ARGS=serve: look at it while you write)
	@$(BIN)/python -m mkdocs $(or $(ARGS),build --strict --quiet)

picture: setup ## record the demo, and make the picture and the reports of the documents anew from it (needs Chromium)
	@$(BIN)/python docs/picture.py

score: setup ## score the rules on planted bottlenecks, on the device that is there; writes samples/SCORE.md (ARGS="--runs 3")
	@$(BIN)/python samples/score.py $(ARGS)

# no dependency is resolved here: all are pinned, and torch is the one of constraints.txt
field: setup ## score gpudiag on trainings of other packages, in an environment of their own (2 GB, an hour; ARGS="sb3_ppo"); says so where they cannot be had
	@test -d .venv-field || $(PYTHON) -m venv .venv-field
	@.venv-field/bin/python -m pip install --quiet -c constraints.txt "$$(grep -E '^torch==' constraints.txt)" && \
	  .venv-field/bin/python -m pip install --quiet --no-deps -r samples/field/requirements.txt -e . || \
	  { echo "the packages of samples/field/requirements.txt cannot be had here: nothing was scored" >&2; exit 2; }
	@.venv-field/bin/python samples/field/run.py $(ARGS)

bench: setup ## traces of 0.1 to 1 GB against a floor and peers, and 1 to 512 ranks; writes tests/benchmarks/RESULTS.md (some 15 minutes)
	@$(BIN)/python tests/benchmarks/bench_report.py --peers --ranks $(ARGS)

bench-causes: setup ## changes planted in a training on this CPU against the cause that compare names first (some 20 minutes)
	@$(BIN)/python tests/benchmarks/bench_compare_causes.py $(ARGS)

bench-whatif: setup ## planted causes of slow steps against the what-ifs that name them
	@$(BIN)/python tests/benchmarks/bench_planted_pairs.py

bench-cpu: setup ## promises for CPUs (bf16, optimizers, attention, batch) against measured pairs of small trainings (some 2 minutes)
	@$(BIN)/python tests/benchmarks/bench_cpu_promises.py $(ARGS)

bench-ops: setup ## cost models, device table and bounds of fusing against measured times of single ops (needs ../shared/evidence; some 3 minutes)
	@$(BIN)/python tests/benchmarks/bench_op_costs.py && $(BIN)/python tests/benchmarks/bench_fusing.py

bench-devices: setup ## projections to another device against ops and models that were timed on several (needs ../shared; half a minute)
	@$(BIN)/python tests/benchmarks/bench_device_projection.py

bench-capture: setup ## step time bare, outside and inside a recorded window, and under torch.profiler alone; fails where a limit is missed
	@$(BIN)/python tests/benchmarks/bench_capture.py

bench-experiments: setup ## false claims, power and search losses on recorded processes, beside naive rules (needs ../shared/experiments)
	@$(BIN)/python tests/benchmarks/bench_experiments.py

bench-live: setup ## experiments on live programs with known answers, twenty A/A among them; each once, about an hour; goes on where it was stopped
	@$(BIN)/python tests/benchmarks/bench_live.py runs/bench-live

bench-pages: setup ## callbacks of the dashboard on large recordings, and how soon a report is there in a browser
	@$(BIN)/python tests/benchmarks/bench_pages.py

bench-timeline: setup ## frames and callbacks of the timeline in a browser, on a synthetic trace of 1 GB (ARGS="TRACE" or a size in MB)
	@$(BIN)/python tests/benchmarks/bench_timeline.py $(ARGS)

sweep-pages: setup ## every page of the dashboard at three widths, light and dark, six loads each: faults on it (ARGS="FOLDER --loads 1")
	@$(BIN)/python tests/benchmarks/sweep_pages.py $(ARGS)

soak: setup ## 100,000 steps with 400 windows: memory, files and threads stay as they are; then the bundle is read back (some ten minutes)
	@$(BIN)/python tests/benchmarks/bench_soak.py $(ARGS)

kill: setup ## kill -9 at 200 random moments of recordings, reports and experiments; fails where something is lost (some twenty minutes)
	@$(BIN)/python tests/benchmarks/bench_kills.py $(ARGS)

bench-load: setup ## 200 clients of the dashboard for 60 s on this machine alone: requests a second, waits, errors, memory (ARGS="--clients 20 --seconds 5")
	@$(BIN)/python tests/benchmarks/bench_load.py $(ARGS)

release: setup ## build what is published, install it in clean environments, run the commands of the README; publishes nothing (some ten minutes)
	@$(BIN)/python release/check.py $(ARGS)

audit: setup ## what is installed against the known vulnerabilities (pip-audit); says so where it cannot be asked
	@$(BIN)/python .ci/audit.py $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .venv-peers .venv-field build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
