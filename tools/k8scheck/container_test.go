//go:build containers

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// docker runs the engine's client, and fails the test where it fails.
func docker(t *testing.T, args ...string) string {
	t.Helper()
	client := os.Getenv("BERTH_DOCKER")
	if client == "" {
		client = "docker"
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), startLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, client, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("docker %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// confinement is a security context as the engine's client takes it. profile is the file of a local one.
func confinement(s *corev1.SecurityContext, profile string) []string {
	var args []string
	if *s.ReadOnlyRootFilesystem {
		args = append(args, "--read-only")
	}
	for _, c := range s.Capabilities.Drop {
		args = append(args, "--cap-drop", string(c))
	}
	for _, c := range s.Capabilities.Add {
		args = append(args, "--cap-add", string(c))
	}
	if s.SeccompProfile.Type == corev1.SeccompProfileTypeLocalhost {
		args = append(args, "--security-opt", "seccomp="+profile)
	}
	if s.AppArmorProfile != nil && s.AppArmorProfile.Type == corev1.AppArmorProfileTypeUnconfined {
		args = append(args, "--security-opt", "apparmor=unconfined")
	}
	return append(args, "--user", fmt.Sprint(*s.RunAsUser))
}

// TestANodeMakesSandboxesUnderTheRightsOfItsPod runs both containers of the DaemonSet in an engine: the first
// installs the profile, under which the second creates a sandbox. The image is the one of make image.
func TestANodeMakesSandboxesUnderTheRightsOfItsPod(t *testing.T) {
	t.Parallel()
	objects, wrong := decode([]byte(rendered(t, "production")))
	if len(wrong) > 0 {
		t.Fatal(wrong)
	}
	c := &cell{t: t, objects: objects, secrets: printedSecrets(t)}
	node := c.workload("DaemonSet", "berth-node")
	installs, agent := node.pod.Spec.InitContainers[0], node.pod.Spec.Containers[0]
	found, _ := (&checker{objects: objects}).find("ConfigMap", node.namespace, profileMap(node))
	settings, ok := found.value.(*corev1.ConfigMap)
	if !ok {
		t.Fatal("the profile is in no ConfigMap")
	}
	folder := t.TempDir()
	for name, text := range settings.Data {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	host := t.TempDir() // the kubelet's folder of profiles
	docker(t, append(append([]string{"run", "--rm", "--entrypoint", installs.Command[0], "-v", folder + ":/profile:ro", "-v", host + ":/host"},
		confinement(installs.SecurityContext, "")...), append([]string{nodeImage()}, installs.Command[1:]...)...)...)

	env := c.environment(node, agent)
	env["POD_IP"], env["BERTH_NODEAGENT_SCHEDULER_GRPC"] = "10.0.0.1", "127.0.0.1:1" // nobody: the node works all the same
	args := append([]string{"run", "-d", "--rm", "-p", "127.0.0.1::8000", "-v", "/var/lib/berth", "--tmpfs", "/tmp:size=64m,mode=1777"},
		confinement(agent.SecurityContext, filepath.Join(host, *agent.SecurityContext.SeccompProfile.LocalhostProfile))...)
	for name, value := range env {
		args = append(args, "-e", name+"="+value)
	}
	args = append(args, nodeImage())
	for _, arg := range agent.Args {
		args = append(args, reference.ReplaceAllStringFunc(arg, func(r string) string { return env[r[2:len(r)-1]] }))
	}
	id := docker(t, args...)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the node wrote:\n%s", docker(t, "logs", id))
		}
		docker(t, "stop", "-t", fmt.Sprint(*node.pod.Spec.TerminationGracePeriodSeconds), id)
	})
	address, _, _ := strings.Cut(docker(t, "port", id, "8000/tcp"), "\n")
	deadline := time.NewTimer(startLimit)
	defer deadline.Stop()
	tick := time.NewTicker(askPause)
	defer tick.Stop()
	for {
		status, body := ask(t, http.MethodPost, "http://"+address+"/sandboxes", env["BERTH_NODE_KEY"], `{"templateID": "shell", "timeout": 60}`)
		if status == http.StatusCreated && sandboxID.MatchString(body) {
			return
		}
		select {
		case <-deadline.C:
			t.Fatalf("no sandbox within %v: %d %s", startLimit, status, body)
		case <-tick.C:
		}
	}
}

func nodeImage() string {
	if name := os.Getenv("BERTH_NODE_IMAGE"); name != "" {
		return name
	}
	return "berth-nodeagent:local"
}

// profileMap names the ConfigMap that the first container installs from.
func profileMap(w workload) string {
	for _, v := range w.pod.Spec.Volumes {
		if v.ConfigMap != nil {
			return v.ConfigMap.Name
		}
	}
	return ""
}
