{{/* What every pod of ours is like. */}}

{{- define "moonpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
fsGroup: {{ int64 .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* (root, rdma): rdma: the container registers memory with a device. */}}
{{- define "moonpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .rdma }}
  add: [IPC_LOCK]
  {{- end }}
{{- end }}

{{/* A pod's address is what its processes bind to and announce. Secrets are files; variables name none of them. */}}
{{- define "moonpool.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: MOONPOOL_CLUSTER_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: MOONPOOL_CLUSTER_PROBE_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /home/moonpool
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, port): the probe port's name. */}}
{{- define "moonpool.probes" -}}
startupProbe:
  httpGet: {path: /live, port: {{ .port }}}
  periodSeconds: {{ .root.Values.probes.startup.periodSeconds }}
  timeoutSeconds: {{ .root.Values.probes.startup.timeoutSeconds }}
  failureThreshold: {{ .root.Values.probes.startup.failureThreshold }}
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}}
  periodSeconds: {{ .root.Values.probes.liveness.periodSeconds }}
  timeoutSeconds: {{ .root.Values.probes.liveness.timeoutSeconds }}
  failureThreshold: {{ .root.Values.probes.liveness.failureThreshold }}
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}}
  periodSeconds: {{ .root.Values.probes.readiness.periodSeconds }}
  timeoutSeconds: {{ .root.Values.probes.readiness.timeoutSeconds }}
  failureThreshold: {{ .root.Values.probes.readiness.failureThreshold }}
{{- end }}

{{/* (root, gateway, store, sidecar): files that a process reads. Both know tenants; only gateways answer by HTTPS. */}}
{{- define "moonpool.mounts" -}}
{{- $v := .root.Values }}
- {name: config, mountPath: /etc/moonpool/config, readOnly: true}
- {name: keys, mountPath: /etc/moonpool/keys, readOnly: true}
- {name: home, mountPath: /home/moonpool}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /run/moonpool/state}
{{- if eq $v.tls.mode "csi" }}
- {name: {{ ternary "tls-store" "tls" (default false .sidecar) }}, mountPath: /run/moonpool/tls, readOnly: true}
{{- end }}
{{- if $v.etcd.tls.existingSecret }}
- {name: etcd-tls, mountPath: /etc/moonpool/etcd-tls, readOnly: true}
{{- end }}
{{- if $v.etcd.user }}
- {name: etcd-user, mountPath: /etc/moonpool/etcd-user, readOnly: true}
{{- end }}
{{- if or $v.model.existingClaim $v.model.hostPath }}
- {name: model, mountPath: {{ $v.model.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if and (or .gateway .store) $v.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/moonpool/api-keys, readOnly: true}
{{- end }}
{{- if and .gateway $v.https.existingSecret }}
- {name: https, mountPath: /etc/moonpool/https, readOnly: true}
{{- end }}
{{- end }}

{{/* (root, gateway, store, party): party names the certificate: whose role it is. */}}
{{- define "moonpool.volumes" -}}
{{- $root := .root }}
{{- $v := .root.Values }}
- name: config
  configMap:
    name: {{ include "moonpool.fullname" $root }}
- name: keys
  secret:
    secretName: {{ required "keys.existingSecret: empty; make one: kubectl create secret generic moonpool-keys --from-file=hash.key" $v.keys.existingSecret | quote }}
    defaultMode: 0440
    items:
      - {key: {{ $v.keys.hashKey | quote }}, path: hash.key}
      {{- if $v.kvEncryption }}
      - {key: {{ $v.keys.kvKey | quote }}, path: kv.key}
      {{- end }}
- name: home
  emptyDir:
    sizeLimit: {{ $v.homeSizeLimit }}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: state
  emptyDir:
    sizeLimit: 1Gi
{{- if eq $v.tls.mode "csi" }}
{{ include "moonpool.tlsVolume" (dict "root" $root "name" "tls" "member" (printf "%s/${POD_NAME}" .party)) }}
{{- end }}
{{- if $v.etcd.tls.existingSecret }}
- name: etcd-tls
  secret: {secretName: {{ $v.etcd.tls.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- if $v.etcd.user }}
- name: etcd-user
  secret: {secretName: {{ required "etcd.password.existingSecret: empty, but etcd.user is set" $v.etcd.password.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- if $v.model.existingClaim }}
- name: model
  persistentVolumeClaim: {claimName: {{ $v.model.existingClaim | quote }}, readOnly: true}
{{- else if $v.model.hostPath }}
- name: model
  hostPath: {path: {{ $v.model.hostPath | quote }}, type: Directory}
{{- end }}
{{- if and (or .gateway .store) $v.apiKeys.existingSecret }}
- name: api-keys
  secret: {secretName: {{ $v.apiKeys.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- if and .gateway $v.https.existingSecret }}
- name: https
  secret: {secretName: {{ $v.https.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* (root, grace, api): the head of every pod's specification. api: it talks to Kubernetes, under the operator's account. */}}
{{- define "moonpool.podHead" -}}
{{- if not .api -}}
serviceAccountName: {{ include "moonpool.serviceAccount" .root | quote }}
{{ end -}}
automountServiceAccountToken: {{ default false .api }}
enableServiceLinks: false  # they would make variables that begin with MOONPOOL_, which are settings
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- include "moonpool.podSecurity" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (root, where, spread): where: a component's own nodeSelector, tolerations, affinity, priorityClassName. */}}
{{- define "moonpool.placement" -}}
{{- with .where.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .where.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .where.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (root, component, group, own): spread over hosts and zones; `own` constraints replace these. */}}
{{- define "moonpool.spread" -}}
topologySpreadConstraints:
{{- if .own }}
  {{- toYaml .own | nindent 2 }}
{{- else }}
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "moonpool.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "moonpool.annotations" -}}
checksum/config: {{ include "moonpool.toml" .root | sha256sum }}
{{- with .own }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, w, store): what a pod of workers asks for, with accelerators and devices; store: a store node is in it, too. */}}
{{- define "moonpool.workerResources" -}}
{{- $v := .root.Values -}}
{{- $gib := int64 .w.memoryGiB -}}
{{- if .store -}}{{- $gib = add $gib (int64 $v.store.poolGiB) (int64 $v.store.overheadGiB) -}}{{- end -}}
{{- $more := dict "memory" (printf "%dGi" (int64 $gib)) -}}
{{- if .w.gpu.count -}}{{- $_ := set $more .w.gpu.resource .w.gpu.count -}}{{- end -}}
{{- if $v.rdma.enabled -}}{{- $_ := set $more $v.rdma.resource $v.rdma.count -}}{{- end -}}
{{- if $v.store.hugepages.amount -}}{{- $_ := set $more (printf "hugepages-%s" $v.store.hugepages.size) $v.store.hugepages.amount -}}{{- end -}}
{{- $limits := deepCopy $more -}}
{{- if .w.cpuLimit -}}{{- $_ := set $limits "cpu" .w.cpuLimit -}}{{- end -}}
{{- dict "requests" (merge (dict "cpu" .w.cpu) $more) "limits" $limits | toYaml -}}
{{- end }}

{{/* (root, name, member): a certificate that names PARTY/MEMBER, made for each pod and renewed by the driver. */}}
{{- define "moonpool.tlsVolume" -}}
{{- $t := .root.Values.tls -}}
- name: {{ .name }}
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ required "tls.issuer.name: empty; name the cert-manager issuer of this cluster's certificates" $t.issuer.name | quote }}
      csi.cert-manager.io/issuer-kind: {{ $t.issuer.kind | quote }}
      csi.cert-manager.io/issuer-group: {{ $t.issuer.group | quote }}
      csi.cert-manager.io/dns-names: {{ printf "%s.moonpool" (include "moonpool.cluster" .root) | quote }}
      csi.cert-manager.io/uri-sans: {{ printf "moonpool://%s/%s" (include "moonpool.cluster" .root) .member | quote }}
      csi.cert-manager.io/key-usages: "digital signature,key encipherment,server auth,client auth"
      csi.cert-manager.io/duration: {{ $t.duration | quote }}
      csi.cert-manager.io/ca-file: ca.crt
      csi.cert-manager.io/certificate-file: tls.crt
      csi.cert-manager.io/privatekey-file: tls.key
      csi.cert-manager.io/fs-group: {{ int64 .root.Values.user | toString | quote }}
{{- end }}

{{/* (root, own): a group's own affinity; where hosts have store nodes, workers go where one is. */}}
{{- define "moonpool.workerAffinity" -}}
{{- $affinity := deepCopy .own -}}
{{- if include "moonpool.shared" .root -}}
{{- $near := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "moonpool.selector" (dict "root" .root "component" "store") | fromYaml)) -}}
{{- $pods := default dict $affinity.podAffinity -}}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $_ := set $pods $key (prepend (default list (get $pods $key)) $near) -}}
{{- $_ := set $affinity "podAffinity" $pods -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end }}

{{/* Ends once the gateways serve. */}}
{{- define "moonpool.waitContainer" -}}
name: wait
image: {{ include "moonpool.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [python3, -c]
args:
  - |
    import ssl, time, urllib.request
    url, end = "{{ include "moonpool.url" . }}/ready", time.monotonic() + 3600
    while True:
        try:
            print(urllib.request.urlopen(url, timeout=10, context=ssl._create_unverified_context()).read().decode())
            break
        except OSError as e:
            if time.monotonic() > end:
                raise
            print(f"{url}: {e}", flush=True)
            time.sleep(5)
resources:
  requests: {cpu: 50m, memory: 64Mi}
  limits: {memory: 128Mi}
securityContext:
  {{- include "moonpool.containerSecurity" (dict "root" . "rdma" false) | nindent 2 }}
{{- end }}
