package discovery

import (
	"context"
	"fmt"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// listLimit ends a list that hangs; client-go then asks again.
const listLimit = time.Minute

// podResource is asked for metadata only: nothing else of a Pod is looked at.
var podResource = schema.GroupVersionResource{Version: "v1", Resource: "pods"} //nolint:gochecknoglobals // a constant

// client speaks with one API server, about one namespace.
type client struct {
	namespace string
	slices    rest.Interface
	pods      metadata.ResourceInterface
}

// restConfig returns how the API server is reached. Outside a cluster, where no file is named, the error
// is rest.ErrNotInCluster.
func restConfig(kubeconfig string) (*rest.Config, error) {
	var (
		cfg *rest.Config
		err error
	)
	if kubeconfig == "" {
		cfg, err = rest.InClusterConfig()
	} else {
		cfg, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = "berth-scheduler"
	cfg.QPS = -1 // a handful of watches
	return cfg, nil
}

// connect returns a client of cfg. It dials nothing yet.
func connect(cfg *rest.Config, namespace string) (*client, error) {
	scheme := runtime.NewScheme()
	if err := discoveryv1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("know EndpointSlices: %w", err)
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	typed := rest.CopyConfig(cfg)
	typed.APIPath, typed.GroupVersion = "/apis", &discoveryv1.SchemeGroupVersion
	typed.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	slices, err := rest.RESTClientFor(typed)
	if err != nil {
		return nil, fmt.Errorf("make a client for EndpointSlices: %w", err)
	}
	pods, err := metadata.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client for Pods: %w", err)
	}
	return &client{namespace: namespace, slices: slices, pods: pods.Resource(podResource).Namespace(namespace)}, nil
}

// close lets go of connections.
func (c *client) close() {
	if closer, ok := c.slices.(*rest.RESTClient); ok && closer.Client != nil {
		closer.Client.CloseIdleConnections()
	}
}

// endpointSlices lists and watches the slices of one Service. heard is told how each question ended.
func (c *client) endpointSlices(service string, heard func(error)) cache.ListerWatcher {
	ofService := func(options *metav1.ListOptions) {
		options.LabelSelector = labels.Set{discoveryv1.LabelServiceName: service}.String()
		options.FieldSelector = fields.Everything().String()
	}
	list := cache.NewFilteredListWatchFromClient(c.slices, "endpointslices", c.namespace, ofService)
	return reported(list.ListWithContextFunc, list.WatchFuncWithContext, heard)
}

// podsOf lists and watches the Pods that selector selects.
func (c *client) podsOf(selector labels.Selector, heard func(error)) cache.ListerWatcher {
	return reported(
		func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.LabelSelector = selector.String()
			return c.pods.List(ctx, options)
		},
		func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.LabelSelector = selector.String()
			return c.pods.Watch(ctx, options)
		}, heard)
}

// podUID returns which Pod has a name now.
func (c *client) podUID(ctx context.Context, name string) (types.UID, error) {
	pod, err := c.pods.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	return pod.UID, nil
}

func reported(list cache.ListWithContextFunc, watches cache.WatchFuncWithContext, heard func(error)) cache.ListerWatcher {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			ctx, cancel := context.WithTimeout(ctx, listLimit)
			defer cancel()
			found, err := list(ctx, options)
			heard(err)
			return found, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			w, err := watches(ctx, options)
			heard(unexpected(err, options))
			return w, err
		},
	}
}

// unexpected returns err unless it belongs to how one speaks with an API server: it may be too old for lists
// by watch, and it forgets what is long past. client-go then lists.
func unexpected(err error, asked metav1.ListOptions) error {
	byWatch := asked.SendInitialEvents != nil && *asked.SendInitialEvents
	if byWatch && apierrors.IsInvalid(err) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return nil
	}
	return err
}
