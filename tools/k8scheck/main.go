// Command k8scheck renders the overlays of deployments/k8s and says what is wrong with them, without a
// cluster: fields that Kubernetes does not know, references to what is not there, ports and selectors that
// meet nothing, settings that the binary does not know, Pods that their namespace would refuse.
//
//	k8scheck [--kustomize PROGRAM] [--berth PROGRAM] [--secrets SCRIPT] OVERLAY…
//	k8scheck --seccomp PROFILE
//
// The second form prints the seccomp profile of node agents as container runtimes of Kubernetes read it, made
// of the engine's. Findings go to standard error; the exit code is then 1.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// runLimit bounds each program that is asked.
const runLimit = time.Minute

// enginesProfile is the seccomp profile that the cluster's is made of; checkedProfile is the latter.
const (
	enginesProfile = "deployments/compose/seccomp-node.json"
	checkedProfile = "deployments/k8s/base/seccomp-node.json"
)

func main() {
	kustomize := flag.String("kustomize", ".bin/kustomize", "`program` that renders")
	berth := flag.String("berth", "bin/berth", "`program` that the images hold")
	secrets := flag.String("secrets", "deployments/k8s/secrets.sh", "`script` that prints the secrets")
	seccomp := flag.String("seccomp", "", "print what becomes of this engine's `profile`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	if *seccomp != "" {
		if err := printProfile(*seccomp); err != nil {
			fmt.Fprintln(os.Stderr, "k8scheck:", err)
			os.Exit(2)
		}
		return
	}
	findings, documents, err := run(ctx, request{*kustomize, *berth, *secrets, flag.Args()})
	for _, f := range findings {
		fmt.Fprintln(os.Stderr, f)
	}
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "k8scheck:", err)
		os.Exit(2)
	case len(findings) > 0:
		fmt.Fprintf(os.Stderr, "k8scheck: %d findings in %d documents\n", len(findings), documents)
		os.Exit(1)
	}
	fmt.Printf("k8scheck: %d documents of %d overlays hold together\n", documents, flag.NArg())
}

func printProfile(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	profile, err := clusterProfile(text)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(profile)
	return err
}

// request is what to check, and with what.
type request struct {
	kustomize, berth, secrets string
	overlays                  []string
}

// run returns what is wrong with the overlays, each finding with its overlay in front, and how many
// documents were looked at.
func run(ctx context.Context, r request) (findings []string, documents int, err error) {
	if len(r.overlays) == 0 {
		return nil, 0, errors.New("no overlay: name folders such as deployments/k8s/overlays/production")
	}
	printed, err := output(ctx, r.secrets, "--cnpg")
	if err != nil {
		return nil, 0, err
	}
	// The two forms differ in one secret each.
	plain, err := output(ctx, r.secrets)
	if err != nil {
		return nil, 0, err
	}
	secrets, wrong := decode(append(append(printed, '\n'), plain...))
	findings = append(findings, wrong...)
	commands := &commands{ctx: ctx, berth: r.berth, help: map[string]help{}}
	for _, overlay := range r.overlays {
		rendered, err := output(ctx, r.kustomize, "build", overlay)
		if err != nil {
			return findings, documents, fmt.Errorf("render %s: %w", overlay, err)
		}
		objects, wrong := decode(rendered)
		documents += len(objects)
		for _, f := range append(wrong, check(objects, secrets, commands)...) {
			findings = append(findings, filepath.Base(overlay)+": "+f)
		}
	}
	stale, err := staleProfile()
	if err != nil {
		return findings, documents, err
	}
	return append(findings, stale...), documents, nil
}

// staleProfile compares the cluster's profile with what the engine's would give today.
func staleProfile() ([]string, error) {
	engines, err := os.ReadFile(enginesProfile)
	if err != nil {
		return nil, err
	}
	want, err := clusterProfile(engines)
	if err != nil {
		return nil, err
	}
	got, err := os.ReadFile(checkedProfile)
	if err != nil {
		return nil, err
	}
	if string(got) != string(want) {
		return []string{fmt.Sprintf("%s is not what %s gives: go run ./tools/k8scheck --seccomp %s >%s",
			checkedProfile, enginesProfile, enginesProfile, checkedProfile)}, nil
	}
	return nil, nil
}

// output runs a program and returns what it prints; the error has what it complains of.
func output(ctx context.Context, program string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, args...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil, fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	return out, nil
}
