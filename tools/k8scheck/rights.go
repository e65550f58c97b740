package main

import (
	corev1 "k8s.io/api/core/v1"
)

// enforceLabel says which of the Pod security standards a namespace holds its Pods to.
const enforceLabel = "pod-security.kubernetes.io/enforce"

// checkRights holds Pods to the restricted standard where their namespace says so, and everywhere to what
// nothing here needs.
func (c *checker) checkRights(w workload) {
	namespace, _ := c.find("Namespace", "", w.namespace)
	level := namespace.labels[enforceLabel]
	if level == "" {
		c.wrong("%v: its namespace enforces no Pod security standard", w.object)
	}
	spec := w.pod.Spec
	if spec.HostNetwork || spec.HostPID || spec.HostIPC {
		c.wrong("%v: shares a namespace of the machine", w.object)
	}
	for _, container := range w.containers() {
		s := container.SecurityContext
		if s == nil {
			c.wrong("%v, container %s: no security context", w.object, container.Name)
			continue
		}
		if s.Privileged != nil && *s.Privileged {
			c.wrong("%v, container %s: is privileged", w.object, container.Name)
		}
		if s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
			c.wrong("%v, container %s: its root is writable", w.object, container.Name)
		}
		if level == "restricted" {
			c.checkRestricted(w, container)
		}
	}
	for _, v := range spec.Volumes {
		if v.HostPath != nil && level == "restricted" {
			c.wrong("%v, volume %s: a folder of the machine in a restricted namespace", w.object, v.Name)
		}
	}
}

// checkRestricted is the standard "restricted", as far as fields are used here.
func (c *checker) checkRestricted(w workload, container corev1.Container) {
	pod, s := w.pod.Spec.SecurityContext, container.SecurityContext
	if pod == nil {
		pod = &corev1.PodSecurityContext{}
	}
	nonRoot := s.RunAsNonRoot
	if nonRoot == nil {
		nonRoot = pod.RunAsNonRoot
	}
	user := s.RunAsUser
	if user == nil {
		user = pod.RunAsUser
	}
	profile := s.SeccompProfile
	if profile == nil {
		profile = pod.SeccompProfile
	}
	escalates := s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation
	drops := s.Capabilities != nil && len(s.Capabilities.Add) == 0 && len(s.Capabilities.Drop) == 1 && s.Capabilities.Drop[0] == "ALL"
	confined := profile != nil && (profile.Type == corev1.SeccompProfileTypeRuntimeDefault || profile.Type == corev1.SeccompProfileTypeLocalhost)
	for want, met := range map[string]bool{
		"run as somebody who is not root": nonRoot != nil && *nonRoot && (user == nil || *user != 0),
		"not gain rights":                 !escalates,
		"drop all capabilities":           drops,
		"have a seccomp profile":          confined,
	} {
		if !met {
			c.wrong("%v, container %s: must %s in this namespace", w.object, container.Name, want)
		}
	}
}
