# The targets of routerd. `make help` lists them.
#
# Everything that CI does is a target here, and .ci/run calls these targets.
# Needs GNU make and Go; what else a target needs it installs by itself
# (make deps).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

GO      ?= go
PREFIX  ?= /usr/local
DESTDIR ?=
# No date, user or host name: two builds of one commit are the same bytes.
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

# All but the race detector compiles in one way: with another one, each of some
# nine hundred packages is compiled once more.
export CGO_ENABLED := 0
export GOFLAGS := $(strip $(filter-out -trimpath,$(GOFLAGS)) -trimpath)

BIN   := $(CURDIR)/bin
CACHE := $(CURDIR)/.cache
TOOLS := $(CACHE)/bin
TOOLMOD := -modfile=$(CURDIR)/.ci/tools.mod

# Packages whose tests need a lab, programs in bin/ or a virtual machine. All
# others are unit tests.
STAGED := /integration/(lab|scenarios|hostile|doctor|ui|soak|service|runtimes|kube|vm|packages|bench)(/|$$)
# What the VM stage runs under Debian's kernel beside the scenarios: what changes
# the kernel most. (dataplane/neighbour and sourceport, and control/probe's raw
# sockets, pass there too; the scenario of NAT goes through them.)
VMPKGS := ./dataplane/kernel ./dataplane/workload ./dataplane/nft
# Of these packages the VM stage runs some tests alone: what needs ipip, and a
# real networkd restarted beside the daemon.
VMSOMEPKGS := ./control/probe ./cmd/routerd
VMSOME := ^(TestSocketsIPIP|TestBesideNetworkd)$$
# What puts a load on the kernel says nothing about another version of it, and
# takes minutes on an emulated processor: test-unit has it.
VMSKIP := ^(TestCut|TestKilledBetweenParts|TestRefusedMessagesConverge|TestTwentyThousandRoutes|TestGroupMovesManyRoutes|TestManyCallersAtOnce|TestSaboteur|TestPathIndependence|TestUnchangedWorldSeesNoMessage|TestSetMTUUnderTraffic)$$
# Models that play many hosts in one goroutine, in which the race detector
# has nothing to find, and makes more than a minute of ten seconds; and scripts of some
# hundred commands, each a process whose start it makes three times as dear. What commands do
# at once has tests of its own, with it. No other package has tests of these names.
RACELESSPKG := ./control/vrouter ./cmd/routerctl
RACELESS := ^(TestLiveChange(WithFaults|Dark)?|TestScripts)$$
# What reads the repository's own files and programs it starts, six times as long with the detector.
TEXTPKG := ./integration/repo
# The unit tests that take longest, which begin first: by its name store/etcd would begin among the last, and end with nothing beside it.
LONGPKG := ./cmd/routerd ./store/etcd
# kube-proxy in mode ipvs, in the virtual machine, with what it calls.
PROXYRUN = $(BIN)/vmrun --env ROUTERD_STAGE=vm --env KUBE_BIN=/opt/kube --timeout 15m --file $(KUBE)/kube-proxy:/opt/kube/kube-proxy \
	$(foreach p,ipset $(foreach v,iptables ip6tables,$(v) $(v)-save $(v)-restore),--tool $(p)) --file $(XTABLES):$(XTABLES) --file /etc/protocols:/etc/protocols
