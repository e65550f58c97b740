package bench

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// The dimensions of a benchmark are variables, so that `make bench/… BERTH_BENCH_NODES=1000` changes one:
//
//	BERTH_BENCH_SCHEDULERS  scheduler processes (1)
//	BERTH_BENCH_NODES       simulated nodes (100; of the fleet 1000)
//	BERTH_BENCH_CALLERS     callers at once, a comma-separated list (64,256)
//	BERTH_BENCH_ROSTER      sandboxes of each node of the fleet (500)
//	BERTH_BENCH_CHURN       how many of them each heartbeat of the fleet replaces (0)
//	BERTH_BENCH_SECONDS     how long the fleet is measured (60)
//	BERTH_BENCH_PROFILES    folder for CPU profiles of the fleet's schedulers; empty: none

// dimension is the whole number that the variable name holds, or fallback.
func dimension(b *testing.B, name string, fallback int) int {
	b.Helper()
	return dimensions(b, name, strconv.Itoa(fallback))[0]
}

// dimensions are the whole numbers in the variable name, or in fallback: at least one.
func dimensions(b *testing.B, name, fallback string) []int {
	b.Helper()
	text := os.Getenv(name)
	if text == "" {
		text = fallback
	}
	var all []int
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || n < 0 {
			b.Fatalf("%s=%s: want whole numbers, separated by commas", name, text)
		}
		all = append(all, n)
	}
	return all
}
