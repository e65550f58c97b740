//go:build kubernetes

package kubernetes

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
)

const (
	renderer = "../../../.bin/kustomize"
	overlays = "../../../deployments/k8s/overlays"
)

// resources are the paths' last parts, by kind.
var resources = map[string]string{
	"Namespace": "namespaces", "Secret": "secrets", "ConfigMap": "configmaps", "Service": "services", "ServiceAccount": "serviceaccounts", "Pod": "pods",
	"Deployment": "deployments", "DaemonSet": "daemonsets", "StatefulSet": "statefulsets", "Job": "jobs",
	"PodDisruptionBudget": "poddisruptionbudgets", "NetworkPolicy": "networkpolicies", "Ingress": "ingresses",
	"Role": "roles", "RoleBinding": "rolebindings",
}

// operators are groups that this API server does not have.
var operators = map[string]bool{"postgresql.cnpg.io": true, "monitoring.coreos.com": true}

// manifests returns the documents that an overlay renders.
func manifests(t *testing.T, overlay string) []*unstructured.Unstructured {
	t.Helper()
	text, err := exec.CommandContext(t.Context(), renderer, "build", overlay).Output()
	if err != nil {
		t.Fatalf("render %s: %v (make tools builds %s)", overlay, err, renderer)
	}
	var out []*unstructured.Unstructured
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		object := &unstructured.Unstructured{}
		asJSON, err := yaml.ToJSON(document)
		if err == nil {
			err = object.UnmarshalJSON(asJSON)
		}
		if err != nil {
			t.Fatalf("%v: %s", err, document)
		}
		out = append(out, object)
	}
}

// tryCreate asks the API server to create object without keeping it: decoded strictly, defaulted, validated
// and admitted as it would be.
func (s *apiServer) tryCreate(object *unstructured.Unstructured) (int, string) {
	s.t.Helper()
	kind := object.GroupVersionKind()
	path := "/apis/" + kind.Group + "/" + kind.Version
	if kind.Group == "" {
		path = "/api/" + kind.Version
	}
	if object.GetNamespace() != "" {
		path += "/namespaces/" + object.GetNamespace()
	}
	if resources[kind.Kind] == "" {
		s.t.Fatalf("no path for a %s", kind.Kind)
	}
	text, err := json.Marshal(object)
	if err != nil {
		s.t.Fatal(err)
	}
	status, answer := s.ask(http.MethodPost, path+"/"+resources[kind.Kind]+"?dryRun=All&fieldValidation=Strict", adminToken, text)
	return status, string(answer)
}

// podOf returns a Pod as the controller of a workload would make it; nil: object makes none.
func podOf(t *testing.T, object *unstructured.Unstructured) *unstructured.Unstructured {
	t.Helper()
	template, found, err := unstructured.NestedMap(object.Object, "spec", "template")
	if err != nil || !found {
		return nil
	}
	pod := &unstructured.Unstructured{Object: template}
	pod.SetAPIVersion("v1")
	pod.SetKind("Pod")
	pod.SetName(object.GetName() + "-0")
	pod.SetNamespace(object.GetNamespace())
	claims, _, err := unstructured.NestedSlice(object.Object, "spec", "volumeClaimTemplates")
	if err != nil {
		t.Fatal(err)
	}
	volumes, _, err := unstructured.NestedSlice(pod.Object, "spec", "volumes")
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range claims {
		name, _, err := unstructured.NestedString(claim.(map[string]any), "metadata", "name")
		if err != nil {
			t.Fatal(err)
		}
		volumes = append(volumes, map[string]any{"name": name, "emptyDir": map[string]any{}})
	}
	if err := unstructured.SetNestedSlice(pod.Object, volumes, "spec", "volumes"); err != nil {
		t.Fatal(err)
	}
	return pod
}

func TestARealAPIServerTakesEveryManifestAndEveryPodOfIt(t *testing.T) {
	t.Parallel()
	s := startAPIServer(t)
	folders, err := filepath.Glob(overlays + "/*")
	if err != nil || len(folders) < 3 {
		t.Fatalf("overlays: %v, %v", folders, err)
	}
	for _, object := range manifests(t, folders[0]) {
		if object.GetKind() == "Namespace" { // what a trial needs to exist
			s.must(http.MethodPost, "/api/v1/namespaces", object)
		}
	}
	for _, folder := range folders {
		t.Run(filepath.Base(folder), func(t *testing.T) {
			pods := 0
			for _, object := range manifests(t, folder) {
				if operators[object.GroupVersionKind().Group] || object.GetKind() == "Namespace" {
					continue
				}
				if status, answer := s.tryCreate(object); status != http.StatusCreated {
					t.Errorf("%s %s = %d %s", object.GetKind(), object.GetName(), status, answer)
				}
				pod := podOf(t, object)
				if pod == nil {
					continue
				}
				pods++
				if status, answer := s.tryCreate(pod); status != http.StatusCreated {
					t.Errorf("Pod of %s %s = %d %s", object.GetKind(), object.GetName(), status, answer)
				}
				refusesMore(t, s, pod)
			}
			if pods < 4 {
				t.Errorf("%d workloads, want migration, schedulers, gateways and nodes", pods)
			}
		})
	}
}

// refusesMore is the control: a field that is not there is refused, and in the namespace of the control plane a
// Pod that wants more than it may.
func refusesMore(t *testing.T, s *apiServer, pod *unstructured.Unstructured) {
	t.Helper()
	misspelled := pod.DeepCopy()
	if err := unstructured.SetNestedField(misspelled.Object, true, "spec", "enableServiceLink"); err != nil {
		t.Fatal(err)
	}
	if status, answer := s.tryCreate(misspelled); status != http.StatusBadRequest || !strings.Contains(answer, "enableServiceLink") {
		t.Errorf("a Pod with an unknown field = %d %s, want it refused", status, answer)
	}
	if pod.GetNamespace() != "berth" {
		return
	}
	privileged := pod.DeepCopy()
	if err := unstructured.SetNestedField(privileged.Object, true, "spec", "hostNetwork"); err != nil {
		t.Fatal(err)
	}
	if status, answer := s.tryCreate(privileged); status != http.StatusForbidden || !strings.Contains(answer, "PodSecurity") {
		t.Errorf("a Pod on the machine's network = %d %s, want it forbidden", status, answer)
	}
}
