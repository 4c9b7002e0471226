# Thin aliases; the logic lives in nstance-dev, where it is typed and tested.
CARGO ?= cargo

.PHONY: check dev dev-ha dev-tmux dev-tmux-k8s dev-operator clean-dev test sim lint build crds nstance-server nstance-agent nstance-agent-static nstance-admin nstance-operator nstance-dev agent-packages kubernetes-tools bench-load bench-micro bench-agent

# One line for each tool and port that is needed.
check: build
	./target/debug/nstance-dev check

dev: build
	./target/debug/nstance-dev up

# Agents in windows of tmux (`tmux attach -t nstance-dev-agents`), and everything built anew when a source changes.
dev-tmux: build
	./target/debug/nstance-dev up --provider tmux --no-k8s --no-operator --watch

dev-tmux-k8s: build
	./target/debug/nstance-dev up --provider tmux --watch

# The operator alone, on the API server of temp/operator/kubeconfig.
dev-operator: export NSTANCE_NAMESPACE ?= default
dev-operator: build
	./target/debug/nstance-dev operator --watch --kubeconfig temp/operator/kubeconfig --config temp/operator/config.yaml

dev-ha: build
	./target/debug/nstance-dev up --shards 2 --servers-per-shard 2

clean-dev: build
	./target/debug/nstance-dev clean

build:
	$(CARGO) build --locked --bins

test:
	$(CARGO) build --locked --bins
	$(CARGO) test --locked --workspace --no-fail-fast
	$(SIM)

# The simulation is optimised, or it would take many times as long. In full it has a thousand seeds and every crash point.
SIM = $(CARGO) test --locked --profile sim -p nstance-sim --test it -- --nocapture
sim:
	NSTANCE_SIM_FULL=1 $(SIM)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked -p nstance-sim --test it -- -D warnings

# The manifests below config/, from the operator's types.
crds:
	$(CARGO) run --locked --quiet -p nstance-operator --bin crdgen

nstance-server nstance-dev:
	$(CARGO) build --locked --release -p $@ --features fast-alloc
	mkdir -p bin && cp target/release/$@ bin/

nstance-admin nstance-operator:
	$(CARGO) build --locked --release -p $@
	mkdir -p bin && cp target/release/$@ bin/

# Which agent a machine carries, by its own word.
nstance-agent nstance-agent-static: export NSTANCE_COMMIT ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
nstance-agent nstance-agent-static: export NSTANCE_BUILD_DATE ?= $(shell date -u +%Y-%m-%d)

nstance-agent:
	$(CARGO) build --locked --profile agent -p $@
	mkdir -p bin && cp target/agent/$@ bin/

# What a VM carries: one file without libraries, and how large it is. Needs musl-gcc.
# Relative relocations are packed: 2 kB instead of 170 kB, and it stays position independent.
AGENT_TARGET ?= x86_64-unknown-linux-musl
# For machines with ARM processors: AGENT_TARGET=aarch64-unknown-linux-musl, with Debian's gcc-aarch64-linux-gnu.
nstance-agent-static: export CC_aarch64_unknown_linux_musl ?= aarch64-linux-gnu-gcc
nstance-agent-static: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER ?= aarch64-linux-gnu-gcc
nstance-agent-static:
	rustup target add $(AGENT_TARGET)
	$(CARGO) rustc --locked --profile agent --target $(AGENT_TARGET) -p nstance-agent --bin nstance-agent -- \
		-C link-arg=-Wl,-z,pack-relative-relocs
	mkdir -p bin && cp target/$(AGENT_TARGET)/agent/nstance-agent bin/nstance-agent-$(AGENT_TARGET)
	wc -c bin/nstance-agent-$(AGENT_TARGET)

# The same as a deb and an rpm, with unit, user and manual. Needs dpkg-deb and rpmbuild.
agent-packages: nstance-agent-static
	deploy/package bin/nstance-agent-$(AGENT_TARGET) bin "$$($(CARGO) pkgid -p nstance-agent | sed 's/.*[#@]//')"

# A real Kubernetes for the tests, built from pinned Go modules into a cache directory. Needs Go; takes minutes, once.
kubernetes-tools:
	tools/kubernetes/build

# What that file costs where nothing happens, held against what is promised: on any machine, and on a spot machine, which
# asks a metadata service all the time; that one is served in a network of its own. Takes two and a half minutes.
bench-agent: build nstance-agent-static
	./target/debug/nstance-dev bench agent --check --agent bin/nstance-agent-$(AGENT_TARGET)
	unshare --map-root-user --net sh -c 'ip link set lo up && ip address add 169.254.169.254/32 dev lo && \
		exec ./target/debug/nstance-dev bench agent --check --spot --agent bin/nstance-agent-$(AGENT_TARGET)'

# What thousands of agents cost, held against what is promised. Takes ten minutes of a machine that does nothing else.
bench-load:
	$(CARGO) build --locked --release -p nstance-dev -p nstance-server --bins \
		--features nstance-dev/fast-alloc,nstance-server/fast-alloc
	TMPDIR=/dev/shm ./target/release/nstance-dev bench load --check --json bench.json

# What one plan, report, certificate or rebuild costs; in instructions, which a busy machine does not change. Needs valgrind.
bench-micro:
	$(CARGO) bench --locked -p nstance-dev --bench hot -- --instructions
