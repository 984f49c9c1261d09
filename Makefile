# The commands for work on this project. `make help` lists them.

CARGO ?= cargo

.PHONY: help demo test build-tests test-rdma test-disk sim sim-sample sim-mutants rights-mutants thrash thrash-sample lint bench bench-redundancy bench-scale layers report build doc fuzz deny setup setup-demo setup-report clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install the programs that building and testing need (a C linker, Rust)
	@scripts/setup build

setup-demo:
	@scripts/setup build bench

build: setup ## Build the release binary: target/release/outboard
	$(CARGO) build --release --locked --bin outboard

demo: setup-demo ## Run a node, copy files in and out while its roles are killed, and measure both placements
	$(CARGO) build --release --locked --bin outboard --bin outboard-demo
	@$(CARGO) run -q --release --locked --bin outboard-demo

# Most tests wait for timers and processes, so more tests run at a time than there are cores.
export RUST_TEST_THREADS ?= $(shell echo $$((2 * $$(nproc))))

# Tests are always built for the whole workspace. For a single package, cargo would enable fewer
# features of its dependencies, and so build all dependencies again. All tests run, even if some
# fail. Tests that need loop devices or huge pages run if the machine has them. Tests that need
# libfabric or ISA-L fail if setup cannot install these libraries. The end-to-end tests run over
# TCP, and then over libfabric.
test: setup ## Run every test
	@scripts/setup test
	@failed=0; set -x; \
	$(CARGO) test --locked --workspace --no-fail-fast || failed=1; \
	if losetup --find >/dev/null 2>&1; then $(CARGO) test --locked --workspace --test devices --no-fail-fast -- --ignored || failed=1; fi; \
	if grep -qE '^HugePages_Free: +([89]|[0-9]{2,})$$' /proc/meminfo; then $(CARGO) test --locked --workspace --lib -- --ignored pages_that_are_set_aside || failed=1; fi; \
	if [ -d /sys/kernel/mm/transparent_hugepage ] && printf '6.1\n%s\n' "$$(uname -r)" | sort -CV; then $(CARGO) test --locked --workspace --lib -- --ignored transparent_huge_pages || failed=1; fi; \
	OUTBOARD_TEST_NETWORK=ofi:tcp $(CARGO) test --locked --workspace --test e2e --no-fail-fast -- --skip tcp_only:: || failed=1; \
	exit $$failed

build-tests: setup ## Build all tests without running them
	$(CARGO) test --locked --workspace --no-run

test-rdma: setup ## Run tests over RDMA verbs in an emulated machine (tests/rdma), DEVICE=rxe0 (soft-RoCE), siw0 (soft-iWARP) or all; HALF=0 or 1
	@scripts/setup test
	@DEVICE=$(DEVICE) HALF=$(HALF) tests/rdma/run

test-disk: setup ## Use virtual disks in an emulated machine while processes are killed (tests/disk); KILLS=10 of each role, REDUNDANCY="single mirror:2 ec:4+2"
	@scripts/setup test
	@KILLS=$(KILLS) tests/disk/run $(REDUNDANCY)

sim: setup ## Simulate a whole node from 10,000 seeds; SEEDS=COUNT, SEED=FIRST, JOBS=COUNT
	$(CARGO) build --profile sim --locked -p outboard-sim
	@$${CARGO_TARGET_DIR:-target}/sim/outboard-sim --seed $(or $(SEED),0) --count $(or $(SEEDS),10000) --jobs $(or $(JOBS),$(shell nproc))

sim-sample: setup ## Simulate a whole node from new seeds for MINUTES=4; SEED=FIRST
	OUTBOARD_SIM_MINUTES=$(or $(MINUTES),4) OUTBOARD_SIM_SEED=$(SEED) $(CARGO) test --locked --workspace --test simulations -- --ignored --nocapture a_sample_of_seeds_shows_no_bug

sim-mutants: setup ## Plant bugs, one at a time, and check that simulations find each of them
	RUSTFLAGS="--cfg mutants" $(CARGO) build --profile sim --locked -p outboard-sim --target-dir $${CARGO_TARGET_DIR:-target}/mutants
	@$${CARGO_TARGET_DIR:-target}/mutants/sim/outboard-sim --mutants --count 2000 --jobs $(or $(JOBS),$(shell nproc))

