package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
)

// An engine's profile says of some rules for which capabilities and machines they are. Runtimes of
// Kubernetes read profiles as the OCI writes them, without such conditions, and take every rule for
// unconditional; so the conditions are settled here, for the one Pod that the profile is for.

// nodeCapabilities are those of the node agent's container that profiles ask for.
var nodeCapabilities = []string{"CAP_SYS_ADMIN"}

// machines are those that the images are built for, as profiles name them.
var machines = []string{"amd64", "x32", "x86", "arm64", "arm"}

type condition struct {
	Caps      []string `json:"caps"`
	Arches    []string `json:"arches"`
	MinKernel string   `json:"minKernel"` // all kernels that Kubernetes runs on are newer
}

type enginesRule struct {
	Names    []string        `json:"names"`
	Action   string          `json:"action"`
	ErrnoRet *uint           `json:"errnoRet"`
	Args     json.RawMessage `json:"args"`
	Comment  string          `json:"comment"`
	Includes condition       `json:"includes"`
	Excludes condition       `json:"excludes"`
}

type ociRule struct {
	Names    []string        `json:"names"`
	Action   string          `json:"action"`
	ErrnoRet *uint           `json:"errnoRet,omitempty"`
	Args     json.RawMessage `json:"args,omitempty"`
}

// applies reports whether a rule holds in the node agent's container.
func (r enginesRule) applies() bool {
	has := func(capability string) bool { return slices.Contains(nodeCapabilities, capability) }
	runs := func(machine string) bool { return slices.Contains(machines, machine) }
	switch {
	case len(r.Includes.Caps) > 0 && !slices.ContainsFunc(r.Includes.Caps, has),
		len(r.Includes.Arches) > 0 && !slices.ContainsFunc(r.Includes.Arches, runs),
		slices.ContainsFunc(r.Excludes.Caps, has),
		// An exception of one machine is none of the others'.
		len(r.Excludes.Arches) > 0 && !slices.ContainsFunc(machines, func(m string) bool { return !slices.Contains(r.Excludes.Arches, m) }):
		return false
	}
	return true
}

// clusterProfile returns an engine's profile as the OCI writes it.
func clusterProfile(engines []byte) ([]byte, error) {
	var from struct {
		DefaultAction   string          `json:"defaultAction"`
		DefaultErrnoRet *uint           `json:"defaultErrnoRet"`
		ArchMap         json.RawMessage `json:"archMap"`
		Syscalls        []enginesRule   `json:"syscalls"`
	}
	decoder := json.NewDecoder(bytes.NewReader(engines))
	decoder.DisallowUnknownFields() // a condition that is not understood must not be dropped
	if err := decoder.Decode(&from); err != nil {
		return nil, fmt.Errorf("read the engine's profile: %w", err)
	}
	to := struct {
		DefaultAction   string    `json:"defaultAction"`
		DefaultErrnoRet *uint     `json:"defaultErrnoRet,omitempty"`
		Architectures   []string  `json:"architectures"`
		Syscalls        []ociRule `json:"syscalls"`
	}{
		from.DefaultAction, from.DefaultErrnoRet,
		[]string{"SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32", "SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"},
		nil,
	}
	for _, r := range from.Syscalls {
		if r.applies() {
			to.Syscalls = append(to.Syscalls, ociRule{r.Names, r.Action, r.ErrnoRet, r.Args})
		}
	}
	var out bytes.Buffer
	// A rule a line, so that a change is seen in a diff.
	fmt.Fprintf(&out, "{\n  \"defaultAction\": %q,\n", to.DefaultAction)
	if to.DefaultErrnoRet != nil {
		fmt.Fprintf(&out, "  \"defaultErrnoRet\": %d,\n", *to.DefaultErrnoRet)
	}
	arches, err := json.Marshal(to.Architectures)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(&out, "  \"architectures\": %s,\n  \"syscalls\": [\n", arches)
	for i, rule := range to.Syscalls {
		line, err := json.Marshal(rule)
		if err != nil {
			return nil, err
		}
		comma := ","
		if i == len(to.Syscalls)-1 {
			comma = ""
		}
		fmt.Fprintf(&out, "    %s%s\n", line, comma)
	}
	out.WriteString("  ]\n}\n")
	return out.Bytes(), nil
}
