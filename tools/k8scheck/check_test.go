package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestMain(m *testing.M) {
	// Everything is named from the root of the checkout, as in the Makefile.
	if err := os.Chdir(filepath.Join("..", "..")); err != nil {
		panic(err)
	}
	code := m.Run()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir) // a temporary folder; the system empties it otherwise
	}
	os.Exit(code)
}

// built is the binary that the images hold, made once.
var built struct {
	once sync.Once
	dir  string
	err  error
}

func berth(t *testing.T) string {
	t.Helper()
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "k8scheck-"); built.err != nil { //nolint:usetesting // it outlives this test
			return
		}
		out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "go", "build", "-o", filepath.Join(built.dir, "berth"), "./services/berth").CombinedOutput()
		if err != nil {
			built.err = fmt.Errorf("build berth: %w: %s", err, out)
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return filepath.Join(built.dir, "berth")
}

// kustomize returns the program that renders. Without `make tools` there may be none, and then t is
// skipped; in CI it fails.
func kustomize(t *testing.T) string {
	t.Helper()
	if _, err := os.Stat(".bin/kustomize"); err != nil {
		if os.Getenv("CI") == "" {
			t.Skip("no .bin/kustomize: make tools")
		}
		t.Fatal(err)
	}
	return ".bin/kustomize"
}

func rendered(t *testing.T, overlay string) string {
	t.Helper()
	text, err := output(t.Context(), kustomize(t), "build", filepath.Join("deployments/k8s/overlays", overlay))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func printedSecrets(t *testing.T) []object {
	t.Helper()
	var all []object
	for _, args := range [][]string{nil, {"--cnpg"}} {
		text, err := output(t.Context(), "deployments/k8s/secrets.sh", args...)
		if err != nil {
			t.Fatal(err)
		}
		secrets, wrong := decode(text)
		if len(wrong) > 0 {
			t.Fatalf("secrets.sh prints %v", wrong)
		}
		all = append(all, secrets...)
	}
	return all
}

func TestEveryOverlayHoldsTogether(t *testing.T) {
	t.Parallel()
	overlays, err := filepath.Glob("deployments/k8s/overlays/*")
	if err != nil || len(overlays) < 3 {
		t.Fatalf("overlays: %v, %v, want three or more", overlays, err)
	}
	findings, documents, err := run(t.Context(), request{kustomize(t), berth(t), "deployments/k8s/secrets.sh", overlays})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		t.Error(f)
	}
	if documents < 60 {
		t.Errorf("%d documents in %d overlays, want all of them", documents, len(overlays))
	}
}