# For example, ARGS="--pools mirror:2 --without stale-image" (docs/thrash.md).
thrash: setup ## Inject faults into real nodes for MINUTES=60, and check all answers; SEED=FIRST, ARGS="--pools single"
	$(CARGO) build --release --locked --bin outboard --bin outboard-thrash
	@$${CARGO_TARGET_DIR:-target}/release/outboard-thrash --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Uses the programs that the tests build, so that CI builds nothing for this target.
thrash-sample: build-tests ## Inject faults into real nodes for MINUTES=2
	@$${CARGO_TARGET_DIR:-target}/debug/outboard-thrash --minutes $(or $(MINUTES),2) $(if $(SEED),--seed $(SEED))

rights-mutants: setup ## Plant errors in permissions, and check that the tests of rights find each of them
	RUSTFLAGS="--cfg mutants" $(CARGO) test --locked -p outboard-osd --target-dir $${CARGO_TARGET_DIR:-target}/mutants --test e2e -- --ignored --exact --nocapture rights::each_planted_error_in_permissions_is_found

lint: setup ## Check documents, type names and formatting, and run clippy; warnings are errors
	@scripts/setup lint
	@scripts/check-docs
	@scripts/check-names
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

# COMPARE=OLD compares the binary OLD with the new one, in ROUNDS interleaved rounds with runs of
# SECONDS each. JSON=1 prints one JSON object.
compared := $(if $(COMPARE),--compare $(COMPARE) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(JSON),--json))

bench: setup-demo ## Compare a node with fio on the same drive; COMPARE=OLD: compare with the binary OLD (20 min)
	$(CARGO) build --release --locked --bin outboard --bin outboard-bench
	@$(CARGO) run -q --release --locked --bin outboard-bench -- $(compared)

bench-redundancy: setup-demo ## Measure pools with redundancy, small changes, rebuilds and coding (PARTS="pools rebuild"); writes report/redundancy; COMPARE=OLD
	$(CARGO) build --release --locked --bin outboard --bin outboard-bench --bin outboard-redundancy --bin outboard-layers
	@$(if $(COMPARE),$(CARGO) run -q --release --locked --bin outboard-bench -- $(compared) --redundancy,\
	$(CARGO) run -q --release --locked --bin outboard-redundancy -- $(PARTS))

bench-scale: setup-demo ## Measure nodes with 10^3, 10^5 and 10^6 objects (OUTBOARD_SCALE_OBJECTS=1000,100000); writes report/scale
	$(CARGO) build --release --locked --bin outboard --bin outboard-scale
	@$(CARGO) run -q --release --locked --bin outboard-scale

layers: setup ## Build target/release/outboard-layers, which measures single layers without a node (docs/benchmarks.md)
	$(CARGO) build --release --locked --bin outboard-layers

# Ceph is optional. If it cannot be installed, the report states that Ceph was not measured. CEPH=0
# omits Ceph without an attempt to install it.
setup-report: setup-demo
ifneq ($(CEPH),0)
	@scripts/setup ceph || echo "make report: Ceph cannot be installed, so the report will not measure it"
endif

report: setup-report ## Repeat the papers' evaluations, the first one together with a real Ceph; writes report/index.html (QUICK=1: 8 min; ROUNDS=7 SECONDS=3: 1 h)
	$(CARGO) build --release --locked --bin outboard --bin outboard-redundancy --bin outboard-report --bin outboard-layers
	@QUICK=$(QUICK) $(CARGO) run -q --release --locked --bin outboard-redundancy -- coding:timeline coding:places coding:wide
	@QUICK=$(QUICK) ROUNDS=$(ROUNDS) SECONDS=$(SECONDS) CEPH=$(CEPH) $(CARGO) run -q --release --locked --bin outboard-report

doc: setup ## Build the documentation of the crates
	$(CARGO) doc --locked --workspace --no-deps

fuzz: setup ## Run every fuzz target for a minute (FUZZ_SECONDS=60)
	@scripts/fuzz

deny: setup ## Check the licences, advisories and sources of dependencies
	@scripts/setup deny
	$(CARGO) deny check

clean: ## Remove all build output
	$(CARGO) clean
