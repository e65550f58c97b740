package bindings

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// batchSizes are batch_size{kind} of this package.
type batchSizes struct{ records, lookups prometheus.Observer }

// newBatchSizes has help and buckets of nodes and placement, which share the metric.
func newBatchSizes(reg prometheus.Registerer) batchSizes {
	sizes := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "berth_scheduler_batch_size", Help: "How many requests were served by one statement or transaction.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 8),
	}, []string{"kind"})
	err := reg.Register(sizes)
	if already, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := already.ExistingCollector.(*prometheus.HistogramVec); ok {
			sizes, err = same, nil
		}
	}
	if err != nil {
		panic(err) // a name or label is wrong in this file
	}
	return batchSizes{records: sizes.WithLabelValues("record"), lookups: sizes.WithLabelValues("lookup")}
}