// TestAMistakeIsFound changes one thing in what the overlays render; each has to be found.
func TestAMistakeIsFound(t *testing.T) {
	t.Parallel()
	production, cnpg := rendered(t, "production"), rendered(t, "with-cnpg")
	secrets := printedSecrets(t)
	asked := &commands{ctx: context.WithoutCancel(t.Context()), berth: berth(t), help: map[string]help{}}
	tests := map[string]struct {
		from         string // "": production
		before, then string
		want         string
	}{
		"a field that is not there":                  {before: "minReadySeconds: 5", then: "minReadySecond: 5", want: `unknown field "spec.minReadySecond"`},
		"a field in another case":                    {before: "minReadySeconds: 5", then: "minreadyseconds: 5", want: `unknown field "spec.minreadyseconds"`},
		"a field that is there twice":                {before: "  minReadySeconds: 5\n", then: "  minReadySeconds: 5\n  minReadySeconds: 6\n", want: `key "minReadySeconds" already set`},
		"a value of another type":                    {before: "replicas: 3", then: "replicas: three", want: "Deployment"},
		"a kind nobody checks":                       {before: "kind: PodDisruptionBudget", then: "kind: PodDisruptionBudgets", want: "knows no policy/v1 PodDisruptionBudgets"},
		"no namespace":                               {before: "  name: berth-gateway\n  namespace: berth\nspec:\n  maxUnavailable", then: "  name: berth-gateway\nspec:\n  maxUnavailable", want: "no namespace"},
		"an undeclared namespace":                    {before: "  name: dns\n  namespace: berth\n", then: "  name: dns\n  namespace: elsewhere\n", want: "its namespace is not declared"},
		"a secret's key":                             {before: "key: scheduler-url", then: "key: schedulers-url", want: "has no key schedulers-url"},
		"a secret's name":                            {before: "key: api-key\n              name: berth-gateway", then: "key: api-key\n              name: berth-gateways", want: "no secret berth-gateways"},
		"a key of the settings":                      {before: "key: domains", then: "key: domain", want: "has no key domain"},
		"a variable the binary does not read":        {before: "name: BERTH_CLUSTER_SECRET", then: "name: BERTH_CLUSTER_SECRETS", want: "gateway serve reads no BERTH_CLUSTER_SECRETS"},
		"a flag the binary does not have":            {before: "--stream-grace=60s", then: "--streams-grace=60s", want: "unknown flag: --streams-grace"},
		"a flag's value":                             {before: "--stream-grace=60s", then: "--stream-grace=60", want: "60"},
		"a command the binary does not have":         {before: "- nodeagent\n        - serve", then: "- nodeagent\n        - run", want: "nodeagent run"},
		"a variable in an argument":                  {before: "$(POD_NAME)", then: "$(POD)", want: "no variable POD"},
		"a probe's port":                             {before: "path: /readyz\n            port: ops", then: "path: /readyz\n            port: opps", want: `readiness probe asks port "opps"`},
		"a probe's path":                             {before: "path: /readyz", then: "path: /ready", want: "asks /ready;"},
		"liveness that depends on the database":      {before: "livenessProbe:\n          failureThreshold: 3\n          httpGet:\n            path: /healthz", then: "livenessProbe:\n          failureThreshold: 3\n          httpGet:\n            path: /readyz", want: "would end every replica"},
		"a Service's selector":                       {before: "  selector:\n    app.kubernetes.io/component: gateway", then: "  selector:\n    app.kubernetes.io/component: gateways", want: "selects 0 workloads"},
		"a Service's target":                         {before: "targetPort: twirp", then: "targetPort: twirps", want: "has no port twirps"},
		"a headless Service's port":                  {before: "port: 9091", then: "port: 9191", want: "headless and says 9191 for port 9091"},
		"an address of a Service":                    {before: "http://berth-scheduler.berth.svc:9091", then: "http://berth-schedulers.berth.svc:9091", want: "no Service berth/berth-schedulers with port 9091"},
		"where nodes are discovered":                 {before: "value: berth-node\n", then: "value: berth-nodes\n", want: "discovers nodes by Service berth-nodes/berth-nodes"},
		"a budget of nobody":                         {before: "      app.kubernetes.io/component: gateway\n      app.kubernetes.io/name: berth\n  unhealthyPodEvictionPolicy", then: "      app.kubernetes.io/component: gateway\n      app.kubernetes.io/name: berths\n  unhealthyPodEvictionPolicy", want: "PodDisruptionBudget berth/berth-gateway: wants exactly one workload"},
		"a policy of nobody":                         {before: "- migrate\n      - scheduler", then: "- migrates\n      - scheduler", want: "no Pod has app.kubernetes.io/component=migrates"},
		"a policy that lets nobody in":               {before: "          kubernetes.io/metadata.name: berth-nodes", then: "          kubernetes.io/metadata.name: berth-node", want: "names Pods that nobody makes"},
		"a policy's port":                            {before: "    - port: twirp\n", then: "    - port: twirps\n", want: "has no port twirps"},
		"a namespace that is open":                   {before: "  name: default-deny\n  namespace: berth\nspec:\n  podSelector: {}\n  policyTypes:\n  - Ingress\n", then: "  name: default-deny\n  namespace: berth\nspec:\n  podSelector: {}\n  policyTypes:\n", want: "namespace berth: no policy denies"},
		"an Ingress to nowhere":                      {before: "            name: berth-gateway\n            port:", then: "            name: berth-gateways\n            port:", want: "no service berth-gateways"},
		"a host without a certificate":               {before: "  - host: api.sandboxes.example", then: "  - host: www.sandboxes.example", want: "no certificate for www.sandboxes.example"},
		"a role that is not there":                   {before: "  kind: Role\n  name: berth-discovery", then: "  kind: Role\n  name: berth-discover", want: "no Role berth-discover"},
		"an account that is not there":               {before: "serviceAccountName: berth-scheduler", then: "serviceAccountName: berth", want: "no service account berth"},
		"a token that nobody needs":                  {before: "automountServiceAccountToken: false\n      containers", then: "automountServiceAccountToken: true\n      containers", want: "mounts the token"},
		"a volume that is not there":                 {before: "- mountPath: /var/lib/berth\n          name: state", then: "- mountPath: /var/lib/berth\n          name: states", want: "no volume states"},
		"an image without a tag":                     {before: "image: berth:v0.0.0", then: "image: berth", want: "with a tag"},
		"an image that changes":                      {before: "image: berth:v0.0.0", then: "image: berth:latest", want: "with a tag"},
		"a replica that is killed while it drains":   {before: "terminationGracePeriodSeconds: 90", then: "terminationGracePeriodSeconds: 30", want: "is killed after 30s and may take 1m20s"},
		"root in the control plane":                  {before: "runAsNonRoot: true\n        runAsUser: 65532", then: "runAsNonRoot: true\n        runAsUser: 0", want: "must run as somebody who is not root"},
		"a capability in the control plane":          {before: "drop:\n            - ALL", then: "add:\n            - NET_ADMIN\n            drop:\n            - ALL", want: "must drop all capabilities"},
		"a container that is privileged":             {before: "privileged: false", then: "privileged: true", want: "is privileged"},
		"a writable root":                            {before: "readOnlyRootFilesystem: true", then: "readOnlyRootFilesystem: false", want: "its root is writable"},
		"a folder of the machine":                    {before: "      terminationGracePeriodSeconds: 90", then: "      volumes:\n      - name: root\n        hostPath: {path: /}\n      terminationGracePeriodSeconds: 90", want: "a folder of the machine in a restricted namespace"},
		"a limit of memory that is missing":          {before: "limits:\n            memory: 1Gi", then: "limits:\n            cpu: 1", want: "a limit of memory"},
		"a variable that is set twice":               {before: "name: BERTH_NODE_KEY", then: "name: BERTH_SCHEDULER_TOKEN", want: "BERTH_SCHEDULER_TOKEN is set twice"},
		"two sources of a volume":                    {before: "  - emptyDir:\n          sizeLimit: 64Mi\n", then: "  - hostPath: {path: /tmp}\n        emptyDir:\n          sizeLimit: 64Mi\n", want: "2 sources"},
		"an object that is there twice":              {before: "  name: default-deny\n  namespace: berth-nodes\n", then: "  name: default-deny\n  namespace: berth\n", want: "there twice"},
		"a workload that does not select its Pods":   {before: "    matchLabels:\n      app.kubernetes.io/component: node\n", then: "    matchLabels:\n      app.kubernetes.io/component: nodes\n", want: "does not match its own Pods"},
		"a spread over what Pods are not":            {before: "            app.kubernetes.io/component: gateway\n", then: "            app.kubernetes.io/component: gateways\n", want: "spreads over"},
		"a secret of the database operator's":        {from: cnpg, before: "name: berth-db-migrate", then: "name: berth-db-app", want: "no secret berth-db-app"},
		"a field of the operator's that is not used": {from: cnpg, before: "  instances: 3", then: "  instance: 3", want: `unknown field "spec.instance"`},
		"a policy beside the database":               {from: cnpg, before: "          cnpg.io/cluster: berth-db\n  - ports", then: "          cnpg.io/cluster: berth\n  - ports", want: "names Pods that nobody makes"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := tt.from
			if text == "" {
				text = production
			}
			if !strings.Contains(text, tt.before) {
				t.Fatalf("what is rendered has no %q to change", tt.before)
			}
			objects, findings := decode([]byte(strings.Replace(text, tt.before, tt.then, 1)))
			findings = append(findings, check(objects, secrets, asked)...)
			if !strings.Contains(strings.Join(findings, "\n"), tt.want) {
				t.Errorf("findings: %q, want one with %q", findings, tt.want)
			}
		})
	}
}

