package cli

import (
	"slices"
	"strings"
)

// singleDashFlags are those that AgentENV's scheduler and gateway take with one dash, as Go's flag package
// does. To pflag "-config" is five short flags.
var singleDashFlags = []string{"config", "query-only"}

// doubleDashes returns args with a second dash before AgentENV's flags of a service: what starts AgentENV's
// services starts these.
func doubleDashes(args []string) []string {
	if len(args) < 2 || !slices.Contains([]string{"scheduler", "gateway"}, args[0]) || args[1] != "serve" {
		return args
	}
	args = slices.Clone(args)
	for i, arg := range args[2:] {
		if arg == "--" {
			break
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "-"), "=")
		if strings.HasPrefix(arg, "-") && slices.Contains(singleDashFlags, name) {
			args[2+i] = "-" + arg
		}
	}
	return args
}