# Where iptables has its extensions.
XTABLES = $(patsubst %/libxt_set.so,%,$(firstword $(wildcard /usr/lib/*/xtables/libxt_set.so)))
# What of integration/kube/cluster is about the daemons' rights, for clusters whose datastore is another.
KUBERIGHTS := ^(TestDaemonSet|TestStolenToken|TestRightsOfGroup)$$
VMRUN = $(BIN)/vmrun --bin $(BIN) --env ROUTERD_STAGE=vm --timeout 20m
FUZZTIME ?= 10s
SOAKTIME ?= 10m
SOAKFLAGS ?=

##@ Use

.PHONY: build
build: ## Build routerd, routerctl, routerd-cni and the helpers of the tests into bin/
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/... ./integration/vm/cmd/... ./integration/kube/cmd/...
	ln -sfn routerctl $(BIN)/kubectl-routerd

.PHONY: install
install: build ## Install below $(DESTDIR)$(PREFIX), configuration below $(DESTDIR)/etc
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/systemd/system $(DESTDIR)/etc/routerd \
		$(DESTDIR)/etc/iproute2/rt_protos.d $(DESTDIR)/etc/systemd/networkd.conf.d $(DESTDIR)/etc/systemd/network $(DESTDIR)/etc/NetworkManager/conf.d
	install -m 0755 $(BIN)/routerd $(BIN)/routerctl $(BIN)/routerd-cni $(DESTDIR)$(PREFIX)/bin/
	ln -sfn routerctl $(DESTDIR)$(PREFIX)/bin/kubectl-routerd
	sed 's,/usr/local/bin/,$(PREFIX)/bin/,' configs/systemd/routerd.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/routerd.service
	chmod 0644 $(DESTDIR)$(PREFIX)/lib/systemd/system/routerd.service
	install -m 0644 configs/iproute2/rt_protos.d/routerd.conf $(DESTDIR)/etc/iproute2/rt_protos.d/
	install -m 0644 configs/networkd/routerd.conf $(DESTDIR)/etc/systemd/networkd.conf.d/
	install -m 0644 configs/networkd/10-routerd.network $(DESTDIR)/etc/systemd/network/
	install -m 0644 configs/networkmanager/routerd.conf $(DESTDIR)/etc/NetworkManager/conf.d/
	[ -e $(DESTDIR)/etc/routerd/routerd.yaml ] || install -m 0640 configs/routerd.yaml $(DESTDIR)/etc/routerd/

DIST := $(CURDIR)/dist
# The newest tag, or 0.0.0 before the first, with what came since: both package
# formats sort it after that tag.
PACKAGE_VERSION ?= $(shell git describe --tags --match 'v[0-9]*' 2>/dev/null | sed 's/^v//;s/-/+/;s/-/./g' | grep . || echo 0.0.0+$$(git rev-list --count HEAD).g$$(git rev-parse --short HEAD))
# Times within packages: the commit's, so that two builds are the same bytes.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
PACKAGE_ARCHS ?= amd64 arm64

.PHONY: package
package: $(TOOLS)/nfpm $(TOOLS)/cyclonedx-gomod ## Make the deb and rpm packages for amd64 and arm64 into dist/, and a bill of materials of each program
	rm -rf $(DIST)
	$(GO) build -ldflags '$(LDFLAGS)' -o $(DIST)/host/ ./cmd/routerd ./cmd/routerctl
	$(DIST)/host/routerd man $(DIST)/man
	$(DIST)/host/routerctl man $(DIST)/man
	gzip -9n $(DIST)/man/*.1
	mkdir -p $(DIST)/completion
	$(DIST)/host/routerctl completion bash >$(DIST)/completion/routerctl.bash
	$(DIST)/host/routerctl completion zsh >$(DIST)/completion/_routerctl
	$(DIST)/host/routerctl completion fish >$(DIST)/completion/routerctl.fish
	sed 's,/usr/local/bin/,/usr/bin/,' configs/systemd/routerd.service >$(DIST)/routerd.service
	for arch in $(PACKAGE_ARCHS); do \
		GOARCH=$$arch $(GO) build -ldflags '$(LDFLAGS)' -o $(DIST)/stage/bin/ ./cmd/routerd ./cmd/routerctl ./cmd/routerd-cni; \
		cp -r $(DIST)/man $(DIST)/completion $(DIST)/routerd.service configs CHANGELOG.md $(DIST)/stage/; \
		find $(DIST)/stage -exec touch -h -d @$(SOURCE_DATE_EPOCH) {} +; \
		for program in routerd routerctl routerd-cni; do \
			$(TOOLS)/cyclonedx-gomod bin -json -noserial -notimestamp -version '$(PACKAGE_VERSION)' \
				-output "$(DIST)/$${program}_$(PACKAGE_VERSION)_$$arch.cdx.json" $(DIST)/stage/bin/$$program; \
		done; \
		for format in deb rpm; do \
			ARCH=$$arch PACKAGE_VERSION='$(PACKAGE_VERSION)' SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) \
			sh -c 'cd $(DIST) && $(TOOLS)/nfpm package --config $(CURDIR)/configs/nfpm.yaml --packager $$1 --target .' sh $$format; \
		done; \
		rm -rf $(DIST)/stage; \
	done
	rm -rf $(DIST)/host $(DIST)/man $(DIST)/completion $(DIST)/routerd.service
	cd $(DIST) && sha256sum routerd* routerctl* >SHA256SUMS && cat SHA256SUMS

# The image has the programs of the packages: builds are reproducible, and so are
# the archives, whose files have the time of the commit.
.PHONY: release
release: ## All of a release into dist/: packages, bills of materials, images as OCI archives. Wants a clean tree at a tag; SIGN_KEY=FILE signs it with an SSH key
	@.ci/release-check
	@.ci/deps release
	$(MAKE) package
	for arch in $(PACKAGE_ARCHS); do \
		GOARCH=$$arch $(GO) build -ldflags '$(LDFLAGS)' -o $(DIST)/image/ ./cmd/routerd ./cmd/routerctl ./cmd/routerd-cni; \
		podman build --quiet --no-cache --platform linux/$$arch --timestamp $(SOURCE_DATE_EPOCH) \
			-t routerd:$(VERSION) -f configs/image/Containerfile $(DIST)/image; \
		podman save --quiet --format oci-dir -o $(DIST)/oci routerd:$(VERSION); \
		tar --sort=name --mtime=@$(SOURCE_DATE_EPOCH) --owner=0 --group=0 --numeric-owner \
			-cf $(DIST)/routerd_$(PACKAGE_VERSION)_$$arch.oci.tar -C $(DIST)/oci .; \
		rm -rf $(DIST)/image $(DIST)/oci; \
	done
	cd $(DIST) && sha256sum routerd* routerctl* >SHA256SUMS && cat SHA256SUMS
	.ci/sign $(DIST)/SHA256SUMS '$(SIGN_KEY)'

.PHONY: demo
demo: deps-demo build ## Show it: three hosts, pods, every mode, a reachability matrix
ifeq ($(SKIP_VM),1)
	@echo "demo: SKIP_VM=1: IPIP and IPIPCrossSubnet are left out"
	@bin/routerctl lab demo --encapsulation Direct --encapsulation VXLAN --encapsulation VXLANCrossSubnet
else
	@bin/routerctl lab demo --vm-runner 'bin/vmrun --bin bin --timeout 5m'
endif

.PHONY: image
image: build ## Build the container image routerd:$(VERSION) with podman or docker
	@.ci/deps image
	@engine=$$(command -v podman || command -v docker); \
	echo "$$engine build -t routerd:$(VERSION)"; \
	$$engine build -t routerd:$(VERSION) -f configs/image/Containerfile bin

##@ Test

.PHONY: test
test: ## Every test: unit tests beside the virtual machine, then the scenarios there, then here
	@.ci/test

# A process of the race detector would sleep a second at its end.
.PHONY: test-unit
test-unit: deps-test ## Unit tests, with the race detector; those of kernel packages need root
	$(GO) test -timeout 10m -run '$(RACELESS)' $(RACELESSPKG)
	$(GO) test -timeout 10m $(TEXTPKG)
	CGO_ENABLED=1 GORACE=atexit_sleep_ms=0 $(GO) test -race -timeout 10m -skip '$(RACELESS)' $(LONGPKG) $$($(GO) list ./... | grep -vE '$(STAGED)|$(TEXTPKG:.%=%)$$')

# The scenarios first, which take as long as all others together. They wait too.
.PHONY: test-integration
test-integration: deps-test build ## Scenarios on hosts that are network namespaces of this machine
	ROUTERD_BIN=$(BIN) $(GO) test -count=1 -parallel 4 -timeout 15m ./integration/scenarios $$($(GO) list ./integration/... | grep -E '/integration/(lab|hostile|doctor|ui|soak|service|runtimes|bench)(/|$$)')

# The last commit whose daemon ran GoBGP's server. Any other will do, such as a tag.
BEFORE ?= cfe9c506477c6143274b09d40221687626b5c631

.PHONY: test-upgrade
test-upgrade: deps-test build $(CACHE)/before/$(BEFORE)/routerd ## Upgrade hosts from commit $(BEFORE) to this tree under traffic. Wants that commit in the clone
	ROUTERD_BIN=$(BIN) ROUTERD_BEFORE=$(CACHE)/before/$(BEFORE) $(GO) test -tags before -count=1 -timeout 10m -v -run '^TestUpgradeFromBefore$$' ./integration/scenarios

$(CACHE)/before/$(BEFORE)/routerd:
	@git cat-file -e '$(BEFORE)^{commit}' 2>/dev/null || { echo 'test-upgrade: this clone has no commit $(BEFORE): git fetch --unshallow brings it' >&2; exit 1; }
	@echo 'test-upgrade: building $(BEFORE)'
	@src=$$(mktemp -d); trap 'rm -rf "$$src"' EXIT; mkdir -p '$(@D)'; \
	git archive '$(BEFORE)' | tar -x -C "$$src"; \
	cd "$$src" && $(GO) build -ldflags '-s -w -X main.version=before' -o '$(@D)/' ./cmd/routerd-cni ./cmd/routerctl ./cmd/routerd

.PHONY: test-vm test-vm-kernel test-vm-daemon test-vm-scenarios
test-vm: test-vm-kernel test-vm-daemon test-vm-scenarios ## The same under Debian's kernel, which has ipip; SKIP_VM=1 leaves it out
# What it passed with, for make test, as of test-package.
KERNEL_RECORD ?= .ci/kernel-passed
ifeq ($(SKIP_VM),1)
test-vm-kernel test-vm-daemon test-vm-scenarios:
	@echo "$@: SKIP_VM=1: the IPIP modes and other kernels are NOT tested"
else
test-vm-kernel: deps-test build ## Of test-vm, the packages that write to the kernel, and the machine itself: what only dataplane changes
	@.ci/stage kernel inputs >$(CACHE)/kernel-inputs
	$(GO) test -count=1 -timeout 5m ./integration/vm/...
	$(GO) test -count=1 -p 1 -timeout 20m -skip '$(VMSKIP)' -exec '$(VMRUN)' $(VMPKGS)
	@cp $(CACHE)/kernel-inputs '$(KERNEL_RECORD)'
test-vm-daemon: deps-test build ## Of test-vm, all else that may run beside other work
	$(GO) test -count=1 -p 1 -timeout 20m -run '$(VMSOME)' -exec '$(VMRUN)' $(VMSOMEPKGS)
	$(GO) test -count=1 -timeout 20m -exec '$(VMRUN)' ./integration/hostile
test-vm-scenarios: deps-test build ## Of test-vm, what counts lost packets: it wants the machine for itself
	$(GO) test -count=1 -timeout 20m -exec '$(VMRUN)' ./integration/scenarios
endif

# Debian's kernel of this release has no TCP-AO; the one that has is 38 MB more,
# and the time is for its download too.
AOTESTS := ^TestKernel
AORUN = $(BIN)/vmrun --kernel backports --timeout 9m

.PHONY: test-tcp-ao
test-tcp-ao: deps-test build ## BGP's TCP-AO, which wants another kernel: downloads Debian's of backports, and its newer BIRD
	$(GO) test -tags tcpao -count=1 -run '$(AOTESTS)' -exec '$(AORUN)' ./control/bgp/engine/conn
	$(GO) test -tags tcpao -count=1 -run '$(AOTESTS)' -exec '$(AORUN) --package bird2' ./control/bgp

PACKAGES := $(CACHE)/packages
# What it passed with, for make test. Taken at the start: what is changed meanwhile was not tested.
PACKAGE_RECORD ?= .ci/package-passed

# The newer version is built twice, which has to give the same bytes.
.PHONY: test-package
test-package: $(TOOLS)/nfpm $(TOOLS)/cyclonedx-gomod ## Install, upgrade, stop and remove the packages under a real systemd, in the virtual machine
	@.ci/deps test package
	@.ci/stage package inputs >$(CACHE)/package-inputs
	@for dir in 0.0.1 0.0.2 again; do \
		version=$${dir/again/0.0.2}; \
		echo "packages: $(PACKAGES)/$$dir: version $$version"; \
		$(MAKE) -s --no-print-directory package DIST=$(PACKAGES)/$$dir VERSION=v$$version PACKAGE_VERSION=$$version PACKAGE_ARCHS=amd64 >/dev/null; \
	done
	@diff $(PACKAGES)/0.0.2/SHA256SUMS $(PACKAGES)/again/SHA256SUMS || { echo 'test-package: two builds of one tree are not the same bytes' >&2; exit 1; }
	@rm -r $(PACKAGES)/again
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/ ./integration/vm/cmd/vmrun
	$(GO) test -count=1 -timeout 25m -v -exec '$(BIN)/vmrun --systemd --env ROUTERD_STAGE=vm --file $(PACKAGES):/opt/packages --timeout 25m' ./integration/packages
	@cp $(CACHE)/package-inputs '$(PACKAGE_RECORD)'

# The second time in another place and without a build cache, so that neither is in the packages. The tools are those of this
# tree: a new copy's module files are younger than they are.
.PHONY: test-reproducible
test-reproducible: $(TOOLS)/nfpm $(TOOLS)/cyclonedx-gomod ## Make the packages of the last commit twice, in two copies of the tree, and compare those of both architectures
	@.ci/deps package
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	for copy in one another; do \
		git clone -q . "$$tmp/$$copy"; \
		echo "packages: $$copy"; \
		$(MAKE) -s --no-print-directory -C "$$tmp/$$copy" package CACHE=$(CACHE) -o $(TOOLS)/nfpm -o $(TOOLS)/cyclonedx-gomod >/dev/null; \
		export GOCACHE="$$tmp/cache"; \
	done; \
	diff "$$tmp/one/dist/SHA256SUMS" "$$tmp/another/dist/SHA256SUMS" || { echo 'test-reproducible: two builds of one commit are not the same bytes' >&2; exit 1; }; \
	cat "$$tmp/one/dist/SHA256SUMS"

.PHONY: kubernetes
kubernetes: kube-tools kube-runtime kube-crio kube-oracle build ## Conformance and whole daemons on a real Kubernetes API server, then a whole cluster of real nodes; all is built first: minutes with a cold cache. As root
	@.ci/deps kubernetes
	KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -timeout 20m ./integration/kube
	KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -p 1 -timeout 20m -v ./integration/kube/cluster ./integration/kube/credentials ./integration/kube/runtimes
	for d in v1 etcd; do KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -timeout 10m -v -run '$(KUBERIGHTS)' ./integration/kube/cluster -datastore=$$d -nodes=2 || exit 1; done
	KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -timeout 15m -v ./integration/kube/runtimes -runtime=crio
	$(GO) test -tags kubeproxy -count=1 -timeout 15m -v -run '^TestKubeProxyIPVS$$' -exec '$(PROXYRUN)' ./dataplane/nft
	$(GO) test -count=1 -timeout 15m -v ./control/policy -run '^TestKubernetesPolicies$$' -rapid.checks=2000 -cyclonus=$(KUBE)/cyclonus

# What it passed with, for make test, as of test-package.
KUBERNETES_RECORD ?= .ci/kubernetes-passed

.PHONY: test-kubernetes
test-kubernetes: kube-tools kube-runtime kube-suites build ## Conformance of the datastore on a real Kubernetes API server, nodes with containerd 2, and a chosen part of kubernetes-suites. As root
	@.ci/deps kubernetes
	@.ci/stage kubernetes inputs >$(CACHE)/kubernetes-inputs
	KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -timeout 20m ./integration/kube
	KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -timeout 20m ./integration/kube/suites -chosen
	KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -timeout 10m ./integration/kube/runtimes
	@cp $(CACHE)/kubernetes-inputs '$(KUBERNETES_RECORD)'

# Apart from kubernetes, for it takes a long time. CLUSTER has flags of the cluster:
# CLUSTER="-datastore=etcd" (integration/kube/cluster, Config.Flags).
.PHONY: kubernetes-suites
kubernetes-suites: kube-tools kube-suites build ## Kubernetes' own tests of NetworkPolicy and Services, and network-policy-api's, on such a cluster: an hour. As root
	@.ci/deps kubernetes
	KUBE_BIN=$(KUBE) ROUTERD_BIN=$(BIN) $(GO) test -count=1 -timeout 5h -v ./integration/kube/suites $(CLUSTER)

.PHONY: bench
bench: build ## Measure against the reference tools in the same run; also written to bench/latest.txt
	@.ci/deps bench
	@mkdir -p bench
	@ROUTERD_BIN=$(BIN) $(GO) run ./integration/bench/cmd/bench | tee bench/latest.txt

.PHONY: bench-bgp
bench-bgp: build ## The same for all that docs/performance.md has a goal for in BGP: minutes; also written to bench/bgp.txt
	@.ci/deps bench
	@mkdir -p bench
	@ROUTERD_BIN=$(BIN) $(GO) run ./integration/bench/cmd/bench -only bgp,alone,reflector,reflector-alone,churn \
		-prefixes 10000,500000 -reflect 100x100,100x1000,1000x100 -churn 60s | tee bench/bgp.txt

.PHONY: soak
soak: deps-test build ## Let a cluster live through random changes and faults for $(SOAKTIME); -seed in $(SOAKFLAGS) replays
	$(GO) run ./integration/soak/cmd/soak -bin $(BIN) -for $(SOAKTIME) $(SOAKFLAGS)

# Where coverage is not the same twice, to make an input smaller takes a minute
# each time, and the target does nothing else.
.PHONY: fuzz
fuzz: ## Run each fuzz target for $(FUZZTIME)
	@grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do \
		grep -oE '^func Fuzz[A-Za-z0-9_]*' "$$file" | cut -d' ' -f2 | while read -r target; do \
			echo "fuzz: $$(dirname "$$file") $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x "$$(dirname "$$file")" </dev/null; \
		done; \
	done

##@ Check

.PHONY: check
check: lint generate-check tidy-check test-unit ## What to run before a commit

.PHONY: lint
lint: $(TOOLS)/golangci-lint ## Linters and formatting; .golangci.yml says which and why
	$(TOOLS)/golangci-lint run --allow-parallel-runners

.PHONY: fmt
fmt: $(TOOLS)/golangci-lint ## Format all Go files
	$(TOOLS)/golangci-lint fmt

.PHONY: vuln
vuln: ## Look the dependencies up in Go's vulnerability database (needs the network)
	$(GO) tool $(TOOLMOD) govulncheck ./...

.PHONY: tidy-check
tidy-check: ## Check that go.mod says what the code imports
	$(GO) mod tidy -diff

PROTOS := control/api/v1/cni.proto control/api/v1/operator.proto control/api/v1/bgp.proto control/api/v1/events.proto control/api/v1/doctor.proto control/api/v1/cluster.proto control/api/v1/ui.proto
PROTOC = PATH=$(TOOLS):$$PATH protoc --go_opt=paths=source_relative --go-grpc_opt=paths=source_relative

.PHONY: generate
generate: $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## Generate the gRPC code from the .proto files
	@.ci/deps generate
	$(PROTOC) --go_out=. --go-grpc_out=. $(PROTOS)

.PHONY: generate-check
generate-check: $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## Check that generated code is up to date
	@.ci/deps generate
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PROTOC) --go_out="$$tmp" --go-grpc_out="$$tmp" $(PROTOS); \
	for f in control/api/v1/*.pb.go; do \
		diff -u "$$f" "$$tmp/$$f" || { echo "generate-check: $$f is not what its .proto says: run make generate" >&2; exit 1; }; \
	done

##@ Rest

.PHONY: deps
deps: deps-demo deps-test ## Install the Debian packages that demo, test and bench need and this machine lacks
	@.ci/deps bench generate

.PHONY: deps-demo deps-test
deps-demo:
	@.ci/deps build demo
deps-test:
	@.ci/deps build test

# Tools are built once per version of .ci/tools.mod.
$(TOOLS)/golangci-lint: PKG = github.com/golangci/golangci-lint/v2/cmd/golangci-lint
$(TOOLS)/protoc-gen-go: PKG = google.golang.org/protobuf/cmd/protoc-gen-go
$(TOOLS)/protoc-gen-go-grpc: PKG = google.golang.org/grpc/cmd/protoc-gen-go-grpc
$(TOOLS)/golangci-lint $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc: .ci/tools.mod .ci/tools.sum
	@echo "tools: building $(notdir $@)"
	@mkdir -p $(TOOLS)
	@$(GO) build $(TOOLMOD) -o $@ $(PKG)

# The programs of Kubernetes that tests start, from a module of its own, built
# once per version of .ci/kubernetes.mod. Linking needs up to 2.9 GB.
KUBE := $(CACHE)/kube
KUBEMOD := -modfile=$(CURDIR)/.ci/kubernetes.mod
KUBEVERSION = $(shell awk '$$1 == "k8s.io/kubernetes" { print $$2 }' .ci/kubernetes.mod)
KUBELDFLAGS = -s -w -X k8s.io/component-base/version.gitVersion=$(KUBEVERSION)
KUBETOOLS := kube-apiserver kubectl kube-controller-manager kube-scheduler kubelet kube-proxy agnhost

.PHONY: kube-tools
kube-tools: $(KUBETOOLS:%=$(KUBE)/%) ## Build Kubernetes' own programs into .cache/kube/

$(KUBETOOLS:%=$(KUBE)/%): PKG = k8s.io/kubernetes/cmd/$(notdir $@)
# The program of the images that Kubernetes' own tests run in pods.
$(KUBE)/agnhost: PKG = k8s.io/kubernetes/test/images/agnhost
$(KUBETOOLS:%=$(KUBE)/%): .ci/kubernetes.mod .ci/kubernetes.sum
	@echo "kube-tools: building $(notdir $@) $(KUBEVERSION)"
	@mkdir -p $(KUBE)
	@$(GO) build $(KUBEMOD) -ldflags '$(KUBELDFLAGS)' -o $@ $(PKG)

# The next runtime beside Debian's. Its own module file: it wants other versions of what it shares with Kubernetes.
RUNTIMETOOLS := containerd containerd-shim-runc-v2
RUNTIMEVERSION = $(shell awk '$$1 == "github.com/containerd/containerd/v2" { print $$2 }' .ci/containerd.mod)

.PHONY: kube-runtime
kube-runtime: $(RUNTIMETOOLS:%=$(KUBE)/%) ## Build containerd 2 into .cache/kube/

$(RUNTIMETOOLS:%=$(KUBE)/%): .ci/containerd.mod .ci/containerd.sum
	@echo "kube-tools: building $(notdir $@) $(RUNTIMEVERSION)"
	@mkdir -p $(KUBE)
	@$(GO) build -modfile=$(CURDIR)/.ci/containerd.mod -ldflags '-s -w -X github.com/containerd/containerd/v2/version.Version=$(RUNTIMEVERSION)' -o $@ github.com/containerd/containerd/v2/cmd/$(notdir $@)

# The runtime that sends GC; its program pinns is written in C.
CRIOTAGS := containers_image_openpgp containers_image_ostree_stub exclude_disk_quota exclude_graphdriver_btrfs exclude_graphdriver_devicemapper

.PHONY: kube-crio
kube-crio: $(KUBE)/crio $(KUBE)/pinns ## Build CRI-O into .cache/kube/

$(KUBE)/crio: .ci/crio.mod .ci/crio.sum
	@echo "kube-tools: building $(notdir $@)"
	@mkdir -p $(KUBE)
	@$(GO) build -modfile=$(CURDIR)/.ci/crio.mod -tags '$(CRIOTAGS)' -ldflags '-s -w' -o $@ github.com/cri-o/cri-o/cmd/crio

$(KUBE)/pinns: $(KUBE)/crio
	@gcc -std=c99 -Os -static -s -o $@ "$$($(GO) list -m -modfile=$(CURDIR)/.ci/crio.mod -f '{{ .Dir }}' github.com/cri-o/cri-o)"/pinns/src/*.c

# By these others judge a cluster.
.PHONY: kube-suites
kube-suites: $(KUBE)/e2e.test $(KUBE)/network-policy-api.test $(KUBE)/coredns ## Build those suites into .cache/kube/

$(KUBE)/e2e.test: .ci/kubernetes.mod .ci/kubernetes.sum
	@echo "kube-tools: building $(notdir $@) $(KUBEVERSION)"
	@mkdir -p $(KUBE)
	@$(GO) test -c -vet=off $(KUBEMOD) -ldflags '$(KUBELDFLAGS)' -o $@ k8s.io/kubernetes/test/e2e

$(KUBE)/network-policy-api.test: .ci/network-policy-api.mod .ci/network-policy-api.sum
	@echo "kube-tools: building $(notdir $@)"
	@mkdir -p $(KUBE)
	@$(GO) test -c -vet=off -modfile=$(CURDIR)/.ci/network-policy-api.mod -ldflags '-s -w' -o $@ sigs.k8s.io/network-policy-api/conformance

# In a module of its own: Kubernetes' has another version of what both share.
$(KUBE)/coredns: $(wildcard .ci/coredns/*)
	@echo "kube-tools: building $(notdir $@)"
	@mkdir -p $(KUBE)
	@cd .ci/coredns && $(GO) build -ldflags '-s -w' -o $@ .

.PHONY: kube-oracle
kube-oracle: $(KUBE)/cyclonus

# Another program's reading of NetworkPolicy, beside which routerd's is put. Of its own module file: it wants an older
# Kubernetes.
$(KUBE)/cyclonus: $(wildcard .ci/cyclonus/*)
	@echo "kube-tools: building $(notdir $@)"
	@mkdir -p $(KUBE)
	@cd .ci/cyclonus && $(GO) build -ldflags '-s -w' -o $@ .

# Module files of their own: they want other versions of what the tools above share.
$(TOOLS)/nfpm: .ci/nfpm.mod .ci/nfpm.sum
	@echo "tools: building nfpm"
	@mkdir -p $(TOOLS)
	@$(GO) build -modfile=$(CURDIR)/.ci/nfpm.mod -o $@ github.com/goreleaser/nfpm/v2/cmd/nfpm

$(TOOLS)/cyclonedx-gomod: .ci/sbom.mod .ci/sbom.sum
	@echo "tools: building cyclonedx-gomod"
	@mkdir -p $(TOOLS)
	@$(GO) build -modfile=$(CURDIR)/.ci/sbom.mod -o $@ github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod

.PHONY: clean
clean: ## Remove what was built; the cache of tools and the VM's kernel stays
	rm -rf bin bench dist $(CACHE)/vm/base-*.cpio $(CACHE)/vm/*/base-*.cpio

.PHONY: distclean
distclean: clean ## Remove the cache too: the next run downloads and builds again
	rm -rf $(CACHE)

.PHONY: help
help: ## Show the targets
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