func TestTheEnginesProfileLosesItsConditionsForTheCluster(t *testing.T) {
	t.Parallel()
	got, err := clusterProfile([]byte(`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "archMap": [], "syscalls": [
		{"names": ["read"], "action": "SCMP_ACT_ALLOW"},
		{"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
		{"names": ["reboot"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_BOOT"]}},
		{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
		{"names": ["s390_x"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}},
		{"names": ["arch_prctl"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64"]}, "args": [{"index": 0}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{
  "defaultAction": "SCMP_ACT_ERRNO",
  "defaultErrnoRet": 1,
  "architectures": ["SCMP_ARCH_X86_64","SCMP_ARCH_X86","SCMP_ARCH_X32","SCMP_ARCH_AARCH64","SCMP_ARCH_ARM"],
  "syscalls": [
    {"names":["read"],"action":"SCMP_ACT_ALLOW"},
    {"names":["mount"],"action":"SCMP_ACT_ALLOW"},
    {"names":["arch_prctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":0}]}
  ]
}
`
	if string(got) != want {
		t.Errorf("clusterProfile =\n%swant\n%s", got, want)
	}
	if _, err := clusterProfile([]byte(`{"syscalls": [{"names": ["a"], "unless": "never"}]}`)); err == nil {
		t.Error("a condition that nobody understands is dropped in silence")
	}
}
