package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/json"
	sigsyaml "sigs.k8s.io/yaml"
)

// object is one document: what it is, and a pointer to its type of Kubernetes.
type object struct {
	kind, namespace, name string
	labels                map[string]string
	value                 metav1.Object
}

func (o object) String() string {
	if o.namespace == "" {
		return o.kind + " " + o.name
	}
	return o.kind + " " + o.namespace + "/" + o.name
}

// kinds are those that deployments/k8s uses, by apiVersion and kind. A document of another fails: it
// would go unchecked.
var kinds = map[string]reflect.Type{
	"v1 Namespace":      reflect.TypeFor[corev1.Namespace](),
	"v1 Secret":         reflect.TypeFor[corev1.Secret](),
	"v1 ConfigMap":      reflect.TypeFor[corev1.ConfigMap](),
	"v1 Service":        reflect.TypeFor[corev1.Service](),
	"v1 ServiceAccount": reflect.TypeFor[corev1.ServiceAccount](),

	"apps/v1 Deployment":  reflect.TypeFor[appsv1.Deployment](),
	"apps/v1 DaemonSet":   reflect.TypeFor[appsv1.DaemonSet](),
	"apps/v1 StatefulSet": reflect.TypeFor[appsv1.StatefulSet](),
	"batch/v1 Job":        reflect.TypeFor[batchv1.Job](),

	"policy/v1 PodDisruptionBudget":            reflect.TypeFor[policyv1.PodDisruptionBudget](),
	"networking.k8s.io/v1 NetworkPolicy":       reflect.TypeFor[networkingv1.NetworkPolicy](),
	"networking.k8s.io/v1 Ingress":             reflect.TypeFor[networkingv1.Ingress](),
	"rbac.authorization.k8s.io/v1 Role":        reflect.TypeFor[rbacv1.Role](),
	"rbac.authorization.k8s.io/v1 RoleBinding": reflect.TypeFor[rbacv1.RoleBinding](),
	"postgresql.cnpg.io/v1 Cluster":            reflect.TypeFor[cluster](),
	"monitoring.coreos.com/v1 PodMonitor":      reflect.TypeFor[podMonitor](),
}

// clusterWide are kinds without a namespace.
var clusterWide = map[string]bool{"Namespace": true}

// decode reads a stream of YAML documents, each strictly: a field that its kind does not have, or has
// twice, is a finding, and so is an unknown kind or an object that is there twice.
func decode(text []byte) (objects []object, findings []string) {
	reader := yaml.NewYAMLReader(newReader(text))
	seen := map[string]bool{}
	for number := 1; ; number++ {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects, findings
		}
		if err != nil {
			return objects, append(findings, fmt.Sprintf("document %d: %v", number, err))
		}
		if len(bytes.TrimSpace(document)) == 0 || bytes.Equal(bytes.TrimSpace(document), []byte("---")) {
			continue
		}
		o, wrong := decodeOne(document)
		for _, w := range wrong {
			findings = append(findings, fmt.Sprintf("document %d: %s", number, w))
		}
		if o.value == nil {
			continue
		}
		if o.namespace == "" && !clusterWide[o.kind] {
			findings = append(findings, fmt.Sprintf("%v: no namespace: it would land in whatever namespace the context has", o))
		}
		// Secrets come from a script that is run in two forms.
		if seen[o.String()] && o.kind != "Secret" {
			findings = append(findings, fmt.Sprintf("%v: there twice", o))
		}
		seen[o.String()] = true
		objects = append(objects, o)
	}
}

func decodeOne(document []byte) (object, []string) {
	asJSON, err := sigsyaml.YAMLToJSONStrict(document)
	if err != nil {
		return object{}, []string{err.Error()}
	}
	var head metav1.TypeMeta
	if err := json.UnmarshalCaseSensitivePreserveInts(asJSON, &head); err != nil {
		return object{}, []string{err.Error()}
	}
	typ, known := kinds[head.APIVersion+" "+head.Kind]
	if !known {
		return object{}, []string{fmt.Sprintf("k8scheck knows no %s %s: add it to its kinds", head.APIVersion, head.Kind)}
	}
	value := reflect.New(typ).Interface()
	var findings []string
	strict, err := json.UnmarshalStrict(asJSON, value)
	if err != nil {
		return object{}, []string{fmt.Sprintf("%s: %v", head.Kind, err)}
	}
	meta, ok := value.(metav1.Object)
	if !ok {
		return object{}, []string{fmt.Sprintf("%s has no metadata", head.Kind)}
	}
	o := object{head.Kind, meta.GetNamespace(), meta.GetName(), meta.GetLabels(), meta}
	for _, s := range strict {
		findings = append(findings, fmt.Sprintf("%v: %v", o, s))
	}
	return o, findings
}

// The kinds of two operators, as far as they are used here: their modules would weigh more than this one.

type cluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Instances         int `json:"instances"`
		MinSyncReplicas   int `json:"minSyncReplicas"`
		MaxSyncReplicas   int `json:"maxSyncReplicas"`
		InheritedMetadata struct {
			Labels map[string]string `json:"labels"`
		} `json:"inheritedMetadata"`
		Storage struct {
			Size string `json:"size"`
		} `json:"storage"`
		Affinity struct {
			TopologyKey         string `json:"topologyKey"`
			PodAntiAffinityType string `json:"podAntiAffinityType"`
		} `json:"affinity"`
		Resources  corev1.ResourceRequirements `json:"resources"`
		PostgreSQL struct {
			Parameters map[string]string `json:"parameters"`
		} `json:"postgresql"`
		Bootstrap struct {
			InitDB struct {
				Database string                      `json:"database"`
				Owner    string                      `json:"owner"`
				Secret   corev1.LocalObjectReference `json:"secret"`
			} `json:"initdb"`
		} `json:"bootstrap"`
		Managed struct {
			Roles []struct {
				Name           string                      `json:"name"`
				Ensure         string                      `json:"ensure"`
				Login          bool                        `json:"login"`
				CreateRole     bool                        `json:"createrole"`
				PasswordSecret corev1.LocalObjectReference `json:"passwordSecret"`
			} `json:"roles"`
		} `json:"managed"`
	} `json:"spec"`
}

type podMonitor struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Selector  metav1.LabelSelector `json:"selector"`
		Endpoints []struct {
			Port     string `json:"port"`
			Path     string `json:"path"`
			Interval string `json:"interval"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}
