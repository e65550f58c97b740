# Berth. `make` lists the targets; `make check` is the gate, and CI runs nothing else.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export GOFLAGS ?=
# The module cache may be read-only or shared; nothing here edits go.mod.
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS = -s -w -X berth/services/berth/internal/cli.Version=$(VERSION)
MODULES = $(shell go list -m -f '{{.Dir}}')
# One call for all modules: the root of a workspace is no module, so ./... fails there.
PACKAGES = $(addsuffix /...,$(MODULES))
# Without a C compiler the race detector cannot be linked; CI has one.
RACE = $(shell command -v gcc >/dev/null || command -v cc >/dev/null && echo -race)
TESTFLAGS ?=
# T=Name narrows test targets to the tests that match, P=./services/gateway/... to packages.
T ?=
P ?= $(PACKAGES)
FUZZTIME ?= 10s
AREA ?=
NAME ?=
OVERLAY ?= production

##@ Every day
.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-zA-Z0-9_\/%-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build need/run ## play the main job once on an ephemeral stack; leaves nothing running
	@bin/berth demo

.PHONY: dev
dev: build need/run ## the same stack in the foreground, with its data in .berth/
	@bin/berth dev

.PHONY: build
build: ## bin/berth, the one binary
	@mkdir -p bin
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o bin/berth ./services/berth

.PHONY: test
test: need/test ## every test of every module, on a real PostgreSQL; T=Name P=./path/... narrow
	@[ -n "$(RACE)" ] || echo "no C compiler here: testing without the race detector" >&2
	go test $(RACE) -shuffle=on -count=1 -timeout 20m $(if $(T),-run '$(T)') $(TESTFLAGS) $(P)

.PHONY: test/e2e
test/e2e: need/test ## only the tests that start whole processes and kill them
	go test $(RACE) -shuffle=on -count=1 -timeout 20m $(if $(T),-run '$(T)') $(TESTFLAGS) ./services/e2e/...

.PHONY: test/kubernetes
test/kubernetes: need/test ## discovery against a real kube-apiserver, which is built once (ten minutes on two cores)
	@servers=$$(tools/kubeapi/build.sh) && export BERTH_TEST_KUBEAPI=$$servers && \
	  go test -tags kubernetes -count=1 -timeout 15m $(if $(T),-run '$(T)') $(TESTFLAGS) ./services/e2e/kubernetes

.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME (10s)
	@grep -rlE '^func Fuzz' --include='*_test.go' migrations pkg rpc services tools | sort | while read -r file; do \
	  grep -oE '^func Fuzz[A-Za-z0-9_]*' "$$file" | cut -c6- | while read -r target; do \
	    go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "./$$(dirname "$$file")"; \
	  done; \
	done

##@ The gate
.PHONY: check
check: generate/check lint arch build/alone sqlcheck k8s-check test ## all that CI runs, in order

.PHONY: tools
tools: ## build the pinned tools into .bin (once for each state of tools/pinned)
	@tools/pinned/build.sh

.PHONY: generate
generate: tools ## Go code from the protos, with the pinned plugins
	@tools/generate.sh

.PHONY: generate/check
generate/check: tools ## fail where generated code or go.mod files differ from what their sources give
	@tools/generate.sh --check

.PHONY: lint
lint: ## golangci-lint in all modules; go vet and gofmt until `make tools` has run
	@if [ -x .bin/golangci-lint ]; then \
	  echo golangci-lint run; .bin/golangci-lint run --allow-parallel-runners --timeout 15m $(PACKAGES); \
	else \
	  echo "lint: .bin is not built (make tools): go vet and gofmt only" >&2; \
	  go vet $(PACKAGES); \
	  unformatted=$$(gofmt -l $(MODULES)); [ -z "$$unformatted" ] || { echo "not gofmt'd:" $$unformatted >&2; exit 1; }; \
	fi

.PHONY: fmt
fmt: ## gofumpt and import groups; gofmt until `make tools` has run
	@if [ -x .bin/golangci-lint ]; then .bin/golangci-lint fmt $(MODULES); else gofmt -w $(MODULES); fi

.PHONY: arch
arch: ## who may import whom, and how long a file may be
	@go run ./tools/archcheck

.PHONY: build/alone
build/alone: ## vet each module without the workspace, which hides missing requirements
	@for module in $(MODULES); do echo "GOWORK=off go -C $${module##*/} vet ./..."; GOWORK=off go -C "$$module" vet ./...; done

.PHONY: sqlcheck
sqlcheck: need/test ## prepare every SQL constant on a migrated database; table owners
	@go run ./tools/sqlcheck

.PHONY: tidy
tidy: ## go mod tidy everywhere, then the workspace
	@for module in $(MODULES) tools/pinned tools/pinned/lint tools/pinned/kustomize tools/kubeapi; do echo "tidy $$module"; GOWORK=off go -C "$$module" mod tidy; done
	go work sync

##@ Benchmarks
.PHONY: bench
bench: bench/gateway bench/heartbeats bench/placements bench/records bench/lookups bench/path bench/fleet ## all of them, one after another

