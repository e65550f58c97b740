// Package kubernetes tests discovery against a real kube-apiserver and etcd, with scheduler processes that
// are killed and paused: rows follow EndpointSlices and Pods whatever is cut, compacted or restarted. It is
// behind the build tag kubernetes, for that server takes ten minutes to build; make test/kubernetes runs it.
package kubernetes
