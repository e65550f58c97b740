package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
)

// help is what a command of the binary says of itself.
type help struct {
	text      string
	variables []string // that it reads
}

// commands asks the binary, each command once. Its methods may be called at once.
type commands struct {
	ctx   context.Context //nolint:containedctx // of one run of this program
	berth string

	mu   sync.Mutex
	help map[string]help
}

var (
	variable  = regexp.MustCompile(`BERTH_[A-Z0-9_]+`)
	reference = regexp.MustCompile(`\$\(([A-Za-z_][A-Za-z0-9_]*)\)`)
)

// commandWords are those in front of the flags.
func commandWords(args []string) []string {
	i := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "-") })
	if i < 0 {
		return args
	}
	return args[:i]
}

// ask returns the help of the command that args begin with, having parsed all of them: a flag that the
// command does not know, or a value that does not parse, is an error.
func (c *commands) ask(args []string) (help, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := strings.Join(args, "\x00")
	if known, ok := c.help[key]; ok {
		return known, nil
	}
	text, err := output(c.ctx, c.berth, append(slices.Clone(args), "--help")...)
	if err != nil {
		return help{}, err
	}
	h := help{text: string(text), variables: variable.FindAllString(string(text), -1)}
	c.help[key] = h
	return h, nil
}

// checkCommand says what of a container that runs the binary the binary would not understand.
func (c *commands) checkCommand(w workload, container corev1.Container) []string {
	at := fmt.Sprintf("%v, container %s", w.object, container.Name)
	if len(container.Command) > 0 {
		return nil // another program of the image
	}
	var findings []string
	values := map[string]bool{}
	for _, e := range container.Env {
		values[e.Name] = true
	}
	args := make([]string, len(container.Args))
	for i, arg := range container.Args {
		for _, found := range reference.FindAllStringSubmatch(arg, -1) {
			if !values[found[1]] {
				findings = append(findings, fmt.Sprintf("%s: %s: no variable %s", at, arg, found[1]))
			}
		}
		args[i] = reference.ReplaceAllString(arg, "10.0.0.1")
	}
	h, err := c.ask(args)
	if err != nil {
		return append(findings, fmt.Sprintf("%s: %v", at, err))
	}
	if len(commandWords(args)) == 0 || !strings.Contains(h.text, "berth "+strings.Join(commandWords(args), " ")) {
		findings = append(findings, fmt.Sprintf("%s: %q is no command", at, args))
	}
	for _, e := range container.Env {
		if strings.HasPrefix(e.Name, "BERTH_") && !slices.Contains(h.variables, e.Name) {
			findings = append(findings, fmt.Sprintf("%s: berth %s reads no %s", at, strings.Join(commandWords(args), " "), e.Name))
		}
	}
	return findings
}