# services/e2e/bench/settings_test.go lists the variables that change their dimensions, BERTH_BENCH_….
.PHONY: bench/gateway bench/heartbeats bench/placements bench/records bench/lookups bench/path bench/fleet
bench/gateway: ## a warm GET through the proxy, a bare httputil.ReverseProxy and the backend itself, interleaved
	go test -run '^$$' -bench '^BenchmarkGateway$$' -benchtime 5x ./services/gateway/internal/proxy
bench/heartbeats: build need/bench ## steady heartbeats: the statements alone, then over gRPC beside pgbench's commits
	go test -p 1 -run '^$$' -bench '^BenchmarkHeartbeats$$' -benchtime 3x ./services/scheduler/internal/nodes ./services/e2e/bench
bench/placements: build need/bench ## durable placements: the placer alone, then over Twirp beside pgbench's commits
	go test -p 1 -run '^$$' -bench '^BenchmarkPlacements$$' -benchtime 3x ./services/scheduler/internal/placement ./services/e2e/bench
bench/records: build need/bench ## durable records of sandboxes over gRPC beside pgbench's commits
	go test -run '^$$' -bench '^BenchmarkRecords$$' -benchtime 3x ./services/e2e/bench
bench/lookups: build need/bench ## lookups: sharing statements and each alone, then over gRPC, with picks without a hint
	go test -run '^$$' -bench '^BenchmarkLookups$$' -benchtime 20000x ./services/scheduler/internal/bindings
	go test -run '^$$' -bench '^BenchmarkLookups$$' -benchtime 3x ./services/e2e/bench
bench/fleet: build need/bench ## a minute of 1,000 nodes with 500 sandboxes each, unchanged and with 1 % replaced by each heartbeat
	go test -v -run '^$$' -bench '^BenchmarkFleet$$' -benchtime 1x -timeout 20m ./services/e2e/bench
	BERTH_BENCH_CHURN=$${BERTH_BENCH_CHURN:-5} go test -v -run '^$$' -bench '^BenchmarkFleet$$' -benchtime 1x -timeout 20m ./services/e2e/bench
bench/path: build need/bench ## create, use and delete a sandbox through two gateways
	go test -run '^$$' -bench '^BenchmarkPath$$' -benchtime 50x ./services/e2e/bench

##@ Database for development
.PHONY: db/up db/down db/migrate db/psql db/new
db/up: need/run ## a PostgreSQL of its own in .berth/db, in the background
	@go run ./tools/devdb up
db/down: ## stop it; its data stays
	@go run ./tools/devdb down
db/migrate: build ## apply the migrations to it
	@url=$$(go run ./tools/devdb url); bin/berth migrate up --database-url "$$url"
db/psql: need/psql ## a shell in it
	@url=$$(go run ./tools/devdb url); psql "$$url"
db/new: ## an empty migration with the next number: AREA=shared|sandboxes|gateway|dispatcher|views NAME=verb_noun
	@tools/newmigration.sh '$(AREA)' '$(NAME)'

##@ Containers
.PHONY: image
image: build need/docker ## berth:VERSION and berth-nodeagent:VERSION from bin/berth
	@deployments/compose/run.sh image

.PHONY: deploy-up deploy-ps deploy-logs deploy-down
deploy-up: build need/compose ## the compose stack; secrets are made once in deployments/compose/.env
	@deployments/compose/run.sh up
deploy-ps: ## its containers
	@deployments/compose/run.sh ps
deploy-logs: ## their logs, followed
	@deployments/compose/run.sh logs
deploy-down: ## stop it; the volumes stay (V=1 removes them)
	@deployments/compose/run.sh down

.PHONY: test/containers
test/containers: build need/compose need/test ## compose and testcontainers suites, on a real engine
	@deployments/test.sh

##@ Kubernetes
.PHONY: k8s-render k8s-check k8s-secrets k8s-apply
k8s-render: tools ## the manifests of OVERLAY=production|development|with-cnpg, on standard output
	@.bin/kustomize build 'deployments/k8s/overlays/$(OVERLAY)'

k8s-check: tools build ## render every overlay, and check it strictly against Kubernetes' types and the binary
	@go run ./tools/k8scheck deployments/k8s/overlays/*

k8s-secrets: ## every secret the manifests refer to, with fresh values; deployments/k8s/secrets.sh says more
	@deployments/k8s/secrets.sh $(if $(filter with-cnpg,$(OVERLAY)),--cnpg)

k8s-apply: tools ## OVERLAY to the cluster of kubectl's context: SECRETS=file, the schema, then the services
	@deployments/k8s/apply.sh '$(OVERLAY)'

.PHONY: need/bench need/run need/test need/psql need/docker need/compose
need/run:
	@tools/need.sh postgres? psql bubblewrap
need/test:
	@tools/need.sh postgres psql bubblewrap $(if $(CI),cc)
need/bench:
	@tools/need.sh postgres psql pgbench bubblewrap
need/psql:
	@tools/need.sh psql
need/docker:
	@tools/need.sh docker
need/compose:
	@tools/need.sh docker compose
