package isolation

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"berth/services/nodeagent/internal/builtin"
)

func TestMain(m *testing.M) {
	if MaybeInit(runBuiltin) { // sandboxes of these tests run this very binary
		os.Exit(0)
	}
	if asOrdinaryUser() {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

func runBuiltin(name string) error {
	if name == hoarder {
		return hoard()
	}
	return builtin.Run(name)
}
