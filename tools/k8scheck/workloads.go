package main

import (
	"bufio"
	"bytes"
	"maps"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

func newReader(text []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(text)) }

// workload is whatever makes Pods.
type workload struct {
	object

	pod      corev1.PodTemplateSpec
	selector *metav1.LabelSelector // nil: its Pods are known by other means
	claims   []string              // names of volumes that it makes
}

// containers returns all of a Pod, those that run first in front.
func (w workload) containers() []corev1.Container {
	return slices.Concat(w.pod.Spec.InitContainers, w.pod.Spec.Containers)
}

// workloads returns what makes Pods. A cluster of an operator makes them too: their labels and ports are
// known, the rest is the operator's.
func workloads(objects []object) []workload {
	var out []workload
	for _, o := range objects {
		switch v := o.value.(type) {
		case *appsv1.Deployment:
			out = append(out, workload{object: o, pod: v.Spec.Template, selector: v.Spec.Selector})
		case *appsv1.DaemonSet:
			out = append(out, workload{object: o, pod: v.Spec.Template, selector: v.Spec.Selector})
		case *appsv1.StatefulSet:
			w := workload{object: o, pod: v.Spec.Template, selector: v.Spec.Selector}
			for _, claim := range v.Spec.VolumeClaimTemplates {
				w.claims = append(w.claims, claim.Name)
			}
			out = append(out, w)
		case *batchv1.Job:
			out = append(out, workload{object: o, pod: v.Spec.Template})
		}
	}
	return out
}

// pods is a group of Pods as selectors see it.
type pods struct {
	namespace string
	labels    labels.Set
	ports     map[string]int32 // of containers, by name
	of        object
}

// postgresPort and statusPort are those of an operator's instances.
const (
	postgresPort = 5432
	statusPort   = 8000
)

func podsOf(objects []object) []pods {
	var out []pods
	for _, w := range workloads(objects) {
		p := pods{namespace: w.namespace, labels: w.pod.Labels, ports: map[string]int32{}, of: w.object}
		for _, c := range w.containers() {
			for _, port := range c.Ports {
				p.ports[port.Name] = port.ContainerPort
			}
		}
		out = append(out, p)
	}
	for _, o := range objects {
		if v, ok := o.value.(*cluster); ok {
			set := labels.Set{"cnpg.io/cluster": v.Name}
			maps.Copy(set, v.Spec.InheritedMetadata.Labels)
			out = append(out, pods{o.namespace, set, map[string]int32{"postgresql": postgresPort, "status": statusPort}, o})
		}
	}
	return out
}
