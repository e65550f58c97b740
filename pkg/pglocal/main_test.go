package pglocal

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain is the server's parent when a test starts this binary again, to kill it.
func TestMain(m *testing.M) {
	if os.Getenv(parentVariable) != "" {
		beParent()
	}
	goleak.VerifyTestMain(m)
}
