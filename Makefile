# Everything a person or a machine does with this project. `make help` lists it.

CARGO ?= cargo

.PHONY: help demo test build-tests test-rdma lint bench bench-redundancy layers report build doc fuzz deny setup setup-demo setup-report clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what building and testing need (a C linker, Rust)
	@scripts/setup build

setup-demo:
	@scripts/setup build bench

build: setup ## Build the release binary: target/release/outboard
	$(CARGO) build --release --locked --bin outboard

demo: setup-demo ## Start a node, copy a real tree in and out while killing its roles, measure both placements
	$(CARGO) build --release --locked --bin outboard --bin outboard-demo
	@$(CARGO) run -q --release --locked --bin outboard-demo

# Every build of tests is one of the whole workspace: of a single package cargo would enable fewer features of what it depends on, and
# build everything again. All tests run, whichever fail: those that need loop devices where there are some, and the end-to-end tests over
# TCP, then over libfabric.
test: setup ## Run every test
	@scripts/setup test
	@failed=0; set -x; \
	$(CARGO) test --locked --workspace --no-fail-fast || failed=1; \
	if losetup --find >/dev/null 2>&1; then $(CARGO) test --locked --workspace --test devices --no-fail-fast -- --ignored || failed=1; fi; \
	OUTBOARD_TEST_NETWORK=ofi:tcp $(CARGO) test --locked --workspace --test e2e --no-fail-fast -- --skip tcp_only:: || failed=1; \
	exit $$failed

build-tests: setup ## Build every test, and run none
	$(CARGO) test --locked --workspace --no-run

test-rdma: setup ## Run tests over RDMA verbs in an emulated machine (tests/rdma), DEVICE=rxe0 (soft-RoCE), siw0 (soft-iWARP) or all
	@scripts/setup test
	@DEVICE=$(DEVICE) tests/rdma/run

lint: setup ## Documents, type names, formatting and clippy; warnings are errors
	@scripts/setup lint
	@scripts/check-docs
	@scripts/check-names
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

# COMPARE=OLD: the binary OLD against the new one, in ROUNDS interleaved rounds of SECONDS each; JSON=1 prints one object.
compared := $(if $(COMPARE),--compare $(COMPARE) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(JSON),--json))

bench: setup-demo ## Measure a node against fio on the same drive, with ratios; COMPARE=OLD: against an old binary (20 min)
	$(CARGO) build --release --locked --bin outboard --bin outboard-bench
	@$(CARGO) run -q --release --locked --bin outboard-bench -- $(compared)

bench-redundancy: setup-demo ## Measure pools with redundancy, rebuilds and coding (PARTS="pools rebuild"): report/redundancy; COMPARE=OLD
	$(CARGO) build --release --locked --bin outboard --bin outboard-bench --bin outboard-redundancy --bin outboard-layers
	@$(if $(COMPARE),$(CARGO) run -q --release --locked --bin outboard-bench -- $(compared) --redundancy,\
	$(CARGO) run -q --release --locked --bin outboard-redundancy -- $(PARTS))

layers: setup ## Build target/release/outboard-layers, which measures single layers without a node (docs/benchmarks.md)
	$(CARGO) build --release --locked --bin outboard-layers

# A Ceph is good to have, not needed: without it the report leaves it out and says so. CEPH=0 does not even ask for it.
setup-report: setup-demo
ifneq ($(CEPH),0)
	@scripts/setup ceph || echo "make report: goes on without Ceph"
endif

report: setup-report ## The papers' evaluations, the first beside a real Ceph: report/index.html (QUICK=1: 6 min; ROUNDS=7 SECONDS=3: 1 h)
	$(CARGO) build --release --locked --bin outboard --bin outboard-redundancy --bin outboard-report --bin outboard-layers
	@QUICK=$(QUICK) $(CARGO) run -q --release --locked --bin outboard-redundancy -- coding:timeline coding:places
	@QUICK=$(QUICK) ROUNDS=$(ROUNDS) SECONDS=$(SECONDS) CEPH=$(CEPH) $(CARGO) run -q --release --locked --bin outboard-report

doc: setup ## The crates' documentation
	$(CARGO) doc --locked --workspace --no-deps

fuzz: setup ## Run every fuzz target for a minute (FUZZ_SECONDS=60)
	@scripts/fuzz

deny: setup ## Check dependencies: licences, advisories, sources
	@scripts/setup deny
	$(CARGO) deny check

clean: ## Remove what was built
	$(CARGO) clean
