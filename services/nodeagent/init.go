package nodeagent

import (
	"berth/services/nodeagent/internal/builtin"
	"berth/services/nodeagent/internal/isolation"
)

// MaybeInit does the work of a process inside a sandbox, if this process was started as one, and reports whether it was:
// the init of a sandbox and its built-in programs are the berth binary again. It has to be the first thing main does, and
// when it returns true main returns.
func MaybeInit() bool { return isolation.MaybeInit(builtin.Run) }
