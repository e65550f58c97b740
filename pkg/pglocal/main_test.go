package pglocal

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain is the server's parent when a test starts this binary again, to kill it.
func TestMain(m *testing.M) {
	if os.Getenv(parentVariable) != "" { //nolint:forbidigo // how a test speaks to its own process
		beParent()
	}
	goleak.VerifyTestMain(m)
}
