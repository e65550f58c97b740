// Package bench measures whole processes: real services of bin/berth over a durable PostgreSQL of their own. Its benchmarks
// print rates and medians, and fail only when a request does. make bench/placements and make bench/path run them.
package bench
