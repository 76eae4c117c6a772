"""The *restricted* Pod Security Standard, as its published table says it; what a pod violates, one sentence each.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ . Written for tests: it knows Linux pods alone.
"""

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}  # fmt: skip
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SECCOMP = {"RuntimeDefault", "Localhost"}
APPARMOR = {None, "RuntimeDefault", "Localhost"}
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"


def violations(metadata, spec):
    """What the standard forbids in this pod."""
    pod = spec.get("securityContext") or {}
    found = []
    if (spec.get("os") or {}).get("name") == "windows" or (pod.get("windowsOptions") or {}).get("hostProcess"):
        found.append("not a Linux pod")
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    for key, value in (metadata.get("annotations") or {}).items():
        if key.startswith(APPARMOR_ANNOTATION) and value != "runtime/default" and not value.startswith("localhost/"):
            found.append(f"annotation {key}")
    for volume in spec.get("volumes") or ():
        kinds = set(volume) - {"name"}
        found += [f"volume {volume['name']} is a {kind}" for kind in kinds - VOLUMES]
    found += [f"sysctl {one['name']}" for one in pod.get("sysctls") or () if one["name"] not in SYSCTLS]
    found += _context("pod", pod)
    if pod.get("runAsUser") == 0:
        found.append("pod: runAsUser 0")
    kinds = ("initContainers", "containers", "ephemeralContainers")
    for container in [one for kind in kinds for one in spec.get(kind) or ()]:
        found += _container(container, pod)
    return found


def _context(name, context):
    found = []
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        found.append(f"{name}: seLinuxOptions")
    if (context.get("appArmorProfile") or {}).get("type") not in APPARMOR:
        found.append(f"{name}: appArmorProfile")
    return found


def _container(container, pod):
    name = container["name"]
    own = container.get("securityContext") or {}
    found = _context(name, own)
    if own.get("privileged"):
        found.append(f"{name}: privileged")
    if own.get("allowPrivilegeEscalation") is not False:
        found.append(f"{name}: allowPrivilegeEscalation")
    if own.get("procMount") not in {None, "Default"}:
        found.append(f"{name}: procMount")
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()):
        found.append(f"{name}: capabilities.drop")
    if set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        found.append(f"{name}: capabilities.add")
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        found.append(f"{name}: runAsNonRoot")
    if own.get("runAsUser") == 0:
        found.append(f"{name}: runAsUser 0")
    if (own.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in SECCOMP:
        found.append(f"{name}: seccompProfile")
    return found + _addresses(name, container)


def _addresses(name, container):
    found = [f"{name}: hostPort" for port in container.get("ports") or () if port.get("hostPort")]
    probes = ("livenessProbe", "readinessProbe", "startupProbe")
    found += [f"{name}: {probe}" for probe in probes if ((container.get(probe) or {}).get("httpGet") or {}).get("host")]
    for hook in ("postStart", "preStop"):
        handler = (container.get("lifecycle") or {}).get(hook) or {}
        if any((handler.get(kind) or {}).get("host") for kind in ("httpGet", "tcpSocket")):
            found.append(f"{name}: {hook} host")
    return found
