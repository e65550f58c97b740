package discovery

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// object is what the API server keeps: EndpointSlices, and of Pods their metadata.
type object interface {
	metav1.Object
	DeepCopyObject() object
}

type sliceObject struct{ *discoveryv1.EndpointSlice }

func (s sliceObject) DeepCopyObject() object { return sliceObject{s.DeepCopy()} }

type podObject struct{ *metav1.PartialObjectMetadata }

func (p podObject) DeepCopyObject() object { return podObject{p.DeepCopy()} }

// change is one entry of the log from which watches are served.
type change struct {
	revision       int64
	resource       string
	before, after  object // nil: it was not there
	bookmark, gone bool
}

// apiServer speaks list and watch as Kubernetes does: selectors, resource versions that expire, bookmarks,
// lists by watch. Its doors are HTTP servers of their own, as replicas of an API server are.
type apiServer struct {
	streams bool // lists by watch are known, as of Kubernetes 1.32

	mu        sync.Mutex
	revision  int64
	objects   map[string]map[string]object // resource → name
	log       []change
	compacted int64         // watches cannot begin before it
	turn      chan struct{} // closed at the next change
	asked     map[string]int
}

func newAPIServer(streams bool) *apiServer {
	return &apiServer{
		streams: streams, revision: 100, turn: make(chan struct{}), asked: map[string]int{},
		objects: map[string]map[string]object{"endpointslices": {}, "pods": {}},
	}
}

// put keeps o, and tells watches.
func (s *apiServer) put(resource string, o object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	o = o.DeepCopyObject()
	o.SetResourceVersion(strconv.FormatInt(s.revision, 10))
	before := s.objects[resource][o.GetName()]
	s.objects[resource][o.GetName()] = o
	s.append(change{resource: resource, before: before, after: o})
}

func (s *apiServer) remove(resource, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	before := s.objects[resource][name]
	delete(s.objects[resource], name)
	s.append(change{resource: resource, before: before})
}

func (s *apiServer) putSlice(name string, e *discoveryv1.EndpointSlice) {
	e = e.DeepCopy()
	e.Name, e.Namespace, e.Labels = name, "n", map[string]string{discoveryv1.LabelServiceName: "s"}
	s.put("endpointslices", sliceObject{e})
}

func (s *apiServer) putPod(name string, id types.UID, of map[string]string) {
	s.put("pods", podObject{&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "n", UID: id, Labels: of}}})
}

// append is called with s.mu held.
func (s *apiServer) append(c change) {
	c.revision = s.revision
	s.log = append(s.log, c)
	close(s.turn)
	s.turn = make(chan struct{})
}

// bookmark tells every watch how far it has come.
func (s *apiServer) bookmark() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	s.append(change{bookmark: true})
}

// compact forgets the log. expire also ends every open watch with 410 in its stream.
func (s *apiServer) compact(expire bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	s.log = nil
	s.compacted = s.revision
	if expire {
		s.append(change{gone: true})
	}
}

// questions is how often resource was asked for with verb: list, watch, initial (a list by watch) or get.
func (s *apiServer) questions(resource, verb string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[resource+" "+verb]
}

// door is one way to the API server.
type door struct {
	api    *apiServer
	server *httptest.Server

	mu   sync.Mutex
	fail map[string]int // resource → status
	hang chan struct{}  // not nil: questions about one Pod have no answer before it is closed
}

func (s *apiServer) door(t *testing.T) *door {
	t.Helper()
	d := &door{api: s, fail: map[string]int{}}
	d.server = httptest.NewServer(d)
	t.Cleanup(func() {
		d.drop()
		d.server.Close()
	})
	return d
}

func (d *door) config() (*rest.Config, error) { return &rest.Config{Host: d.server.URL, QPS: -1}, nil }

// drop cuts every connection.
func (d *door) drop() { d.server.CloseClientConnections() }

// refuse answers every question about resources with status from now on, 0: answers again.
func (d *door) refuse(status int, resources ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, resource := range resources {
		d.fail[resource] = status
	}
}

func (d *door) refusal(resource string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fail[resource]
}

// ServeHTTP answers GET of lists, watches and single Pods in namespace n.
func (d *door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, found := strings.CutPrefix(r.URL.Path, "/apis/discovery.k8s.io/v1/namespaces/n/")
	if !found {
		path, found = strings.CutPrefix(r.URL.Path, "/api/v1/namespaces/n/")
	}
	resource, name, single := strings.Cut(path, "/")
	if status := d.refusal(resource); status != 0 {
		answer(w, status, "")
		return
	}
	if resource == "pods" && !strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") {
		answer(w, http.StatusNotAcceptable, "only metadata of Pods is needed")
		return
	}
	selector, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	if !found || err != nil || d.api.objects[resource] == nil {
		answer(w, http.StatusNotFound, "")
		return
	}
	switch {
	case single:
		d.mu.Lock()
		hang := d.hang
		d.mu.Unlock()
		if hang != nil {
			select {
			case <-hang:
			case <-r.Context().Done():
				return
			}
		}
		d.api.get(w, resource, name)
	case r.URL.Query().Get("watch") != "true" && r.URL.Query().Get("watch") != "1":
		d.api.list(w, resource, selector)
	default:
		d.api.watch(w, r, resource, selector)
	}
}

