// Command berth is all of Berth in one program: the services, the stack for development, and the
// commands of clients and operators. See berth --help.
package main

import (
	"os"

	"berth/services/berth/internal/cli"
	"berth/services/nodeagent"
)

func main() {
	// Inside a sandbox this program is its init, and nothing else of it may run first.
	if nodeagent.MaybeInit() {
		return
	}
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}
