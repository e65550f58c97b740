package main

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// checker looks at one overlay.
type checker struct {
	objects  []object
	secrets  []object
	pods     []pods
	commands *commands
	findings []string
}

func (c *checker) wrong(format string, args ...any) {
	c.findings = append(c.findings, fmt.Sprintf(format, args...))
}

// check returns what is wrong with objects, which secrets belong to. It asks the binary by commands.
func check(objects, secrets []object, commands *commands) []string {
	c := &checker{objects: objects, secrets: secrets, pods: podsOf(objects), commands: commands}
	for _, o := range objects {
		if o.namespace != "" && !c.has("Namespace", "", o.namespace) {
			c.wrong("%v: its namespace is not declared", o)
		}
	}
	for _, w := range workloads(objects) {
		c.checkWorkload(w)
	}
	for _, o := range objects {
		switch v := o.value.(type) {
		case *rbacv1.RoleBinding:
			c.checkBinding(o, v)
		case *cluster:
			c.checkSecret(o, v.Spec.Bootstrap.InitDB.Secret.Name, "password")
			for _, role := range v.Spec.Managed.Roles {
				c.checkSecret(o, role.PasswordSecret.Name, "password")
			}
		}
	}
	c.checkNetwork()
	slices.Sort(c.findings)
	return slices.Compact(c.findings)
}

func (c *checker) find(kind, namespace, name string) (object, bool) {
	i := slices.IndexFunc(c.objects, func(o object) bool { return o.kind == kind && o.namespace == namespace && o.name == name })
	if i < 0 {
		return object{}, false
	}
	return c.objects[i], true
}

func (c *checker) has(kind, namespace, name string) bool {
	_, found := c.find(kind, namespace, name)
	return found
}

// checkSecret says if no secret of that name has the key; "" is any.
func (c *checker) checkSecret(from object, name, key string) {
	for _, s := range c.secrets {
		secret, ok := s.value.(*corev1.Secret)
		if !ok || s.name != name || s.namespace != from.namespace {
			continue
		}
		if _, has := secret.StringData[key]; has || key == "" {
			return
		}
		c.wrong("%v: secret %s has no key %s: it has %v", from, name, key, slices.Sorted(maps.Keys(secret.StringData)))
		return
	}
	c.wrong("%v: no secret %s in namespace %s: secrets.sh does not make it", from, name, from.namespace)
}

func (c *checker) checkConfigMap(from object, name, key string) {
	found, ok := c.find("ConfigMap", from.namespace, name)
	if !ok {
		c.wrong("%v: no ConfigMap %s", from, name)
		return
	}
	config, ok := found.value.(*corev1.ConfigMap)
	if !ok {
		return
	}
	if _, has := config.Data[key]; !has && key != "" {
		c.wrong("%v: ConfigMap %s has no key %s: it has %v", from, name, key, slices.Sorted(maps.Keys(config.Data)))
	}
}

func (c *checker) checkWorkload(w workload) {
	spec := w.pod.Spec
	if w.selector != nil && !c.matches(w.selector, w.pod.Labels) {
		c.wrong("%v: its selector does not match its own Pods", w.object)
	}
	if spec.ServiceAccountName != "" && !c.has("ServiceAccount", w.namespace, spec.ServiceAccountName) {
		c.wrong("%v: no service account %s", w.object, spec.ServiceAccountName)
	}
	// A token in a Pod is a right; who needs one has an account of its own.
	if (spec.AutomountServiceAccountToken == nil || *spec.AutomountServiceAccountToken) && spec.ServiceAccountName == "" {
		c.wrong("%v: mounts the token of the namespace's default account", w.object)
	}
	volumes := map[string]bool{}
	for _, claim := range w.claims {
		volumes[claim] = true
	}
	for _, v := range spec.Volumes {
		volumes[v.Name] = true
		c.checkVolume(w, v)
	}
	for _, container := range w.containers() {
		for _, m := range container.VolumeMounts {
			if !volumes[m.Name] {
				c.wrong("%v, container %s: no volume %s", w.object, container.Name, m.Name)
			}
		}
		c.checkContainer(w, container)
	}
	for _, t := range spec.TopologySpreadConstraints {
		if !c.matches(t.LabelSelector, w.pod.Labels) {
			c.wrong("%v: spreads over %s what its Pods are not", w.object, t.TopologyKey)
		}
	}
	c.checkGrace(w)
	c.checkRights(w)
}

