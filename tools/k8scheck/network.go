package main

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// strangers are namespaces that other people make; nothing is known of their Pods.
var strangers = []labels.Set{
	{corev1.LabelMetadataName: "kube-system"},
	{corev1.LabelMetadataName: "cnpg-system"},
	{"berth/scrapes": "true"},
	{"berth/queries": "true"},
}

func (c *checker) matches(selector *metav1.LabelSelector, set labels.Set) bool {
	s, err := metav1.LabelSelectorAsSelector(selector)
	return err == nil && s.Matches(set)
}

// selected returns the Pods of a namespace that selector matches.
func (c *checker) selected(namespace string, selector *metav1.LabelSelector) []pods {
	var out []pods
	for _, p := range c.pods {
		if p.namespace == namespace && c.matches(selector, p.labels) {
			out = append(out, p)
		}
	}
	return out
}

func (c *checker) checkNetwork() {
	for _, o := range c.objects {
		switch v := o.value.(type) {
		case *corev1.Service:
			c.checkService(o, v)
		case *policyv1.PodDisruptionBudget:
			if len(c.selected(o.namespace, v.Spec.Selector)) != 1 {
				c.wrong("%v: wants exactly one workload", o)
			}
		case *networkingv1.Ingress:
			c.checkIngress(o, v)
		case *networkingv1.NetworkPolicy:
			c.checkPolicy(o, v)
		case *podMonitor:
			found := c.selected(o.namespace, &v.Spec.Selector)
			if len(found) == 0 {
				c.wrong("%v: selects nothing", o)
			}
			for _, e := range v.Spec.Endpoints {
				c.checkPort(o, found, intstr.FromString(e.Port))
			}
		}
	}
	c.checkIsolated()
}

// checkPort says which of targets lacks a port.
func (c *checker) checkPort(o object, targets []pods, port intstr.IntOrString) {
	for _, p := range targets {
		_, named := p.ports[port.StrVal]
		numbered := port.Type == intstr.Int && slices.Contains(values(p.ports), port.IntVal)
		if !named && !numbered {
			c.wrong("%v: %v has no port %s", o, p.of, port.String())
		}
	}
}

func values(ports map[string]int32) []int32 {
	out := make([]int32, 0, len(ports))
	for _, p := range ports {
		out = append(out, p)
	}
	return out
}

func (c *checker) checkService(o object, s *corev1.Service) {
	found := c.selected(o.namespace, &metav1.LabelSelector{MatchLabels: s.Spec.Selector})
	if len(s.Spec.Selector) == 0 || len(found) != 1 {
		c.wrong("%v: selects %d workloads, 1 is wanted", o, len(found))
	}
	for _, p := range s.Spec.Ports {
		c.checkPort(o, found, p.TargetPort)
		// Behind no address of its own nothing translates ports.
		if target, ok := found0(found).ports[p.TargetPort.StrVal]; ok && s.Spec.ClusterIP == corev1.ClusterIPNone && target != p.Port {
			c.wrong("%v: is headless and says %d for port %d", o, p.Port, target)
		}
	}
}

func found0(found []pods) pods {
	if len(found) == 0 {
		return pods{}
	}
	return found[0]
}

func (c *checker) checkIngress(o object, ingress *networkingv1.Ingress) {
	for _, rule := range ingress.Spec.Rules {
		if rule.HTTP == nil {
			c.wrong("%v: host %s leads nowhere", o, rule.Host)
			continue
		}
		covered := slices.ContainsFunc(ingress.Spec.TLS, func(t networkingv1.IngressTLS) bool { return slices.Contains(t.Hosts, rule.Host) })
		if !covered {
			c.wrong("%v: no certificate for %s", o, rule.Host)
		}
		for _, path := range rule.HTTP.Paths {
			to := path.Backend.Service
			if to == nil {
				c.wrong("%v: host %s leads to no service", o, rule.Host)
				continue
			}
			if !c.serves(o.namespace, to.Name, func(p corev1.ServicePort) bool { return p.Name == to.Port.Name || p.Port == to.Port.Number }) {
				c.wrong("%v: no service %s with port %s", o, to.Name, to.Port.Name)
			}
		}
	}
}

func (c *checker) checkPolicy(o object, p *networkingv1.NetworkPolicy) {
	subjects := c.selected(o.namespace, &p.Spec.PodSelector)
	if len(subjects) == 0 {
		c.wrong("%v: concerns nobody", o)
	}
	for _, e := range p.Spec.PodSelector.MatchExpressions {
		for _, value := range e.Values {
			alone := &metav1.LabelSelector{MatchLabels: map[string]string{e.Key: value}}
			if e.Operator == metav1.LabelSelectorOpIn && len(c.selected(o.namespace, alone)) == 0 {
				c.wrong("%v: no Pod has %s=%s", o, e.Key, value)
			}
		}
	}
	for _, rule := range p.Spec.Ingress {
		for _, peer := range rule.From {
			c.checkPeer(o, peer)
		}
		for _, port := range rule.Ports {
			if port.Port != nil {
				c.checkPort(o, subjects, *port.Port)
			}
		}
	}
	for _, rule := range p.Spec.Egress {
		var targets []pods
		for _, peer := range rule.To {
			targets = append(targets, c.checkPeer(o, peer)...)
		}
		for _, port := range rule.Ports {
			if port.Port != nil {
				c.checkPort(o, targets, *port.Port)
			}
		}
	}
}

// checkPeer returns the Pods that a rule of o names; none where they are strangers'.
func (c *checker) checkPeer(o object, peer networkingv1.NetworkPolicyPeer) []pods {
	if peer.IPBlock != nil {
		return nil
	}
	if peer.NamespaceSelector != nil && slices.ContainsFunc(strangers, func(s labels.Set) bool { return c.matches(peer.NamespaceSelector, s) }) {
		return nil
	}
	selector := peer.PodSelector
	if selector == nil {
		selector = &metav1.LabelSelector{}
	}
	var found []pods
	for _, n := range c.objects {
		if n.kind != "Namespace" {
			continue
		}
		set := labels.Merge(n.labels, labels.Set{corev1.LabelMetadataName: n.name})
		if peer.NamespaceSelector == nil && n.name == o.namespace || peer.NamespaceSelector != nil && c.matches(peer.NamespaceSelector, set) {
			found = append(found, c.selected(n.name, selector)...)
		}
	}
	if len(found) == 0 {
		c.wrong("%v: a rule names Pods that nobody makes", o)
	}
	return found
}

// checkIsolated wants a policy in each namespace that denies all that no other policy allows.
func (c *checker) checkIsolated() {
	for _, n := range c.objects {
		if n.kind != "Namespace" {
			continue
		}
		denies := slices.ContainsFunc(c.objects, func(o object) bool {
			p, ok := o.value.(*networkingv1.NetworkPolicy)
			return ok && o.namespace == n.name && len(p.Spec.PodSelector.MatchLabels) == 0 && len(p.Spec.PodSelector.MatchExpressions) == 0 &&
				len(p.Spec.Ingress) == 0 && len(p.Spec.Egress) == 0 && len(p.Spec.PolicyTypes) == 2
		})
		if !denies {
			c.wrong("namespace %s: no policy denies what is not allowed", n.name)
		}
	}
}