// answer is an error as the API server says it.
func answer(w http.ResponseWriter, status int, message string) {
	reason := map[int]metav1.StatusReason{
		410: metav1.StatusReasonExpired, 404: metav1.StatusReasonNotFound, 422: metav1.StatusReasonInvalid, 403: metav1.StatusReasonForbidden,
	}[status]
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(statusOf(status, reason, message))
}

func statusOf(status int, reason metav1.StatusReason, message string) metav1.Status {
	return metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
		Code: int32(status), Reason: reason, Message: message,
	}
}

func (s *apiServer) get(w http.ResponseWriter, resource, name string) {
	s.mu.Lock()
	o := s.objects[resource][name]
	s.asked[resource+" get"]++
	s.mu.Unlock()
	if o == nil {
		answer(w, http.StatusNotFound, "no such object")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(typed(o))
}

func (s *apiServer) list(w http.ResponseWriter, resource string, selector labels.Selector) {
	s.mu.Lock()
	s.asked[resource+" list"]++
	items := s.selected(resource, selector)
	revision := s.revision
	s.mu.Unlock()
	kind, version := "EndpointSliceList", "discovery.k8s.io/v1"
	if resource == "pods" {
		kind, version = "PartialObjectMetadataList", "meta.k8s.io/v1"
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"kind": kind, "apiVersion": version, "metadata": map[string]string{"resourceVersion": strconv.FormatInt(revision, 10)}, "items": items,
	})
}

// selected is called with s.mu held.
func (s *apiServer) selected(resource string, selector labels.Selector) []any {
	items := []any{}
	for _, name := range slices.Sorted(maps.Keys(s.objects[resource])) {
		if o := s.objects[resource][name]; selector.Matches(labels.Set(o.GetLabels())) {
			items = append(items, typed(o))
		}
	}
	return items
}

// typed is o as it is sent, with its kind.
func typed(o object) any {
	switch o := o.(type) {
	case sliceObject:
		e := o.DeepCopy()
		e.TypeMeta = metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}
		return e
	case podObject:
		p := o.DeepCopy()
		p.TypeMeta = metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1"}
		return p
	}
	panic("an object of no kind")
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, resource string, selector labels.Selector) {
	initial := r.URL.Query().Get("sendInitialEvents") == "true"
	from, _ := strconv.ParseInt(r.URL.Query().Get("resourceVersion"), 10, 64)
	s.mu.Lock()
	verb := "watch"
	if initial {
		verb = "initial"
	}
	s.asked[resource+" "+verb]++
	tooOld := !initial && from != 0 && from < s.compacted
	var first []any
	if initial {
		first, from = s.selected(resource, selector), s.revision
	}
	s.mu.Unlock()
	switch {
	case initial && !s.streams:
		answer(w, http.StatusUnprocessableEntity, "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
		return
	case tooOld:
		answer(w, http.StatusGone, fmt.Sprintf("too old resource version: %d (%d)", from, s.compacted))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	send := func(kind string, o any) {
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o})
	}
	for _, o := range first {
		send("ADDED", o)
	}
	if initial {
		send("BOOKMARK", mark(resource, from, map[string]string{metav1.InitialEventsAnnotationKey: "true"}))
	}
	flush := http.NewResponseController(w)
	for {
		s.mu.Lock()
		turn, log := s.turn, slices.Clone(s.log)
		s.mu.Unlock()
		for _, c := range log {
			if c.revision <= from {
				continue
			}
			from = c.revision
			if c.gone {
				send("ERROR", statusOf(http.StatusGone, metav1.StatusReasonExpired, "too old resource version"))
				return
			}
			c.tell(resource, selector, send)
		}
		if flush.Flush() != nil {
			return
		}
		select {
		case <-turn:
		case <-r.Context().Done():
			return
		}
	}
}

// mark is a bookmark.
func mark(resource string, revision int64, annotations map[string]string) any {
	meta := metav1.ObjectMeta{ResourceVersion: strconv.FormatInt(revision, 10), Annotations: annotations}
	if resource == "pods" {
		return typed(podObject{&metav1.PartialObjectMetadata{ObjectMeta: meta}})
	}
	return typed(sliceObject{&discoveryv1.EndpointSlice{ObjectMeta: meta}})
}

// tell sends c as a watch of selector sees it: an object that is not selected any more is deleted.
func (c change) tell(resource string, selector labels.Selector, send func(kind string, o any)) {
	if c.bookmark {
		send("BOOKMARK", mark(resource, c.revision, nil))
		return
	}
	if c.resource != resource {
		return
	}
	matches := func(o object) bool { return o != nil && selector.Matches(labels.Set(o.GetLabels())) }
	switch was, is := matches(c.before), matches(c.after); {
	case is && was:
		send("MODIFIED", typed(c.after))
	case is:
		send("ADDED", typed(c.after))
	case was:
		last := c.before.DeepCopyObject()
		last.SetResourceVersion(strconv.FormatInt(c.revision, 10))
		send("DELETED", typed(last))
	}
}