func (c *checker) checkVolume(w workload, v corev1.Volume) {
	sources := 0
	for _, set := range []bool{
		v.ConfigMap != nil, v.Secret != nil, v.EmptyDir != nil, v.HostPath != nil, v.PersistentVolumeClaim != nil, v.Projected != nil,
	} {
		if set {
			sources++
		}
	}
	if sources != 1 {
		c.wrong("%v, volume %s: %d sources, 1 is wanted", w.object, v.Name, sources)
	}
	if v.ConfigMap != nil {
		c.checkConfigMap(w.object, v.ConfigMap.Name, "")
	}
	if v.Secret != nil {
		c.checkSecret(w.object, v.Secret.SecretName, "")
	}
}

// images are those that an overlay may run, without their tags.
var images = []string{"berth", "berth-nodeagent", "postgres"}

func (c *checker) checkContainer(w workload, container corev1.Container) {
	at := fmt.Sprintf("%v, container %s", w.object, container.Name)
	name, tag, tagged := strings.Cut(container.Image[strings.LastIndexByte(container.Image, '/')+1:], ":")
	if !slices.Contains(images, name) || !tagged || tag == "latest" || tag == "" {
		c.wrong("%s: image %q: want one of %v with a tag that stands for one build", at, container.Image, images)
	}
	seen := map[string]bool{}
	for _, e := range container.Env {
		if seen[e.Name] {
			c.wrong("%s: %s is set twice", at, e.Name)
		}
		seen[e.Name] = true
		c.checkEnv(at, w, e)
	}
	c.checkDiscovery(at, container)
	if name == "berth" || name == "berth-nodeagent" {
		c.findings = append(c.findings, c.commands.checkCommand(w, container)...)
	}
	if len(container.Resources.Requests) == 0 || container.Resources.Limits.Memory().IsZero() {
		c.wrong("%s: wants requests, and a limit of memory", at)
	}
	ports := map[string]int32{}
	for _, p := range container.Ports {
		if _, twice := ports[p.Name]; twice || p.Name == "" {
			c.wrong("%s: port %d has no name of its own", at, p.ContainerPort)
		}
		ports[p.Name] = p.ContainerPort
	}
	c.checkProbes(at, w, container, ports)
}

func (c *checker) checkEnv(at string, w workload, e corev1.EnvVar) {
	switch from := e.ValueFrom; {
	case from == nil:
		// An empty variable is unset; to write one is a mistake.
		if e.Value == "" {
			c.wrong("%s: %s is empty", at, e.Name)
		}
		c.checkAddresses(at, e)
	case from.SecretKeyRef != nil:
		c.checkSecret(w.object, from.SecretKeyRef.Name, from.SecretKeyRef.Key)
	case from.ConfigMapKeyRef != nil:
		c.checkConfigMap(w.object, from.ConfigMapKeyRef.Name, from.ConfigMapKeyRef.Key)
	}
}

// serviceAddress is a Service's name in the cluster's DNS, and a port of it.
var serviceAddress = regexp.MustCompile(`([a-z0-9-]+)\.([a-z0-9-]+)\.svc(?:\.cluster\.local)?:([0-9]+)`)

// checkAddresses: where a value names a Service, it is there and has the port.
func (c *checker) checkAddresses(at string, e corev1.EnvVar) {
	for _, found := range serviceAddress.FindAllStringSubmatch(e.Value, -1) {
		name, namespace, port := found[1], found[2], found[3]
		if !c.serves(namespace, name, func(p corev1.ServicePort) bool { return strconv.Itoa(int(p.Port)) == port }) {
			c.wrong("%s: %s: no Service %s/%s with port %s", at, e.Name, namespace, name, port)
		}
	}
}

// checkDiscovery: where a scheduler looks for nodes there is a Service with that port.
func (c *checker) checkDiscovery(at string, container corev1.Container) {
	const prefix = "BERTH_SCHEDULER_DISCOVERY_KUBERNETES_"
	set := map[string]string{}
	for _, e := range container.Env {
		set[e.Name] = e.Value
	}
	if set["BERTH_SCHEDULER_DISCOVERY_MODE"] != "kubernetes" {
		return
	}
	namespace, name, port := set[prefix+"NAMESPACE"], set[prefix+"SERVICE_NAME"], set[prefix+"PORT"]
	if !c.serves(namespace, name, func(p corev1.ServicePort) bool { return p.Name == port || strconv.Itoa(int(p.Port)) == port }) {
		c.wrong("%s: discovers nodes by Service %s/%s and port %q, which is not there", at, namespace, name, port)
	}
}

// serves reports whether a Service has a port that is wanted.
func (c *checker) serves(namespace, name string, wanted func(corev1.ServicePort) bool) bool {
	found, _ := c.find("Service", namespace, name)
	service, ok := found.value.(*corev1.Service)
	return ok && slices.ContainsFunc(service.Spec.Ports, wanted)
}

// opsPaths are what every service answers about itself on its ops port.
var opsPaths = []string{"/healthz", "/readyz"}

func (c *checker) checkProbes(at string, w workload, container corev1.Container, ports map[string]int32) {
	probes := map[string]*corev1.Probe{
		"startup": container.StartupProbe, "readiness": container.ReadinessProbe, "liveness": container.LivenessProbe,
	}
	for name, p := range probes {
		if p == nil || p.HTTPGet == nil {
			continue
		}
		if _, ok := ports[p.HTTPGet.Port.StrVal]; !ok {
			c.wrong("%s: its %s probe asks port %q, which it does not have", at, name, p.HTTPGet.Port.String())
		}
		if !slices.Contains(opsPaths, p.HTTPGet.Path) {
			c.wrong("%s: its %s probe asks %s; there are %v", at, name, p.HTTPGet.Path, opsPaths)
		}
	}
	if w.kind == "Job" || slices.ContainsFunc(w.pod.Spec.InitContainers, func(i corev1.Container) bool { return i.Name == container.Name }) {
		return
	}
	if container.ReadinessProbe == nil {
		c.wrong("%s: no readiness probe: it gets work before it can do any", at)
	}
	if l := container.LivenessProbe; l != nil && l.HTTPGet != nil && l.HTTPGet.Path == "/readyz" {
		c.wrong("%s: liveness asks /readyz: a database that is away would end every replica", at)
	}
}

// stopTimes are what a service may take to stop beside the times of its flags.
var stopTimes = map[string]time.Duration{"scheduler": 20 * time.Second, "gateway": 15 * time.Second, "nodeagent": 0}

// checkGrace: SIGKILL must not come before the time that the flags promise has passed.
func (c *checker) checkGrace(w workload) {
	for _, container := range w.pod.Spec.Containers {
		rest, service := stopTimes[container.Name]
		if !service {
			continue
		}
		needed := rest
		for _, arg := range container.Args {
			flag, value, _ := strings.Cut(arg, "=")
			if flag != "--drain-delay" && flag != "--stream-grace" && flag != "--stop-timeout" {
				continue
			}
			d, err := time.ParseDuration(value)
			if err != nil {
				c.wrong("%v: %s: %v", w.object, arg, err)
			}
			needed += d
		}
		given := 30 * time.Second // Kubernetes' default
		if s := w.pod.Spec.TerminationGracePeriodSeconds; s != nil {
			given = time.Duration(*s) * time.Second
		}
		if given <= needed {
			c.wrong("%v: is killed after %v and may take %v to stop", w.object, given, needed)
		}
	}
}

func (c *checker) checkBinding(o object, b *rbacv1.RoleBinding) {
	if b.RoleRef.Kind != "Role" || !c.has("Role", o.namespace, b.RoleRef.Name) {
		c.wrong("%v: no %s %s", o, b.RoleRef.Kind, b.RoleRef.Name)
	}
	for _, s := range b.Subjects {
		if !c.has(s.Kind, s.Namespace, s.Name) {
			c.wrong("%v: no %s %s/%s", o, s.Kind, s.Namespace, s.Name)
		}
	}
}
